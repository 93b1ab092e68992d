"""Draw docs/drawings/*.svg, the pictures of docs/MECHANISMS.md: `python site/drawings.py`."""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"
INK, GREY, LINE = "#1c1c1c", "#5f5f66", "#b4b4bc"
# The colors of memlab's plots.
PARAMETERS, GRADIENTS, STATE = "#8fa5dd", "#8cd3ae", "#c4bdf5"
ACTIVATIONS, FREE, IDLE = "#f2b27a", "#ffffff", "#ececf0"


def text(x: float, y: float, words: str, *, size=14, color=INK, anchor="middle", bold=False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" '
        f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def box(
    x: float, y: float, w: float, h: float, color: str, words: str = "", *, dashed=False, edge=INK
) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    drawn = (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" fill="{color}" '
        f'stroke="{edge if not dashed else LINE}"{dash}/>'
    )
    return drawn + (text(x + w / 2, y + h / 2 + 5, words, size=13) if words else "")


def line(x1: float, y1: float, x2: float, y2: float, *, dashed=False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}"{dash}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5" '
        f'marker-end="url(#head)"/>'
    )


def picture(title: str, width: int, height: int, parts: list[str]) -> str:
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif">',
            f"<title>{escape(title)}</title><defs>{head}</defs>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def key(x: float, y: float, color: str, words: str, *, dashed=False) -> str:
    """A colored square and what it stands for."""
    square = box(x, y, 16, 14, color, dashed=dashed)
    return square + text(x + 24, y + 12, words, size=13, anchor="start")


def sharding() -> str:
    """What each of four ranks holds: 4 bytes per weight, 4 per gradient and 8 of AdamW's state."""
    kinds = (("parameters", 4, PARAMETERS), ("gradients", 4, GRADIENTS))
    kinds += (("optimizer state", 8, STATE),)
    ways = (("DDP", 0), ("ZeRO-1", 1), ("ZeRO-2", 2), ("ZeRO-3", 3))
    parts, ranks, width, unit = [], 4, 30, 12
    for column, (way, stage) in enumerate(ways):
        left = 128 + 144 * column
        parts.append(text(left + 2 * width, 28, way, size=15, bold=True))
        parts += [text(left + rank * width + 13, 50, f"{rank}", size=12) for rank in range(ranks)]
        y, held = 60, 0
        for row, (_, size, color) in enumerate(kinds):
            sharded, height = row >= 3 - stage, unit * size
            held += size / ranks if sharded else size
            for rank in range(ranks):
                x = left + rank * width
                parts.append(box(x, y, 26, height, FREE if sharded else color, dashed=sharded))
                if sharded:
                    parts.append(box(x, y + rank * height / ranks, 26, height / ranks, color))
            y += height + 12
        parts.append(text(left + 2 * width, y + 16, f"{held:g} bytes", bold=True))
    for (name, size, _), y in zip(kinds, (60, 120, 180), strict=True):
        parts.append(text(115, y + unit * size / 2 + 5, name, anchor="end"))
    parts.append(text(115, 50, "rank", size=12, anchor="end"))
    parts.append(text(115, 304, "held per weight", anchor="end"))
    parts.append(key(128, 326, FREE, "held by another rank", dashed=True))
    parts.append(key(320, 326, GREY, "held by this rank"))
    return picture("What each rank of DDP and ZeRO holds", 700, 352, parts)


def tiles() -> str:
    """Tiled attention: one row of queries, one tile of keys at a time, and the running softmax."""
    size, left, top, count = 42, 124, 74, 5
    parts = [text(left + 2.5 * size, 26, "tiles of keys and values", size=15, bold=True)]
    parts += [
        text(58, top + 1.2 * size, "tiles", size=15, bold=True),
        text(58, top + 1.2 * size + 20, "of queries", size=15, bold=True),
    ]
    for i in range(count):
        for j in range(count):
            visible, current = j <= i, (i, j) == (3, 2)
            color = "#f2b27a" if current else "#fbe3cb" if i == 3 and j < 2 else "#e4e4ea"
            x, y = left + j * size, top + i * size
            parts.append(
                box(x, y, size - 2, size - 2, color if visible else FREE, dashed=not visible)
            )
    parts += [
        text(left + 2.5 * size, top - 20, "K, V", size=13),
        arrow(left + 2.5 * size - 1, top - 14, left + 2.5 * size - 1, top - 2),
        text(left - 34, top + 3.5 * size + 4, "Q", size=13),
        arrow(left - 24, top + 3.5 * size, left - 2, top + 3.5 * size),
        text(left + 2.5 * size - 1, top + 3.5 * size + 4, "S", size=13),
    ]
    keys = (
        ("#f2b27a", "now: the only scores in memory"),
        ("#fbe3cb", "done, and freed"),
        ("#e4e4ea", "another row: before or after"),
    )
    for n, (color, words) in enumerate(keys):
        parts.append(key(40, 296 + 22 * n, color, words))
    parts.append(key(40, 362, FREE, "hidden by the causal mask: never computed", dashed=True))
    lines = (
        ("Kept for the row, for each query:", True),
        ("m, the largest score so far", False),
        ("ℓ, the sum of exp(score − m) so far", False),
        ("O, the weighted sum of V so far", False),
        ("", False),
        ("One tile:", True),
        ("S = Q·Kᵀ / √D", False),
        ("m′ = max(m, row max of S)", False),
        ("P = exp(S − m′)", False),
        ("ℓ ← ℓ·exp(m − m′) + row sum of P", False),
        ("O ← O·exp(m − m′) + P·V, and m ← m′", False),
        ("", False),
        ("After the row's last tile, store:", True),
        ("O / ℓ, the output", False),
        ("m + log ℓ, for backward", False),
    )
    for n, (line, bold) in enumerate(lines):
        parts.append(text(400, 40 + 23 * n, line, anchor="start", bold=bold))
    return picture("Tiled attention with an online softmax", 700, 390, parts)


def recompute() -> str:
    """Bytes over time of four blocks: all activations kept, and checkpoints with recompute."""
    parts, left, step, unit, small = [], 60, 48, 26, 6
    forward = [("F", n) for n in range(1, 5)]
    plain = [*forward, *(("B", n) for n in range(4, 0, -1))]
    again = [*forward, *(("FB"[k], n) for n in range(4, 0, -1) for k in range(2))]
    rows = (
        ("All activations kept", plain, "peak: activations of 4 blocks", "backward"),
        (
            "Activation checkpointing",
            again,
            "peak: 4 inputs and activations of 1 block",
            "backward: each block runs forward again (F), then backward (B)",
        ),
    )
    for row, (title, passes, peak, second) in enumerate(rows):
        base = 150 + 192 * row
        parts.append(text(left, base - (122, 92)[row], title, size=15, bold=True, anchor="start"))
        top = 0
        for column, (kind, n) in enumerate(passes):
            x, width = left + column * step, step - 3
            if row == 0:
                parts.append(box(x, base - unit * n, width, unit * n, ACTIVATIONS))
                top = max(top, unit * n)
            else:
                parts.append(box(x, base - small * n, width, small * n, PARAMETERS))
                if column >= 4:
                    parts.append(box(x, base - small * n - unit, width, unit, ACTIVATIONS))
                    top = max(top, small * n + unit)
            parts.append(text(x + width / 2, base + 17, f"{kind}{n}", size=13))
        right = left + len(passes) * step
        parts.append(line(left, base, right, base))
        parts.append(line(left, base - top, 640, base - top, dashed=True))
        parts.append(text(640, base - top - 6, peak, size=13, anchor="end"))
        for begin, end, words in (
            (left, left + 4 * step, "forward"),
            (left + 4 * step, right, second),
        ):
            parts.append(line(begin + 2, base + 26, end - 5, base + 26))
            parts.append(text((begin + end) / 2, base + 41, words, size=12, color=GREY))
        parts.append(
            f'<g transform="rotate(-90 44 {base - 40})">'
            + text(44, base - 40, "bytes held", size=12, color=GREY)
            + "</g>"
        )
    parts += [
        key(60, 418, ACTIVATIONS, "activations of a block"),
        key(250, 418, PARAMETERS, "input of a block, the checkpoint"),
        text(640, 430, "time →", size=13, anchor="end", color=GREY),
    ]
    return picture("Activations over time, with and without checkpointing", 680, 448, parts)


def allocator() -> str:
    """The caching allocator: a segment's blocks, a split, and two gaps too small for a request."""
    a, b, c, d = ACTIVATIONS, STATE, GRADIENTS, PARAMETERS
    steps = (
        ("1. The cache is empty: cudaMalloc gives a segment of 20 MiB", ((20, "free", FREE),)),
        (
            "2. Tensor A asks for 6 MiB: the segment is split",
            ((6, "A 6 MiB", a), (14, "free 14 MiB", FREE)),
        ),
        ("3. B and C take the rest", ((6, "A", a), (8, "B 8 MiB", b), (6, "C 6 MiB", c))),
        (
            "4. A and C are freed, but stay reserved: 12 MiB in two gaps",
            ((6, "free 6 MiB", FREE), (8, "B", b), (6, "free 6 MiB", FREE)),
        ),
        (
            "5. D asks for 8 MiB: no gap is large enough, so a second segment is reserved",
            ((6, "free 6 MiB", FREE), (8, "B", b), (6, "free 6 MiB", FREE)),
        ),
        ("", ((8, "D 8 MiB", d), (12, "free 12 MiB", FREE))),
    )
    parts, y = [], 40
    for title, content in steps:
        y -= 0 if title else 30
        x = 40
        parts.append(text(40, y - 8, title, anchor="start", bold=True) if title else "")
        for size, label, color in content:
            width = size * 30
            parts.append(box(x, y, width, 34, color, label, dashed=color == FREE))
            x += width
        y += 72
    words = "allocated 8 + 8 = 16 MiB · reserved 20 + 20 = 40 MiB"
    parts.append(text(40, y - 14, words, anchor="start"))
    return picture("Segments, blocks, splits and gaps of the caching allocator", 680, y + 8, parts)


def pipeline() -> str:
    """1F1B with four stages and six micro-batches; backward takes two units."""
    stages, micro, unit, left, top = 4, 6, 19, 74, 44
    ready: dict[tuple[str, int, int], int] = {}  # when a pass of a stage ends
    clock = [0] * stages
    orders = [one_f_one_b(stage, stages, micro) for stage in range(stages)]
    passes, at = [], [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(orders[s]):
                continue
            kind, m = orders[s][at[s]]
            needs = (kind, m, s - 1) if kind == "F" else (kind, m, s + 1)
            first = (kind == "F" and s == 0) or (kind == "B" and s == stages - 1)
            if not first and needs not in ready:
                continue
            start = max(clock[s], 0 if first else ready[needs])
            length = 1 if kind == "F" else 2
            clock[s] = ready[kind, m, s] = start + length
            at[s] += 1
            color = PARAMETERS if kind == "F" else GRADIENTS
            x, y = left + start * unit, top + 40 * s
            passes.append(box(x, y, length * unit - 2, 34, color, f"{m + 1}"))
    end = max(clock)
    right = left + end * unit
    parts = [
        *(box(left, top + 40 * s, end * unit - 2, 34, IDLE, edge=IDLE) for s in range(stages)),
        *passes,
        text(right + 10, 28, "held at most", anchor="start", size=13),
    ]
    for s in range(stages):
        held, y = min(micro, stages - s), top + 22 + 40 * s
        parts.append(text(left - 10, y, f"stage {s}", anchor="end"))
        parts.append(text(right + 10, y, f"{held}", anchor="start", bold=True))
    parts += [
        text(left, 28, "time →", size=13, anchor="start", color=GREY),
        key(left, 218, PARAMETERS, "forward of a micro-batch, by its number"),
        key(left + 300, 218, GRADIENTS, "its backward"),
        key(left + 430, 218, IDLE, "idle"),
        text(
            left,
            256,
            "A stage holds a micro-batch's activations from its forward to its backward.",
            size=13,
            anchor="start",
        ),
    ]
    return picture("A 1F1B pipeline schedule", right + 104, 272, parts)


def one_f_one_b(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    """The order of a stage's passes: warm-up, one forward and one backward by turns, the rest."""
    warm_up = min(micro, stages - stage - 1)
    order = [("F", m) for m in range(warm_up)]
    for m in range(micro - warm_up):
        order += [("F", warm_up + m), ("B", m)]
    return order + [("B", m) for m in range(micro - warm_up, micro)]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (sharding, tiles, recompute, allocator, pipeline):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
