"""What `memlab plan` prints: the question, a table of recipes, and remarks on its columns."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from memlab.cli import terminal
from memlab.configs.evidence import margin_share
from memlab.configs.gpus import CONTEXT_BYTES
from memlab.configs.nccl import CHANNELS, REPORTED_BYTES, ring_bytes
from memlab.configs.targets import find_target
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE
from memlab.planner import Memory, Option, Plan
from memlab.planner.cards import budget_bytes
from memlab.planner.options import AS_IT_IS, command
from memlab.planner.recipes import GROUPS
from memlab.planner.search import MAX_SEQUENCES
from memlab.units import format_bytes, paragraph

COLUMNS = ("recipe", "allocated", "reserved", "left", "time", "batch up to", "length up to")
EMPTIES_CACHE = (
    "reserved: as on a larger card. If this card has less, torch releases its unused memory and "
    "requests again, which takes time; the step still fits"
)


def show(found: Plan) -> None:
    """Print the headline, the table of recipes, the remarks and the commands to train with."""
    terminal.echo("\n".join(map(paragraph, headline(found))) + "\n")
    if rows := [*found.options, *([found.miss] if found.miss else [])]:
        terminal.show_table(table(rows))
    sentences = "\n".join(map(paragraph, remarks(found)))
    terminal.echo(f"\n{sentences}")
    if found.as_it_is and found.as_it_is.fits:
        terminal.echo(f"\nwithout techniques:\n  {command(found, AS_IT_IS)}")
    for option in found.options:
        terminal.echo(f"\n{option.recipe.words}:\n  {found.command(option)}")
    if found.gpus > 1 and (stopped := list(_too_large_to_make(found))):
        terminal.echo("\n" + "\n".join(map(paragraph, stopped)))
    if found.gpus > MAX_GPUS_PER_MACHINE:
        terminal.echo("\nRun it on each machine; replace HOST by the name of the first.")


def _too_large_to_make(found: Plan) -> Iterator[str]:
    """Say which recipes' ranks cannot make their model: it is whole before it is sharded."""
    for option in found.options:
        needed = found.config.parameters * option.recipe.dtype.itemsize
        if needed > found.budget_bytes:
            yield (
                f"{option.recipe.words}: its command stops, because memlab makes the whole model, "
                f"{format_bytes(needed)}, on each GPU before it shards it"
            )


def headline(found: Plan) -> Iterator[str]:
    """Yield the model, the memory and the unmodified training's need."""
    many = f", on each of {found.gpus} GPUs" if found.gpus > 1 else ","
    yield (
        f"{found.model}{many} {found.batch} × {found.seq_len} tokens; "
        f"{found.config.parameters:,} parameters"
    )
    how = f"predicted for {found.target} without running anything"
    if found.target == "cpu":
        how = "predicted by dry runs for the CPU"
    yield room(found.memory, found.target)
    yield how
    if note := getattr(find_target(found.target), "note", None):
        yield note
    if plain := found.as_it_is:
        lacks = f"lacks {format_bytes(plain.missing_bytes)}"
        yield (
            f"without techniques ({AS_IT_IS}): {format_bytes(plain.needed_bytes)}, "
            f"{'fits' if plain.fits else lacks}"
        )


def room(memory: Memory, target: str) -> str:
    """Describe the total memory and how much of it tensors can use."""
    total = f"{memory.name}: {_total(memory)}"
    budget = format_bytes(budget_bytes(memory, target))
    if target == "cpu":
        rest = f"{budget} left for tensors after {_margin(memory)}"
        return f"{total}, {'all available for tensors' if not memory.margin_bytes else rest}"
    runs_cuda = memory.card is None or memory.card.runs_cuda
    context = (
        "the CUDA context" if runs_cuda else f"{format_bytes(CONTEXT_BYTES[1])} for the driver"
    )
    return f"{total}, {budget} left for PyTorch after {context} and {_margin(memory)}"


def _total(memory: Memory) -> str:
    """Format the memory, and say if no GPU of this name was seen to report it."""
    total, card = format_bytes(memory.total_bytes), memory.card
    if card is None or card.is_measured:
        return total
    if card.vendor == "Apple":
        return f"{total} of {card.advertised_gb} GB, the most that macOS recommends for the GPU"
    return f"about {total} of {card.advertised_gb} GB"


def _margin(memory: Memory) -> str:
    if memory.margin_bytes == 0:
        return "no margin"
    if memory.margin_bytes is not None:
        return f"a margin of {format_bytes(memory.margin_bytes)}"
    return f"a margin of {margin_share():.1%} (the largest underestimate for measured transformers)"


def nccl_buffers() -> str:
    """Say how much NCCL allocates outside torch, which no column of the table includes."""
    least, most = (format_bytes(ring_bytes(channels)) for channels in CHANNELS)
    reported = " to ".join(map(format_bytes, REPORTED_BYTES))
    return (
        f"the table excludes NCCL's buffers: {least} to {most} for the rings of each process "
        f"group, depending on the number of channels, and more for trees and networks (users "
        f"report {reported} on A100s); --margin leaves room for them"
    )


def table(rows: list[Option]) -> Table:
    """Build a line for each recipe that fits, and for the smallest that does not, by group.

    Times are relative to the first recipe of a group: the groups train different things.
    """
    lines: list[dict[str, str]] = []
    for group in GROUPS:
        if of_group := [row for row in rows if row.recipe.group == group]:
            first = of_group[0].candidate.step_seconds
            lines += [{"recipe": f"{group}:"}, *(_line(row, first) for row in of_group)]
    return terminal.table_of({name: [line.get(name, "") for line in lines] for name in COLUMNS})


def _line(row: Option, first: float) -> dict[str, str]:
    """Return the cells of a recipe; `first` is the time of the first recipe of its group."""
    found = row.measured
    return {
        "recipe": f"  {row.recipe.words}",
        "allocated": format_bytes(found.allocated_bytes),
        "reserved": format_bytes(found.reserved_bytes) if found.reserved_bytes else "",
        "left": left_or_lacking(-row.missing_bytes),
        "time": f"{row.candidate.step_seconds / first:.2f} ×",
        "batch up to": _up_to(row.largest_batch),
        "length up to": f"{row.longest:,}" if row.longest else "",
    }


def left_or_lacking(left: int) -> str:
    return format_bytes(left) if left >= 0 else f"lacks {format_bytes(-left)}"


def _up_to(batch: int | None) -> str:
    """Format a batch; "+" if larger ones were not tried."""
    return f"{batch:,}{'+' if batch == MAX_SEQUENCES else ''}" if batch else ""


def remarks(found: Plan) -> Iterator[str]:
    """Explain the table's columns, and its limits."""
    best, miss = found.best, found.miss
    if best is None:
        yield f"Nothing fits {found.memory.name}{_smallest(found)}"
    else:
        yield (
            f"time: estimated, relative to the first recipe of the same group, as if no copy "
            f"overlapped with computation; the time of {best.recipe.words} is "
            f"{shares(best.candidate.seconds)}"
        )
        yield (
            "each row is the fastest recipe that fits for its precision and optimizer; --recipes "
            "predicts more of them; full fine-tuning, LoRA and QLoRA train different weights, so "
            "their times are not compared"
        )
        if any(option.largest_batch for option in found.options):
            yield (
                f"batch up to: predicted to fit at {found.seq_len} tokens per sequence; length up "
                f"to: at batch {found.batch}, in steps of 128; a slightly larger value may fit"
            )
    if any(option.empties_cache for option in found.options):
        yield EMPTIES_CACHE
    elif miss and (miss.measured.reserved_bytes or 0) > miss.needed_bytes:
        yield (
            "left: a full card needs less than is reserved on a larger one, because torch releases "
            "its unused memory and requests again"
        )
    if best and miss:
        yield (
            f"The next faster recipe, {miss.recipe.words}, would fit with "
            f"{format_bytes(miss.missing_bytes)} more"
        )
    if found.gpus > 1 and found.target != "cpu":
        yield nccl_buffers()
    yield from found.failures


def _smallest(found: Plan) -> str:
    if found.miss is None:
        return ""
    return (
        f": the smallest recipe tried, {found.miss.recipe.words}, lacks "
        f"{format_bytes(found.miss.missing_bytes)} of {format_bytes(found.miss.needed_bytes)}; "
        f"use a shorter sequence, more GPUs or a larger GPU"
    )


def shares(seconds: Mapping[str, float]) -> str:
    """Format each term's share of an estimated step, the largest first."""
    total = sum(seconds.values())
    terms = sorted(seconds.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {value / total:.0%}" for name, value in terms if value > total / 100)
