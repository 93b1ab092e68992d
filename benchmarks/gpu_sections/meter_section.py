"""The metered step on CUDA against the allocator's own figures.

Each kind runs in a process of its own: a step that makes the optimizer's state, one unwatched with
the allocator's count of its peak, one under the meter. The metered peak must be the allocator's,
every block at it must have a name, and watching must not have moved it.
"""

from collections.abc import Sequence
from typing import Any

from common import Report, table

from memlab.units import format_bytes

from . import meter_kinds
from .bench import Bench

UNNAMED = "unattributed"
HEADER = (
    *("kind of step", "peak", "above the device's", "unattributed", "requested, above unwatched"),
    *("allocated, above unwatched", "scratch", "reserved"),
)


def run(bench: Bench) -> Report:
    answers = {kind: bench.submit("meter", kind) for kind in meter_kinds.NAMES}
    rows: list[dict[str, Any]] = []
    for kind, answer in answers.items():
        rows.append(row(kind, answer.result()))
        bench.say(told(rows[-1]))
        bench.keep_rows(rows)
    return report(rows)


def row(kind: str, answer: dict[str, Any]) -> dict[str, Any]:
    """What the meter says less what the allocator says; a failure stays as it is."""
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
    """Whether the peak is the one of the unwatched step, in what was asked for, and every byte of
    it has a name. What blocks waste beyond it depends on what the cache holds by then."""
    return (
        "failure" not in row
        and row["unattributed_bytes"] == row["requested_above_unwatched_bytes"] == 0
    )


def told(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['kind']}: {row['failure']}"
    return (
        f"{row['kind']}: {format_bytes(row['peak_bytes'])}, "
        f"{row['above_the_device_bytes']:+,} B to the device, "
        f"{row['unattributed_bytes']:,} B unattributed, "
        f"{row['requested_above_unwatched_bytes']:+,} B to the unwatched step"
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


def report(rows: Sequence[dict[str, Any]]) -> Report:
    exact = sum(map(is_exact, rows))
    sentence = (
        f"Under the meter, {exact} of {len(rows)} kinds of step have the unwatched step's peak to "
        f"the byte, every block at it under a name."
    )
    notes = [
        *(f"- {row['kind']}: {row['failure']}" for row in rows if "failure" in row),
        *(
            f"- {row['kind']}: {'; '.join((*row['notes'], f'unattributed: {row[UNNAMED]}'))}"
            for row in rows
            if "failure" not in row and not is_exact(row)
        ),
    ]
    markdown = "\n".join([table(HEADER, map(cells, rows)), "", *notes])
    return Report(sentence, markdown, {"exact": exact, "of": len(rows), "rows": list(rows)})
