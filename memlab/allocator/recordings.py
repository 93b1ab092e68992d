"""Write histories in CUDA's format, and reconstruct the state before a recording."""

import gzip
import json
import os
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from memlab.allocator import recorded_settings
from memlab.allocator.caching import Allocator
from memlab.allocator.settings import Settings
from memlab.allocator.simulation import AllocatorRun, Segment, events_of, segments
from memlab.allocator.sizes import SMALL_BYTES, SMALL_SEGMENT_BYTES, block_bytes
from memlab.internals.unpickling import unpickle
from memlab.trace import Event, Trace

ACTIONS = (
    *("alloc", "free_requested", "free_completed"),
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
)


def history(
    trace: Trace | Iterable[Event], settings: Settings | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the history that CUDA would record for a trace, in the form that `replay` reads."""
    run = AllocatorRun(
        replace(settings or Settings(), **changes), *events_of(trace), keeps_history=True
    )
    run.go()
    return recording(run.allocator)


def recording(allocator: Allocator, note: str = "") -> dict[str, Any]:
    """Return an allocator's history and current segments in CUDA's format."""
    if allocator.history is None:
        raise ValueError("this allocator kept no history; make it with keeps_history=True")
    names = ("action", "addr", "size", "stream")
    return {
        "note": note,
        recorded_settings.KEY: recorded_settings.as_stated(allocator.settings),
        "events": [dict(zip(names, entry, strict=True)) for entry in allocator.history],
        "segments_at_end": [as_recorded(segment) for segment in segments(allocator)],
    }


def as_recorded(segment: Segment) -> dict[str, Any]:
    states = {
        "allocated": "active_allocated",
        "awaiting": "active_pending_free",
        "free": "inactive",
    }
    return {
        "address": segment.address,
        "total_size": segment.bytes,
        "segment_type": segment.pool,
        "stream": segment.stream,
        "blocks": [
            {
                "address": block.address,
                "size": block.bytes,
                "requested_size": block.requested_bytes,
                "state": states[block.state],
            }
            for block in segment.blocks
        ],
    }


def read_recording(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a recording for `replay`: `.json`, `.json.gz`, or a pickled memory snapshot as written
    by `torch.cuda.memory._dump_snapshot`.

    Files from other people are safe to read: only plain data is unpickled. Raise ValueError for
    other content or a damaged file.
    """
    path = Path(path)
    if path.suffix not in (".json", ".gz"):
        return unpickle(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no JSON: {error}; give a complete recording") from error


# ------------------------------------------------------------------ the state before the events


def read(recording: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return (events, segments at the end) from a recording in either format."""
    if "device_traces" in recording:
        events, at_end = recording["device_traces"][0], recording["segments"]
    else:
        events, at_end = recording["events"], recording["segments_at_end"]
    return [event for event in events if event["action"] in ACTIONS], at_end


class Range(NamedTuple):
    """A reserved address range. `taken` maps the address of each block in use to (size, whether
    its user has freed it)."""

    size: int
    stream: int
    kind: str
    taken: dict[int, tuple[int, bool]]


def state_at_start(
    events: Iterable[Any], at_end: Iterable[Any], settings: Settings
) -> dict[int, Range]:
    """Return the ranges reserved before the events, by address, by undoing every event."""
    state = _UndoState(at_end, settings)
    for event in reversed(list(events)):
        try:
            state.undo(event)
        except KeyError:
            raise _inconsistent(event["addr"]) from None
    state.claim_waste()
    _assign_blocks(state.ranges, state.taken)
    return state.ranges


class _UndoState:
    """The reserved and used memory while events are undone from the end of a history.

    Events record only the requested size of a block. Its full size follows from the gap above it.
    Free blocks of the large pool have more than 1 MiB, so a smaller gap is waste and belongs to the
    block below. An oversize block spans its whole segment.
    """

    def __init__(self, at_end: Iterable[Any], settings: Settings) -> None:
        self.settings = settings
        self.ranges, self.taken = _end_state(at_end)
        self._starts = sorted(self.taken)

    def undo(self, event: Mapping[str, Any]) -> None:
        address, size = event["addr"], event["size"]
        match event["action"]:
            case "segment_alloc":
                del self.ranges[address]
            case "segment_free":
                self.ranges[address] = _range(event, self.settings)
            case "segment_map":
                _cut_out(self.ranges, address, size)
            case "segment_unmap":
                _join(self.ranges, address, _range(event, self.settings))
            case "alloc":
                self._claim_gap(address)
                del self.taken[address]
                del self._starts[bisect_left(self._starts, address)]
            case "free_completed":
                self.taken[address] = self._taken_bytes(address, size), True
                insort(self._starts, address)
            case "free_requested":
                self.taken[address] = self.taken[address][0], False

    def claim_waste(self) -> None:
        """Assign all wasted gaps to the blocks in use below them."""
        for address in self._starts:
            self._claim_gap(address)

    def _claim_gap(self, end: int) -> None:
        """Extend the block below `end` over the gap between them if the gap was wasted."""
        index = bisect_left(self._starts, end) - 1
        if index < 0 or end in self.ranges or self.settings.expandable_segments:
            return
        below = self._starts[index]
        size, free_pending = self.taken[below]
        if size > SMALL_BYTES and 0 < end - below - size <= SMALL_BYTES:
            self.taken[below] = end - below, free_pending

    def _taken_bytes(self, address: int, requested_bytes: int) -> int:
        size = block_bytes(requested_bytes, self.settings.roundup_power2_divisions)
        unsplit = self.settings.max_split_size_bytes
        if unsplit is None or size < unsplit or self.settings.expandable_segments:
            return size
        return self.ranges[address].size


def _inconsistent(address: int) -> ValueError:
    return ValueError(
        f"the recording's segments at the end do not match its events at {address:#x}; "
        f"it must hold all events before its end, without a gap"
    )


def _end_state(
    at_end: Iterable[Any],
) -> tuple[dict[int, Range], dict[int, tuple[int, bool]]]:
    """Return the ranges and the blocks in use, both by address."""
    ranges, taken = {}, {}
    for segment in at_end:
        kind = segment["segment_type"]
        ranges[segment["address"]] = Range(segment["total_size"], segment["stream"], kind, {})
        for block in placed_blocks(segment):
            if block["state"] != "inactive":
                taken[block["address"]] = block["size"], block["state"] != "active_allocated"
    return ranges, taken


def placed_blocks(segment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the segment's blocks with addresses, which older torch versions omit."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield {"address": address, **block}
        address += block["size"]


def _range(event: Mapping[str, Any], settings: Settings) -> Range:
    return Range(event["size"], event["stream"], kind_of(event, settings), {})


def kind_of(event: Mapping[str, Any], settings: Settings) -> str:
    """Infer the pool of a segment or of pages from the size.

    Small segments have a fixed size below any large segment's. A large page is ten small pages, so
    a run of exactly ten small pages is mistaken for one large page.
    """
    if event["action"] in ("segment_map", "segment_unmap"):
        return "small" if event["size"] % settings.large_segment_bytes else "large"
    return "small" if event["size"] == SMALL_SEGMENT_BYTES else "large"


def _range_containing(ranges: Mapping[int, Range], address: int) -> int:
    """Return the start of the range that contains an address."""
    for start, found in ranges.items():
        if 0 <= address - start < found.size:
            return start
    raise _inconsistent(address)


def _cut_out(ranges: dict[int, Range], address: int, size: int) -> None:
    start = _range_containing(ranges, address)
    whole = ranges.pop(start)
    if address > start:
        ranges[start] = whole._replace(size=address - start)
    if start + whole.size > address + size:
        ranges[address + size] = whole._replace(size=start + whole.size - address - size)


def _join(ranges: dict[int, Range], address: int, new: Range) -> None:
    """Add a range, merged with adjacent ranges of the same pool."""
    for start, other in list(ranges.items()):
        touches = start + other.size == address or address + new.size == start
        if touches and other[1:3] == new[1:3]:
            del ranges[start]
            address, new = min(start, address), new._replace(size=other.size + new.size)
    ranges[address] = new


def _assign_blocks(ranges: Mapping[int, Range], taken: Mapping[int, tuple[int, bool]]) -> None:
    """Assign each block in use to the range that contains it."""
    starts = sorted(ranges)
    for address, block in sorted(taken.items()):
        index = bisect_left(starts, address + 1) - 1
        start = starts[index] if index >= 0 else _range_containing(ranges, address)
        if address >= start + ranges[start].size:
            _range_containing(ranges, address)
        ranges[start].taken[address] = block
