"""Activations in 8, 4 and 2 bits: memory, gradient error, time and training loss.

    python benchmarks/activation_compression.py

- Memory: activations between forward and backward of one block, memlab's and torch's.
- MeasuredGradients: relative error against the gradients of exact activations.
- Time: encode and decode against bitsandbytes (if installed, block size 256), and a compressed step
  against a plain one. Ratios are measured side by side.
- Loss: training on torch's source code.

Prints Markdown and writes `benchmarks/results/<machine>.json`.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from common import (
    Spread,
    heading,
    parser_with_results,
    ratios,
    save,
    set_environment,
    side_by_side,
    table,
    timed,
)
from torch import Tensor, nn

import memlab
from memlab.compression import compressed_activations
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS, GPTConfig
from memlab.quantize import dequantize_blockwise, quantize_blockwise
from memlab.units import format_bytes

BITS = (8, 4, 2)
MODES = ("nearest", "stochastic")
PERTURBED = "exact, initial weights perturbed by 1e-6"


@dataclass(frozen=True)
class CompressionSizes:
    """Sizes of the benchmark."""

    batch: int = 8
    seq_len: int = 128
    width: int = 128
    draws: int = 16  # averaged gradients with stochastic rounding
    elements: int = 2**24  # of the tensor for timing encode and decode
    rounds: int = 15
    preset: str = "tiny"
    steps: int = 300  # training steps
    seeds: int = 3

    @property
    def config(self) -> GPTConfig:
        C = self.width
        return GPTConfig(
            256, C, layers=1, heads=4, kv_heads=2, intermediate_size=3 * C, seq_len=self.seq_len
        )


# ------------------------------------------------------------------ bytes and gradients


def our_block(plan: CompressionSizes) -> nn.Module:
    return GPT(plan.config).blocks[0]


def torchs_block(plan: CompressionSizes) -> nn.Module:
    """Return torch's encoder layer, which has ReLU and dropout."""
    C = plan.width
    return nn.TransformerEncoderLayer(C, 4, dim_feedforward=3 * C, batch_first=True).train()


BLOCKS: dict[str, Callable[[CompressionSizes], nn.Module]] = {
    "memlab's Block": our_block,
    "nn.TransformerEncoderLayer": torchs_block,
}


class MeasuredGradients(NamedTuple):
    """All gradients, concatenated, and the activations between forward and backward."""

    flat: Tensor
    activation_bytes: int


def gradients(
    make: Callable[[CompressionSizes], nn.Module], plan: CompressionSizes, around: Any
) -> MeasuredGradients:
    """Return the gradients of a block, with the same data and dropout masks in every call."""
    torch.manual_seed(0)
    block = make(plan)
    x, dout = torch.randn(2, plan.batch, plan.seq_len, plan.width).unbind()
    x.requires_grad_()
    held: list[Tensor] = []

    def forward() -> None:
        with around:
            held.append(block(x))

    trace = memlab.measure(forward, model=block)
    found = torch.autograd.grad(held[0], [x, *block.parameters()], dout)
    flat = torch.cat([gradient.flatten().double() for gradient in found])
    return MeasuredGradients(flat, trace.at_end["activations"])


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def gradient_rows(plan: CompressionSizes) -> list[dict[str, Any]]:
    """Return one row for each block, bit width and rounding mode."""
    rows = []
    for name, make in BLOCKS.items():
        exact = gradients(make, plan, nullcontext())
        for bits in BITS:
            for mode in MODES:
                draws = [
                    gradients(make, plan, compressed_activations(bits, mode=mode))
                    for _ in range(plan.draws if mode == "stochastic" else 1)
                ]
                mean = torch.stack([draw.flat for draw in draws]).mean(0)
                first = draws[0].flat
                row = {
                    "block": name,
                    "bits": bits,
                    "mode": mode,
                    "bytes": draws[0].activation_bytes,
                    "share": draws[0].activation_bytes / exact.activation_bytes,
                    "error": relative_error(first, exact.flat),
                    "cosine": torch.cosine_similarity(first, exact.flat, dim=0).item(),
                    "error of the mean": relative_error(mean, exact.flat),
                }
                rows.append(row)
    return rows


def gradient_table(rows: list[dict[str, Any]], draws: int) -> str:
    lines = [
        (
            *(row["block"], str(row["bits"]), row["mode"]),
            *(format_bytes(row["bytes"]), f"{row['share']:.3f}"),
            *(f"{row['error']:.4f}", f"{row['cosine']:.6f}"),
            f"{row['error of the mean']:.4f}" if row["mode"] == "stochastic" else "",
        )
        for row in rows
    ]
    header = ("block", "bits", "rounding", "activations", "of exact", "error", "cosine")
    return table((*header, f"mean of {draws}"), lines)


# ------------------------------------------------------------------ time


def round_trip(x: Tensor, **settings: Any) -> Tensor:
    return dequantize_blockwise(quantize_blockwise(x, **settings))


def coding_runs(plan: CompressionSizes) -> dict[str, Callable[[], float]]:
    """Return encode-and-decode runs: memlab by bits, then bitsandbytes if installed."""
    x = torch.randn(plan.elements)
    runs = {f"{bits} bits": timed(partial(round_trip, x, bits=bits)) for bits in BITS}
    if theirs := bitsandbytes():
        runs["bitsandbytes"] = timed(
            lambda: theirs.dequantize_blockwise(*theirs.quantize_blockwise(x, blocksize=256))
        )
    return runs


def bitsandbytes() -> Any:
    """Return bitsandbytes' functional module, or None if not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    return importlib.import_module("bitsandbytes.functional")


def step_runs(plan: CompressionSizes) -> dict[str, Callable[[], float]]:
    """Return forward-and-backward runs of a block by bits, the plain run last."""
    torch.manual_seed(0)
    block = our_block(plan)
    x = torch.randn(plan.batch, plan.seq_len, plan.width)

    def step(bits: int | None) -> None:
        with compressed_activations(bits) if bits else nullcontext():
            loss = block(x).sum()
        loss.backward()

    runs = {f"{bits} bits": timed(partial(step, bits)) for bits in BITS}
    return runs | {"plain": timed(partial(step, None))}


def against_the_last(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, Spread]:
    """Return the time ratio of each run to the last one."""
    for run in runs.values():
        run()
    seconds = side_by_side(runs, range(rounds))
    *others, last = runs
    return {name: ratios(seconds[name], seconds[last]) for name in others}


# ------------------------------------------------------------------ training


def final_loss(
    plan: CompressionSizes, around: Callable[[], Any], seed: int, jitter: float = 0.0
) -> float:
    """Train with warm-up, cosine decay and clipping; return the mean loss of the last 10 %.

    Weights and batches depend only on `seed`. `jitter` is a relative perturbation of the initial
    weights.
    """
    torch.manual_seed(seed)
    config = PRESETS[plan.preset]
    model = GPT(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + jitter * torch.randn_like(weight))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warm_up = max(1, plan.steps // 15)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min(1.0, (n + 1) / warm_up) * (1 + math.cos(math.pi * n / plan.steps)) / 2,
    )
    drawn = batches(source_bytes("1 MiB"), plan.batch, min(plan.seq_len, config.seq_len), seed)
    losses = []
    for _ in range(plan.steps):
        optimizer.zero_grad()
        with around():
            loss = model(*next(drawn))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, plan.steps // 10) :]
    return sum(last) / len(last)


def training_losses(plan: CompressionSizes) -> dict[str, list[float]]:
    """Return the final loss for each bit width and seed."""
    ways: dict[str, Callable[[], Any]] = {"exact": nullcontext}
    ways |= {f"{bits} bits": partial(compressed_activations, bits) for bits in BITS}
    seeds = range(plan.seeds)
    found = {name: [final_loss(plan, way, seed) for seed in seeds] for name, way in ways.items()}
    # The noise floor: an exact run from weights perturbed by a millionth.
    found[PERTURBED] = [final_loss(plan, nullcontext, seed, jitter=1e-6) for seed in seeds]
    return found


def training_table(losses: dict[str, list[float]]) -> str:
    exact = losses["exact"]
    lines = []
    for name, found in losses.items():
        excess = [loss / right - 1 for loss, right in zip(found, exact, strict=True)]
        lines.append((name, f"{sum(found) / len(found):.4f}", *(f"{e:+.2%}" for e in excess)))
    return table(("activations", "loss", *(f"seed {n}" for n in range(len(exact)))), lines)


# ------------------------------------------------------------------ the command


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__, CompressionSizes.rounds)
    parser.add_argument(
        "--steps", type=int, default=CompressionSizes.steps, help="steps of each training"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, plan: CompressionSizes | None = None) -> int:
    set_environment()
    given = arguments(words)
    plan = replace(plan or CompressionSizes(), rounds=given.rounds, steps=given.steps)
    print(heading("Activation compression"), end="\n\n")
    rows = gradient_rows(plan)
    print(gradient_table(rows, plan.draws), end="\n\n")
    times = {"a step, to a plain one": against_the_last(step_runs(plan), plan.rounds)}
    if bitsandbytes() is None:
        print("bitsandbytes is not installed; its encode and decode were not compared.", end="\n\n")
    else:
        coding = against_the_last(coding_runs(plan), plan.rounds)
        times["encode and decode, to bitsandbytes at 8 bits"] = coding
    lines = [(of, name, str(ratio)) for of, row in times.items() for name, ratio in row.items()]
    print(table(("time of", "at", "ratio (quartiles)"), lines), end="\n\n")
    losses = training_losses(plan)
    print(training_table(losses))
    save(given.results, "compression", "gradients", {"plan": asdict(plan), "rows": rows})
    medians = {of: {name: r.median for name, r in row.items()} for of, row in times.items()}
    save(given.results, "compression", "times", medians)
    save(given.results, "compression", "losses", losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
