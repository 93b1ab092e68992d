"""Run a script as `memlab run` is asked to: as it is, then with changes that save memory."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from memlab.scripts.changes import Change, combinations_of, together
from memlab.scripts.launch import Launch
from memlab.scripts.ranks import run_ranks
from memlab.scripts.running import Announce, Outcome, run
from memlab.trace import Trace
from memlab.world.data.columns import Columns

NOTABLE_CHANGE = 0.99  # of the peak as it is


@dataclass(frozen=True)
class ScriptRun:
    """A script, and how to run it.

    device   to predict for; "cpu" makes a dry run of the CPU's step; None: run it for real
    ranks    to run; None: rank 0, and those of its pipeline that may differ

    The other fields are as in `run`.
    """

    launch: Launch
    device: str | None
    ranks: tuple[int, ...] | None
    steps: int
    gpus: int | None
    assume: str | None
    allow_writes: bool
    configs: Mapping[str, str]
    columns: Columns | None

    @property
    def is_real(self) -> bool:
        return self.device is None


class Trials(NamedTuple):
    """What changes do to a script's step.

    traces   by the names of the changes
    reasons  why the others do not work
    helpful  changes that save memory, the best first
    """

    traces: dict[str, Trace]
    reasons: dict[str, str]
    helpful: list[Change]


def outcomes_of(wanted: ScriptRun, announce: Announce) -> dict[int, Outcome]:
    """Run the script; return the outcomes by rank.

    A script that ends before the wanted step is run again, and measured from its start.
    """
    found = _run(wanted, announce=announce)
    outcome = found[highest(found)]
    if outcome.trace is None and outcome.steps:
        announce(f"the script ended after step {outcome.steps}; running it again")
        found = _run(replace(wanted, steps=outcome.steps), announce=announce)
    return found


def highest(outcomes: Mapping[int, Outcome]) -> int:
    """Return the rank that peaks highest, the first of several."""
    traces = {rank: outcome.trace for rank, outcome in outcomes.items()}
    peaks = {rank: -1 if each is None else each.allocated_bytes for rank, each in traces.items()}
    return max(peaks, key=lambda rank: (peaks[rank], -rank))


def try_changes(
    wanted: ScriptRun,
    plain: Outcome,
    changes: Sequence[Change],
    announce: Announce,
    describe: Callable[[Exception], str],
) -> Trials:
    """Run one rank's step again with each change, then with combinations of the helpful ones."""
    assert plain.trace is not None
    plain_bytes = plain.trace.allocated_bytes
    traces, reasons = dict[str, Trace](), dict[str, str]()
    again = replace(wanted, ranks=(plain.rank,), steps=plain.steps)

    def attempt(change: Change) -> None:
        announce(f"trying {change.name}")
        try:
            with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
                [outcome] = _run(again, change=change).values()  # it has printed all this
            assert outcome.trace is not None
            traces[change.name] = outcome.trace
        except Exception as error:  # a change may not suit the model
            reasons[change.name] = describe(error)

    def allocated(change: Change) -> int:
        return traces[change.name].allocated_bytes if change.name in traces else plain_bytes

    for change in changes:
        attempt(change)
    notable = NOTABLE_CHANGE * plain_bytes
    helpful = sorted((each for each in changes if allocated(each) < notable), key=allocated)
    for combination in combinations_of(helpful):
        attempt(together(combination))
    return Trials(traces, reasons, helpful)


def _run(wanted: ScriptRun, **more: Any) -> dict[int, Outcome]:
    settings = {**vars(wanted), "real": wanted.is_real, **more}
    launch, ranks = settings.pop("launch"), settings.pop("ranks")
    if wanted.is_real:
        return {0: run(launch, **settings)}
    found = run_ranks(launch, ranks or (), **settings)
    return found if ranks is None else {rank: found[rank] for rank in ranks}
