"""The running bill: one training step of a 124M-parameter model, and what each day takes off it.

A day measures its own line; nothing is remembered from the days before, so no line can be out of
date.
"""

from typing import TYPE_CHECKING

from memlab.course import days
from memlab.trace import Trace
from memlab.train import Setting
from memlab.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Weights of half a gigabyte, and a step of eight: GPT-2's size, on 5,120 tokens.
SETTING = Setting("124m", batch=8, seq_len=640)


def running_bill(day: int, today: Trace | None = None) -> "Figure":
    """Measure and print the line of each day up to this one; the picture shows them as bars.

    `today` is this day's line where it was measured already.
    """
    from memlab import plot  # checks and commands need no matplotlib

    traces = {}
    for number in days.numbers():
        if number <= day:
            bill = days.day(number).bill
            traces[bill.label] = today if today and number == day else bill.measure()
            print(_line(bill.label, traces))
    return plot.breakdown(traces, title=f"The running bill: {SETTING}")


def _line(label: str, traces: dict[str, Trace]) -> str:
    first, last = next(iter(traces.values())), traces[label]
    saved = "" if last is first else f", {1 - last.peak_bytes / first.peak_bytes:+.1%} saved"
    return f"{label}: {format_bytes(last.peak_bytes)}{saved}"
