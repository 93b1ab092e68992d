"""Collectives in a dry run: they send nothing and finish at once.

A collective writes to tensors that already exist, so it returns them with finished work. (torch
handles functional collectives, which allocate results, except for their wait.) Memory that a
backend allocates for communication is not counted.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from memlab.dry_runs.fake_accelerator import StandIn
from memlab.dry_runs.transfers import Transfer, transfer_of
from memlab.internals.torch_internals import (
    DisableTorchFunction,
    disable_current_modes,
    finished_work,
    load_parallel_parts,
    tree_map_only,
)
from memlab.metering.tensors import tensors_among

COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators


class Collectives:
    """The collectives of a dry run.

    transfers   what they have sent, as on a real rank
    """

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        # torch keeps the result of a functional collective until somebody waits for it
        self._unwaited: dict[int, torch.Tensor] = {}

    def run(self, func: Any, args: Any) -> Any:
        """Record what the operator sends, and return its result: NotImplemented if torch has it."""
        self.transfers += filter(None, [transfer_of(func, args)])
        if func.namespace == "c10d":
            return _finished(func, args)
        if func.__name__ != "wait_tensor.default":
            return NotImplemented
        self._unwaited.pop(id(args[0].untyped_storage()), None)
        return args[0]  # torch's fake kernel returns a new tensor

    def keep(self, result: Any) -> None:
        for each in tensors_among((result,)):
            self._unwaited[id(each.untyped_storage())] = each


def _finished(func: Any, args: Any) -> Any:
    """Return the collective's outputs, which are its first argument, and finished work.

    The work holds what a rank sends or receives, as on a real rank: gloo's as long as it exists,
    NCCL's until somebody waits for it.
    """
    outputs = args[0] if len(func._schema.returns) > 1 else None
    future: torch.futures.Future[Any] = torch.futures.Future()
    if outputs is None:
        future.set_result(_Message(args[0]) if isinstance(args[0], list) else [None])
    else:  # DDP reads its buckets
        future.set_result(outputs if isinstance(outputs, list) else [outputs])
    work = finished_work(future)
    return work if outputs is None else (outputs, work)


class _Message(list[torch.Tensor]):
    """The tensors of a send or receive."""


def _letting_go(real: Callable[..., bool]) -> Callable[..., bool]:
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        done = real(work, *args, **kwargs)
        message = work.get_future().value()
        if isinstance(message, _Message) and StandIn.device != "cpu":
            message.clear()
        return done

    return wait


def _outside_modes(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes(), DisableTorchFunction():
            return make(*args, **kwargs)

    return made


def _stand_in_of_mesh(real: Callable[[DeviceMesh], torch.device]) -> Callable[..., Any]:
    """Make FSDP2 expect its parameters on the stand-in, which holds an accelerator's tensors."""

    def device(mesh: DeviceMesh) -> Any:
        return real(mesh) if mesh.device_type == "cpu" else torch.device(StandIn.device)

    return device


def _with_streams(real: Callable[..., Any]) -> Callable[..., Any]:
    """Give FSDP2 the streams of a GPU for the stand-in, which has the type of the CPU."""

    def handle(device_type: str = "cuda") -> Any:
        # Gathered weights come from the copy-in stream's pool, reduced gradients from another, and
        # neither serves an activation. For Llama 3 8B on 8 H100s, torchtitan published 49.59 GiB;
        # the prediction is 49.74 with a pool for each stream and 43.84 with one
        # (test_fsdp2s_streams_have_pools_of_their_own_on_a_gpu).
        is_stand_in = device_type == "cpu" and StandIn.device != "cpu"
        return torch.cuda if is_stand_in else real(device_type)

    return handle


def _stand_in(real: Callable[..., torch.device]) -> Callable[..., Any]:
    """Make FSDP1 expect its parameters on the stand-in, too."""

    def device(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return found if found.type == "cpu" else torch.device(StandIn.device)

    return device


def _on_the_cpu(real: Any) -> Callable[[Any], torch.Tensor]:
    """DTensor only wants shapes. For an accelerator torch would ask for its random numbers."""

    def rebuilt(spec: Any) -> torch.Tensor:
        # On a GPU's mesh `uniform_` would draw there, which fails in a CPU build.
        shape, stride, dtype = spec.tensor_meta
        return torch.empty_strided(shape, stride, dtype=dtype)

    return rebuilt


def _on_any_device(init: Callable[..., None]) -> Callable[..., None]:
    """Make DDP without `device_ids`, which it refuses for the stand-in of a GPU: that has the type
    of the CPU. They say where inputs go."""

    @wraps(init)
    def made(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        init(self, module, None, None, *args, **kwargs)
        self.moves_inputs = bool(device_ids)

    return made


def _moving_inputs(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Move the inputs of forward to the device, as DDP with `device_ids` does."""

    def prepared(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if getattr(self, "moves_inputs", False):
            inputs, kwargs = tree_map_only(
                torch.Tensor, lambda x: x.to(StandIn.device), (inputs, kwargs)
            )
        return prepare(self, *inputs, **kwargs)

    return prepared


def _property_outside_modes(real: Any) -> property:
    return property(_outside_modes(real.fget))


def stand_ins() -> dict[str, Callable[[Any], Any]]:
    """Return stand-ins for DTensor's shape inference and for checks that read values.

    DTensor infers shapes on its own fake tensors, so it runs outside the dry run's modes. So does
    a device mesh, which computes with the numbers of ranks. DDP's check that all ranks have the
    same model is skipped, and so are its device ids.
    """
    if not dist.is_available():
        return {}
    load_parallel_parts()
    return {
        "outside_modes": _outside_modes,
        "property_outside_modes": _property_outside_modes,
        "mesh_device": _stand_in_of_mesh,
        "compute_device": _stand_in,
        "device_handle": _with_streams,
        "shape_on_cpu": _on_the_cpu,
        "ddp": _on_any_device,
        "moving_inputs": _moving_inputs,
        "work_wait": _letting_go,
    }
