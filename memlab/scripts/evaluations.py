"""Find where a script evaluates its model, from outside.

An evaluation lasts from the first forward pass of a trained model in evaluation mode to its next
one in training mode. If a backward pass comes before, the script trains in evaluation mode.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memlab.metering.registry import REGISTRY
from memlab.trace import Trace


@dataclass
class Evaluation:
    """One evaluation.

    model      the class of the evaluated model
    gradients  whether a forward pass of it ran with gradients enabled
    first      the number of the newest storage when it began
    last       the same when it ended
    """

    model: str
    gradients: bool
    first: int
    last: float = math.inf


class Evaluations:
    """Collect the evaluations inside `watching()`."""

    def __init__(self) -> None:
        self.found: list[Evaluation] = []
        self._depth = 0  # of running modules

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward_ran(self) -> None:
        """Forget the running evaluation, because it trains."""
        if self.found and self.found[-1].last == math.inf:
            self.found.pop()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not any(weight.requires_grad for weight in module.parameters()):
            return
        running = self.found[-1] if self.found and self.found[-1].last == math.inf else None
        if module.training:
            if running:
                running.last = REGISTRY.last_number
        elif running:
            running.gradients |= torch.is_grad_enabled()
        else:
            gradients = torch.is_grad_enabled()
            name = type(module).__name__
            self.found.append(Evaluation(name, gradients, REGISTRY.last_number))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1


def evaluation_at_peak(trace: Trace, evaluations: list[Evaluation]) -> Evaluation | None:
    """Return the evaluation that the peak is in, or None."""
    newest = max((event.storage for event in trace.alive(trace.peak_position)), default=0)
    return next((each for each in evaluations if each.first < newest <= each.last), None)
