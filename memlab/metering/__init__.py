"""The meter: the Trace of a training step, on the CPU, on a GPU, or inside a dry run."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from memlab.metering.answers import Answers
from memlab.metering.cycles import no_cycle_collection
from memlab.metering.devices import complete, watch
from memlab.metering.dry import DryRun
from memlab.metering.limits import BudgetExceeded, budget
from memlab.metering.observer import formulas_note
from memlab.metering.storages import THREADS_NOTE, Change, StorageMeter
from memlab.trace import Trace

__all__ = ["BudgetExceeded", "budget", "measure", "meter"]

SCRATCH_NOTE = (
    "the scratch that kernels take while they run is not in here; that of convolutions and "
    "recurrent layers can raise the real peak by a quarter (metering.profiler_recording adds it)"
)


def measure(
    step: Callable[[], Any],
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    device: torch.device | str | None = None,
    lines: bool = False,
) -> Trace:
    """Run `step()` once and return every allocation and free of it, by category and module.

    model, optimizer   count from the start, touched or not; without them, modules are found as
                       they are called, and parameters and state as they are used
    device             whose memory is counted; without it, the accelerator's if the step uses
                       one, else the CPU's
    lines              also note the Python line of each allocation (slower)

    Raises whatever `step` raises, and TypeError for what is no step, model or optimizer. Inside
    `with dry_run():` nothing is computed.
    """
    with meter(model, optimizer, device=device, lines=lines, step=step) as running:
        step()
    return running.trace


class meter:  # noqa: N801 - used as a function: `with memlab.meter(model) as running:`
    """`measure` as a context manager: `running.trace` afterwards, also when the body raised."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        *,
        device: torch.device | str | None = None,
        lines: bool = False,
        step: Callable[[], Any] | None = None,
    ) -> None:
        _check(model, optimizer, step)
        self._device = None if device is None else torch.device(device)
        self._watch = watch(self._device or _likely_device(model))
        self._storages = StorageMeter(
            model, optimizer, step=step, lines=lines, on_operator=self._watch.mark
        )
        self._trace: Trace | None = None

    def __enter__(self) -> "meter":
        self._watch.start()
        self._storages.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._storages.__exit__(*exception)
        with no_cycle_collection():  # of 10,000 events, none is garbage yet
            self._trace = self._complete()

    def _complete(self) -> Trace:
        answers, changes = self._watch.stop(), list(self._storages.changes())
        device = self._device or _main_device(changes)
        if device.type != answers.device.type or device.index not in (None, answers.device.index):
            answers = Answers(device)  # the step ran elsewhere than we watched
        completed = complete(changes, answers)
        context = self._storages.context
        is_dry = DryRun.active is not None
        leaves_scratch_out = answers.history is None and context.has_much_scratch
        return Trace(
            completed.events,
            device=device.type,
            dry=is_dry,
            memory=completed.memory,
            notes=(
                *completed.notes,
                *([SCRATCH_NOTE] if leaves_scratch_out else []),
                *([THREADS_NOTE] if self._storages.found_unseen_gradients else []),
                *formulas_note(self._storages.nodes),
                *(DryRun.active.notes() if is_dry else ()),
            ),
        )

    @property
    def trace(self) -> Trace:
        """What was metered; RuntimeError while metering still goes on."""
        if self._trace is None:
            raise RuntimeError("the trace is complete only after the `with` block; read it there")
        return self._trace


def _check(model: Any, optimizer: Any, step: Any) -> None:
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"got a {type(model).__name__} as model; give the torch.nn.Module itself")
    if isinstance(optimizer, torch.nn.Module):
        raise TypeError(f"got a module, {type(optimizer).__name__}, as optimizer; name it model=")
    if step is not None and not callable(step):
        raise TypeError(
            f"got a {type(step).__name__} as step; give a function of no arguments that takes one "
            f"training step, such as lambda: model(x).sum().backward()"
        )


def _main_device(changes: list[Change]) -> torch.device:
    """The accelerator that holds the most bytes; the CPU where no accelerator holds any."""
    held: Counter[torch.device] = Counter()
    for change in changes:
        held[change.record.device] += abs(change.bytes)
    accelerators = [device for device in held if device.type not in ("cpu", "meta")]
    candidates = accelerators or [d for d in held if held[d]] or [torch.device("cpu")]
    return max(candidates, key=held.__getitem__)


def _likely_device(model: torch.nn.Module | None) -> torch.device:
    """Where the step will run: where the model is, else on the accelerator if there is one."""
    cpu = torch.device("cpu")
    if DryRun.active is not None:
        return cpu
    parameter = None if model is None else next(model.parameters(), None)
    if parameter is not None:
        return parameter.device
    return torch.accelerator.current_accelerator(check_available=True) or cpu
