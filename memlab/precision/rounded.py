"""AdamW in bfloat16: weights, gradients and moments of two bytes, every update rounded at random.

Saves    8 of 16 bytes a weight: 2 of weight, 2 of gradient and 4 of moments are left.
Costs    random numbers for three tensors, the noise of their roundings, and float32 scratch for
         four million weights at a time, 80 MiB.
Source   Loshchilov and Hutter 2019, arXiv 1711.05101, Algorithm 2 (AdamW); Gupta et al. 2015,
         arXiv 1502.02551 (stochastic rounding); torchao's optimizers with bf16_stochastic_round
         round the weights so, and the moments to the nearest.

Rounded to the nearest, a weight does not move by less than half a step of bfloat16, and a second
moment never falls: in a step it loses a thousandth, and half a step of bfloat16 is at least two.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memlab.rounding import stochastic_round_

PIECE = 2**22  # numbers at a time


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose weights and moments are bfloat16, computed in float32 and rounded at random.

    Raises TypeError for weights of another dtype, and ValueError for one that is no dense block.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._generator = generator

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for bfloat16 alone."""
        super().add_param_group(param_group)
        for weight in self.param_groups[-1]["params"]:
            if weight.dtype != torch.bfloat16:
                raise TypeError(
                    f"got weights of {weight.dtype}; give bfloat16, or use torch.optim.AdamW"
                )
            if not weight.is_contiguous():
                raise ValueError(
                    f"got a weight of shape {tuple(weight.shape)} and strides {weight.stride()}; "
                    f"give contiguous ones, such as weight.contiguous()"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every weight that has a gradient; what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)
        return loss

    def _step_one(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state.update(new_state(weight))
        state["step"] += 1
        settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        kept = (weight, state["exp_avg"], state["exp_avg_sq"])
        pieces = [tensor.view(-1).split(PIECE) for tensor in kept]
        pieces.append(weight.grad.reshape(-1).split(PIECE))
        for *low, gradient in zip(*pieces, strict=True):
            self._step_piece(low, gradient, step=state["step"], **settings)

    def _step_piece(self, low: list[Tensor], gradient: Tensor, **settings: Any) -> None:
        """Of a weight and its two moments."""
        precise = [piece.float() for piece in low]
        adamw_(*precise, gradient.float(), **settings)
        for piece, exact in zip(low, precise, strict=True):
            stochastic_round_(piece, exact, generator=self._generator)


def new_state(weight: Tensor) -> dict[str, Any]:
    """What the optimizer keeps of a weight, before its first step."""
    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": 0, **moments}


def adamw_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW on float32 tensors, in place; `step` begins at 1."""
    beta1, beta2 = betas
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(eps)
    weight.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))
