"""Optimizers: state, accuracy, memory and time of memlab's against production packages'.

    python benchmarks/optim.py

    state      optimizer state of one matrix, in bytes per weight (unique storages)
    drift      distance to the weights of the float32 optimizer (Adam or Lion) after 100
               steps with Gaussian gradients, divided by the length of its path
    longest    largest update in 100 steps, in units of lr, with log-normal gradient scales of
               σ = 1, 2, 3. Exact Adam's is at most 7.27. Adam-mini has no such bound if the
               gradients within a block differ
    idle       largest movement, in units of lr, of weights with zero gradients in 1,000 steps,
               next to weights with gradients
    on the way temporary memory of a step, as recorded by torch's allocator
    time       of a step of 16.8 million weights, as a ratio to torch's AdamW without foreach:
               median and quartiles of rounds where all take turns. Run it on an idle machine
               and without OMP_WAIT_POLICY=PASSIVE: memlab's steps go through small pieces, and
               a second thread that sleeps between pieces doubles their time

Optimizers of matrices (Muon, GaLore, APOLLO, Shampoo, SOAP) follow no float32 optimizer, so they
have a table of state, temporary memory and time alone, of one square matrix. GaLore's SVD, once in
200 steps, and SOAP's QR, once in 10, have rows of their own: `with SVD` and `with QR`.

Missing packages are left out and listed. torchao's optimizers are compiled if a C++
compiler is installed. Prints Markdown and writes `benchmarks/results/<machine>.json`.
"""

import contextlib
import importlib.util
import io
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    timed,
)
from common import table as markdown
from rich.progress import Progress
from torch import Tensor, nn

from memlab.metering.profiler_recording import record
from memlab.optim import Adam8bit, AdamMini, AdamW, Apollo, GaLore, Lion, Lion8bit, Muon
from memlab.reference.apollo import apollo_
from memlab.reference.galore import galore_
from memlab.reference.soap import shampoo_, soap_

MIB = 2**20
LR = 1e-3
ROW = 1024  # elements in a row of the matrix


@dataclass(frozen=True)
class OptimizerSizes:
    """Sizes of the benchmark."""

    timed: int = 2**24  # weights in the timed step
    followed: int = 2**16  # weights in the accuracy tests
    steps: int = 100
    spreads: tuple[float, ...] = (1.0, 2.0, 3.0)
    idle_steps: int = 1000
    rounds: int = 9
    threads: tuple[int, ...] = (1, 2)
    width: int = 1024  # of the square matrix
    rank: int = 128  # of GaLore and APOLLO


# ------------------------------------------------------------------ optimizers

Build = Callable[[nn.Parameter], torch.optim.Optimizer]


@dataclass(frozen=True)
class TestedOptimizer:
    """An optimizer of one matrix, with learning rate LR and no weight decay."""

    build: Build
    rule: str = "Adam"  # the float32 optimizer to follow
    package: str = "torch"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def of_ours(optimizer: Callable[..., Any], rule: str = "Adam", **settings: Any) -> TestedOptimizer:
    def build(weight: nn.Parameter) -> torch.optim.Optimizer:
        return optimizer([("mlp.weight", weight)], lr=LR, weight_decay=0.0, **settings)

    return TestedOptimizer(build, rule)


def of_package(module: str, name: str, rule: str = "Adam", **settings: Any) -> TestedOptimizer:
    def build(weight: nn.Parameter) -> torch.optim.Optimizer:
        with silence():
            optimizer = getattr(importlib.import_module(module), name)
        return optimizer([weight], lr=LR, weight_decay=0.0, **settings)

    return TestedOptimizer(build, rule, module.partition(".")[0])


def adam_mini(weight: nn.Parameter) -> torch.optim.Optimizer:
    """Build the package's optimizer, which partitions by name and prints its choices."""
    with silence():
        package = importlib.import_module("adam_mini")
        return package.Adam_mini([("mlp.weight", weight)], lr=LR, weight_decay=0.0, verbose=False)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress packages' output."""
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
    "adam-mini Adam_mini": TestedOptimizer(adam_mini, package="adam_mini"),
    "memlab AdamMini": of_ours(AdamMini, partition=lambda name, shape: shape[-1]),
    "lion-pytorch Lion": of_package("lion_pytorch", "Lion", "Lion"),
    "memlab Lion": of_ours(Lion, "Lion"),
    # On the CPU it moves weights without gradients by lr per step: its quantizer returns 2e-5 of
    # absmax for 0, and Lion steps by the sign. Its Adam8bit drifts by 2 lr in 1,000 steps.
    # torchao's AdamW8bit makes steps of 10⁶ lr if gradients differ by orders of magnitude.
    "bitsandbytes Lion8bit": of_package("bitsandbytes.optim", "Lion8bit", "Lion"),
    "memlab Lion8bit": of_ours(Lion8bit, "Lion"),
}
EXACT = {"Adam": CONTENDERS[LOOP].build, "Lion": CONTENDERS["memlab Lion"].build}


class OfReference(torch.optim.Optimizer):
    """Steps each matrix with a function (weight, gradient, state, lr) of memlab.reference."""

    def __init__(self, params: Any, step_: Callable[..., None], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._step = step_

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self._step(weight, weight.grad, self.state[weight], group["lr"])


def of_reference(step_: Callable[..., None], **settings: Any) -> Build:
    return lambda weight: OfReference([weight], partial(step_, **settings), LR)


def of_a_matrix(plan: OptimizerSizes) -> dict[str, Build]:
    """Return the optimizers of one matrix. No step after the first has an SVD or a QR, unless the
    name says so."""
    often, never = 1, 10**6
    low = {"lr": LR, "weight_decay": 0.0, "rank": plan.rank}

    def galore_torch(weight: nn.Parameter) -> torch.optim.Optimizer:
        with silence():
            package = importlib.import_module("galore_torch")
        own = {"rank": plan.rank, "update_proj_gap": never, "scale": 0.25, "proj_type": "std"}
        return package.GaLoreAdamW(
            [{"params": [weight], **own}], lr=LR, no_deprecation_warning=True
        )

    return {
        LOOP: CONTENDERS[LOOP].build,
        "Muon": lambda weight: Muon([weight], lr=LR, weight_decay=0.0),
        "torch Muon": lambda weight: torch.optim.Muon([weight], lr=LR, weight_decay=0.0),
        "GaLore": lambda weight: GaLore([weight], gap=never, **low),
        "GaLore, with SVD": lambda weight: GaLore([weight], gap=often, **low),
        "GaLore, reference": of_reference(galore_, rank=plan.rank, gap=never),
        **({"galore-torch": galore_torch} if importlib.util.find_spec("galore_torch") else {}),
        "APOLLO": lambda weight: Apollo([weight], **low),
        "APOLLO, reference": of_reference(apollo_, rank=plan.rank),
        "Shampoo": of_reference(shampoo_),
        "SOAP": of_reference(soap_, frequency=never),
        "SOAP, with QR": of_reference(soap_, frequency=often),
    }


def has_compiler() -> bool:
    return any(map(shutil.which, ("c++", "g++", "clang++", "cl")))


# ------------------------------------------------------------------ values


@dataclass(frozen=True)
class Trajectory:
    """The weight after all steps from zero, and its largest update in units of lr."""

    end: Tensor
    longest: float


def trajectory_of(
    build: Build, numbers: int, steps: int, *, spread: float = 0.0, idle: Tensor | None = None
) -> Trajectory:
    """Step on Gaussian gradients with log-normal scales; weights in `idle` get zero gradients."""
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
    return Trajectory(weight.detach(), longest)


exact_trajectory = cache(trajectory_of)


def drift(contender: TestedOptimizer, plan: OptimizerSizes) -> float:
    """Return the distance to the float32 optimizer's weights, relative to its path."""
    wanted = exact_trajectory(EXACT[contender.rule], plan.followed, plan.steps).end
    apart = trajectory_of(contender.build, plan.followed, plan.steps).end - wanted
    return (apart.norm() / wanted.norm()).item()


def longest_steps(contender: TestedOptimizer, plan: OptimizerSizes) -> dict[float, float]:
    """Return the largest update for each σ."""
    return {
        spread: trajectory_of(contender.build, plan.followed, plan.steps, spread=spread).longest
        for spread in plan.spreads
    }


def idle_movement(contender: TestedOptimizer, plan: OptimizerSizes) -> float:
    """Return the largest movement of the idle weights; every third weight is idle."""
    idle = (torch.arange(plan.followed) % 3 == 0).view(-1, ROW)
    trajectory = trajectory_of(
        contender.build, plan.followed, plan.idle_steps, spread=1.0, idle=idle
    )
    return trajectory.end[idle].abs().max().item() / LR


# ------------------------------------------------------------------ bytes and time


def ready(build: Build, weight: nn.Parameter) -> torch.optim.Optimizer:
    """Return the optimizer after a first step, which makes its state and compiles it."""
    optimizer = build(weight)
    optimizer.step()
    return optimizer


def timed_weight(plan: OptimizerSizes) -> nn.Parameter:
    """Return a weight for all optimizers to share; its values do not affect the time."""
    return with_gradient(plan.timed // ROW, ROW)


def with_gradient(rows: int, columns: int) -> nn.Parameter:
    weight = nn.Parameter(torch.randn(rows, columns))
    weight.grad = torch.randn_like(weight)
    return weight


def state_bytes(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> int:
    """Return the bytes of unique storages, with tensor subclasses flattened."""
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


def bytes_of(build: Build, weight: nn.Parameter) -> dict[str, float]:
    """Return state per weight, and the temporary memory of a step."""
    optimizer = ready(build, weight)
    return {
        "state": state_bytes(optimizer, weight) / weight.numel(),
        "on the way": record(optimizer.step, warm_up=optimizer.step).peak_bytes,
    }


def seconds(
    builds: Mapping[str, Build], weight: nn.Parameter, plan: OptimizerSizes, threads: int
) -> dict[str, list[float]]:
    """Return the seconds of each optimizer in each round."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    optimizers = {name: ready(build, weight) for name, build in builds.items()}
    runs = {name: timed(optimizer.step) for name, optimizer in optimizers.items()}
    try:
        return side_by_side(runs, range(plan.rounds))
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------ tables


def row(contender: TestedOptimizer, plan: OptimizerSizes) -> dict[str, Any]:
    """Return all figures except the times."""
    return {
        **bytes_of(contender.build, timed_weight(plan)),
        "drift": drift(contender, plan),
        "longest": longest_steps(contender, plan),
        "idle": idle_movement(contender, plan),
    }


def page(rows: dict[str, dict[str, Any]], times: dict[int, dict[str, Spread]]) -> str:
    """Return a table with a row for each optimizer."""
    spreads = list(next(iter(rows.values()))["longest"])
    header = (
        *("optimizer", "state, bytes per weight", "drift"),
        *(f"longest step, σ = {spread:g}" for spread in spreads),
        *("idle weights move", "temporary, MiB"),
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


def page_of_matrices(rows: dict[str, dict[str, float]], times: dict[int, dict[str, Spread]]) -> str:
    """Return a table of the optimizers of a matrix."""
    header = (
        *("optimizer of a matrix", "state, bytes per weight", "temporary, MiB"),
        *(f"time, {threads} thread{'s' * (threads > 1)}" for threads in times),
    )
    lines = [
        (
            name,
            f"{found['state']:.3f}",
            f"{found['on the way'] / MIB:.1f}",
            *(str(ratio[name]) for ratio in times.values()),
        )
        for name, found in rows.items()
    ]
    return markdown(header, lines)


def short(number: float) -> str:
    """Format with three digits, and exact zero as 0."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    return (
        f"{number:.2g}" if number < 0.1 else f"{number:,.3g}" if number < 1000 else f"{number:.1e}"
    )


def sentences(taken: dict[int, dict[str, list[float]]]) -> Iterator[str]:
    """Yield time ratios of the 8-bit optimizers, and which packages are missing."""
    for threads, found in taken.items():
        for ours, theirs in (
            ("memlab Adam8bit", "bitsandbytes Adam8bit"),
            ("memlab Adam8bit", "torchao AdamW8bit"),
            ("memlab Lion8bit", "bitsandbytes Lion8bit"),
        ):
            if theirs in found:
                ratio = ratios(found[ours], found[theirs])
                yield f"{ours} takes {ratio} × the time of {theirs} (threads: {threads})."
    missing = sorted({c.package for c in CONTENDERS.values() if not c.is_installed})
    if missing:
        yield f"Not installed, and left out: {', '.join(missing)}."
    if CONTENDERS["torchao AdamW8bit"].is_installed and not has_compiler():
        yield "No C++ compiler found: torchao's optimizer ran uncompiled."


def main(words: Sequence[str] | None = None, plan: OptimizerSizes | None = None) -> int:
    set_environment()
    given = parser_with_results(__doc__, OptimizerSizes.rounds).parse_args(words)
    plan = plan or OptimizerSizes(rounds=given.rounds)
    torch.compiler.set_stance("default" if has_compiler() else "force_eager")
    print(heading("Optimizers"), end="\n\n")
    with progress() as bar:
        rows, taken = of_contenders(plan, bar)
        of_matrices = rows_of_matrices(plan, bar)
    times = in_ratios(taken)
    print(page(rows, times), end="\n\n")
    for sentence in sentences(taken):
        print(sentence)
    save(given.results, "optim", "optimizers", {"rows": rows, "times": medians(times)})
    rows, times = of_matrices[0], in_ratios(of_matrices[1])
    print(f"\n{page_of_matrices(rows, times)}")
    sizes = {"width": plan.width, "rank": plan.rank}
    save(given.results, "optim", "matrices", {**sizes, "rows": rows, "times": medians(times)})
    return 0


Seconds = dict[int, dict[str, list[float]]]  # by threads and optimizer, of each round


def of_contenders(plan: OptimizerSizes, bar: Progress) -> tuple[dict[str, Any], Seconds]:
    """Return the figures and the seconds of each installed optimizer."""
    installed = {name: each for name, each in CONTENDERS.items() if each.is_installed}
    rows, taken = {}, {}
    task = bar.add_task("optimizers", total=len(installed) + len(plan.threads))
    for name, contender in installed.items():
        rows[name] = row(contender, plan)
        bar.advance(task)
    builds, weight = {name: each.build for name, each in installed.items()}, timed_weight(plan)
    for threads in plan.threads:
        taken[threads] = seconds(builds, weight, plan, threads)
        bar.advance(task)
    return rows, taken


def rows_of_matrices(plan: OptimizerSizes, bar: Progress) -> tuple[dict[str, Any], Seconds]:
    """Return the bytes and the seconds of each optimizer of a matrix."""
    rows, taken = {}, {}
    builds, weight = of_a_matrix(plan), with_gradient(plan.width, plan.width)
    task = bar.add_task("of a matrix", total=len(builds) + len(plan.threads))
    for name, build in builds.items():
        rows[name] = bytes_of(build, weight)
        bar.advance(task)
    for threads in plan.threads:
        taken[threads] = seconds(builds, weight, plan, threads)
        bar.advance(task)
    return rows, taken


def in_ratios(taken: Seconds) -> dict[int, dict[str, Spread]]:
    """Return each optimizer's time as a ratio to torch's AdamW."""
    return {
        threads: {name: ratios(of, found[LOOP]) for name, of in found.items()}
        for threads, found in taken.items()
    }


def medians(times: dict[int, dict[str, Spread]]) -> dict[int, dict[str, float]]:
    return {
        threads: {name: ratio.median for name, ratio in found.items()}
        for threads, found in times.items()
    }


if __name__ == "__main__":
    sys.exit(main())
