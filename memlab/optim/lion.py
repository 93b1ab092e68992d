"""Lion: keep one momentum a weight, and step by its sign.

Saves    half of AdamW's state: 4N bytes of float32, and N + 4⌈N/256⌉ in 8 bits, not 8N. What
         Adam8bit says of small weights, codes and tables holds of 8 bits here.
Costs    a search for its learning rate, 3 to 10 times below AdamW's, with a weight decay that is as
         many times above.
Source   Chen et al. 2023, arXiv 2302.06675, Algorithm 2.

Adds to memlab.reference.lion: an 8-bit momentum, chunked updates whose temporaries stay small,
stochastic rounding of the weights, and the checks and state dicts of torch's optimizers.

Every weight moves by lr at each step, up or down; where momentum and gradient are both zero it
stays. Two betas for one momentum: the step looks at a mix in which today's gradient weighs 1 − β1,
and what is kept is another, in which it weighs 1 − β2.

A momentum that is NaN has no sign: its weight stands still from then on, without a word.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from memlab.optim.base import Optimizer
from memlab.optim.moments import BLOCK, Dynamic, Moment, in_8_bits


class Lion(Optimizer):
    """Lion with a momentum of float32; what else it takes is the base's."""

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
        """One, a number a weight."""
        return (self.number("exp_avg", group),)

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """See `lion_`."""
        settings = {name: group[name] for name in ("betas", "weight_decay")}
        lion_(weight, gradient, *moments, lr=float(group["lr"]), **settings)


class Lion8bit(Lion):
    """Lion with a momentum of 8 bits for every weight of at least 4096 numbers."""

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """One, in 8 bits where that is worth it."""
        return (
            Dynamic("exp_avg", signed=True) if in_8_bits(weight) else self.number("exp_avg", group),
        )

    def block(self, weight: Tensor, group: dict[str, Any]) -> int:
        """Those that share a scale."""
        return BLOCK


def lion_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Algorithm 2 in place: all of one shape and dtype. The sign is that of the mix, taken before
    the momentum is brought up to date."""
    beta1, beta2 = betas
    weight.mul_(1 - lr * weight_decay)
    sign = (exp_avg * beta1).add_(gradient, alpha=1 - beta1).sign_()
    weight.add_(sign, alpha=-lr)
    exp_avg.mul_(beta2).add_(gradient, alpha=1 - beta2)
