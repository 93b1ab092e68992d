"""Terminal output: lines, tables and progress. Output to a file is handled, too.

With `--json`, a command prints one JSON document instead of text (memlab/cli/documents.py).

This module does not import torch, so hints and usage errors appear at once.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from memlab.units import WIDTH

# A wide console keeps rich from truncating numbers; the terminal wraps long lines itself. Without
# markup, "[red]" in the name of a file or a module is text.
console = Console(markup=False, highlight=False, emoji=False, width=10_000)

SECONDS_BETWEEN_LINES = 2.0  # for output without a progress bar


@dataclass(frozen=True)
class Style:
    """How a command prints its results.

    wide        a row of a table is one line, however long
    documents   the stream for a JSON document, which replaces all text; None: print text
    """

    wide: bool = False
    documents: TextIO | None = None


_TEXT = Style()
_style: ContextVar[Style] = ContextVar("style", default=_TEXT)


@contextmanager
def style(*, wide: bool = False, as_json: bool = False) -> Iterator[None]:
    """Print results in this style. With `as_json`, standard output gets JSON documents only, and
    whatever else is printed there, also by a user's script, goes to standard error."""
    with _documents_only() if as_json else nullcontext() as documents:
        token = _style.set(Style(wide, documents))
        try:
            yield
        finally:
            _style.reset(token)


@contextmanager
def _documents_only() -> Iterator[TextIO]:
    """Yield standard output, and send what others print there to standard error."""
    stdout = sys.stdout
    try:
        descriptor, errors = stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # not a file, as in a notebook
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    stdout.flush()
    with open(os.dup(descriptor), "w", encoding="utf-8") as documents:
        os.dup2(errors, descriptor)  # other processes and C code write to the descriptor
        try:
            yield documents
        finally:
            with suppress(OSError, ValueError):  # a script may have closed it
                sys.stdout.flush()
            os.dup2(documents.fileno(), descriptor)


def show_document(document: Mapping[str, Any]) -> None:
    """With `--json`, print the document."""
    if stream := _style.get().documents:
        print(json.dumps(document, indent=1, allow_nan=False), file=stream, flush=True)


def note(text: str) -> None:
    """Print a remark on the run itself. With `--json`, it goes to standard error."""
    console.print(printable(text), soft_wrap=True)


def printable(text: str) -> str:
    """Escape control characters, such as a terminal's commands in the name of a file."""
    if text.isprintable():
        return text
    parts = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return "".join(parts)


def announce(text: str) -> None:
    """Print a remark on the progress on standard error."""
    with suppress(OSError):  # the reader has closed the pipe
        print(printable(text), file=sys.stderr, flush=True)


def echo(text: str) -> None:
    """Print the text without markup or line breaks. With `--json`, print nothing."""
    if _style.get().documents is None:
        note(text)


def show(parts: Iterable[str | Table]) -> None:
    """Print lines and tables."""
    for part in parts:
        if isinstance(part, str):
            echo(part)
        else:
            show_table(part)


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
        yield lambda stage: bar.update(task, advance=1, description=printable(stage), refresh=True)


def _lines(stages: int) -> Callable[[str], None]:
    """Print the stage's name if nothing was printed for a while, so quick work prints nothing."""
    done, printed_at = count(1), time.monotonic()

    def announce_late(stage: str) -> None:
        nonlocal printed_at
        number, now = next(done), time.monotonic()
        if now - printed_at >= SECONDS_BETWEEN_LINES:
            printed_at = now
            announce(f"{number} of {stages}: {stage}")

    return announce_late


def show_table(table: Table) -> None:
    """Print a table. If it is wider than WIDTH, print each row's name above its figures, unless the
    user wants wide tables."""
    if _style.get().documents is not None:
        return
    if _style.get().wide or console.measure(table).maximum <= WIDTH:
        console.print(table)
        return
    columns: list[Any] = table.columns
    title, *others = ([column.header, *column.cells] for column in columns)
    for name, lines in zip(title, _figures(others), strict=True):
        echo("\n".join([*_wrapped(name), *lines]))


def _figures(columns: list[list[str]]) -> Iterator[list[str]]:
    """Yield the lines with each row's figures, which have as many lines as WIDTH requires."""
    widths = [max(map(cell_len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        lines = [""]
        for cell, width in zip(row, widths, strict=True):
            if cell_len(lines[-1]) + 2 + width > WIDTH and lines[-1]:
                lines.append("")
            lines[-1] += "  " + " " * (width - cell_len(cell)) + cell
        yield [line.rstrip() for line in lines if line.strip()]  # a heading has no figures


def _wrapped(name: str) -> list[str]:
    """Break a long name after a comma, a space or a plus sign."""
    indent = " " * (len(name) - len(name.lstrip()))
    lines = [indent]
    for part in re.findall(r"[^ +]+[ +]*", name):
        if cell_len(lines[-1] + part.rstrip()) > WIDTH and lines[-1].strip():
            lines.append(f"{indent}    ")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def table_of(columns: Mapping[str, Sequence[str]]) -> Table:
    """Build a table from the non-empty columns, the first aligned left and the others right."""
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    for number, title in enumerate(shown):
        lines.add_column(title, justify="right" if number else "left", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        lines.add_row(*map(printable, cells))
    return lines
