"""Allocations with lifetimes, from a memory snapshot.

A position counts entries of the device's trace: a block with `born` 5 and `died` 9 is alive after
5, 6, 7 and 8 entries. `born` 0 means that the block is older than the record, which
`_record_memory_history(max_entries=N)` cuts. Segments have lifetimes as well, so the memory map can
be drawn at any position.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from memlab.allocator import block_bytes
from memlab.explain.frames import Stack, stack_of

NEVER = 2**62  # `died` of what is alive at the end


@dataclass(eq=False, slots=True)
class Block:
    """One allocation. `stated` is the category that memlab's own traces state."""

    address: int
    bytes: int
    stream: int
    born: int
    stack: Stack
    stated: str | None = None
    shape: tuple[int, ...] | None = None
    died: int = NEVER

    def alive(self, position: int) -> bool:
        return self.born <= position < self.died


@dataclass(slots=True)
class Span:
    """A range of reserved memory."""

    address: int
    bytes: int
    stream: int
    born: int
    expandable: bool = False
    died: int = NEVER

    def alive(self, position: int) -> bool:
        return self.born <= position < self.died


@dataclass(frozen=True)
class Refusal:
    """A request that the allocator refused."""

    position: int
    bytes: int
    device_free: int | None  # as the driver reported
    stack: Stack


@dataclass(frozen=True)
class History:
    """What one device's allocator did."""

    device: int
    blocks: tuple[Block, ...]
    spans: tuple[Span, ...]
    refusals: tuple[Refusal, ...]
    length: int  # entries
    settings: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[int, int] = field(default_factory=dict)  # reserved bytes of further devices
    has_segments: bool = True  # False: the file states blocks alone, as memlab's exporter writes

    @cached_property
    def has_frames(self) -> bool:
        """Whether enough allocations of the record have a stack, or blocks if there is none."""
        recorded = [block for block in self.blocks if block.born] or self.blocks
        with_stack = sum(bool(block.stack) for block in recorded)
        return bool(recorded) and with_stack > 0.2 * len(recorded)

    @cached_property
    def allocated(self) -> list[int]:
        """Requested bytes alive after each position."""
        return bytes_over_time(self.blocks, self.length)

    @cached_property
    def reserved(self) -> list[int]:
        """Reserved bytes after each position."""
        return bytes_over_time(self.spans, self.length)

    @cached_property
    def refusal(self) -> Refusal | None:
        """The last refused request."""
        return self.refusals[-1] if self.refusals else None

    @cached_property
    def moment(self) -> int:
        """The position to explain: the last refused request, or else the peak."""
        if self.refusal:
            return self.refusal.position
        return self.allocated.index(max(self.allocated))

    def alive(self, position: int) -> list[Block]:
        """Return the blocks alive after `position` entries."""
        return [block for block in self.blocks if block.alive(position)]


def bytes_over_time(parts: Iterable[Block | Span], length: int) -> list[int]:
    """Return the bytes alive after each position from 0 to `length`."""
    changes = [0] * (length + 1)
    for part in parts:
        changes[part.born] += part.bytes
        if part.died <= length:
            changes[part.died] -= part.bytes
    return list(accumulate(changes))


# ------------------------------------------------------------------ reading


def history_of(snapshot: Mapping[str, Any], device: int | None = None) -> History:
    """Return the history of one device, by default the one that ran out of memory or holds most.

    Raise ValueError if the snapshot lacks that device or is malformed.
    """
    traces, segments = _checked(snapshot)
    reserved = _reserved_by_device(segments)
    chosen = _device(traces, reserved, device)
    entries = traces[chosen] if chosen < len(traces) else []
    try:
        builder = _Builder()
        for position, entry in enumerate(entries, start=1):
            builder.take(position, entry)
        builder.finish([s for s in segments if s.get("device", 0) == chosen])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a trace entry or segment is malformed: {error!r}") from error
    has_segments = builder.has_segments or any(len(s.get("blocks", ())) > 1 for s in segments)
    settings = snapshot.get("allocator_settings") or {}
    others = {number: size for number, size in reserved.items() if number != chosen}
    return History(
        chosen,
        tuple(builder.blocks),
        tuple(builder.spans),
        tuple(builder.refusals),
        len(entries),
        settings if isinstance(settings, dict) else {},
        others,
        has_segments,
    )


def _checked(snapshot: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the traces by device and the segments, in the present form of the format."""
    if "events" in snapshot and "segments_at_end" in snapshot:  # memlab's recordings
        traces, segments = [snapshot["events"]], snapshot["segments_at_end"]
    else:
        traces, segments = snapshot.get("device_traces") or [], snapshot.get("segments") or []
    if not isinstance(traces, list) or not isinstance(segments, list):
        raise ValueError("device_traces and segments must be lists")
    if not all(isinstance(trace, list) for trace in traces):
        raise ValueError("device_traces must be a list of lists")
    if not any(traces) and not segments:
        raise ValueError("it has neither segments nor a trace; record memory before you dump it")
    return traces, segments


def _reserved_by_device(segments: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for segment in segments:
        if not isinstance(segment, dict):
            raise ValueError("a segment is no dictionary")
        number = segment.get("device", 0)
        found[number] = found.get(number, 0) + segment.get("total_size", 0)
    return found


def _device(traces: list[Any], reserved: Mapping[int, int], wanted: int | None) -> int:
    known = sorted({n for n, trace in enumerate(traces) if trace} | set(reserved))
    if wanted is not None:
        if wanted not in known:
            raise ValueError(f"it has no device {wanted}; choose from {known}")
        return wanted
    refused = [n for n, trace in enumerate(traces) if any(_is_refusal(e) for e in trace)]
    return max(refused or known, key=lambda n: (reserved.get(n, 0), -n))


def _is_refusal(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("action") == "oom"


class _Builder:
    """Builds blocks and reserved ranges from entries in order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.spans: list[Span] = []
        self.refusals: list[Refusal] = []
        self.has_segments = False
        self._open: dict[int, Block] = {}
        self._requested: set[int] = set()  # addresses whose free was requested
        self._held: list[Span] = []  # reserved now

    def take(self, position: int, entry: Mapping[str, Any]) -> None:
        """Apply the next entry."""
        match entry["action"]:
            case "alloc":
                self._allocate(position, entry)
            case "free_requested" | "free":
                self._free(position, entry)
                self._requested.add(entry["addr"])
            case "free_completed":
                if entry["addr"] in self._requested:
                    self._requested.discard(entry["addr"])
                else:
                    self._free(position, entry)
            case "segment_alloc" | "segment_map":
                self.has_segments = True
                self._reserve(position, entry)
            case "segment_free" | "segment_unmap":
                self.has_segments = True
                self._release(position, entry)
            case "oom":
                stack = stack_of(entry.get("frames"))
                free = entry.get("device_free")
                self.refusals.append(Refusal(position, entry["size"], free, stack))

    def _allocate(self, position: int, entry: Mapping[str, Any]) -> None:
        address = entry["addr"]
        if address in self._open:  # its free is missing from the record
            self._open.pop(address).died = position
        self._requested.discard(address)
        block = Block(
            address,
            entry["size"],
            entry.get("stream", 0),
            position,
            stack_of(entry.get("frames")),
            entry.get("category"),
            tuple(entry["shape"]) if entry.get("shape") else None,
        )
        self._open[address] = block
        self.blocks.append(block)

    def _free(self, position: int, entry: Mapping[str, Any]) -> None:
        block = self._open.pop(entry["addr"], None)
        if block is None:  # older than the record
            stream = entry.get("stream", 0)
            block = Block(entry["addr"], entry["size"], stream, 0, ())
            self.blocks.append(block)
        block.died = position

    def _reserve(self, position: int, entry: Mapping[str, Any]) -> None:
        expandable = entry["action"] == "segment_map"
        stream = entry.get("stream", 0)
        span = Span(entry["addr"], entry["size"], stream, position, expandable)
        self._held.append(span)
        self.spans.append(span)

    def _release(self, position: int, entry: Mapping[str, Any]) -> None:
        start, end = entry["addr"], entry["addr"] + entry["size"]
        covered = 0
        for span in list(self._held):
            if span.address < end and start < span.address + span.bytes:
                covered += self._cut(span, start, end, position)
        if not covered:
            expandable = entry["action"] == "segment_unmap"
            old = Span(start, end - start, entry.get("stream", 0), 0, expandable, position)
            self.spans.append(old)

    def _cut(self, span: Span, start: int, end: int, position: int) -> int:
        """Release the part of a range between start and end; return its bytes."""
        self._held.remove(span)
        span_end = span.address + span.bytes
        for left, right in ((span.address, start), (end, span_end)):
            if left < right and left >= span.address and right <= span_end:
                rest = Span(left, right - left, span.stream, span.born, span.expandable)
                self._held.append(rest)
                self.spans.append(rest)
        inside = min(end, span_end) - max(start, span.address)
        span.address, span.bytes, span.died = max(start, span.address), inside, position
        return inside

    def finish(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Add what the segments at the end hold from before the record."""
        for segment in segments:
            self._add_older_ranges(segment)
            address = segment["address"]
            for entry in segment.get("blocks", ()):
                address = entry.get("address", address)
                if entry["state"].startswith("active") and address not in self._open:
                    self._add_older(address, entry, segment.get("stream", 0))
                address += entry["size"]

    def _add_older(self, address: int, entry: Mapping[str, Any], stream: int) -> None:
        if entry["state"] != "active_allocated" and address in self._requested:
            return
        past = entry.get("history") or [{}]  # the form of torch 1.13 and 2.0
        stack = stack_of(entry.get("frames", past[0].get("frames")))
        size = entry.get("requested_size", past[0].get("real_size", entry["size"])) or entry["size"]
        block = Block(address, size, stream, 0, stack, entry.get("category"))
        self._open[address] = block
        self.blocks.append(block)

    def _add_older_ranges(self, segment: Mapping[str, Any]) -> None:
        start, end = segment["address"], segment["address"] + segment["total_size"]
        held = [s for s in self._held if s.address < end and start < s.address + s.bytes]
        for span in sorted(held, key=lambda span: span.address):
            self._add_range(segment, start, span.address)
            start = max(start, span.address + span.bytes)
        self._add_range(segment, start, end)

    def _add_range(self, segment: Mapping[str, Any], start: int, end: int) -> None:
        if start < end:
            expandable = bool(segment.get("is_expandable"))
            self.spans.append(Span(start, end - start, segment.get("stream", 0), 0, expandable))


# ------------------------------------------------------------------ free memory at a position


@dataclass(frozen=True)
class FreeMemory:
    """Reserved memory that no block used at a position."""

    reserved_bytes: int
    used_bytes: int
    gaps: tuple[int, ...]  # bytes of each free range, largest first

    @property
    def free_bytes(self) -> int:
        return self.reserved_bytes - self.used_bytes

    @property
    def largest_bytes(self) -> int:
        return self.gaps[0] if self.gaps else 0


def free_memory(history: History, position: int) -> FreeMemory:
    """Return the free ranges within the segments reserved at a position."""
    blocks = sorted((b.address, block_bytes(b.bytes)) for b in history.alive(position))
    gaps, reserved, index = [], 0, 0
    for start, end in _ranges(history, position):
        reserved += end - start
        while index < len(blocks) and blocks[index][0] < start:
            index += 1
        while index < len(blocks) and blocks[index][0] < end:
            address, size = blocks[index]
            gaps.append(address - start)
            start = max(start, address + size)
            index += 1
        gaps.append(end - start)
    found = tuple(sorted((gap for gap in gaps if gap > 0), reverse=True))
    return FreeMemory(reserved, reserved - sum(found), found)


def _ranges(history: History, position: int) -> list[tuple[int, int]]:
    """Return the reserved (start, end); neighbouring pages of an expandable segment are one."""
    merged: list[list[Any]] = []
    alive = (span for span in history.spans if span.alive(position))
    for span in sorted(alive, key=lambda span: span.address):
        end = span.address + span.bytes
        if merged and span.expandable and merged[-1][2] and merged[-1][1] == span.address:
            merged[-1][1] = end
        else:
            merged.append([span.address, end, span.expandable])
    return [(start, end) for start, end, _ in merged]


def share(part: float, whole: float) -> float:
    """Return part/whole, 0 if the whole is 0."""
    return part / whole if whole and math.isfinite(part) else 0.0
