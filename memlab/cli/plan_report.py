"""What `memlab plan` prints and writes, of whatever strategy: a Result has all of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from memlab.cli import terminal
from memlab.cli.errors import UsageError
from memlab.cli.results import write_plan
from memlab.cli.rows import Row
from memlab.configs.evidence import margin_share
from memlab.configs.gpus import CONTEXT_BYTES
from memlab.configs.nccl import CHANNELS, REPORTED_BYTES, ring_bytes
from memlab.planner import Memory, Option
from memlab.planner.cards import budget_bytes
from memlab.planner.options import NOTHING_FITS
from memlab.planner.processes import ProcessEndedError
from memlab.planner.search import MAX_SEQUENCES
from memlab.units import format_bytes, paragraph

EMPTIES_CACHE = (
    "reserved: as on a larger card. If this card has less, torch releases its unused memory and "
    "requests again, which takes time; the step still fits"
)
ON_EACH_MACHINE = "Run it on each machine; replace HOST by the name of the first."


@dataclass(frozen=True)
class Result:
    """What a strategy found.

    what      the title of the document and of the picture
    numbers   the document's fields
    headline  sentences above the table
    columns   of the table
    remarks   sentences below the table
    blocks    texts below them, such as commands and code
    options   whose peaks the picture shows, by name
    rows      of a script, with the pictures of a measurement
    """

    what: str
    numbers: Mapping[str, Any]
    headline: Sequence[str]
    columns: Mapping[str, Sequence[str]]
    remarks: Sequence[str] = ()
    blocks: Sequence[str] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    rows: Sequence[Row] = ()


class Strategy(Protocol):
    """A way to plan, with all that it has to know; `stages` says how often it announces one."""

    @property
    def stages(self) -> int: ...

    def plan(self, announce: Callable[[str], None]) -> Result: ...


def carry_out(strategy: Strategy, folder: Path) -> int:
    """Plan, print the result, write it; return 1 if nothing fits, else 0."""
    try:
        with terminal.progress(strategy.stages) as announce:
            found = strategy.plan(announce)
    except ProcessEndedError as error:
        raise UsageError(str(error)) from error
    show(found)
    write_plan(found, folder)
    return int(found.numbers["verdict"] == NOTHING_FITS)


def show(found: Result) -> None:
    """Print the sentences, the table and the texts below it."""
    terminal.echo(_lines(found.headline) + "\n")
    if any(found.columns.values()):
        terminal.show_table(terminal.table_of(found.columns))
    for text in (*filter(None, [_lines(found.remarks)]), *found.blocks):
        terminal.echo(f"\n{text}")


def _lines(sentences: Sequence[str]) -> str:
    return "\n".join(map(paragraph, sentences))


# ------------------------------------------------------------------ the table of options

COLUMNS = ("allocated", "rank", "reserved", "left", "time", "batch up to", "length up to")


@dataclass(frozen=True)
class Section:
    """Rows of the table, whose times are relative to the one of `first`."""

    options: Sequence[Option]
    first: Option | None
    heading: str = ""


def columns_of(
    sections: Sequence[Section],
    title: str = "recipe",
    *,
    named: Callable[[Option], str] = lambda option: option.recipe.words,
    most: tuple[int, int] = (MAX_SEQUENCES, 2**62),
) -> dict[str, list[str]]:
    """Build a line for each option. `most` are the largest batch and length that were tried."""
    lines: list[dict[str, str]] = []
    for section in sections:
        if section.heading:
            lines.append({title: f"{section.heading}:"})
        for each in section.options:
            indent = "  " if section.heading else ""
            lines.append({title: indent + named(each), **_line(each, section.first, most)})
    return {name: [line.get(name, "") for line in lines] for name in (title, *COLUMNS)}


def _line(option: Option, first: Option | None, most: tuple[int, int]) -> dict[str, str]:
    """Return the cells of an option, relative to the first one's time."""
    found, needed = option.measured, format_bytes(option.needed_bytes)
    bound = f"≥ {needed}" if option.needed_bytes else "failed"
    unit = first.step_seconds if first and option.seconds else 0
    return {
        "allocated": format_bytes(found.allocated_bytes) if found else bound,
        "rank": "" if option.rank is None else str(option.rank),
        "reserved": format_bytes(option.reserved_bytes) if option.reserved_bytes else "",
        "left": _left(option),
        "time": f"{option.step_seconds / unit:.2f} ×" if unit else "",
        "batch up to": _up_to(option.largest_batch, most[0]),
        "length up to": _up_to(option.longest, most[1]),
    }


def _left(option: Option) -> str:
    if option.failure:
        return "failed" if option.needed_bytes else ""
    if option.fits:
        return format_bytes(-option.missing_bytes)
    return f"lacks {'' if option.measured else '≥ '}{format_bytes(option.missing_bytes)}"


def _up_to(number: int | None, most: int) -> str:
    """Format a limit; "+" if larger ones were not tried."""
    return f"{number:,}{'+' if number >= most else ''}" if number else ""


# ------------------------------------------------------------------ sentences


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


def shares(seconds: Mapping[str, float]) -> str:
    """Format each term's share of an estimated step, the largest first."""
    total = sum(seconds.values())
    terms = sorted(seconds.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {value / total:.0%}" for name, value in terms if value > total / 100)
