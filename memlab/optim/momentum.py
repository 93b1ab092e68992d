"""SGD with momentum, kept in bfloat16.

Saves    6 of AdamW's 8 bytes of float32 state per weight; 2N bytes remain.
Costs    one learning rate for all weights, and random bits for the rounding.
Source   Sutskever et al. 2013, "On the importance of initialization and momentum in deep
         learning", section 2; Gupta et al. 2015, arXiv 1502.02551 (stochastic rounding).

    m = μ·m + g
    w = w − lr·m

With round to nearest, a bfloat16 momentum ignores gradients below half its spacing, about m/512.
Stochastic rounding keeps them on average.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.optim.base import Optimizer
from memlab.optim.moments import Moment


class MomentumSGD(Optimizer):
    """torch.optim.SGD with a bfloat16 momentum and stochastic rounding.

    Pass `moment_dtype=None` for a float32 momentum and torch's exact steps. Further arguments are
    memlab.optim.base.Optimizer's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        moment_dtype: torch.dtype | None = torch.bfloat16,
        **base: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, moment_dtype=moment_dtype, **base)

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return one momentum per weight."""
        return (self.float_moment("momentum_buffer", group),)

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """Call `momentum_sgd_`."""
        settings = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
        momentum_sgd_(weight, gradient, *moments, **settings)


def momentum_sgd_(
    weight: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """torch.optim.SGD's step in place, for tensors of equal shape and dtype."""
    if weight_decay:
        gradient = gradient.add(weight, alpha=weight_decay)
    momentum_buffer.mul_(momentum).add_(gradient)
    weight.add_(momentum_buffer, alpha=-lr)
