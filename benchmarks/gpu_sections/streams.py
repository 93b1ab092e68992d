"""Compare a predicted and a recorded stream of blocks.

A stream is a list of Events, as in a Trace, with one storage per block. A recorded stream has no
categories; its operators come from a second run under the profiler.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate
from typing import Any

from memlab.allocator import block_bytes
from memlab.trace import Event, Trace

SHOWN = 8  # differences shown of each kind


def recorded_stream(recording: Mapping[str, Any]) -> tuple[list[Event], int]:
    """Return the blocks of a recorded history, and the index of the measured step."""
    names = iter(_operators(recording))
    held: dict[int, Event] = {}
    events: list[Event] = []
    step_at = 0
    for position, entry in enumerate(recording["events"]):
        if position == recording["step_at"]:
            step_at = len(events)
        action, address = entry["action"], entry["addr"]
        if action == "alloc":
            name = next(names, "") if position >= recording["step_at"] else ""
            held[address] = _block(entry["size"], len(events), name)
            events.append(held[address])
        elif action == "free_requested" and address in held:
            block = held.pop(address)
            events.append(block._replace(bytes=-block.bytes))
    return events, step_at


def _operators(recording: Mapping[str, Any]) -> Sequence[str]:
    """Return the operator of each allocation, if the profiled step has as many allocations."""
    step = recording["events"][recording["step_at"] :]
    names = recording.get("operators", ())
    return names if len(names) == sum(entry["action"] == "alloc" for entry in step) else ()


def _block(count: int, number: int, operator: str) -> Event:
    return Event(count, number, "unattributed", operator, "", "", "uint8", (count,))


def peak(events: Sequence[Event], start: int = 0) -> tuple[int, int]:
    """Return the peak from `start` on and its position; blocks are rounded up to 512 bytes."""
    running = list(accumulate(_rounded_changes(events), initial=0))
    position = max(range(start, len(running)), key=running.__getitem__, default=start)
    return running[position], position


def _rounded_changes(events: Iterable[Event]) -> Iterator[int]:
    held: Counter[int] = Counter()
    for event in events:
        before = held[event.storage]
        held[event.storage] += event.bytes
        yield _rounded(held[event.storage]) - _rounded(before)


def _rounded(count: int) -> int:
    return block_bytes(count) if count else 0


# ------------------------------------------------------------------ comparison


@dataclass(frozen=True)
class StreamDifference:
    """The differences of a predicted and a recorded stream."""

    predicted_bytes: int  # peak of blocks
    recorded_bytes: int
    at_peak: tuple[str, ...]  # blocks alive at only one of the peaks
    around_peak: tuple[str, ...]  # allocations in only one stream, nearest to the peak
    unlike: int  # allocations of the step in only one stream

    @property
    def bytes(self) -> int:
        """Return predicted − recorded."""
        return self.predicted_bytes - self.recorded_bytes


def compare(
    predicted: Sequence[Event], predicted_at: int, recorded: Sequence[Event], recorded_at: int
) -> StreamDifference:
    """Compare two streams from the beginning of the measured step in each."""
    predicted_bytes, predicted_peak = peak(predicted, predicted_at)
    recorded_bytes, recorded_peak = peak(recorded, recorded_at)
    ours, theirs = _allocations(predicted, predicted_at), _allocations(recorded, recorded_at)
    peak_at = sum(event.bytes > 0 for event in predicted[predicted_at:predicted_peak])
    changes = _changes(ours, theirs)
    return StreamDifference(
        predicted_bytes,
        recorded_bytes,
        tuple(_at_peak(alive(predicted, predicted_peak), alive(recorded, recorded_peak))),
        tuple(_describe(change, ours, theirs, peak_at) for change in _nearest(changes, peak_at)),
        sum(max(change[1] - change[0], change[3] - change[2]) for change in changes),
    )


def alive(events: Sequence[Event], position: int) -> list[Event]:
    return Trace(tuple(events[:position])).alive()


def _allocations(events: Sequence[Event], start: int) -> list[Event]:
    return [event for event in events[start:] if event.bytes > 0]


def _changes(ours: Sequence[Event], theirs: Sequence[Event]) -> list[tuple[int, int, int, int]]:
    """Return the ranges where sizes differ: (start, end) in ours, (start, end) in theirs."""
    sizes = [[event.bytes for event in events] for events in (ours, theirs)]
    matcher = SequenceMatcher(None, *sizes, autojunk=False)
    return [change[1:] for change in matcher.get_opcodes() if change[0] != "equal"]


def _nearest(changes: Sequence[Any], peak_at: int) -> list[Any]:
    """Return the changes nearest to the peak, in order."""
    return sorted(sorted(changes, key=lambda change: abs(change[0] - peak_at))[:SHOWN])


def _describe(
    change: tuple[int, int, int, int], ours: Sequence[Event], theirs: Sequence[Event], peak_at: int
) -> str:
    start, end, their_start, their_end = change
    after = f"after {_named(ours[start - 1])}" if start else "first"
    return (
        f"allocation {start:,} (the peak is at {peak_at:,}), {after}: "
        f"predicted {_listed(ours[start:end])}; recorded {_listed(theirs[their_start:their_end])}"
    )


def _listed(events: Sequence[Event]) -> str:
    shown = ", ".join(_named(event) for event in events[:SHOWN])
    return (shown or "nothing") + (f" and {len(events) - SHOWN} more" if events[SHOWN:] else "")


def _named(event: Event) -> str:
    words = (event.operator, event.module, event.phase, event.category)
    return " ".join((f"{event.bytes:,}", *(word for word in words if word not in _SILENT)))


_SILENT = ("", "unattributed")


def _at_peak(ours: Sequence[Event], theirs: Sequence[Event]) -> Iterator[str]:
    """Describe blocks that only one side has, by size, the largest total first."""
    our_sizes, their_sizes = (Counter(event.bytes for event in side) for side in (ours, theirs))
    sides = (
        *(("predicted", size, count, ours) for size, count in (our_sizes - their_sizes).items()),
        *(("recorded", size, count, theirs) for size, count in (their_sizes - our_sizes).items()),
    )
    for side, size, count, events in sorted(sides, key=lambda item: -item[1] * item[2])[:SHOWN]:
        names = Counter(_named(event) for event in events if event.bytes == size)
        several = "; ".join(f"{times} × {name}" for name, times in names.most_common(4))
        yield f"only {side}: {count} × {size:,} of these: {several}"
