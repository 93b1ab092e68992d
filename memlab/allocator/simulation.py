"""Run a Trace through the allocator and report the result."""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from memlab.allocator.blocks import FREE, UNMAPPED, MemoryBlock
from memlab.allocator.caching import Allocator
from memlab.allocator.settings import SHARES, Settings, fields_in
from memlab.allocator.sizes import block_bytes, segment_bytes
from memlab.trace import EMPTY_CACHE, Event, Trace
from memlab.units import format_bytes

PoolOf = Callable[[Event], int]


class SegmentBlock(NamedTuple):
    """A block within a segment. `event` is the event that allocated it, if known."""

    address: int
    bytes: int
    requested_bytes: int  # 0 for a free block
    state: str  # "allocated", "free", or "awaiting" a stream that may still work on it
    event: Event | None = None


class Segment(NamedTuple):
    """A range of memory from the driver: a segment, or contiguous pages of an expandable one."""

    address: int
    bytes: int
    stream: int
    pool: str  # "small" or "large"
    blocks: tuple[SegmentBlock, ...]
    private_pool: int = 0  # 0: none


@dataclass(frozen=True)
class OutOfMemory:
    """A request that the device could not serve. `str` explains it in one sentence."""

    position: int  # of the event in the trace; negative in its history, where -1 is the last
    event: Event
    requested_bytes: int
    segment_bytes: int  # asked of the driver after all unused memory was released
    allocated_bytes: int
    reserved_bytes: int
    limit_bytes: int  # the most that this process may reserve and the driver can provide
    free_block_bytes: tuple[int, ...]  # sizes of the free blocks still reserved, largest first

    def __str__(self) -> str:
        free = self.free_block_bytes
        largest = f" in {counted(len(free), 'block')}" if free else ""
        largest += f" of at most {format_bytes(free[0])}" if len(free) > 1 else ""
        where = " ".join(part for part in (self.event.phase, self.event.operator) if part)
        when = f"at event {self.position}" if self.position >= 0 else "before the measured step"
        return (
            f"out of memory {when} ({where}): a request of "
            f"{format_bytes(self.requested_bytes)} needs a segment of "
            f"{format_bytes(self.segment_bytes)}, but {format_bytes(self.reserved_bytes)} of "
            f"{format_bytes(self.limit_bytes)} are reserved: "
            f"{format_bytes(self.allocated_bytes)} allocated, {format_bytes(sum(free))} free"
            f"{largest}"
        )


@dataclass(frozen=True)
class Blocks:
    """A trace's use of a device's memory, event by event.

    Each array has one element per served event: the bytes after it. While a storage moves,
    `allocated` counts both of its blocks. Peaks cover these events only. Counts of segments and
    retries cover the whole process, including the trace's history.
    """

    settings: Settings
    allocated: "array[int]"
    reserved: "array[int]"
    largest_free: "array[int]"  # the largest request that fits into reserved memory
    allocated_bytes: int  # peak
    reserved_bytes: int
    segment_allocations: int  # calls of cudaMalloc, or page mappings
    segment_frees: int
    retries: int  # times the driver refused and cached segments were released
    out_of_memory: OutOfMemory | None
    at_end: tuple[Segment, ...]
    events: tuple[Event, ...] = field(repr=False)
    history: tuple[Event, ...] = field(repr=False)
    empty_cache_before: frozenset[int] = field(repr=False)
    pool_of: PoolOf | None = field(default=None, repr=False)

    @property
    def fits(self) -> bool:
        """Whether every request was served."""
        return self.out_of_memory is None

    @property
    def fragmentation(self) -> float:
        """The share of peak reserved memory beyond peak allocated memory.

        After an out-of-memory error: the share of reserved memory that was free at that moment.
        """
        moment = self.out_of_memory or self
        return 1 - moment.allocated_bytes / moment.reserved_bytes if moment.reserved_bytes else 0.0

    @property
    def peak_position(self) -> int:
        """The number of events after which reserved memory first reached its peak."""
        return self.reserved.index(max(self.reserved)) + 1 if self.reserved else 0

    @cached_property
    def at_peak(self) -> tuple[Segment, ...]:
        """The segments when reserved memory first reached its peak."""
        return self.segments(self.peak_position)

    def segments(self, position: int) -> tuple[Segment, ...]:
        """Simulate the first `position` events again and return the segments, by address."""
        if not 0 <= position <= len(self.reserved):
            raise ValueError(f"got position {position}; this run has 0 to {len(self.reserved)}")
        run = AllocatorRun(
            self.settings,
            self.events[:position],
            self.history,
            self.empty_cache_before,
            pool_of=self.pool_of,
        )
        run.go()
        return segments(run.allocator)

    def __str__(self) -> str:
        lines = [
            f"reserved {format_bytes(self.reserved_bytes)}, "
            f"allocated {format_bytes(self.allocated_bytes)} at the peak "
            f"({self.fragmentation:.1%} fragmentation"
            f"{'' if self.fits else ' when memory ran out'})",
            f"{counted(self.segment_allocations, 'segment')} allocated, "
            f"{self.segment_frees:,} released, {counted(self.retries, 'retry', 'retries')}",
        ]
        return "\n".join(lines + ([] if self.fits else [str(self.out_of_memory)]))

    __repr__ = __str__


def counted(count: int, one: str, several: str = "") -> str:
    """Return a count with its noun, such as "1 block" or "2 blocks"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def segments(allocator: Allocator) -> tuple[Segment, ...]:
    """Return an allocator's reserved segments, by address."""
    found: list[Segment] = []
    for _, head in sorted(allocator.heads.items()):
        found += _mapped_segments(head)
    return tuple(found)


def _mapped_segments(head: MemoryBlock) -> Iterator[Segment]:
    blocks: list[MemoryBlock] = []
    for block in (*head.run(), None):
        if block is not None and block.state != UNMAPPED:
            blocks.append(block)
        elif blocks:
            found = tuple(map(_as_segment_block, blocks))
            size = sum(block.bytes for block in found)
            pool = blocks[0].pool
            yield Segment(found[0].address, size, pool.stream, pool.kind, found, pool.owner)
            blocks = []


def _as_segment_block(block: MemoryBlock) -> SegmentBlock:
    state = "free" if block.state == FREE else "awaiting" if block.free_pending else "allocated"
    return SegmentBlock(block.address, block.size, block.requested_bytes, state, block.owner)


# ------------------------------------------------------------------ simulate


def simulate(
    trace: Trace | Iterable[Event],
    settings: Settings | None = None,
    *,
    empty_cache_before: Collection[int] = (),
    pool_of: PoolOf | None = None,
    **changes: Any,
) -> Blocks:
    """Run a trace through the allocator of a new process.

    The run includes the trace's history, if any, so fragmentation from earlier steps is present
    when the step begins. A storage that changes size is moved as CUDA moves it: the new block is
    allocated before the old one is freed. Events of category "rounding" are skipped because the
    allocator rounds by itself.

    The first failed request ends the run. It is reported in `Blocks.out_of_memory` rather than
    raised, because the events before it are part of the result.

    Args:
        settings: by default the settings of the trace's prediction, or torch's.
        empty_cache_before: positions of events before which the cache is emptied, besides the
            events of a prediction that empty it.
        pool_of: returns the number of the private pool that an event's storage is allocated in, 0
            for none; default: no private pools. In torch, `use_mem_pool` routes the requests of the
            thread that enters it, so not backward's, which runs in another thread.
        changes: fields of Settings to replace.
    """
    settings = _settings_of(trace, **changes) if settings is None else replace(settings, **changes)
    run = AllocatorRun(settings, *events_of(trace), frozenset(empty_cache_before), pool_of=pool_of)
    return run.blocks(run.go())


def _settings_of(trace: Trace | Iterable[Event], **changes: Any) -> Settings:
    """Return the settings of a prediction, without shares of a memory of unknown size."""
    stated = fields_in(trace.allocator) if isinstance(trace, Trace) else {}
    if changes.get("capacity_bytes") is None:
        stated = {name: value for name, value in stated.items() if name not in SHARES}
    return Settings(**{**stated, **changes})


def events_of(trace: Trace | Iterable[Event]) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Return the events of a trace and the events of its history."""
    if isinstance(trace, Trace):
        return trace.events, trace.history
    return tuple(trace), ()


class AllocatorRun:
    """An allocator and the events that drive it."""

    def __init__(
        self,
        settings: Settings,
        events: tuple[Event, ...],
        history: tuple[Event, ...] = (),
        empty_cache_before: frozenset[int] = frozenset(),
        keeps_history: bool = False,
        pool_of: PoolOf | None = None,
    ) -> None:
        self.allocator = Allocator(settings, keeps_history=keeps_history)
        self.pool_of = pool_of
        self.events = events
        self.history = history
        self.empty_cache_before = empty_cache_before
        self._held: dict[int, MemoryBlock] = {}  # by storage
        self._left: dict[int, MemoryBlock] = {}  # old blocks of storages that moved
        self._done_without: set[int] = set()  # storages that did not fit and were not needed
        self._restated = restated = _restated(history, events)
        self._moves = _moves(
            (position, event) for position, event in self._numbered() if position not in restated
        )
        self._lists = array("q"), array("q"), array("q")

    def go(self) -> OutOfMemory | None:
        """Process events until the end or the first failed request."""
        allocator = self.allocator
        allocated, reserved, largest_free = self._lists
        for position, event in self._numbered():
            if position in self.empty_cache_before or event.operator == EMPTY_CACHE:
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
        """Yield all events of the process with their positions, negative in the history."""
        # The first step leaves gaps, AdamW's state fills them, and the second step no longer fits:
        # a GPT of 124M weights at 8 × 640 tokens reserves 8.79 GiB, its second step alone 7.91 GiB
        # (test_reserved_memory_includes_earlier_steps).
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
            self.pool_of,
        )

    def _change(self, position: int, event: Event) -> int:
        """Apply a storage's size change. Return the bytes that could not be allocated, or 0."""
        storage, size = event.storage, event.bytes
        if storage in self._done_without:
            return 0
        old = self._held.pop(storage, None)
        if old is not None:
            if storage in self._left and size == -self._left[storage].requested_bytes:
                self._held[storage] = old
                old, size = self._left.pop(storage), 0
            elif position in self._moves:
                self._left[storage], old = old, None
            else:
                size += old.requested_bytes
        assert size >= 0, f"event {position} frees more than storage {storage} holds"
        if size:
            # A private pool can cost memory. Day 2's run of varying lengths reserves 9.84 GiB with
            # one pool, and 12.84 GiB with forward's activations in a pool of their own: backward's
            # requests go to the other one (test_torchs_pool_reserves_what_the_simulation_reserves).
            owner = self.pool_of(event) if self.pool_of else 0
            block = self.allocator.malloc(size, event.stream, owner)
            if block is None:
                if not _is_optional(event):
                    return size
                self._done_without.add(storage)
                return 0
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
        free = sorted((block.size for block in allocator.free_blocks()), reverse=True)
        return OutOfMemory(
            position,
            event,
            requested_bytes,
            segment_bytes(size, settings.large_segment_bytes),
            allocator.allocated_bytes,
            allocator.reserved_bytes,
            min(settings.fraction_bytes, settings.driver_bytes),
            tuple(free),
        )


def _is_optional(event: Event) -> bool:
    """Return whether the operator also runs without this memory.

    If a convolution's workspace does not fit, torch tries the next kernel (Conv_v8.cpp,
    `try_plans`).
    """
    return event.category == "workspace" and event.operator.startswith("aten.convolution")


def _restated(history: Iterable[Event], events: Iterable[Event]) -> set[int]:
    """Return the positions of events that repeat storages already alive from the history."""
    held: Counter[int] = Counter()
    for event in history:
        held[event.storage] += event.bytes
    return {
        position
        for position, event in enumerate(events)
        if event.phase == "before" and held[event.storage]
    }


def _moves(numbered: Iterable[tuple[int, Event]]) -> set[int]:
    """Return the positions at which a live storage gets a second block and then frees the first.

    A device's own history has both blocks of a resized storage. Other sources of a Trace have only
    the difference.
    """
    held: dict[int, int] = {}
    grown: dict[int, tuple[int, int]] = {}  # by storage: (position, bytes before)
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
