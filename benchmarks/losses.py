"""Chunked cross-entropy: memory, time and error against torch's losses.

    python benchmarks/losses.py [--rounds 7] [--float32-only] [--results FOLDER]

Runs forward and backward of the loss alone, from hidden (N, C), a weight (V, C) and targets: with
all logits at once, with several options of torch's `F.linear_cross_entropy`, and with several chunk
sizes of memlab's loss.

- Peak: measured beyond the inputs.
- Time: on one core, as a ratio to all logits, measured side by side.
- Error: relative L2 error of both gradients, against float64.

Prints Markdown and writes each section to `benchmarks/results/<machine>.json`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    Spread,
    core_seconds,
    heading,
    parser_with_results,
    progress,
    ratios,
    save,
    set_environment,
    side_by_side,
)
from common import table as markdown_table
from rich.progress import Progress
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions

import memlab
from memlab.losses import chunk_rows, chunked_cross_entropy, cross_entropy_reference
from memlab.units import format_bytes

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

ALL_LOGITS = "all logits"
DEFAULT = "memlab"
MAX_BYTES, MAX_TIME_RATIO = 100 * 2**20, 1.0  # goals at 2,048 × 512 × 32,000 in float32


@dataclass(frozen=True)
class LossSizes:
    """Sizes of the benchmark."""

    rows: int = 2048
    width: int = 512
    vocab_size: int = 32_000
    chunks: tuple[int, ...] = (32, 64, 128, 512)
    rounds: int = 7


@dataclass(frozen=True)
class LossRow:
    """Memory, time and gradient errors of one implementation."""

    peak_bytes: int
    seconds: list[float]
    error_of_hidden: float
    error_of_weight: float


def by_all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def ways_of(plan: LossSizes) -> dict[str, Loss]:
    """Return the implementations, the one with all logits first."""
    options = {
        "F.linear_cross_entropy": {},
        "…, aspect_ratio:8": {"chunking_method": "aspect_ratio:8"},
        "…, accurate": {"acc_policy": "accurate"},
        "…, balanced": {"acc_policy": "balanced"},
        "…, allow_retain_graph": {"allow_retain_graph": True},
    }
    ways: dict[str, Loss] = {ALL_LOGITS: by_all_logits}
    for name, setting in options.items():
        ways[name] = partial(F.linear_cross_entropy, options=LinearCrossEntropyOptions(**setting))
    ways[DEFAULT] = chunked_cross_entropy
    for chunk in plan.chunks:
        ways[f"memlab, chunk={chunk}"] = partial(chunked_cross_entropy, chunk=chunk)
    return ways


def problem(plan: LossSizes, dtype: torch.dtype) -> list[Tensor]:
    """Return hidden and weight, which require gradients, and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(plan.rows, plan.width)
    weight = torch.randn(plan.vocab_size, plan.width) / plan.width**0.5
    targets = torch.randint(plan.vocab_size, (plan.rows,))
    return [*(x.to(dtype).requires_grad_() for x in (hidden, weight)), targets]


def gradients(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))


def peak_bytes(loss: Loss, given: Sequence[Tensor]) -> int:
    """Return the peak memory beyond the inputs."""
    trace = memlab.measure(lambda: gradients(loss, *given))
    return trace.peak_bytes - sum(x.nbytes for x in given)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def compared(plan: LossSizes, dtype: torch.dtype, bar: Progress) -> dict[str, LossRow]:
    """Measure memory and errors of every implementation, which warms up, then the times."""
    given = problem(plan, dtype)
    precise = [x.detach().double().requires_grad_() for x in given[:2]]
    exact = gradients(cross_entropy_reference, *precise, given[2])
    ways = ways_of(plan)
    peaks = {name: peak_bytes(loss, given) for name, loss in ways.items()}
    errors = {
        name: [relative_error(*pair) for pair in zip(gradients(loss, *given), exact, strict=True)]
        for name, loss in ways.items()
    }
    runs = {n: partial(core_seconds, partial(gradients, loss, *given)) for n, loss in ways.items()}
    rounds = bar.track(range(plan.rounds), description=str(dtype).removeprefix("torch."))
    seconds = side_by_side(runs, rounds)
    return {name: LossRow(peaks[name], seconds[name], *errors[name]) for name in ways}


def ratio(found: dict[str, LossRow], name: str) -> Spread:
    return ratios(found[name].seconds, found[ALL_LOGITS].seconds)


def results_table(found: dict[str, LossRow], chunk: int) -> str:
    rows = [
        (
            f"{name}, default: chunk={chunk}" if name == DEFAULT else name,
            format_bytes(row.peak_bytes),
            f"{ratio(found, name)} ×",
            f"{row.error_of_hidden:.1e}",
            f"{row.error_of_weight:.1e}",
        )
        for name, row in found.items()
    ]
    header = ("loss, forward and backward", "peak beyond inputs", "time / all logits")
    return markdown_table((*header, "error, hidden", "error, weight"), rows)


def sentence(found: dict[str, LossRow]) -> str:
    """Say whether float32 at full size meets the goals."""
    ours, time_ratio = found[DEFAULT], ratio(found, DEFAULT).median
    is_met = ours.peak_bytes <= MAX_BYTES and time_ratio <= MAX_TIME_RATIO
    return (
        f"{format_bytes(ours.peak_bytes)} instead of {format_bytes(found[ALL_LOGITS].peak_bytes)}"
        f", in {time_ratio:.2f} × the time (goal: at most {format_bytes(MAX_BYTES)} and "
        f"{MAX_TIME_RATIO:.2f} ×): {'met' if is_met else 'missed'}."
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__, LossSizes.rounds)
    parser.add_argument("--float32-only", action="store_true", help="leave out bfloat16")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, plan: LossSizes | None = None) -> int:
    set_environment()
    given = arguments(words)
    plan = LossSizes(**{**asdict(plan or LossSizes()), "rounds": given.rounds})
    torch.set_num_threads(1)  # CPU time equals wall-clock time
    print(heading("Chunked cross-entropy"))
    chunk = chunk_rows(plan.rows, plan.vocab_size, plan.width)
    dtypes = [torch.float32] if given.float32_only else [torch.float32, torch.bfloat16]
    with progress() as bar:
        for dtype in dtypes:
            found = compared(plan, dtype, bar)
            name = str(dtype).removeprefix("torch.")
            shape = f"{plan.rows:,} rows of {plan.width:,}, {plan.vocab_size:,} tokens"
            content: dict[str, Any] = {"plan": asdict(plan), "default chunk": chunk}
            content["ways"] = {
                way: {**asdict(row), "ratio": ratio(found, way)._asdict()}
                for way, row in found.items()
            }
            print(f"\n## {name}: {shape}\n")
            if dtype == torch.float32:
                content["summary"] = sentence(found)
                print(content["summary"], end="\n\n")
            print(results_table(found, chunk))
            save(given.results, "losses", name, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
