"""The JSON documents of `memlab plan`, `measure`, `run` and `explain`, which schema.json describes.

`--json` prints the document; `plan.json` and `measure.json` in the folder of `--out` hold the same.
A field that cannot be known is null. Bytes are integers.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from memlab.configs.targets import find_target
from memlab.explain import Explanation, summary
from memlab.explain.messages import Message
from memlab.explain.situation import Situation
from memlab.trace import Trace

if TYPE_CHECKING:  # it imports torch, which `memlab explain` does not
    from memlab.cli.rows import Row

SCHEMA = 1  # increased when a field is removed, renamed or means something else


def measure_document(what: str, rows: Sequence["Row"], on_cuda: Sequence["Row"]) -> dict[str, Any]:
    """Return the document of `memlab measure`."""
    failed = any(row.failure for row in rows)
    return {
        **_head("measure", "a technique failed" if failed else "measured", what),
        "rows": list(map(row_numbers, rows)),
        "on_cuda": list(map(row_numbers, on_cuda)),
    }


def run_document(what: str, rows: Sequence["Row"], verdict: str) -> dict[str, Any]:
    """Return the document of `memlab run`."""
    return {**_head("run", verdict, what), "rows": list(map(row_numbers, rows))}


def plan_document(what: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of `memlab plan`. Fields that `numbers` lacks are null."""
    about_target = getattr(find_target(numbers["target"]), "note", None)
    return {
        **_head("plan", numbers["verdict"], what),
        **dict.fromkeys(("model", "library", "script", "parameters", "batch", "seq_len")),
        "deepspeed": None,
        "gpus": 1,
        **numbers,
        "notes": [*filter(None, [about_target]), *numbers["notes"]],
    }


def explain_document(what: str, found: Explanation) -> dict[str, Any]:
    """Return the document of `memlab explain`."""
    replayed = found.replays
    return {
        **_head("explain", found.cause or "unknown", what),
        "kind": found.kind,
        "line": summary.place(found) or None,
        "device": summary.device(found),
        "rank": found.log.rank if found.log else None,
        "notes": list(summary.notes(found)),
        "stated": _stated(found.log.message) if found.log else {},
        **_held(found.situation),
        "causes": [
            {
                "name": each.cause.name,
                "title": each.cause.title,
                "confidence": each.confidence,
                "evidence": list(each.evidence),
                "advice": list(summary.advice(each, replayed)),
                "code": each.code,
                "decide": each.decide,
            }
            for each in found.findings
        ],
        "remedies": [asdict(each) for each in replayed.remedies] if replayed else [],
        "reproduced": replayed.reproduces if replayed else None,
    }


def _stated(message: Message) -> dict[str, int]:
    """Return the sizes in a message."""
    no_sizes = ("backend", "processes", "device", "variable", "names_expandable")
    fields = asdict(message).items()
    return {name: size for name, size in fields if name not in no_sizes and size is not None}


def _held(situation: Situation | None) -> dict[str, Any]:
    """Return what a snapshot or a trace shows of the explained moment."""
    names = ("requested_bytes", "allocated_bytes", "reserved_bytes", "largest_free_bytes")
    if situation is None:
        return {**dict.fromkeys(names), "alive": {}, "ambiguous": {}, "growth": [], "leaks": []}
    requested = situation.request_bytes if situation.history.refusal else None
    largest = situation.free.largest_bytes if situation.history.has_segments else None
    reserved = situation.reserved_bytes if situation.history.has_segments else None
    sizes = (requested, situation.allocated_bytes, reserved, largest)
    return {
        **dict(zip(names, sizes, strict=True)),
        "alive": dict(situation.by_category),
        "ambiguous": dict(situation.unsure),
        "growth": list(situation.growth),
        "leaks": [
            {"line": str(leak.frame or "") or None, "bytes": leak.bytes, "steps": leak.steps}
            for leak in situation.leaks
        ],
    }


def _head(command: str, verdict: str, what: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": command,
        "verdict": verdict,
        "what": what,
        "date": date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def row_numbers(row: "Row") -> dict[str, Any]:
    """Return a measured row's fields. A row that failed has no bytes."""
    return {
        "technique": row.name,
        **({} if row.trace is None else _bytes_of(row.trace)),
        **row.more_numbers(),
        "seconds": row.seconds,
        "time_ratio": row.time_ratio,
        "time_ratios": list(row.time_ratios),
        "estimated_time_ratio": row.estimated_time_ratio,
        "gradient_difference": _json_number(row.gradient_difference),
        "largest_gradient": _json_number(row.largest_gradient),
        "failure": row.failure,
        "dry_for": row.dry_for,
    }


def _bytes_of(trace: Trace) -> dict[str, Any]:
    return {
        "device": trace.device,
        "dry": trace.dry,
        "peak_bytes": trace.peak_bytes,
        "allocated_bytes": trace.allocated_bytes,
        "reserved_bytes": trace.reserved_bytes,
        "peak_in": trace.peak_phase,
        "at_peak": dict(trace.at_peak),
        "memory": asdict(trace.memory),
        "notes": list(trace.notes),
    }


def _json_number(number: float | None) -> float | str | None:
    """Return nan and infinity as text, because JSON lacks them."""
    return number if number is None or math.isfinite(number) else str(number)
