"""How every kernel here is started.

A kernel is a function for one tile; Triton compiles it for the GPU at hand and starts one program
for each tile. With TRITON_INTERPRET=1 in the environment before this is imported, the same
functions run on a CPU, program by program, in numpy: slowly, and to the same results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from memlab.internals.torch_internals import FakeTensor, disable_dynamo

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED and isinstance(tl.sum, triton.JITFunction):
    raise ImportError(
        "got TRITON_INTERPRET=1 after Triton had been imported, too late for its own functions; "
        "set it before Python starts"
    )

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Inside, `observer(kernel, arguments, constants)` is told of every launch, dry ones too."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@disable_dynamo  # torch.compile would have to know what a kernel writes to; it steps aside
def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel` once for each place of `grid`; where tensors have no values, don't.

    RuntimeError for tensors on several devices, and on a CPU, unless the interpreter is on; and
    where torch.export or make_fx records operators: a kernel is none.
    """
    for observer in _observers:
        observer(kernel, arguments, constants)
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    device = _one_device(tensors)
    if any(has_no_values(x) for x in tensors):
        _require_no_recording()
        return
    if 0 in grid:
        return
    if INTERPRETED:
        with np.errstate(all="ignore"):  # an infinity is a number here as on a GPU
            kernel[grid](*arguments, **constants)
        return
    require_gpu(device)
    with torch.cuda.device(device):
        kernel[grid](*arguments, **constants)


def _require_no_recording() -> None:
    """What records a step from tensors without values would leave the kernel out of it."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is not None:
        raise RuntimeError(
            "got a recording of operators (torch.export or make_fx), which a Triton kernel of "
            "memlab is not part of; record memlab.attention's, memlab.losses' or memlab.optim's"
        )


def _one_device(tensors: list[Tensor]) -> torch.device:
    first, *others = dict.fromkeys(x.device for x in tensors)
    if others:
        raise RuntimeError(
            f"got tensors on {first} and on {others[0]}; move all that one kernel takes to one of "
            f"them"
        )
    return first


def require_gpu(device: torch.device) -> None:
    """RuntimeError where a kernel cannot run."""
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"got tensors on {device}, and Triton's kernels run on a GPU; move them there, or set "
            f"TRITON_INTERPRET=1 before Python starts to try the kernels on a CPU, slowly"
        )


_targets: list[int] = []


@contextmanager
def targeting(capability: int) -> Iterator[None]:
    """Inside, every device is said to be of this compute capability: 89 is 8.9."""
    _targets.append(capability)
    try:
        yield
    finally:
        _targets.pop()


def capability_of(device: torch.device) -> int | None:
    """The compute capability that a kernel's tiles are chosen for; None if that is not known."""
    if _targets:
        return _targets[-1]
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_no_values(x: Tensor) -> bool:
    """Whether it is of a dry run: a shape, a dtype, and nothing to compute."""
    return x.is_meta or isinstance(x, FakeTensor)


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` hold `count`."""
    return -(-count // size)
