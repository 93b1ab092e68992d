"""AdamW: step by the running mean of the gradients, divided by the root of their mean square.

Saves    nothing: two moments per weight are what the other optimizers reduce.
Costs    8 bytes of state per weight in float32.
Source   Loshchilov and Hutter 2019, arXiv 1711.05101, Algorithm 2.

    m = β1·m + (1 − β1)·g        v = β2·v + (1 − β2)·g²
    w = w − lr·weight_decay·w − lr · m/(1 − β1ᵗ) / (√(v/(1 − β2ᵗ)) + eps)

`memlab.optim.AdamW` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Update one weight in place. `state` keeps t, m and v; it is empty before step 1."""
    beta1, beta2 = betas
    if not state:
        state.update(t=0, m=torch.zeros_like(gradient), v=torch.zeros_like(gradient))
    state["t"] += 1
    t = state["t"]
    state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
    state["v"] = beta2 * state["v"] + (1 - beta2) * gradient**2
    root = (state["v"] / (1 - beta2**t)).sqrt() + eps
    weight *= 1 - lr * weight_decay
    weight -= lr * state["m"] / (1 - beta1**t) / root
