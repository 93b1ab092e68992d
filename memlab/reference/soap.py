"""Shampoo and SOAP: precondition each matrix from both sides.

Saves    nothing: for m × n weights Shampoo keeps 4·(m² + n²) bytes, and SOAP 4·(2m² + 2n² + 2mn)
         where AdamW keeps 8·m·n. Both take fewer steps to the same loss.
Costs    roots or eigenvectors of two square matrices, once in some steps.
Source   Shampoo: Gupta et al. 2018, arXiv 1802.09568, Algorithm 1. SOAP: Vyas et al. 2024, arXiv
         2409.11321, Algorithm 3.

    Shampoo    L = L + G Gᵀ,  R = R + Gᵀ G,  W = W − lr·L^(−1/4) G R^(−1/4)
    SOAP       Adam in the eigenvectors of L and R: rotate the gradient, step, rotate back

The first step of Shampoo is U Vᵀ for G = U Σ Vᵀ, which Muon computes at every step from the
momentum, with no L and no R.
"""

from typing import Any

import torch
from torch import Tensor


def root(matrix: Tensor, power: float) -> Tensor:
    """Return a power of a symmetric positive matrix, by its eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-30) ** power @ vectors.T


def shampoo_(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], lr: float, eps: float = 1e-4
) -> None:
    """Update one matrix (m, n) in place. `state` is empty before step 1."""
    if not state:
        state["L"], state["R"] = (
            eps * torch.eye(size, dtype=torch.float32).to(weight) for size in weight.shape
        )
    state["L"] += gradient @ gradient.T  # (m, m)
    state["R"] += gradient.T @ gradient  # (n, n)
    weight -= lr * root(state["L"], -0.25) @ gradient @ root(state["R"], -0.25)


def soap_(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    lr: float,
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    frequency: int = 10,
) -> None:
    """Update one matrix (m, n) in place. `state` is empty before step 1."""
    beta1, beta2 = betas
    grams = {"L": gradient @ gradient.T, "R": gradient.T @ gradient}  # (m, m) and (n, n)
    if not state:
        state.update(t=0, m=torch.zeros_like(gradient), v=torch.zeros_like(gradient), **grams)
        state.update({f"Q{side}": torch.linalg.eigh(gram)[1] for side, gram in grams.items()})
    state["t"] += 1
    left, right, t = state["QL"], state["QR"], state["t"]
    state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
    state["v"] = beta2 * state["v"] + (1 - beta2) * (left.T @ gradient @ right) ** 2
    mean = left.T @ state["m"] @ right / (1 - beta1**t)  # (m, n), rotated
    step = mean / ((state["v"] / (1 - beta2**t)).sqrt() + eps)
    weight -= lr * left @ step @ right.T
    for side, gram in grams.items():
        state[side] = beta2 * state[side] + (1 - beta2) * gram
        if t % frequency == 0:  # one step of power iteration to the eigenvectors
            state[f"Q{side}"] = torch.linalg.qr(state[side] @ state[f"Q{side}"])[0]
