"""Attention with the full score matrix, written to be read.

Saves    nothing: it is the oracle for all other versions.
Costs    T² probabilities per head, kept for backward: 256 MiB per head at T = 8192 in float32, and
         as much again for the scores during the softmax.
Source   Vaswani et al. 2017, arXiv 1706.03762, equation 1; grouped heads: Ainslie et al. 2023,
         2305.13245.

    out = softmax(scale · q kᵀ) v        scale = 1/√D
"""

import math

from torch import Tensor

from memlab.attention.tiling import Alignment, Window, band, hidden


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each key/value head `times` times: (B, KV, T, D) to (B, KV·times, T, D).

    With `times` = 1, the result is a view.
    """
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def queries_per_key_head(heads: int, kv_heads: int) -> int:
    """Return the number of query heads that share each key/value head."""
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
    """Compute attention with the full score matrix.

    Args:
        q: (B, H, Tq, D).
        k: (B, KV, Tk, D), with H divisible by KV.
        v: (B, KV, Tk, Dv).
        causal: query i sees keys 0 to i, as in torch.
        alignment: with "bottom-right", the last query sees the last key, as in the flash-attn
            package. Both alignments agree if Tq = Tk.
        window: (left, right), the number of keys that a query sees to either side of the diagonal.

    Returns:
        (B, H, Tq, Dv), with 0 for queries that see no key.
    """
    (H, Tq, D), (KV, Tk) = q.shape[1:], k.shape[1:3]
    group = queries_per_key_head(H, KV)
    limits = band(Tq, Tk, causal=causal, alignment=alignment, window=window)
    scale = 1 / math.sqrt(D) if scale is None else scale
    k, v = repeat_heads(k, group), repeat_heads(v, group)  # (B, H, Tk, D)
    scores = (scale * q) @ k.mT  # (B, H, Tq, Tk)
    if limits.hides_any(Tq, Tk):
        outside = hidden(range(Tq), range(Tk), limits, q.device)
        scores = scores.masked_fill(outside, -math.inf)
    probs = scores.softmax(dim=-1)
    if limits.has_blind_query(Tq, Tk):  # softmax of a row of -inf is NaN
        probs = probs.masked_fill(outside, 0)
    return probs @ v  # (B, H, Tq, Dv)
