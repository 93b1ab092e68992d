"""Dynamic loss scaling: keep small float16 gradients from becoming zero.

Saves    nothing itself: it makes float16 gradients, 2 bytes per weight in place of 4, usable.
Costs    a check of every gradient, and a skipped step now and then.
Source   Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.

    (scale · loss).backward()            every gradient is multiplied by `scale`
    a gradient is inf or NaN             skip the step; scale / 2
    `interval` finite steps in a row     scale · 2

`memlab.precision.LossScaler` is the version to train with.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Scaler:
    """`scale` is the current factor; it doubles after `interval` steps without an overflow."""

    def __init__(self, scale: float, interval: int) -> None:
        self.scale, self.interval, self.fine_steps = scale, interval, 0

    def train(
        self, optimizer: torch.optim.Optimizer, losses: Iterable[Tensor], max_norm: float
    ) -> bool:
        """Accumulate the losses' gradients, clip and step. Return False if the step is skipped."""
        optimizer.zero_grad()
        for loss in losses:
            (loss * self.scale).backward()
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.scale, self.fine_steps = self.scale / 2, 0
            return False
        for gradient in gradients:
            gradient /= self.scale
        nn.utils.clip_grad_norm_(weights, max_norm)
        optimizer.step()
        self.fine_steps += 1
        if self.fine_steps == self.interval:
            self.scale, self.fine_steps = min(2 * self.scale, 2.0**127), 0
        return True
