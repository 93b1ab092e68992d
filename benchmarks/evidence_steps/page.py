"""EVIDENCE.md: every measured row beside its prediction, the summary by kind, and the picture."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from common import ROOT, circumstances, heading, save, table

from memlab import plot

from .measurements import MIB, PEERS
from .predictions import EvidenceRow
from .reasons import reason
from .verdicts import MAY_FIT, Judged

PAGE, PICTURE = ROOT / "docs" / "EVIDENCE.md", ROOT / "images" / "evidence.png"
ERRORS = ROOT / "memlab" / "configs" / "evidence.json"
INTRODUCTION = """\
These training steps were measured on real GPUs, most of them by other people who published the
figures. memlab predicts each of them without a GPU. `python benchmarks/evidence.py` makes this
page.

- **T4**: LoRA and QLoRA steps on a Tesla T4, torch 2.14
  ([fitcheck](https://github.com/Anassbzdd/fitcheck), MIT, 2026-09-15). torch's own counters.
- **xMem**: trainings on an RTX 3060 and an RTX 4060, torch 2.6 and 2.3
  ([xMem](https://github.com/Stone-ResearchLife/xMem), MIT, Middleware 2025). NVML measured the
  whole device, so the figure is compared with reserved memory. The same authors published what four
  other estimators say about these trainings.
- **H100**: a GPT under `torch.compile` on an H100, torch 2.9
  ([autoresearch](https://github.com/karpathy/autoresearch), MIT, March 2026). torch's own counter
  of allocated bytes. With `expandable_segments:True`, which its script asks for, the first row is
  predicted 1 MiB lower.
- **torchao**: vision transformers with low-bit and offloaded optimizers on an RTX 4070 Ti SUPER,
  torch 2.4 or newer ([torchao](https://github.com/pytorch/ao), BSD 3-Clause). torch's counter of
  allocated memory, in GB with two decimals. ViT-g's pictures of 224 pixels are inferred. One row of
  its table ran out of memory (ViT-g, eager, autocast, nothing offloaded: predicted 19.00 GB on a
  card of 16).
- **Liger**: single operators on an A100, H100 and B200, 2024 to 2026, with torch's code or with
  Liger's ([Liger-Kernel](https://github.com/linkedin/Liger-Kernel), BSD 2-Clause). torch's counter
  of allocated memory. Liger's own Python code allocates, so it is run, in three versions near the
  measured ones (0.2.1, 0.4.2 and 0.6.1). Which torch was used is not recorded.
- **own**: steps of `benchmarks/evidence_steps/own.py`, recorded on an NVIDIA H200 with
  torch 2.11 and cuDNN 9.19 on 2026-11-28. torch's own counters. The compiled ones are predicted
  with the same torch and cuDNN, because Inductor's code differs from version to version: torch
  2.13 allocates 6.5% less in the checkpointed step.

NVML's figure is relative to its first sample. In the CNN trainings, the first sample fell somewhere
into the start of the training. That time was not recorded, so what torch had reserved once the
model was on the GPU is taken off for all of them.

The workspaces of convolutions are those of a rule. `pip install "memlab[cudnn]"` and
`python benchmarks/evidence.py --only RTX` predict the rows of CNNs with the workspaces that cuDNN
9.24 chooses (measured were 8.9 and 9.1, with older heuristics): median 2.98%, worst 18.93%, where
the rule has 2.95% and 25.25%. `python benchmarks/convolutions.py` compares both with single
convolutions on an H200.

The summaries leave out the nine transformer trainings on fewer than 15 texts, because the lengths
of these texts were drawn at random and not recorded. The builder of the QLoRA rows imitates the
loader's threads with two constants that were fitted to these rows, so only their allocated figures
are evidence. The T4 steps pinned the memory-efficient attention kernel."""

BY_MODEL = """\
Errors are relative to the measurement. The figures of the peers are their median errors on the same
rows. A dash means that the figure was not measured, or that the estimator does not support the
model."""


VERDICTS = """\
The benchmark of [timm](https://github.com/huggingface/pytorch-image-models) (Apache 2.0) trained
each model on an RTX 3090 with the largest of its batches that did not run out of memory (torch
1.12, float16 autocast, cudnn.benchmark). These are its figures and the next larger batch's, which
ran out. Of {count} verdicts {wrong} are wrong; {open} say that it may fit."""


def markdown(rows: Sequence[EvidenceRow], judged: Sequence[Judged] = ()) -> str:
    """Return the page."""
    shown = [row for row in rows if row.measurement.source != "Liger" or row.error]
    parts = [
        heading("Evidence: predictions and GPU measurements"),
        INTRODUCTION,
        "## By model",
        BY_MODEL,
        by_model_table(rows),
        "## By kind of step",
        summary_table(rows),
        *(verdict_parts(judged) if judged else ()),
        "## Rows",
        f"The {len(rows) - len(shown)} rows of Liger that are exact are left out.",
        table(
            ("row", "allocated", "predicted", "reserved or used", "predicted", "error", "why"),
            map(_cells, shown),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def verdict_parts(judged: Sequence[Judged]) -> list[str]:
    """Return the section of models that fit or do not."""
    wrong = sum(each.is_wrong for each in judged)
    unsure = sum(each.verdict == MAY_FIT for each in judged)
    header = ("model", "batch", "measured", "allocated", "reserved", "verdict")
    lines = [
        (
            *(each.model, str(each.batch), "ran" if each.ran else "ran out"),
            *(f"{size / 2**30:.2f} GiB" for size in (each.allocated_bytes, each.reserved_bytes)),
            each.verdict,
        )
        for each in judged
    ]
    said = VERDICTS.format(count=len(judged), wrong=wrong, open=unsure)
    return ["## Verdicts", said, table(header, lines)]


def write(rows: Sequence[EvidenceRow], judged: Sequence[Judged], results: Path) -> None:
    """Write the page, the picture, the errors for `memlab.predict`, and the results."""
    PAGE.write_text(markdown(rows, judged), encoding="utf-8")
    plot.save(picture(rows), PICTURE)
    errors = {
        "date": circumstances()["date"],
        "kinds": library_errors(rows),
        "kernels": confirmed_kernels(rows),
    }
    ERRORS.write_text(json.dumps(errors, indent=1) + "\n", encoding="utf-8")
    found = {row.measurement.name: [row.allocated_bytes, row.reserved_bytes] for row in rows}
    save(results, "evidence", "rows", {"summary": summary(rows), "predicted_bytes": found})


# ------------------------------------------------------------------ rows


def _cells(row: EvidenceRow) -> tuple[str, ...]:
    of = row.measurement
    allocated = [of.allocated_bytes, row.allocated_bytes] if of.allocated_bytes else [None, None]
    reserved = [of.reserved_bytes, row.reserved_bytes] if of.reserved_bytes else [None, None]
    return (
        of.name,
        *(f"{size / MIB:,.2f} MiB" if size else "" for size in allocated),
        *(f"{size / MIB:,.0f} MiB" if size else "" for size in reserved),
        f"{row.error:+.2%}",
        reason(row),
    )


# ------------------------------------------------------------------ by model


def by_model_table(rows: Sequence[EvidenceRow]) -> str:
    """Return a table with one line for each kind of step and model."""
    header = (
        *("model", "step", "rows", "allocated: worst", "reserved: median", "worst"),
        *PEERS.values(),
    )
    groups: dict[tuple[str, str], list[EvidenceRow]] = {}
    for row in rows:
        groups.setdefault((row.measurement.kind, row.measurement.model), []).append(row)
    return table(header, [_of_model(*of, group) for of, group in groups.items()])


def _of_model(kind: str, model: str, rows: Sequence[EvidenceRow]) -> tuple[str, ...]:
    allocated = [row.allocated_error for row in rows if row.allocated_error is not None]
    reserved = _reserved_errors(rows)
    peers = [_errors_of(peer, rows) for peer in PEERS.values()]
    return (
        *(model, kind, str(len(rows))),
        _percent(max(map(abs, allocated))) if allocated else "–",
        *([_percent(spread(reserved)[name]) for name in ("median", "worst")] if reserved else "––"),
        *(f"{statistics.median(map(abs, errors)):.1%}" if errors else "–" for errors in peers),
    )


def _percent(error: float) -> str:
    return f"{error:.2%}" if error else "0"


def _errors_of(peer: str, rows: Sequence[EvidenceRow]) -> list[float]:
    of_peer = [row.measurement for row in rows if peer in row.measurement.peers]
    return [of.peers[peer] / of.reserved_bytes - 1 for of in of_peer if of.reserved_bytes]


# ------------------------------------------------------------------ by kind


def percentile_95(errors: Sequence[float]) -> float:
    """Return the smallest error that at least 95 % of the rows stay within."""
    return sorted(errors)[-(-95 * len(errors) // 100) - 1]


def spread(errors: Iterable[float]) -> dict[str, float]:
    """Return the number of rows and the median, 95th percentile and worst absolute error."""
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(sizes),
        "median": statistics.median(sizes),
        "95 %": percentile_95(sizes),
        "worst": max(sizes),
    }


def summary(rows: Sequence[EvidenceRow]) -> dict[str, dict[str, float]]:
    """Return the errors of each kind of step, and the peers' on the same rows."""
    found = {}
    for kind in dict.fromkeys(row.measurement.kind for row in rows):
        of_kind = [row for row in rows if row.measurement.kind == kind]
        of_reserved = [row for row in of_kind if row.reserved_error is not None]
        known = [row for row in of_reserved if not row.measurement.unrecorded]
        if all(row.allocated_error is not None for row in of_kind):
            found[f"{kind}, allocated"] = spread(row.allocated_error or 0 for row in of_kind)
        if of_reserved:
            found[f"{kind}, reserved"] = spread(_reserved_errors(known or of_reserved))
        if known and len(known) < len(of_reserved):
            found[f"{kind}, reserved, all rows"] = spread(_reserved_errors(of_reserved))
        found.update(_of_peers(kind, known or of_kind))
    return found


def _reserved_errors(rows: Iterable[EvidenceRow]) -> list[float]:
    return [row.reserved_error for row in rows if row.reserved_error is not None]


def _of_peers(kind: str, rows: Sequence[EvidenceRow]) -> dict[str, dict[str, float]]:
    errors = {peer: _errors_of(peer, rows) for peer in PEERS.values()}
    return {f"{kind}, {peer}": spread(of) for peer, of in errors.items() if of}


def summary_table(rows: Sequence[EvidenceRow]) -> str:
    lines = [
        (what, str(of["rows"]), *(f"{of[name]:.2%}" for name in ("median", "95 %", "worst")))
        for what, of in summary(rows).items()
    ]
    return table(("kind of step, figure or estimator", "rows", "median", "95 %", "worst"), lines)


# ------------------------------------------------------------------ errors that predict reports


LIBRARY_KINDS = {
    "convolutions": ("CNN", "own convolutions"),
    "4-bit weights": ("QLoRA",),
    "transformers": ("LoRA", "transformer", "own transformers"),
    "recurrent layers": ("own recurrent",),
    "compiled code": ("compiled", "own compiled"),
    "neither attention nor convolutions": ("own perceptron",),
}


def library_errors(rows: Sequence[EvidenceRow]) -> dict[str, dict[str, Any]]:
    """Return the errors by the kinds that `memlab.configs.evidence` distinguishes."""
    found = {}
    for kind, of in LIBRARY_KINDS.items():
        known = [row for row in rows if not row.measurement.unrecorded]
        if not (chosen := [row for row in known if row.measurement.kind in of]):
            continue
        allocated = [row.allocated_error for row in chosen if row.allocated_error is not None]
        reserved = _reserved_errors(chosen)
        found[kind] = {
            "allocated": _range(allocated) if allocated else None,
            "reserved": _range(reserved),
        }
    return found


def confirmed_kernels(rows: Sequence[EvidenceRow]) -> list[str]:
    """Return the kernels used in a row that was predicted within 1 %."""
    close = [row for row in rows if abs(row.error) <= 0.01]
    return sorted({kernel for row in close for kernel in row.kernels})


def _range(errors: Sequence[float]) -> dict[str, float]:
    """Return how far predictions were below and above the measurements."""
    rounded = [round(error, 5) for error in errors]
    return {"rows": len(errors), "lowest": min(0.0, *rounded), "highest": max(0.0, *rounded)}


# ------------------------------------------------------------------ picture


def picture(rows: Sequence[EvidenceRow]) -> Any:
    """Draw predicted against measured memory, for memlab and its peers."""
    figure, axes = plt.subplots(figsize=(7.5, 6), layout="constrained")
    for peer, marker in zip(PEERS.values(), "^vsD", strict=True):
        points = [
            (row.measurement.reserved_bytes, row.measurement.peers[peer])
            for row in rows
            if peer in row.measurement.peers
        ]
        if points:
            axes.scatter(*_in_gib(points), s=14, marker=marker, alpha=0.45, label=peer)
    ours = [
        (row.measurement.reserved_bytes, row.reserved_bytes)
        for row in rows
        if row.measurement.reserved_bytes
    ]
    axes.scatter(*_in_gib(ours), s=18, color="black", zorder=3, label="memlab")
    ends = [1, 16]
    axes.plot(ends, ends, color="grey", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlim=(1, 16), ylim=(0.6, 24))
    ticks = [1, 2, 4, 8, 16]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_yticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.set(xlabel="measured on the GPU, GiB", ylabel="predicted without a GPU, GiB")
    axes.set_title(f"Reserved memory of {len(ours)} trainings on four GPUs")
    axes.legend(title="estimator")
    return figure


def _in_gib(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[size / 2**30 for size in sizes] for sizes in zip(*points, strict=True)]
