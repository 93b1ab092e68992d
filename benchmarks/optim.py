"""What optimizers keep, how far they go astray, and how long they take: ours beside production's.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/optim.py

    state      bytes a weight, of one matrix, as unique storages
    drift      after 100 steps with Gaussian gradients: how far from where the float32 optimizer of
               the same rule (Adam's or Lion's, one weight at a time) has come, over the way there
    longest    the longest step of 100, as multiples of lr, where the gradients' scales are
               log-normal: σ = 1, 2, 3 (exact Adam makes none longer than 7.27; Adam-mini has no
               such bound where the gradients of one block are not alike)
    idle       how far weights come in 1000 steps whose gradients are all zero, as multiples of lr,
               beside others that have some
    on the way bytes that a step takes beyond what is there, as torch's allocator recorded them
    time       of a step over 16.8 million weights, over that of torch's AdamW, weight by weight:
               the median of rounds in which all take turns, and its quartiles

Packages that are not installed are left out, and named. torchao's optimizers are compiled where
there is a compiler. Prints Markdown, and writes `benchmarks/results/<machine>.json`.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from common import (
    Spread,
    heading,
    parser_with_results,
    progress,
    ratios,
    save,
    set_environment,
    side_by_side,
)
from common import table as markdown
from torch import Tensor, nn

from memlab.metering.profiler_recording import record
from memlab.optim import Adam8bit, AdamMini, AdamW, Lion, Lion8bit

MIB = 2**20
LR = 1e-3
ROW = 1024  # numbers in a row of the matrix


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    timed: int = 2**24  # weights that are timed
    followed: int = 2**16  # weights whose way is looked at
    steps: int = 100
    spreads: tuple[float, ...] = (1.0, 2.0, 3.0)
    idle_steps: int = 1000
    rounds: int = 9
    threads: tuple[int, ...] = (1, 2)


# ------------------------------------------------------------------ who takes part

Build = Callable[[nn.Parameter], torch.optim.Optimizer]


@dataclass(frozen=True)
class Contender:
    """An optimizer of one matrix, with a learning rate of LR and no decay."""

    build: Build
    rule: str = "Adam"  # whose float32 version it should follow
    package: str = "torch"  # where it comes from

    @property
    def is_there(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def of_ours(optimizer: Callable[..., Any], rule: str = "Adam", **settings: Any) -> Contender:
    def build(weight: nn.Parameter) -> torch.optim.Optimizer:
        return optimizer([("mlp.weight", weight)], lr=LR, weight_decay=0.0, **settings)

    return Contender(build, rule)


def of_package(module: str, name: str, rule: str = "Adam", **settings: Any) -> Contender:
    def build(weight: nn.Parameter) -> torch.optim.Optimizer:
        with silence():
            optimizer = getattr(importlib.import_module(module), name)
        return optimizer([weight], lr=LR, weight_decay=0.0, **settings)

    return Contender(build, rule, module.partition(".")[0])


def adam_mini(weight: nn.Parameter) -> torch.optim.Optimizer:
    """The package's, which knows a matrix by its name and prints what it makes of it."""
    with silence():
        package = importlib.import_module("adam_mini")
        return package.Adam_mini([("mlp.weight", weight)], lr=LR, weight_decay=0.0, verbose=False)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What packages print and log when they begin is not for this page."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


LOOP = "torch AdamW, loop"
CONTENDERS = {
    LOOP: of_package("torch.optim", "AdamW", foreach=False),
    "torch AdamW, fused": of_package("torch.optim", "AdamW", fused=True),
    "memlab AdamW": of_ours(AdamW),
    "bitsandbytes Adam8bit": of_package("bitsandbytes.optim", "Adam8bit"),
    "torchao AdamW8bit": of_package("torchao.optim", "AdamW8bit"),
    "memlab Adam8bit": of_ours(Adam8bit),
    "adam-mini Adam_mini": Contender(adam_mini, package="adam_mini"),
    "memlab AdamMini": of_ours(AdamMini, partition=lambda name, shape: shape[-1]),
    "lion-pytorch Lion": of_package("lion_pytorch", "Lion", "Lion"),
    "memlab Lion": of_ours(Lion, "Lion"),
    "bitsandbytes Lion8bit": of_package("bitsandbytes.optim", "Lion8bit", "Lion"),
    "memlab Lion8bit": of_ours(Lion8bit, "Lion"),
}
EXACT = {"Adam": CONTENDERS[LOOP].build, "Lion": CONTENDERS["memlab Lion"].build}


def has_compiler() -> bool:
    return any(map(shutil.which, ("c++", "g++", "clang++", "cl")))


# ------------------------------------------------------------------ values


@dataclass(frozen=True)
class Way:
    """Where a weight has come from zero, and the longest of its steps, as multiples of lr."""

    end: Tensor
    longest: float


def way_of(
    build: Build, numbers: int, steps: int, *, spread: float = 0.0, idle: Tensor | None = None
) -> Way:
    """On Gaussian gradients whose scales are log-normal; `idle` weights get zeros."""
    weight = nn.Parameter(torch.zeros(numbers // ROW, ROW))
    optimizer, generator, longest = build(weight), torch.Generator().manual_seed(0), 0.0
    scales = torch.exp(spread * torch.randn(weight.shape, generator=generator))
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator) * scales
        if idle is not None:
            weight.grad.masked_fill_(idle, 0)
        before = weight.detach().clone()
        optimizer.step()
        longest = max(longest, (weight.detach() - before).abs().max().item() / LR)
    return Way(weight.detach(), longest)


exact_way = cache(way_of)


def drift(contender: Contender, plan: Plan) -> float:
    """Of the way of the float32 optimizer."""
    wanted = exact_way(EXACT[contender.rule], plan.followed, plan.steps).end
    apart = way_of(contender.build, plan.followed, plan.steps).end - wanted
    return (apart.norm() / wanted.norm()).item()


def longest_steps(contender: Contender, plan: Plan) -> dict[float, float]:
    """By σ."""
    return {
        spread: way_of(contender.build, plan.followed, plan.steps, spread=spread).longest
        for spread in plan.spreads
    }


def idle_way(contender: Contender, plan: Plan) -> float:
    """The farthest that one of the idle weights comes; they are every third."""
    idle = (torch.arange(plan.followed) % 3 == 0).view(-1, ROW)
    way = way_of(contender.build, plan.followed, plan.idle_steps, spread=1.0, idle=idle)
    return way.end[idle].abs().max().item() / LR


# ------------------------------------------------------------------ bytes and time


def ready(contender: Contender, weight: nn.Parameter) -> torch.optim.Optimizer:
    """After its first step, which makes its state, and what is compiled."""
    optimizer = contender.build(weight)
    optimizer.step()
    return optimizer


def timed_weight(plan: Plan) -> nn.Parameter:
    """One for all: what it holds takes no time."""
    weight = nn.Parameter(torch.randn(plan.timed // ROW, ROW))
    weight.grad = torch.randn_like(weight)
    return weight


def state_bytes(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> int:
    """Of unique storages; a tensor subclass is what it is made of."""
    found: dict[int, int] = {}
    for tensor in map(plain_tensors, optimizer.state[weight].values()):
        for plain in tensor:
            storage = plain.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def plain_tensors(value: Any) -> list[Tensor]:
    if not torch.is_tensor(value):
        return []
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(value, name))]


def bytes_of(contender: Contender, plan: Plan) -> dict[str, float]:
    """State a weight, and what a step takes on the way."""
    weight = timed_weight(plan)
    optimizer = ready(contender, weight)
    return {
        "state": state_bytes(optimizer, weight) / plan.timed,
        "on the way": record(optimizer.step, warm_up=optimizer.step).peak_bytes,
    }


def seconds_of(optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def seconds(names: Sequence[str], plan: Plan, threads: int) -> dict[str, list[float]]:
    """Of each, round by round."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weight = timed_weight(plan)
    optimizers = {name: ready(CONTENDERS[name], weight) for name in names}
    runs = {name: partial(seconds_of, optimizer) for name, optimizer in optimizers.items()}
    try:
        return side_by_side(runs, range(plan.rounds))
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------ the page


def row(contender: Contender, plan: Plan) -> dict[str, Any]:
    """All but its times."""
    return {
        **bytes_of(contender, plan),
        "drift": drift(contender, plan),
        "longest": longest_steps(contender, plan),
        "idle": idle_way(contender, plan),
    }


def page(rows: dict[str, dict[str, Any]], times: dict[int, dict[str, Spread]]) -> str:
    """A line for each optimizer."""
    spreads = list(next(iter(rows.values()))["longest"])
    header = (
        *("optimizer", "state, bytes a weight", "drift"),
        *(f"longest step, σ = {spread:g}" for spread in spreads),
        *("idle weights move", "on the way, MiB"),
        *(f"time, {threads} thread{'s' * (threads > 1)}" for threads in times),
    )
    lines = [
        (
            name,
            f"{found['state']:.3f}",
            short(found["drift"]),
            *(f"{short(step)} lr" for step in found["longest"].values()),
            f"{short(found['idle'])} lr",
            f"{found['on the way'] / MIB:.1f}",
            *(str(ratio[name]) for ratio in times.values()),
        )
        for name, found in rows.items()
    ]
    return markdown(header, lines)


def short(number: float) -> str:
    """Three digits; what is exactly zero looks so."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return (
        f"{number:.2g}" if number < 0.1 else f"{number:,.3g}" if number < 1000 else f"{number:.1e}"
    )


def sentences(taken: dict[int, dict[str, list[float]]]) -> Iterator[str]:
    """Ours against those of 8 bits that are there, and what was left out."""
    for threads, found in taken.items():
        for ours, theirs in (
            ("memlab Adam8bit", "bitsandbytes Adam8bit"),
            ("memlab Adam8bit", "torchao AdamW8bit"),
            ("memlab Lion8bit", "bitsandbytes Lion8bit"),
        ):
            if theirs in found:
                ratio = ratios(found[ours], found[theirs])
                yield f"{ours} takes {ratio} × the time of {theirs}, threads: {threads}."
    absent = sorted({c.package for c in CONTENDERS.values() if not c.is_there})
    if absent:
        yield f"Not installed, and left out: {', '.join(absent)}."
    if CONTENDERS["torchao AdamW8bit"].is_there and not has_compiler():
        yield "There is no C++ compiler here: torchao's was run uncompiled."


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_with_results(__doc__)
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="of steps that are timed")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, plan: Plan | None = None) -> int:
    set_environment()
    given = arguments(words)
    plan = plan or Plan(rounds=given.rounds)
    torch.compiler.set_stance("default" if has_compiler() else "force_eager")
    there = {name: each for name, each in CONTENDERS.items() if each.is_there}
    print(heading("Optimizers"), end="\n\n")
    rows, taken = {}, {}
    with progress() as bar:
        task = bar.add_task("optimizers", total=len(there) + len(plan.threads))
        for name, contender in there.items():
            rows[name] = row(contender, plan)
            bar.advance(task)
        for threads in plan.threads:
            taken[threads] = seconds(list(there), plan, threads)
            bar.advance(task)
    times = {
        threads: {name: ratios(of, found[LOOP]) for name, of in found.items()}
        for threads, found in taken.items()
    }
    print(page(rows, times), end="\n\n")
    for sentence in sentences(taken):
        print(sentence)
    medians = {
        threads: {name: ratio.median for name, ratio in found.items()}
        for threads, found in times.items()
    }
    save(given.results, "optim", "optimizers", {"rows": rows, "times": medians})
    return 0


if __name__ == "__main__":
    sys.exit(main())
