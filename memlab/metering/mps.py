"""MPS, the GPU of Apple's machines: what Metal answers.

Metal's driver says how much it keeps for this process. That is no peak: what is freed stays in the
allocator's cache, so the figure grows with all that was ever needed (11.3 GiB were shown where the
peak was 1.5 GiB). It is shown as what it is, bytes in use. The peak is the allocator's where it
counts one (torch 2.13 does), else that of the storages.
"""

import contextlib
from typing import Any

import torch

from memlab.metering.answers import Accelerator
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
            f"the bytes in use are what Metal keeps for this process, caches included, and not a "
            f"peak; it recommends {recommended} at most",
        )
