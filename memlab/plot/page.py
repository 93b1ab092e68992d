"""The page of a picture: its size, colours and fonts, what is written on it, and its file.

Pages are laid out in inches from the bottom left corner, and every text is measured before it is
placed. The figures are made without pyplot: no backend or window is touched, and matplotlib's
settings stay as the user has them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from textwrap import fill

import matplotlib
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D, Bbox, Transform

from memlab.internals.files import write_beside
from memlab.units import BINARY_UNITS

# Any two stay apart for every kind of colour vision; greys are the bytes that nobody asked for.
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
WIDTH, MARGIN, LINE, GAP, SWATCH = 9.0, 0.25, 0.24, 0.1, 0.14  # inches; LINE from text to text
TITLE_CHARACTERS = 80  # in a line
SHOWN_DOTS, DRAWN_DOTS = 100, 200  # an inch: as shown on a page, as drawn for dense screens

MEASURED = "run the step inside memlab.measure, on tensors made there"
COVER = {"facecolor": "white", "linewidth": 0, "pad": 1}  # behind a text that crosses a line
METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


class Picture(Figure):
    """A Figure that a notebook shows without pyplot: IPython asks for `_repr_png_`."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The image, and the size in pixels to show it at."""
        width, height = (round(SHOWN_DOTS * inches) for inches in self.get_size_inches())
        return rendered(self, "png"), {"width": width, "height": height}

    def _ipython_display_(self) -> None:
        """The same image: once pyplot is on, IPython would crop it, at half the dots."""
        from IPython.display import display  # only IPython calls this

        image, size = self._repr_png_()
        bundle = {"image/png": image, "text/plain": repr(self)}
        display(bundle, metadata={"image/png": size}, raw=True)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write `figure` as PNG or SVG, by the suffix of `path`; the same figure gives the same bytes.

    It is written beside and renamed, so `path` is never half a picture.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in METADATA:
        raise ValueError(f"got {path.name!r} to save a figure in; end the name in .png or .svg")
    with write_beside(path) as beside:
        beside.write_bytes(rendered(figure, kind))


def text_width(text: str, *, bold: bool = False) -> float:
    """The width of the longest line of `text` in inches, drawn at SHOWN_DOTS.

    Finer dots don't round the letters' widths up, so there the same text is a little narrower.
    """
    font = FontProperties(size=TEXT_POINTS, weight="bold" if bold else "normal")
    measure = RendererAgg(1, 1, SHOWN_DOTS).get_text_width_height_descent
    return max(measure(line, font, ismath=False)[0] for line in text.split("\n")) / SHOWN_DOTS


@contextmanager
def our_style() -> Iterator[None]:
    """matplotlib's defaults and the user's fonts, whatever else the user has set."""
    fonts = {key: matplotlib.rcParams[key] for key in ("font.family", "font.sans-serif")}
    ours = {"text.color": INK, "text.parse_math": False, "svg.hashsalt": "memlab"}
    with style.context(["default", fonts | ours]):
        yield


def rendered(figure: Figure, kind: str) -> bytes:
    image = BytesIO()
    with our_style():
        figure.savefig(image, format=kind, dpi=DRAWN_DOTS, metadata=METADATA[kind])
    return image.getvalue()


def new_page(title: str, height: float) -> Picture:
    """A figure with its title above a height that is left for the rest."""
    title = fill(title, TITLE_CHARACTERS)
    title_height = MARGIN + 1.3 * LINE * (title.count("\n") + 1)
    figure = Picture(figsize=(WIDTH, height + title_height), dpi=SHOWN_DOTS, facecolor="white")
    y = height + title_height - MARGIN
    write(figure, MARGIN, y, title, size=TITLE_POINTS, weight="bold", va="top")
    return figure


def inches(figure: Figure) -> Transform:
    """From inches on the page to dots; unlike matplotlib's own, it follows a figure that is
    cropped as it is drawn, which notebooks do."""
    width, height = figure.get_size_inches()
    return Affine2D().scale(1 / width, 1 / height) + figure.transFigure


def new_axes(figure: Figure, *, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes without a frame, their sides given in inches."""
    width, height = figure.get_size_inches()
    sides = (left / width, bottom / height, (right - left) / width, (top - bottom) / height)
    axes = figure.add_axes(sides, facecolor="white")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=TEXT_POINTS, labelcolor=GREY)
    return axes


def sides(axes: Axes) -> Bbox:
    """Where the axes lie on the page, in inches."""
    return axes.bbox.transformed(inches(axes.figure).inverted())


def on_page(axes: Axes, x: float, y: float = 0) -> tuple[float, float]:
    """Where a point of the axes lies on the page, in inches."""
    to_page = axes.transData + inches(axes.figure).inverted()
    return tuple(to_page.transform((x, y)))


def write(figure: Figure, x: float, y: float, text: str, **how) -> None:
    how = {"size": TEXT_POINTS, "va": "center"} | how
    figure.text(x, y, text, transform=inches(figure), **how)


def draw_line(
    figure: Figure, x: tuple[float, float], y: tuple[float, float], colour: str, points: float
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
    """Raises ValueError where there is nothing to draw."""
    if not bytes_:
        raise ValueError(
            f"got {what} in which nothing was ever allocated; a picture wants at least one "
            f"allocation: {remedy}"
        )


def draw_byte_scale(axes: Axes, highest: int, *, room: float = 1) -> None:
    """Bytes from 0 to the highest, in round numbers of the largest unit that it fills.

    `room` is how far the axis goes, in parts of the highest.
    """
    unit, size = [("B", 1), *(pair for pair in BINARY_UNITS.items() if pair[1] <= highest)][-1]
    locator = MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=unit == "B")
    ticks = [tick for tick in locator.tick_values(0, highest / size) if tick * size <= highest]
    axes.set_yticks([tick * size for tick in ticks], [f"{tick:g} {unit}" for tick in ticks])
    axes.set_ylim(0, room * highest)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def draw_event_scale(axes: Axes, first: int, after: int) -> None:
    """The moments after `first`, …, `after` - 1 events; they have no numbers."""
    axes.set_xlim(first, after)
    axes.set_xticks([])
    words = f"{after - 1 - first:,} allocations and frees, in order"
    axes.set_xlabel(words, size=TEXT_POINTS, color=GREY, labelpad=6)
