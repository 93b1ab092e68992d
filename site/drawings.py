"""Draw docs/drawings/*.svg, the pictures of docs/MECHANISMS.md: `python site/drawings.py`."""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"
INK, GREY, LINE = "#1c1c1c", "#5f5f66", "#b4b4bc"
# The colors of memlab's plots.
PARAMETERS, GRADIENTS, STATE = "#8fa5dd", "#8cd3ae", "#c4bdf5"
ACTIVATIONS, TEMPORARIES, FREE = "#f2b27a", "#e79aa2", "#ffffff"


def text(x: float, y: float, words: str, *, size=14, color=INK, anchor="middle", bold=False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" '
        f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def box(
    x: float, y: float, w: float, h: float, color: str, words: str = "", *, dashed=False
) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    drawn = (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" fill="{color}" '
        f'stroke="{INK if not dashed else LINE}"{dash}/>'
    )
    return drawn + (text(x + w / 2, y + h / 2 + 5, words, size=13) if words else "")


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


def sharding() -> str:
    """What each of four ranks holds: N weights, N gradients, N elements of state."""
    kinds = (("parameters", PARAMETERS), ("gradients", GRADIENTS), ("optimizer state", STATE))
    ways = (("DDP", 0), ("ZeRO-1", 1), ("ZeRO-2", 2), ("ZeRO-3", 3))
    parts, ranks, width = [], 4, 30
    for column, (way, stage) in enumerate(ways):
        left = 130 + 165 * column
        parts.append(text(left + 2 * width, 28, way, size=15, bold=True))
        for rank in range(ranks):
            x = left + rank * width
            parts.append(text(x + 13, 50, f"{rank}", size=12, color=GREY))
            for row, (_, color) in enumerate(kinds):
                y, sharded = 60 + 70 * row, row >= 3 - stage
                parts.append(box(x, y, 26, 60, FREE if sharded else color, dashed=sharded))
                if sharded:
                    parts.append(box(x, y + 15 * rank, 26, 15, color))
    for row, (name, _) in enumerate(kinds):
        parts.append(text(115, 95 + 70 * row, name, anchor="end"))
    parts.append(text(115, 50, "rank", size=12, color=GREY, anchor="end"))
    parts.append(text(390, 292, "Dashed: held by other ranks. Each rank owns a quarter.", size=13))
    return picture("What each rank of DDP and ZeRO holds", 780, 310, parts)


def tiles() -> str:
    """Tiled attention: one row of queries, one tile of keys at a time, and the running softmax."""
    size, left, top, count = 44, 110, 60, 5
    parts = [text(left + 2.5 * size, 28, "keys and values", size=15, bold=True)]
    parts.append(text(52, top + 2.6 * size, "queries", size=15, bold=True))
    for i in range(count):
        for j in range(count):
            visible, current = j <= i, (i, j) == (3, 2)
            color = "#f2b27a" if current else "#fbe3cb" if i == 3 and j < 2 else "#f0f0f4"
            x, y = left + j * size, top + i * size
            parts.append(
                box(x, y, size - 2, size - 2, color if visible else FREE, dashed=not visible)
            )
    parts.append(arrow(left + 4, top + 3.45 * size, left + 2.4 * size, top + 3.45 * size))
    lines = (
        ("For each tile, in registers:", True),
        ("S = Q·Kᵀ / √D", False),
        ("new max m′ = max(m, row max of S)", False),
        ("P = exp(S − m′)", False),
        ("row sum ℓ = ℓ·exp(m − m′) + row sum of P", False),
        ("output O = O·exp(m − m′) + P·V", False),
        ("After the last tile: O / ℓ, and store", False),
        ("log-sum-exp = m + log ℓ for backward.", False),
    )
    for n, (line, bold) in enumerate(lines):
        parts.append(text(375, 76 + 27 * n, line, anchor="start", bold=bold))
    parts.append(
        text(
            left, 308, "Dashed: hidden by the causal mask, never computed.", size=13, anchor="start"
        )
    )
    return picture("Tiled attention with an online softmax", 720, 325, parts)


def recompute() -> str:
    """Bytes over time of four blocks: all activations kept, and checkpoints with recompute."""
    parts = []
    for row, (title, checkpointed) in enumerate(
        (("all activations kept", False), ("activation checkpointing", True))
    ):
        base, left, step, unit = 170 + 200 * row, 60, 70, 24
        parts.append(text(left, base - 130, title, size=15, bold=True, anchor="start"))
        for n in range(4):  # forward
            x, kept = left + n * step, n + 1
            if checkpointed:
                parts.append(box(x, base - 6 * kept, step - 3, 6 * kept, PARAMETERS))
            else:
                parts.append(box(x, base - unit * kept, step - 3, unit * kept, ACTIVATIONS))
            parts.append(text(x + 33, base + 18, f"F{n + 1}", size=13))
        for n in range(4):  # backward
            x, kept = left + (4 + n) * step, 4 - n
            if checkpointed:
                parts.append(box(x, base - 6 * kept, step - 3, 6 * kept, PARAMETERS))
                parts.append(box(x, base - 6 * kept - unit, step - 3, unit, ACTIVATIONS))
            else:
                parts.append(box(x, base - unit * kept, step - 3, unit * kept, ACTIVATIONS))
            label = f"F{kept} B{kept}" if checkpointed else f"B{kept}"
            parts.append(text(x + 33, base + 18, label, size=13))
        parts.append(f'<line x1="{left}" y1="{base}" x2="630" y2="{base}" stroke="{INK}"/>')
    parts += [
        *(
            box(60, 405, 16, 14, PARAMETERS),
            text(84, 417, "block input (checkpoint)", size=13, anchor="start"),
        ),
        *(
            box(290, 405, 16, 14, ACTIVATIONS),
            text(314, 417, "activations of a block", size=13, anchor="start"),
        ),
        text(650, 417, "time →", size=13, anchor="end", color=GREY),
    ]
    return picture("Activations over time, with and without checkpointing", 680, 435, parts)


def allocator() -> str:
    """One segment of the caching allocator: blocks, a split, and a gap too small for a request."""
    blocks = (
        ("1. cudaMalloc returns a 20 MiB segment", ((20, "free", FREE),)),
        (
            "2. 6 MiB asked: the block is split",
            ((6, "A 6 MiB", ACTIVATIONS), (14, "free 14 MiB", FREE)),
        ),
        (
            "3. B and C fill the rest",
            ((6, "A", ACTIVATIONS), (8, "B 8 MiB", STATE), (6, "C 6 MiB", GRADIENTS)),
        ),
        (
            "4. A and C are freed: 12 MiB free, in two gaps",
            ((6, "free 6 MiB", FREE), (8, "B", STATE), (6, "free 6 MiB", FREE)),
        ),
    )
    parts = []
    for row, (title, content) in enumerate(blocks):
        y, x = 40 + 72 * row, 40
        parts.append(text(40, y - 8, title, anchor="start", bold=True))
        for size, label, color in content:
            width = size * 30
            parts.append(box(x, y, width, 34, color, label, dashed=color == FREE))
            x += width
    parts.append(
        text(
            40,
            322,
            "5. 8 MiB asked: no gap is large enough, so another segment is reserved.",
            anchor="start",
            bold=True,
        )
    )
    parts.append(
        text(
            40,
            346,
            "allocated 8 + 8 = 16 MiB · reserved 20 + 20 = 40 MiB",
            anchor="start",
            color=GREY,
        )
    )
    return picture("Segments, blocks, splits and gaps of the caching allocator", 680, 365, parts)


def pipeline() -> str:
    """1F1B with four stages and six micro-batches; backward takes two units."""
    stages, micro, unit, left, top = 4, 6, 26, 90, 40
    ready: dict[tuple[str, int, int], int] = {}  # when a pass of a stage ends
    clock = [0] * stages
    orders = [one_f_one_b(stage, stages, micro) for stage in range(stages)]
    parts, at = [], [0] * stages
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
            x = left + start * unit
            parts.append(box(x, top + 40 * s, length * unit - 2, 34, color, f"{m + 1}"))
    for s in range(stages):
        held = min(micro, stages - s)
        parts.append(text(80, top + 22 + 40 * s, f"stage {s}", anchor="end"))
        right = left + (max(clock) + 0.4) * unit
        parts.append(text(right, top + 22 + 40 * s, f"saves {held}", anchor="start", size=13))
    parts += [
        *(
            box(90, 218, 16, 14, PARAMETERS),
            text(114, 230, "forward of a micro-batch", size=13, anchor="start"),
        ),
        *(box(320, 218, 16, 14, GRADIENTS), text(344, 230, "backward", size=13, anchor="start")),
    ]
    return picture("A 1F1B pipeline schedule", int(left + max(clock) * unit + 90), 250, parts)


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
