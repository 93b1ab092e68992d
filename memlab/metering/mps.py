"""Memory statistics on MPS (Apple GPUs).

Metal's driver reports the memory that it holds for this process. Freed memory stays in the
allocator's cache, so this figure can far exceed the peak (11.3 GiB against 1.5 GiB in one run). It
is reported as bytes in use. The peak comes from the allocator (since torch 2.13), or else from the
storages.
"""

import contextlib
from typing import Any

import torch

from memlab.metering.device_stats import Accelerator
from memlab.units import format_bytes


class Mps(Accelerator):
    """Before torch 2.13, `torch.accelerator` raised RuntimeError for MPS."""

    def reset_peak(self, device: torch.device) -> None:
        with contextlib.suppress(RuntimeError):
            super().reset_peak(device)

    def stats(self, device: torch.device) -> dict[str, Any]:
        try:
            return super().stats(device)
        except RuntimeError:
            return {"allocated_bytes.all.current": torch.mps.current_allocated_memory()}

    def used_bytes(self, device: torch.device) -> int:
        return torch.mps.driver_allocated_memory()

    def notes(self, device: torch.device) -> tuple[str, ...]:
        recommended = format_bytes(torch.mps.recommended_max_memory())
        return (
            f"the bytes in use are Metal's memory for this process, with caches; they are not a "
            f"peak, and Metal recommends {recommended} at most",
        )
