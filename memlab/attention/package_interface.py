"""`flash_attn_func`: the tiled attention behind the interface of the flash-attn package.

    from flash_attn import flash_attn_func                             # the package, on a GPU
    from memlab.attention.package_interface import flash_attn_func     # this one, anywhere

How the package's arguments map to `memlab.attention.flash_attention`:

    q, k, v            (B, T, H, D), so heads and tokens change places; a view, no copy
    softmax_scale      scale
    causal             causal with alignment="bottom-right": the last query sees the last key
    window_size        window; -1 means no limit there and None here; relative to the same diagonal
    dropout_p          dropout; the masks differ, because they come from another generator
    deterministic      always so here
    return_attn_probs  also returns the log-sum-exp (B, H, Tq) and None for the probabilities, which
                       are never stored; costs a second forward pass
    softcap, alibi_slopes    not supported; they raise ValueError

Source   the package's README and docstring, flash-attn 2.8.4. Version 3's function has neither
         dropout_p nor alibi_slopes, and a few arguments for FP8 and scheduling.
"""

import math

import torch
from torch import Tensor

from memlab.attention.flash import FlashSettings, cast_for_autocast, flash_attention, forward
from memlab.attention.tiling import Window, band

NO_LIMIT = (-1, -1)
TILE = 256


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_LIMIT,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Compute attention of q (B, Tq, H, D) over k and v (B, Tk, KV, D), H divisible by KV.

    Returns (B, Tq, H, D); with `return_attn_probs` also the log-sum-exp and None.

    Raises ValueError for shapes that do not fit, and for softcap and alibi_slopes.
    """
    for name, is_on in {"softcap": softcap != 0, "alibi_slopes": alibi_slopes is not None}.items():
        if is_on:
            raise ValueError(f"got {name}, which memlab's tiled attention lacks; leave it out")
    q, k, v = (_by_heads(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    window = None if window_size == NO_LIMIT else _sides(window_size)
    out = flash_attention(
        q,
        k,
        v,
        causal=causal,
        alignment="bottom-right",
        scale=softmax_scale,
        window=window,
        dropout=dropout_p,
        tile=TILE,
    ).transpose(1, 2)
    if not return_attn_probs:
        return out
    return out, _log_sum_exp(q, k, v, softmax_scale, causal, window), None


def _by_heads(x: Tensor, name: str) -> Tensor:
    """View (B, T, H, D) as (B, H, T, D)."""
    if x.ndim != 4:
        raise ValueError(
            f"got {name} {tuple(x.shape)}; give it as (batch, tokens, heads, head_dim)"
        )
    return x.transpose(1, 2)


def _sides(window_size: tuple[int, int]) -> Window:
    left, right = (None if side < 0 else side for side in window_size)
    return left, right


@torch.no_grad()
def _log_sum_exp(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Window | None
) -> Tensor:
    """Return the log-sum-exp (B, H, Tq) of each query's scores; +inf if it sees no key."""
    q, k, v = cast_for_autocast(q, k, v)
    limits = band(q.shape[2], k.shape[2], causal=causal, alignment="bottom-right", window=window)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    return forward(q, k, v, FlashSettings(limits, scale, 0.0, TILE, 0))[1]
