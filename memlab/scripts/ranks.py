"""Run several ranks of a script, one after another.

Of a pipeline's ranks, those run that may differ: the first stage, the last one, and of stages with
the same weights between them the first. In torch's schedules it starts the most micro-batches
before its first backward, so it keeps the most activations of them. If the first rank and the last
one send each other tensors, each rank has several stages, and every rank runs: their order counts.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.scripts.launch import Launch
from memlab.scripts.running import Outcome, run
from memlab.world.isolation import environment
from memlab.world.messages import Messages, NotYetSentError
from memlab.world.processes import Processes

MOST_STAGES = 64  # of a pipeline; a larger group sends from anybody to anybody

Weights = tuple[tuple[tuple[int, ...], str], ...]  # shapes and dtypes


class Ranks:
    """The ranks of a script that have run, and what they have sent each other.

    same    ranks that need not run, each with the one that has its weights
    """

    def __init__(self, launch: Launch, **settings: Any) -> None:
        self._launch, self._settings = launch, settings
        self.announce = settings.get("announce", lambda stage: None)
        self._messages = Messages()
        self.outcomes: dict[int, Outcome] = {}
        # With 405B on 16 stages, stages 1 to 14 peak at 21.85, 21.58, … 18.36 GB, in equal steps.
        # So three ranks run (91 s) and not all 16 (426 s);
        # test_of_stages_with_the_same_weights_the_first_runs has a small case.
        self.same: dict[int, int] = {}

    def run(self, rank: int, waiting: tuple[int, ...] = ()) -> Outcome:
        """Run a rank, and before it those whose objects it waits for."""
        while rank not in self.outcomes:
            try:
                self.outcomes[rank] = self._outcome(rank)
            except NotYetSentError as error:
                if error.sender in waiting:  # it goes on with what this rank has sent
                    raise
                self._provide(error, rank, waiting)
        return self.outcomes[rank]

    def _provide(self, error: NotYetSentError, rank: int, waiting: tuple[int, ...]) -> None:
        """Get what the rank waits for: from the sender, or from the one that ran instead of it."""
        sender = error.sender
        known = self._messages.sent(sender, rank)
        if self.same.get(sender) in self.outcomes:
            self._messages.repeat(self.same[sender], sender, rank)
            if self._messages.sent(sender, rank) > known:
                return
        try:
            self.run(sender, (*waiting, rank))
        except NotYetSentError:
            if self._messages.sent(sender, rank) <= known:
                raise

    def _outcome(self, rank: int, **changed: Any) -> Outcome:
        launch = replace(self._launch, rank=rank)
        return run(launch, messages=self._messages, **{**self._settings, **changed})

    def weights(self, rank: int) -> Weights | None:
        """Return the weights of the rank's first optimizer, which it runs up to; None if it makes
        none before it waits for another rank."""
        try:
            outcome = self._outcome(rank, steps=0, announce=lambda stage: None)
        except NotYetSentError:
            return None
        groups = [group for each in outcome.optimizers for group in each.param_groups]
        shapes = [(tuple(w.shape), str(w.dtype)) for group in groups for w in group["params"]]
        return tuple(shapes) or None


@contextmanager
def as_rank_0(script: Path, ranks: int) -> Iterator[None]:
    """Let a function of the script be rank 0 of several inside `with`, in a dry run or prediction.

    The process group that it makes sends nothing, and is destroyed at the end.
    """
    launch = Launch(str(script)).with_ranks(ranks)
    processes = Processes(launch.ranks, lambda stage: None, real=False, joins=False)
    with environment(launch.environment), processes.in_this_one(), Messages().active(0):
        yield


def run_ranks(launch: Launch, ranks: Sequence[int] = (), **settings: Any) -> dict[int, Outcome]:
    """Run these ranks, and those whose objects they wait for; return the outcomes of all.

    Without `ranks`, rank 0 runs, and those ranks of its pipeline that may differ from it and from
    each other; `Outcome.alike` names the others. `settings` as in `run`.

    Raises NotYetSentError if two ranks wait for each other.
    """
    all_ranks = Ranks(launch, **settings)
    for rank in ranks:
        all_ranks.run(rank)
    if not ranks:
        _follow(all_ranks, 0)
    return {
        rank: replace(
            outcome, alike=tuple(other for other, ran in all_ranks.same.items() if ran == rank)
        )
        for rank, outcome in sorted(all_ranks.outcomes.items())
    }


def _follow(all_ranks: Ranks, start: int) -> None:
    """Run `start`, the ranks that it sends tensors to or receives them from, and so on."""
    followed, seen = [start], {start}
    while followed:
        outcome = all_ranks.run(followed.pop(0))
        exchanges = [each for each in outcome.transfers if each.kind in ("send", "receive")]
        for group in sorted({each.group for each in exchanges}):
            found = {rank for each in exchanges if each.group == group for rank in each.ranks}
            if len(group) <= MOST_STAGES:
                if not (outcome.rank == group[0] and group[-1] in found and len(group) > 2):
                    all_ranks.same |= _same_weights(all_ranks, group, seen)
                found = set(group)
            followed += sorted(found - seen - set(all_ranks.same))
            seen |= found


def _same_weights(all_ranks: Ranks, group: Sequence[int], seen: Set[int]) -> dict[int, int]:
    """Return the stages between the ends that have the weights of an earlier one, each with it."""
    between = [rank for rank in group[1:-1] if rank not in seen]
    if len(between) < 2:
        return {}
    all_ranks.announce(f"comparing the weights of {len(between)} stages between the ends")
    same: dict[int, int] = {}
    first: dict[Weights, int] = {}
    for rank in between:
        weights = all_ranks.weights(rank)
        if weights is not None and first.setdefault(weights, rank) != rank:
            same[rank] = first[weights]
    return same
