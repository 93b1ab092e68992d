"""ZeRO: what one rank of R holds and sends, and what a step of real processes takes.

    python benchmarks/zero.py
    python benchmarks/zero.py --sections one_rank --runs llama-3-8b:8 --stages 3 --seq-len 2048
    python benchmarks/zero.py --sections processes --rounds 30

one_rank    of models far larger than this machine, on fake tensors
processes   two ranks on this machine, over gloo: our stages beside FSDP2, in time

In the first, each line is a step of rank 0 on fake tensors, of a model in bfloat16 with each block
checkpointed, one sequence a rank, and AdamW by float32 copies of shards: 16 bytes a weight. Beside
the measured peak stands the ZeRO paper's formula for weights, gradients and optimizer's state, and
beside what is sent that of the ring.

In the second, all runs live in the same two processes and take turns, step by step; a ratio is of
two neighbours. FSDP2 shards each block and the rest, and keeps nothing gathered (as stage 3).
Ours agree on the loss, the number of tokens and whether all is finite besides; FSDP2 does not. With
one thread a rank and two cores, what overlaps has no core of its own.

Prints Markdown, writes `benchmarks/results/<machine>.json`.
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


# ------------------------------------------------------------------ real processes

RANKS, SENTENCES = 2, 2
OURS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, no overlap": {"stage": 3, "overlap": False},
}


def seconds_of_rank(name: str, seq_len: int, rounds: int) -> dict[str, list[float]]:
    """What each run took in each round, on this rank; the first round warms up, and is left out."""
    warnings.simplefilter("ignore")  # FSDP2's own: it hooks a module whose inputs are tokens
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
    """The seconds until the slowest rank is done."""

    def run() -> float:
        dist.barrier()
        begun = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - begun

    return run


def processes_rows(name: str, seq_len: int, rounds: int) -> list[dict[str, Any]]:
    """One line for each run: its time, and how many times that of FSDP2 it is."""
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
        ("run", "ms a step", "times FSDP2's"),
        [(row["run"], f"{row['milliseconds']:.0f}", str(row["ratio"])) for row in rows],
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="MODEL:RANKS")
    parser.add_argument("--stages", nargs="+", type=int, default=(1, 2, 3))
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN, help="tokens of a rank's sequence")
    parser.add_argument("--model", default="25m", help="of the processes")
    parser.add_argument("--tokens", type=int, default=64, help="of a processes' sequence")
    parser.add_argument("--rounds", type=int, default=20, help="of the processes")
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
