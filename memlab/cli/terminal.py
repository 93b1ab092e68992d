"""Terminal output: lines, tables and progress. Output to a file is handled, too.

This module does not import torch, so hints and usage errors appear at once.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from memlab.units import WIDTH

# A wide console keeps rich from truncating numbers; the terminal wraps long lines itself.
console = Console(highlight=False, emoji=False, width=200)

SECONDS_BETWEEN_LINES = 2.0  # for output without a progress bar


def echo(text: str) -> None:
    """Print the text unchanged, without markup or line breaks."""
    console.print(text, markup=False, soft_wrap=True)


@contextmanager
def progress(stages: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on standard error. Call the yielded function with the name of each stage
    when it begins. If standard error is not a terminal, print a line every few seconds."""
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
        redirect_stdout=sys.stdout.isatty(),  # otherwise redirected output would reach the terminal
    ) as bar:
        task = bar.add_task("", total=stages, completed=-1)
        yield lambda stage: bar.update(task, advance=1, description=stage, refresh=True)


def _lines(stages: int) -> Callable[[str], None]:
    """Print the stage's name if nothing was printed for a while, so quick work prints nothing."""
    done, printed_at = count(1), time.monotonic()

    def announce(stage: str) -> None:
        nonlocal printed_at
        number, now = next(done), time.monotonic()
        if now - printed_at >= SECONDS_BETWEEN_LINES:
            printed_at = now
            with suppress(OSError):  # the reader has closed the pipe
                print(f"{number} of {stages}: {stage}", file=sys.stderr, flush=True)

    return announce


def show_table(table: Table) -> None:
    """Print a table. If it is wider than WIDTH, print each row's name above its figures."""
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
        echo(f"{name}\n  {line.rstrip()}" if line.strip() else name)  # or a heading


def _lines_of(table: Table) -> list[str]:
    with console.capture() as printed:
        console.print(table)
    return printed.get().splitlines()


def table_of(columns: Mapping[str, Sequence[str]]) -> Table:
    """Build a table from the non-empty columns, the first aligned left and the others right."""
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    for number, title in enumerate(shown):
        lines.add_column(title, justify="right" if number else "left", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        lines.add_row(*cells)
    return lines
