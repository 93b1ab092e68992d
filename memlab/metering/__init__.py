"""Producers of Traces: what a step allocates, on this machine, on fake tensors, on a device."""

from collections.abc import Callable
from typing import Any

import torch

from memlab.metering.fake import dry_run
from memlab.metering.storages import RECURRENT_NOTE, Change, StorageMeter
from memlab.trace import Trace

__all__ = ["dry_run", "measure", "meter"]


def measure(
    step: Callable[[], Any],
    *,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    device: torch.device | str | None = None,
    lines: bool = False,
) -> Trace:
    """Run `step()` once and return every allocation and free of it, by category and module."""
    with meter(model, optimizer, device=device, lines=lines, step=step) as running:
        step()
    return running.trace


class meter:  # noqa: N801 - used as a function: `with memlab.meter(model) as running:`
    """`measure` as a context manager; `.trace` afterwards, also when the body raised."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        *,
        device: torch.device | str | None = None,
        lines: bool = False,
        step: Callable[[], Any] | None = None,
    ) -> None:
        self._storages = StorageMeter(model, optimizer, step=step, lines=lines)

    def __enter__(self) -> "meter":
        self._storages.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._storages.__exit__(*exception)
        changes = list(self._storages.changes())
        self.trace = Trace(
            tuple(change.record.event(change.bytes, change.phase) for change in changes),
            dry=dry_run.active is not None,
        )
