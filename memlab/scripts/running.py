"""Run a script unmodified until its second step has ended, and return that step's trace.

Nothing is computed by default: all tensors are fake, on the CPU or on a GPU that need not exist.
"""

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from memlab.dry_runs import dry_run
from memlab.dry_runs.fake_accelerator import default_device
from memlab.dry_runs.transfers import Transfer
from memlab.internals.imports import of_a_new_process
from memlab.metering import meter
from memlab.metering.dry import DryRun
from memlab.metering.storages import StorageMeter
from memlab.prediction import PredictedRun
from memlab.scripts import saved_files
from memlab.scripts.changes import Change, applied
from memlab.scripts.evaluations import Evaluation, highest_evaluation
from memlab.scripts.launch import Launch
from memlab.scripts.steps import Finished, StepWatcher
from memlab.trace import Trace
from memlab.world import data, extensions
from memlab.world.data.columns import Columns
from memlab.world.isolation import Isolation, environment
from memlab.world.messages import Messages
from memlab.world.processes import Processes

Announce = Callable[[str], object]


@dataclass(frozen=True)
class Outcome:
    """What a run found.

    trace        of the last step; None if the script ended before
    steps        that the script took
    backwards    gradients that it computed
    models       modules that it called, outermost only, with weights
    optimizers   that stepped; without steps, the one that was made
    framework    whose loop ran: Trainer, Lightning, accelerate or plain
    ranks        processes of the training; None: it is not distributed
    rank         of the process that ran
    alike        ranks that did not run, because their stages have the weights of this one's
    transfers    what that rank sent to others in its last step; empty for a real run
    notes        what was redirected, refused or replaced, one sentence each
    attempts     all that was redirected or refused: what it is, and to what
    evaluation   with the highest peak in the step or before it, if there was one
    """

    trace: Trace | None
    steps: int
    backwards: int
    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    framework: str
    ranks: int | None
    rank: int
    transfers: tuple[Transfer, ...]
    notes: tuple[str, ...]
    attempts: tuple[tuple[str, str], ...] = ()
    alike: tuple[int, ...] = ()
    evaluation: Evaluation | None = None


class _Metering(Protocol):
    """Meters a script: its history, then one step."""

    history: Any  # a StorageMeter or a PredictionMeter
    transfers: tuple[Transfer, ...]  # of the step

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> None: ...

    def begin_step(self, optimizers: Any, in_step: bool) -> None: ...

    def end_step(self) -> Trace: ...


def run(
    launch: Launch,
    *,
    device: str | None = "cuda",
    gpus: int | None = None,
    steps: int = 2,
    real: bool = False,
    assume: str | None = None,
    allow_writes: bool = False,
    configs: Mapping[str, str] | None = None,
    columns: Columns | None = None,
    change: Change | None = None,
    announce: Announce = lambda stage: None,
    messages: Messages | None = None,
) -> Outcome:
    """Run a script until `steps` steps have ended.

    device   of the prediction, as in `memlab.predict`; "cpu" makes a dry run of the CPU's step
    steps    until the script ends; 0 ends it when it has made its first optimizer, without a trace
    gpus     that a prediction's script finds; by default one for each rank on a node
    real     compute, on the device that the script uses; under torchrun, together with other ranks
    configs  paths of missing models' config.json, by name
    columns  columns of missing data sets
    messages of other ranks that have run; change: to the model and optimizers before they train

    Raises what the script raises before its last step has ended, noting what was refused.
    """
    joins = joins_others(launch, real=real)
    started = Processes(launch.ranks, announce, real=real, joins=joins)
    isolation, stand_ins = Isolation(), data.StandIns(configs, columns)
    metering = _metering(launch, device, gpus, real, assume)
    watcher, traces = _watcher(launch, steps, metering, announce)
    with ExitStack() as stack:
        stack.enter_context(metering)
        stack.enter_context(isolation.active(allow_writes=allow_writes))
        if not allow_writes:
            stack.enter_context(saved_files.redirected(real=real))
        stack.enter_context(extensions.refused(real=real, allow_writes=allow_writes))
        stack.enter_context(started.in_this_one())
        if not joins:
            stack.enter_context((messages or Messages()).active(launch.rank))
        stack.enter_context(stand_ins.active())
        stack.enter_context(watcher.watching())
        stack.enter_context(applied(change, watcher.replaceable))
        with isolation.refusals_noted():
            _run(launch, watcher, started)
        roots = metering.history.context.names.roots
    notes = (*isolation.notes(), *stand_ins.notes())
    rank = int(os.environ["RANK"]) if joins else launch.rank
    outcome = _outcome(traces, watcher, metering, roots, started.ranks, rank, notes)
    return replace(outcome, attempts=tuple(isolation.attempts()))


def joins_others(launch: Launch, *, real: bool) -> bool:
    """Return whether this process is one of a launcher's ranks, and meets the others."""
    return real and launch.ranks is None and dist.is_torchelastic_launched()


def _metering(
    launch: Launch, device: str | None, gpus: int | None, real: bool, assume: str | None
) -> _Metering:
    if real or device == "cpu":
        return _Measured(real, assume)
    return _Predicted(device, gpus or launch.ranks or launch.visible_gpus or 1, assume)


def _watcher(
    launch: Launch, steps: int, metering: _Metering, announce: Announce
) -> tuple[StepWatcher, list[Trace]]:
    """Return what watches the steps, and the list that will have the trace of the last one."""
    traces: list[Trace] = []
    of_rank = f" on rank {launch.rank}" if (launch.ranks or 1) > 1 else ""
    watcher = StepWatcher(
        steps,
        on_begin=lambda in_step: metering.begin_step(watcher.optimizers, in_step),
        on_end=lambda: traces.append(metering.end_step()),
        on_step=lambda number: announce(f"step {number} ended{of_rank}"),
    )
    return watcher, traces


def _outcome(
    traces: list[Trace],
    watcher: StepWatcher,
    metering: _Metering,
    roots: list[torch.nn.Module],
    ranks: int | None,
    rank: int,
    notes: tuple[str, ...],
) -> Outcome:
    trace = traces[0] if traces else None
    return Outcome(
        trace,
        watcher.finished,
        watcher.backwards,
        tuple(root for root in roots if next(root.parameters(), None) is not None),
        tuple(watcher.optimizers),
        watcher.framework,
        ranks,
        rank,
        metering.transfers,
        notes,
        evaluation=highest_evaluation(trace, watcher.evaluations.found) if trace else None,
    )


def _run(launch: Launch, watcher: StepWatcher, started: Processes) -> None:
    """Run the script as `__main__`. What it raises after its last wanted step does not matter."""
    try:
        with _as_python_starts_it(launch), environment(launch.environment):
            if launch.is_module:
                runpy.run_module(launch.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(launch.script), run_name="__main__")
            started.run_waiting()
    except Finished:
        pass
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        if error.code not in (None, 0) and not watcher.has_ended:
            raise
    except BaseException:
        if not watcher.has_ended:
            raise


@contextmanager
def _as_python_starts_it(launch: Launch) -> Iterator[None]:
    folders, arguments = sys.path[:], sys.argv
    sys.path.insert(0, str(launch.folder))
    sys.argv = [launch.script, *launch.arguments]
    try:
        with of_a_new_process(launch.folder), _torchs_defaults_restored():
            yield
    finally:
        sys.path[:], sys.argv = folders, arguments


@contextmanager
def _torchs_defaults_restored() -> Iterator[None]:
    dtype, device = torch.get_default_dtype(), default_device()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if default_device() != device:
            torch.set_default_device(device)


class _Predicted:
    """Predicts the script for a GPU."""

    transfers: tuple[Transfer, ...] = ()

    def __init__(self, device: str | None, gpus: int, assume: str | None) -> None:
        self._run = PredictedRun(device=device or "cuda", assume=assume, gpus=gpus)

    def __enter__(self) -> "_Predicted":
        self._run.__enter__()
        self.history = self._run.history
        return self

    def __exit__(self, *exception: Any) -> None:
        self._run.__exit__(*exception)

    def begin_step(self, optimizers: Any, in_step: bool) -> None:
        self._run.begin_step(None, optimizers, subject=self, in_step=in_step, lines=True)
        active: Any = DryRun.active
        self._sent = len(active.transfers)

    def end_step(self) -> Trace:
        active: Any = DryRun.active
        self.transfers = tuple(active.transfers[self._sent :])
        return self._run.end_step()


class _Measured:
    """Measures the script, for real or on the CPU's fake tensors."""

    transfers: tuple[Transfer, ...] = ()

    def __init__(self, real: bool, assume: str | None) -> None:
        self._dry_run = None if real else dry_run(assume=assume)

    def __enter__(self) -> "_Measured":
        self._stack = ExitStack()
        if self._dry_run is not None:
            self._stack.enter_context(self._dry_run)
        self.history = StorageMeter(subject=self)
        self._metering = self._stack.enter_context(ExitStack())
        self._metering.enter_context(self.history)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def begin_step(self, optimizers: Any, in_step: bool) -> None:
        self._metering.close()
        self._meter = meter(optimizer=optimizers, subject=self, in_step=in_step, lines=True)
        self._metering.enter_context(self._meter)
        self._sent = len(self._dry_run.transfers) if self._dry_run else 0

    def end_step(self) -> Trace:
        if self._dry_run is not None:
            self.transfers = tuple(self._dry_run.transfers[self._sent :])
        self._metering.close()
        return self._meter.trace
