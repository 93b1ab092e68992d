"""Flash attention: compute attention in tiles, without storing the T × T score matrix.

Saves    the T² probabilities per head: backward needs q, k, v, the output and the log-sum-exp of
         each row.
Costs    the scores are recomputed in backward.
Source   Dao et al. 2022, arXiv 2205.14135; Dao 2023 (FlashAttention-2), 2307.08691, algorithms 1
         and 2. Online softmax: Milakov and Gimelshein 2018, 1805.02867.

For each row of queries, over the tiles of keys (online softmax):

    row_max' = max(row_max, max(scores))        correction = e^(row_max − row_max')
    row_sum' = row_sum · correction + Σ e^(scores − row_max')
    acc'     = acc · correction + e^(scores − row_max') v
    at the end: out = acc / row_sum             lse = row_max + ln row_sum

`memlab.attention.flash_attention` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor


def add_tile(
    row_max: Tensor, row_sum: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Update the state of R rows with K keys; scores (…, R, K), values (…, K, D)."""
    new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
    safe_max = new_max.masked_fill(new_max == -torch.inf, 0)  # −∞ − (−∞) is NaN
    probs, correction = (scores - safe_max).exp(), (row_max - safe_max).exp()
    row_sum = correction * row_sum + probs.sum(-1, keepdim=True)
    return new_max, row_sum, correction * acc + probs @ values


def plan(queries: int, keys: int, tile: int, shift: int) -> list[tuple[slice, list[slice]]]:
    """Return each row of tiles with the tiles of keys visible under a causal mask.

    Query i sees key j if j <= i + shift.
    """
    rows = []
    for first in range(0, queries, tile):
        last = min(first + tile, queries)
        seen = min(last + shift, keys)  # by the last of these queries
        visited = [slice(n, min(n + tile, keys)) for n in range(0, seen, tile)]
        rows.append((slice(first, last), visited))
    return rows


def hide(scores: Tensor, row: slice, column: slice, shift: int) -> Tensor:
    """Mask a tile's scores (…, R, K): −∞ where the causal mask hides the key."""
    pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    hidden = pairs.triu(row.start - column.start + shift + 1)
    return scores.masked_fill(hidden, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return out (…, T, D) and the log-sum-exp (…, T), +∞ for rows without visible keys."""
    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])
    for row, columns in plan(q.shape[-2], k.shape[-2], tile, shift):
        part = q[..., row, :] * q.shape[-1] ** -0.5
        row_max = torch.full_like(part[..., :1], -torch.inf)
        row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(part)
        for column in columns:
            scores = hide(part @ k[..., column, :].mT, row, column, shift)
            row_max, row_sum, acc = add_tile(row_max, row_sum, acc, scores, v[..., column, :])
        nothing = row_sum == 0
        out[..., row, :] = acc / row_sum.masked_fill(nothing, 1)
        lse[..., row] = (row_max + row_sum.log()).masked_fill(nothing, torch.inf).squeeze(-1)
    return out, lse


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> Tensor:
        out, lse = attend(q, k, v, tile, shift)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tile, ctx.shift = tile, shift
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        scale, delta = q.shape[-1] ** -0.5, (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for row, columns in plan(q.shape[-2], k.shape[-2], ctx.tile, ctx.shift):
            for column in columns:
                scores = scale * q[..., row, :] @ k[..., column, :].mT
                probs = (hide(scores, row, column, ctx.shift) - lse[..., row, None]).exp()
                dv[..., column, :] += probs.mT @ dout[..., row, :]
                dprobs = dout[..., row, :] @ v[..., column, :].mT
                dscores = scale * probs * (dprobs - delta[..., row, :])
                dq[..., row, :] += dscores @ k[..., column, :]
                dk[..., column, :] += dscores.mT @ q[..., row, :]
        return dq, dk, dv, None, None


def flash(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> Tensor:
    """Compute causal attention of q, k, v (…, T, D), in tiles of `tile` × `tile` scores."""
    return Flash.apply(q, k, v, tile, shift)
