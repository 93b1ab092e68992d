"""`memlab plan --script`: predict whether your training fits, and which techniques make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memlab.cli import report
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_options import choose_memory
from memlab.cli.plan_report import (
    EMPTIES_CACHE,
    Result,
    Section,
    carry_out,
    columns_of,
    room,
    shares,
)
from memlab.cli.requests import PlanRequest
from memlab.cli.rows import Row
from memlab.cli.script import Script, assumed, find_script
from memlab.cli.script_search import ScriptSearch, search, with_limits
from memlab.cli.script_sizes import MOST
from memlab.planner import Memory, Option
from memlab.planner.cards import budget_bytes
from memlab.planner.limits import MOST_PREDICTIONS
from memlab.planner.measuring import summarized
from memlab.planner.options import Way, plan_numbers
from memlab.planner.outside import AS_IT_IS, NO_ADAM, NO_LAYERS, ORDER
from memlab.planner.roofline import Roofline
from memlab.trace import Trace
from memlab.units import paragraph


def plan_script(request: PlanRequest) -> int:
    """Predict the step, then add techniques until it fits; return 1 if it never does."""
    ranks = request.gpus if "gpus" in request.given else None
    assert request.script is not None
    script = find_script(request.script, request.assume, ranks)
    memory, target = choose_memory(request.memory, request.device, request.margin)
    return carry_out(OfScript(script, memory, target), choose_folder(request.out))


@dataclass(frozen=True)
class OfScript:
    """Try techniques around the function's step, from the smallest change on, until it fits."""

    script: Script
    memory: Memory
    target: str
    stages: int = 3 * (len(ORDER) + 2 * MOST_PREDICTIONS)

    def plan(self, announce: Callable[[str], None]) -> Result:
        script, memory, target = self.script, self.memory, self.target
        budget = budget_bytes(memory, target)
        found = search(script, target, budget, memory.card_for_costs, announce)
        found = with_limits(found, script, target, budget, announce)
        options = _options(found, budget)
        defaults = {what: size.default for what, size in script.sizes.items()}
        first = found.rows[0].trace
        how = f"its second step{script.of_ranks}, predicted for {target} without running anything"
        return Result(
            f"{script}, planned for {memory.name}",
            plan_numbers(
                memory,
                target,
                [option.to_dict() for option in options],
                None if found.chosen is None else len(options) - 1,
                options[0],
                script=str(script),
                gpus=script.ranks or 1,
                batch=defaults.get("batch"),
                seq_len=defaults.get("length"),
                notes=[*found.limits.remarks, *_last(found.rows).notes],
            ),
            [f"{script}: {how}", *(assumed(first) if first else []), room(memory, target)],
            columns_of(
                [Section(options, options[0] if found.has_times else None)],
                "with",
                most=(MOST["batch"], MOST["length"]),
            ),
            found.limits.remarks,
            ["\n\n".join([*_blocks(script, found), *_remarks(found, budget)]) + "\n"],
            rows=found.rows,
        )


def _options(found: ScriptSearch, budget: int) -> list[Option]:
    """Return a row for each attempt; the one that fits has the limits and the code."""
    options = []
    for row in found.rows:
        chosen = found.chosen if found.chosen and row.name == found.chosen.name else None
        options.append(
            Option(
                Way(row.name),
                found.needed.get(row.name, 0),
                budget,
                summarized(row.trace, extrapolated=False) if row.trace else None,
                found.seconds.get(row.name),
                largest_batch=found.limits.batch if chosen else None,
                longest=found.limits.length if chosen else None,
                code=[*chosen.lines, *chosen.lines_inside] if chosen else None,
                failure=row.failure,
            )
        )
    return options


def _blocks(script: Script, found: ScriptSearch) -> Iterator[str]:
    """Explain the columns, and the rows that failed."""
    if found.limits.batch or found.limits.length:
        yield paragraph(_about_limits(script))
    if found.plain is not None and found.has_times:
        yield paragraph(_about_times(found.plain))
    yield from map(paragraph, report.failures(found.rows))


def _about_limits(script: Script) -> str:
    given = ", ".join(f"{size.name}={size.default}" for size in script.sizes.values())
    return (
        f"batch up to, length up to: predicted to fit, each with the other at its default "
        f"({given}), the length in steps of 128; a slightly larger value may fit"
    )


def _about_times(plain: Roofline) -> str:
    return (
        f"time: estimated for {plain.card.name}, relative to the unchanged step, whose time is "
        f"{shares(plain.seconds)}; an operator takes as long as its computation or its memory "
        f"traffic, whichever is longer, and nothing overlaps"
    )


def _remarks(found: ScriptSearch, budget: int) -> Iterator[str]:
    """Say what was found, with the code that applies the techniques."""
    rows, chosen, places = found.rows, found.chosen, found.places
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
