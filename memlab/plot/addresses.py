"""Segments laid out like text: addresses from left to right, row below row.

A segment begins a new row where the old one has no room for it, and goes on in the next one only
if it is longer than a row. A byte has the same length everywhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from matplotlib.collections import Collection, LineCollection, PolyCollection
from matplotlib.figure import Figure

from memlab.allocator import Piece, Segment
from memlab.plot.page import COLOURS, GREY, LINE, PALE, SWATCH, inches, write
from memlab.units import format_bytes

ROW, BAR = 0.21, 0.16  # inches from row to row, and of them the bar
ROWS, PIECES_IN_A_ROW = 14, 12  # the most rows, and how many pieces ask for one more
BETWEEN = 0.005  # of a row: from one segment to the next, where they are few
CLEAR = 0.03  # inches: pieces of at least that length are parted by a line
STRIPES = 0.06  # inches from one stripe to the next, across what is free
FREE = "free"  # what a part can be beside the categories


class Part(NamedTuple):
    """Bytes of one piece in one row: of a category, rounding among them, or free."""

    row: int
    left: int  # in bytes, from the beginning of the row
    bytes: int
    what: str
    begins: bool  # whether the piece begins here


class Box(NamedTuple):
    """A rectangle of the page, in inches."""

    left: float
    bottom: float
    right: float
    top: float


@dataclass(frozen=True)
class Layout:
    """Where each byte of the segments stands."""

    row_bytes: int
    headings: dict[int, str]  # what begins at a row, to be written above it
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """How many there are."""
        return 1 + max((part.row for part in self.parts), default=-1)

    @property
    def height(self) -> float:
        """In inches, headings included."""
        return ROW * self.rows + LINE * len(self.headings)


# ------------------------------------------------------------------ what to draw: plain data


def lay_out(segments: Sequence[Segment]) -> Layout:
    """The large segments, then the small, by address, in at most ROWS rows."""
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
    """What a row might have, ever more: the longest segment fills as many rows as there are
    pieces for, then fewer, then less than one."""
    pieces = sum(len(segment.pieces) for segment in segments)
    rows = min(1 + pieces // PIECES_IN_A_ROW, ROWS)
    longest = max(segment.bytes for segment in segments)
    total = sum(segment.bytes for segment in segments)
    for parts in range(max(1, rows * longest // total), 0, -1):
        yield -(-longest // parts)
    while True:
        longest += longest // 16
        yield longest


def _starts(segments: Sequence[Segment], row_bytes: int) -> list[int]:
    """Where each segment begins, in bytes from the first row's beginning: a row begins at each
    multiple of `row_bytes`. The room between segments is a tenth of one where they are many."""
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
    """Such as "large: 3 segments, 60.00 MiB"."""
    streams = len({segment.stream for segment in segments})
    count = f"{len(segments):,} segment{'s' if len(segments) > 1 else ''}"
    where = f" on {streams} streams" if streams > 1 else ""
    return f"{pool}: {count}{where}, {format_bytes(sum(s.bytes for s in segments))}"


def _parts(segment: Segment, start: int, row_bytes: int) -> Iterator[Part]:
    """A segment that begins at `start`, cut by piece, by use and at the ends of rows."""
    for piece in segment.pieces:
        at = start + piece.address - segment.address
        begins = True
        for what, size in _uses(piece):
            after = at + size
            while at < after:
                row, left = divmod(at, row_bytes)
                cut = min(after - at, row_bytes - left)
                yield Part(row, left, cut, what, begins)
                at, begins = at + cut, False


def _uses(piece: Piece) -> list[tuple[str, int]]:
    """(a category or "free", bytes) of the piece, from its address on."""
    if piece.state == "free":
        return [(FREE, piece.bytes)]
    category = piece.event.category if piece.event else "unattributed"
    waste = piece.bytes - piece.requested_bytes
    return [(category, piece.requested_bytes), ("rounding", waste)]


def held(segments: Iterable[Segment]) -> dict[str, int]:
    """Bytes by category, and free: together what is reserved."""
    sums = dict.fromkeys((*COLOURS, FREE), 0)
    for segment in segments:
        for piece in segment.pieces:
            for what, size in _uses(piece):
                sums[what] += size
    return {what: size for what, size in sums.items() if size}


# ------------------------------------------------------------------ drawing


def draw_layout(figure: Figure, layout: Layout, *, left: float, right: float, top: float) -> None:
    """The rows, from `top` down, between the sides."""
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
    _draw_seams(figure, layout.parts, boxes)


def draw_free_swatch(figure: Figure, x: float, y: float) -> None:
    """What stands for free bytes in a key."""
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
    """Lines of 45° across the box; those of all boxes are parts of the same lines."""
    first = int((box.left - box.top) // STRIPES) + 1
    last = int((box.right - box.bottom) // STRIPES)
    for number in range(first, last + 1):
        shift = number * STRIPES  # x - y of the line
        low, high = max(box.left, box.bottom + shift), min(box.right, box.top + shift)
        yield [(low, low - shift), (high, high - shift)]


def _draw_seams(figure: Figure, parts: Sequence[Part], boxes: Sequence[Box]) -> None:
    """White lines between pieces that touch, where both are long enough to be seen."""
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
