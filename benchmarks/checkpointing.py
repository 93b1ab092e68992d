"""Activation checkpointing: memlab's against torch's, and schedules against each other.

    against torch   forward and backward of a small GPT, and of a chain of blocks so small that
                    only the overhead shows: without checkpoints, with torch's checkpoint around
                    every block (`use_reentrant=False`), and with memlab's. Goals: the same peak as
                    torch's, and at most 1.05 times its time
    schedules       a GPT with uniform segments, √L segments, checkpoint_sequential's segments, the
                    optimal schedule in the same memory, and selective checkpointing. Compares
                    predicted and measured peaks and recomputed operations, and shows the time

    python benchmarks/checkpointing.py [--section "against torch"] [--quick]

Prints Markdown and writes each section to `benchmarks/results/<machine>.json`.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from common import (
    SectionReport,
    Spread,
    core_seconds,
    parser_of_sections,
    print_reports,
    ratios,
    set_environment,
    side_by_side,
)
from common import table as markdown_table
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memlab
from memlab.checkpointing import (
    ATTENTION,
    MATMULS,
    Chain,
    checkpoint,
    checkpoint_blocks,
    optimal_schedule,
    plain_schedule,
    predicted_peak_bytes,
    recomputed,
    selective,
    sqrt_schedule,
    uniform_schedule,
)
from memlab.checkpointing.operations import Operations
from memlab.checkpointing.schedules import Schedule
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.planner.block_costs import chain_costs
from memlab.units import format_bytes

Call = Callable[..., Any]  # how a block is called: call(block, x)
Pass = Callable[[], None]  # forward and backward

MAX_TIME_RATIO = 1.05  # to torch's checkpoint


@dataclass(frozen=True)
class CheckpointingSizes:
    """Sizes of the benchmark."""

    preset: str
    batch: int
    seq_len: int
    tiny_blocks: int
    rounds: int
    batch_factor: int  # for schedules
    schedule_rounds: int


# With few tokens every schedule peaks at the end of backward, where all gradients exist.
FULL = CheckpointingSizes(
    "25m", batch=2, seq_len=256, tiny_blocks=200, rounds=15, batch_factor=4, schedule_rounds=5
)
QUICK = CheckpointingSizes(
    "tiny", batch=4, seq_len=64, tiny_blocks=5, rounds=2, batch_factor=1, schedule_rounds=1
)


# ------------------------------------------------------------------ against torch

WAYS: dict[str, Call] = {
    "plain": lambda fn, *args: fn(*args),
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "memlab": checkpoint,
}


def gpt(plan: CheckpointingSizes) -> tuple[nn.Module, Callable[[Call], Pass]]:
    """Return a GPT, and a function that builds its forward and backward for a checkpoint."""
    torch.manual_seed(0)
    model = GPT(PRESETS[plan.preset])
    tokens, targets = next(batches(source_bytes("1 MiB"), plan.batch, plan.seq_len, 0))

    def pass_of(call: Call) -> Pass:
        def run() -> None:
            hidden = model.embedding(tokens)
            for block in model.blocks:
                hidden = call(block, hidden)
            model.loss(model.norm(hidden), model.unembedding_weight, targets).backward()

        return run

    return model, pass_of


def chain(plan: CheckpointingSizes) -> tuple[nn.Module, Callable[[Call], Pass]]:
    """Return a chain of blocks so small that overhead dominates."""
    torch.manual_seed(0)
    blocks = nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(plan.tiny_blocks)]
    )
    x = torch.randn(32, 16, requires_grad=True)

    def pass_of(call: Call) -> Pass:
        def run() -> None:
            y: Tensor = x
            for block in blocks:
                y = call(block, y)
            y.sum().backward()

        return run

    return blocks, pass_of


@dataclass(frozen=True)
class CheckpointTimes:
    """Times and peaks of one model with every checkpoint implementation."""

    seconds: dict[str, list[float]]
    peak_bytes: dict[str, int]

    def ratio(self, of: str, to: str) -> Spread:
        return ratios(self.seconds[of], self.seconds[to])

    @property
    def verdict(self) -> str:
        """Return whether memlab has torch's peak and at most `MAX_TIME_RATIO` times its time."""
        if self.peak_bytes["memlab"] != self.peak_bytes["torch"]:
            return "missed: different peak"
        return "met" if self.ratio("memlab", "torch").median <= MAX_TIME_RATIO else "missed"


def peak_bytes(run: Pass, model: nn.Module) -> int:
    """Return the peak of a run that starts without gradients, weights included."""
    model.zero_grad()
    return memlab.measure(run, model=model).peak_bytes


def compared(
    model: nn.Module, pass_of: Callable[[Call], Pass], rounds: Iterable[int]
) -> CheckpointTimes:
    """Measure every peak, which warms up, then the times."""
    passes = {name: pass_of(call) for name, call in WAYS.items()}
    peaks = {name: peak_bytes(run, model) for name, run in passes.items()}
    return CheckpointTimes(
        side_by_side({name: partial(core_seconds, run) for name, run in passes.items()}, rounds),
        peaks,
    )


def against_torch(plan: CheckpointingSizes, bar: Progress) -> SectionReport:
    builders = {
        f"{plan.preset}, {plan.batch} × {plan.seq_len} tokens": gpt,
        f"{plan.tiny_blocks} blocks of Linear(16, 16), GELU and Tanh": chain,
    }
    found = {
        name: compared(*build(plan), bar.track(range(plan.rounds), description=name))
        for name, build in builders.items()
    }
    return SectionReport(torch_sentence(found), torch_table(found), torch_numbers(found))


def torch_sentence(found: dict[str, CheckpointTimes]) -> str:
    times = " and ".join(
        f"{row.ratio('memlab', 'torch').median:.2f} × ({name})" for name, row in found.items()
    )
    same = all(row.peak_bytes["memlab"] == row.peak_bytes["torch"] for row in found.values())
    return (
        f"memlab's checkpoint takes {times} torch's time, at "
        f"{'the same' if same else 'a different'} peak."
    )


def torch_table(found: dict[str, CheckpointTimes]) -> str:
    rows = [
        (
            name,
            *(format_bytes(row.peak_bytes[way]) for way in WAYS),
            f"{row.ratio('torch', 'plain')} ×",
            f"{row.ratio('memlab', 'plain')} ×",
            f"{row.ratio('memlab', 'torch')} ×",
            f"≤ {MAX_TIME_RATIO} × {row.verdict}",
        )
        for name, row in found.items()
    ]
    header = (
        *("forward and backward", *(f"peak, {way}" for way in WAYS)),
        *("torch / plain", "memlab / plain", "memlab / torch", "goal"),
    )
    return markdown_table(header, rows)


def torch_numbers(found: dict[str, CheckpointTimes]) -> dict[str, Any]:
    return {
        name: {
            "peak_bytes": row.peak_bytes,
            "seconds": row.seconds,
            "memlab_to_torch": row.ratio("memlab", "torch")._asdict(),
            "memlab_to_plain": row.ratio("memlab", "plain")._asdict(),
            "verdict": row.verdict,
        }
        for name, row in found.items()
    }


# ------------------------------------------------------------------ schedules


@dataclass(frozen=True)
class ScheduledRun:
    """A schedule of a model's blocks, and the checkpoint function for its segments."""

    schedule: Schedule
    using: Call = checkpoint


@dataclass(frozen=True)
class ScheduleResult:
    """Measured and predicted costs; predictions are None for selective checkpointing."""

    peak_bytes: int
    predicted_peak_bytes: int | None
    recomputed_operations: int
    predicted_operations: int | None
    seconds: list[float]

    @property
    def is_as_predicted(self) -> bool | None:
        if self.predicted_peak_bytes is None:
            return None
        return (self.peak_bytes, self.recomputed_operations) == (
            self.predicted_peak_bytes,
            self.predicted_operations,
        )


def sequential_schedule(stages: int, segments: int) -> Schedule:
    """Return the schedule of torch's checkpoint_sequential.

    The last segment contains the remainder and is not checkpointed.
    """
    size = stages // segments
    border = size * (segments - 1)
    checkpointed = (tuple(range(start, start + size)) for start in range(0, border, size))
    return (*checkpointed, *range(border, stages))


def ways_of(costs: Chain) -> dict[str, ScheduledRun]:
    """Return the schedules to compare, the plain one first."""
    blocks = len(costs.stages)
    every_block = uniform_schedule(blocks, every=1)
    ways = {
        "no checkpointing": ScheduledRun(plain_schedule(blocks)),
        "every second block": ScheduledRun(tuple((i,) if i % 2 else i for i in range(blocks))),
        "every block": ScheduledRun(every_block),
        "segments of √L": ScheduledRun(sqrt_schedule(blocks)),
    }
    for segments in sorted({2, max(2, blocks // 2)}):
        schedule = sequential_schedule(blocks, segments)
        budget = predicted_peak_bytes(schedule, costs)
        ways[f"checkpoint_sequential, {segments} segments"] = ScheduledRun(schedule)
        ways[f"optimal, memory of {segments} segments"] = ScheduledRun(
            optimal_schedule(costs, budget)
        )
    ways["matmuls and attention kept"] = ScheduledRun(every_block, selective(MATMULS | ATTENTION))
    return ways


def outcomes(plan: CheckpointingSizes, bar: Progress) -> dict[str, ScheduleResult]:
    """Measure the peak and operations of every schedule, then the times."""
    torch.manual_seed(0)
    model = GPT(PRESETS[plan.preset])
    tokens, targets = next(batches(source_bytes("1 MiB"), plan.batch, plan.seq_len, 0))
    costs = chain_costs(model, tokens, targets)
    ways = ways_of(costs)

    def pass_of(way: ScheduledRun) -> Pass:
        def run() -> None:
            with checkpoint_blocks(model, way.schedule, using=way.using):
                model(tokens, targets).backward()

        return run

    passes = {name: pass_of(way) for name, way in ways.items()}
    peaks = {name: peak_bytes(run, model) for name, run in passes.items()}
    operations = {name: counted(run) for name, run in passes.items()}
    rounds = bar.track(range(plan.rounds), description="schedules")
    seconds = side_by_side({n: partial(core_seconds, run) for n, run in passes.items()}, rounds)
    found = {}
    for name, way in ways.items():
        is_predicted = way.using is checkpoint
        found[name] = ScheduleResult(
            peaks[name],
            predicted_peak_bytes(way.schedule, costs) if is_predicted else None,
            operations[name] - operations["no checkpointing"],
            recomputed(way.schedule, costs) if is_predicted else None,
            seconds[name],
        )
    return found


def counted(run: Pass) -> int:
    """Return the operations of matmuls and attention in forward and backward."""
    with Operations() as counter:
        run()
    return counter.total


def schedules(plan: CheckpointingSizes, bar: Progress) -> SectionReport:
    plan = replace(plan, batch=plan.batch_factor * plan.batch, rounds=plan.schedule_rounds)
    found = outcomes(plan, bar)
    plain = found["no checkpointing"]
    judged = [outcome.is_as_predicted for outcome in found.values()]
    sentence = (
        f"{plan.preset}, {plan.batch} × {plan.seq_len} tokens: {judged.count(True)} of "
        f"{len(judged) - judged.count(None)} schedules have the predicted peak, to the byte, and "
        f"the predicted operations."
    )
    rows = [
        (
            name,
            format_bytes(outcome.peak_bytes),
            {None: "", True: "yes", False: "no"}[outcome.is_as_predicted],
            f"{outcome.recomputed_operations / 1e9:.2f}",
            f"{ratios(outcome.seconds, plain.seconds)} ×",
        )
        for name, outcome in found.items()
    ]
    header = (
        "blocks",
        "peak",
        "as predicted",
        "10⁹ operations recomputed",
        "time / no checkpointing",
    )
    return SectionReport(
        sentence, markdown_table(header, rows), {n: asdict(o) for n, o in found.items()}
    )


# ------------------------------------------------------------------ the command

SECTIONS: dict[str, Callable[[CheckpointingSizes, Progress], SectionReport]] = {
    "against torch": against_torch,
    "schedules": schedules,
}


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = parser_of_sections(__doc__, SECTIONS, quick="tiny models").parse_args(words)
    torch.set_num_threads(1)  # CPU time equals wall-clock time
    print_reports("Checkpointing", "checkpointing", SECTIONS, given, FULL, QUICK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
