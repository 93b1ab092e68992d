"""The report of an explanation: one HTML page that needs nothing else, and no network.

The page's markup, styles and drawing code are in report.html. This module fills in the data: the
findings as text, the timeline in columns, and the largest blocks with their stacks.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from memlab.explain import summary
from memlab.explain.categories import CATEGORIES
from memlab.explain.explanation import Explanation
from memlab.explain.frames import model_line, operator, user_frames, user_line
from memlab.explain.histories import Block, bytes_over_time
from memlab.explain.situation import Situation
from memlab.units import format_bytes

TEMPLATE = Path(__file__).with_name("report.html")
COLUMNS = 800  # of the timeline; a column shows its fullest moment
MOST_BLOCKS = 20_000  # the largest ones, which keeps the page below a few megabytes


def report(found: Explanation, title: str) -> str:
    """Return the page as HTML."""
    text = json.dumps(page_data(found, title), allow_nan=False, separators=(",", ":"))
    # In a script element, "<" could end the element, so it is escaped.
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/", text.replace("<", "\\u003c"))


def page_data(found: Explanation, title: str) -> dict[str, Any]:
    """Return everything that the page shows, as plain data."""
    s = found.situation
    return {
        "title": f"memlab explain: {title}",
        "headline": f"{summary.KINDS[found.kind]}: {summary.headline(found)}",
        "places": list(summary.places(found)),
        "notes": list(summary.notes(found)),
        "findings": [_finding(found, number) for number in range(len(found.findings))],
        "record": list(summary.record_next()) if summary.needs_recording(found) else [],
        "table_title": "What was alive" if s else "What the message states",
        "table": _table(found),
        "facts": [*summary.growth_lines(s), *summary.fragmentation_lines(s)] if s else [],
        "remedies": _remedies(found),
        "replay_note": summary.replay_note(found.replays, s),
        "history": _history(s) if s else None,
    }


def _finding(found: Explanation, number: int) -> dict[str, Any]:
    finding = found.findings[number]
    return {
        "title": finding.cause.title,
        "word": finding.word,
        "evidence": list(finding.evidence),
        "advice": list(summary.advice(finding, found.replays)),
    }


def _table(found: Explanation) -> list[list[str]]:
    if found.log:
        sizes = summary.size_rows(found.log.message)
        return [["", "bytes"], *map(list, sizes)]
    assert found.situation is not None
    rows = [("category", "bytes", "share", "from sizes alone")]
    rows += summary.peak_rows(found.situation)
    used = 4 if any(note for *_, note in rows[1:]) else 3
    return [list(row[:used]) for row in rows]


def _remedies(found: Explanation) -> list[list[str]]:
    if found.replays is None:
        return []
    base = found.replays.base
    rows = [
        [o.name, format_bytes(o.reserved_peak_bytes), o.against(base)]
        for o in found.replays.remedies
    ]
    recorded = ["as recorded", format_bytes(base.reserved_peak_bytes), ""]
    return [["remedy", "reserved at most", "predicted"], recorded, *rows]


# ------------------------------------------------------------------ the pictures


def _history(s: Situation) -> dict[str, Any]:
    history = s.history
    names = [name for name in CATEGORIES if _ever(s, name)]
    positions = _fullest(history.allocated)
    stacks = _Stacks()
    return {
        "moment": s.moment,
        "length": history.length,
        "has_segments": history.has_segments,
        "categories": names,
        "positions": positions,
        "levels": [[level[at] for at in positions] for level in _levels(s, names)],
        "totals": [history.allocated[at] for at in positions],
        "reserved": [history.reserved[at] for at in positions],
        "refusals": [{"position": r.position, "bytes": r.bytes} for r in history.refusals],
        "blocks": [_block(s, block, names, stacks) for block in _shown(s)],
        "spans": [
            [x.address, x.bytes, x.born, _end(x.died, history), int(x.expandable)]
            for x in history.spans
        ],
        "stacks": stacks.found,
    }


def _ever(s: Situation, name: str) -> bool:
    return any(category.name == name for category in s.categories.of.values())


def _levels(s: Situation, names: list[str]) -> Iterator[list[int]]:
    """Yield the bytes of each category that are alive after each position."""
    for name in names:
        blocks = (b for b in s.history.blocks if s.categories.name(b) == name)
        yield bytes_over_time(blocks, s.history.length)


def _fullest(totals: Sequence[int]) -> list[int]:
    """Return the position with the most bytes in each of at most COLUMNS equal ranges."""
    count = min(COLUMNS, len(totals))
    bounds = [len(totals) * number // count for number in range(count + 1)]
    return [max(range(*each), key=totals.__getitem__) for each in pairwise(bounds)]


def _shown(s: Situation) -> list[Block]:
    """Return the largest blocks, those alive at the moment first."""
    blocks = sorted(s.history.blocks, key=lambda b: (not b.alive(s.moment), -b.bytes))
    return blocks[:MOST_BLOCKS]


def _block(s: Situation, block: Block, names: list[str], stacks: "_Stacks") -> list[Any]:
    category = s.categories.of[block]
    return [
        block.address,
        block.bytes,
        block.born,
        _end(block.died, s.history),
        names.index(category.name),
        int(category.sure),
        stacks.number(block),
    ]


def _end(died: int, history: Any) -> int:
    return min(died, history.length + 1)


class _Stacks:
    """Stacks as lines of text, each once. The user's line comes first."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []
        self._numbers: dict[Any, int] = {}

    def number(self, block: Block) -> int:
        if block.stack not in self._numbers:
            self._numbers[block.stack] = len(self.found)
            self.found.append(_stack_lines(block))
        return self._numbers[block.stack]


def _stack_lines(block: Block) -> list[str]:
    """Return the user's line, the model's under it, and the frames in to where the user's begin."""
    lines = [str(frame) for frame in (user_line(block.stack), model_line(block.stack)) if frame]
    outermost = next((f for f in user_frames(block.stack)), None)
    inside = block.stack[: block.stack.index(outermost) + 1] if outermost else block.stack
    return [
        " in ".join(lines) or operator(block.stack),
        *(str(f) for f in inside if not f.name.endswith("_call_impl")),
    ]
