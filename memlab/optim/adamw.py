"""AdamW: a mean of the gradients over the root of a mean of their squares.

Saves    nothing: it is the yardstick. Its state is two float32 numbers a weight, 8N bytes.
Costs    pieces of 1 MiB on the way. torch's for-loop makes whole tensors, its fused kernel none.
Source   Loshchilov and Hutter 2019, arXiv 1711.05101, Algorithm 2.

Adds to memlab.reference.adamw: chunked updates whose temporaries stay small, moments in other
dtypes or in 8 bits, stochastic rounding of the weights, and the checks and state dicts of torch's
optimizers.

Each weight has a step size of its own: where gradients are large, or point to and fro, it is short.
At the first step m/√v is the gradient's sign: every weight moves by lr. Later no step is longer
than 7.27·lr, whatever the gradients (with β = 0.9, 0.999).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from memlab.optim.base import Optimizer
from memlab.optim.moments import Moment


class AdamW(Optimizer):
    """AdamW with moments of float32: torch.optim.AdamW's arguments, steps and names of states.

    Further arguments are the base's: maximize, rounding, moment_dtype, generator, piece, and
    torch's own foreach, fused, capturable and differentiable.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **base: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, amsgrad=amsgrad, **base)

    def require_group(self, group: dict[str, Any]) -> None:
        """Of torch's states too: neither AMSGrad nor a decay that is part of the gradient."""
        super().require_group(group)
        if group.get("amsgrad"):
            raise ValueError("got a state of AMSGrad, which keeps a third moment; give AdamW's")
        if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
            raise ValueError(
                "got a state of torch.optim.Adam, whose weight_decay is part of the gradient; give "
                "AdamW's, or one with weight_decay=0"
            )

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Both, a number a weight."""
        return self.number("exp_avg", group), self.number("exp_avg_sq", group)

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """See `adamw_`."""
        adamw_(weight, gradient, *moments, step=step, **adam_settings(group))


def adam_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Those of a group that an update of Adam's kind takes."""
    settings = {name: group[name] for name in ("betas", "eps", "weight_decay")}
    return {"lr": float(group["lr"]), **settings}


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Algorithm 2, lines 6 to 12, in place: all of one shape and dtype; `step` begins at 1."""
    beta1, beta2 = betas
    weight.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    weight.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))
