"""Flash attention for a GPU: a tile of scores lives in registers and is never written down.

Saves    the T² weights a head, as `memlab.attention.flash_attention` does: for backward it keeps
         q, k, v, the result, and one number a query. And their traffic: that one writes each tile
         of scores to memory and reads it back, several times; here no score leaves the processor.
Costs    the scores twice more in backward, and dout vᵀ twice: 9 products of matrices where
         `attention_reference` takes 6. Dropout, which only
         `memlab.attention.flash_attention` has.
Source   Dao 2023 (FlashAttention-2), arXiv 2307.08691, algorithms 1 and 2; Tillet et al. 2019
         (Triton), doi 10.1145/3315508.3329973.

Three kernels. A program of each holds one tile and walks along those that it meets:

    flash_forward   a tile of queries, along the keys       out, lse
    flash_dq        a tile of queries, along the keys       dq; delta = rowsum(dout ∘ out)
    flash_dkdv      a tile of keys, along the queries       dk, dv

    s = scale · log₂e · q kᵀ                 dv = wᵀ dout
    w = 2^(s - log₂e · lse)                  ds = w ∘ (dout vᵀ - delta)
                                             dq = scale · ds k        dk = scale · dsᵀ q

What is easily done wrong:

    one kernel for all gradients   saves 2 of the 9 products, and adds to dq from many programs at
                                   once: atomic additions, in no fixed order. Here every number is
                                   one program's, and two runs give the same bits
    grouped queries                share a key: its program walks along all heads of the group, so
                                   their gradients are summed before they are rounded
    a mask on every tile           costs as much as the exponentials. A walk has two parts: first
                                   the tiles that are seen whole, then those at the edges of the
                                   band. A condition inside of one loop would cost more: Triton then
                                   no longer sees that the weights go into a product, and passes
                                   them from warp to warp by way of shared memory
    where a load stands            is where its registers begin to be taken: right before its use
    the scale in q                 would be rounded, in 16 bits. It comes after the product; and as
                                   the highest score, scaled, is the highest of the scaled ones, it
                                   takes part in the exponential's subtraction, for free. Of a scale
                                   below 0 this is the lowest: such scores are scaled first
    the order of programs          a causal mask leaves the last queries with the most to do. They
                                   start first, lest one of them begin when all others are done; and
                                   only as many heads at a time as the cache has room for
    offsets                        to a tile are 64 bits wide, 2³¹ numbers being few. Inside of a
                                   tile they have 32: what is laid out so that 256 tokens span 2³¹
                                   numbers is copied

To the kernels `scale` is scale · log₂e, so that what they sum is a power of two; hence ln 2 in the
gradients of q and k.

Products are of the inputs' dtype with sums in float32: weights and their gradients are rounded for
them, as in production. All else is float32, and float32 inputs are multiplied in full, not in tf32.
Beside float64, of inputs around 1, float32 is off by at most 2e-6 of the largest number (in the
interpreter; on a GPU, whose 2^x is an approximation and whose a·b + c is rounded once, allow twice
that). Gradients' errors grow with the scores: an exponent is rounded at the size of the largest. In
16 bits the error is at most twice that of `attention_reference`, of gradients three times.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from memlab.attention.flash import NO_SECOND_DERIVATIVE, cast_for_autocast, check_inputs
from memlab.attention.tiling import Alignment, Band, Window, band
from memlab.kernels.arithmetic import product, rounded
from memlab.kernels.launching import blocks, capability_of, launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_WIDE = 256  # D: beyond it, a tile of 64 queries is more than the registers hold
CACHE_BYTES = 16 * 2**20  # what programs that run side by side may walk along, all in all

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

# Numbers of which it is all the same whether they are 1, or a multiple of 16.
PLAIN = ["heads", "low", "high", "heads_at_once"]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    alignment: Alignment = "top-left",
    scale: float | None = None,
    window: Window | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention, exactly, in one kernel, and two for the gradients.

    q is (B, H, Tq, D), k and v are (B, KV, Tk, D), where KV divides H; returns (B, H, Tq, D), laid
    out in memory like q. float32, float16 or bfloat16, D up to 256, any strides. The settings are
    those of `memlab.attention.flash_attention`, less dropout.

    ValueError for shapes, dtypes and settings that do not fit; RuntimeError for tensors that are
    not on a GPU, and in a second derivative.
    """
    if has_torch_function((q, k, v)):  # of a mode that wants to know that attention runs
        settings = {"causal": causal, "alignment": alignment, "scale": scale, "window": window}
        return handle_torch_function(
            flash_attention, (q, k, v), q, k, v, **settings, dropout=dropout
        )
    q, k, v = map(_within_reach, cast_for_autocast(q, k, v))
    check_inputs(q, k, v)
    _require_supported(q, dropout)
    limits = band(q.shape[2], k.shape[2], causal=causal, alignment=alignment, window=window)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    return FlashAttention.apply(q, k, v, limits, scale)


# ------------------------------------------------------------------ the sizes of tiles


@dataclass(frozen=True)
class Tiling:
    """How much one program does: a tile of so many queries by so many keys."""

    queries: int
    keys: int
    warps: int
    stages: int  # tiles that are on their way from memory at once

    def constants(self, D: int) -> dict[str, int]:
        return {
            "D": D,
            "BLOCK_D": _padded(D),
            "BLOCK_Q": self.queries,
            "BLOCK_K": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# By the bytes of a number and the padded D: flash_forward, flash_dq, flash_dkdv. All fit into 99 KB
# of shared memory, which is what the smaller GPUs give a program. Of tensors whose heads lie in one
# piece, and whose D is a power of 2, none spills a register from 8.0 to 9.0, but for a few of
# float32 on 9.0. With 8 warps and fewer rows than D, an A100 or RTX would do some of the products
# twice: hence 128 rows for D = 128.
TILINGS = {
    (2, 16): (Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 3), Tiling(64, 128, 8, 3)),
    (2, 32): (Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 3), Tiling(64, 128, 8, 3)),
    (2, 64): (Tiling(128, 64, 8, 3), Tiling(64, 64, 4, 3), Tiling(32, 128, 8, 3)),
    (2, 128): (Tiling(128, 32, 8, 3), Tiling(128, 32, 8, 3), Tiling(16, 128, 8, 3)),
    (2, 256): (Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2)),
    (4, 16): (Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2)),
    (4, 32): (Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2)),
    (4, 64): (Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 2), Tiling(16, 32, 4, 2)),
    (4, 128): (Tiling(32, 16, 8, 2), Tiling(32, 16, 8, 2), Tiling(16, 32, 8, 1)),
    (4, 256): (Tiling(32, 16, 8, 1), Tiling(16, 16, 8, 2), Tiling(16, 16, 8, 1)),
}

# An H100's tensor cores read the tiles where they lie, so registers are left for larger ones.
HOPPER = 90
OF_HOPPER = {
    (2, 64): (Tiling(128, 128, 8, 3), Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 2)),
    (2, 128): (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 3), Tiling(32, 128, 8, 2)),
}


def tilings(q: Tensor) -> tuple[Tiling, Tiling, Tiling]:
    """Of flash_forward, flash_dq and flash_dkdv, for heads like those of q."""
    key = q.dtype.itemsize, _padded(q.shape[3])
    is_hopper = capability_of(q.device) == HOPPER
    return OF_HOPPER.get(key, TILINGS[key]) if is_hopper else TILINGS[key]


def _padded(D: int) -> int:
    """Tensor cores multiply 16 at a time, and a tile's sides are powers of 2."""
    return max(16, triton.next_power_of_2(D))


# ------------------------------------------------------------------ what the kernels share


@triton.jit
def _place(heads, heads_at_once, tiles):
    """Which head and which tile a program is given: by sections of heads, tile by tile."""
    program = tl.program_id(0)
    section = program // (heads_at_once * tiles)
    within = program % (heads_at_once * tiles)
    first = section * heads_at_once
    size = tl.minimum(heads_at_once, heads - first)
    return first + within % size, within // size


@triton.jit
def _head(x, strides, sequence, head):
    """Where a head of (B, H, T, D) begins."""
    return x + tl.cast(sequence, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def _places(x, strides, start, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of the tile of a head that begins at token `start`: (BLOCK_T, BLOCK_D)."""
    x += tl.cast(start, tl.int64) * strides[2]
    rows, columns = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    return x + rows[:, None] * strides[2] + columns[None, :] * strides[3]


@triton.jit
def _there(start, length, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """bool (BLOCK_T, BLOCK_D): what of a tile is inside of the matrix."""
    rows, columns = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    return (start + rows < length)[:, None] & (columns < D)[None, :]


@triton.jit
def _load(
    x, strides, start, length,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(BLOCK_T, BLOCK_D) of a head, 0 beyond its edges; unmasked, it has to have all the rows."""
    places = _places(x, strides, start, BLOCK_T, BLOCK_D)
    if MASKED:
        there = _there(start, length, D, BLOCK_T, BLOCK_D)
        tile = tl.load(places, mask=there, other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(places, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@triton.jit
def _load_numbers(x, places, length, other, MASKED: tl.constexpr):
    """A number of each place, `other` beyond the last; unmasked, none may be beyond it."""
    if MASKED:
        numbers = tl.load(x + places, mask=places < length, other=other)
    else:
        numbers = tl.load(x + places)
    return numbers


@triton.jit
def _store(x, strides, start, length, values, D: tl.constexpr):
    """(BLOCK_T, BLOCK_D) float32 `values` into a head, those inside of it."""
    BLOCK_T: tl.constexpr = values.shape[0]
    BLOCK_D: tl.constexpr = values.shape[1]
    places = _places(x, strides, start, BLOCK_T, BLOCK_D)
    there = _there(start, length, D, BLOCK_T, BLOCK_D)
    tl.store(places, rounded(values, x.dtype.element_ty), mask=there)


@triton.jit
def _walk(start, stop, low, high, length, BLOCK: tl.constexpr):
    """The walk of the tile from `start` to `stop`, in which i sees others from i + low to i + high.
    Of queries the others are keys; of keys, with the band turned round, queries.

    Of the others, `length` in all, those that the whole tile sees are from the first to the second;
    those that some of it see from the third to the fourth, with the former left out: see `_past`.
    Steps are of BLOCK, from multiples of it.
    """
    begin = tl.maximum(start + low, 0) // BLOCK * BLOCK
    end = tl.maximum(tl.minimum(stop + high, length), 0)
    middle = tl.minimum(tl.cdiv(tl.maximum(stop - 1 + low, 0), BLOCK) * BLOCK, end)
    until = tl.maximum(tl.minimum(start + high + 1, length), 0) // BLOCK * BLOCK
    until = tl.maximum(until, middle)
    return middle, until, begin, end - (until - middle)


@triton.jit
def _past(step, edges):
    """Where a step of the second part of a walk is: beyond the first, if that has been reached."""
    return tl.where(step < edges[0], step, step + edges[1] - edges[0])


@triton.jit
def _seen(ones, others, low, high, length):
    """bool (ones, others): the others from one's place + low to + high, those that there are."""
    last = tl.minimum(ones + high, length - 1)  # a number a row, where a difference is one a pair
    return (others[None, :] >= (ones + low)[:, None]) & (others[None, :] <= last[:, None])


@triton.jit
def _products(rows, columns):
    """rows @ columnsᵀ, in float32."""
    nothing = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    return product(rows, tl.trans(columns), nothing)


@triton.jit
def _weighed(scores, scale, top):
    """The highest score of each row so far, these scores' weights, and the correction of earlier
    ones. `scale` is above 0, and `top` is scaled."""
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    zero = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - (-inf) is NaN
    return higher, tl.exp2(scores * scale - zero[:, None]), tl.exp2(top - zero)


# ------------------------------------------------------------------ the kernels


@triton.jit(do_not_specialize=PLAIN)
def flash_forward(
    q, k, v, out, lse,
    q_strides, k_strides, v_strides, out_strides,
    heads, H, group, Tq, Tk, low, high, scale, heads_at_once,
    RISING: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The results of BLOCK_Q queries, and their lse. The last tile has the most to do."""
    tiles = tl.cdiv(Tq, BLOCK_Q)
    head, place = _place(heads, heads_at_once, tiles)
    first = (tiles - 1 - place) * BLOCK_Q
    b, h = head // H, head % H
    q, out = _head(q, q_strides, b, h), _head(out, out_strides, b, h)
    k, v = _head(k, k_strides, b, h // group), _head(v, v_strides, b, h // group)
    queries = first + tl.arange(0, BLOCK_Q)
    rows = _load(q, q_strides, first, Tq, D, BLOCK_Q, BLOCK_D, True)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    edges = _walk(first, tl.minimum(first + BLOCK_Q, Tq), low, high, Tk, BLOCK_K)
    for masked in tl.static_range(2):
        for step in range(edges[2 * masked], edges[2 * masked + 1], BLOCK_K):
            start = _past(step, edges) if masked else step
            columns = _load(k, k_strides, start, Tk, D, BLOCK_K, BLOCK_D, masked)
            scores = _products(rows, columns)
            if not RISING:
                scores *= scale
            if masked:
                seen = _seen(queries, start + tl.arange(0, BLOCK_K), low, high, Tk)
                scores = tl.where(seen, scores, float("-inf"))
            steep = scale if RISING else 1.0
            top, weights, correction = _weighed(scores, steep, top)
            total = total * correction + tl.sum(weights, 1)
            columns = _load(v, v_strides, start, Tk, D, BLOCK_K, BLOCK_D, masked)
            mixed = mixed * correction[:, None]
            mixed = product(rounded(weights, columns.dtype), columns, mixed)
    saw_nothing = total == 0
    total = tl.where(saw_nothing, 1.0, total)
    _store(out, out_strides, first, Tq, mixed / total[:, None], D)
    log_sum_exp = tl.where(saw_nothing, float("inf"), (top + tl.log2(total)) * LN_2)
    tl.store(lse + tl.cast(head, tl.int64) * Tq + queries, log_sum_exp, mask=queries < Tq)


@triton.jit(do_not_specialize=PLAIN)
def flash_dq(
    q, k, v, out, lse, dout, dq, delta,
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides,
    heads, H, group, Tq, Tk, low, high, scale, heads_at_once,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients of BLOCK_Q queries, and their delta, which flash_dkdv reads."""
    tiles = tl.cdiv(Tq, BLOCK_Q)
    head, place = _place(heads, heads_at_once, tiles)
    first = (tiles - 1 - place) * BLOCK_Q
    b, h = head // H, head % H
    q, dq = _head(q, q_strides, b, h), _head(dq, dq_strides, b, h)
    out, dout = _head(out, out_strides, b, h), _head(dout, dout_strides, b, h)
    k, v = _head(k, k_strides, b, h // group), _head(v, v_strides, b, h // group)
    queries = first + tl.arange(0, BLOCK_Q)
    numbers = tl.cast(head, tl.int64) * Tq + queries
    rows = _load(q, q_strides, first, Tq, D, BLOCK_Q, BLOCK_D, True)
    upstream = _load(dout, dout_strides, first, Tq, D, BLOCK_Q, BLOCK_D, True)
    result = _load(out, out_strides, first, Tq, D, BLOCK_Q, BLOCK_D, True)
    share = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + numbers, share, mask=queries < Tq)
    log_sum = tl.load(lse + numbers, mask=queries < Tq, other=float("inf")) * LOG2_E
    total = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    edges = _walk(first, tl.minimum(first + BLOCK_Q, Tq), low, high, Tk, BLOCK_K)
    for masked in tl.static_range(2):
        for step in range(edges[2 * masked], edges[2 * masked + 1], BLOCK_K):
            start = _past(step, edges) if masked else step
            columns = _load(k, k_strides, start, Tk, D, BLOCK_K, BLOCK_D, masked)
            scores = _products(rows, columns)
            weights = tl.exp2(scores * scale - log_sum[:, None])
            if masked:
                seen = _seen(queries, start + tl.arange(0, BLOCK_K), low, high, Tk)
                weights = tl.where(seen, weights, 0.0)
            values = _load(v, v_strides, start, Tk, D, BLOCK_K, BLOCK_D, masked)
            dweights = _products(upstream, values)
            dscores = rounded(weights * (dweights - share[:, None]), columns.dtype)
            total = product(dscores, columns, total)
    _store(dq, dq_strides, first, Tq, total * (scale * LN_2), D)


@triton.jit(do_not_specialize=PLAIN)
def flash_dkdv(
    q, k, v, lse, delta, dout, dk, dv,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    heads, KV, group, Tq, Tk, low, high, scale, heads_at_once,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients of BLOCK_K keys and their values, summed over the heads that share them."""
    head, place = _place(heads, heads_at_once, tl.cdiv(Tk, BLOCK_K))
    first = place * BLOCK_K
    b, h = head // KV, head % KV
    k, dk = _head(k, k_strides, b, h), _head(dk, dk_strides, b, h)
    v, dv = _head(v, v_strides, b, h), _head(dv, dv_strides, b, h)
    keys = first + tl.arange(0, BLOCK_K)
    columns = _load(k, k_strides, first, Tk, D, BLOCK_K, BLOCK_D, True)
    values = _load(v, v_strides, first, Tk, D, BLOCK_K, BLOCK_D, True)
    dcolumns = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dvalues = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    edges = _walk(first, tl.minimum(first + BLOCK_K, Tk), -high, -low, Tq, BLOCK_Q)
    for masked in tl.static_range(2):
        for member in range(group):
            one_q = _head(q, q_strides, b, h * group + member)
            one_dout = _head(dout, dout_strides, b, h * group + member)
            numbers = (tl.cast(head, tl.int64) * group + member) * Tq
            for step in range(edges[2 * masked], edges[2 * masked + 1], BLOCK_Q):
                start = _past(step, edges) if masked else step
                queries = start + tl.arange(0, BLOCK_Q)
                rows = _load(one_q, q_strides, start, Tq, D, BLOCK_Q, BLOCK_D, masked)
                scores = _products(columns, rows)
                log_sum = _load_numbers(lse + numbers, queries, Tq, float("inf"), masked)
                weights = tl.exp2(scores * scale - log_sum[None, :] * LOG2_E)
                if masked:
                    seen = _seen(keys, queries, -high, -low, Tq)
                    weights = tl.where(seen, weights, 0.0)
                upstream = _load(one_dout, dout_strides, start, Tq, D, BLOCK_Q, BLOCK_D, masked)
                dvalues = product(rounded(weights, rows.dtype), upstream, dvalues)
                dweights = _products(values, upstream)
                share = _load_numbers(delta + numbers, queries, Tq, 0.0, masked)
                dscores = rounded(weights * (dweights - share[None, :]), rows.dtype)
                dcolumns = product(dscores, rows, dcolumns)
    _store(dk, dk_strides, first, Tk, dcolumns * (scale * LN_2), D)
    _store(dv, dv_strides, first, Tk, dvalues, D)


# ------------------------------------------------------------------ their launches


def forward(q: Tensor, k: Tensor, v: Tensor, limits: Band, scale: float) -> tuple[Tensor, Tensor]:
    """The result, and the lse of every query: (B, H, Tq)."""
    (B, H, Tq, D), (KV, Tk) = q.shape, k.shape[1:3]
    out = torch.empty_like(q)
    lse = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    tiling, _, _ = tilings(q)
    launch(
        flash_forward,
        (B * H * blocks(Tq, tiling.queries),),
        *(q, k, v, out, lse),
        *(x.stride() for x in (q, k, v, out)),
        *(B * H, H, H // KV, Tq, Tk, *limits, scale * LOG2_E.value),
        H // KV * _heads_at_once(B * KV, 2, k),
        RISING=scale > 0,
        **tiling.constants(D),
    )
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    limits: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    (B, H, Tq, D), (KV, Tk) = q.shape, k.shape[1:3]
    group = H // KV
    _, by_queries, by_keys = tilings(q)
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    shape = (group, Tq, Tk, *limits, scale * LOG2_E.value)
    launch(
        flash_dq,
        (B * H * blocks(Tq, by_queries.queries),),
        *(q, k, v, out, lse, dout, dq, delta),
        *(x.stride() for x in (q, k, v, out, dout, dq)),
        *(B * H, H, *shape, group * _heads_at_once(B * KV, 2, k)),
        **by_queries.constants(D),
    )
    launch(
        flash_dkdv,
        (B * KV * blocks(Tk, by_keys.keys),),
        *(q, k, v, lse, delta, dout, dk, dv),
        *(x.stride() for x in (q, k, v, dout, dk, dv)),
        *(B * KV, KV, *shape, _heads_at_once(B * KV, 2 * group, q)),
        **by_keys.constants(D),
    )
    return dq, dk, dv


def _heads_at_once(heads: int, walked: int, x: Tensor) -> int:
    """How many heads' programs may run side by side: `walked` heads like x's are what one reads."""
    bytes_a_head = walked * x.shape[2] * x.shape[3] * x.element_size()
    return max(1, min(heads, CACHE_BYTES // max(1, bytes_a_head)))


# ------------------------------------------------------------------ in autograd


class FlashAttention(torch.autograd.Function):
    """The node of the graph: it saves q, k, v, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, limits: Band, scale: float) -> Tensor:
        out, lse = forward(q, k, v, limits, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = limits, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(dout, *ctx.saved_tensors, *ctx.settings), None, None


class _Gradients(torch.autograd.Function):
    """A node of its own, so that a second derivative is refused where it is asked for."""

    @staticmethod
    def forward(ctx: Any, dout: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        return backward(dout, *saved)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


# ------------------------------------------------------------------ what is refused


def _within_reach(x: Tensor) -> Tensor:
    """Copied to one run where a tile of it would span 2³¹ numbers, which 32 bits do not count."""
    is_far = any(MOST_WIDE * stride >= 2**31 for stride in x.stride()[2:])
    return x.contiguous() if is_far else x


def _require_supported(q: Tensor, dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"got dropout={dropout}, which this kernel has not; use "
            f"memlab.attention.flash_attention, or leave it at 0"
        )
    if q.dtype not in DTYPES:
        raise ValueError(
            f"got {q.dtype}, and this kernel takes float32, float16 and bfloat16; convert q, k and "
            f"v, or use memlab.attention.flash_attention"
        )
    if q.shape[3] > MOST_WIDE:
        raise ValueError(
            f"got heads of width {q.shape[3]}, and this kernel takes up to {MOST_WIDE}; use "
            f"memlab.attention.flash_attention"
        )
