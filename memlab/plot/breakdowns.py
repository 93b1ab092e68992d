"""`breakdown`: one bar per run with its peak memory by category and its savings."""

from collections.abc import Mapping, Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab.plot.page import (
    COLOURS,
    GAP,
    GREY,
    INK,
    LINE,
    MARGIN,
    SWATCH,
    WIDTH,
    draw_line,
    draw_swatch,
    new_axes,
    new_page,
    on_page,
    plot_style,
    require_bytes,
    text_width,
    words_for,
    write,
)
from memlab.trace import CATEGORIES, Trace
from memlab.units import format_bytes

NAME_CHARACTERS = 28  # per line
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 2}  # behind text that a line may cross


def breakdown(
    traces: Mapping[str, Trace] | Trace,
    *,
    title: str | None = None,
    limit_bytes: int | None = None,
    room_for: Mapping[str, Trace] | None = None,
) -> Figure:
    """Draw one bar per named trace: its peak by category, and its savings against the first.

    A single Trace gets one bar without a name. `limit_bytes` draws a line across all bars.
    `room_for` sets the scale for further undrawn traces, so that plots are comparable.
    """
    named = {"": traces} if isinstance(traces, Trace) else dict(traces)
    if not named:
        raise ValueError("got no traces; give at least one, such as {'baseline': trace}")
    for name, trace in named.items():
        require_bytes(trace.peak_bytes, f"the trace {name!r}")
    peaks = [trace.peak_bytes for trace in named.values()]
    present = [c for c in CATEGORIES if any(c in trace.at_peak for trace in named.values())]
    room = dict(room_for or {}) | named
    with plot_style():
        names = [fill(name, NAME_CHARACTERS) for name in named]
        ends = _end_labels(peaks)
        rows = _key_rows(present)
        key_height = LINE * len(rows) + 2 * GAP
        bar_height = LINE * max(1.5, 1.2 + 0.7 * max(name.count("\n") for name in names))
        below = MARGIN + (0 if limit_bytes is None else LINE)
        height = key_height + bar_height * len(named) + below  # below the title
        figure = new_page(title or "Memory at the peak", height)
        widths = [text_width(fill(name, NAME_CHARACTERS)) + GAP for name in room if name]
        left = MARGIN + max(widths, default=0)
        highest = [trace.peak_bytes for trace in room.values()]
        right = WIDTH - MARGIN - max(_end_width(*end) for end in _end_labels(highest))
        axes = new_axes(figure, left=left, bottom=below, right=right, top=height - key_height)
        _draw_key(figure, rows, top=height)
        _draw_bars(axes, list(named.values()), max(limit_bytes or 0, *highest))
        if limit_bytes is not None:
            _draw_limit(axes, limit_bytes)
        _draw_names(axes, names)
        _draw_ends(axes, peaks, ends)
    return figure


def describe_saving(bytes_: int, against: int) -> str:
    """Return how much smaller or larger `bytes_` is than `against`, in words."""
    if bytes_ == against:
        return "the same"
    return f"{abs(bytes_ - against) / against:.1%} {'less' if bytes_ < against else 'more'}"


def _end_labels(peaks: Sequence[int]) -> list[tuple[str, str]]:
    """Return the text after each bar: its total and, from the second on, its savings."""
    savings = ["", *(describe_saving(peak, peaks[0]) for peak in peaks[1:])]
    return [(format_bytes(peak), words) for peak, words in zip(peaks, savings, strict=True)]


def _end_width(total: str, words: str) -> float:
    return GAP + text_width(total, bold=True) + GAP + text_width(words)


def _draw_bars(axes: Axes, traces: Sequence[Trace], at_least: int = 0) -> None:
    """Draw the bars, the first trace on top. Write sizes inside parts of sufficient width."""
    axes.set_axis_off()
    axes.set_xlim(0, max(at_least, *(trace.peak_bytes for trace in traces)))
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


def _draw_limit(axes: Axes, limit_bytes: int) -> None:
    """Draw a line through all bars with the limit below it."""
    bottom, top = axes.get_ylim()
    (x, low), (_, high) = on_page(axes, limit_bytes, bottom), on_page(axes, limit_bytes, top)
    draw_line(axes.figure, (x, x), (low, high), INK, 1.5)
    words = f"limit: {format_bytes(limit_bytes)}"
    write(axes.figure, x, low - LINE / 2, words, ha="right", weight="bold")


def _write_inside(
    axes: Axes, text: str, sides: tuple[float, float], row: int, background: str
) -> None:
    (left, y), (right, _) = (on_page(axes, side, row) for side in sides)
    if text_width(text) + GAP < right - left:
        red, green, blue = to_rgb(background)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        colour = "white" if dark else INK
        write(axes.figure, (left + right) / 2, y, text, color=colour, ha="center")


def _draw_names(axes: Axes, names: Sequence[str]) -> None:
    for row, name in enumerate(names):
        write(axes.figure, MARGIN, on_page(axes, 0, row)[1], name)


def _draw_ends(axes: Axes, peaks: Sequence[int], ends: Sequence[tuple[str, str]]) -> None:
    for row, (peak, (total, words)) in enumerate(zip(peaks, ends, strict=True)):
        x, y = on_page(axes, peak, row)
        write(axes.figure, x + GAP, y, total, weight="bold", bbox=PAPER)
        x += _end_width(total, "")
        if words:
            write(axes.figure, x, y, words, color=GREY, bbox=PAPER)


def _key_rows(categories: Sequence[str]) -> list[list[str]]:
    """Split the legend's entries into rows that fit the page's width."""
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
    return SWATCH + text_width(words_for(category)) + 3 * GAP


def _draw_key(figure: Figure, rows: Sequence[Sequence[str]], top: float) -> None:
    for row, categories in enumerate(rows):
        x, y = MARGIN, top - LINE * (row + 0.5)
        for category in categories:
            draw_swatch(figure, x, y, COLOURS[category])
            write(figure, x + SWATCH + GAP / 2, y, words_for(category))
            x += _key_width(category)
