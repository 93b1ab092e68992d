"""Muon: step each matrix by its momentum with all singular values set to about 1.

Saves    4 bytes per weight against AdamW in float32: one momentum, 4N bytes, not 8N.
Costs    fifteen matmuls per matrix and step. Embeddings, output layer and vectors stay with AdamW.
Source   Jordan et al. 2024, kellerjordan.github.io/posts/muon. Newton–Schulz: five steps of the odd
         polynomial there, and its factor of the learning rate.

    M = μ·M + (1 − μ)·G                the momentum, (rows, columns)
    X = (1 − μ)·G + μ·M                Nesterov's look ahead
    O = U Vᵀ of X = U Σ Vᵀ             without an SVD, by matmuls alone
    W = W − lr·weight_decay·W − lr·√max(1, rows/columns)·O

`memlab.optim.Muon` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of σ, σ³ and σ⁵


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return about U Vᵀ of the matrix U Σ Vᵀ, in its shape and dtype.

    A step replaces each singular value σ by aσ + bσ³ + cσ⁵. From 0 < σ ≤ 1 that leads to about 1
    (0.68 to 1.21, from any σ of at least 0.002).
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # (short, long)
    x = x / x.norm().clamp(min=1e-7)  # every σ is at most 1
    for _ in range(steps):
        gram = x @ x.T  # (short, short): U Σ² Uᵀ
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def muon_(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    lr: float,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Update one matrix in place. `state` keeps the momentum; it is empty before step 1."""
    rows, columns = weight.shape
    m = state.get("m", torch.zeros_like(gradient))
    state["m"] = m = momentum * m + (1 - momentum) * gradient
    ahead = (1 - momentum) * gradient + momentum * m
    weight *= 1 - lr * weight_decay
    weight -= lr * max(1, rows / columns) ** 0.5 * newton_schulz(ahead.to(dtype)).to(weight.dtype)
