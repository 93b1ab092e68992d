"""Find where a script evaluates its model, from outside.

An evaluation lasts from the first forward pass of a trained model in evaluation mode until the
script returns to training mode. If a backward pass comes before, it trains in evaluation mode.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memlab.internals.replacing import replaced
from memlab.metering.compiled import runs_reported
from memlab.metering.context import follow_modules
from memlab.metering.registry import REGISTRY
from memlab.trace import Trace


def is_trained(module: nn.Module) -> bool:
    """Return whether a weight of the module needs gradients."""
    return any(weight.requires_grad for weight in module.parameters())


@dataclass
class Evaluation:
    """One evaluation.

    model      the class of the evaluated model
    gradients  whether a forward pass of it ran with gradients enabled
    first      the number of the newest storage when it began
    last       the same when it ended
    peak_bytes alive at once; 0 if unknown
    """

    model: str
    gradients: bool
    first: int
    last: float = math.inf
    peak_bytes: int = 0


class Evaluations:
    """Collect the evaluations inside `watching()`."""

    def __init__(self) -> None:
        self.found: list[Evaluation] = []
        self._depth = 0  # of running modules
        self._handles: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._follow_modules(True)
        try:
            with (
                replaced({(nn.Module, "train"): self._noting_mode}),
                runs_reported(lambda is_running: self._follow_modules(not is_running)),
            ):
                yield
        finally:
            self._follow_modules(False)

    def _follow_modules(self, wanted: bool) -> None:
        follow_modules(wanted, self._handles, self._enter, self._leave)

    def backward_ran(self) -> None:
        """Forget the running evaluation, because it trains."""
        if self._running:
            self.found.pop()

    @property
    def _running(self) -> Evaluation | None:
        return self.found[-1] if self.found and self.found[-1].last == math.inf else None

    def _noting_mode(self, train: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def noted(module: nn.Module, mode: bool = True) -> nn.Module:
            if mode:
                self._end()
            return train(module, mode)

        return noted

    def _end(self) -> None:
        if self._running:
            self._running.last = REGISTRY.last_number

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not is_trained(module):
            return
        if module.training:
            self._end()
        elif self._running:
            self._running.gradients |= torch.is_grad_enabled()
        else:
            gradients = torch.is_grad_enabled()
            name = type(module).__name__
            self.found.append(Evaluation(name, gradients, REGISTRY.last_number))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1


def highest_evaluation(trace: Trace, evaluations: list[Evaluation]) -> Evaluation | None:
    """Return the evaluation with the highest peak in the step or before it, with its bytes."""
    peaks = [0] * len(evaluations)
    firsts = [evaluation.first for evaluation in evaluations]
    for events in (trace.history, trace.events):
        running = newest = 0
        for event in events:
            running += event.bytes
            newest = max(newest, event.storage)
            number = bisect_left(firsts, newest) - 1
            if event.phase != "before" and number >= 0 and newest <= evaluations[number].last:
                peaks[number] = max(peaks[number], running)
    found = (replace(e, peak_bytes=peak) for e, peak in zip(evaluations, peaks, strict=True))
    return max(found, key=lambda evaluation: evaluation.peak_bytes, default=None)
