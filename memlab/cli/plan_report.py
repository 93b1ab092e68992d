"""What `memlab plan` prints: the question, a table of recipes, and what its columns leave open."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from memlab.cli import terminal
from memlab.planner import Memory, Option, Plan
from memlab.planner.options import AS_IT_IS, budget_bytes
from memlab.units import format_bytes

MOST_OTHERS = 3  # recipes that were not measured, to be shown


def show(found: Plan) -> None:
    """What was asked, the table, and what each column leaves open."""
    terminal.say("\n".join(map(terminal.paragraph, headline(found))) + "\n")
    others = found.others[:MOST_OTHERS]
    if rows := [*found.options, *others, *([found.miss] if found.miss else [])]:
        terminal.show_table(table(rows))
    sentences = "\n".join(map(terminal.paragraph, remarks(found)))
    terminal.say(f"\n{sentences}")
    for option in found.options:
        if option.recipe.by_formula_only:
            continue
        terminal.say(f"\n{option.recipe.words}:\n  {found.command(option)}")


def headline(found: Plan) -> Iterator[str]:
    """The model, the memory, and how it was found out."""
    many = f", one of {found.gpus} GPUs, each with" if found.gpus > 1 else ","
    yield (
        f"{found.model}{many} {found.batch} × {found.seq_len} tokens; "
        f"{found.config.parameters:,} parameters"
    )
    how = f"predicted for {found.target}, nothing is computed"
    if found.target == "cpu":
        how = "dry runs for the CPU"
    yield f"{room(found.memory, found.target)}; {how}"
    needed = found.bytes_as_it_is
    lacks = format_bytes(needed - found.budget_bytes)
    yield (
        f"as it is, {AS_IT_IS}, nothing saved: ≈ {format_bytes(needed)}, by formula: "
        f"{'fits' if needed <= found.budget_bytes else f'lacks {lacks}'}"
    )


def room(memory: Memory, target: str) -> str:
    """How much is there, and how much of it for tensors."""
    total = f"{memory.name}: {format_bytes(memory.total_bytes)}"
    if target == "cpu":
        return f"{total}, all of it for tensors"
    return f"{total}, of which CUDA leaves {format_bytes(budget_bytes(memory, target))} to torch"


def table(rows: list[Option]) -> Table:
    """A line for each recipe: those that fit, then the nearest that does not."""
    first = rows[0].candidate.step_seconds
    columns = {
        "recipe": [row.recipe.words for row in rows],
        "allocated": [
            format_bytes(row.measured.allocated_bytes)
            if row.measured
            else f"≈ {format_bytes(row.needed_bytes)}"
            for row in rows
        ],
        "reserved": [
            format_bytes(row.measured.reserved_bytes)
            if row.measured and row.measured.reserved_bytes
            else ""
            for row in rows
        ],
        "left": [
            format_bytes(-row.missing_bytes)
            if row.fits
            else f"lacks {format_bytes(row.missing_bytes)}"
            for row in rows
        ],
        "time": [f"{row.candidate.step_seconds / first:.2f} ×" for row in rows],
        "batch up to": [str(row.largest_batch or "") for row in rows],
        "length up to": [f"{row.longest:,}" if row.longest else "" for row in rows],
    }
    return terminal.table_of(columns)


def remarks(found: Plan) -> Iterator[str]:
    """What the table leaves open."""
    best, miss = found.best, found.miss
    if best is None:
        yield f"Nothing fits {found.memory.name}{_smallest(found)}"
    else:
        yield (
            f"time: over the first one's, which goes to {shares(best.candidate.seconds)}; an "
            f"estimate that counts every copy, not a measurement"
        )
        yield (
            "each recipe trains something else (another precision, optimizer or LoRA), and is the "
            "fastest found that trains it and fits"
        )
        if any(option.largest_batch for option in found.options):
            how = "measured" if found.exact else "by formula, scaled to what was measured; --exact"
            yield (
                f"batch up to: with {found.seq_len} tokens each; length up to: with a batch of "
                f"{found.batch}, in steps of 128. Both {how}{'' if found.exact else ' measures'}"
            )
    if best and miss:
        yield (
            f"The next, {miss.recipe.words}, does not fit: it lacks "
            f"{format_bytes(miss.missing_bytes)} of {format_bytes(miss.needed_bytes)}"
        )
    shown = (*found.options, *found.others)
    if any(option.recipe.by_formula_only for option in shown):
        yield "≈: by formula alone; nothing here runs tensor or pipeline parallel parts"
    elif found.others:
        yield (
            f"≈: by formula, not measured, nor what an allocator reserves beyond it; --recipes "
            f"{len(shown)} measures these, and --optimizer or --precision one of them"
        )
    yield from found.failures


def _smallest(found: Plan) -> str:
    if found.miss is None:
        return ""
    return (
        f": the smallest that was tried, {found.miss.recipe.words}, lacks "
        f"{format_bytes(found.miss.missing_bytes)} of {format_bytes(found.miss.needed_bytes)}; "
        f"take a shorter length, more GPUs or a larger card"
    )


def shares(seconds: Mapping[str, float]) -> str:
    """What an estimated step goes to, the largest first."""
    total = sum(seconds.values())
    terms = sorted(seconds.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {value / total:.0%}" for name, value in terms if value > total / 100)
