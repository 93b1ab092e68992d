"""Lion: keep one momentum per weight, and step by its sign.

Saves    half of AdamW's state: 4N bytes in float32, or N + 4⌈N/256⌉ in 8 bits, not 8N. As in
         Adam8bit, small weights keep float32, and all weights share the codebook and its tables.
Costs    a learning-rate search: 3 to 10 times below AdamW's, with a weight decay higher by the same
         factor.
Source   Chen et al. 2023, arXiv 2302.06675, Algorithm 2.

Adds to memlab.reference.lion: an 8-bit momentum, chunked updates whose temporaries stay small,
stochastic rounding of the weights, and the checks and state dicts of torch's optimizers.

Every weight moves by lr at each step, up or down; if momentum and gradient are both zero, it stays.
There are two betas for one momentum: the step uses an average that weighs the gradient by 1 − β1,
and the stored momentum weighs it by 1 − β2.

The sign of a NaN momentum counts as zero: the weight silently stops moving.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from memlab.optim.base import Optimizer
from memlab.optim.moments import BLOCK_SIZE, Moment, QuantizedMoment, is_worth_quantizing


class Lion(Optimizer):
    """Lion with a float32 momentum; other arguments are memlab.optim.base.Optimizer's."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **base: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, **base)

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return one moment, one value per element."""
        return (self.float_moment("exp_avg", group),)

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """Call `lion_`."""
        settings = {name: group[name] for name in ("lr", "betas", "weight_decay")}
        lion_(weight, gradient, *moments, **settings)


class Lion8bit(Lion):
    """Lion with an 8-bit momentum for weights with at least 4096 elements."""

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return one moment, in 8 bits if the weight is large enough."""
        return (
            QuantizedMoment("exp_avg", signed=True)
            if is_worth_quantizing(weight)
            else self.float_moment("exp_avg", group),
        )

    def block_size(self, weight: Tensor, group: dict[str, Any]) -> int:
        """Return how many elements share a scale."""
        return BLOCK_SIZE


def lion_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Algorithm 2 in place, for tensors of equal shape and dtype.

    The sign uses the momentum before its update.
    """
    beta1, beta2 = betas
    weight.mul_(1 - lr * weight_decay)
    sign = (exp_avg * beta1).add_(gradient, alpha=1 - beta1).sign_()
    weight.add_(sign, alpha=-lr)
    exp_avg.mul_(beta2).add_(gradient, alpha=1 - beta2)
