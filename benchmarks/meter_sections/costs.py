"""What watching costs: seconds and memory, each in a process of its own, in turn."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from common import ROOT, THREADS, Report, Runner, Spread, ratios, side_by_side, spread, table
from rich.progress import Progress
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import memlab

from .plans import Plan, Size, Step, language_model

SCRIPT = str(ROOT / "benchmarks" / "meter.py")


def run_plainly(step: Step, model: nn.Module, optimizer: Any) -> None:
    step()


def run_metered(step: Step, model: nn.Module, optimizer: Any) -> None:
    memlab.measure(step, model=model, optimizer=optimizer)


def run_with_lines(step: Step, model: nn.Module, optimizer: Any) -> None:
    memlab.measure(step, model=model, optimizer=optimizer, lines=True)


def run_tracked(step: Step, model: nn.Module, optimizer: Any) -> None:
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()


# What a Runner runs, and inside what it does.
RUNS: dict[str, tuple[Callable[..., None], Callable[[], AbstractContextManager[Any]]]] = {
    "plain": (run_plainly, nullcontext),
    "metered": (run_metered, nullcontext),
    "metered, with lines": (run_with_lines, nullcontext),
    "bare fake tensors": (run_plainly, FakeTensorMode),
    "dry run, metered": (run_metered, memlab.dry_run),
    "MemTracker, fake tensors": (run_tracked, FakeTensorMode),
}


def two_steps(size: Size) -> None:
    with FakeTensorMode():
        step, *_ = language_model(size)
        step()
        step()


def predict(size: Size) -> None:
    memlab.predict(lambda: language_model(size))


# From building the model to the second step.
WHOLE: dict[str, Callable[[Size], None]] = {
    "two steps on bare fake tensors": two_steps,
    "predicted for CUDA": predict,
}


def serve_whole(name: str, size: Size) -> None:
    """What a Runner's process does: all of it once, then once more for each line."""
    WHOLE[name](size)
    print(0.0, flush=True)
    for _ in sys.stdin:
        gc.collect()
        start = time.perf_counter()
        WHOLE[name](size)
        print(time.perf_counter() - start, flush=True)


def serve(name: str, size: Size) -> None:
    """What a Runner's process does: builds and steps once, then once more for each line."""
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
            gc.collect()  # the last run's cycles are not this one's
            start = time.perf_counter()
            run(*built)
            print(time.perf_counter() - start, flush=True)


@dataclass(frozen=True)
class Costs:
    """Of each run: its seconds in each round, those of building what it runs, its memory."""

    seconds: dict[str, list[float]]
    construction_seconds: dict[str, float]
    peak_bytes: dict[str, int]

    def ratio(self, of: str, to: str) -> Spread:
        return ratios(self.seconds[of], self.seconds[to])


def costs(size: Size, names: Iterable[str], rounds: int, bar: Progress) -> Costs:
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
    return Costs(seconds, construction_seconds, peak_bytes)


def bytes_of_torch_alone() -> int:
    """The memory of a process that has imported torch and does nothing."""
    with Runner("-c", "import torch; print(0, flush=True); input()") as process:
        process.answer()
        return process.bytes_now()


class Line(NamedTuple):
    """A measurement, what it is to be at most, and its unit."""

    what: str
    measured: Spread
    aim: float | None
    unit: str

    def cells(self) -> tuple[str, ...]:
        if self.aim is None:
            return self.what, f"{self.measured} {self.unit}", "", ""
        verdict = "met" if self.measured.median <= self.aim else "missed"
        return self.what, f"{self.measured} {self.unit}", f"≤ {self.aim} {self.unit}", verdict


def cost(plan: Plan, bar: Progress) -> Report:
    real = costs(plan.real, ("plain", "metered", "metered, with lines"), plan.rounds, bar)
    dry = costs(plan.dry, ("bare fake tensors", "dry run, metered"), plan.rounds, bar)
    names = ("bare fake tensors", "MemTracker, fake tensors")
    theirs = costs(plan.dry, names, plan.rounds_of_mem_tracker, bar)
    whole = costs(plan.dry, WHOLE, plan.rounds, bar)
    lines = cost_lines(real, dry, theirs, whole, bytes_of_torch_alone())
    note = (
        f"Real: {plan.real}. Dry: {plan.dry}. Medians of the rounds, with their quartiles; a ratio "
        f"is taken within each round. Kernels have {os.environ.get('OMP_NUM_THREADS', THREADS)} "
        f"threads."
    )
    markdown = table(("", "measured", "aim", ""), [line.cells() for line in lines.values()])
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
    return Report(cost_sentence(plan, lines), f"{note}\n\n{markdown}", plain)


def cost_lines(
    real: Costs, dry: Costs, theirs: Costs, whole: Costs, torch_bytes: int
) -> dict[str, Line]:
    bare, ours, tracker = "bare fake tensors", "dry run, metered", "MemTracker, fake tensors"
    lines_noted = real.ratio("metered, with lines", "plain")
    construction = spread([dry.construction_seconds[ours]])
    memory = spread([(dry.peak_bytes[ours] - torch_bytes) / 2**30])
    return {
        "metered": Line("real, metered / plain", real.ratio("metered", "plain"), 1.15, "×"),
        "lines": Line("real, metered with lines / plain", lines_noted, None, "×"),
        "dry": Line("dry, metered / bare fake tensors", dry.ratio(ours, bare), 1.3, "×"),
        "dry_seconds": Line("dry, metered", spread(dry.seconds[ours]), 3, "s"),
        "construction": Line("dry, building the model", construction, 5, "s"),
        "memory": Line("dry, metered: memory of the process above torch's", memory, 0.5, "GiB"),
        "predicted": Line(
            "predicted for CUDA / building and two steps on bare fake tensors",
            whole.ratio(*reversed(WHOLE)),
            1.3,
            "×",
        ),
        "tracker": Line("dry, MemTracker / bare", theirs.ratio(tracker, bare), None, "×"),
        "tracker_seconds": Line("dry, MemTracker", spread(theirs.seconds[tracker]), None, "s"),
    }


def cost_sentence(plan: Plan, lines: dict[str, Line]) -> str:
    of = {name: f"{line.measured.median:.2f} {line.unit}" for name, line in lines.items()}
    return (
        f"A metered step of {plan.real} takes {of['metered']} the time of a plain one; a step of "
        f"{plan.dry} is measured without its memory in {of['dry_seconds']} and {of['memory']} of "
        f"the process, {of['dry']} the time on bare fake tensors, where MemTracker takes "
        f"{of['tracker_seconds']}, {of['tracker']}. Predicted for CUDA, from building it to the "
        f"second step, it takes {of['predicted']} the time on bare fake tensors."
    )
