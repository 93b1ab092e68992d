"""Does it fit? Predicted on the CPU, then tried on the GPU a little above and below the edge.

The edge is not the peak of what is reserved: when the driver refuses, the allocator gives cached
segments back and asks again. So the least cap under which the predicted process still runs is
found by bisection in the simulation, and each configuration is run in processes that may reserve
a little more, and a little less, than that.
"""

from collections.abc import Sequence
from typing import Any

from common import Report, table

from memlab.units import format_bytes

from .bench import Bench
from .configurations import CONFIGURATIONS
from .predictions import predicted

TRIED = (0.98, 0.99, 0.999, 1.001, 1.01, 1.02)  # of the least cap
PROMISED = (0.99, 1.01)  # on these, the verdict must be right
JUDGED = (
    "sdpa auto, causal, 64, float32",
    "sdpa flash, causal, 64, bf16",
    "course's GPT, float32",
    "autocast bf16, checkpointed",
    "AdamW, default",
    "AdamW, fused",
    "cross-entropy of a large vocabulary",
    "no_grad",
    "lengths that vary",  # its edge lies far below what it reserves
)


def run(bench: Bench) -> Report:
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
        bench.say(told(rows[-1]))
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


def told(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['configuration']}: {row['failure']}"
    ran = ", ".join(f"{float(share):.1%} {in_a_word(r)}" for share, r in row["ran"].items())
    verdict = "right" if row["right"] else "WRONG"
    return f"{row['configuration']}: {verdict}; of {format_bytes(row['least_cap_bytes'])}, {ran}"


def in_a_word(ran: bool | None) -> str:
    return {True: "runs", False: "runs out", None: "failed"}[ran]


def report(rows: Sequence[dict[str, Any]]) -> Report:
    right = sum(row["right"] for row in rows)
    sentence = (
        f"“Fits” and “out of memory”, said of caps 1 % above and below the edge, are right for "
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
    header = ("configuration", "edge", "reserved without a cap", "allocated", *shares, "verdict")
    notes = [
        f"- {row['configuration']}, {float(share):.1%}: {what}"
        for row in rows
        if not row["right"]
        for share, what in row["what"].items()
    ] + [f"- {row['configuration']}: {row['failure']}" for row in rows if "failure" in row]
    markdown = "\n".join([table(header, lines), "", *notes])
    return Report(sentence, markdown, {"right": right, "of": len(rows), "rows": list(rows)})
