"""The meter of a prediction: it adds what CUDA's kernels and libraries allocate themselves.

scratch     buffers of one kernel, from shapes (scratch.py)
workspaces  of cuBLAS and cuBLASLt once per thread, of cuDNN for each convolution
4 bits      bitsandbytes' operators as the operators that their CUDA kernels call
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from memlab.configs.targets import Kernels, Target
from memlab.internals.torch_internals import DisableTorchFunction
from memlab.metering.casts import Casts
from memlab.metering.registry import REGISTRY
from memlab.metering.storages import StorageMeter
from memlab.prediction import attention_backward, bitsandbytes_kernels, convolutions
from memlab.prediction.scratch import scratch_bytes
from memlab.prediction.substitutes import Substitutes
from memlab.trace import EMPTY_CACHE

# Fake tensors treat this device as different from "cpu"; the dispatcher treats both as the CPU.
CUDA = torch.device("cpu", 0)
_CONVOLUTIONS = (convolutions.FORWARD, convolutions.BACKWARD)
_ALLOCATED_FIRST = {  # how many of the last results
    torch.ops.aten.native_dropout.default: 1,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 2,
}
_EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


class Prediction(Protocol):
    """What the meter reads of the dry run and notes in it."""

    kernels: Kernels
    target: Target
    substitutes: Substitutes
    workspaces: dict[tuple[str, bool], torch.Tensor]
    has_convolutions: bool
    largest_workspaces: dict[int, int]
    meter: "PredictionMeter | None"

    def bitsandbytes(self) -> bitsandbytes_kernels.Kernels: ...


def buffer(count: int) -> torch.Tensor:
    with DisableTorchFunction():
        return torch.empty(count, dtype=torch.uint8, device=CUDA)


class PredictionMeter(StorageMeter):
    """Meter a prediction, with CUDA's decompositions and workspaces."""

    def __init__(self, prediction: Prediction, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prediction = prediction
        self._in_kernel = False  # inside a CUDA kernel of bitsandbytes
        self._casts = Casts(cpu_list=prediction.kernels.autocast)

    def set_subject(self, subject: Any) -> None:
        """Set the metered subject, so that a later meter of it counts storages left alive here."""
        self._stream.run.set_subject(subject)

    def __enter__(self) -> "PredictionMeter":
        super().__enter__()
        self._known_workspaces = len(self._prediction.workspaces)
        self._prediction.meter = self
        for workspace in self._prediction.workspaces.values():
            self._scanner.scan(workspace, "workspace", "")
        return self

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if bitsandbytes_kernels.is_operator(func) and _has_cuda(args):
            return self._run_bitsandbytes(func, args, kwargs)
        if self._in_kernel and (parts := self._decomposition(func)):
            with self.reenter():
                return parts(*args, **kwargs)
        result = super().handle(func, types, args, kwargs)
        if result is NotImplemented:  # a tensor subclass, such as DTensor, runs its own operators
            return result
        if func in _CONVOLUTIONS:
            self._note_largest(func, args, result)
        self._note_workspaces(func)
        return result

    def _in_order_of_allocation(self, func: Any, results: list[torch.Tensor]) -> list[torch.Tensor]:
        # native/cuda/Dropout.cu allocates the mask, the second result, before the output; cuDNN's
        # attention its random seed and offset, the last ones (recorded on an H200).
        last = _ALLOCATED_FIRST.get(func, 0)
        return results[len(results) - last :] + results[: len(results) - last]

    def _scratch(self, func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[Sequence[int]]:
        if func in _CONVOLUTIONS:
            yield from convolutions.scratch_bytes(func, args, result, self._prediction.target)
        else:
            if func is _EFFICIENT_BACKWARD:
                yield attention_backward.efficient_product(args[0])
            yield scratch_bytes(func, args, kwargs, result, self._prediction.target)

    def _decomposition(self, func: Any) -> Callable[..., Any] | None:
        return self._prediction.substitutes.replacements.get(func) or super()._decomposition(func)

    def _run_bitsandbytes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator as the operators that its CUDA kernel calls."""
        outer, self._in_kernel = self._in_kernel, True
        try:
            with self.reenter():
                return bitsandbytes_kernels.run(self._prediction.bitsandbytes(), func, args, kwargs)
        finally:
            self._in_kernel = outer

    def note_empty_cache(self, nothing: torch.Tensor) -> None:
        """Record that the cache is emptied, with a tensor of no bytes."""
        self._enter_workspace(nothing, EMPTY_CACHE)

    def _note_workspaces(self, func: Any) -> None:
        """Record workspaces that an operator was the first to use."""
        workspaces = self._prediction.workspaces
        if len(workspaces) > self._known_workspaces:
            for workspace in list(workspaces.values())[self._known_workspaces :]:
                self._enter_workspace(workspace, func)
            self._known_workspaces = len(workspaces)

    def _note_largest(self, func: Any, args: Any, result: Any) -> None:
        """Note the largest workspace that cuDNN may choose for a convolution."""
        self._prediction.has_convolutions = True
        results = [result] if isinstance(result, torch.Tensor) else result
        made = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        largest = convolutions.largest_bytes(func, args, result, self._prediction.target)
        if largest is not None and made and (record := REGISTRY.find(made[-1])):
            # By number, not as an event after the convolution: the rules for in-place sums look at
            # the next operator. A marker there made gradients accumulate out of place, 2 to 3 %
            # more for ResNets.
            self._prediction.largest_workspaces[record.number] = largest

    def _enter_workspace(self, tensor: torch.Tensor, func: Any) -> None:
        record = REGISTRY.add(tensor, self._stream.run)
        record.operator, record.phase = func, self.context.last_phase
        record.mark("workspace")
        self._stream.add(record)


def _has_cuda(arguments: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.device == CUDA for x in arguments)
