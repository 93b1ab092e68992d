"""The running bill: one training step of a 124M-parameter model, and the saving of each day.

The lines are stored in bill.json. To measure and write them, run

    python -m memlab.course.build --bill

Measuring seventeen steps in a notebook would take too long. One of them has eight micro-batches and
recomputes its blocks. A test measures the lines again.
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

# Half a gigabyte of weights and a step of eight gigabytes: GPT-2's size, on 5,120 tokens.
SETTING = Setting("124m", batch=8, seq_len=640)
STORED = Path(__file__).with_name("bill.json")


def running_bill(day: int, today: Trace | None = None) -> "Figure":
    """Print the line of each day up to this one, and return a figure of them.

    `today` is this day's trace if the notebook has measured it.
    """
    from memlab import plot  # imported late: checks and commands don't need matplotlib

    traces, lines = {}, written()
    for number in days.numbers():
        if number <= day:
            label = _label(number, lines)
            if today and number == day:
                traces[label] = today
            else:
                traces[label] = lines.get(label) or days.day(number).bill.measure()
            print(_line(label, traces))
    what = f"{SETTING.model}, {SETTING.batch} × {SETTING.seq_len} tokens"
    # Leave room for all days' lines, so that every day's figure has the same scale.
    return plot.breakdown(traces, title=f"The running bill: {what}", room_for=lines)


def _label(number: int, lines: dict[str, Trace]) -> str:
    """Return the label of a day. Importing the checks of each day would take a second."""
    known = (label for label in lines if label.startswith(f"day {number}: "))
    return next(known, None) or days.day(number).bill.label


@cache
def plain() -> Trace:
    """Return the trace of the step without any technique."""
    return dry_trace(SETTING, TECHNIQUES["plain"])


def store(path: Path = STORED) -> None:
    """Measure and write every day's line."""
    lines = {}
    for number in days.numbers():
        bill = days.day(number).bill
        lines[bill.label] = bill.measure().at_peak
        print(f"{bill.label}: {format_bytes(sum(lines[bill.label].values()))}")
    with write_beside(path) as beside:
        beside.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def stored(bill: Bill) -> Trace:
    """Return the stored trace of a line, or measure it."""
    return written().get(bill.label) or bill.measure()


def written() -> dict[str, Trace]:
    """Return the stored lines, each as a trace of its peak alone."""
    lines = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    return {label: _peak_trace(held) for label, held in lines.items()}


def _peak_trace(held: dict[str, int]) -> Trace:
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
