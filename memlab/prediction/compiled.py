"""What torch.compile's compilers find in a prediction: the target's GPU, and tensors on it.

To the dispatcher, tensors on CUDA are on the stand-in, a fake device of type "cpu" for which this
build of torch has kernels. To Dynamo's and Inductor's Python code they are on "cuda:0", so that it
decomposes operators and generates code as for that GPU. Only `torch._subclasses`, which implements
fake tensors, sees the stand-in.
"""

from collections.abc import Callable
from typing import Any

import torch

from memlab.configs.targets import Target
from memlab.dry_runs.fake_accelerator import Generator, StandIn
from memlab.internals.replacing import always
from memlab.prediction.fake_gpu import properties
from memlab.world.entering import ByName, Replacements

_CUDA = torch.device("cuda", 0)
IMPLEMENTATION = ("torch._subclasses", "memlab")


class _Generator(Generator):
    """A GPU's generator. Compiled code passes it to random operators; nothing draws from it."""

    device = _CUDA

    def clone_state(self) -> "_Generator":
        return self


def generators(count: int) -> Callable[[Any], tuple[Generator, ...]]:
    """Return what replaces the generators of this many GPUs."""
    return always((_Generator(),) * count)


def generator_of(real: Any) -> Callable[[int], Generator]:
    """Return what gives a GPU's generator to torch from 2.14 on."""
    return lambda index: _Generator()


def device_of_buffers(device: str) -> torch.device:
    """Return the device of a buffer of generated code: the stand-in, if the script names CUDA."""
    return _stand_in() if device == _CUDA.type else torch.device(device)


def _stand_in() -> torch.device:
    """Return the device of tensors on CUDA. Without any, all tensors count as CUDA's."""
    return torch.device(StandIn.device if StandIn.was_named else "cpu")


def stand_ins(target: Target) -> Replacements:
    """Return what the compilers find."""
    answers = {"synchronize": None, "get_device_properties": properties(target)}
    return {
        "kernels_device": _on_stand_in,
        "graphs_device": _on_cuda,
        "folded_on_cpu": _folded,
        "compilers_gpu": ByName(
            lambda name: always(staticmethod(_answering(answers.get(name, 0))))
        ),
        "has_triton": lambda real: lambda **_: True,
        "tritons_key": lambda real: lambda: "",
        "guarded_by_nothing": lambda real: lambda *args: "__import__('contextlib').nullcontext()",
        "set_nowhere": lambda real: lambda *args: "pass",
    }


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *args: answer


def is_on_cuda(device: torch.device) -> bool:
    """Return whether a fake tensor on this device counts as CUDA's."""
    return device == _stand_in() or (device.type == "cpu" and not StandIn.was_named)


def _on_stand_in(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Run fake kernels for CUDA on the stand-in."""

    def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(mode, func, types, *_moved(args, kwargs or {}, _is_cuda, _stand_in()))

    return dispatched


def _on_cuda(record: Callable[..., Any]) -> Callable[..., Any]:
    """Record operators on the stand-in, as C++ code calls them, on CUDA."""

    def recorded(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        return record(mode, func, pre_dispatch, *_moved(args, kwargs, is_on_cuda, _CUDA))

    return recorded


def _folded(value_of: Callable[..., Any]) -> Callable[..., Any]:
    """Compute constants, which Inductor makes on the GPU, on the CPU."""

    def folded(folder: Any, node: Any) -> Any:
        before = node.args, node.kwargs
        node.args, node.kwargs = _moved(*before, _is_cuda, torch.device("cpu"))
        try:
            return value_of(folder, node)
        finally:
            node.args, node.kwargs = before

    return folded


def _moved(
    args: Any, kwargs: Any, moves: Callable[[torch.device], bool], to: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an operator's arguments with other devices."""

    def moved(argument: Any) -> Any:
        return to if isinstance(argument, torch.device) and moves(argument) else argument

    return tuple(map(moved, args)), {name: moved(value) for name, value in kwargs.items()}


def _is_cuda(device: torch.device) -> bool:
    return device.type == _CUDA.type
