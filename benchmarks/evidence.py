"""Predictions beside memory that other people measured on real GPUs.

    python benchmarks/evidence.py [--only SmolLM2-135M]

Each row of benchmarks/evidence/*.json is a step that somebody measured, with its source, licence
and versions. The step is rebuilt from its description (benchmarks/evidence_steps) and predicted
with this torch; no GPU is used and nothing is downloaded. Prints Markdown and writes
`benchmarks/results/<machine>.json` if all rows ran. Takes about four minutes on two cores.
"""

import json
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import heading, parser_with_results, progress, save, set_environment, table

import memlab

EVIDENCE = Path(__file__).parent / "evidence"
MIB = 2**20
HEADER = (
    *("step", "allocated, measured", "predicted", "difference"),
    *("reserved, measured", "predicted", "difference"),
)


@dataclass(frozen=True)
class EvidenceRow:
    """A measured step and its prediction, in MiB."""

    name: str
    kind: str  # "LoRA" or "QLoRA"
    measured_allocated: float
    measured_reserved: float
    allocated: float
    reserved: float

    @property
    def allocated_error(self) -> float:
        return self.allocated / self.measured_allocated - 1

    @property
    def reserved_error(self) -> float:
        return self.reserved / self.measured_reserved - 1

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.measured_allocated:,.2f} MiB",
            f"{self.allocated:,.2f} MiB",
            f"{self.allocated - self.measured_allocated:+.2f} MiB",
            f"{self.measured_reserved:,.0f} MiB",
            f"{self.reserved:,.0f} MiB",
            f"{self.reserved_error:+.2%}",
        )


# ------------------------------------------------------------------ rows


def runs() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name, the model's shape and the facts of each measured step."""
    facts = json.loads((EVIDENCE / "t4.json").read_text(encoding="utf-8"))
    for entry in facts["runs"]:
        run, shape = entry["run"], facts["model_configs"][entry["model_id"]]
        words = (
            *(shape["name"], run["attn_impl"], run["quantization"].replace("none", "fp16")),
            f"{run['batch_size']} × {run['seq_len']}",
        )
        yield ", ".join(words), shape, entry


def predicted(name: str, shape: Mapping[str, Any], entry: Mapping[str, Any]) -> EvidenceRow:
    """Predict a measured step."""
    from evidence_steps import lora

    memory = memlab.predict(partial(lora.build, shape, entry["run"])).memory
    measured = entry["measured"]
    return EvidenceRow(
        name,
        "LoRA" if entry["run"]["quantization"] == "none" else "QLoRA",
        measured["peak_allocated_mib"],
        measured["peak_reserved_mib"],
        (memory.allocated_peak_bytes or 0) / MIB,
        (memory.reserved_peak_bytes or 0) / MIB,
    )


# ------------------------------------------------------------------ summary


def summary(rows: Sequence[EvidenceRow]) -> dict[str, dict[str, float]]:
    """Return the median and the worst absolute error of each kind of step and figure."""
    found = {}
    for kind in dict.fromkeys(row.kind for row in rows):
        for figure in ("allocated", "reserved"):
            errors = [abs(getattr(r, f"{figure}_error")) for r in rows if r.kind == kind]
            found[f"{kind}, {figure}"] = {
                "rows": len(errors),
                "median": statistics.median(errors),
                "worst": max(errors),
            }
    return found


def sentences(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        f"- {what}: {of['rows']} rows, median {of['median']:.3%}, worst {of['worst']:.3%}"
        for what, of in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_with_results(__doc__ or "")
    parser.add_argument("--only", default="", help="only steps with this in their names")
    options = parser.parse_args(arguments)
    set_environment()
    warnings.simplefilter("ignore", FutureWarning)  # of transformers, about its next version
    chosen = [run for run in runs() if options.only in run[0]]
    if not chosen:
        print(f"error: no step has {options.only!r} in its name", file=sys.stderr)
        return 2
    rows = []
    with progress() as bar:
        task = bar.add_task("predicting", total=len(chosen))
        for run in chosen:
            rows.append(predicted(*run))
            bar.advance(task)
    found = summary(rows)
    print(heading("Evidence: LoRA on a Tesla T4 (fitcheck, MIT; torch 2.14)"), end="\n\n")
    print(table(HEADER, [row.cells() for row in rows]))
    print("", *sentences(found), sep="\n")
    if not options.only:
        numbers = {row.name: [row.allocated, row.reserved] for row in rows}
        save(options.results, "evidence", "t4", {"summary": found, "predicted_mib": numbers})
    return 0


if __name__ == "__main__":
    sys.exit(main())
