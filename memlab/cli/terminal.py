"""How anything is said in a terminal, or in a file that takes its place: lines, tables, progress.

Nothing here imports torch: a hint and a mistake in a command line come at once.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from textwrap import fill

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# Numbers are never cut to the terminal's width: it wraps a line that is too long for it.
console = Console(highlight=False, emoji=False, width=200)

WIDTH = 80  # characters that every terminal has in a line
SECONDS_TO_A_LINE = 2.0  # where no bar can be drawn


def say(text: str) -> None:
    """Print a text as it is: no markup, no line broken."""
    console.print(text, markup=False, soft_wrap=True)


@contextmanager
def progress(stages: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; call what it gives with the name of each stage as that begins. In a
    file or a pipe, a line every few seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(stages)
        return
    with Progress(
        SpinnerColumn("line"),
        TextColumn("{task.description:<32}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else what goes to a file would go to the terminal
    ) as bar:
        task = bar.add_task("", total=stages, completed=-1)
        yield lambda stage: bar.update(task, advance=1, description=stage, refresh=True)


def _lines(stages: int) -> Callable[[str], None]:
    """Says which stage begins, if nothing was said for a while: what is quick stays silent."""
    done, said = count(1), time.monotonic()

    def announce(stage: str) -> None:
        nonlocal said
        number, now = next(done), time.monotonic()
        if now - said >= SECONDS_TO_A_LINE:
            said = now
            with suppress(OSError):  # nobody reads any more
                print(f"{number} of {stages}: {stage}", file=sys.stderr, flush=True)

    return announce


def paragraph(sentence: str) -> str:
    """The sentence in lines that every terminal has room for; no option or name is broken."""
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return fill(sentence, WIDTH, subsequent_indent="  ", **whole)


def show_table(table: Table) -> None:
    """Print it within WIDTH: where it is wider, each row's name stands above its figures."""
    if console.measure(table).maximum <= WIDTH:
        console.print(table)
        return
    title, *others = table.columns
    figures = Table.grid(padding=(0, 2, 0, 0))
    for _ in others:
        figures.add_column(justify="right", no_wrap=True)
    for cells in zip(*((column.header, *column.cells) for column in others), strict=True):
        figures.add_row(*cells)
    for name, line in zip((title.header, *title.cells), _lines_of(figures), strict=True):
        say(f"{name}\n  {line.rstrip()}")


def _lines_of(table: Table) -> list[str]:
    with console.capture() as printed:
        console.print(table)
    return printed.get().splitlines()


def table_of(columns: Mapping[str, Sequence[str]]) -> Table:
    """The columns in which something stands: the first to the left, the others to the right."""
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    for number, title in enumerate(shown):
        lines.add_column(title, justify="right" if number else "left", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        lines.add_row(*cells)
    return lines
