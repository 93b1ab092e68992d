"""Launch Triton kernels.

A kernel is a function for one tile; Triton compiles it for the GPU and runs one program per tile.
With TRITON_INTERPRET=1 set before import, the same functions run on a CPU in numpy, one program at
a time: slowly, with the same results.
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
        "got TRITON_INTERPRET=1 after Triton was imported, which is too late; set it before Python "
        "starts"
    )

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer(kernel, arguments, constants)` for every launch in the block, dry ones too."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@disable_dynamo  # torch.compile cannot see which tensors a kernel writes
def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel` once for each index of `grid`; skip it for meta and fake tensors.

    Raise RuntimeError for tensors on several devices, for CPU tensors without the interpreter, and
    while torch.export or make_fx traces, because a kernel is not an operator.
    """
    for observer in _observers:
        observer(kernel, arguments, constants)
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    device = _one_device(tensors)
    if any(is_dry(x) for x in tensors):
        _require_no_tracing()
        return
    if 0 in grid:
        return
    if INTERPRETED:
        with np.errstate(all="ignore"):  # infinities do not warn on a GPU
            kernel[grid](*arguments, **constants)
        return
    require_gpu(device)
    with torch.cuda.device(device):
        kernel[grid](*arguments, **constants)


def _require_no_tracing() -> None:
    """Raise RuntimeError while operators are traced, because the trace would omit the kernel."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is not None:
        raise RuntimeError(
            "got a recording of operators (torch.export or make_fx), which cannot contain memlab's "
            "Triton kernels; use the versions in memlab.attention, memlab.losses or memlab.optim"
        )


def _one_device(tensors: list[Tensor]) -> torch.device:
    first, *others = dict.fromkeys(x.device for x in tensors)
    if others:
        raise RuntimeError(
            f"got tensors on {first} and on {others[0]}; move all tensors to one device"
        )
    return first


def require_gpu(device: torch.device) -> None:
    """Raise RuntimeError if a kernel cannot run on `device`."""
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"got tensors on {device}, and Triton kernels run on a GPU; move them there, or set "
            f"TRITON_INTERPRET=1 before Python starts to try the kernels on a CPU, slowly"
        )


_targets: list[int] = []


@contextmanager
def targeting(capability: int) -> Iterator[None]:
    """Report this compute capability for every device inside the block; 89 is 8.9."""
    _targets.append(capability)
    try:
        yield
    finally:
        _targets.pop()


def capability_of(device: torch.device) -> int | None:
    """Return the compute capability that determines tile sizes, or None if unknown."""
    if _targets:
        return _targets[-1]
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_dry(x: Tensor) -> bool:
    """Return whether a tensor has no data, as in a dry run."""
    return x.is_meta or isinstance(x, FakeTensor)


def block_count(count: int, size: int) -> int:
    """Return ⌈count / size⌉."""
    return -(-count // size)
