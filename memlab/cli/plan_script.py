"""`memlab plan --script`: predict whether your training fits, and which techniques make it fit."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from rich.table import Table
from torch import nn

import memlab
from memlab.allocator.capacity import needed_bytes
from memlab.cli import report, terminal
from memlab.cli.errors import UsageError
from memlab.cli.parsing import choose_folder
from memlab.cli.plan import choose_memory
from memlab.cli.plan_report import EMPTIES_CACHE, room, shares
from memlab.cli.results import write
from memlab.cli.rows import Announce, Row
from memlab.cli.script import Script, assumed, find_script, measured, predicted
from memlab.planner import Card, Memory
from memlab.planner.cards import budget_bytes
from memlab.planner.outside import (
    AS_IT_IS,
    NO_ADAM,
    NO_LAYERS,
    ORDER,
    Attempt,
    Parts,
    Places,
    attempts,
    find,
)
from memlab.planner.roofline import Roofline
from memlab.trace import Trace
from memlab.units import format_bytes, paragraph


def plan_script(
    given: str,
    *,
    memory: str | None,
    target: str | None,
    out: str,
    assume: str | None = None,
    margin: str | None = None,
) -> int:
    """Predict the step, then add techniques until it fits; return 1 if it never does."""
    script = find_script(given, assume)
    gpu_memory, target = choose_memory(memory, target, margin)
    folder = choose_folder(out)
    budget = budget_bytes(gpu_memory, target)
    with terminal.progress(3 * len(ORDER)) as announce:
        found = search(script, target, budget, gpu_memory.card_for_costs, announce)
    _show(script, gpu_memory, target, budget, found)
    write(found.rows, f"{script}, planned for {gpu_memory.name}", folder, stem="plan")
    return 0 if found.chosen else 1


class ScriptSearch(NamedTuple):
    """The attempts up to the first that fits, and the places where techniques can be applied."""

    rows: list[Row]
    needed: dict[str, int]  # bytes that the device must have, by row
    chosen: Attempt | None
    places: Places
    plain: Roofline | None  # times of the unmodified step; None on a CPU

    @property
    def has_times(self) -> bool:
        """Return True if any estimated time can be compared."""
        return any(row.estimated_time_ratio for row in self.rows)


def search(
    script: Script, target: str, budget: int, card: Card, announce: Announce
) -> ScriptSearch:
    """Predict one attempt after another until one fits. Combinations with a technique that needs
    more memory by itself come last. A CPU gets no time estimates."""
    found: list[Places] = []

    def find_places(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        found.append(find(model, optimizer))
        return step, model, optimizer

    plain = None if target == "cpu" else Roofline(card)
    trace = _trace(script, target, AS_IT_IS.name, find_places, plain, announce)
    rows = [Row(AS_IT_IS.name, trace)]
    needed = {AS_IT_IS.name: needed_bytes(trace, budget)}
    [places] = found
    if needed[AS_IT_IS.name] <= budget:
        return ScriptSearch(rows, needed, AS_IT_IS, places, plain)
    order = _Order(places)
    for attempt in order:
        changed = plain and Roofline(card)
        try:
            trace = _trace(script, target, attempt.name, attempt.applied, changed, announce)
        except UsageError as error:
            rows.append(Row(attempt.name, failure=str(error)))
            order.failed(attempt)
            continue
        ratio = changed.total / plain.total if changed and plain.total else None
        rows.append(Row(attempt.name, trace, estimated_time_ratio=ratio))
        needed[attempt.name] = needed_bytes(trace, budget)
        if needed[attempt.name] <= budget:
            return ScriptSearch(rows, needed, attempt, places, plain)
        if needed[attempt.name] > needed[AS_IT_IS.name]:
            order.harmed(attempt)
    return ScriptSearch(rows, needed, None, places, plain)


class _Order:
    """The attempts for a training, without those whose technique failed alone. Those whose
    technique needs more memory by itself come last."""

    def __init__(self, places: Places) -> None:
        self._attempts = attempts(places)
        self._failed: set[str] = set()
        self._harmful: set[str] = set()

    def __iter__(self) -> Iterator[Attempt]:
        postponed: list[Attempt] = []
        for attempt in chain(self._attempts, postponed):
            names = {each.name for each in attempt.wrappers}
            if self._failed & names:
                continue
            if self._harmful & names and attempt not in postponed:
                postponed.append(attempt)
                continue
            yield attempt

    def failed(self, attempt: Attempt) -> None:
        """Leave out the technique from now on, if it was tried alone."""
        if len(attempt.wrappers) == 1:
            self._failed.add(attempt.name)

    def harmed(self, attempt: Attempt) -> None:
        """Try the technique last from now on, if it was tried alone."""
        if len(attempt.wrappers) == 1:
            self._harmful.add(attempt.name)


def _trace(
    script: Script,
    target: str,
    name: str,
    change: Callable[..., Parts],
    roofline: Roofline | None,
    announce: Announce,
) -> Trace:
    """Predict the second step after a change to the training, and count its seconds."""

    def counted(*parts: Any) -> Parts:
        step, model, optimizer = change(*parts)
        return (roofline.counted(step) if roofline else step), model, optimizer

    announce_stage = partial(_announce_stage, announce, name)
    if target == "cpu":
        with memlab.dry_run(assume=script.assume):
            return measured(script, None, announce_stage, counted)
    return predicted(script, target, announce_stage, counted)


def _announce_stage(announce: Announce, name: str, stage: str) -> None:
    announce(f"{name}: {stage}")


def _show(
    script: Script,
    memory: Memory,
    target: str,
    budget: int,
    found: ScriptSearch,
) -> None:
    how = f"its second step, predicted for {target} without running anything"
    terminal.echo(paragraph(f"{script}: {how}"))
    if found.rows[0].trace is not None:
        for note in assumed(found.rows[0].trace):
            terminal.echo(note)
    terminal.echo(f"{paragraph(room(memory, target))}\n")
    terminal.show_table(_table(found, budget))
    if found.has_times:
        terminal.echo(f"\n{paragraph(_about_times(found.plain))}")
    for sentence in report.failures(found.rows):
        terminal.echo(f"\n{paragraph(sentence)}")
    for sentence in _remarks(found, budget):
        terminal.echo(f"\n{sentence}")
    terminal.echo("")


def _about_times(plain: Roofline) -> str:
    return (
        f"time: estimated for {plain.card.name}, relative to the step as it is, which is "
        f"{shares(plain.seconds)}; each operator takes as long as its computation or its memory "
        f"traffic, whichever is longer; every copy is counted"
    )


def _remarks(found: ScriptSearch, budget: int) -> Iterator[str]:
    """Say what was found, with the code that applies the techniques."""
    rows, _, chosen, places, _ = found
    if len(rows) > 1 and not places.layers:
        yield paragraph(NO_LAYERS)
    if len(rows) > 1 and not places.is_adam:
        yield paragraph(NO_ADAM)
    if chosen is AS_IT_IS:
        yield "It fits as it is"
    elif chosen is None:
        yield "No technique here makes it fit; try a smaller batch, LoRA or bfloat16 weights"
    else:
        where = "after creating the optimizer, before creating a scheduler"
        yield _indented(f"It fits. Add this {where}:", chosen.lines)
        if chosen.lines_inside:
            yield _indented("and around the forward pass of the step:", chosen.lines_inside)
        yield "\n".join(map(paragraph, chosen.costs))
        if chosen.production:
            yield _indented("The same with other packages:", chosen.production)
    if chosen and (_last(rows).reserved_bytes or 0) > budget:
        yield paragraph(EMPTIES_CACHE)
    if notes := _last(rows).notes:
        yield "\n".join(paragraph(f"note: {note}") for note in notes)


def _last(rows: list[Row]) -> Trace:
    """Return the last attempt's trace: the one that fits, if any does."""
    return [row.trace for row in rows if row.trace is not None][-1]


def _indented(sentence: str, lines: list[str]) -> str:
    return "\n\n  ".join([paragraph(sentence), "\n  ".join(lines)])


def _table(found: ScriptSearch, budget: int) -> Table:
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("with", "allocated", "reserved", "left", *["time"] * found.has_times):
        lines.add_column(title, justify="left" if title == "with" else "right", no_wrap=True)
    for row in found.rows:
        if row.trace is None:
            lines.add_row(row.name, "failed")
            continue
        left = budget - found.needed[row.name]
        reserved = row.trace.reserved_bytes
        lines.add_row(
            row.name,
            format_bytes(row.trace.allocated_bytes),
            "" if reserved is None else format_bytes(reserved),
            format_bytes(left) if left >= 0 else f"lacks {format_bytes(-left)}",
            *[f"{row.estimated_time_ratio or 1:.2f} ×"] * found.has_times,
        )
    return lines
