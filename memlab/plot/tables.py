"""A table beside a plot: the legend of its colours with the bytes of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from memlab.plot.page import (
    COLOURS,
    GAP,
    GREY,
    INK,
    LINE,
    MARGIN,
    SWATCH,
    WIDTH,
    draw_swatch,
    text_width,
    words_for,
    write,
)
from memlab.units import format_bytes


@dataclass(frozen=True)
class TableRow:
    """A name and its bytes. `swatch(figure, x, y)` draws its symbol."""

    name: str
    bytes: int
    swatch: Callable[[Figure, float, float], None]


@dataclass(frozen=True)
class Table:
    """Rows below a title, and their total bytes, if meaningful."""

    title: str
    bytes: int | None
    rows: Sequence[TableRow]

    @property
    def total(self) -> str:
        """The formatted total, or an empty string."""
        return "" if self.bytes is None else format_bytes(self.bytes)

    @property
    def width(self) -> float:
        """The width in inches, with a gap between names and sizes."""
        names = max((SWATCH + GAP + text_width(row.name) for row in self.rows), default=0)
        sizes = max((text_width(format_bytes(row.bytes)) for row in self.rows), default=0)
        header = text_width(f"{self.title}{self.total}", bold=True)
        return max(names + sizes, header) + 2 * GAP


def category_row(category: str, bytes_: int) -> TableRow:
    """Return a row with the category's colour."""
    return TableRow(words_for(category), bytes_, partial(draw_swatch, colour=COLOURS[category]))


def draw_table(figure: Figure, table: Table, *, left: float, top: float) -> None:
    """Draw the table from `left` to the page's margin. Rows with 0 bytes are grey."""
    right = WIDTH - MARGIN
    write(figure, left, top, table.title, weight="bold")
    write(figure, right, top, table.total, weight="bold", ha="right")
    for number, row in enumerate(table.rows, start=1):
        y, colour = top - LINE * number, INK if row.bytes else GREY
        row.swatch(figure, left, y)
        write(figure, left + SWATCH + GAP, y, row.name, color=colour)
        write(figure, right, y, format_bytes(row.bytes), color=colour, ha="right")
