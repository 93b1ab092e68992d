"""APOLLO: step by the gradient itself, each channel scaled as Adam would scale it in r dimensions.

Saves    for a matrix of m × n weights (m ≤ n) 8·n·r bytes and a seed are kept, not 8·m·n. One
         dimension is enough for APOLLO-Mini, which scales the whole matrix by one number.
Costs    no SVD: the projection is random. The scale is an estimate, and the step's size is limited.
Source   Zhu et al. 2024, arXiv 2412.05270, Algorithm 1. Norm limiter: Chen et al. 2024 (Fira),
         arXiv 2410.01623.

    P = normal numbers / √r            (m, r), drawn again from the seed whenever it is needed
    R = Pᵀ G                           (r, n), N = AdamW's step for R
    s = ‖N‖ / ‖R‖                      of each column: (n,); of the whole matrix for APOLLO-Mini
    W = W − lr·scale·G·s               its norm grows by at most 1 % per step

`memlab.optim.Apollo` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor


def random_projector(short: int, rank: int, seed: int) -> Tensor:
    """Return normal numbers (short, rank) of variance 1/rank: on average, norms don't change."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(short, rank, generator=drawn, dtype=torch.float32) / rank**0.5


def apollo_(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    lr: float,
    rank: int,
    gap: int = 200,
    scale: float = 1.0,
    by_channel: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> None:
    """Update one matrix in place. `state` is empty before step 1."""
    beta1, beta2 = betas
    if weight.shape[0] >= weight.shape[1]:  # the short side is projected; of a square, columns
        weight, gradient = weight.T, gradient.T
    state["t"] = t = state.get("t", 0) + 1
    low = random_projector(len(gradient), rank, seed=(t - 1) // gap).T @ gradient  # (r, n)
    zeros = torch.zeros_like(low)
    state["m"] = m = beta1 * state.get("m", zeros) + (1 - beta1) * low
    state["v"] = v = beta2 * state.get("v", zeros) + (1 - beta2) * low**2
    step = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
    if by_channel:
        factor = step.norm(dim=0) / (low.norm(dim=0) + 1e-8)  # (n,)
    else:
        factor = step.norm() / (low.norm() + 1e-8)
    correction = (1 - beta2**t) ** 0.5 / (1 - beta1**t)  # the limit is without it
    norm = (gradient * factor).norm() / correction
    last = state.get("norm", 0)
    state["norm"] = limited = torch.minimum(norm, 1.01 * last) if last > 0 else norm
    weight -= lr * scale * gradient * factor * (limited / norm.clamp(min=1e-8))  # (m, n)
