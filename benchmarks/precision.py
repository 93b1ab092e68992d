"""16-bit training: memory of each policy, gradients outside float16's range, and two time ratios.

    python benchmarks/precision.py

- Memory: measured on real steps of the tiny model.
- Gradients: of the tiny model after 100 steps on torch's source code.
- Time: memlab's LossScaler against torch's GradScaler, and its stochastic rounding against torch's
  round to nearest and torchao's stochastic rounding (if installed). Measured side by side.

Prints Markdown and writes `benchmarks/results/<machine>.json`.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    compared,
    heading,
    parser_with_results,
    save,
    set_environment,
    table,
    timed,
)
from torch import Tensor, nn

import memlab
from memlab.course.checks.day04 import POLICIES
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.optim import RoundedAdamW
from memlab.precision import LossScaler, MasterWeights
from memlab.rounding import stochastic_round_
from memlab.trace import Trace

ROUNDS = 15
STEPS = 100  # of training before the gradients are measured
TOKENS = (8, 64), (80, 64)  # batch and sequence length; the loss is a mean over both
SCALES = (1.0, 2.0**10, 2.0**16)
SMALLEST_NORMAL = 2.0**-14  # of float16
TENSORS = (16, 2**18)  # gradients to unscale: count and size
ELEMENTS = 2**22  # to round
CONFIG = PRESETS["tiny"]

adamw = partial(torch.optim.AdamW, foreach=False)


# ------------------------------------------------------------------ bytes

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("float32", "autocast", "bfloat16"), adamw),
    "master": partial(MasterWeights, optimizer=adamw),
    "master32": partial(MasterWeights, optimizer=adamw, gather_at_once=True),
    "rounded": RoundedAdamW,
}
KINDS = ("parameters", "gradients", "optimizer_state")


def second_step(policy: str) -> Trace:
    """Measure the second step of the tiny model on 8 × 64 tokens."""
    torch.manual_seed(0)
    low = torch.float32 if policy in ("float32", "autocast") else torch.bfloat16
    model = GPT(CONFIG, dtype=low)
    optimizer = OPTIMIZERS[policy](model.parameters())
    tokens, targets = next(batches(source_bytes("64 KiB"), *TOKENS[0], seed=0))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=policy == "autocast"):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()

    step()
    inner = getattr(optimizer, "optimizer", optimizer)
    return memlab.measure(step, model=model, optimizer=inner)


def bytes_of(policy: str) -> dict[str, int]:
    """Return weights, gradients and state at the end of backward, activations and the peak."""
    trace = second_step(policy)
    last = max(n for n, event in enumerate(trace.events) if event.phase == "backward")
    held = Trace(trace.events[: last + 1]).at_end
    found = {kind: held[kind] for kind in KINDS}
    return found | {"activations": trace.at_peak["activations"], "peak": trace.peak_bytes}


def bytes_table(found: dict[str, dict[str, int]]) -> str:
    """Return bytes per weight, and activations and peak as shares of float32's."""
    whole = found["float32"]
    lines = []
    for policy, held in found.items():
        per_weight = [held[kind] / CONFIG.parameters for kind in KINDS]
        shares = [held[kind] / whole[kind] for kind in ("activations", "peak")]
        numbers = [f"{number:.2f}" for number in (*per_weight, sum(per_weight), *shares)]
        lines.append((policy, *numbers))
    header = ("policy", "weights", "gradients", "state", "bytes per weight", "activations", "peak")
    return table(header, lines)


# ------------------------------------------------------------------ float16's range


def trained(steps: int) -> GPT:
    """Train the tiny model in float32."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = adamw(model.parameters(), lr=3e-3)
    drawn = batches(source_bytes("256 KiB"), *TOKENS[0], seed=0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*next(drawn)).backward()
        optimizer.step()
    model.zero_grad()
    return model


def gradients_of(model: GPT, batch: int, seq_len: int) -> dict[str, Tensor]:
    """Return the float32 gradients of the logits and of all weights."""
    tokens, targets = next(batches(source_bytes("256 KiB"), batch, seq_len, seed=1))
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    first, *others = torch.autograd.grad(loss, [logits, *model.parameters()])
    return {"logits": first.flatten(), "weights": torch.cat([g.flatten() for g in others])}


def lost(gradient: Tensor, scale: float) -> dict[str, float]:
    """Return the shares of elements that become zero, subnormal and infinite in float16."""
    scaled = gradient * scale
    low = scaled.half()
    kinds = {
        "zero": (low == 0) & (gradient != 0),
        "subnormal": (low != 0) & (scaled.abs() < SMALLEST_NORMAL),
        "infinite": low.isinf(),
    }
    return {kind: found.double().mean().item() for kind, found in kinds.items()}


def range_rows(steps: int) -> dict[str, dict[str, float]]:
    """Return the lost shares by tokens, gradient and scale."""
    model, rows = trained(steps), {}
    for batch, seq_len in TOKENS:
        for name, gradient in gradients_of(model, batch, seq_len).items():
            for scale in SCALES:
                key = f"{name}, {batch * seq_len:,} tokens, × {scale:,.0f}"
                rows[key] = lost(gradient, scale)
    return rows


def range_table(rows: dict[str, dict[str, float]]) -> str:
    """Return the shares as a Markdown table."""
    lines = [(name, *(f"{share:.2%}" for share in row.values())) for name, row in rows.items()]
    return table(("gradients of", "zero", "subnormal", "infinite"), lines)


# ------------------------------------------------------------------ time


def scaler_runs(tensors: int, numbers: int) -> dict[str, Callable[[], float]]:
    """Return runs of each scaler's work: unscale, a step without updates, update."""
    weights = [nn.Parameter(torch.zeros(numbers)) for _ in range(tensors)]
    optimizer = torch.optim.SGD(weights, lr=0.0)
    optimizer.step = lambda *args: None  # type: ignore[method-assign]
    scalers = {"LossScaler": LossScaler(1.0), "GradScaler": torch.amp.GradScaler("cpu", 1.0)}
    for weight in weights:
        weight.grad = torch.ones(numbers)

    def run(scaler: Any) -> None:
        scaler.step(optimizer)
        scaler.update()

    scalers["GradScaler"].scale(torch.ones(()))  # creates its state
    return {name: timed(partial(run, scaler)) for name, scaler in scalers.items()}


def rounding_runs(numbers: int) -> dict[str, Callable[[], float]]:
    """Return rounding runs: stochastic, to nearest, and torchao's if installed."""
    precise = torch.randn(numbers)
    out = torch.empty(numbers, dtype=torch.bfloat16)
    runs = {
        "stochastic_round_": timed(lambda: stochastic_round_(out, precise)),
        "to nearest": timed(lambda: out.copy_(precise)),
    }
    if theirs := torchaos():
        runs["torchao's"] = timed(lambda: theirs(precise))
    return runs


def torchaos() -> Callable[[Tensor], Tensor] | None:
    """Return torchao's stochastic rounding, uncompiled, or None if not installed."""
    if importlib.util.find_spec("torchao") is None:
        return None
    return importlib.import_module("torchao.optim.quant_utils")._fp32_to_bf16_sr


# ------------------------------------------------------------------ the command


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__, ROUNDS)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="training steps before the gradients are measured"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    print(heading("Precision"), end="\n\n")
    assert set(POLICIES) < set(OPTIMIZERS)
    held = {policy: bytes_of(policy) for policy in OPTIMIZERS}
    print(bytes_table(held), end="\n\n")
    rows = range_rows(given.steps)
    print(range_table(rows), end="\n\n")
    times = {
        "LossScaler": compared(scaler_runs(*TENSORS), given.rounds),
        "stochastic_round_": compared(rounding_runs(ELEMENTS), given.rounds),
    }
    lines = [(name, of, str(ratio)) for name, row in times.items() for of, ratio in row.items()]
    print(table(("time of", "against", "ratio (quartiles)"), lines))
    if torchaos() is None:
        print("\ntorchao is not installed; its rounding was not compared.")
    save(given.results, "precision", "bytes", held)
    save(given.results, "precision", "float16", rows)
    medians = {name: {of: r.median for of, r in row.items()} for name, row in times.items()}
    save(given.results, "precision", "times", medians)
    return 0


if __name__ == "__main__":
    sys.exit(main())
