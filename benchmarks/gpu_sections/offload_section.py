"""Offloading from the GPU: what it saves of the peak, how much longer a step takes, and how much of
the copies' time is hidden behind the step's."""

from typing import Any

from common import Report, table

from memlab.units import format_bytes

from .bench import Bench, facts_by_name
from .offload_jobs import DISK, HOST, PAIRS

SHARES = ("saved", "ahead", "hidden")
HEADER = ("offloaded to", "peak", "saved", "written", "read", "ahead", "time / nothing offloaded",
          "copies hidden")  # fmt: skip
COLUMNS = ("peak_bytes", "saved", "written_bytes", "read_bytes", "ahead",
           "time over nothing offloaded", "hidden")  # fmt: skip


def run(bench: Bench) -> Report:
    found = bench.in_turn("offload", PAIRS)
    lines = [(name, *(text(column, answer[column]) for column in COLUMNS))
             for name, answer in found.items()]  # fmt: skip
    plain = {"what": next(iter(found.values()))["what"], **facts_by_name(found)}
    return Report(sentence(found), table(HEADER, lines), plain)


def sentence(found: dict[str, dict[str, Any]]) -> str:
    """By place, from the least to the most: of rule 23, which names both."""
    parts = []
    for place in (HOST, DISK):
        answers = [answer for name, answer in found.items() if name.startswith(f"{place}, ")]
        shares = [answer["saved"] for answer in answers]
        times = [answer["time over nothing offloaded"] for answer in answers]
        parts.append(
            f"offloaded to the {place}, a step has {min(shares):.0%} to {max(shares):.0%} less of "
            f"a peak and takes {min(times):.2f} to {max(times):.2f} × the time"
        )
    return f"{'; '.join(parts)}.".capitalize()


def text(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:.0%}" if column in SHARES else f"{value:.2f} ×"
