"""Every kind of step that the tests know: is an observer's peak the unwatched one?"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from common import Report, kinds_of_steps, table
from rich.progress import Progress

from memlab.metering.cycles import no_cycle_collection
from memlab.metering.profiler_recording import AllocatorRecording, compare
from memlab.units import format_bytes

from .observers import Nothing, metered, recorded, result_peak_bytes, results, tracked, truth_of
from .plans import Builder, Plan, chosen_kinds
from .tallies import (
    CLOSE,
    Off,
    as_rows,
    at_worst,
    bullets,
    grouped,
    in_words,
    percent,
    tallies,
    tally,
)


@dataclass(frozen=True)
class Exactness:
    """One kind of step: the truth, and how far the observers are from it, in bytes."""

    kind: str
    peak_bytes: int
    peak_with_scratch_bytes: int
    scratch_share: float  # of all bytes that the step allocates
    scratch_at_peak: dict[str, int]  # bytes at the peak with scratch, by operator
    memlab: int
    missing: int  # allocations that memlab reports and that no operator made
    unseen: int  # results of operators that it does not report
    mem_tracker: Off
    needs_resets: bool  # see Tracked
    watched: int  # the peak under a mode that does nothing, less the peak
    added_share: float  # bytes allocated only under such a mode, of all that are allocated

    @property
    def right(self) -> str:
        """Whose peak is exact."""
        who = {"memlab": self.memlab, "MemTracker": self.mem_tracker}
        exact = [name for name, figure in who.items() if figure == 0]
        return "both" if len(exact) == 2 else exact[0] if exact else "neither"


def exactness_of(kind: str, build: Builder) -> Exactness:
    truth = truth_of(build)
    trace = metered(build)
    watched = recorded(build, Nothing)
    comparison = compare(trace, truth.recording)
    mem_tracker = tracked(build, truth.peak_bytes)
    return Exactness(
        kind=kind,
        peak_bytes=truth.peak_bytes,
        peak_with_scratch_bytes=truth.peak_with_scratch_bytes,
        scratch_share=comparison.excess_share,
        scratch_at_peak=scratch_at_peak(truth.recording),
        memlab=trace.peak_bytes - truth.peak_bytes,
        missing=comparison.missing.total(),
        unseen=comparison.unseen.total(),
        mem_tracker=mem_tracker.figure,
        needs_resets=mem_tracker.needs_resets,
        watched=truth.alive_bytes + result_peak_bytes(watched) - truth.peak_bytes,
        added_share=share_added(watched, truth.recording),
    )


def scratch_at_peak(recording: AllocatorRecording) -> dict[str, int]:
    """Bytes at the peak over all blocks that are no operator's results, by who took them."""
    totals = list(accumulate((event.bytes for event in recording.events), initial=0))
    alive: dict[int, tuple[str, int]] = {}
    for event in recording.events[: totals.index(max(totals))]:
        if event.bytes < 0:
            alive.pop(event.address, None)
        elif event.kind != "result":
            alive[event.address] = event.operator or "no operator", event.bytes
    sums: Counter[str] = Counter()
    for operator, count in alive.values():
        sums[operator] += count
    return dict(sums.most_common())


def share_added(watched: AllocatorRecording, unwatched: AllocatorRecording) -> float:
    """The bytes of results that exist only where somebody watches, of all that are allocated."""
    added = results(watched) - results(unwatched)
    return total_bytes(added) / max(1, total_bytes(unwatched.allocations))


def total_bytes(counts: Counter[int]) -> int:
    return sum(size * count for size, count in counts.items())


def exactness(plan: Plan, bar: Progress) -> Report:
    kinds = chosen_kinds(plan)
    rows = []
    for kind, build in bar.track(kinds.items(), description="exactness"):
        with no_cycle_collection():
            rows.append(exactness_of(kind, build))
    parts = [exactness_tallies(rows), exactness_table(rows), exactness_notes(rows)]
    return Report(exactness_sentence(rows), "\n\n".join(parts), as_rows(rows))


def exactness_sentence(rows: list[Exactness]) -> str:
    ours, theirs = tally(figures(rows, "memlab")), tally(figures(rows, "mem_tracker"))
    streams = sum(not (row.missing or row.unseen) for row in rows)
    return (
        f"Over {len(rows)} kinds of training step, held against what the CPU's allocator did "
        f"unwatched, memlab's peak is exact to the byte in {ours.exact}{at_worst(ours)} and its "
        f"every allocation in {streams}; torch's MemTracker, given everything it asks for, answers "
        f"in {theirs.answers} and is exact in {theirs.exact}{at_worst(theirs)}."
    )


def figures(
    rows: list[Exactness], observer: str, *, with_scratch: bool = False
) -> Iterator[tuple[Off, int]]:
    """(bytes off, the truth) of each row; the truth with or without the kernels' scratch."""
    for row in rows:
        scratch = row.peak_with_scratch_bytes - row.peak_bytes if with_scratch else 0
        figure = getattr(row, observer)
        yield figure if isinstance(figure, str) else figure - scratch, row.peak_bytes + scratch


def exactness_tallies(rows: list[Exactness]) -> str:
    observers = {"memlab": "memlab", "MemTracker": "mem_tracker"}
    named = {name: tally(figures(rows, observer)) for name, observer in observers.items()}
    for name, observer in observers.items():
        named[f"{name}, scratch counted"] = tally(figures(rows, observer, with_scratch=True))
    return tallies(named)


def exactness_table(rows: list[Exactness]) -> str:
    header = ("kind of step", "peak", "memlab", "allocations off", "MemTracker", "right")
    return table(
        (*header, "watching adds", "scratch", "peak with scratch"),
        [
            (
                row.kind,
                format_bytes(row.peak_bytes),
                in_words(row.memlab, row.peak_bytes),
                str(row.missing + row.unseen),
                in_words(row.mem_tracker, row.peak_bytes, row.needs_resets),
                row.right,
                f"{row.added_share:.1%}",
                f"{row.scratch_share:.1%}",
                format_bytes(row.peak_with_scratch_bytes),
            )
            for row in rows
        ],
    )


def exactness_notes(rows: list[Exactness]) -> str:
    """What the columns mean, and why a row is not exact."""
    outside = kinds_of_steps().INEXACT
    inexact = [row for row in rows if row.memlab or row.missing or row.unseen]
    much_scratch = [
        row for row in rows if row.peak_with_scratch_bytes > (1 + CLOSE) * row.peak_bytes
    ]
    return bullets(
        "*allocations off*: those that memlab reports and no operator made, and results of "
        "operators that it does not report",
        "*watching adds*: what is allocated only under a dispatch mode, even one that does "
        "nothing, of all bytes allocated; memlab takes it out again",
        "*scratch*: what kernels take and give back before they return, of all bytes allocated",
        "*with resets*: MemTracker's statistics were reset before each call of the model",
        *grouped("memlab", {row.kind: outside.get(row.kind, "?") for row in inexact}),
        *grouped("MemTracker", {row.kind: why_tracked_so(row) for row in rows if row.mem_tracker}),
        *grouped("scratch at the peak", {row.kind: describe_scratch(row) for row in much_scratch}),
    )


def why_tracked_so(row: Exactness) -> str:
    if isinstance(row.mem_tracker, str):
        return f"refuses: {row.mem_tracker}"
    if row.mem_tracker == row.watched:
        return "has, to the byte, the peak of the step under a mode that does nothing"
    return "is off, and the step under a mode that does nothing does not explain it"


def describe_scratch(row: Exactness) -> str:
    below = row.peak_bytes / row.peak_with_scratch_bytes - 1
    operator, count = next(iter(row.scratch_at_peak.items()))
    return f"{format_bytes(count)} by `{operator}`; the peak without is {percent(below)} off"
