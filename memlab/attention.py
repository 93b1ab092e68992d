"""Attention: each query takes the average of the values, weighted by how well the keys match.

Saves    nothing: this is attention as one reads it, and what every other form is held against.
Costs    T² weights a head, kept for backward: 256 MiB a head at T = 8192 in float32, and as
         much again for the scores while the softmax runs.
Source   Vaswani et al. 2017, arXiv 1706.03762, equation 1; grouped heads: Ainslie et al. 2023,
         2305.13245.

    out = softmax(scale · q kᵀ) v        scale = 1/√D
"""

import math

import torch
from torch import Tensor


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Each key/value head `times` in a row: (B, KV, T, D) to (B, KV·times, T, D).

    One query head per key/value head (`times` is 1) costs nothing: a view.
    """
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention by way of the whole score matrix, slow and obvious.

    q is (B, H, Tq, D), k and v are (B, KV, Tk, D), where KV divides H; returns (B, H, Tq, D).
    Causal means that query i sees the keys 0 to i, as in torch. (The flash-attn package counts
    from the end instead: its last query sees the last key. The two agree where Tq = Tk.)
    """
    (H, Tq, D), (KV, Tk) = q.shape[1:], k.shape[1:3]
    if H % KV:
        raise ValueError(
            f"{H} query heads cannot share {KV} key/value heads evenly; "
            f"give k and v a number of heads that divides {H}"
        )
    scale = 1 / math.sqrt(D) if scale is None else scale
    k, v = repeat_heads(k, H // KV), repeat_heads(v, H // KV)  # (B, H, Tk, D)
    scores = (scale * q) @ k.mT  # (B, H, Tq, Tk)
    if causal:
        future = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(dim=-1) @ v  # (B, H, Tq, D)
