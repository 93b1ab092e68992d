"""`blocks`: the caching allocator's reserved memory over a run, and its free blocks.

The upper part shows reserved memory, allocated memory and the largest free block over time. The
lower part shows the segments at one moment by address.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN
from matplotlib.patches import StepPatch

from memlab.allocator import Blocks, OutOfMemory, Segment
from memlab.plot.addresses import FREE, Layout, bytes_by_use, draw_free_swatch, draw_layout, lay_out
from memlab.plot.labels import Span, separate
from memlab.plot.page import (
    COVER,
    GAP,
    GREY,
    INK,
    LINE,
    MARGIN,
    PALE,
    SWATCH,
    WIDTH,
    draw_byte_scale,
    draw_event_scale,
    draw_line,
    draw_swatch,
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
from memlab.plot.tables import Table, TableRow, category_row, draw_table
from memlab.trace import Trace
from memlab.units import format_bytes

ALLOCATED, LARGEST_FREE, REFUSED = "#8c9bb3", "#c2185b", "#d00000"

COLUMNS = 1000  # columns of a run; more than its pixels
FAR = 1.5  # values above this multiple of the reserved peak are not drawn
CAPTION_CHARACTERS = 110  # per line
CHART, SCALE = 2.6, 0.45  # inches: height of the axes, and of the text below them
LABELS = 2.2 * LINE  # inches at the top of the axes, for labels and their lines


@dataclass(frozen=True)
class Levels:
    """The maximum of reserved, allocated and largest free bytes in each column of a run.

    The column between edges p and q covers the moments after p, …, q-1 events. A refused request
    is the last moment.
    """

    edges: np.ndarray  # (columns + 1,)
    reserved: np.ndarray  # (columns,)
    allocated: np.ndarray
    largest_free: np.ndarray


@dataclass(frozen=True)
class RunMark:
    """A labelled point of the run."""

    words: str
    position: int  # number of events before it
    bytes: int
    colour: str = INK


@dataclass(frozen=True)
class RunMoment:
    """A moment whose segments are drawn."""

    words: str
    phase: str
    reserved_bytes: int
    allocated_bytes: int
    largest_free_bytes: int
    segments: tuple[Segment, ...]


def blocks(blocks: Blocks, *, title: str | None = None) -> Figure:
    """Draw reserved and allocated memory over a run, and the segments at one moment.

    The moment is the reserved peak or, if memory ran out, the refused request.
    """
    wanted = wanted_bytes(blocks)
    require_bytes(blocks.reserved_bytes or wanted, "a run", "simulate a trace that has one")
    moment = moment_of(blocks)
    layout = lay_out(moment.segments)
    run_key, segments_key = run_table(blocks, moment), segments_table(moment)
    caption = [row for line in str(blocks).split("\n") for row in wrap(line, CAPTION_CHARACTERS)]
    with plot_style():
        heading = MARGIN + max(2 * LINE + layout.height, LINE * (len(segments_key.rows) + 0.5))
        bottom = heading + LINE + SCALE
        top = bottom + CHART
        height = top + LINE + 2 * GAP + LINE * len(caption)  # below the title
        figure = new_page(title or "Memory that the caching allocator reserves", height)
        table = WIDTH - MARGIN - max(run_key.width, segments_key.width)
        right = table - 2 * GAP
        axes = new_axes(figure, left=0.9, bottom=bottom, right=right, top=top)
        _draw_caption(figure, caption, top=height)
        _draw_run(axes, blocks)
        draw_table(figure, run_key, left=table, top=top)
        _draw_segments(figure, layout, moment, right=right, top=heading)
        draw_table(figure, segments_key, left=table, top=heading)
    return figure


# ------------------------------------------------------------------ plain data


def levels(blocks: Blocks, columns: int = COLUMNS) -> Levels:
    """Return the maximum of each level in at most `columns` equal ranges of moments."""
    found = [np.concatenate([[0], level]).astype(np.int64) for level in _lists(blocks)]
    if blocks.out_of_memory:
        found = [np.append(*pair) for pair in zip(found, _sizes(blocks.out_of_memory), strict=True)]
    moments = len(found[0])
    count = min(columns, moments)
    edges = np.arange(count + 1) * moments // count
    return Levels(edges, *(np.maximum.reduceat(level, edges[:-1]) for level in found))


def start(blocks: Blocks) -> int:
    """Return the first moment to draw, which skips restating memory left from the history."""
    return first_moment(Trace(blocks.events)) if blocks.history else 0


def marks(blocks: Blocks) -> list[RunMark]:
    """Return marks at the reserved and allocated peaks, and at a refused request."""
    found = []
    for name, level in (("reserved", blocks.reserved), ("allocated", blocks.allocated)):
        peak = max(level, default=0)
        if peak:
            position = level.index(peak, max(start(blocks) - 1, 0)) + 1
            found.append(RunMark(f"{name} {format_bytes(peak)}", position, peak))
    refused = blocks.out_of_memory
    if refused:
        found.append(RunMark("out of memory", refused.position + 1, wanted_bytes(blocks), REFUSED))
    return found


def moment_of(blocks: Blocks) -> RunMoment:
    """Return the moment when memory ran out, or else the reserved peak."""
    refused = blocks.out_of_memory
    if refused:
        sizes = _sizes(refused)
        return RunMoment("when memory ran out", refused.event.phase, *sizes, blocks.at_end)
    index = blocks.peak_position - 1
    phase = blocks.events[index].phase
    reserved, allocated, largest_free = (level[index] for level in _lists(blocks))
    return RunMoment(
        "at the reserved peak", phase, reserved, allocated, largest_free, blocks.at_peak
    )


def limit_bytes(blocks: Blocks) -> int | None:
    """Return the bytes that the process may reserve; None without a capacity."""
    settings = blocks.settings
    if settings.capacity_bytes is None:
        return None
    return min(settings.fraction_bytes, settings.driver_bytes)


def wanted_bytes(blocks: Blocks) -> int:
    """Return the reserved bytes that a refused request would have needed; 0 if none was refused."""
    refused = blocks.out_of_memory
    return refused.reserved_bytes + refused.segment_bytes if refused else 0


def highest_bytes(blocks: Blocks) -> int:
    """Return the top of the axis: the reserved peak, or a limit or wanted size not far above it."""
    peak = blocks.reserved_bytes
    others = wanted_bytes(blocks), limit_bytes(blocks) or 0
    return max(size for size in (peak, *others) if size <= FAR * peak or not peak)


def run_table(blocks: Blocks, moment: RunMoment) -> Table:
    """Return the legend of the run, with the bytes at the moment."""
    rows = [
        TableRow("reserved", moment.reserved_bytes, _draw_reserved_swatch),
        TableRow("allocated", moment.allocated_bytes, partial(draw_swatch, colour=ALLOCATED)),
        TableRow("largest free block", moment.largest_free_bytes, _draw_largest_free_swatch),
    ]
    limit = limit_bytes(blocks)
    if limit is not None:
        words = "limit" if limit <= highest_bytes(blocks) else "limit, far above"
        rows.append(TableRow(words, limit, _draw_limit_swatch))
    if blocks.out_of_memory:
        requested = blocks.out_of_memory.requested_bytes
        rows.append(TableRow("requested", requested, partial(draw_swatch, colour=REFUSED)))
    return Table(moment.words, None, rows)


def segments_table(moment: RunMoment) -> Table:
    """Return the legend of the segments, which sums to the reserved bytes."""
    sizes = bytes_by_use(moment.segments)
    free = sizes.pop(FREE, 0)
    rows = [category_row(category, size) for category, size in sizes.items()]
    if free:
        blocks = [block for segment in moment.segments for block in segment.blocks]
        count = sum(block.state == "free" for block in blocks)
        words = f"free, in {count:,} block{'s' if count > 1 else ''}"
        rows.append(TableRow(words, free, draw_free_swatch))
    return Table("reserved", moment.reserved_bytes, rows)


def _lists(blocks: Blocks) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    return blocks.reserved, blocks.allocated, blocks.largest_free


def _sizes(refused: OutOfMemory) -> tuple[int, int, int]:
    """Return (reserved, allocated, largest free block) when the request was refused."""
    largest_free = max(refused.free_block_bytes, default=0)
    return refused.reserved_bytes, refused.allocated_bytes, largest_free


# ------------------------------------------------------------------ drawing the run


def _draw_caption(figure: Figure, lines: Sequence[str], *, top: float) -> None:
    for number, line in enumerate(lines):
        write(figure, MARGIN, top - LINE * (number + 0.5), line, color=GREY)


def _draw_run(axes: Axes, blocks: Blocks) -> None:
    drawn = levels(blocks)
    _draw_level(axes, drawn.edges, drawn.reserved, fill=True, color=PALE, label="reserved")
    _draw_level(axes, drawn.edges, drawn.allocated, fill=True, color=ALLOCATED, label="allocated")
    line = {"fill": False, "baseline": None, "linewidth": 1.2}
    _draw_level(axes, drawn.edges, drawn.reserved, edgecolor=INK, **line)
    _draw_level(
        axes,
        drawn.edges,
        drawn.largest_free,
        edgecolor=LARGEST_FREE,
        label="largest free block",
        **line,
    )
    draw_byte_scale(axes, highest_bytes(blocks), room=CHART / (CHART - LABELS))
    draw_event_scale(axes, start(blocks), drawn.edges[-1])
    draw_phases(axes, phase_spans(Trace(blocks.events[: drawn.edges[-1] - 1])))
    _draw_limit(axes, blocks)
    _draw_refused(axes, blocks)
    _draw_marks(axes, marks(blocks), highest_bytes(blocks))


def _draw_level(axes: Axes, edges: np.ndarray, level: np.ndarray, **how: Any) -> None:
    axes.add_artist(StepPatch(level, edges, **how))


def _draw_limit(axes: Axes, blocks: Blocks) -> None:
    limit = limit_bytes(blocks)
    if limit is not None and limit <= highest_bytes(blocks):
        axes.axhline(limit, color=INK, linewidth=1, dashes=(5, 3))


def _draw_refused(axes: Axes, blocks: Blocks) -> None:
    """Draw the refused segment on top of reserved memory."""
    refused = blocks.out_of_memory
    if refused:
        x, bottom = on_page(axes, refused.position + 1.5, refused.reserved_bytes)
        _, top = on_page(axes, 0, min(wanted_bytes(blocks), highest_bytes(blocks)))
        draw_line(axes.figure, (x, x), (bottom, top), REFUSED, 4)


def _draw_marks(axes: Axes, found: Sequence[RunMark], highest: int) -> None:
    """Write the labels side by side at the top, each with a line to its arrow."""
    figure, box = axes.figure, sides(axes)
    y = box.y1 - LINE / 2
    tips = {}
    for mark in found:
        moment, height = mark.position + 0.5, min(mark.bytes, highest)
        how: dict[str, Any] = {"marker": CARETDOWN, "markersize": 6, "clip_on": False}
        axes.plot(moment, height, label=mark.words, color=mark.colour, **how)
        tips[mark.words] = (*on_page(axes, moment, height), mark.colour)
    spans = sorted((Span(words, x, x) for words, (x, _, _) in tips.items()), key=lambda s: s.left)
    widths = {words: text_width(words, bold=True) for words in tips}
    for text in separate(spans, widths, Span("", box.x0, box.x1)):
        tip_x, tip_y, colour = tips[text.name]
        draw_line(figure, ((text.left + text.right) / 2, tip_x), (y, tip_y), colour, 0.6)
        write(figure, text.left, y, text.name, weight="bold", color=colour, bbox=COVER)


# ------------------------------------------------------------------ drawing the segments


def _draw_segments(
    figure: Figure, layout: Layout, moment: RunMoment, *, right: float, top: float
) -> None:
    """Draw a heading, the rows, and the length of a row."""
    write(figure, MARGIN, top, f"segments {moment.words}, {WHEN[moment.phase]}", weight="bold")
    draw_layout(figure, layout, left=MARGIN, right=right, top=top - LINE)
    words = f"a full row is {format_bytes(layout.row_bytes)}, addresses go from left to right"
    bottom = top - LINE - layout.height
    write(figure, MARGIN, bottom - LINE / 2, words if layout.rows else "none", color=GREY)


def _draw_reserved_swatch(figure: Figure, x: float, y: float) -> None:
    draw_swatch(figure, x, y, PALE)
    draw_line(figure, (x, x + SWATCH), (y + SWATCH / 2, y + SWATCH / 2), INK, 1.2)


def _draw_largest_free_swatch(figure: Figure, x: float, y: float) -> None:
    draw_line(figure, (x, x + SWATCH), (y, y), LARGEST_FREE, 1.2)


def _draw_limit_swatch(figure: Figure, x: float, y: float) -> None:
    for left in (x, x + 0.6 * SWATCH):
        draw_line(figure, (left, left + 0.4 * SWATCH), (y, y), INK, 1)
