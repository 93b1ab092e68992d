"""Measure the exact bytes of a deep model's training step from runs of shallow models.

Nothing is computed and no memory is allocated. The step runs on fake tensors, as in
`memlab.predict` for CUDA and in `memlab.dry_run` for the CPU. Each operator takes time, so equal
blocks run only a few times, and `memlab.planner.repetition` extrapolates the rest. If a technique
treats blocks differently (segments of √L), the whole depth runs.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from memlab import train
from memlab.allocator.capacity import needed_bytes
from memlab.planner.recipes import USUAL_ADAPTERS
from memlab.planner.repetition import NotRepeating, extrapolate
from memlab.trace import Trace
from memlab.train.adapters import Adapters

FEWEST_UNITS = 3  # the fewest repetitions that establish a rule


@dataclass(frozen=True)
class Measured:
    """The bytes of a step."""

    allocated_bytes: int
    reserved_bytes: int | None  # without a limit; None on the CPU, which has no caching allocator
    at_peak: dict[str, int]  # by category
    peak_phase: str
    extrapolated: bool  # from runs with fewer blocks; otherwise the whole depth ran
    trace: Trace | None  # None if it was dropped

    def needed_bytes(self, budget: int) -> int:
        """Return the bytes that a card with `budget` bytes for tensors must have for the step."""
        if self.trace is None:
            return self.reserved_bytes or self.allocated_bytes
        return needed_bytes(self.trace, budget)


def measured(
    setting: train.Setting,
    names: str,
    *,
    unit: int = 1,
    ranks: int = 1,
    stage: int = 0,
    adapters: Adapters = USUAL_ADAPTERS,
) -> Measured:
    """Measure the second step of a training with the techniques `names`, joined by "+".

    The setting's device is "cpu", "cuda" or another target of `memlab.predict`. `unit` is the
    number of blocks treated as one, such as a checkpoint segment. With several `ranks`,
    return the bytes of one rank, which has the setting's batch, in a ZeRO stage. Stages 0 to 2 hold
    weights or gradients in one flat tensor, so the whole depth runs.

    Raises KeyError and ValueError as `train.combined` does.
    """
    query = _Training(replace(setting, model=setting.config), names, ranks, stage, adapters)
    return _answer(query, unit)


@dataclass(frozen=True)
class _Training:
    """A training whose number of blocks can be changed."""

    setting: train.Setting
    names: str
    ranks: int
    stage: int
    adapters: Adapters

    def run(self, blocks: int) -> Trace:
        """Run it with `blocks` blocks."""
        config = replace(self.setting.config, layers=blocks)
        return _run_whole(replace(self, setting=replace(self.setting, model=config)))


@cache
def _answer(query: _Training, unit: int) -> Measured:
    trace, extrapolated = _whole(query.run, query.names, query.setting.config.layers, unit)
    return summarized(trace, extrapolated=extrapolated)


def whole_trace(setting: train.Setting, names: str, technique: train.Plugs) -> Trace:
    """Return the trace of `train.dry_trace`, or for a target `train.predicted_trace`, sooner."""
    trace_of = train.dry_trace if setting.device == "cpu" else train.predicted_trace

    def run(blocks: int) -> Trace:
        return trace_of(replace(setting, model=replace(setting.config, layers=blocks)), technique)

    return _whole(run, names, setting.config.layers)[0]


def _whole(
    run: Callable[[int], Trace], names: str, blocks: int, unit: int = 1
) -> tuple[Trace, bool]:
    """Return the trace of `blocks` blocks, and whether it is extrapolated from fewer."""
    # If block 0 is frozen, no gradient leaves it, so it differs from the others.
    units = FEWEST_UNITS + bool({"lora", "qlora"} & set(names.split("+")))
    fewer = shallow_blocks(blocks, unit, units)
    if fewer is not None:
        with suppress(NotRepeating):
            traces = run(fewer), run(fewer + unit)
            return extrapolate(*traces, fewer + unit, blocks, unit=unit), True
    return run(blocks), False


def shallow_blocks(blocks: int, unit: int = 1, units: int = FEWEST_UNITS) -> int | None:
    """Return the smaller number of blocks to run; the other run has one unit more. Adding whole
    units gives `blocks`. Return None if running all blocks is as fast."""
    if unit < 1:
        raise ValueError(f"got a unit of {unit} blocks; give at least 1")
    fewest = units * unit + blocks % unit
    return fewest if fewest + unit < blocks else None


def clear_cache() -> None:
    """Drop all results and the shallow runs behind them."""
    _answer.cache_clear()
    _run_whole.cache_clear()


@cache
def _run_whole(query: _Training) -> Trace:
    setting = query.setting
    technique = train.combined(query.names, adapters=query.adapters)
    on_cpu = setting.device == "cpu"
    if query.ranks == 1:
        return (train.dry_trace if on_cpu else train.predicted_trace)(setting, technique)
    share = setting, technique, query.ranks, query.stage
    return train.rank_step(*share).traces[0] if on_cpu else train.predicted_rank_trace(*share)


def summarized(trace: Trace, *, extrapolated: bool) -> Measured:
    """Return the numbers of a trace."""
    return Measured(
        trace.allocated_bytes,
        trace.reserved_bytes,
        trace.at_peak,
        trace.peak_phase,
        extrapolated,
        trace,
    )
