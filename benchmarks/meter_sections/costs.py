"""Overhead of measuring: time and memory of runs in their own processes, in turn."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from common import ROOT, THREADS, Runner, SectionReport, Spread, ratios, side_by_side, spread, table
from rich.progress import Progress
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import memlab

from .plans import MeterPlan, ModelSize, Step, language_model

SCRIPT = str(ROOT / "benchmarks" / "meter.py")


def run_plainly(step: Step, model: nn.Module, optimizer: Any) -> None:
    step()


def run_measured(step: Step, model: nn.Module, optimizer: Any) -> None:
    memlab.measure(step, model=model, optimizer=optimizer)


def run_with_lines(step: Step, model: nn.Module, optimizer: Any) -> None:
    memlab.measure(step, model=model, optimizer=optimizer, lines=True)


def run_tracked(step: Step, model: nn.Module, optimizer: Any) -> None:
    tracker = MemTracker()
    # As documented. Its peak is right in 57 of 59 kinds (gathers +13 %, gradients with many sources
    # +4 %), and it takes 18 × the time of a plain 7B dry step. It supports neither a second forward
    # pass without a reset, nor sparse tensors, nor `autograd.grad`.
    tracker.track_external(model, optimizer)
    with tracker:
        step()


# The functions that a Runner runs, and the context that surrounds each.
RUNS: dict[str, tuple[Callable[..., None], Callable[[], AbstractContextManager[Any]]]] = {
    "plain": (run_plainly, nullcontext),
    "measured": (run_measured, nullcontext),
    "measured, with lines": (run_with_lines, nullcontext),
    "bare fake tensors": (run_plainly, FakeTensorMode),
    "dry run, measured": (run_measured, memlab.dry_run),
    "MemTracker, fake tensors": (run_tracked, FakeTensorMode),
}


def two_steps(size: ModelSize) -> None:
    with FakeTensorMode():
        step, *_ = language_model(size)
        step()
        step()


def predict(size: ModelSize) -> None:
    memlab.predict(lambda: language_model(size))


# Runs from building the model to the second step.
WHOLE: dict[str, Callable[[ModelSize], None]] = {
    "two steps on bare fake tensors": two_steps,
    "predicted for CUDA": predict,
}


def serve_whole(name: str, size: ModelSize) -> None:
    """Serve a Runner: run everything once, then once for each input line."""
    WHOLE[name](size)
    print(0.0, flush=True)
    for _ in sys.stdin:
        gc.collect()
        start = time.perf_counter()
        WHOLE[name](size)
        print(time.perf_counter() - start, flush=True)


def serve(name: str, size: ModelSize) -> None:
    """Serve a Runner: build and step once, then step once for each input line."""
    if name in WHOLE:
        return serve_whole(name, size)
    run, around = RUNS[name]
    with around():
        start = time.perf_counter()
        built = language_model(size)
        construction_seconds = time.perf_counter() - start
        built[0]()
        print(construction_seconds, flush=True)
        for _ in sys.stdin:
            gc.collect()  # collect the last run's cycles
            start = time.perf_counter()
            run(*built)
            print(time.perf_counter() - start, flush=True)


@dataclass(frozen=True)
class RunCosts:
    """Seconds per round, construction seconds and peak memory of each run."""

    seconds: dict[str, list[float]]
    construction_seconds: dict[str, float]
    peak_bytes: dict[str, int]

    def ratio(self, of: str, to: str) -> Spread:
        return ratios(self.seconds[of], self.seconds[to])


def costs(size: ModelSize, names: Iterable[str], rounds: int, bar: Progress) -> RunCosts:
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        construction_seconds: dict[str, float] = {}
        for name in bar.track(list(names), description=f"{size.preset}: starting"):
            arguments = (SCRIPT, "--serve", name, *map(str, size))
            runners[name] = stack.enter_context(Runner(*arguments))
            construction_seconds[name] = runners[name].answer()
        turns = bar.track(range(rounds), description=f"{size.preset}: in turn")
        seconds = side_by_side({name: runner.run for name, runner in runners.items()}, turns)
        peak_bytes = {name: runner.peak_bytes for name, runner in runners.items()}
    return RunCosts(seconds, construction_seconds, peak_bytes)


def bytes_of_torch_alone() -> int:
    """Return the memory of an idle process that has imported torch."""
    with Runner("-c", "import torch; print(0, flush=True); input()") as process:
        process.answer()
        return process.bytes_now()


class CostLine(NamedTuple):
    """A measurement, its goal (an upper limit) and its unit."""

    what: str
    measured: Spread
    goal: float | None
    unit: str

    def cells(self) -> tuple[str, ...]:
        if self.goal is None:
            return self.what, f"{self.measured} {self.unit}", "", ""
        verdict = "met" if self.measured.median <= self.goal else "missed"
        return self.what, f"{self.measured} {self.unit}", f"≤ {self.goal} {self.unit}", verdict


def cost(plan: MeterPlan, bar: Progress) -> SectionReport:
    real = costs(plan.real, ("plain", "measured", "measured, with lines"), plan.rounds, bar)
    dry = costs(plan.dry, ("bare fake tensors", "dry run, measured"), plan.rounds, bar)
    names = ("bare fake tensors", "MemTracker, fake tensors")
    theirs = costs(plan.dry, names, plan.rounds_of_mem_tracker, bar)
    whole = costs(plan.dry, WHOLE, plan.rounds, bar)
    lines = cost_lines(real, dry, theirs, whole, bytes_of_torch_alone())
    note = (
        f"Real: {plan.real}. Dry: {plan.dry}. Medians and quartiles over the rounds; ratios are "
        f"taken within each round. Threads per kernel: "
        f"{os.environ.get('OMP_NUM_THREADS', THREADS)}."
    )
    markdown = table(("", "measured", "goal", ""), [line.cells() for line in lines.values()])
    plain = {
        "real": str(plan.real),
        "dry": str(plan.dry),
        "lines": {name: line._asdict() for name, line in lines.items()},
        "seconds": {
            "real": real.seconds,
            "dry": dry.seconds,
            "MemTracker": theirs.seconds,
            "whole": whole.seconds,
        },
    }
    return SectionReport(cost_sentence(plan, lines), f"{note}\n\n{markdown}", plain)


def cost_lines(
    real: RunCosts, dry: RunCosts, theirs: RunCosts, whole: RunCosts, torch_bytes: int
) -> dict[str, CostLine]:
    bare, ours, tracker = "bare fake tensors", "dry run, measured", "MemTracker, fake tensors"
    lines_noted = real.ratio("measured, with lines", "plain")
    construction = spread([dry.construction_seconds[ours]])
    memory = spread([(dry.peak_bytes[ours] - torch_bytes) / 2**30])
    return {
        "measured": CostLine("real, measured / plain", real.ratio("measured", "plain"), 1.15, "×"),
        "lines": CostLine("real, measured with lines / plain", lines_noted, None, "×"),
        "dry": CostLine("dry, measured / bare fake tensors", dry.ratio(ours, bare), 1.3, "×"),
        "dry_seconds": CostLine("dry, measured", spread(dry.seconds[ours]), 3, "s"),
        "construction": CostLine("dry, building the model", construction, 5, "s"),
        "memory": CostLine(
            "dry, measured: memory beyond an idle torch process", memory, 0.5, "GiB"
        ),
        "predicted": CostLine(
            "predicted for CUDA / building and two steps on bare fake tensors",
            whole.ratio(*reversed(WHOLE)),
            1.3,
            "×",
        ),
        "tracker": CostLine("dry, MemTracker / bare", theirs.ratio(tracker, bare), None, "×"),
        "tracker_seconds": CostLine("dry, MemTracker", spread(theirs.seconds[tracker]), None, "s"),
    }


def cost_sentence(plan: MeterPlan, lines: dict[str, CostLine]) -> str:
    of = {name: f"{line.measured.median:.2f} {line.unit}" for name, line in lines.items()}
    return (
        f"Measuring a step of {plan.real} takes {of['measured']} the time of a plain step. A dry "
        f"run of {plan.dry} takes {of['dry_seconds']} and {of['memory']} ({of['dry']} the time on "
        f"bare fake tensors); MemTracker takes {of['tracker_seconds']} ({of['tracker']}). "
        f"Predicting it for CUDA, including building the model and a first step, takes "
        f"{of['predicted']} the time on bare fake tensors."
    )
