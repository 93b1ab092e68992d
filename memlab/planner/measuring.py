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


def measured(
    setting: train.Setting, names: str, *, unit: int = 1, ranks: int = 1, stage: int = 0
) -> Measured:
    """The second step of a training with these techniques, names of rows joined by "+".

    A setting's device is "cpu", or "cuda" or another target of `memlab.predict`. `unit` is the
    number of blocks that are treated as one, such as by a checkpoint of so many. Of several `ranks`
    it is what each takes, with the setting's batch, in a stage of ZeRO: stages 0 to 2 hold weights
    or gradients in one run of numbers, so the whole depth runs there.

    Raises KeyError and ValueError as `train.combined` does.
    """
    asked = _Asked(replace(setting, model=setting.config), names, ranks, stage)
    return _answer(asked, unit)


@dataclass(frozen=True)
class _Asked:
    """A training, whose depth is free."""

    setting: train.Setting
    names: str
    ranks: int
    stage: int

    def run(self, blocks: int | None = None) -> Trace:
        """With all its blocks, or so many."""
        config = self.setting.config
        return _run(self, config.layers if blocks is None else blocks)


@cache
def _answer(asked: _Asked, unit: int) -> Measured:
    blocks = asked.setting.config.layers
    # Where block 0 is frozen no gradient leaves it, and it is unlike the others.
    units = FEWEST_UNITS + ("lora" in asked.names.split("+"))
    fewer = shallow_blocks(blocks, unit, units)
    if fewer is None:
        return _measured(asked.run(), stretched=False)
    try:
        traces = asked.run(fewer), asked.run(fewer + unit)
        whole = stretch(*traces, fewer + unit, blocks, unit=unit)
    except NotRepeating:
        return _measured(asked.run(), stretched=False)
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
    _run_whole.cache_clear()


def _run(asked: _Asked, blocks: int) -> Trace:
    config = replace(asked.setting.config, layers=blocks)
    return _run_whole(replace(asked, setting=replace(asked.setting, model=config)))


@cache
def _run_whole(asked: _Asked) -> Trace:
    setting, technique = asked.setting, train.combined(asked.names)
    on_cpu = setting.device == "cpu"
    if asked.ranks == 1:
        return (train.dry_trace if on_cpu else train.predicted_trace)(setting, technique)
    share = setting, technique, asked.ranks, asked.stage
    return train.rank_step(*share).traces[0] if on_cpu else train.predicted_rank_trace(*share)


def _measured(trace: Trace, *, stretched: bool) -> Measured:
    return Measured(
        trace.allocated_bytes,
        trace.reserved_bytes,
        trace.at_peak,
        trace.peak_phase,
        stretched,
        trace,
    )
