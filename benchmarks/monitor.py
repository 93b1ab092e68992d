"""What `memlab.monitor()` costs: the time of a training step with and without it.

    python benchmarks/monitor.py [--rounds 100]

One step of the 5M Llama on 4 × 128 tokens, AdamW, on the CPU. The plain and the monitored step take
turns in one run, on the same model. Two figures:

- Ratio: the time of the monitored step over the plain one, by round. Noise of a shared machine is
  several percent, so this only bounds the cost.
- Share: the time inside `monitor.step()` over the time of the monitored step, summed over the run.
  This is the cost itself, and the goal is below 1 %.

"with loggers" also sends three values to a function at each step.

Prints Markdown and writes `benchmarks/results/<machine>.json`.
"""

import sys
import time
from collections.abc import Callable, Sequence
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

import memlab
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS

ROUNDS = 100
WARM_UP = 5
TOKENS = 4, 128  # batch and sequence length
GOAL = 0.01


class Cost(NamedTuple):
    """The cost of one kind of monitor."""

    ratio: Spread
    step_seconds: float  # mean of the monitored step
    monitor_seconds: float  # mean of `monitor.step()`

    @property
    def share(self) -> float:
        return self.monitor_seconds / self.step_seconds


class Clocked:
    """A monitor whose `step` adds up the time that it takes."""

    def __init__(self, monitor: memlab.monitor) -> None:
        self._monitor = monitor
        self.seconds = 0.0
        self.calls = 0

    def step(self) -> None:
        start = time.perf_counter()
        self._monitor.step()
        self.seconds += time.perf_counter() - start
        self.calls += 1


def training_step(preset: str) -> Callable[[], None]:
    """Return one training step of a preset's model."""
    torch.manual_seed(0)
    config = PRESETS[preset]
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    batch, seq_len = TOKENS[0], min(TOKENS[1], config.seq_len)
    tokens, targets = next(batches(source_bytes("64 KiB"), batch, seq_len, seed=0))

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()

    return step


def cost_of(step: Callable[[], None], monitor: memlab.monitor, rounds: int) -> Cost:
    """Let the plain and the monitored step take turns."""
    clocked = Clocked(monitor)

    def monitored() -> None:
        step()
        clocked.step()

    for _ in range(WARM_UP):
        monitored()
    clocked.seconds = clocked.calls = 0
    seconds = side_by_side({"plain": timed(step), "monitored": timed(monitored)}, range(rounds))
    return Cost(
        ratios(seconds["monitored"], seconds["plain"]),
        sum(seconds["monitored"]) / rounds,
        clocked.seconds / clocked.calls,
    )


def monitors() -> dict[str, memlab.monitor]:
    return {
        "alone": memlab.monitor("cpu"),
        "with loggers": memlab.monitor("cpu").log_to(lambda name, value, step: None),
    }


def costs_table(costs: dict[str, Cost]) -> str:
    rows = [
        (
            name,
            f"{1e3 * cost.step_seconds:.1f} ms",
            f"{1e6 * cost.monitor_seconds:.0f} µs",
            f"{cost.share:.3%}",
            str(cost.ratio),
        )
        for name, cost in costs.items()
    ]
    header = ("monitor", "step", "monitor.step()", "share", "ratio to the plain step (quartiles)")
    return table(header, rows)


def main(words: Sequence[str] | None = None, preset: str = "5m") -> int:
    set_environment()
    given = parser_with_results(__doc__, ROUNDS).parse_args(words)
    print(heading("Monitor"), end="\n\n")
    step = training_step(preset)
    costs = {name: cost_of(step, monitor, given.rounds) for name, monitor in monitors().items()}
    print(costs_table(costs))
    below = all(cost.share < GOAL for cost in costs.values())
    print(f"\nThe goal, a share below {GOAL:.0%}, is {'' if below else 'not '}reached.")
    save(given.results, "monitor", "cost", {name: _plain(cost) for name, cost in costs.items()})
    return 0


def _plain(cost: Cost) -> dict[str, Any]:
    return {"share": cost.share, "ratio": cost.ratio._asdict(), "step_seconds": cost.step_seconds}


if __name__ == "__main__":
    sys.exit(main())
