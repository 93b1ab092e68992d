"""Measured steps on CUDA against the allocator's statistics.

Each kind runs in its own process: a step that creates the optimizer state, a plain step with the
allocator's statistics of its peak, and a measured step. Both peaks must agree, and every block at
the peak must be attributed.
"""

from collections.abc import Sequence
from typing import Any

from common import SectionReport, table

from memlab.units import format_bytes

from . import meter_kinds
from .bench import Bench

UNATTRIBUTED = "unattributed"
HEADER = (
    *("kind of step", "peak", "− device's peak", "unattributed", "requested − plain step"),
    *("allocated − plain step", "scratch", "reserved"),
)


def run(bench: Bench) -> SectionReport:
    answers = {kind: bench.submit("meter", kind) for kind in meter_kinds.NAMES}
    rows: list[dict[str, Any]] = []
    for kind, answer in answers.items():
        rows.append(row(kind, answer.result()))
        bench.say(progress_line(rows[-1]))
        bench.keep_rows(rows)
    return report(rows)


def row(kind: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the differences of the meter and the allocator, or the failure."""
    if "failure" in answer:
        return {"kind": kind, **answer}
    peak, requested = answer["peak_bytes"], answer["requested_bytes"]
    return {
        "kind": kind,
        **answer,
        "above_the_device_bytes": peak - (answer["device_peak_bytes"] or 0),
        "unattributed_bytes": answer["at_peak"].get("unattributed", 0),
        "above_unwatched_bytes": peak - answer["unwatched_allocated_bytes"],
        "requested_above_unwatched_bytes": requested - answer["unwatched_requested_bytes"],
    }


def is_exact(row: dict[str, Any]) -> bool:
    """Return whether the requested peak equals the plain step's and is fully attributed.

    Allocated bytes may differ, because rounding depends on the state of the cache.
    """
    return (
        "failure" not in row
        and row["unattributed_bytes"] == row["requested_above_unwatched_bytes"] == 0
    )


def progress_line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['kind']}: {row['failure']}"
    return (
        f"{row['kind']}: {format_bytes(row['peak_bytes'])}, "
        f"{row['above_the_device_bytes']:+,} B to the device, "
        f"{row['unattributed_bytes']:,} B unattributed, "
        f"{row['requested_above_unwatched_bytes']:+,} B to the plain step"
    )


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "failure" in row:
        return (row["kind"], *[""] * (len(HEADER) - 1))
    differences = (
        *("above_the_device_bytes", "unattributed_bytes"),
        *("requested_above_unwatched_bytes", "above_unwatched_bytes"),
    )
    return (
        row["kind"],
        format_bytes(row["peak_bytes"]),
        *(f"{row[name]:+,}" if row[name] else "0" for name in differences),
        format_bytes(row["at_peak"].get("workspace", 0)),
        format_bytes(row["reserved_bytes"] or 0),
    )


def report(rows: Sequence[dict[str, Any]]) -> SectionReport:
    exact = sum(map(is_exact, rows))
    sentence = (
        f"{exact} of {len(rows)} kinds of step have the same peak measured as plain, to the byte, "
        f"with every block attributed."
    )
    notes = [
        *(f"- {row['kind']}: {row['failure']}" for row in rows if "failure" in row),
        *(
            f"- {row['kind']}: {'; '.join((*row['notes'], f'unattributed: {row[UNATTRIBUTED]}'))}"
            for row in rows
            if "failure" not in row and not is_exact(row)
        ),
    ]
    markdown = "\n".join([table(HEADER, map(cells, rows)), "", *notes])
    return SectionReport(sentence, markdown, {"exact": exact, "of": len(rows), "rows": list(rows)})
