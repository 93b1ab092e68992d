"""A Trace run through the allocator, and what came of it."""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from memlab.allocator.blocks import FREE, UNMAPPED, Block
from memlab.allocator.caching import Allocator
from memlab.allocator.settings import Settings
from memlab.allocator.sizes import block_bytes, segment_bytes
from memlab.trace import Event, Trace
from memlab.units import format_bytes


class Piece(NamedTuple):
    """A block as it lies in a segment. `event` is the one that allocated it, where it is known."""

    address: int
    bytes: int
    requested_bytes: int  # 0 of a free block
    state: str  # "allocated", "free", or "awaiting" a stream that may still work on it
    event: Event | None = None


class Segment(NamedTuple):
    """What the driver gave in one piece (of an expandable segment: mapped without a gap)."""

    address: int
    bytes: int
    stream: int
    pool: str  # "small" or "large"
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class OutOfMemory:
    """A request that the card could not serve. Its text says why in one sentence."""

    position: int  # of the event in the trace; below 0: in its history, -1 being the last there
    event: Event
    requested_bytes: int
    segment_bytes: int  # what the driver was asked for, after everything unused had gone back
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int  # what this process may reserve, and the driver can give
    free_piece_bytes: tuple[int, ...]  # of each free block that stayed reserved, largest first

    def __str__(self) -> str:
        pieces = self.free_piece_bytes
        largest = f" in {counted(len(pieces), 'piece')}" if pieces else ""
        largest += f" of at most {format_bytes(pieces[0])}" if len(pieces) > 1 else ""
        where = " ".join(part for part in (self.event.phase, self.event.operator) if part)
        when = f"at event {self.position}" if self.position >= 0 else "before the measured step"
        return (
            f"out of memory {when} ({where}): a request of "
            f"{format_bytes(self.requested_bytes)} needs a segment of "
            f"{format_bytes(self.segment_bytes)}, and {format_bytes(self.reserved_bytes)} of "
            f"{format_bytes(self.limit_bytes)} are reserved: "
            f"{format_bytes(self.allocated_bytes)} allocated, {format_bytes(sum(pieces))} free"
            f"{largest}"
        )


@dataclass(frozen=True)
class Blocks:
    """What a trace takes of a card's memory, event by event.

    The lists have one number for each event that was served: bytes after it; of a storage that
    moves, `allocated` has both blocks. The peaks are of these; the counts of segments and retries
    are of the whole process, the trace's history too.
    """

    settings: Settings
    allocated: "array[int]"
    reserved: "array[int]"
    largest_free: "array[int]"  # the largest request that what is reserved had room for
    allocated_bytes: int  # the peaks
    reserved_bytes: int
    segment_allocations: int  # calls of cudaMalloc, or mappings of pages
    segment_frees: int
    retries: int  # cached segments were given back because the driver had refused
    out_of_memory: OutOfMemory | None
    at_end: tuple[Segment, ...]
    events: tuple[Event, ...] = field(repr=False)
    history: tuple[Event, ...] = field(repr=False)
    empty_cache_before: frozenset[int] = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether every request was served."""
        return self.out_of_memory is None

    @property
    def fragmentation(self) -> float:
        """The share of the reserved peak that the allocated peak would not have needed; where
        memory ran out, of what was reserved then, the share that was free."""
        moment = self.out_of_memory or self
        return 1 - moment.allocated_bytes / moment.reserved_bytes if moment.reserved_bytes else 0.0

    @property
    def peak_position(self) -> int:
        """The number of events after which reserved memory first stood at its peak."""
        return self.reserved.index(max(self.reserved)) + 1 if self.reserved else 0

    @cached_property
    def at_peak(self) -> tuple[Segment, ...]:
        """The segments when reserved memory first stood at its peak."""
        return self.segments(self.peak_position)

    def segments(self, position: int) -> tuple[Segment, ...]:
        """The segments after so many events, by address; they are simulated anew."""
        if not 0 <= position <= len(self.reserved):
            raise ValueError(f"got position {position}; this run has 0 to {len(self.reserved)}")
        run = Run(self.settings, self.events[:position], self.history, self.empty_cache_before)
        run.go()
        return segments(run.allocator)

    def __str__(self) -> str:
        lines = [
            f"reserved {format_bytes(self.reserved_bytes)}, "
            f"allocated {format_bytes(self.allocated_bytes)} at the peak "
            f"({self.fragmentation:.1%} fragmentation"
            f"{'' if self.fits else ' when memory ran out'})",
            f"{counted(self.segment_allocations, 'segment')} allocated, "
            f"{self.segment_frees:,} given back, {counted(self.retries, 'retry', 'retries')}",
        ]
        return "\n".join(lines + ([] if self.fits else [str(self.out_of_memory)]))

    __repr__ = __str__


def counted(count: int, one: str, several: str = "") -> str:
    """Such as "1 piece" and "2 pieces"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def segments(allocator: Allocator) -> tuple[Segment, ...]:
    """What an allocator has reserved now, by address."""
    found = []
    for _, head in sorted(allocator.heads.items()):
        found += _mapped_segments(head)
    return tuple(found)


def _mapped_segments(head: Block) -> Iterator[Segment]:
    blocks: list[Block] = []
    for block in (*head.run(), None):
        if block is not None and block.state != UNMAPPED:
            blocks.append(block)
        elif blocks:
            pieces = tuple(map(_piece, blocks))
            size = sum(piece.bytes for piece in pieces)
            pool = blocks[0].pool
            yield Segment(pieces[0].address, size, pool.stream, pool.kind, pieces)
            blocks = []


def _piece(block: Block) -> Piece:
    state = "free" if block.state == FREE else "awaiting" if block.let_go else "allocated"
    return Piece(block.address, block.size, block.requested_bytes, state, block.owner)


# ------------------------------------------------------------------ simulate


def simulate(
    trace: Trace | Iterable[Event],
    settings: Settings | None = None,
    *,
    empty_cache_before: Collection[int] = (),
    **changes: Any,
) -> Blocks:
    """Run a trace through the allocator of a fresh process, from the trace's history on if it has
    one: the holes that earlier steps left are then there when the step begins.

    `changes` are fields of Settings. `empty_cache_before` are positions of events before which
    the cache is emptied. A storage that changes its size is moved, as CUDA does it: the new block
    is taken before the old one is freed. Events of category "rounding" are left out: the
    allocator does its own.

    A request that is not served ends the run and is a result, `Blocks.out_of_memory`, not an
    error: whether a trace fits is what one asks, of many settings, and the way there is part of
    the answer.
    """
    settings = replace(settings or Settings(), **changes)
    run = Run(settings, *events_of(trace), frozenset(empty_cache_before))
    return run.blocks(run.go())


def events_of(trace: Trace | Iterable[Event]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """The events of a trace, and those of its history."""
    if isinstance(trace, Trace):
        return trace.events, trace.history
    return tuple(trace), ()


class Run:
    """An allocator, and the events that drive it."""

    def __init__(
        self,
        settings: Settings,
        events: tuple[Event, ...],
        history: tuple[Event, ...] = (),
        empty_cache_before: frozenset[int] = frozenset(),
        keeps_history: bool = False,
    ) -> None:
        self.allocator = Allocator(settings, keeps_history=keeps_history)
        self.events = events
        self.history = history
        self.empty_cache_before = empty_cache_before
        self._held: dict[int, Block] = {}  # by storage
        self._left: dict[int, Block] = {}  # what storages that moved still hold
        self._restated = restated = _restated(history, events)
        self._moves = _moves(
            (position, event) for position, event in self._numbered() if position not in restated
        )
        self._lists = array("q"), array("q"), array("q")

    def go(self) -> OutOfMemory | None:
        """Take the events in turn, to the end or to the first that is not served."""
        allocator = self.allocator
        allocated, reserved, largest_free = self._lists
        for position, event in self._numbered():
            if position in self.empty_cache_before:
                allocator.empty_cache()
            if position == 0:
                allocator.reset_peaks()
            self._with_both_blocks = 0
            if event.bytes and event.category != "rounding" and position not in self._restated:
                refused = self._change(position, event)
                if refused:
                    return self._out_of_memory(position, event, refused)
            if position >= 0:
                allocated.append(max(allocator.allocated_bytes, self._with_both_blocks))
                reserved.append(allocator.reserved_bytes)
                largest_free.append(allocator.largest_free_bytes())
        return None

    def _numbered(self) -> Iterator[tuple[int, Event]]:
        """All events of the process, with their positions; those of its history are below 0."""
        return enumerate(chain(self.history, self.events), start=-len(self.history))

    def blocks(self, out_of_memory: OutOfMemory | None) -> Blocks:
        return Blocks(
            self.allocator.settings,
            *self._lists,
            self.allocator.allocated_peak_bytes,
            self.allocator.reserved_peak_bytes,
            self.allocator.segment_allocations,
            self.allocator.segment_frees,
            self.allocator.retries,
            out_of_memory,
            segments(self.allocator),
            self.events,
            self.history,
            self.empty_cache_before,
        )

    def _change(self, position: int, event: Event) -> int:
        """Let a storage have its bytes; the bytes that could not be had, or 0."""
        storage, size = event.storage, event.bytes
        old = self._held.pop(storage, None)
        if old is not None:
            if storage in self._left and size == -self._left[storage].requested_bytes:
                self._held[storage] = old
                old, size = self._left.pop(storage), 0
            elif position in self._moves:
                self._left[storage], old = old, None
            else:
                size += old.requested_bytes
        assert size >= 0, f"event {position} frees more than storage {storage} has"
        if size:
            block = self.allocator.malloc(size)
            if block is None:
                return size
            block.owner = event
            self._held[storage] = block
            if old is not None:
                self._with_both_blocks = self.allocator.allocated_bytes
        if old is not None:
            self.allocator.free(old)
        return 0

    def _out_of_memory(self, position: int, event: Event, requested_bytes: int) -> OutOfMemory:
        allocator, settings = self.allocator, self.allocator.settings
        size = block_bytes(requested_bytes, settings.roundup_power2_divisions)
        pieces = sorted((block.size for block in allocator.free_blocks()), reverse=True)
        return OutOfMemory(
            position,
            event,
            requested_bytes,
            segment_bytes(size, settings.large_segment_bytes),
            allocator.allocated_bytes,
            allocator.reserved_bytes,
            min(settings.fraction_bytes, settings.driver_bytes),
            tuple(pieces),
        )


def _restated(history: Iterable[Event], events: Iterable[Event]) -> set[int]:
    """The positions of the events that say again what the history left alive."""
    held: Counter[int] = Counter()
    for event in history:
        held[event.storage] += event.bytes
    return {
        position
        for position, event in enumerate(events)
        if event.phase == "before" and held[event.storage]
    }


def _moves(numbered: Iterable[tuple[int, Event]]) -> set[int]:
    """The positions at which a living storage gets a second block, whose first it frees next.

    A device's own history shows the two blocks of a storage that is resized; the other producers
    of a Trace show the difference.
    """
    held: dict[int, int] = {}
    grown: dict[int, tuple[int, int]] = {}  # by storage: the position, the bytes before
    moves = set()
    for position, event in numbered:
        storage, size = event.storage, event.bytes
        before = held.get(storage, 0)
        if grown and storage in grown:
            grown_at, old = grown.pop(storage)
            if size == -old:
                moves.add(grown_at)
        elif before and size > 0:
            grown[storage] = position, before
        held[storage] = before + size
    return moves
