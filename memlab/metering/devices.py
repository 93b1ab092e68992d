"""Combine the meter's stream with the device's statistics, so that every byte has a category.

    parameters … temporaries   storages that the meter saw, with its categories
    workspace                  allocated blocks without a storage: kernel workspaces and buffers
                               that libraries keep (from before the step, only blocks of exactly
                               cuBLAS's workspace size)
    rounding                   the part of a block beyond the requested size
    unattributed               everything else that the device counts, such as memory from before
                               the step that the meter does not recognize

With an allocator history (CUDA, ROCm), the history gives the order of events and the meter their
categories. The history also contains allocations that only the meter causes: without it, autograd
adds a gradient to `old` in place; with it, autograd allocates `new` and frees `old`. The meter
folds such pairs, so neither the allocation of `new` nor the free of `old` becomes an event: the
bytes of `old` move to the address of `new`. A note gives the overlap of the two.

Without a history, the events are the meter's, and one event at the start has the difference
between its peak and the device's. If the device has no peak (older MPS), the meter's is used.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from memlab.configs.targets import TARGETS
from memlab.metering.cuda import CudaMonitor
from memlab.metering.device_stats import (
    Accelerator,
    AllocatorMonitor,
    BlockSize,
    DeviceMonitor,
    DeviceStats,
    HistoryEntry,
)
from memlab.metering.mps import Mps
from memlab.metering.registry import Storage
from memlab.metering.storages import Change
from memlab.trace import DeviceMemory, Event, Trace
from memlab.units import format_bytes

MONITORS: dict[str, Callable[[torch.device], DeviceMonitor]] = {
    "cpu": DeviceMonitor,
    "meta": DeviceMonitor,
    "cuda": CudaMonitor,  # ROCm too
    "mps": lambda device: AllocatorMonitor(device, Mps()),
}

WORKSPACE_BYTES = {target.workspace_bytes for target in TARGETS.values()}  # per cuBLAS handle

# Event numbers for memory without a storage. Storages count up from 1, workspaces down from -3.
_FROM_BEFORE, _UNSEEN, _ROUNDING, _FIRST_WORKSPACE = 0, -1, -2, -3


def monitor_for(device: torch.device) -> DeviceMonitor:
    """Return a monitor for the device: `start()` before the step, `stop()` after it."""
    known = MONITORS.get(device.type)
    return known(device) if known else AllocatorMonitor(device, Accelerator())


class Completed(NamedTuple):
    """The parts of a Trace."""

    events: tuple[Event, ...]
    memory: DeviceMemory
    notes: tuple[str, ...]


def complete(changes: Iterable[Change], stats: DeviceStats) -> Completed:
    """Complete the meter's events on the device with the device's statistics.

    Their peak is the device's peak, minus allocations that only the meter caused.
    """
    own = [change for change in changes if _is_on(stats.device, change.record)]
    explain = _from_stream if stats.history is None else _from_history
    events, explained_peak, device_peak, warnings = explain(own, stats)
    notes = [*stats.notes, *warnings]
    if device_peak is not None:
        if unseen := device_peak - explained_peak:
            events.insert(0, _event(unseen, _UNSEEN, "unattributed", "counted by the device only"))
        unattributed = Trace(tuple(events)).at_peak.get("unattributed", 0)
        notes.append(f"{format_bytes(unattributed)} at the peak are unattributed")
    memory = DeviceMemory(device_peak, stats.reserved_peak_bytes, stats.used_bytes)
    return Completed(tuple(events), memory, tuple(notes))


class _Explained(NamedTuple):
    """Events, their peak and the device's peak."""

    events: list[Event]
    peak: int
    device_peak: int | None
    warnings: list[str]


# ------------------------------------------------------------------ without a history


def _from_stream(changes: Sequence[Change], stats: DeviceStats) -> _Explained:
    """Return the meter's events with their rounding, preceded by memory unknown at the start."""
    events: list[Event] = []
    held: dict[int, int] = defaultdict(int)  # bytes of each storage
    known_at_start = 0
    for record, num_bytes, phase in changes:
        before, after = held[record.number], held[record.number] + num_bytes
        held[record.number] = after
        rounding = -after % stats.granularity - -before % stats.granularity
        events += _with_rounding(record.event(num_bytes, phase), rounding)
        known_at_start += num_bytes + rounding if phase == "before" else 0
    unknown = (stats.allocated_at_start or 0) - known_at_start
    if unknown > 0:
        events.insert(0, _from_before(unknown))
    return _Explained(events, _peak(events), stats.allocated_peak_bytes, [])


# ------------------------------------------------------------------ with a history


def _from_history(changes: Sequence[Change], stats: DeviceStats) -> _Explained:
    """Return the history's events with the meter's categories."""
    owners = _BlockOwners(changes, stats)
    events = _named(stats, owners)
    peak = _history_peak(stats)
    warnings = []
    if (only_metered := peak - _peak(events)) > 0:
        warnings.append(
            f"the device's peak is {format_bytes(only_metered)} higher than this one: only under "
            f"the meter does autograd add these gradients out of place"
        )
    if owners.bytes_outside:
        warnings.append(
            f"{format_bytes(owners.bytes_outside)} are in storages that the device's allocator "
            f"did not allocate; they are not counted"
        )
    device_peak = max(stats.allocated_peak_bytes or 0, peak)  # the step may reset the statistic
    return _Explained(events, peak, device_peak, warnings)


def _named(stats: DeviceStats, owners: "_BlockOwners") -> list[Event]:
    """Return an event for every block that the step would allocate without the meter too."""
    ledger = _Ledger()
    for number, (address, block) in enumerate(stats.blocks_at_start.items()):
        record = owners.at_start.get(address)
        if record is None and block.requested in WORKSPACE_BYTES:
            position = len(stats.history or ()) + number
            ledger.allocate(address, _earlier_workspace(block, position), _rounding_of(block))
        elif record is None:
            ledger.allocate(address, _from_before(block.rounded))
        else:
            ledger.allocate(address, record.event(block.requested, "before"), _rounding_of(block))
    for position, entry in enumerate(stats.history or ()):
        record, original_address = owners.of.get(position, (None, None))
        if entry.is_free:
            ledger.free(entry.address, entry.tag.phase)
        elif original_address is not None and original_address in ledger:
            ledger.will_move(original_address, entry.address)
        elif record is None:
            ledger.allocate(entry.address, _workspace(entry, position), _rounding_of(entry.block))
        else:
            event = record.event(entry.block.requested, entry.tag.phase)
            ledger.allocate(entry.address, event, _rounding_of(entry.block))
    return ledger.events


class _BlockOwners:
    """Map each block to its storage.

    A storage lies in the last block allocated at its address before the storage got its number.
    Each entry's tag has the number of storages numbered by then.
    """

    def __init__(self, changes: Sequence[Change], stats: DeviceStats) -> None:
        self.of: dict[int, tuple[Storage, int | None]] = {}  # by position in the history
        self.at_start: dict[int, Storage] = {}  # by address
        self.bytes_outside = 0  # bytes of storages in none of the allocator's blocks
        self._allocations: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for position, entry in enumerate(stats.history or ()):
            if not entry.is_free:
                self._allocations[entry.address].append((entry.tag.last_number, position))
        for record in {change.record.number: change.record for change in changes}.values():
            self._find(record, stats.blocks_at_start)

    def _find(self, record: Storage, blocks_at_start: Mapping[int, BlockSize]) -> None:
        """Add the storage's blocks, each with its address in a step without the meter."""
        address, at_start, found = None, None, False
        for known in record.addresses:
            allocations = self._allocations[known.address]
            before = bisect_left(allocations, (known.last_number,))
            if before:
                _, position = allocations[before - 1]
                self.of[position] = record, address if known.in_place else None
                found = True
            else:
                at_start = known.address
            address = known.address
        if at_start is not None and at_start in blocks_at_start:
            self.at_start[at_start] = record
        elif not found:
            self.bytes_outside += record.bytes


class _Ledger:
    """Collect the events and track the allocation at each address."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._held: dict[int, tuple[Event, int]] = {}  # by address: an event and its rounding
        self._moves: dict[int, int] = {}

    def __contains__(self, address: int | None) -> bool:
        return address in self._held

    def allocate(self, address: int, event: Event, rounding: int = 0) -> None:
        self._held[address] = event, rounding
        self.events += _with_rounding(event, rounding)

    def will_move(self, old: int, new: int) -> None:
        """Treat the next free at `old` as a move to `new`."""
        self._moves[old] = new

    def free(self, address: int, phase: str) -> None:
        if address not in self._held:
            return  # allocated before the history began
        event, rounding = self._held.pop(address)
        if address in self._moves:
            self._held[self._moves.pop(address)] = event, rounding
        else:
            self.events += _with_rounding(
                event._replace(bytes=-event.bytes, phase=phase), -rounding
            )


def _history_peak(stats: DeviceStats) -> int:
    """Return the peak of the history, with the allocations that only the meter causes."""
    at_start = sum(block.rounded for block in stats.blocks_at_start.values())
    changes = (-e.block.rounded if e.is_free else e.block.rounded for e in stats.history or ())
    return max(accumulate(changes, initial=at_start))


def _rounding_of(block: BlockSize) -> int:
    return block.rounded - block.requested


# ------------------------------------------------------------------ events


def _workspace(entry: HistoryEntry, position: int) -> Event:
    num_bytes, tag = entry.block.requested, entry.tag
    number = _FIRST_WORKSPACE - position
    return Event(
        num_bytes, number, "workspace", tag.operator, tag.module, tag.phase, "uint8", (num_bytes,)
    )


def _earlier_workspace(block: BlockSize, position: int) -> Event:
    """A cuBLAS workspace kept from an earlier step's matmuls."""
    number = _FIRST_WORKSPACE - position
    return _event(block.requested, number, "workspace", "cuBLAS, before the step")


def _from_before(num_bytes: int) -> Event:
    return _event(num_bytes, _FROM_BEFORE, "unattributed", "there before the step")


def _with_rounding(event: Event, rounding: int) -> Iterable[Event]:
    """Yield the event, then an event for its rounding if there is any."""
    yield event
    if rounding:
        yield _event(rounding, _ROUNDING, "rounding", "", event.phase)


def _event(
    num_bytes: int, number: int, category: str, operator: str, phase: str = "before"
) -> Event:
    return Event(num_bytes, number, category, operator, "", phase, "uint8", ())


def _peak(events: Iterable[Event]) -> int:
    return max(accumulate((event.bytes for event in events), initial=0))


def _is_on(device: torch.device, record: Storage) -> bool:
    indices = {device.index, record.device.index} - {None}  # None means the current device
    return record.device.type == device.type and len(indices) < 2
