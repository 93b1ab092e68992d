"""`--memory` of `memlab train`: a GPU's allocator acts like that of a smaller GPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memlab.cli.errors import UsageError, quoted
from memlab.units import format_bytes, parse_bytes


def choose_cap(memory: str | None, device: str) -> int | None:
    """Return the bytes that the process may reserve on the GPU."""
    if memory is None:
        return None
    if device != "cuda":
        raise UsageError(
            f"got --memory {quoted(memory)} on the device {device}; only CUDA's allocator can be "
            f"capped, so leave --memory out"
        )
    try:
        cap_bytes = parse_bytes(memory)
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from error
    _, total_bytes = torch.cuda.mem_get_info()
    if not 0 < cap_bytes <= total_bytes:
        raise UsageError(
            f"got --memory {quoted(memory)}; give more than 0 bytes, and at most the GPU's "
            f"{format_bytes(total_bytes)}"
        )
    return cap_bytes


@contextmanager
def memory_cap(cap_bytes: int | None) -> Iterator[None]:
    """Limit what CUDA's allocator may reserve, to act like a smaller GPU."""
    if cap_bytes is None:
        yield
        return
    _, total_bytes = torch.cuda.mem_get_info()
    # torch rounds the bytes down.
    fraction = min(1.0, math.nextafter(cap_bytes / total_bytes, 1.0))
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
