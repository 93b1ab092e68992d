"""Pictures of Traces: where one step's bytes are, and what several runs hold at their peaks.

`timeline` shows one step from left to right: what is alive after each allocation and free,
stacked by category, with the peak taken apart beside it. `breakdown` shows a bar for each of
several runs: what it holds at its peak, and what it saves against the first.

A long trace has more events than a picture has columns of dots. A column then shows the fullest
moment of its share of the events: a moment that was, never a mean, so the peak is always drawn.

Pages are laid out in inches from the bottom left corner, and every text is measured before it is
placed: texts don't meet, however short a phase or long a name. The figures are made without
pyplot: no backend or window is touched, and matplotlib's settings stay as the user has them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import fill

import matplotlib
import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.markers import CARETDOWN
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D, Bbox, Transform

from memlab.files import write_beside
from memlab.trace import CATEGORIES, PHASES, Trace
from memlab.units import BINARY_UNITS, format_bytes

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
PHASE_GREYS = {"forward": "#bdbdc4", "backward": "#85858d", "optimizer": "#45454a"}

TEXT_POINTS, TITLE_POINTS = 10, 13
WIDTH, MARGIN, LINE, GAP, SWATCH = 9.0, 0.25, 0.24, 0.1, 0.14  # inches; LINE from text to text
TITLE_CHARACTERS, NAME_CHARACTERS = 80, 28  # in a line
SHOWN_DOTS, DRAWN_DOTS = 100, 200  # an inch: as shown on a page, as drawn for dense screens

COLUMNS = 1000  # of a timeline: more than there are dots across it
NARROW = 0.01  # of a timeline's width: neighbouring phases below it are drawn as one
TIMELINE = 4.1  # inches below the title
WHEN = {
    "before": "before the step",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
}

COVER = {"facecolor": "white", "linewidth": 0, "pad": 1}  # behind a text that crosses a line
METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


class Picture(Figure):
    """A Figure that a notebook shows without pyplot: IPython asks for `_repr_png_`."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The image, and the size in pixels to show it at."""
        width, height = (round(SHOWN_DOTS * inches) for inches in self.get_size_inches())
        return _rendered(self, "png"), {"width": width, "height": height}


@dataclass(frozen=True)
class Skyline:
    """Bytes alive by category in each column of a timeline.

    The column between edges p and q stands for the moments after p, …, q-1 events.
    """

    edges: np.ndarray  # (columns + 1,)
    heights: dict[str, np.ndarray]  # category: (columns,)

    @property
    def totals(self) -> np.ndarray:
        """Bytes alive in each column."""
        return np.sum(list(self.heights.values()), axis=0)


@dataclass(frozen=True)
class Span:
    """A name and where it reaches from and to: in moments of a step, or in inches of a page."""

    name: str
    left: float
    right: float

    @property
    def width(self) -> float:
        """From left to right."""
        return self.right - self.left


def timeline(trace: Trace, *, title: str | None = None) -> Figure:
    """Bytes alive over the step, stacked by category; the peak is marked and taken apart.

    The picture begins where the step does: its first column is what was alive before.
    """
    _require_bytes(trace, "a trace")
    city = skyline(trace)
    with _style():
        figure = _page(title or "Memory alive during one step", TIMELINE)
        top = TIMELINE - LINE - GAP  # the names of the phases stand above the axes
        table = WIDTH - MARGIN - _table_width(trace, city)
        axes = _axes(figure, left=0.9, bottom=0.45, right=table - 2 * GAP, top=top)
        _draw_stack(axes, city)
        _draw_scales(axes, city)
        _draw_phases(axes, phase_spans(trace))
        _draw_peak(axes, city, _peak_in_words(trace))
        _draw_peak_table(figure, trace, city, left=table, top=top)
    return figure


def breakdown(traces: Mapping[str, Trace] | Trace, *, title: str | None = None) -> Figure:
    """A bar for each named trace: what it holds at its peak, and what it saves against the first.

    A Trace in place of the mapping gets one bar without a name.
    """
    named = {"": traces} if isinstance(traces, Trace) else dict(traces)
    if not named:
        raise ValueError("got no traces; give at least one, such as {'baseline': trace}")
    for name, trace in named.items():
        _require_bytes(trace, f"the trace {name!r}")
    peaks = [trace.peak_bytes for trace in named.values()]
    present = [c for c in CATEGORIES if any(c in trace.at_peak for trace in named.values())]
    with _style():
        names = [fill(name, NAME_CHARACTERS) for name in named]
        ends = _ends(peaks)
        rows = _key_rows(present)
        key_height = LINE * len(rows) + 2 * GAP
        bar_height = LINE * (2 + 0.7 * max(name.count("\n") for name in names))
        height = key_height + bar_height * len(named) + MARGIN  # below the title
        figure = _page(title or "Memory at the peak", height)
        left = MARGIN + max((text_width(name) + GAP for name in names if name), default=0)
        right = WIDTH - MARGIN - max(_end_width(*end) for end in ends)
        axes = _axes(figure, left=left, bottom=MARGIN, right=right, top=height - key_height)
        _draw_key(figure, rows, top=height)
        _draw_bars(axes, list(named.values()))
        _draw_names(axes, names)
        _draw_ends(axes, peaks, ends)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write `figure` as PNG or SVG, by the suffix of `path`; the same figure gives the same bytes.

    It is written beside and renamed, so `path` is never half a picture.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in METADATA:
        raise ValueError(f"got {path.name!r} to save a figure in; end the name in .png or .svg")
    with write_beside(path) as beside:
        beside.write_bytes(_rendered(figure, kind))


# ------------------------------------------------------------------ what to draw: plain data


def skyline(trace: Trace, columns: int = COLUMNS) -> Skyline:
    """The fullest moment of each of at most `columns` equal shares of the step's moments."""
    changes = np.array([event.bytes for event in trace.events], dtype=np.int64)
    kinds = np.array([event.category for event in trace.events])
    alive = _running(changes)
    moments = np.arange(_first_moment(trace), len(alive))
    shares = np.array_split(moments, min(columns, len(moments)))
    fullest = np.array([share[alive[share].argmax()] for share in shares])
    edges = np.array([*(share[0] for share in shares), len(alive)])
    heights = {c: _running(np.where(kinds == c, changes, 0))[fullest] for c in CATEGORIES}
    return Skyline(edges, {c: heights[c] for c in CATEGORIES if heights[c].any()})


def phase_spans(trace: Trace) -> list[Span]:
    """The step's phases from left to right; neighbours too short to draw are joined in one span."""
    first = _first_moment(trace)
    spans, moment = [], 1
    for phase, run in groupby(event.phase for event in trace.events):
        after = moment + sum(1 for _ in run)
        if phase != "before":
            spans.append(Span(phase, moment, after))
        moment = after
    narrow = NARROW * (moment - first)
    groups = groupby(spans, key=lambda span: span.width < narrow)
    joined = [[_joined(list(group))] if short else list(group) for short, group in groups]
    return [span for group in joined for span in group]


def place_names(spans: Sequence[Span], widths: Mapping[str, float], page: Span) -> list[Span]:
    """Where to write the names of `spans` on `page`, in the same unit, none on another.

    Every name is written once, at the first span of its name, pushed aside if it must be; and
    again at each later span that has room for it.
    """
    first: dict[str, Span] = {}
    for span in spans:
        first.setdefault(span.name, span)
    placed = _pushed_apart(list(first.values()), widths, page)
    for span in spans:
        text = _centred(span, widths[span.name])
        if text.width < span.width and all(_apart(text, other) for other in placed):
            placed.append(text)
    return placed


def saving(bytes_: int, against: int) -> str:
    """In words, what share `bytes_` is less, or more, than `against`."""
    if bytes_ == against:
        return "the same"
    return f"{abs(bytes_ - against) / against:.1%} {'less' if bytes_ < against else 'more'}"


def text_width(text: str, *, bold: bool = False) -> float:
    """The width of the longest line of `text` in inches, drawn at SHOWN_DOTS.

    Finer dots don't round the letters' widths up, so there the same text is a little narrower.
    """
    font = FontProperties(size=TEXT_POINTS, weight="bold" if bold else "normal")
    measure = RendererAgg(1, 1, SHOWN_DOTS).get_text_width_height_descent
    return max(measure(line, font, ismath=False)[0] for line in text.split("\n")) / SHOWN_DOTS


def _require_bytes(trace: Trace, what: str) -> None:
    if not trace.peak_bytes:
        raise ValueError(
            f"got {what} in which nothing was ever allocated; a picture wants at least one "
            f"allocation: run the step inside memlab.measure, on tensors made there"
        )


def _running(changes: np.ndarray) -> np.ndarray:
    """The sum of the first 0, 1, …, n changes."""
    return np.concatenate([[0], changes.cumsum()])


def _first_moment(trace: Trace) -> int:
    """How many events the step begins after; 0 if it has none, and never past the peak."""
    phases = (event.phase for event in trace.events)
    before = next((index for index, phase in enumerate(phases) if phase != "before"), 0)
    return min(before, trace.peak_position)


def _joined(spans: Sequence[Span]) -> Span:
    names = {span.name for span in spans}
    return Span(
        " + ".join(phase for phase in PHASES if phase in names), spans[0].left, spans[-1].right
    )


def _centred(span: Span, width: float) -> Span:
    left = (span.left + span.right - width) / 2
    return Span(span.name, left, left + width)


def _apart(one: Span, other: Span) -> bool:
    return one.right + GAP <= other.left or other.right + GAP <= one.left


def _pushed_apart(spans: Sequence[Span], widths: Mapping[str, float], page: Span) -> list[Span]:
    """A text centred on each span, pushed right off the one before it, then left off the next."""
    texts, edge = [], page.left
    for span in spans:
        left = max(_centred(span, widths[span.name]).left, edge)
        texts.append(Span(span.name, left, left + widths[span.name]))
        edge = texts[-1].right + GAP
    edge = page.right
    for index, text in reversed(list(enumerate(texts))):
        right = min(text.right, edge)
        texts[index] = Span(text.name, right - text.width, right)
        edge = texts[index].left - GAP
    return texts


# ------------------------------------------------------------------ the page


@contextmanager
def _style() -> Iterator[None]:
    """matplotlib's defaults and the user's fonts, whatever else the user has set."""
    fonts = {key: matplotlib.rcParams[key] for key in ("font.family", "font.sans-serif")}
    ours = {"text.color": INK, "text.parse_math": False, "svg.hashsalt": "memlab"}
    with style.context(["default", fonts | ours]):
        yield


def _rendered(figure: Figure, kind: str) -> bytes:
    image = BytesIO()
    with _style():
        figure.savefig(image, format=kind, dpi=DRAWN_DOTS, metadata=METADATA[kind])
    return image.getvalue()


def _page(title: str, height: float) -> Picture:
    """A figure with its title above a height that is left for the rest."""
    title = fill(title, TITLE_CHARACTERS)
    title_height = MARGIN + 1.3 * LINE * (title.count("\n") + 1)
    figure = Picture(figsize=(WIDTH, height + title_height), dpi=SHOWN_DOTS, facecolor="white")
    y = height + title_height - MARGIN
    _write(figure, MARGIN, y, title, size=TITLE_POINTS, weight="bold", va="top")
    return figure


def _inches(figure: Figure) -> Transform:
    """From inches on the page to dots; unlike matplotlib's own, it follows a figure that is
    cropped as it is drawn, which notebooks do."""
    width, height = figure.get_size_inches()
    return Affine2D().scale(1 / width, 1 / height) + figure.transFigure


def _axes(figure: Figure, *, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes without a frame, their sides given in inches."""
    width, height = figure.get_size_inches()
    sides = (left / width, bottom / height, (right - left) / width, (top - bottom) / height)
    axes = figure.add_axes(sides, facecolor="white")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=TEXT_POINTS, labelcolor=GREY)
    return axes


def _write(figure: Figure, x: float, y: float, text: str, **how) -> None:
    how = {"size": TEXT_POINTS, "va": "center"} | how
    figure.text(x, y, text, transform=_inches(figure), **how)


def _draw_swatch(figure: Figure, x: float, y: float, category: str) -> None:
    corner = (x, y - SWATCH / 2)
    square = Rectangle(corner, SWATCH, SWATCH, color=COLOURS[category], linewidth=0)
    square.set_transform(_inches(figure))
    figure.add_artist(square)


def _draw_line(
    figure: Figure, x: tuple[float, float], y: tuple[float, float], colour: str, points: float
) -> None:
    line = Line2D(x, y, color=colour, linewidth=points, solid_capstyle="butt")
    line.set_transform(_inches(figure))
    figure.add_artist(line)


def _sides(axes: Axes) -> Bbox:
    """Where the axes lie on the page, in inches."""
    return axes.bbox.transformed(_inches(axes.figure).inverted())


def _on_page(axes: Axes, x: float, y: float = 0) -> tuple[float, float]:
    """Where a point of the axes lies on the page, in inches."""
    to_page = axes.transData + _inches(axes.figure).inverted()
    return tuple(to_page.transform((x, y)))


def _words(category: str) -> str:
    return category.replace("_", " ")


# ------------------------------------------------------------------ the timeline


def _draw_stack(axes: Axes, city: Skyline) -> None:
    """Every layer reaches down to 0 behind those below it: no seams between the colours."""
    height = city.totals
    for category in reversed(city.heights):
        layer = StepPatch(height, city.edges, fill=True, color=COLOURS[category], label=category)
        axes.add_artist(layer)  # axes.stairs would look for its extremes, which we know, slowly
        height = height - city.heights[category]


def _draw_scales(axes: Axes, city: Skyline) -> None:
    """Bytes in round numbers of the largest unit that the peak fills; moments have no numbers."""
    peak = city.totals.max()
    unit, size = [("B", 1), *(pair for pair in BINARY_UNITS.items() if pair[1] <= peak)][-1]
    locator = MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=unit == "B")
    ticks = [tick for tick in locator.tick_values(0, peak / size) if tick * size <= peak]
    axes.set_yticks([tick * size for tick in ticks], [f"{tick:g} {unit}" for tick in ticks])
    axes.set_ylim(0, 1.13 * peak)  # room for the peak's label
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(city.edges[0], city.edges[-1])
    axes.set_xticks([])
    events = city.edges[-1] - 1 - city.edges[0]
    words = f"{events:,} allocations and frees, in order"
    axes.set_xlabel(words, size=TEXT_POINTS, color=GREY, labelpad=6)


def _draw_phases(axes: Axes, spans: Sequence[Span]) -> None:
    """A bar above each phase and its name; a line down to each end of those that have the room."""
    figure, box = axes.figure, _sides(axes)
    y = box.y1 + GAP / 2
    spans = [Span(s.name, _on_page(axes, s.left)[0], _on_page(axes, s.right)[0]) for s in spans]
    widths = {span.name: text_width(span.name) for span in spans}
    for span in spans:
        inset = min(0.01, span.width / 4)
        colour = PHASE_GREYS.get(span.name, GREY)
        _draw_line(figure, (span.left + inset, span.right - inset), (y, y), colour, 3)
    for before, after in pairwise(spans):
        if before.width > widths[before.name] or after.width > widths[after.name]:
            _draw_line(figure, (after.left, after.left), (box.y0, y), GREY, 0.5)
    for text in place_names(spans, widths, Span("", box.x0, box.x1)):
        _write(figure, text.left, y + LINE / 2, text.name, color=GREY)


def _draw_peak(axes: Axes, city: Skyline, words: str) -> None:
    """An arrow with its tip on the peak; `words` above it, as near as the axes' sides allow."""
    box, column = _sides(axes), city.totals.argmax()
    peak, middle = city.totals[column], city.edges[column : column + 2].mean()
    axes.plot(middle, peak, marker=CARETDOWN, color=INK, markersize=6, clip_on=False)
    x, y = _on_page(axes, middle, peak)
    half = text_width(words, bold=True) / 2
    x = np.clip(x, box.x0 + half, box.x1 - half)
    _write(axes.figure, x, y + 0.75 * LINE, words, weight="bold", ha="center", bbox=COVER)


def _peak_in_words(trace: Trace) -> str:
    return f"peak {format_bytes(trace.peak_bytes)}, {WHEN[trace.peak_phase]}"


def _peak_rows(trace: Trace, city: Skyline) -> list[tuple[str, int]]:
    """(category, bytes at the peak) of all that is drawn, from the stack's top down."""
    return [(category, trace.at_peak.get(category, 0)) for category in reversed(city.heights)]


def _table_width(trace: Trace, city: Skyline) -> float:
    rows = _peak_rows(trace, city)
    names = max(SWATCH + GAP + text_width(_words(category)) for category, _ in rows)
    sizes = max(text_width(format_bytes(bytes_)) for _, bytes_ in rows)
    header = text_width(f"at the peak{format_bytes(trace.peak_bytes)}", bold=True)
    return max(names + sizes, header) + 2 * GAP


def _draw_peak_table(
    figure: Figure, trace: Trace, city: Skyline, *, left: float, top: float
) -> None:
    """What the peak is made of, in the order of the stack: the key to the colours as well."""
    right = WIDTH - MARGIN
    _write(figure, left, top, "at the peak", weight="bold")
    _write(figure, right, top, format_bytes(trace.peak_bytes), weight="bold", ha="right")
    for row, (category, bytes_) in enumerate(_peak_rows(trace, city), start=1):
        y, colour = top - LINE * row, INK if bytes_ else GREY
        _draw_swatch(figure, left, y, category)
        _write(figure, left + SWATCH + GAP, y, _words(category), color=colour)
        _write(figure, right, y, format_bytes(bytes_), color=colour, ha="right")


# ------------------------------------------------------------------ the breakdown


def _ends(peaks: Sequence[int]) -> list[tuple[str, str]]:
    """What stands at the end of each bar: its total and, from the second on, what it saves."""
    savings = ["", *(saving(peak, peaks[0]) for peak in peaks[1:])]
    return [(format_bytes(peak), words) for peak, words in zip(peaks, savings, strict=True)]


def _end_width(total: str, words: str) -> float:
    return GAP + text_width(total, bold=True) + GAP + text_width(words)


def _draw_bars(axes: Axes, traces: Sequence[Trace]) -> None:
    """The first trace on top; the size of a part stands inside it if it has the room."""
    axes.set_axis_off()
    axes.set_xlim(0, max(trace.peak_bytes for trace in traces))
    axes.set_ylim(len(traces) - 0.5, -0.5)
    for row, trace in enumerate(traces):
        start = 0
        for category, bytes_ in trace.at_peak.items():
            colour = COLOURS[category]
            part = Rectangle((start, row - 0.3), bytes_, 0.6, color=colour, linewidth=0)
            part.set_label(category)
            axes.add_patch(part)
            _write_inside(axes, format_bytes(bytes_), (start, start + bytes_), row, colour)
            start += bytes_


def _write_inside(
    axes: Axes, text: str, sides: tuple[float, float], row: int, background: str
) -> None:
    (left, y), (right, _) = (_on_page(axes, side, row) for side in sides)
    if text_width(text) + GAP < right - left:
        red, green, blue = to_rgb(background)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        colour = "white" if dark else INK
        _write(axes.figure, (left + right) / 2, y, text, color=colour, ha="center")


def _draw_names(axes: Axes, names: Sequence[str]) -> None:
    for row, name in enumerate(names):
        _write(axes.figure, MARGIN, _on_page(axes, 0, row)[1], name)


def _draw_ends(axes: Axes, peaks: Sequence[int], ends: Sequence[tuple[str, str]]) -> None:
    for row, (peak, (total, words)) in enumerate(zip(peaks, ends, strict=True)):
        x, y = _on_page(axes, peak, row)
        _write(axes.figure, x + GAP, y, total, weight="bold")
        x += _end_width(total, "")
        _write(axes.figure, x, y, words, color=GREY)


def _key_rows(categories: Sequence[str]) -> list[list[str]]:
    """The entries of the key in as many rows as the page's width asks for."""
    rows: list[list[str]] = []
    room = 0.0
    for category in categories:
        if _key_width(category) > room:
            rows.append([])
            room = WIDTH - 2 * MARGIN
        rows[-1].append(category)
        room -= _key_width(category)
    return rows


def _key_width(category: str) -> float:
    return SWATCH + text_width(_words(category)) + 3 * GAP


def _draw_key(figure: Figure, rows: Sequence[Sequence[str]], top: float) -> None:
    for row, categories in enumerate(rows):
        x, y = MARGIN, top - LINE * (row + 0.5)
        for category in categories:
            _draw_swatch(figure, x, y, category)
            _write(figure, x + SWATCH + GAP / 2, y, _words(category))
            x += _key_width(category)
