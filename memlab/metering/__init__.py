"""Measure a training step's memory, on the CPU, on a GPU, or in a dry run."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from memlab.internals.cycles import no_cycle_collection
from memlab.internals.threads import measurement
from memlab.internals.torch_internals import (
    exclude_frame_from_dynamo,
    exclude_from_dynamo,
    refuse_inside_compiled_code,
)
from memlab.metering.device_stats import DeviceStats
from memlab.metering.devices import complete, monitor_for
from memlab.metering.dry import DryRun
from memlab.metering.limits import BudgetExceeded, budget
from memlab.metering.observer import formulas_note
from memlab.metering.storages import SCRATCH_NOTE, THREADS_NOTE, Change, StorageMeter
from memlab.trace import Trace

__all__ = ["BudgetExceeded", "budget", "measure", "meter"]


@exclude_from_dynamo
def measure(
    step: Callable[[], Any],
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    device: torch.device | str | None = None,
    lines: bool = False,
) -> Trace:
    """Run `step()` once and return its allocations and frees, by category and module.

    model, optimizer   counted from the start, even if the step does not touch them; without
                       them, modules, parameters and state are counted when first used
    device             the device to measure; by default the accelerator if the step uses one,
                       else the CPU
    lines              also record the Python line of each allocation (slower)

    Other threads are not measured. One that measures too waits until this has ended. Inside a
    function under torch.compile, the step runs as outside it.

    Raises TypeError for an invalid argument, and every exception that `step` raises. Inside
    `with dry_run():` nothing is computed.
    """
    with meter(model, optimizer, device=device, lines=lines, step=step) as running:
        step()
    return running.trace


class meter:  # noqa: N801 - used as a function: `with memlab.meter(model) as running:`
    """`measure` as a context manager; read `running.trace` afterwards, even if the body raised."""

    @exclude_from_dynamo
    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        *,
        device: torch.device | str | None = None,
        lines: bool = False,
        step: Callable[[], Any] | None = None,
        subject: Any = None,
        in_step: bool = False,
    ) -> None:
        """`subject` and `in_step` as in StorageMeter."""
        _check(model, optimizer, step)
        self._device = None if device is None else torch.device(device)
        self._monitor = monitor_for(self._device or _likely_device(model))
        self._storages = StorageMeter(
            model,
            optimizer,
            step=step,
            subject=subject,
            in_step=in_step,
            lines=lines,
            on_operator=self._monitor.tag,
        )
        self._trace: Trace | None = None

    @exclude_frame_from_dynamo
    def __enter__(self) -> "meter":
        refuse_inside_compiled_code("memlab.meter")
        with ExitStack() as stack:
            stack.enter_context(measurement())  # before the device's counters are reset
            self._monitor.start()
            stack.enter_context(self._storages)
            self._started = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._started.close()
        with no_cycle_collection():  # it would search thousands of live events
            self._trace = self._complete()

    def _complete(self) -> Trace:
        stats, changes = self._monitor.stop(), list(self._storages.changes())
        device = self._device or _main_device(changes)
        if device.type != stats.device.type or device.index not in (None, stats.device.index):
            stats = DeviceStats(device)  # the step ran on another device than the monitored one
        completed = complete(changes, stats)
        context = self._storages.context
        misses_scratch = stats.history is None and context.has_large_workspace
        return Trace(
            completed.events,
            device=device.type,
            dry=DryRun.active is not None,
            memory=completed.memory,
            notes=(
                *completed.notes,
                *([SCRATCH_NOTE] if misses_scratch else []),
                *([THREADS_NOTE] if self._storages.found_thread_gradients else []),
                *formulas_note(self._storages.nodes),
                *(DryRun.active.notes() if DryRun.active is not None else ()),
            ),
        )

    @property
    def trace(self) -> Trace:
        """The finished trace. Raises RuntimeError inside the `with` block."""
        if self._trace is None:
            raise RuntimeError("the trace is not complete yet; read it after the `with` block")
        return self._trace


def _check(model: Any, optimizer: Any, step: Any) -> None:
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"got a {type(model).__name__} as model; pass a torch.nn.Module")
    if isinstance(optimizer, torch.nn.Module):
        raise TypeError(f"got a {type(optimizer).__name__} as optimizer; pass modules as model=")
    if step is not None and not callable(step):
        raise TypeError(
            f"got a {type(step).__name__} as step; pass a function without arguments that runs one "
            f"training step, such as lambda: model(x).sum().backward()"
        )


def _main_device(changes: list[Change]) -> torch.device:
    """Return the accelerator with the most bytes, or the CPU if no accelerator has any."""
    held: Counter[torch.device] = Counter()
    for change in changes:
        held[change.record.device] += abs(change.bytes)
    accelerators = [device for device in held if device.type not in ("cpu", "meta")]
    candidates = accelerators or [d for d in held if held[d]] or [torch.device("cpu")]
    return max(candidates, key=held.__getitem__)


def _likely_device(model: torch.nn.Module | None) -> torch.device:
    """Return the model's device; without a model, the accelerator if there is one."""
    cpu = torch.device("cpu")
    if DryRun.active is not None:
        return cpu
    parameter = None if model is None else next(model.parameters(), None)
    if parameter is not None:
        return parameter.device
    return torch.accelerator.current_accelerator(check_available=True) or cpu
