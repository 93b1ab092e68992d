"""Find where a script evaluates its model, from outside.

An evaluation lasts from the first forward pass of a trained model in evaluation mode to its next
one in training mode. If a backward pass comes before, the script trains in evaluation mode.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


def highest_evaluation(trace: Trace, evaluations: list[Evaluation]) -> Evaluation | None:
    """Return the evaluation that the peak of the step is in, or of what ran before if that is
    higher; None if it is in none. `peak_bytes` is set."""
    before = replace(trace, events=trace.history)
    highest = max((trace, before), key=lambda each: each.peak_bytes)
    newest = max((event.storage for event in highest.alive(highest.peak_position)), default=0)
    found = next((each for each in evaluations if each.first < newest <= each.last), None)
    return found and replace(found, peak_bytes=highest.peak_bytes)
