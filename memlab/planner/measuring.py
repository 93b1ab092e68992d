"""Measuring: what a training step of a deep model takes, exactly, out of runs of a shallow one.

Nothing is computed and no memory taken: the step runs on fake tensors, as `memlab.predict` runs it
for a card, and as `memlab.dry_run` does for the CPU. That costs time for each operator, so blocks
that are all alike run only a few times, and `memlab.planner.repetition` adds the others. Where a
technique doesn't treat blocks alike (segments of √L), the whole depth runs.
"""

from dataclasses import dataclass, replace
from functools import cache

from memlab import train
from memlab.planner.repetition import NotRepeating, stretch
from memlab.trace import Trace

FEWEST_UNITS = 3  # that tell a rule from a coincidence


@dataclass(frozen=True)
class Measured:
    """What a step takes, in bytes."""

    allocated_bytes: int
    reserved_bytes: int | None  # None on the CPU, which has no caching allocator
    at_peak: dict[str, int]  # by category
    peak_phase: str
    stretched: bool  # from runs with fewer blocks; else the whole depth ran
    trace: Trace | None  # None where it was left behind


def measured(setting: train.Setting, names: str, *, unit: int = 1) -> Measured:
    """The second step of a training with these techniques, names of rows joined by "+".

    A setting's device is "cpu", or "cuda" or another target of `memlab.predict`. `unit` is the
    number of blocks that are treated as one, such as by a checkpoint of so many.

    Raises KeyError and ValueError as `train.combined` does.
    """
    return _answer(replace(setting, model=setting.config), names, unit)


@cache
def _answer(setting: train.Setting, names: str, unit: int) -> Measured:
    # Where block 0 is frozen no gradient leaves it, and it is unlike the others.
    units = FEWEST_UNITS + ("lora" in names.split("+"))
    fewer = shallow_blocks(setting.config.layers, unit, units)
    if fewer is None:
        return _measured(_run(setting, names), stretched=False)
    traces = (_run(_with_blocks(setting, count), names) for count in (fewer, fewer + unit))
    try:
        whole = stretch(*traces, fewer + unit, setting.config.layers, unit=unit)
    except NotRepeating:
        return _measured(_run(setting, names), stretched=False)
    return _measured(whole, stretched=True)


def shallow_blocks(blocks: int, unit: int = 1, units: int = FEWEST_UNITS) -> int | None:
    """How many blocks run at the least, and again with a unit more, so that whole units of them
    make `blocks`; None where that saves nothing."""
    if unit < 1:
        raise ValueError(f"got a unit of {unit} blocks; give at least 1")
    fewest = units * unit + blocks % unit
    return fewest if fewest + unit < blocks else None


def forget() -> None:
    """Let go of all answers, and of the shallow runs that they were made of."""
    _answer.cache_clear()
    _run.cache_clear()


def _with_blocks(setting: train.Setting, blocks: int) -> train.Setting:
    return replace(setting, model=replace(setting.config, layers=blocks))


@cache
def _run(setting: train.Setting, names: str) -> Trace:
    trace = train.dry_trace if setting.device == "cpu" else train.predicted_trace
    return trace(setting, train.combined(names))


def _measured(trace: Trace, *, stretched: bool) -> Measured:
    return Measured(
        trace.allocated_bytes,
        trace.reserved_bytes,
        trace.at_peak,
        trace.peak_phase,
        stretched,
        trace,
    )
