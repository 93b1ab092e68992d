"""Dry traces of deep models for lessons, in a third of the time."""

from dataclasses import replace

from memlab.planner.repetition import NotRepeating, extrapolate
from memlab.trace import Trace
from memlab.train import Plugs, Setting, Technique, dry_trace

_FEW, _MORE = 3, 4  # blocks of the runs; the planner's tests hold that 3 establish a rule


def dry_trace_of_blocks(setting: Setting, technique: Technique | Plugs) -> Trace:
    """Return `dry_trace(setting, technique)` to the byte, from models of three and four blocks.

    Equal blocks do equal things. If the technique treats some blocks differently, or there are no
    more than four, all of them run.
    """
    config = setting.config
    if config.layers <= _MORE:
        return dry_trace(setting, technique)
    shallow = (replace(setting, model=replace(config, layers=n)) for n in (_FEW, _MORE))
    try:
        return extrapolate(*(dry_trace(each, technique) for each in shallow), _MORE, config.layers)
    except NotRepeating:
        return dry_trace(setting, technique)
