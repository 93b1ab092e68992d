"""Lion: one momentum per weight, and a step of its sign.

Saves    4 bytes per weight against AdamW in float32: the state is 4N bytes, not 8N.
Costs    its own learning rate, usually 3 to 10 times below AdamW's.
Source   Chen et al. 2023, arXiv 2302.06675, Algorithm 2.

    u = sign(β1·m + (1 − β1)·g)
    w = w − lr·weight_decay·w − lr·u
    m = β2·m + (1 − β2)·g

`memlab.optim.Lion` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor


def lion_(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> None:
    """Update one weight in place. `state` keeps the momentum; it is empty before step 1."""
    beta1, beta2 = betas
    m = state.get("m", torch.zeros_like(gradient))
    u = torch.sign(beta1 * m + (1 - beta1) * gradient)
    weight *= 1 - lr * weight_decay
    weight -= lr * u
    state["m"] = beta2 * m + (1 - beta2) * gradient
