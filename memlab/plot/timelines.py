"""`timeline`: one step from left to right, what is alive after each allocation and free.

A long trace has more events than a picture has columns of dots. A column then shows the fullest
moment of its share of the events: a moment that was, never a mean, so the peak is always drawn.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN
from matplotlib.patches import StepPatch

from memlab.plot.page import (
    COLOURS,
    COVER,
    GAP,
    INK,
    LINE,
    MARGIN,
    WIDTH,
    draw_byte_scale,
    draw_event_scale,
    new_axes,
    new_page,
    on_page,
    our_style,
    require_bytes,
    sides,
    text_width,
    write,
)
from memlab.plot.phases import WHEN, draw_phases, first_moment, phase_spans
from memlab.plot.tables import Table, category_row, draw_table
from memlab.trace import CATEGORIES, Trace
from memlab.units import format_bytes

COLUMNS = 1000  # of a timeline: more than there are dots across it
TIMELINE = 4.1  # inches below the title


def timeline(trace: Trace, *, title: str | None = None) -> Figure:
    """Bytes alive over the step, stacked by category; the peak is marked and taken apart.

    The picture begins where the step does: its first column is what was alive before.
    """
    require_bytes(trace.peak_bytes, "a trace")
    city = skyline(trace)
    with our_style():
        figure = new_page(title or "Memory alive during one step", TIMELINE)
        top = TIMELINE - LINE - GAP  # the names of the phases stand above the axes
        table = _peak_table(trace, city)
        left = WIDTH - MARGIN - table.width
        axes = new_axes(figure, left=0.9, bottom=0.45, right=left - 2 * GAP, top=top)
        _draw_stack(axes, city)
        draw_byte_scale(axes, city.totals.max(), room=1.13)  # for the peak's label
        draw_event_scale(axes, city.edges[0], city.edges[-1])
        draw_phases(axes, phase_spans(trace))
        _draw_peak(axes, city, _peak_in_words(trace))
        draw_table(figure, table, left=left, top=top)
    return figure


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


def skyline(trace: Trace, columns: int = COLUMNS) -> Skyline:
    """The fullest moment of each of at most `columns` equal shares of the step's moments."""
    changes = np.array([event.bytes for event in trace.events], dtype=np.int64)
    kinds = np.array([event.category for event in trace.events])
    alive = _running(changes)
    moments = np.arange(first_moment(trace), len(alive))
    shares = np.array_split(moments, min(columns, len(moments)))
    fullest = np.array([share[alive[share].argmax()] for share in shares])
    edges = np.array([*(share[0] for share in shares), len(alive)])
    heights = {c: _running(np.where(kinds == c, changes, 0))[fullest] for c in CATEGORIES}
    return Skyline(edges, {c: heights[c] for c in CATEGORIES if heights[c].any()})


def _running(changes: np.ndarray) -> np.ndarray:
    """The sum of the first 0, 1, …, n changes."""
    return np.concatenate([[0], changes.cumsum()])


def _draw_stack(axes: Axes, city: Skyline) -> None:
    """Every layer reaches down to 0 behind those below it: no seams between the colours."""
    height = city.totals
    for category in reversed(city.heights):
        layer = StepPatch(height, city.edges, fill=True, color=COLOURS[category], label=category)
        axes.add_artist(layer)  # axes.stairs would look for its extremes, which we know, slowly
        height = height - city.heights[category]


def _draw_peak(axes: Axes, city: Skyline, words: str) -> None:
    """An arrow with its tip on the peak; `words` above it, as near as the axes' sides allow."""
    box, column = sides(axes), city.totals.argmax()
    peak, middle = city.totals[column], city.edges[column : column + 2].mean()
    axes.plot(middle, peak, marker=CARETDOWN, color=INK, markersize=6, clip_on=False)
    x, y = on_page(axes, middle, peak)
    half = text_width(words, bold=True) / 2
    x = np.clip(x, box.x0 + half, box.x1 - half)
    write(axes.figure, x, y + 0.75 * LINE, words, weight="bold", ha="center", bbox=COVER)


def _peak_in_words(trace: Trace) -> str:
    return f"peak {format_bytes(trace.peak_bytes)}, {WHEN[trace.peak_phase]}"


def _peak_table(trace: Trace, city: Skyline) -> Table:
    """What the peak is made of, in the order of the stack: the key to the colours as well."""
    rows = [category_row(name, trace.at_peak.get(name, 0)) for name in reversed(city.heights)]
    return Table("at the peak", trace.peak_bytes, rows)
