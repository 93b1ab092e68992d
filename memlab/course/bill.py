"""The running bill: one training step of a 124M-parameter model, and what each day takes off it.

The lines stand in bill.json, which

    python -m memlab.course.build --bill

measures and writes: sixteen steps, or one of eight micro-batches whose blocks run twice, would be
more than a notebook's time. A test measures them again.
"""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from memlab.course import days
from memlab.course.exercises import Bill
from memlab.internals.files import write_beside
from memlab.trace import Event, Trace
from memlab.train import TECHNIQUES, Setting, dry_trace
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Weights of half a gigabyte, and a step of eight: GPT-2's size, on 5,120 tokens.
SETTING = Setting("124m", batch=8, seq_len=640)
STORED = Path(__file__).with_name("bill.json")


def running_bill(day: int, today: Trace | None = None) -> "Figure":
    """Print the line of each day up to this one; the picture shows them.

    `today` is this day's line where the notebook has measured it.
    """
    from memlab import plot  # checks and commands need no matplotlib

    traces = {}
    for number in days.numbers():
        if number <= day:
            bill = days.day(number).bill
            traces[bill.label] = today if today and number == day else stored(bill)
            print(_line(bill.label, traces))
    what = f"{SETTING.model}, {SETTING.batch} × {SETTING.seq_len} tokens"
    # With room for all lines, those of later days too: one scale from the first day to the last.
    return plot.breakdown(traces, title=f"The running bill: {what}", room_for=written())


@cache
def plain() -> Trace:
    """The step as it is before anything is saved."""
    return dry_trace(SETTING, TECHNIQUES["plain"])


def store(path: Path = STORED) -> None:
    """Measure every day's line, and write them."""
    lines = {}
    for number in days.numbers():
        bill = days.day(number).bill
        lines[bill.label] = bill.measure().at_peak
        print(f"{bill.label}: {format_bytes(sum(lines[bill.label].values()))}")
    with write_beside(path) as beside:
        beside.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def stored(bill: Bill) -> Trace:
    """What is written of a line; measured if nothing is."""
    return written().get(bill.label) or bill.measure()


def written() -> dict[str, Trace]:
    """The lines, each a trace that begins at its peak."""
    lines = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    return {label: _at_peak(held) for label, held in lines.items()}


def _at_peak(held: dict[str, int]) -> Trace:
    found = enumerate(held.items())
    events = (Event(n, i, what, "", "", "before", "uint8", (n,)) for i, (what, n) in found)
    return Trace(tuple(events))


def _line(label: str, traces: dict[str, Trace]) -> str:
    first, last = next(iter(traces.values())), traces[label]
    if last is first:
        saved = ""
    elif last.peak_bytes == first.peak_bytes:
        saved = ", the same"
    else:
        share = last.peak_bytes / first.peak_bytes - 1
        saved = f", {abs(share):.1%} {'less' if share < 0 else 'more'}"
    return f"{label}: {format_bytes(last.peak_bytes)}{saved}"
