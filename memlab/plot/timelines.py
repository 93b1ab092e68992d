"""`timeline`: the memory alive after each allocation and free of a step.

A long trace has more events than a plot has columns of pixels. Each column shows the moment with
the most memory among its events, so the peak is always visible.
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
    plot_style,
    require_bytes,
    sides,
    text_width,
    write,
)
from memlab.plot.phases import WHEN, draw_phases, first_moment, phase_spans
from memlab.plot.tables import Table, category_row, draw_table
from memlab.trace import CATEGORIES, Trace
from memlab.units import format_bytes

COLUMNS = 1000  # columns of a timeline; more than its pixels
TIMELINE = 4.1  # inches below the title


def timeline(trace: Trace, *, title: str | None = None) -> Figure:
    """Draw the bytes alive over a step, stacked by category, with the peak marked and itemized.

    The first column shows the memory alive before the step.
    """
    require_bytes(trace.peak_bytes, "a trace")
    stack = stack_columns(trace)
    with plot_style():
        figure = new_page(title or "Memory alive during one step", TIMELINE)
        top = TIMELINE - LINE - GAP  # leaves room for the names of the phases
        table = _peak_table(trace, stack)
        left = WIDTH - MARGIN - table.width
        axes = new_axes(figure, left=0.9, bottom=0.45, right=left - 2 * GAP, top=top)
        _draw_stack(axes, stack)
        draw_byte_scale(axes, stack.totals.max(), room=1.13)  # room for the peak's label
        draw_event_scale(axes, stack.edges[0], stack.edges[-1])
        draw_phases(axes, phase_spans(trace))
        _draw_peak(axes, stack, _peak_in_words(trace))
        draw_table(figure, table, left=left, top=top)
    return figure


@dataclass(frozen=True)
class Stack:
    """Bytes alive by category in each column of a timeline.

    The column between edges p and q covers the moments after p, …, q-1 events.
    """

    edges: np.ndarray  # (columns + 1,)
    heights: dict[str, np.ndarray]  # category: (columns,)

    @property
    def totals(self) -> np.ndarray:
        """Bytes alive in each column."""
        return np.sum(list(self.heights.values()), axis=0)


def stack_columns(trace: Trace, columns: int = COLUMNS) -> Stack:
    """Return the moment with the most memory in each of at most `columns` equal ranges."""
    changes = np.array([event.bytes for event in trace.events], dtype=np.int64)
    kinds = np.array([event.category for event in trace.events])
    alive = _running(changes)
    moments = np.arange(first_moment(trace), len(alive))
    shares = np.array_split(moments, min(columns, len(moments)))
    fullest = np.array([share[alive[share].argmax()] for share in shares])
    edges = np.array([*(share[0] for share in shares), len(alive)])
    heights = {c: _running(np.where(kinds == c, changes, 0))[fullest] for c in CATEGORIES}
    return Stack(edges, {c: heights[c] for c in CATEGORIES if heights[c].any()})


def _running(changes: np.ndarray) -> np.ndarray:
    """Return the sums of the first 0, 1, …, n changes."""
    return np.concatenate([[0], changes.cumsum()])


def _draw_stack(axes: Axes, stack: Stack) -> None:
    """Draw each layer down to 0, behind the layers below it, so that no seams show."""
    height = stack.totals
    for category in reversed(stack.heights):
        layer = StepPatch(height, stack.edges, fill=True, color=COLOURS[category], label=category)
        # axes.stairs would spend 90 % of a timeline's drawing time on finding its limits.
        axes.add_artist(layer)
        height = height - stack.heights[category]


def _draw_peak(axes: Axes, stack: Stack, words: str) -> None:
    """Draw an arrow to the peak with `words` above it, within the axes' sides."""
    box, column = sides(axes), stack.totals.argmax()
    peak, middle = stack.totals[column], stack.edges[column : column + 2].mean()
    axes.plot(middle, peak, marker=CARETDOWN, color=INK, markersize=6, clip_on=False)
    x, y = on_page(axes, middle, peak)
    half = text_width(words, bold=True) / 2
    x = np.clip(x, box.x0 + half, box.x1 - half)
    write(axes.figure, x, y + 0.75 * LINE, words, weight="bold", ha="center", bbox=COVER)


def _peak_in_words(trace: Trace) -> str:
    return f"peak {format_bytes(trace.peak_bytes)}, {WHEN[trace.peak_phase]}"


def _peak_table(trace: Trace, stack: Stack) -> Table:
    """Return the peak's composition in the order of the stack, which is also the legend."""
    rows = [category_row(name, trace.at_peak.get(name, 0)) for name in reversed(stack.heights)]
    return Table("at the peak", trace.peak_bytes, rows)
