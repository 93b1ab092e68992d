"""Memory statistics from a device's own allocator, read before and after a step.

The meter counts the storages that operators allocate. The device's allocator counts more: it
rounds sizes up, and kernels and libraries such as cuBLAS also allocate from it. A DeviceMonitor
reads the statistics; DeviceStats are plain data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

_ALLOCATED_NOW = "allocated_bytes.all.current"
_ALLOCATED_PEAK = "allocated_bytes.all.peak"
_RESERVED_PEAK = "reserved_bytes.all.peak"


class HistoryTag(NamedTuple):
    """A tag set before each operator. The allocator copies it to its history entries.

    `last_number` is the number of the newest storage when the tag was set.
    """

    last_number: int = 0
    phase: str = "forward"
    operator: str = ""
    module: str = ""

    def __str__(self) -> str:
        return "|".join(map(str, self))


class BlockSize(NamedTuple):
    """A block's requested bytes, and its size after the allocator rounded it up."""

    requested: int
    rounded: int


class HistoryEntry(NamedTuple):
    """One allocation or free in an allocator's history."""

    is_free: bool
    address: int
    block: BlockSize
    tag: HistoryTag


@dataclass(frozen=True)
class DeviceStats:
    """A device's statistics of one metered step, in bytes; None if the device has none."""

    device: torch.device
    allocated_at_start: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    used_bytes: int | None = None  # reported by the driver at the end
    granularity: int = 1  # the allocator rounds sizes up to a multiple of this
    history: tuple[HistoryEntry, ...] | None = None
    blocks_at_start: dict[int, BlockSize] = field(default_factory=dict)  # by address
    notes: tuple[str, ...] = ()


class DeviceMonitor:
    """A device without statistics: the CPU's allocator keeps none, and meta tensors have no bytes.

    Call `tag(operator, phase, module)` before each operator, unless it is None.
    """

    tag: Callable[[Any, str, str], None] | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Start collecting, before the step."""

    def stop(self) -> DeviceStats:
        """Stop collecting, after the step."""
        return DeviceStats(self.device)


class Accelerator:
    """The torch functions that an AllocatorMonitor calls; tests replace them."""

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def reset_peak(self, device: torch.device) -> None:
        torch.accelerator.reset_peak_memory_stats(device)

    def stats(self, device: torch.device) -> dict[str, Any]:
        return torch.accelerator.memory_stats(device)

    def used_bytes(self, device: torch.device) -> int:
        free, total = torch.accelerator.get_memory_info(device)
        return total - free

    def notes(self, device: torch.device) -> tuple[str, ...]:
        return ()


class AllocatorMonitor(DeviceMonitor):
    """A device whose allocator keeps statistics. `start` resets its peak statistics."""

    granularity = 1

    def __init__(self, device: torch.device, functions: Accelerator) -> None:
        super().__init__(device)
        self._torch = functions

    def start(self) -> None:
        self._torch.synchronize(self.device)
        self._torch.reset_peak(self.device)
        self._allocated_at_start = self._torch.stats(self.device).get(_ALLOCATED_NOW)

    def stop(self) -> DeviceStats:
        self._torch.synchronize(self.device)
        stats = self._torch.stats(self.device)
        return DeviceStats(
            self.device,
            allocated_at_start=self._allocated_at_start,
            allocated_peak_bytes=stats.get(_ALLOCATED_PEAK) or None,  # 0 means not counted
            reserved_peak_bytes=stats.get(_RESERVED_PEAK) or None,
            used_bytes=self._torch.used_bytes(self.device),
            granularity=self.granularity,
            notes=self._torch.notes(self.device),
        )
