"""The page of a figure: size, colours, fonts, text, and saving.

Pages are laid out in inches from the bottom left corner. Every text is measured before it is
placed. Figures do not use pyplot, so matplotlib's settings stay unchanged.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D, Bbox, Transform

from memlab.internals.files import write_beside
from memlab.units import BINARY_UNITS

# Distinguishable with every kind of colour vision. Greys mark bytes that no tensor requested.
COLOURS = {
    "parameters": "#1f3a8a",
    "buffers": "#74cff2",
    "gradients": "#1f9158",
    "optimizer_state": "#8577e3",
    "inputs": "#f1e150",
    "activations": "#dd7a22",
    "forward_temporaries": "#f9b295",
    "backward_temporaries": "#9c1523",
    "optimizer_temporaries": "#a275ab",
    "workspace": "#606060",
    "rounding": "#b4b4b4",
    "unattributed": "#1c1c1c",
}
INK, GREY, PALE = "#1c1c1c", "#5f5f66", "#e4e4e8"

TEXT_POINTS, TITLE_POINTS = 10, 13
WIDTH, MARGIN, LINE, GAP, SWATCH = 9.0, 0.25, 0.24, 0.1, 0.14  # inches; LINE is the line height
TITLE_CHARACTERS = 80  # per line
SHOWN_DOTS, DRAWN_DOTS = 100, 200  # per inch: displayed size, and resolution for dense screens

MEASURED = "run the step inside memlab.measure, on tensors made there"
COVER = {"facecolor": "white", "linewidth": 0, "pad": 1}  # behind a text that crosses a line
METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


class Picture(Figure):
    """A Figure that notebooks show without pyplot: IPython calls `_repr_png_`."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return the image and the size in pixels at which to show it."""
        width, height = (round(SHOWN_DOTS * inches) for inches in self.get_size_inches())
        return rendered(self, "png"), {"width": width, "height": height}

    def _ipython_display_(self) -> None:
        """Show the same image. After a pyplot import, IPython would crop it at half resolution."""
        from IPython.display import display  # called only by IPython

        image, size = self._repr_png_()
        bundle = {"image/png": image, "text/plain": repr(self)}
        display(bundle, metadata={"image/png": size}, raw=True)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write `figure` as PNG or SVG, by the suffix of `path`. Equal figures give equal bytes.

    The file is written under a temporary name and renamed, so `path` is never incomplete.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in METADATA:
        raise ValueError(f"got {path.name!r} to save a figure in; end the name in .png or .svg")
    with write_beside(path) as beside:
        beside.write_bytes(rendered(figure, kind))


def text_width(text: str, *, bold: bool = False) -> float:
    """Return the width of the longest line of `text` in inches, drawn at SHOWN_DOTS.

    At higher resolutions, widths are rounded up less, so the text is slightly narrower.
    """
    font = FontProperties(size=TEXT_POINTS, weight="bold" if bold else "normal")
    measure = RendererAgg(1, 1, SHOWN_DOTS).get_text_width_height_descent
    return max(measure(line, font, ismath=False)[0] for line in text.split("\n")) / SHOWN_DOTS


@contextmanager
def plot_style() -> Iterator[None]:
    """Use matplotlib's defaults with the user's fonts."""
    fonts = {key: matplotlib.rcParams[key] for key in ("font.family", "font.sans-serif")}
    ours = {"text.color": INK, "text.parse_math": False, "svg.hashsalt": "memlab"}
    with style.context(["default", fonts | ours]):
        yield


def rendered(figure: Figure, kind: str) -> bytes:
    image = BytesIO()
    with plot_style():
        figure.savefig(image, format=kind, dpi=DRAWN_DOTS, metadata=METADATA[kind])
    return image.getvalue()


def new_page(title: str, height: float) -> Picture:
    """Return a figure with its title above `height` inches for the content."""
    title = fill(title, TITLE_CHARACTERS)
    title_height = MARGIN + 1.3 * LINE * (title.count("\n") + 1)
    figure = Picture(figsize=(WIDTH, height + title_height), dpi=SHOWN_DOTS, facecolor="white")
    y = height + title_height - MARGIN
    write(figure, MARGIN, y, title, size=TITLE_POINTS, weight="bold", va="top")
    return figure


def inches(figure: Any) -> Transform:
    """Return the transform from inches to pixels. It stays correct in notebooks that crop."""
    width, height = figure.get_size_inches()
    return Affine2D().scale(1 / width, 1 / height) + figure.transFigure


def new_axes(figure: Figure, *, left: float, bottom: float, right: float, top: float) -> Axes:
    """Add axes without a frame, with sides in inches."""
    width, height = figure.get_size_inches()
    sides = (left / width, bottom / height, (right - left) / width, (top - bottom) / height)
    axes = figure.add_axes(sides, facecolor="white")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=TEXT_POINTS, labelcolor=GREY)
    return axes


def sides(axes: Axes) -> Bbox:
    """Return the position of the axes on the page, in inches."""
    return axes.bbox.transformed(inches(axes.figure).inverted())


def on_page(axes: Axes, x: float, y: float = 0) -> tuple[float, float]:
    """Return the position of a data point on the page, in inches."""
    to_page = axes.transData + inches(axes.figure).inverted()
    return tuple(to_page.transform((x, y)))


def write(figure: Figure | SubFigure, x: float, y: float, text: str, **how: Any) -> None:
    settings: dict[str, Any] = {"size": TEXT_POINTS, "va": "center", **how}
    figure.text(x, y, text, transform=inches(figure), **settings)


def draw_line(
    figure: Figure | SubFigure,
    x: tuple[float, float],
    y: tuple[float, float],
    colour: str,
    points: float,
) -> None:
    line = Line2D(x, y, color=colour, linewidth=points, solid_capstyle="butt")
    line.set_transform(inches(figure))
    figure.add_artist(line)


def draw_swatch(figure: Figure, x: float, y: float, colour: str) -> None:
    corner = (x, y - SWATCH / 2)
    square = Rectangle(corner, SWATCH, SWATCH, color=colour, linewidth=0)
    square.set_transform(inches(figure))
    figure.add_artist(square)


def words_for(category: str) -> str:
    return category.replace("_", " ")


def require_bytes(bytes_: int, what: str, remedy: str = MEASURED) -> None:
    """Raise ValueError if there is nothing to draw."""
    if not bytes_:
        raise ValueError(
            f"got {what} without any allocation; a plot needs at least one allocation: {remedy}"
        )


def draw_byte_scale(axes: Axes, highest: int, *, room: float = 1) -> None:
    """Label bytes from 0 to `highest` in round numbers of the largest fitting unit.

    The axis extends to `room` times `highest`.
    """
    unit, size = [("B", 1), *(pair for pair in BINARY_UNITS.items() if pair[1] <= highest)][-1]
    locator = MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=unit == "B")
    ticks = [tick for tick in locator.tick_values(0, highest / size) if tick * size <= highest]
    axes.set_yticks([tick * size for tick in ticks], [f"{tick:g} {unit}" for tick in ticks])
    axes.set_ylim(0, room * highest)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def draw_event_scale(axes: Axes, first: int, after: int) -> None:
    """Set the axis to the moments after `first`, …, `after` - 1 events, without ticks."""
    axes.set_xlim(first, after)
    axes.set_xticks([])
    words = f"{after - 1 - first:,} allocations and frees, in order"
    axes.set_xlabel(words, size=TEXT_POINTS, color=GREY, labelpad=6)
