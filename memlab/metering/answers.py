"""What a device is asked about its own memory while a step runs, and what it answers.

The meter knows the storages that operators make. The device's allocator knows what it handed
out: more than was asked for, and to more than storages, because kernels and the libraries below
them ask it too. A Watch puts the questions before and after the step; Answers are plain data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

_ALLOCATED_NOW = "allocated_bytes.all.current"
_ALLOCATED_PEAK = "allocated_bytes.all.peak"
_RESERVED_PEAK = "reserved_bytes.all.peak"


class Mark(NamedTuple):
    """What the meter told the allocator before an operator ran: it stands on every entry of the
    history from then on. `seen` is the number of storages that the meter had numbered by then."""

    seen: int = 0
    phase: str = "forward"
    operator: str = ""
    module: str = ""

    def __str__(self) -> str:
        return "|".join(map(str, self))


class Block(NamedTuple):
    """Bytes that an allocator hands out: so many were asked for, so many are taken."""

    asked: int
    taken: int


class Entry(NamedTuple):
    """One line of an allocator's history: a block handed out or taken back."""

    is_free: bool
    address: int
    block: Block
    mark: Mark


@dataclass(frozen=True)
class Answers:
    """What a device said of one metered run, in bytes; None where it does not answer."""

    device: torch.device
    allocated_at_start: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    used_bytes: int | None = None  # what the driver shows, at the end
    granularity: int = 1  # sizes are rounded up to a multiple of it
    history: tuple[Entry, ...] | None = None
    blocks_at_start: dict[int, Block] = field(default_factory=dict)  # by address, if it has one
    notes: tuple[str, ...] = ()


class Watch:
    """Asks nothing: no one counts what a CPU hands out, and meta tensors have no bytes."""

    mark: Callable[[Any, str, str], None] | None = None
    """To be called before each operator, with it, the phase and the module; None: no need."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Put the questions that come before the step."""

    def stop(self) -> Answers:
        """Put the questions that come after it."""
        return Answers(self.device)


class Accelerator:
    """The functions of torch that an AllocatorWatch calls, in one place that can be replaced."""

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


class AllocatorWatch(Watch):
    """A device whose allocator counts what it hands out.

    The count of its peak starts anew when the step starts, as with `reset_peak_memory_stats`.
    """

    granularity = 1

    def __init__(self, device: torch.device, functions: Accelerator) -> None:
        super().__init__(device)
        self._torch = functions

    def start(self) -> None:
        self._torch.synchronize(self.device)
        self._torch.reset_peak(self.device)
        self._allocated_at_start = self._torch.stats(self.device).get(_ALLOCATED_NOW)

    def stop(self) -> Answers:
        self._torch.synchronize(self.device)
        stats = self._torch.stats(self.device)
        return Answers(
            self.device,
            allocated_at_start=self._allocated_at_start,
            allocated_peak_bytes=stats.get(_ALLOCATED_PEAK) or None,  # 0: it does not count
            reserved_peak_bytes=stats.get(_RESERVED_PEAK) or None,
            used_bytes=self._torch.used_bytes(self.device),
            granularity=self.granularity,
            notes=self._torch.notes(self.device),
        )
