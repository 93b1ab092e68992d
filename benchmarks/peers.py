"""Print the table of docs/PEERS.md: memlab beside production packages.

    python benchmarks/peers.py

The script measures nothing. Each row comes from `benchmarks/results/`, and its last column names
the script that wrote the figure. A test compares the page with this table.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS
from common import table as markdown

from memlab.units import format_bytes

MEASURED_ON = "cpu-x86_64-2-cores.json"
HEADER = ("", "memlab", "what exists", "script")
THREADS = "2"


class Line(NamedTuple):
    """A row: the figure, memlab's value, the peers' values, and the script."""

    what: str
    ours: str
    theirs: str
    script: str


def main() -> int:
    print(table(json.loads((RESULTS / MEASURED_ON).read_text(encoding="utf-8"))))
    return 0


def table(results: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    groups = (metering, planning, optimizers, activations, processes, averages, slower)
    lines = [line for group in groups for line in group(results)]
    rows = [(*line[:3], f"`{Path('benchmarks') / line.script}.py`") for line in lines]
    return markdown(HEADER, rows).replace("---:", "---")


def metering(results: dict[str, Any]) -> Iterator[Line]:
    """Compare the measured peaks of training steps."""
    kinds = results["meter"]["exactness"]["rows"]
    ours, theirs = ([row[who] for row in kinds] for who in ("memlab", "mem_tracker"))
    answers = [error for error in theirs if isinstance(error, (int, float))]
    yield Line(
        f"peaks exact to the byte, of {len(kinds)} kinds of training step",
        str(ours.count(0)),
        f"torch's MemTracker: {answers.count(0)}, and no answer for {len(kinds) - len(answers)}",
        "meter",
    )
    cost = results["meter"]["cost"]["lines"]
    seconds, tracker = (cost[of]["measured"][1] for of in ("dry_seconds", "tracker_seconds"))
    yield Line(
        "a step of Llama 2 7B, on fake tensors",
        f"{seconds:.1f} s",
        f"MemTracker: {tracker:.1f} s",
        "meter",
    )


ESTIMATORS = {
    "accelerate": "accelerate's",
    "DeepSpeed 2": "DeepSpeed's",
    "cookbook": "EleutherAI's cookbook",
    "16 bytes a weight": "16 bytes per weight",
    "with activations": "16 bytes per weight, plus activations by Korthikanti et al.",
}


def planning(results: dict[str, Any]) -> Iterator[Line]:
    """Compare the estimated peaks of training steps."""
    accuracy = results["planner"]["accuracy"]
    errors = accuracy["errors"]

    def shown(name: str, which: str) -> str:
        median, worst = errors[name][which][:2]
        return f"{median:.0%}, {worst:.0%}"

    yield Line(
        f"estimates of {accuracy['of']} steps on a CPU, before they run: median and worst error",
        shown("memlab", "all"),
        "; ".join(f"{words}: {shown(name, 'all')}" for name, words in ESTIMATORS.items()),
        "planner",
    )
    known = {name: errors[name]["known configurations"] for name in ESTIMATORS}
    yield Line(
        "the same, for the steps whose techniques the estimator supports (their number)",
        shown("memlab", "known"),
        "; ".join(
            f"{words} ({known[name]}): {shown(name, 'known')}" for name, words in ESTIMATORS.items()
        ),
        "planner",
    )


def optimizers(results: dict[str, Any]) -> Iterator[Line]:
    """Compare time, memory and accuracy of optimizer steps."""
    rows = results["optim"]["optimizers"]["rows"]
    seconds = results["optim"]["optimizers"]["times"][THREADS]
    ours = rows["memlab Adam8bit"]
    peers = ("bitsandbytes", "torchao")
    named = {peer: rows[f"{peer} {name}"] for peer, name in zip(peers, EIGHT_BIT, strict=True)}
    yield Line(
        "8-bit Adam: the longest step if gradients' scales differ by e³, in learning rates",
        f"{ours['longest']['3.0']:.1f}",
        "; ".join(f"{peer}: {in_words(row['longest']['3.0'])}" for peer, row in named.items()),
        "optim",
    )
    yield Line(
        "8-bit Lion: how far weights move in 1,000 steps with zero gradients, in learning rates",
        f"{rows['memlab Lion8bit']['idle']:.0f}",
        f"bitsandbytes: {rows['bitsandbytes Lion8bit']['idle']:,.0f}",
        "optim",
    )
    yield Line(
        "8-bit Adam: temporary memory of a step with 16.8 million weights",
        format_bytes(ours["on the way"]),
        "; ".join(f"{peer}: {format_bytes(row['on the way'])}" for peer, row in named.items()),
        "optim",
    )
    yield from _temporaries(results["optim"])
    for name, theirs in OPTIMIZERS.items():
        factors = [f"{peer}: {seconds[peer] / seconds[name]:.1f} ×" for peer in theirs]
        yield Line(f"time of a step, {name.split()[1]}", "1 ×", "; ".join(factors), "optim")


def _temporaries(results: dict[str, Any]) -> Iterator[Line]:
    """Compare what a step allocates beside the state."""
    rows, matrices = results["optimizers"]["rows"], results["matrices"]["rows"]
    for name, theirs in OF_MATRICES.items():
        beside = [f"{peer}: {format_bytes(matrices[peer]['on the way'])}" for peer in theirs]
        yield Line(
            f"{name}: temporary memory of a step of a 1,024 × 1,024 matrix",
            format_bytes(matrices[name]["on the way"]),
            "; ".join(beside),
            "optim",
        )
    yield Line(
        "Adam-mini: temporary memory of a step with 16.8 million weights",
        format_bytes(rows["memlab AdamMini"]["on the way"]),
        f"adam-mini: {format_bytes(rows['adam-mini Adam_mini']['on the way'])}",
        "optim",
    )


def in_words(number: float) -> str:
    """Format the length of an update."""
    return f"{number / 1e6:.1f} million" if number >= 1e6 else f"{number:.1f}"


EIGHT_BIT = ("Adam8bit", "AdamW8bit")
OF_MATRICES = {
    "Muon": ("torch Muon",),
    "GaLore": ("galore-torch", "GaLore, reference"),
    "APOLLO": ("APOLLO, reference",),
}
OPTIMIZERS = {
    "memlab Adam8bit": ("bitsandbytes Adam8bit", "torchao AdamW8bit"),
    "memlab Lion": ("lion-pytorch Lion",),
    "memlab AdamMini": ("adam-mini Adam_mini",),
}


def activations(results: dict[str, Any]) -> Iterator[Line]:
    """Compare losses, checkpointing and quantization."""
    ways = results["losses"]["float32"]["ways"]
    ours, theirs = (
        f"{format_bytes(ways[way]['peak_bytes'])}, {ways[way]['ratio']['median']:.2f} ×"
        for way in ("memlab", "F.linear_cross_entropy")
    )
    yield Line(
        "loss of 2,048 tokens, vocabulary 32,000: memory, and time relative to full logits",
        ours,
        f"torch's F.linear_cross_entropy: {theirs}",
        "losses",
    )
    both = results["checkpointing"]["against torch"]
    against = both["25m, 2 × 256 tokens"]
    (many,) = (found for name, found in both.items() if name.startswith("200 blocks"))
    peaks = against["peak_bytes"]
    same = "the same" if peaks["memlab"] == peaks["torch"] else format_bytes(peaks["torch"])
    yield Line(
        "checkpointing every block: a 25M model's peak and time, and the time of 200 tiny blocks",
        f"{format_bytes(peaks['memlab'])}, {against['memlab_to_torch']['median']:.2f} ×, "
        f"{many['memlab_to_torch']['median']:.2f} ×",
        f"torch.utils.checkpoint: {same}, 1 ×, 1 ×",
        "checkpointing",
    )
    codec = results["compression"]["times"]["encode and decode, to bitsandbytes at 8 bits"][
        "8 bits"
    ]
    yield Line(
        "quantize to 8 bits and back: time",
        f"{codec:.2f} ×",
        "bitsandbytes: 1 ×",
        "activation_compression",
    )


def processes(results: dict[str, Any]) -> Iterator[Line]:
    """Compare sharded steps on several ranks."""
    rows = {row["run"]: row["ratio"][1] for row in results["zero"]["processes"]["rows"]}
    yield Line(
        "a step with ZeRO stage 3, two processes: time",
        f"{rows['stage 3']:.2f} ×",
        "FSDP2: 1 ×",
        "zero",
    )


def averages(results: dict[str, Any]) -> Iterator[Line]:
    """Compare post-hoc EMA."""
    found = results["ema"]["synthesis"]["4 averages into models"]
    ours, theirs = (format_bytes(found["peak_bytes"][who]) for who in ("memlab", "ema-pytorch"))
    yield Line(
        "four averages of 20 snapshots, 32 million weights: memory, time",
        f"{ours}, 1 ×",
        f"ema-pytorch: {theirs}, {found['ratios']['ema-pytorch']['median']:.1f} ×",
        "ema",
    )


def slower(results: dict[str, Any]) -> Iterator[Line]:
    """Compare what production packages do faster."""
    attention = results["attention"]["time"]
    factors = [f"{attention[kind]['flash_to_torch']['median']:.2f} ×" for kind in KINDS]
    yield Line(
        "**slower**: flash attention, 4,096 tokens, causal and full",
        " and ".join(factors),
        "torch's fused kernel: 1 ×",
        "attention",
    )
    seconds = results["optim"]["optimizers"]["times"][THREADS]
    yield Line(
        "**slower**: time of a step, AdamW",
        f"{seconds['memlab AdamW'] / seconds['torch AdamW, fused']:.1f} ×",
        "torch's fused AdamW: 1 ×",
        "optim",
    )


KINDS = ("causal", "full")

if __name__ == "__main__":
    sys.exit(main())
