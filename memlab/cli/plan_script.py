"""`memlab plan --script`: predict whether your training fits, and which techniques make it fit."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from memlab.cli import report, terminal
from memlab.cli.documents import room_numbers
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_options import choose_memory
from memlab.cli.plan_report import EMPTIES_CACHE, room, shares
from memlab.cli.requests import PlanRequest
from memlab.cli.results import write_script_plan
from memlab.cli.rows import Row
from memlab.cli.script import Script, assumed, find_script
from memlab.cli.script_search import ScriptSearch, search, with_limits
from memlab.cli.script_sizes import MOST
from memlab.planner import Memory
from memlab.planner.cards import budget_bytes
from memlab.planner.limits import MOST_PREDICTIONS
from memlab.planner.measuring import summarized
from memlab.planner.options import option_numbers, verdict
from memlab.planner.outside import AS_IT_IS, NO_ADAM, NO_LAYERS, ORDER
from memlab.planner.roofline import Roofline
from memlab.trace import Trace
from memlab.units import format_bytes, paragraph


def plan_script(request: PlanRequest) -> int:
    """Predict the step, then add techniques until it fits; return 1 if it never does."""
    ranks = request.gpus if "gpus" in request.given else None
    assert request.script is not None
    script = find_script(request.script, request.assume, ranks)
    gpu_memory, target = choose_memory(request.memory, request.device, request.margin)
    folder = choose_folder(request.out)
    budget = budget_bytes(gpu_memory, target)
    with terminal.progress(3 * (len(ORDER) + 2 * MOST_PREDICTIONS)) as announce:
        found = search(script, target, budget, gpu_memory.card_for_costs, announce)
        found = with_limits(found, script, target, budget, announce)
    _show(script, gpu_memory, target, budget, found)
    numbers = {"script": str(script), "gpus": ranks or 1, **room_numbers(gpu_memory, target)}
    write_script_plan(found.rows, {**numbers, **_numbers(script, found, budget)}, folder)
    return 0 if found.chosen else 1


def _show(
    script: Script,
    memory: Memory,
    target: str,
    budget: int,
    found: ScriptSearch,
) -> None:
    how = f"its second step{script.of_ranks}, predicted for {target} without running anything"
    terminal.echo(paragraph(f"{script}: {how}"))
    if found.rows[0].trace is not None:
        for note in assumed(found.rows[0].trace):
            terminal.echo(note)
    terminal.echo(f"{paragraph(room(memory, target))}\n")
    terminal.show_table(_table(found, budget))
    if found.limits.remarks:
        terminal.echo("\n" + "\n".join(map(paragraph, found.limits.remarks)))
    if found.limits.batch or found.limits.length:
        terminal.echo(f"\n{paragraph(_about_limits(script))}")
    if found.plain is not None and found.has_times:
        terminal.echo(f"\n{paragraph(_about_times(found.plain))}")
    for sentence in report.failures(found.rows):
        terminal.echo(f"\n{paragraph(sentence)}")
    for sentence in _remarks(found, budget):
        terminal.echo(f"\n{sentence}")
    terminal.echo("")


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


def _table(found: ScriptSearch, budget: int) -> Table:
    lines = [_line(found, row, budget) for row in found.rows]
    columns = ("with", "allocated", "reserved", "left", "time", "batch up to", "length up to")
    return terminal.table_of({name: [line.get(name, "") for line in lines] for name in columns})


def _line(found: ScriptSearch, row: Row, budget: int) -> dict[str, str]:
    if row.trace is None:
        return {"with": row.name, "allocated": "failed"}
    left = budget - found.needed[row.name]
    reserved = row.trace.reserved_bytes
    time = f"{row.estimated_time_ratio or 1:.2f} ×" if found.has_times else ""
    is_chosen = found.chosen is not None and row.name == found.chosen.name
    return {
        "with": row.name,
        "allocated": format_bytes(row.trace.allocated_bytes),
        "reserved": "" if reserved is None else format_bytes(reserved),
        "left": format_bytes(left) if left >= 0 else f"lacks {format_bytes(-left)}",
        "time": time,
        "batch up to": _up_to("batch", found.limits.batch) if is_chosen else "",
        "length up to": _up_to("length", found.limits.length) if is_chosen else "",
    }


def _up_to(what: str, number: int | None) -> str:
    """Format a limit; "+" if larger ones were not tried."""
    return f"{number:,}{'+' if number >= MOST[what] else ''}" if number else ""


# ------------------------------------------------------------------ the plan as JSON


def _numbers(script: Script, found: ScriptSearch, budget: int) -> dict[str, Any]:
    """Return the plan's fields for JSON, without the memory's."""
    defaults = {what: size.default for what, size in script.sizes.items()}
    notes = [*found.limits.remarks, *_last(found.rows).notes]
    return {
        "verdict": verdict(found.chosen is not None, found.chosen is AS_IT_IS),
        "batch": defaults.get("batch"),
        "seq_len": defaults.get("length"),
        "bytes_as_it_is": found.needed[AS_IT_IS.name],
        "chosen": None if found.chosen is None else len(found.rows) - 1,
        "options": [_option_numbers(found, row, budget) for row in found.rows],
        "notes": notes,
    }


def _option_numbers(found: ScriptSearch, row: Row, budget: int) -> dict[str, Any]:
    if row.trace is None:
        return option_numbers(row.name, fits=False, failure=row.failure)
    needed = found.needed[row.name]
    chosen = found.chosen if found.chosen is not None and row.name == found.chosen.name else None
    return option_numbers(
        row.name,
        fits=needed <= budget,
        measured=summarized(row.trace, extrapolated=False),
        needed_bytes=needed,
        missing_bytes=needed - budget,
        empties_cache=needed <= budget < (row.trace.reserved_bytes or 0),
        estimated_seconds=found.seconds.get(row.name),
        largest_batch=found.limits.batch if chosen else None,
        longest_sequence=found.limits.length if chosen else None,
        code=[*chosen.lines, *chosen.lines_inside] if chosen else None,
    )
