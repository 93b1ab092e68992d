"""Test "fits" and "out of memory" on the GPU just above and below the predicted limit.

The limit is lower than the reserved peak: if the driver refuses memory, the allocator frees cached
segments and retries. Bisection in the simulation finds the smallest limit under which the predicted
process runs. Each configuration then runs in processes with slightly larger and smaller limits.
"""

from collections.abc import Sequence
from typing import Any

from common import SectionReport, table

from memlab.units import format_bytes

from .bench import Bench
from .configurations import CONFIGURATIONS
from .predictions import predicted

TRIED = (0.98, 0.99, 0.999, 1.001, 1.01, 1.02)  # × the predicted limit
PROMISED = (0.99, 1.01)  # the verdict must be right at these
JUDGED = (
    "sdpa auto, causal, 64, float32",
    "sdpa flash, causal, 64, bf16",
    "course's GPT, float32",
    "autocast bf16, checkpointed",
    "AdamW, default",
    "AdamW, fused",
    "cross-entropy of a large vocabulary",
    "no_grad",
    "varying lengths",  # its limit is far below its reserved memory
)


def run(bench: Bench) -> SectionReport:
    least = {}
    for name in JUDGED:
        prediction = predicted(CONFIGURATIONS[name], bench.size, bench.target)
        least[name] = prediction.least_cap_bytes(bench.total_bytes), prediction.blocks
    answers = {
        (name, share): bench.submit("fits", name, cap_bytes=int(share * least[name][0]))
        for name in JUDGED
        for share in TRIED
    }
    rows: list[dict[str, Any]] = []
    for name in JUDGED:
        tried = {share: answers[name, share].result() for share in TRIED}
        cap, blocks = least[name]
        rows.append(row(name, cap, blocks.allocated_bytes, blocks.reserved_bytes, tried))
        bench.say(progress_line(rows[-1]))
        bench.keep_rows(rows)
    return report(rows)


def row(
    name: str,
    least_bytes: int,
    allocated_bytes: int,
    reserved_bytes: int,
    tried: dict[float, dict[str, Any]],
) -> dict[str, Any]:
    failures = [answer["failure"] for answer in tried.values() if "failure" in answer]
    ran = {str(share): answer.get("fits") for share, answer in tried.items()}
    known = {
        "configuration": name,
        "least_cap_bytes": least_bytes,
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": reserved_bytes,
        "ran": ran,
        "what": {str(share): answer.get("what", "") for share, answer in tried.items()},
        "right": all(tried[share].get("fits") == (share > 1) for share in PROMISED),
    }
    return {**known, "failure": failures[0]} if failures else known


def progress_line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['configuration']}: {row['failure']}"
    ran = ", ".join(f"{float(share):.1%} {in_a_word(r)}" for share, r in row["ran"].items())
    verdict = "right" if row["right"] else "WRONG"
    return f"{row['configuration']}: {verdict}; of {format_bytes(row['least_cap_bytes'])}, {ran}"


def in_a_word(ran: bool | None) -> str:
    return {True: "runs", False: "runs out", None: "failed"}[ran]


def report(rows: Sequence[dict[str, Any]]) -> SectionReport:
    right = sum(row["right"] for row in rows)
    sentence = (
        f"“Fits” and “out of memory” at 1 % above and below the predicted limit are right for "
        f"{right} of {len(rows)} configurations."
    )
    shares = [f"{share:.1%}" for share in TRIED]
    lines = [
        (
            row["configuration"],
            *(f"{row[n]:,}" for n in ("least_cap_bytes", "reserved_bytes", "allocated_bytes")),
            *map(in_a_word, row["ran"].values()),
            "right" if row["right"] else "wrong",
        )
        for row in rows
    ]
    header = ("configuration", "limit", "reserved without a limit", "allocated", *shares, "verdict")
    notes = [
        f"- {row['configuration']}, {float(share):.1%}: {what}"
        for row in rows
        if not row["right"]
        for share, what in row["what"].items()
    ] + [f"- {row['configuration']}: {row['failure']}" for row in rows if "failure" in row]
    markdown = "\n".join([table(header, lines), "", *notes])
    return SectionReport(sentence, markdown, {"right": right, "of": len(rows), "rows": list(rows)})
