"""Attention: each query takes the average of the values, weighted by how well the keys match.

Saves    nothing: this is attention as one reads it, and what every other form is held against.
Costs    T² weights a head, kept for backward: 256 MiB a head at T = 8192 in float32, and as
         much again for the scores while the softmax runs.
Source   Vaswani et al. 2017, arXiv 1706.03762, equation 1; grouped heads: Ainslie et al. 2023,
         2305.13245.

    out = softmax(scale · q kᵀ) v        scale = 1/√D
"""

import math

from torch import Tensor

from memlab.attention.tiling import Alignment, Window, band, hidden


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Each key/value head `times` in a row: (B, KV, T, D) to (B, KV·times, T, D).

    One query head per key/value head (`times` is 1) costs nothing: a view.
    """
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def queries_to_a_key(heads: int, kv_heads: int) -> int:
    """How many query heads share a key/value head."""
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly; "
            f"give k and v a number of heads that divides {heads}"
        )
    return heads // kv_heads


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    alignment: Alignment = "top-left",
    scale: float | None = None,
    window: Window | None = None,
) -> Tensor:
    """Attention by way of the whole score matrix, slow and obvious.

    q is (B, H, Tq, D), k and v are (B, KV, Tk, D), where KV divides H; returns (B, H, Tq, D).
    Causal means that query i sees the keys 0 to i, as in torch; with alignment="bottom-right" the
    last query sees the last key, as in the flash-attn package. The two agree where Tq = Tk. Of a
    window (left, right), query i sees that many keys beside it. A query that sees none gets 0.
    """
    (H, Tq, D), (KV, Tk) = q.shape[1:], k.shape[1:3]
    group = queries_to_a_key(H, KV)
    limits = band(Tq, Tk, causal=causal, alignment=alignment, window=window)
    scale = 1 / math.sqrt(D) if scale is None else scale
    k, v = repeat_heads(k, group), repeat_heads(v, group)  # (B, H, Tk, D)
    scores = (scale * q) @ k.mT  # (B, H, Tq, Tk)
    if limits.hides_some(Tq, Tk):
        outside = hidden(range(Tq), range(Tk), limits, q.device)
        scores = scores.masked_fill(outside, -math.inf)
    weights = scores.softmax(dim=-1)
    if limits.blinds_some(Tq, Tk):  # of nothing but -inf, softmax is NaN
        weights = weights.masked_fill(outside, 0)
    return weights @ v  # (B, H, Tq, D)
