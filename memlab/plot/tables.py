"""A table beside a picture: the key to its colours, and the bytes of each."""

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
class Row:
    """A name and its bytes. `swatch(figure, x, y)` draws what stands for it in the picture."""

    name: str
    bytes: int
    swatch: Callable[[Figure, float, float], None]


@dataclass(frozen=True)
class Table:
    """Rows below a title, and the bytes of all of them together, where there is such a sum."""

    title: str
    bytes: int | None
    rows: Sequence[Row]

    @property
    def total(self) -> str:
        """The bytes in words, or nothing."""
        return "" if self.bytes is None else format_bytes(self.bytes)

    @property
    def width(self) -> float:
        """In inches, with room between the names and the sizes."""
        names = max((SWATCH + GAP + text_width(row.name) for row in self.rows), default=0)
        sizes = max((text_width(format_bytes(row.bytes)) for row in self.rows), default=0)
        header = text_width(f"{self.title}{self.total}", bold=True)
        return max(names + sizes, header) + 2 * GAP


def category_row(category: str, bytes_: int) -> Row:
    """A row of the category's colour."""
    return Row(words_for(category), bytes_, partial(draw_swatch, colour=COLOURS[category]))


def draw_table(figure: Figure, table: Table, *, left: float, top: float) -> None:
    """From `left` to the page's margin; what has no bytes is grey."""
    right = WIDTH - MARGIN
    write(figure, left, top, table.title, weight="bold")
    write(figure, right, top, table.total, weight="bold", ha="right")
    for number, row in enumerate(table.rows, start=1):
        y, colour = top - LINE * number, INK if row.bytes else GREY
        row.swatch(figure, left, y)
        write(figure, left + SWATCH + GAP, y, row.name, color=colour)
        write(figure, right, y, format_bytes(row.bytes), color=colour, ha="right")
