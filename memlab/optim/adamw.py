"""AdamW: step by the mean of the gradients over the root of the mean of their squares.

Saves    nothing: it is the baseline. Its state is two float32 values per weight, 8N bytes.
Costs    temporaries of 1 MiB chunks. torch's for-loop allocates whole tensors, its fused kernel
         none.
Source   Loshchilov and Hutter 2019, arXiv 1711.05101, Algorithm 2.

Adds to memlab.reference.adamw: chunked updates whose temporaries stay small, moments in other
dtypes or in 8 bits, stochastic rounding of the weights, and the checks and state dicts of torch's
optimizers.

Each weight has its own step size, which is small if gradients are large or change sign. At the
first step m/√v is the gradient's sign, so every weight moves by lr. Later steps are at most 7.27·lr
for any gradients (with β = 0.9, 0.999).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from memlab.optim.base import Optimizer
from memlab.optim.moments import Moment


class AdamW(Optimizer):
    """AdamW with float32 moments: the arguments, steps and state names of torch.optim.AdamW.

    The base class accepts further arguments: maximize, rounding, moment_dtype, generator,
    chunk, and torch's foreach, fused, capturable and differentiable.
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
        """Raise ValueError also for loaded states of AMSGrad, or of Adam's coupled weight decay."""
        super().require_group(group)
        if group.get("amsgrad"):
            raise ValueError("got a state of AMSGrad, which has a third moment; give AdamW's")
        if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
            raise ValueError(
                "got a state of torch.optim.Adam, whose weight_decay is part of the gradient; give "
                "AdamW's, or one with weight_decay=0"
            )

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return both moments, one value per element."""
        return self.float_moment("exp_avg", group), self.float_moment("exp_avg_sq", group)

    def update_(
        self, weight: Tensor, gradient: Tensor, *moments: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """Call `adamw_`."""
        adamw_(weight, gradient, *moments, step=step, **adam_settings(group))


def adam_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings for an Adam update."""
    return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}


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
    """Algorithm 2, lines 6 to 12, in place; shapes and dtypes are equal, and `step` starts at 1."""
    beta1, beta2 = betas
    weight.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    weight.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))
