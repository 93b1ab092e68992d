"""Histories in the form in which CUDA records them: written, and worked back to their start."""

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
from memlab.allocator.simulation import Run, Segment, events_of, segments
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
    """What CUDA would record of a trace, in the form that `replay` reads."""
    run = Run(replace(settings or Settings(), **changes), *events_of(trace), keeps_history=True)
    run.go()
    return recording(run.allocator)


def recording(allocator: Allocator, note: str = "") -> dict[str, Any]:
    """The history that an allocator kept and what it holds now, in the form of CUDA's own."""
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
                "address": piece.address,
                "size": piece.bytes,
                "requested_size": piece.requested_bytes,
                "state": states[piece.state],
            }
            for piece in segment.pieces
        ],
    }


def read_recording(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A history or a memory snapshot from a file, as `replay` takes it: `.json`, `.json.gz`, or a
    pickle as `torch.cuda.memory._dump_snapshot` writes it.

    A file from somebody else is safe to read: it can hold plain data alone. ValueError for one that
    holds more, or is damaged.
    """
    path = Path(path)
    if path.suffix not in (".json", ".gz"):
        return unpickle(path)
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no JSON: {error}; give a recording that is whole") from error


# ------------------------------------------------------------------ back to the start


def read(recording: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """(events, segments at the end) of a recording of either form."""
    if "device_traces" in recording:
        events, at_end = recording["device_traces"][0], recording["segments"]
    else:
        events, at_end = recording["events"], recording["segments_at_end"]
    return [event for event in events if event["action"] in ACTIONS], at_end


class Range(NamedTuple):
    """Addresses that were reserved, and the blocks in use there: (size, whether it had been let
    go), by address."""

    size: int
    stream: int
    kind: str
    taken: dict[int, tuple[int, bool]]


def at_start(events: Iterable[Any], at_end: Iterable[Any], settings: Settings) -> dict[int, Range]:
    """What was reserved before the events, by address: the end, with every event undone."""
    state = _State(at_end, settings)
    for event in reversed(list(events)):
        try:
            state.undo(event)
        except KeyError:
            raise _gap(event["addr"]) from None
    state.claim_waste()
    _sort_in(state.ranges, state.taken)
    return state.ranges


class _State:
    """What is reserved and in use, while a history is undone from its end.

    How large a block was of which only the request is known follows from what lies behind it: a
    free block of the large pool is larger than the 1 MiB that may be wasted there, so a gap that
    is not was part of the block below. A block too large to be split had all its segment.
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
        """Close the gaps that were wasted between what is in use now."""
        for address in self._starts:
            self._claim_gap(address)

    def _claim_gap(self, end: int) -> None:
        """Let the block below `end` reach up to it if what lies between was wasted."""
        index = bisect_left(self._starts, end) - 1
        if index < 0 or end in self.ranges or self.settings.expandable_segments:
            return
        below = self._starts[index]
        size, let_go = self.taken[below]
        if size > SMALL_BYTES and 0 < end - below - size <= SMALL_BYTES:
            self.taken[below] = end - below, let_go

    def _taken_bytes(self, address: int, requested_bytes: int) -> int:
        size = block_bytes(requested_bytes, self.settings.roundup_power2_divisions)
        unsplit = self.settings.max_split_size_bytes
        if unsplit is None or size < unsplit or self.settings.expandable_segments:
            return size
        return self.ranges[address].size


def _gap(address: int) -> ValueError:
    return ValueError(
        f"the recording has something at {address:#x} that its end does not lead back to; "
        f"it must hold all events up to its segments at the end, without a gap"
    )


def _end_state(
    at_end: Iterable[Any],
) -> tuple[dict[int, Range], dict[int, tuple[int, bool]]]:
    """The ranges, and the blocks in use, by address."""
    ranges, taken = {}, {}
    for segment in at_end:
        kind = segment["segment_type"]
        ranges[segment["address"]] = Range(segment["total_size"], segment["stream"], kind, {})
        for block in placed_blocks(segment):
            if block["state"] != "inactive":
                taken[block["address"]] = block["size"], block["state"] != "active_allocated"
    return ranges, taken


def placed_blocks(segment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The segment's blocks with their addresses, which old versions of torch leave out."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield {"address": address, **block}
        address += block["size"]


def _range(event: Mapping[str, Any], settings: Settings) -> Range:
    return Range(event["size"], event["stream"], kind_of(event, settings), {})


def kind_of(event: Mapping[str, Any], settings: Settings) -> str:
    """The pool of a segment, or of pages, by their size: a segment of the small pool is smaller
    than any large one, and a page of the large pool is ten small ones (a run of just so many
    small ones is taken for it)."""
    if event["action"] in ("segment_map", "segment_unmap"):
        return "small" if event["size"] % settings.large_segment_bytes else "large"
    return "small" if event["size"] == SMALL_SEGMENT_BYTES else "large"


def _around(ranges: Mapping[int, Range], address: int) -> int:
    """The address of the range that an address lies in."""
    for start, found in ranges.items():
        if 0 <= address - start < found.size:
            return start
    raise _gap(address)


def _cut_out(ranges: dict[int, Range], address: int, size: int) -> None:
    start = _around(ranges, address)
    whole = ranges.pop(start)
    if address > start:
        ranges[start] = whole._replace(size=address - start)
    if start + whole.size > address + size:
        ranges[address + size] = whole._replace(size=start + whole.size - address - size)


def _join(ranges: dict[int, Range], address: int, new: Range) -> None:
    """Add a range, and join it with its neighbours of the same pool."""
    for start, other in list(ranges.items()):
        touches = start + other.size == address or address + new.size == start
        if touches and other[1:3] == new[1:3]:
            del ranges[start]
            address, new = min(start, address), new._replace(size=other.size + new.size)
    ranges[address] = new


def _sort_in(ranges: Mapping[int, Range], taken: Mapping[int, tuple[int, bool]]) -> None:
    """Give each range the blocks that lie in it."""
    starts = sorted(ranges)
    for address, block in sorted(taken.items()):
        index = bisect_left(starts, address + 1) - 1
        start = starts[index] if index >= 0 else _around(ranges, address)
        if address >= start + ranges[start].size:
            _around(ranges, address)
        ranges[start].taken[address] = block
