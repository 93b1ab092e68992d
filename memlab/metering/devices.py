"""The device's answers beside the meter's stream: every byte at the peak gets a name.

    parameters … temporaries   what the meter saw, under the names that it gave
    workspace                  blocks that the allocator handed out and that hold no storage: the
                               scratch of kernels, and what libraries keep: of what was there
                               before the step, blocks of just the size that cuBLAS takes
    rounding                   what blocks have beyond what was asked for
    unattributed               the rest: what was there before the step and the meter does not
                               know, and what the device counts and nobody saw

Where the allocator keeps a history (CUDA, ROCm), it gives the order and the meter the names. It
also holds blocks that the step takes only because it is watched: unwatched, autograd would write
its sum into `old`; watched, it allocates `new` and drops `old`. The meter has taken such pairs out
of its stream, so here neither the allocation of `new` nor the free of `old` is an event: from
then on, the bytes of `old` lie at the address of `new`. What both took at once, a note says.

Without a history, the meter's stream is the base, and what separates its peak from the device's
is one event at the start. Where the device counts no peak (MPS for long), the stream's stands.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from memlab.configs.targets import TARGETS
from memlab.metering.answers import Accelerator, AllocatorWatch, Answers, Block, Entry, Watch
from memlab.metering.cuda import CudaWatch
from memlab.metering.mps import Mps
from memlab.metering.registry import Storage
from memlab.metering.storages import Change
from memlab.trace import DeviceMemory, Event, Trace
from memlab.units import format_bytes

WATCHES: dict[str, Callable[[torch.device], Watch]] = {
    "cpu": Watch,
    "meta": Watch,
    "cuda": CudaWatch,  # ROCm too
    "mps": lambda device: AllocatorWatch(device, Mps()),
}

WORKSPACE_BYTES = {target.workspace_bytes for target in TARGETS.values()}  # of one handle of cuBLAS

# The numbers of what is no storage. Storages count up from 1, workspaces down from the last.
_FROM_BEFORE, _UNSEEN, _ROUNDING, _FIRST_WORKSPACE = 0, -1, -2, -3


def watch(device: torch.device) -> Watch:
    """A watch for the device: `start()` before the step, `stop()` after it."""
    known = WATCHES.get(device.type)
    return known(device) if known else AllocatorWatch(device, Accelerator())


class Completed(NamedTuple):
    """What a Trace is made of."""

    events: tuple[Event, ...]
    memory: DeviceMemory
    notes: tuple[str, ...]


def complete(changes: Iterable[Change], answers: Answers) -> Completed:
    """The events on the device, completed with what only the device knows.

    Their peak is the device's own, less what the step took only because it was watched.
    """
    own = [change for change in changes if _is_on(answers.device, change.record)]
    explain = _from_stream if answers.history is None else _from_history
    events, explained_peak, device_peak, warnings = explain(own, answers)
    notes = [*answers.notes, *warnings]
    if device_peak is not None:
        if unseen := device_peak - explained_peak:
            events.insert(0, _event(unseen, _UNSEEN, "unattributed", "seen by the device alone"))
        unattributed = Trace(tuple(events)).at_peak.get("unattributed", 0)
        notes.append(f"{format_bytes(unattributed)} at the peak are unattributed")
    memory = DeviceMemory(device_peak, answers.reserved_peak_bytes, answers.used_bytes)
    return Completed(tuple(events), memory, tuple(notes))


class _Explained(NamedTuple):
    """Events, and how far they explain the device's peak."""

    events: list[Event]
    peak: int
    device_peak: int | None
    warnings: list[str]


# ------------------------------------------------------------------ without a history


def _from_stream(changes: Sequence[Change], answers: Answers) -> _Explained:
    """The meter's events, each with its rounding, after what it does not know of the start."""
    events: list[Event] = []
    held: dict[int, int] = defaultdict(int)  # bytes of each storage
    known_at_start = 0
    for record, count, phase in changes:
        before, after = held[record.number], held[record.number] + count
        held[record.number] = after
        rounding = -after % answers.granularity - -before % answers.granularity
        events += _with_rounding(record.event(count, phase), rounding)
        known_at_start += count + rounding if phase == "before" else 0
    unknown = (answers.allocated_at_start or 0) - known_at_start
    if unknown > 0:
        events.insert(0, _from_before(unknown))
    return _Explained(events, _peak(events), answers.allocated_peak_bytes, [])


# ------------------------------------------------------------------ with a history


def _from_history(changes: Sequence[Change], answers: Answers) -> _Explained:
    """The history's events, under the meter's names."""
    owners = _Owners(changes, answers)
    events = _named(answers, owners)
    peak = _history_peak(answers)
    warnings = []
    if (only_watched := peak - _peak(events)) > 0:
        warnings.append(
            f"the device's peak is {format_bytes(only_watched)} higher than this one because the "
            f"step was watched: unwatched, autograd adds these gradients in place"
        )
    if owners.bytes_outside:
        warnings.append(
            f"{format_bytes(owners.bytes_outside)} are in storages that the device's allocator "
            f"did not hand out; they are not counted"
        )
    device_peak = max(answers.allocated_peak_bytes or 0, peak)  # the step may reset its count
    return _Explained(events, peak, device_peak, warnings)


def _named(answers: Answers, owners: "_Owners") -> list[Event]:
    """An event for every block that an unwatched step would take, too."""
    ledger = _Ledger()
    for number, (address, block) in enumerate(answers.blocks_at_start.items()):
        record = owners.at_start.get(address)
        if record is None and block.asked in WORKSPACE_BYTES:
            position = len(answers.history) + number
            ledger.allocate(address, _kept_workspace(block, position), _beyond(block))
        elif record is None:
            ledger.allocate(address, _from_before(block.taken))
        else:
            ledger.allocate(address, record.event(block.asked, "before"), _beyond(block))
    for position, entry in enumerate(answers.history):
        record, address_unwatched = owners.of.get(position, (None, None))
        if entry.is_free:
            ledger.free(entry.address, entry.mark.phase)
        elif address_unwatched in ledger:
            ledger.will_move(address_unwatched, entry.address)
        elif record is None:
            ledger.allocate(entry.address, _workspace(entry, position), _beyond(entry.block))
        else:
            event = record.event(entry.block.asked, entry.mark.phase)
            ledger.allocate(entry.address, event, _beyond(entry.block))
    return ledger.events


class _Owners:
    """Whose each block is.

    A storage lies in the last block that was allocated at its address before it was seen there:
    before it had its number, that is, and each entry says how many numbers were given by then.
    """

    def __init__(self, changes: Sequence[Change], answers: Answers) -> None:
        self.of: dict[int, tuple[Storage, int | None]] = {}  # by position in the history
        self.at_start: dict[int, Storage] = {}  # by address
        self.bytes_outside = 0  # of storages in none of the allocator's blocks
        self._allocations: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for position, entry in enumerate(answers.history):
            if not entry.is_free:
                self._allocations[entry.address].append((entry.mark.seen, position))
        for record in {change.record.number: change.record for change in changes}.values():
            self._find(record, answers.blocks_at_start)

    def _find(self, record: Storage, blocks_at_start: Mapping[int, Block]) -> None:
        """Enter the storage's blocks, each with the address that it would have unwatched."""
        address, at_start, found = None, None, False
        for seen in record.sightings:
            allocations = self._allocations[seen.address]
            before = bisect_left(allocations, (seen.count,))
            if before:
                _, position = allocations[before - 1]
                self.of[position] = record, address if seen.in_place else None
                found = True
            else:
                at_start = seen.address
            address = seen.address
        if at_start in blocks_at_start:
            self.at_start[at_start] = record
        elif not found:
            self.bytes_outside += record.bytes


class _Ledger:
    """Writes the events, and knows what lies at which address."""

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
        """Take the next free at `old` for a move to `new`."""
        self._moves[old] = new

    def free(self, address: int, phase: str) -> None:
        if address not in self._held:
            return  # a block that the history does not show being allocated
        event, rounding = self._held.pop(address)
        if address in self._moves:
            self._held[self._moves.pop(address)] = event, rounding
        else:
            self.events += _with_rounding(
                event._replace(bytes=-event.bytes, phase=phase), -rounding
            )


def _history_peak(answers: Answers) -> int:
    """The most bytes that were handed out at once, with those that only a watched step takes."""
    at_start = sum(block.taken for block in answers.blocks_at_start.values())
    changes = (-e.block.taken if e.is_free else e.block.taken for e in answers.history)
    return max(accumulate(changes, initial=at_start))


def _beyond(block: Block) -> int:
    return block.taken - block.asked


# ------------------------------------------------------------------ events


def _workspace(entry: Entry, position: int) -> Event:
    count, mark = entry.block.asked, entry.mark
    number = _FIRST_WORKSPACE - position
    return Event(
        count, number, "workspace", mark.operator, mark.module, mark.phase, "uint8", (count,)
    )


def _kept_workspace(block: Block, position: int) -> Event:
    """What an earlier step's matrix products left: no storage, and no operator's that runs now."""
    number = _FIRST_WORKSPACE - position
    return _event(block.asked, number, "workspace", "cuBLAS, before the step")


def _from_before(count: int) -> Event:
    return _event(count, _FROM_BEFORE, "unattributed", "there before the step")


def _with_rounding(event: Event, rounding: int) -> Iterable[Event]:
    """The event, and the one of its rounding if there is any."""
    yield event
    if rounding:
        yield _event(rounding, _ROUNDING, "rounding", "", event.phase)


def _event(count: int, number: int, category: str, operator: str, phase: str = "before") -> Event:
    return Event(count, number, category, operator, "", phase, "uint8", ())


def _peak(events: Iterable[Event]) -> int:
    return max(accumulate((event.bytes for event in events), initial=0))


def _is_on(device: torch.device, record: Storage) -> bool:
    indices = {device.index, record.device.index} - {None}  # None: the current one
    return record.device.type == device.type and len(indices) < 2
