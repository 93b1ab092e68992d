"""Dry runs of every kind of step, compared with the real step event by event."""

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from common import SectionReport, table
from rich.progress import Progress
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import memlab
from memlab.internals.cycles import no_cycle_collection
from memlab.trace import Event, Trace
from memlab.units import format_bytes

from .observers import attempt, measured, reference_of, tracked
from .plans import Builder, MeterPlan, chosen_kinds
from .tallies import Off, as_rows, at_worst, bullets, grouped, in_words, tallies, tally


@dataclass(frozen=True)
class DryRunRow:
    """A dry run of one kind of step, compared with the real step."""

    kind: str
    peak_bytes: int  # of the real step without the meter
    memlab: Off
    equal_events: bool  # same events as the measured real step
    unlike: list[str]  # operators that allocate other sizes than in the real step
    mem_tracker: Off
    needs_resets: bool  # see MemTrackerAnswer
    mem_tracker_unlike: list[str]  # the same, under FakeTensorMode alone


def dry_run_of(kind: str, build: Builder) -> DryRunRow:
    peak_bytes = reference_of(build).peak_bytes
    real = measured(build)
    dry = attempt(lambda: measured_inside(memlab.dry_run(), build))
    fake = attempt(lambda: measured_inside(FakeTensorMode(), build))
    mem_tracker = tracked(build, peak_bytes, FakeTensorMode, FakeTensor)
    return DryRunRow(
        kind=kind,
        peak_bytes=peak_bytes,
        memlab=dry if isinstance(dry, str) else dry.peak_bytes - peak_bytes,
        equal_events=isinstance(dry, Trace) and in_order(dry) == in_order(real),
        unlike=[] if isinstance(dry, str) else unlike(dry, real),
        mem_tracker=mem_tracker.figure,
        needs_resets=mem_tracker.needs_resets,
        mem_tracker_unlike=[] if isinstance(fake, str) else unlike(fake, real),
    )


def measured_inside(mode: AbstractContextManager[Any], build: Builder) -> Trace:
    with mode:
        return measured(build)


def unlike(trace: Trace, other: Trace) -> list[str]:
    """Return the operators whose allocated bytes differ between two traces."""
    ours, theirs = allocated_by_operator(trace), allocated_by_operator(other)
    return sorted(op for op in ours | theirs if ours[op] != theirs[op])


def allocated_by_operator(trace: Trace) -> Counter[str]:
    sums: Counter[str] = Counter()
    for event in trace.events:
        if event.bytes > 0 and event.phase != "before":
            sums[event.operator] += event.bytes
    return sums


def in_order(trace: Trace) -> list[Event]:
    """Return events with storages renumbered and consecutive frees sorted.

    Python decides the order of consecutive frees; it does not change the peak.
    """
    numbers: dict[int, int] = {}
    events = [e._replace(storage=numbers.setdefault(e.storage, len(numbers))) for e in trace.events]
    runs = groupby(events, key=lambda event: event.bytes < 0)
    return [e for frees, run in runs for e in (sorted(run) if frees else run)]


def dry_runs(plan: MeterPlan, bar: Progress) -> SectionReport:
    rows = []
    for kind, build in bar.track(chosen_kinds(plan).items(), description="dry-run"):
        with no_cycle_collection():
            rows.append(dry_run_of(kind, build))
    ours = tally((row.memlab, row.peak_bytes) for row in rows)
    theirs = tally((row.mem_tracker, row.peak_bytes) for row in rows)
    equal = sum(row.equal_events for row in rows)
    sentence = (
        f"A dry run has the same events as the real step in {equal} of {len(rows)} kinds, differs "
        f"in {ours.answers - equal}{at_worst(ours)} and refuses {len(rows) - ours.answers}. "
        f"MemTracker under FakeTensorMode answers for {theirs.answers} and has the real peak in "
        f"{theirs.exact}{at_worst(theirs)}."
    )
    summary = tallies({"memlab, dry run": ours, "MemTracker, FakeTensorMode": theirs})
    parts = [summary, dry_run_table(rows), dry_run_notes(rows)]
    return SectionReport(sentence, "\n\n".join(parts), as_rows(rows))


def dry_run_table(rows: list[DryRunRow]) -> str:
    def events(row: DryRunRow) -> str:
        return "none" if isinstance(row.memlab, str) else "equal" if row.equal_events else "differ"

    return table(
        ("kind of step", "peak", "events", "peak of the dry run", "MemTracker, FakeTensorMode"),
        [
            (
                row.kind,
                format_bytes(row.peak_bytes),
                events(row),
                in_words(row.memlab, row.peak_bytes),
                in_words(row.mem_tracker, row.peak_bytes, row.needs_resets),
            )
            for row in rows
        ],
    )


def dry_run_notes(rows: list[DryRunRow]) -> str:
    """Explain errors by operators that allocate other sizes on fake tensors."""
    ours = {row.kind: in_short(row.unlike) for row in rows if row.memlab or row.unlike}
    theirs = {
        row.kind: in_short(row.mem_tracker_unlike)
        for row in rows
        if row.mem_tracker and isinstance(row.mem_tracker, int)
    }
    refusals = {row.kind: row.memlab for row in rows if isinstance(row.memlab, str)}
    return bullets(
        *grouped("a dry run refuses", refusals),
        *grouped("a dry run", {kind: why for kind, why in ours.items() if kind not in refusals}),
        *grouped("MemTracker", theirs),
    )


def in_short(operators: list[str]) -> str:
    if not operators:
        return "the same as on real tensors"
    if len(operators) > 3:
        return f"{len(operators)} operators allocate other sizes: values decide which operators run"
    return f"other sizes than in the real step: {', '.join(f'`{op}`' for op in operators)}"
