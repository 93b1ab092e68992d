"""ZeRO: memory and communication of one rank, and the time of a step with real processes.

    python benchmarks/zero.py
    python benchmarks/zero.py --sections one_rank --runs llama-3-8b:8 --stages 3 --seq-len 2048
    python benchmarks/zero.py --sections processes --rounds 30

one_rank    models far larger than this machine, on fake tensors
processes   two ranks on this machine, over gloo: memlab's stages against FSDP2, in time

one_rank runs a step of rank 0 on fake tensors: a bfloat16 model with every block checkpointed, one
sequence per rank, and AdamW with float32 master shards (16 bytes per weight). The table compares
the measured peak with the ZeRO paper's formula for weights, gradients and optimizer state, and the
sent bytes with the formula for ring collectives.

processes runs all variants in the same two processes, in turns, and compares neighbouring steps.
FSDP2 shards each block and the root, and reshards after forward, like stage 3. memlab's ranks also
agree on the loss, the number of tokens and whether all gradients are finite; FSDP2 does not. With
one thread per rank and two cores, overlapped communication has no core of its own.

Prints Markdown and writes `benchmarks/results/<machine>.json`.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    heading,
    parser_with_results,
    ratios,
    save,
    set_environment,
    side_by_side,
    spread,
    table,
)
from torch import Tensor, nn

import memlab
from memlab.model import GPT, PRESETS
from memlab.train.plugs import each_block, scheduled
from memlab.units import format_bytes
from memlab.zero import Step, communication_bytes, model_state_bytes, one_rank, processes
from memlab.zero.launch import run_ranks

RUNS = ("llama-3-70b:8", "llama-3-405b:128")
SEQ_LEN = 8192


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return model(*batch), 1


def step_of_one_rank(name: str, ranks: int, stage: int, seq_len: int) -> Step:
    """Take a dry step of rank 0."""
    with memlab.dry_run():
        model = GPT(PRESETS[name], dtype=torch.bfloat16)
        scheduled(each_block)(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        zero = one_rank(model, optimizer, ranks, stage, meter=memlab.meter, master_weights=True)
        tokens = torch.zeros(1, seq_len, dtype=torch.long)
        return zero.step([(tokens, tokens.clone())], loss_of)


def row_of(name: str, ranks: int, stage: int, seq_len: int) -> dict[str, Any]:
    """Return the figures of one row."""
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
        *("model", "ranks", "stage", "peak per rank", "peak in", "gathered at peak"),
        *("activations at peak", "16 bytes per weight", "sent per step", "ring formula", "CPU s"),
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


# ------------------------------------------------------------------ real processes

RANKS, SENTENCES = 2, 2
OURS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, no overlap": {"stage": 3, "overlap": False},
}


def seconds_of_rank(name: str, seq_len: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run in each round on this rank, without the warm-up round."""
    warnings.simplefilter("ignore")  # FSDP2 warns because integer inputs need no gradient
    with processes.joined("gloo", timeout=120):
        tokens = torch.randint(PRESETS[name].vocab_size, (SENTENCES, seq_len + 1))
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        steps = {"FSDP2": fsdp2_step(name, batch)}
        for label, settings in OURS.items():
            steps[label] = our_step(name, batch, settings)
        runs = {label: timed(step) for label, step in steps.items()}
        seconds = side_by_side(runs, range(rounds + 1))
    return {label: taken[1:] for label, taken in seconds.items()}


def our_step(
    name: str, batch: tuple[Tensor, Tensor], settings: dict[str, Any]
) -> Callable[[], Any]:
    model = GPT(PRESETS[name])
    optimizer = torch.optim.AdamW(model.parameters())
    zero = processes.shard(model, optimizer, **settings)
    return lambda: zero.step([batch], loss_of)


def fsdp2_step(name: str, batch: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    from torch.distributed.fsdp import fully_shard

    model = GPT(PRESETS[name])
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss, _ = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that times a step until the slowest rank is done."""

    def run() -> float:
        dist.barrier()
        begun = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - begun

    return run


def processes_rows(name: str, seq_len: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each run, with its time and the ratio to FSDP2."""
    target = f"{Path(__file__).resolve()}:{seconds_of_rank.__name__}"
    [seconds, *_] = run_ranks(target, RANKS, name, seq_len, rounds, timeout=60 + 30 * rounds)
    return [
        {
            "run": label,
            "milliseconds": 1000 * spread(taken).median,
            "ratio": ratios(taken, seconds["FSDP2"]),
        }
        for label, taken in seconds.items()
    ]


def processes_table(rows: Sequence[dict[str, Any]]) -> str:
    return table(
        ("run", "ms per step", "ratio to FSDP2"),
        [(row["run"], f"{row['milliseconds']:.0f}", str(row["ratio"])) for row in rows],
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="MODEL:RANKS")
    parser.add_argument("--stages", nargs="+", type=int, default=(1, 2, 3))
    parser.add_argument(
        "--seq-len", type=int, default=SEQ_LEN, help="tokens per sequence in one_rank"
    )
    parser.add_argument("--model", default="25m", help="model for processes")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per sequence in processes")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of processes")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    print(heading("ZeRO"))
    for section in given.sections:
        print()
        SECTIONS[section](given)
    return 0


def one_rank_section(given: argparse.Namespace) -> None:
    rows = []
    for run in given.runs:
        name, _, ranks = run.partition(":")
        for stage in given.stages:
            rows.append(row_of(name, int(ranks), stage, given.seq_len))
    print(rows_table(rows))
    save(given.results, "zero", "one_rank", {"rows": rows})


def processes_section(given: argparse.Namespace) -> None:
    rows = processes_rows(given.model, given.tokens, given.rounds)
    tokens = SENTENCES * given.tokens
    print(f"{given.model}, {RANKS} ranks, {tokens} tokens each, {given.rounds} rounds\n")
    print(processes_table(rows))
    content = {"model": given.model, "tokens": tokens, "rounds": given.rounds, "rows": rows}
    save(given.results, "zero", "processes", content)


SECTIONS = {"one_rank": one_rank_section, "processes": processes_section}


if __name__ == "__main__":
    sys.exit(main())
