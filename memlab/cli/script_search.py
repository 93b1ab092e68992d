"""Predict a user's training, then with more and more techniques, until it fits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

import memlab
from memlab.allocator.capacity import needed_bytes
from memlab.cli.errors import UsageError
from memlab.cli.rows import Announce, Row
from memlab.cli.script import Script, measured, predicted
from memlab.cli.script_sizes import Limits, find_limits, no_sizes
from memlab.planner import Card
from memlab.planner.outside import AS_IT_IS, Attempt, Parts, Places, attempts, find
from memlab.planner.roofline import Roofline
from memlab.trace import Trace


class ScriptSearch(NamedTuple):
    """The attempts up to the first that fits, and the places where techniques can be applied."""

    rows: list[Row]
    needed: dict[str, int]  # bytes that the device must have, by row
    chosen: Attempt | None
    places: Places
    plain: Roofline | None  # times of the unmodified step; None on a CPU
    seconds: dict[str, dict[str, float]]  # estimated, by row and bound; empty on a CPU
    limits: Limits = Limits()

    @property
    def has_times(self) -> bool:
        """Return True if any estimated time can be compared."""
        return any(row.estimated_time_ratio for row in self.rows)


def search(
    script: Script, target: str, budget: int, card: Card, announce: Announce
) -> ScriptSearch:
    """Predict one attempt after another until one fits. Combinations with a technique that needs
    more memory by itself come last. A CPU gets no time estimates."""
    found: list[Places] = []

    def find_places(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        found.append(find(model, optimizer))
        return step, model, optimizer

    plain = None if target == "cpu" else Roofline(card)
    trace = _trace(script, target, AS_IT_IS.name, find_places, plain, announce)
    rows = [Row(AS_IT_IS.name, trace)]
    needed = {AS_IT_IS.name: needed_bytes(trace, budget)}
    [places] = found
    seconds = {AS_IT_IS.name: dict(plain.seconds)} if plain else {}
    if needed[AS_IT_IS.name] <= budget:
        return ScriptSearch(rows, needed, AS_IT_IS, places, plain, seconds)
    order = _Order(places)
    for attempt in order:
        changed = plain and Roofline(card)
        try:
            trace = _trace(script, target, attempt.name, attempt.applied, changed, announce)
        except UsageError as error:
            rows.append(Row(attempt.name, failure=str(error)))
            order.failed(attempt)
            continue
        ratio = changed.total / plain.total if changed and plain and plain.total else None
        seconds |= {attempt.name: dict(changed.seconds)} if changed else {}
        rows.append(Row(attempt.name, trace, estimated_time_ratio=ratio))
        needed[attempt.name] = needed_bytes(trace, budget)
        if needed[attempt.name] <= budget:
            return ScriptSearch(rows, needed, attempt, places, plain, seconds)
        if needed[attempt.name] > needed[AS_IT_IS.name]:
            order.harmed(attempt)
    return ScriptSearch(rows, needed, None, places, plain, seconds)


def with_limits(
    found: ScriptSearch, script: Script, target: str, budget: int, announce: Announce
) -> ScriptSearch:
    """Add the largest batch and length of the attempt that fits, if the script takes them."""
    chosen = found.chosen
    if chosen is None:
        return found
    if not script.sizes:
        return found._replace(limits=Limits(remarks=(no_sizes(str(script)),)))

    def needed(arguments: dict[str, int]) -> int:
        changed = replace(script, arguments=arguments)
        name = ", ".join(f"{name} {value}" for name, value in arguments.items())
        return needed_bytes(_trace(changed, target, name, chosen.applied, None, announce), budget)

    limits = find_limits(needed, script.sizes, found.needed[chosen.name], budget)
    return found._replace(limits=limits)


class _Order:
    """The attempts for a training, without those whose technique failed alone. Those whose
    technique needs more memory by itself come last."""

    def __init__(self, places: Places) -> None:
        self._attempts = attempts(places)
        self._failed: set[str] = set()
        self._harmful: set[str] = set()

    def __iter__(self) -> Iterator[Attempt]:
        postponed: list[Attempt] = []
        for attempt in chain(self._attempts, postponed):
            names = {each.name for each in attempt.wrappers}
            if self._failed & names:
                continue
            if self._harmful & names and attempt not in postponed:
                postponed.append(attempt)
                continue
            yield attempt

    def failed(self, attempt: Attempt) -> None:
        """Leave out the technique from now on, if it was tried alone."""
        if len(attempt.wrappers) == 1:
            self._failed.add(attempt.name)

    def harmed(self, attempt: Attempt) -> None:
        """Try the technique last from now on, if it was tried alone."""
        if len(attempt.wrappers) == 1:
            self._harmful.add(attempt.name)


def _trace(
    script: Script,
    target: str,
    name: str,
    change: Callable[..., Parts],
    roofline: Roofline | None,
    announce: Announce,
) -> Trace:
    """Predict the second step after a change to the training, and count its seconds."""

    def counted(*parts: Any) -> Parts:
        step, model, optimizer = change(*parts)
        return (roofline.counted(step) if roofline else step), model, optimizer

    announce_stage = partial(_announce_stage, announce, name)
    if target == "cpu":
        with memlab.dry_run(assume=script.assume):
            return measured(script, None, announce_stage, counted)
    return predicted(script, target, announce_stage, counted)


def _announce_stage(announce: Announce, name: str, stage: str) -> None:
    announce(f"{name}: {stage}")
