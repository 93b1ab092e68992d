"""What one rank of R holds and sends in each stage of ZeRO, of models far larger than this machine.

    python benchmarks/zero.py
    python benchmarks/zero.py --runs llama-3-8b:8 --stages 3 --seq-len 2048

Each line is a step of rank 0 on fake tensors, from a model in bfloat16 with every block
checkpointed, one sequence a rank, and AdamW by float32 copies of shards: 16 bytes a weight. Beside
the measured peak stands the ZeRO paper's formula for weights, gradients and optimizer's state, and
beside what is sent that of the ring. Prints Markdown, writes `benchmarks/results/<machine>.json`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, heading, save, set_environment, table
from torch import Tensor, nn

import memlab
from memlab.model import GPT, PRESETS
from memlab.train import each_block, scheduled
from memlab.units import format_bytes
from memlab.zero import Step, communication_bytes, model_state_bytes, one_rank

RUNS = ("llama-3-70b:8", "llama-3-405b:128")
SEQ_LEN = 8192


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return model(*batch), 1


def step_of_one_rank(name: str, ranks: int, stage: int, seq_len: int) -> Step:
    """Nothing is computed, and no memory taken."""
    with memlab.dry_run():
        model = GPT(PRESETS[name], dtype=torch.bfloat16)
        scheduled(each_block)(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        zero = one_rank(model, optimizer, ranks, stage, meter=memlab.meter, master_weights=True)
        tokens = torch.zeros(1, seq_len, dtype=torch.long)
        return zero.step([(tokens, tokens.clone())], loss_of)


def row_of(name: str, ranks: int, stage: int, seq_len: int) -> dict[str, Any]:
    """The figures of one line, in bytes and seconds of this process."""
    begun = time.process_time()
    step = step_of_one_rank(name, ranks, stage, seq_len)
    [trace], [traffic] = step.traces, step.traffic
    weights = PRESETS[name].parameters
    return {
        "model": name,
        "ranks": ranks,
        "stage": stage,
        "peak_bytes": trace.peak_bytes,
        "peak_phase": trace.peak_phase,
        "gathered": step.gathered_at_peak(),
        "activation_bytes": trace.at_peak.get("activations", 0),
        "formula_bytes": model_state_bytes(weights, ranks=ranks, stage=stage),
        "sent_bytes": traffic.model_bytes(),
        "ring_bytes": communication_bytes(weights, ranks=ranks, stage=stage),
        "cpu_seconds": time.process_time() - begun,
    }


def rows_table(rows: Sequence[dict[str, Any]]) -> str:
    header = (
        *("model", "ranks", "stage", "peak of a rank", "in", "gathered then"),
        *("activations then", "16 bytes a weight", "sent in a step", "by the ring", "CPU s"),
    )
    return table(header, map(cells, rows))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(str(row[name]) for name in ("model", "ranks", "stage")),
        format_bytes(row["peak_bytes"]),
        row["peak_phase"],
        " + ".join(row["gathered"]) or "–",
        *(format_bytes(row[f"{name}_bytes"]) for name in ("activation", "formula", "sent", "ring")),
        f"{row['cpu_seconds']:.0f}",
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="MODEL:RANKS")
    parser.add_argument("--stages", nargs="+", type=int, default=(1, 2, 3))
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN, help="tokens of a rank's sequence")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where numbers are written")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    print(heading("ZeRO"), end="\n\n")
    rows = []
    for run in given.runs:
        name, _, ranks = run.partition(":")
        for stage in given.stages:
            rows.append(row_of(name, int(ranks), stage, given.seq_len))
    print(rows_table(rows))
    save(given.results, "zero", "one_rank", {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
