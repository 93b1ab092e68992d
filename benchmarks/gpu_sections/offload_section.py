"""Offloading from the GPU: saved peak memory, time ratio, and overlap of copies with the step."""

from typing import Any

from common import SectionReport, table

from memlab.units import format_bytes

from .bench import Bench, facts_by_name
from .offload_jobs import DISK, HOST, PAIRS

SHARES = ("saved", "ahead", "hidden")
HEADER = ("offloaded to", "peak", "saved", "written", "read", "ahead", "time / nothing offloaded",
          "copies hidden")  # fmt: skip
COLUMNS = ("peak_bytes", "saved", "written_bytes", "read_bytes", "ahead",
           "time / nothing offloaded", "hidden")  # fmt: skip


def run(bench: Bench) -> SectionReport:
    found = bench.in_turn("offload", PAIRS)
    lines = [(name, *(text(column, answer[column]) for column in COLUMNS))
             for name, answer in found.items()]  # fmt: skip
    plain = {"what": next(iter(found.values()))["what"], **facts_by_name(found)}
    return SectionReport(sentence(found), table(HEADER, lines), plain)


def sentence(found: dict[str, dict[str, Any]]) -> str:
    """Return the ranges of saved memory and time for each place, to compare with rule 23."""
    parts = []
    for place in (HOST, DISK):
        answers = [answer for name, answer in found.items() if name.startswith(f"{place}, ")]
        shares = [answer["saved"] for answer in answers]
        times = [answer["time / nothing offloaded"] for answer in answers]
        parts.append(
            f"offloading to the {place} saves {min(shares):.0%} to {max(shares):.0%} of the peak "
            f"and takes {min(times):.2f} to {max(times):.2f} × the time"
        )
    return f"{'; '.join(parts)}.".capitalize()


def text(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:.0%}" if column in SHARES else f"{value:.2f} ×"
