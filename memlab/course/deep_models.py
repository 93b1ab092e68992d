"""Traces of deep models for lessons, in a third of the time: three and four blocks run."""

from collections.abc import Callable
from dataclasses import replace

from memlab.configs import GPTConfig
from memlab.planner.repetition import NotRepeating, extrapolate
from memlab.trace import Trace
from memlab.train import Plugs, Setting, Technique, dry_trace

_FEW, _MORE = 3, 4  # three repetitions establish a rule, as in memlab.planner


def trace_of_blocks(run: Callable[[GPTConfig], Trace], config: GPTConfig) -> Trace:
    """Return `run(config)`, exact to the byte, from runs with three and four blocks.

    Equal blocks do equal things. If the two runs differ by more than a block, or the model has no
    more than four, all blocks run.
    """
    if config.layers <= _MORE:
        return run(config)
    few, more = (run(replace(config, layers=layers)) for layers in (_FEW, _MORE))
    try:
        return extrapolate(few, more, _MORE, config.layers)
    except NotRepeating:
        return run(config)


def dry_trace_of_blocks(setting: Setting, technique: Technique | Plugs) -> Trace:
    """Return `dry_trace(setting, technique)`; see `trace_of_blocks`."""

    def run(config: GPTConfig) -> Trace:
        return dry_trace(replace(setting, model=config), technique)

    return trace_of_blocks(run, setting.config)
