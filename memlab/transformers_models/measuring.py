"""Predict the second step of a deep transformers model from shallow ones.

Equal layers do equal things, so models with the first few layers of each stack are run,
and the rest is extrapolated (memlab.planner.repetition). Stacks of equal layers, such as an encoder
and a decoder, are shortened together; others one after another, which takes twice as many runs for
each. If the shallow runs establish no rule, the whole model runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from memlab.planner.cards import Card
from memlab.planner.measuring import Measured, shallow_blocks, summarized
from memlab.planner.repetition import NotRepeating, extrapolate
from memlab.planner.roofline import Roofline
from memlab.prediction import predict
from memlab.trace import Trace
from memlab.transformers_models.recipes import Recipe
from memlab.transformers_models.structure import Stack
from memlab.transformers_models.training import Training, quiet

Depths = dict[str, int]  # layers to keep, by the stack's path
_UNITS = 3  # repetitions that establish a rule


class Prediction(NamedTuple):
    """The bytes of a step, and the estimated seconds by what bounds them."""

    measured: Measured
    seconds: dict[str, float]


class _Run(NamedTuple):
    trace: Trace
    seconds: dict[str, float]


def predicted(training: Training, recipe: Recipe, target: str, card: Card) -> Prediction:
    """Predict the second step on a target of `memlab.predict`, and estimate its time on a card.

    Raises what building the model or running the step raises.
    """
    runs = _Runs(training, recipe, target, card)
    groups = [group for group in _equal_stacks(training.stacks) if _shallow(group[0]) is not None]
    try:
        whole = runs.stretched(groups, {})
        extrapolated = bool(groups)
    except NotRepeating:
        whole, extrapolated = runs.run({}), False
    return Prediction(summarized(whole.trace, extrapolated=extrapolated), whole.seconds)


def _equal_stacks(stacks: tuple[Stack, ...]) -> list[list[Stack]]:
    """Group the stacks with as many layers, alike in the same way."""

    def shape(stack: Stack) -> tuple[int, ...]:
        return stack[1:]

    return [list(group) for _, group in groupby(sorted(stacks, key=shape), key=shape)]


def _shallow(stack: Stack) -> int | None:
    """Return the smaller number of layers to run; None if running all is as fast."""
    fewer = shallow_blocks(stack.count - stack.head, stack.unit, _UNITS)
    return None if fewer is None else stack.head + fewer


@dataclass
class _Runs:
    """Runs a training at several depths."""

    training: Training
    recipe: Recipe
    target: str
    card: Card

    def stretched(self, groups: list[list[Stack]], depths: Depths) -> _Run:
        """Return the run with the stacks of these groups at their full depth."""
        if not groups:
            return self.run(depths)
        group, *others = groups
        stack = group[0]
        fewer = _shallow(stack)
        assert fewer is not None
        more = fewer + stack.unit
        short, long = (
            self.stretched(others, depths | dict.fromkeys((each.path for each in group), depth))
            for depth in (fewer, more)
        )
        trace = extrapolate(short.trace, long.trace, more, stack.count, unit=stack.unit)
        added = (stack.count - more) // stack.unit
        seconds = {
            bound: long.seconds[bound] * (added + 1) - short.seconds.get(bound, 0) * added
            for bound in long.seconds
        }
        return _Run(trace, seconds)

    def run(self, depths: Mapping[str, int]) -> _Run:
        """Run a model whose stacks have these depths, by default all their layers."""
        roofline = Roofline(self.card)

        def build() -> tuple:
            step, model, optimizer = self.training.build(self.recipe, depths=depths)
            return roofline.counted(step), model, optimizer

        with quiet():
            return _Run(predict(build, device=self.target), roofline.seconds)
