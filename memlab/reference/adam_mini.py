"""Adam-mini: one second moment per block of weights, in place of one per weight.

Saves    nearly half of AdamW's state: 4N bytes and 4 per block, not 8N.
Costs    a rule that says which weights form a block.
Source   Zhang et al. 2024, arXiv 2406.16793, Algorithm 1 and section 2.3.

    v = β2·v + (1 − β2)·mean(g²)        the mean over a block
    everything else as in AdamW

`memlab.optim.AdamMini` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor


def block_size(name: str, shape: torch.Size, head_dim: int) -> int:
    """Return the number of elements that share a v: a head's rows, a norm, or one output row."""
    layer, kind = name.split(".")[-2:]
    if kind == "bias":
        return 1
    if layer in ("query", "key"):
        if shape[0] % head_dim:
            raise ValueError(f"got {shape[0]} rows in {name}; give heads of {head_dim}")
        return head_dim * shape[1]
    if layer in ("attention_norm", "mlp_norm", "norm"):
        return shape[0]
    if layer in ("embedding", "unembedding", "value", "output", "gate", "up", "down"):
        return shape[1]
    raise ValueError(f"got {name}, which no rule covers; add a rule")


def adam_mini_(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    size: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Update one weight in place, in blocks of `size` elements. `state` is empty at first."""
    beta1, beta2 = betas
    squares = gradient.reshape(-1, size) ** 2  # (blocks, size)
    mean = squares.mean(1, keepdim=True)  # (blocks, 1)
    if not state:
        state.update(t=0, m=torch.zeros_like(gradient), v=torch.zeros_like(mean))
    state["t"] += 1
    t = state["t"]
    state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
    state["v"] = beta2 * state["v"] + (1 - beta2) * mean
    root = (state["v"] / (1 - beta2**t)).sqrt() + eps
    weight *= 1 - lr * weight_decay
    weight -= lr * (state["m"].reshape(-1, size) / (1 - beta1**t) / root).view_as(weight)
