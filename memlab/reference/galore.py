"""GaLore: AdamW's moments of the gradient's projection onto its r largest directions.

Saves    for a matrix of m × n weights (m ≤ n) 4·(m·r + 2·n·r) bytes are kept, not 8·m·n.
Costs    an SVD of each gradient, once in `gap` steps; only r directions are learned in between.
Source   Zhao et al. 2024, arXiv 2403.03507, Algorithm 2.

    P = first r columns of U, for G = U Σ Vᵀ        (m, r), once in `gap` steps
    R = Pᵀ G                                        (r, n)
    N = AdamW's step for R                          (r, n), with moments of that shape
    W = W − lr·scale·P N

The moments stay as they are when P changes. `memlab.optim.GaLore` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor


def galore_(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    lr: float,
    rank: int,
    gap: int = 200,
    scale: float = 0.25,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> None:
    """Update one matrix in place. `state` is empty before step 1."""
    beta1, beta2 = betas
    if weight.shape[0] >= weight.shape[1]:  # the short side is projected; of a square, columns
        weight, gradient = weight.T, gradient.T
    state["t"] = t = state.get("t", 0) + 1
    if (t - 1) % gap == 0:
        u, _, _ = torch.linalg.svd(gradient, full_matrices=False)
        state["P"] = u[:, :rank].clone()  # a slice would keep all of U alive
    low = state["P"].T @ gradient  # (r, n)
    zeros = torch.zeros_like(low)
    state["m"] = m = beta1 * state.get("m", zeros) + (1 - beta1) * low
    state["v"] = v = beta2 * state.get("v", zeros) + (1 - beta2) * low**2
    step = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
    weight -= lr * scale * state["P"] @ step  # (m, n)
