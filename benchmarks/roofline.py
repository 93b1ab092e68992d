"""The time estimates of `memlab plan --script`, compared with measured times.

    python benchmarks/roofline.py            about two minutes
    python benchmarks/roofline.py --quick    small and few, to check that it runs; writes nothing

The estimates use a roofline model of a GPU. Here one CPU core takes the GPU's place, described only
by its measured matmul and copy speed. Four trainings are estimated and timed with several
techniques, as ratios to the plain step. Prints Markdown and writes
`benchmarks/results/<machine>.json`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
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
from torch import nn

import memlab
from memlab.planner import CARDS, Card
from memlab.planner.costs import UTILIZATION
from memlab.planner.outside import ADAM, AS_IT_IS, CHECKPOINTED, LION, Attempt, Parts, find
from memlab.planner.roofline import Roofline

WAYS = ((CHECKPOINTED,), (ADAM,), (CHECKPOINTED, ADAM), (LION,))
ROUNDS = 7


@dataclass(frozen=True)
class TimeRow:
    """Time of a training with techniques, as a ratio to the plain step."""

    training: str
    way: str
    estimated: float
    measured: Spread

    @property
    def miss(self) -> float:
        """Return the relative error of the estimate."""
        return self.estimated / self.measured.median - 1


# ------------------------------------------------------------------ trainings


def stepping(model: nn.Module, x: torch.Tensor) -> Parts:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer


def perceptron(rows: int, width: int = 512, layers: int = 4) -> Parts:
    made = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(layers)
    ]
    return stepping(nn.Sequential(*made), torch.randn(rows, width))


def encoder(batch: int, tokens: int, width: int = 256, layers: int = 4) -> Parts:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return stepping(model, torch.randn(batch, tokens, width))


def convolutions(batch: int, side: int, channels: int = 64, layers: int = 6) -> Parts:
    made = [
        nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
        )
        for _ in range(layers)
    ]
    return stepping(nn.Sequential(*made), torch.randn(batch, channels, side, side))


TRAININGS: dict[str, Callable[[], Parts]] = {
    "a perceptron, 128 rows": lambda: perceptron(128),
    "a perceptron, 2,048 rows": lambda: perceptron(2048),
    "a transformer's encoder, 8 × 128 tokens": lambda: encoder(8, 128),
    "convolutions, 8 images of 32 × 32": lambda: convolutions(8, 32),
}
SMALL: dict[str, Callable[[], Parts]] = {"a perceptron": lambda: perceptron(8, 16, 2)}


# ------------------------------------------------------------------ estimated and measured


def this_core(size: int = 1024, elements: int = 2**25) -> Card:
    """Return one core as a card: matmul FLOP/s and copy bandwidth, best of five."""
    a, x = torch.randn(size, size), torch.randn(elements)
    y = torch.empty_like(x)
    flops = 2 * size**3 / min(core_seconds(lambda: a @ a) for _ in range(5))
    bandwidth = 2 * x.nbytes / min(core_seconds(lambda: y.copy_(x)) for _ in range(5))
    peak = flops / UTILIZATION  # estimates multiply by UTILIZATION again
    return replace(
        CARDS["rtx4090"],
        name="a core",
        flops=peak,
        float32_flops=peak,
        memory_bandwidth=bandwidth,
    )


def estimated(build: Callable[[], Parts], way: Attempt, card: Card) -> float:
    """Return the estimated seconds of the second step."""
    roofline = Roofline(card)
    with memlab.dry_run():
        step, _, _ = way.applied(*build())
        step()
        roofline.counted(step)()
    return roofline.total


def prepared(build: Callable[[], Parts], way: Attempt) -> Callable[[], float]:
    """Take a first step; return a function that takes another and returns its CPU seconds."""
    step, _, _ = way.applied(*build())
    step()
    return lambda: core_seconds(step)


def rows_of(name: str, build: Callable[[], Parts], card: Card, rounds: int) -> Iterator[TimeRow]:
    """Yield a row for each combination of techniques."""
    _, model, optimizer = build()
    places = find(model, optimizer)
    ways = [AS_IT_IS, *(Attempt(techniques, places) for techniques in WAYS)]
    seconds = side_by_side({way.name: prepared(build, way) for way in ways}, range(rounds))
    plain = estimated(build, AS_IT_IS, card)
    for way in ways[1:]:
        measured = ratios(seconds[way.name], seconds[AS_IT_IS.name])
        yield TimeRow(name, way.name, estimated(build, way, card) / plain, measured)


def table(rows: Sequence[TimeRow]) -> str:
    cells = [
        (row.training, row.way, f"{row.estimated:.2f} ×", f"{row.measured} ×", f"{row.miss:+.0%}")
        for row in rows
    ]
    return markdown_table(("training", "with", "estimated", "measured (quartiles)", "error"), cells)


def summary(rows: Sequence[TimeRow], card: Card) -> str:
    worst = max(rows, key=lambda row: abs(row.miss))
    middle = sorted(abs(row.miss) for row in rows)[len(rows) // 2]
    return (
        f"On a core with {card.flops * UTILIZATION / 1e9:.0f} GFLOP/s of matmuls and "
        f"{card.memory_bandwidth / 1e9:.0f} GB/s of copies, the estimated time ratios have a "
        f"median error of {middle:.0%}; the worst is {worst.miss:+.0%} "
        f"({worst.way}, {worst.training})."
    )


def plain(row: TimeRow) -> dict[str, Any]:
    return {**asdict(row), "measured": row.measured._asdict(), "miss": row.miss}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser_with_results(__doc__)
    made.add_argument(
        "--quick", action="store_true", help="small and few trainings; writes nothing"
    )
    return made.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainings = SMALL if given.quick else TRAININGS
    print(heading("Estimated and measured time"), end="\n\n")
    card = this_core(64, 2**16) if given.quick else this_core()
    rows: list[TimeRow] = []
    with progress() as bar:
        for name, build in bar.track(trainings.items(), description="trainings"):
            rows += rows_of(name, build, card, 1 if given.quick else ROUNDS)
    print(f"{summary(rows, card)}\n\n{table(rows)}")
    if not given.quick:
        kept = {"summary": summary(rows, card), "rows": list(map(plain, rows))}
        save(given.results, "roofline", "ways", kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
