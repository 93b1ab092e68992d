"""Draw segments in rows, with addresses from left to right.

A segment that does not fit into the current row starts a new one. It spans several rows only if it
is longer than one row. The scale is the same everywhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from matplotlib.collections import Collection, LineCollection, PolyCollection
from matplotlib.figure import Figure

from memlab.allocator import Segment, SegmentBlock
from memlab.plot.page import COLOURS, GREY, LINE, PALE, SWATCH, inches, write
from memlab.units import format_bytes

ROW, BAR = 0.21, 0.16  # inches: the distance of rows, and the height of a bar
ROWS, BLOCKS_IN_A_ROW = 14, 12  # the most rows, and blocks per additional row
BETWEEN = 0.005  # the gap between segments, as a fraction of a row, if they are few
CLEAR = 0.03  # inches: draw a line between blocks of at least this width
STRIPES = 0.06  # inches between stripes on free blocks
FREE = "free"  # used like a category


class BlockPart(NamedTuple):
    """A range of one block in one row with one use: a category, rounding, or free."""

    row: int
    left: int  # bytes from the start of the row
    bytes: int
    what: str
    begins: bool  # whether the block starts here


class Box(NamedTuple):
    """A rectangle on the page, in inches."""

    left: float
    bottom: float
    right: float
    top: float


@dataclass(frozen=True)
class Layout:
    """The position of each byte of the segments."""

    row_bytes: int
    headings: dict[int, str]  # heading above each row, by row
    parts: tuple[BlockPart, ...]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return 1 + max((part.row for part in self.parts), default=-1)

    @property
    def height(self) -> float:
        """The height in inches, including headings."""
        return ROW * self.rows + LINE * len(self.headings)


# ------------------------------------------------------------------ layout as plain data


def lay_out(segments: Sequence[Segment]) -> Layout:
    """Lay out the large segments, then the small, by address, in at most ROWS rows."""
    if not segments:
        return Layout(1, {}, ())
    ordered = sorted(segments, key=lambda s: (s.pool, s.stream, s.address))
    for row_bytes in _row_lengths(ordered):
        starts = _starts(ordered, row_bytes)
        if starts[-1] + ordered[-1].bytes <= ROWS * row_bytes:
            break
    placed = list(zip(ordered, starts, strict=True))
    headings = {}
    for pool, run in groupby(placed, key=lambda pair: pair[0].pool):
        found = list(run)
        headings[found[0][1] // row_bytes] = _heading(pool, [segment for segment, _ in found])
    parts = [part for segment, start in placed for part in _parts(segment, start, row_bytes)]
    return Layout(row_bytes, headings, tuple(parts))


def _row_lengths(segments: Sequence[Segment]) -> Iterator[int]:
    """Yield growing row lengths to try.

    The longest segment fills several rows if there are many blocks, then fewer, then less than one.
    """
    count = sum(len(segment.blocks) for segment in segments)
    rows = min(1 + count // BLOCKS_IN_A_ROW, ROWS)
    longest = max(segment.bytes for segment in segments)
    total = sum(segment.bytes for segment in segments)
    for parts in range(max(1, rows * longest // total), 0, -1):
        yield -(-longest // parts)
    while True:
        longest += longest // 16
        yield longest


def _starts(segments: Sequence[Segment], row_bytes: int) -> list[int]:
    """Return the start of each segment, in bytes from the start of the first row.

    Rows start at multiples of `row_bytes`. Between many segments, the gap is a tenth of a segment.
    """
    mean = sum(segment.bytes for segment in segments) // len(segments)
    between = min(int(BETWEEN * row_bytes), mean // 10)
    starts: list[int] = []
    end, pool = 0, ""
    for segment in segments:
        used = end % row_bytes
        if used and (segment.pool != pool or used + between + segment.bytes > row_bytes):
            start = end - used + row_bytes
        else:
            start = end + between if used else end
        starts.append(start)
        end, pool = start + segment.bytes, segment.pool
    return starts


def _heading(pool: str, segments: Sequence[Segment]) -> str:
    """Return a heading such as "large: 3 segments, 60.00 MiB"."""
    streams = len({segment.stream for segment in segments})
    count = f"{len(segments):,} segment{'s' if len(segments) > 1 else ''}"
    where = f" on {streams} streams" if streams > 1 else ""
    return f"{pool}: {count}{where}, {format_bytes(sum(s.bytes for s in segments))}"


def _parts(segment: Segment, start: int, row_bytes: int) -> Iterator[BlockPart]:
    """Cut a segment that starts at `start` by block, by use and at the ends of rows."""
    for block in segment.blocks:
        at = start + block.address - segment.address
        begins = True
        for what, size in _uses(block):
            after = at + size
            while at < after:
                row, left = divmod(at, row_bytes)
                cut = min(after - at, row_bytes - left)
                yield BlockPart(row, left, cut, what, begins)
                at, begins = at + cut, False


def _uses(block: SegmentBlock) -> list[tuple[str, int]]:
    """Return (category or "free", bytes) pairs of a block, in address order."""
    if block.state == "free":
        return [(FREE, block.bytes)]
    category = block.event.category if block.event else "unattributed"
    waste = block.bytes - block.requested_bytes
    return [(category, block.requested_bytes), ("rounding", waste)]


def bytes_by_use(segments: Iterable[Segment]) -> dict[str, int]:
    """Return reserved bytes by category, including "free"."""
    sums = dict.fromkeys((*COLOURS, FREE), 0)
    for segment in segments:
        for block in segment.blocks:
            for what, size in _uses(block):
                sums[what] += size
    return {what: size for what, size in sums.items() if size}


# ------------------------------------------------------------------ drawing


def draw_layout(figure: Figure, layout: Layout, *, left: float, right: float, top: float) -> None:
    """Draw the rows downward from `top`."""
    tops, y = [], top
    for row in range(layout.rows):
        if row in layout.headings:
            write(figure, left, y - LINE / 2, layout.headings[row], color=GREY)
            y -= LINE
        tops.append(y)
        y -= ROW
    scale = (right - left) / layout.row_bytes
    boxes = [
        Box(
            left + scale * part.left,
            tops[part.row] - BAR,
            left + scale * (part.left + part.bytes),
            tops[part.row],
        )
        for part in layout.parts
    ]
    _draw_boxes(figure, boxes, [part.what for part in layout.parts])
    _draw_separators(figure, layout.parts, boxes)


def draw_free_swatch(figure: Figure, x: float, y: float) -> None:
    """Draw the legend's symbol for free bytes."""
    _draw_boxes(figure, [Box(x, y - SWATCH / 2, x + SWATCH, y + SWATCH / 2)], [FREE])


def _draw_boxes(figure: Figure, boxes: Sequence[Box], whats: Sequence[str]) -> None:
    corners = [
        ((b.left, b.bottom), (b.left, b.top), (b.right, b.top), (b.right, b.bottom)) for b in boxes
    ]
    colours = [COLOURS.get(what, PALE) for what in whats]
    _add(figure, PolyCollection(corners, facecolors=colours, linewidths=0, snap=True))
    free = [box for box, what in zip(boxes, whats, strict=True) if what == FREE]
    stripes = [line for box in free for line in _stripes(box)]
    _add(figure, LineCollection(stripes, colors=GREY, linewidths=0.5))


def _stripes(box: Box) -> Iterator[list[tuple[float, float]]]:
    """Yield 45° lines across the box, aligned across all boxes."""
    first = int((box.left - box.top) // STRIPES) + 1
    last = int((box.right - box.bottom) // STRIPES)
    for number in range(first, last + 1):
        shift = number * STRIPES  # x - y of the line
        low, high = max(box.left, box.bottom + shift), min(box.right, box.top + shift)
        yield [(low, low - shift), (high, high - shift)]


def _draw_separators(figure: Figure, parts: Sequence[BlockPart], boxes: Sequence[Box]) -> None:
    """Draw white lines between adjacent blocks of sufficient width."""
    lines = [
        [(box.left, box.bottom), (box.left, box.top)]
        for (before, box_before), (part, box) in pairwise(zip(parts, boxes, strict=True))
        if part.begins
        and part.row == before.row
        and part.left == before.left + before.bytes
        and min(box.right - box.left, box_before.right - box_before.left) > CLEAR
    ]
    _add(figure, LineCollection(lines, colors="white", linewidths=0.6))


def _add(figure: Figure, collection: Collection) -> None:
    collection.set_transform(inches(figure))
    figure.add_artist(collection)
