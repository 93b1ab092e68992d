"""Peaks of memlab's meter and of MemTracker for every kind of step, against the allocator."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from common import SectionReport, kinds_of_steps, table
from rich.progress import Progress

from memlab.internals.cycles import no_cycle_collection
from memlab.metering.profiler_recording import AllocatorRecording, compare
from memlab.units import format_bytes

from .observers import (
    EmptyMode,
    measured,
    recorded,
    reference_of,
    result_peak_bytes,
    results,
    tracked,
)
from .plans import Builder, MeterPlan, chosen_kinds
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
    """The reference of one kind of step, and the observers' errors in bytes."""

    kind: str
    peak_bytes: int
    peak_with_scratch_bytes: int
    scratch_share: float  # of all allocated bytes
    scratch_at_peak: dict[str, int]  # bytes at the peak with scratch, by operator
    memlab: int
    missing: int  # allocations that memlab reports and no operator made
    unseen: int  # results of operators that memlab does not report
    mem_tracker: Off
    needs_resets: bool  # see MemTrackerAnswer
    watched: int  # peak under an empty dispatch mode − peak without
    added_share: float  # share of bytes allocated only under an empty dispatch mode

    @property
    def right(self) -> str:
        """Return which observer's peak is exact."""
        who = {"memlab": self.memlab, "MemTracker": self.mem_tracker}
        exact = [name for name, figure in who.items() if figure == 0]
        return "both" if len(exact) == 2 else exact[0] if exact else "neither"


def exactness_of(kind: str, build: Builder) -> Exactness:
    reference = reference_of(build)
    trace = measured(build)
    watched = recorded(build, EmptyMode)
    comparison = compare(trace, reference.recording)
    mem_tracker = tracked(build, reference.peak_bytes)
    return Exactness(
        kind=kind,
        peak_bytes=reference.peak_bytes,
        peak_with_scratch_bytes=reference.peak_with_scratch_bytes,
        scratch_share=comparison.excess_share,
        scratch_at_peak=scratch_at_peak(reference.recording),
        memlab=trace.peak_bytes - reference.peak_bytes,
        missing=comparison.missing.total(),
        unseen=comparison.unseen.total(),
        mem_tracker=mem_tracker.figure,
        needs_resets=mem_tracker.needs_resets,
        watched=reference.alive_bytes + result_peak_bytes(watched) - reference.peak_bytes,
        added_share=share_added(watched, reference.recording),
    )


def scratch_at_peak(recording: AllocatorRecording) -> dict[str, int]:
    """Return scratch bytes at the peak by operator."""
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
    """Return the share of bytes allocated only under a dispatch mode."""
    added = results(watched) - results(unwatched)
    return total_bytes(added) / max(1, total_bytes(unwatched.allocations))


def total_bytes(counts: Counter[int]) -> int:
    return sum(size * count for size, count in counts.items())


def exactness(plan: MeterPlan, bar: Progress) -> SectionReport:
    kinds = chosen_kinds(plan)
    rows = []
    for kind, build in bar.track(kinds.items(), description="exactness"):
        with no_cycle_collection():
            rows.append(exactness_of(kind, build))
    parts = [exactness_tallies(rows), exactness_table(rows), exactness_notes(rows)]
    return SectionReport(exactness_sentence(rows), "\n\n".join(parts), as_rows(rows))


def exactness_sentence(rows: list[Exactness]) -> str:
    ours, theirs = tally(figures(rows, "memlab")), tally(figures(rows, "mem_tracker"))
    streams = sum(not (row.missing or row.unseen) for row in rows)
    return (
        f"Against the CPU allocator over {len(rows)} kinds of training step, memlab's peak is "
        f"exact to the byte in {ours.exact}{at_worst(ours)} and every allocation in {streams}. "
        f"torch's MemTracker answers for {theirs.answers} and is exact in "
        f"{theirs.exact}{at_worst(theirs)}."
    )


def figures(
    rows: list[Exactness], observer: str, *, with_scratch: bool = False
) -> Iterator[tuple[Off, int]]:
    """Yield (error, reference) in bytes for each row, with or without scratch."""
    for row in rows:
        scratch = row.peak_with_scratch_bytes - row.peak_bytes if with_scratch else 0
        figure = getattr(row, observer)
        yield figure if isinstance(figure, str) else figure - scratch, row.peak_bytes + scratch


def exactness_tallies(rows: list[Exactness]) -> str:
    observers = {"memlab": "memlab", "MemTracker": "mem_tracker"}
    named = {name: tally(figures(rows, observer)) for name, observer in observers.items()}
    for name, observer in observers.items():
        named[f"{name}, with scratch"] = tally(figures(rows, observer, with_scratch=True))
    return tallies(named)


def exactness_table(rows: list[Exactness]) -> str:
    header = ("kind of step", "peak", "memlab", "wrong allocations", "MemTracker", "exact")
    return table(
        (*header, "added by watching", "scratch", "peak with scratch"),
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
    """Explain the columns and the inexact rows."""
    outside = kinds_of_steps().INEXACT
    inexact = [row for row in rows if row.memlab or row.missing or row.unseen]
    much_scratch = [
        row for row in rows if row.peak_with_scratch_bytes > (1 + CLOSE) * row.peak_bytes
    ]
    return bullets(
        "*wrong allocations*: allocations that memlab reports and no operator made, plus results "
        "of operators that memlab does not report",
        "*added by watching*: share of bytes allocated only under a dispatch mode, even an empty "
        "one; memlab corrects for it",
        "*scratch*: share of bytes that kernels allocate and free before they return",
        "*with resets*: MemTracker's statistics were reset before each call of the model",
        *grouped("memlab", {row.kind: outside.get(row.kind, "?") for row in inexact}),
        *grouped(
            "MemTracker", {row.kind: explain_mem_tracker(row) for row in rows if row.mem_tracker}
        ),
        *grouped("scratch at the peak", {row.kind: describe_scratch(row) for row in much_scratch}),
    )


def explain_mem_tracker(row: Exactness) -> str:
    if isinstance(row.mem_tracker, str):
        return f"refuses: {row.mem_tracker}"
    if row.mem_tracker == row.watched:
        return "has exactly the peak of the step under an empty dispatch mode"
    return "is off, not explained by the step under an empty dispatch mode"


def describe_scratch(row: Exactness) -> str:
    below = row.peak_bytes / row.peak_with_scratch_bytes - 1
    operator, count = next(iter(row.scratch_at_peak.items()))
    return f"{format_bytes(count)} by `{operator}`; without it the peak is {percent(below)} off"
