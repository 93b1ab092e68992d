"""Flash attention on a GPU: tiles of scores stay in registers and are never written to memory.

Saves    the T² probabilities per head, like `memlab.attention.flash_attention`; backward needs q,
         k, v, the output, and one log-sum-exp per query. Also memory traffic: that version writes
         and reads each tile of scores several times.
Costs    backward recomputes the scores twice, and dout vᵀ twice: 9 matmuls, where
         `attention_reference` needs 6. No dropout; use `memlab.attention.flash_attention` for it.
Source   Dao 2023 (FlashAttention-2), arXiv 2307.08691, algorithms 1 and 2; Tillet et al. 2019
         (Triton), doi 10.1145/3315508.3329973.

Adds to memlab.reference.tiled_attention: one Triton kernel per pass, causal masks and sliding
windows, grouped queries, 16-bit dtypes, and any strides.

There are three kernels. Each program owns one tile and loops over the tiles it needs:

    flash_forward   a tile of queries, over the keys        out, lse
    flash_dq        a tile of queries, over the keys        dq; delta = rowsum(dout ∘ out)
    flash_dkdv      a tile of keys, over the queries        dk, dv

    s = scale · log₂e · q kᵀ                 dv = pᵀ dout
    p = 2^(s - log₂e · lse)                  ds = p ∘ (dout vᵀ - delta)
                                             dq = scale · ds k        dk = scale · dsᵀ q

Pitfalls and design choices:

    one kernel for all gradients   would save 2 of the 9 matmuls, but needs atomic additions to dq
                                   in no fixed order. Here each element is written by one program,
                                   so results are deterministic
    grouped queries                share a key. The key's program loops over all heads of the group,
                                   so gradients are summed before they are rounded
    masking                        every tile would cost as much as the exponentials. The loop has
                                   two parts: fully visible tiles first, then tiles at the edges of
                                   the band. A condition inside one loop costs more, because Triton
                                   then passes the probabilities through shared memory
    loads                          stand right before their use, to keep register use low
    scale                          folding it into q would round it to 16 bits, so it is applied
                                   after the matmul. For a positive scale the scaled row max is the
                                   max of the scaled scores, so the multiplication merges with the
                                   subtraction in the exponent. Otherwise the scores are scaled
                                   first
    program order                  the last queries have the most work under a causal mask, so they
                                   start first. Only as many heads run at a time as fit the cache
    offsets                        to a tile are 64 bits wide, within a tile 32 bits. A tensor whose
                                   256 tokens span 2³¹ elements is copied

The kernels receive scale · log₂e as `scale`, so that exponentials are powers of two. The gradients
of q and k therefore contain ln 2.

Matmuls use the inputs' dtype with float32 accumulators: probabilities and their gradients are cast
for them, as in production. Everything else is float32, and float32 inputs are not rounded to tf32.
For inputs around 1, float32 results differ from float64 by at most 2e-6 of the largest element in
the interpreter. Allow twice that on a GPU, which approximates 2^x and rounds a·b + c once. Gradient
errors grow with the scores, because an exponent is rounded relative to the largest score. In 16
bits, errors are at most twice `attention_reference`'s, and three times for gradients.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from memlab.attention.flash import (
    AttentionKernel,
    FlashAttention,
    cast_for_autocast,
    check_inputs,
)
from memlab.attention.tiling import Alignment, Band, Window, band
from memlab.kernels.arithmetic import cast, matmul_add
from memlab.kernels.launching import block_count, capability_of, launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256  # above it, a tile of 64 queries exceeds the registers
CACHE_BYTES = 16 * 2**20  # keys and values that concurrent programs may read, in total

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

# Integer arguments that Triton should not specialize on being 1 or a multiple of 16.
UNSPECIALIZED = ["heads", "low", "high", "heads_at_once"]


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
    """Compute exact attention in one kernel, and its gradients in two.

    q is (B, H, Tq, D), k and v are (B, KV, Tk, D), and KV divides H. Returns (B, H, Tq, D), laid
    out in memory like q. float32, float16 or bfloat16, D up to 256, any strides. See
    `memlab.attention.flash_attention` for the settings; `dropout` must be 0.

    Raise ValueError for unsupported shapes, dtypes and settings. Raise RuntimeError for CPU
    tensors, and for a second derivative.
    """
    if has_torch_function((q, k, v)):  # lets function modes detect attention
        settings = {"causal": causal, "alignment": alignment, "scale": scale, "window": window}
        return handle_torch_function(
            flash_attention, (q, k, v), q, k, v, **settings, dropout=dropout
        )
    q, k, v = map(_with_int32_offsets, cast_for_autocast(q, k, v))
    check_inputs(q, k, v)
    _require_supported(q, v, dropout)
    limits = band(q.shape[2], k.shape[2], causal=causal, alignment=alignment, window=window)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    band_and_scale = {"limits": limits, "scale": scale}
    kernel = AttentionKernel(
        partial(forward, **band_and_scale), partial(backward, **band_and_scale)
    )
    return FlashAttention.apply(q, k, v, kernel)


# ------------------------------------------------------------------ tile sizes


@dataclass(frozen=True)
class Tiling:
    """The tile of one program: queries × keys."""

    queries: int
    keys: int
    warps: int
    stages: int  # tiles prefetched at once

    def constants(self, D: int) -> dict[str, int]:
        return {
            "D": D,
            "BLOCK_D": _padded(D),
            "BLOCK_Q": self.queries,
            "BLOCK_K": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# By bytes per element and padded D, for flash_forward, flash_dq and flash_dkdv. All fit into 99 KB
# of shared memory, the limit on smaller GPUs. With contiguous heads and D a power of 2, none spills
# registers on 8.0 to 9.0, except a few of float32 on 9.0. D = 128 has 128 rows, because with 8
# warps and fewer rows than D, an A100 or RTX would compute some matmuls twice.
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

# An H100's tensor cores read tiles from shared memory, which leaves registers for larger tiles.
HOPPER = 90
HOPPER_TILINGS = {
    (2, 64): (Tiling(128, 128, 8, 3), Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 2)),
    (2, 128): (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 3), Tiling(32, 128, 8, 2)),
}


def tilings(q: Tensor) -> tuple[Tiling, Tiling, Tiling]:
    """Return the tilings of flash_forward, flash_dq and flash_dkdv for heads like q's."""
    key = q.dtype.itemsize, _padded(q.shape[3])
    is_hopper = capability_of(q.device) == HOPPER
    return HOPPER_TILINGS.get(key, TILINGS[key]) if is_hopper else TILINGS[key]


def _padded(D: int) -> int:
    """Pad D to a power of 2 of at least 16, as tensor cores and Triton require."""
    return max(16, triton.next_power_of_2(D))


# ------------------------------------------------------------------ shared by the kernels


@triton.jit
def _assign_tile(heads, heads_at_once, tiles):
    """Return a program's head and tile: by sections of heads, then by tile, then by head."""
    program = tl.program_id(0)
    section = program // (heads_at_once * tiles)
    offset = program % (heads_at_once * tiles)
    first_head = section * heads_at_once
    size = tl.minimum(heads_at_once, heads - first_head)
    return first_head + offset % size, offset // size


@triton.jit
def _head_pointer(x, strides, sequence, head):
    """Return a pointer to one head of (B, H, T, D)."""
    return x + tl.cast(sequence, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def _tile_pointers(x, strides, start, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers (BLOCK_T, BLOCK_D) to the tile that starts at token `start`."""
    x += tl.cast(start, tl.int64) * strides[2]
    rows, columns = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    return x + rows[:, None] * strides[2] + columns[None, :] * strides[3]


@triton.jit
def _in_bounds(start, length, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return bool (BLOCK_T, BLOCK_D): the elements of a tile inside the head."""
    rows, columns = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    return (start + rows < length)[:, None] & (columns < D)[None, :]


@triton.jit
def _load_tile(
    x, strides, start, length,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load (BLOCK_T, BLOCK_D), with 0 out of bounds; if not MASKED, all rows must be in bounds."""
    pointers = _tile_pointers(x, strides, start, BLOCK_T, BLOCK_D)
    if MASKED:
        in_bounds = _in_bounds(start, length, D, BLOCK_T, BLOCK_D)
        tile = tl.load(pointers, mask=in_bounds, other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _load_vector(x, indices, length, other, MASKED: tl.constexpr):
    """Load one value per index, `other` out of bounds; if not MASKED, all must be in bounds."""
    if MASKED:
        values = tl.load(x + indices, mask=indices < length, other=other)
    else:
        values = tl.load(x + indices)
    return values


@triton.jit
def _store_tile(x, strides, start, length, values, D: tl.constexpr):
    """Cast float32 `values` (BLOCK_T, BLOCK_D) and store the elements in bounds."""
    BLOCK_T: tl.constexpr = values.shape[0]
    BLOCK_D: tl.constexpr = values.shape[1]
    pointers = _tile_pointers(x, strides, start, BLOCK_T, BLOCK_D)
    in_bounds = _in_bounds(start, length, D, BLOCK_T, BLOCK_D)
    tl.store(pointers, cast(values, x.dtype.element_ty), mask=in_bounds)


@triton.jit
def _loop_bounds(start, stop, low, high, length, BLOCK: tl.constexpr):
    """Return the loop bounds of a tile from `start` to `stop`, where i sees i + low to i + high.

    For a tile of queries the loop runs over keys. For a tile of keys it runs over queries, with the
    band mirrored. `length` is the length of the looped dimension, and steps are multiples of BLOCK.

    The first two bounds enclose steps that the whole tile sees. The last two enclose the partly
    visible steps, numbered without the first ones: see `_step_start`.
    """
    begin = tl.maximum(start + low, 0) // BLOCK * BLOCK
    end = tl.maximum(tl.minimum(stop + high, length), 0)
    unmasked_start = tl.minimum(tl.cdiv(tl.maximum(stop - 1 + low, 0), BLOCK) * BLOCK, end)
    unmasked_stop = tl.maximum(tl.minimum(start + high + 1, length), 0) // BLOCK * BLOCK
    unmasked_stop = tl.maximum(unmasked_stop, unmasked_start)
    return unmasked_start, unmasked_stop, begin, end - (unmasked_stop - unmasked_start)


@triton.jit
def _step_start(step, bounds):
    """Return the position of a partly visible step, skipping the fully visible range."""
    return tl.where(step < bounds[0], step, step + bounds[1] - bounds[0])


@triton.jit
def _visible(rows, columns, low, high, length):
    """Return bool (rows, columns): column in row + low … row + high, and below `length`."""
    last_column = tl.minimum(rows + high, length - 1)  # one operation per row, not per pair
    return (columns[None, :] >= (rows + low)[:, None]) & (columns[None, :] <= last_column[:, None])


@triton.jit
def _matmul_transposed(a, b):
    """a @ bᵀ in float32."""
    zeros = tl.zeros((a.shape[0], b.shape[0]), tl.float32)
    return matmul_add(a, tl.trans(b), zeros)


@triton.jit
def _online_softmax(scores, scale, row_max):
    """Return the new row max, the unnormalized probabilities, and the correction of earlier ones.

    `scale` must be positive, and `row_max` is already scaled.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - (-inf) is NaN
    return new_max, tl.exp2(scores * scale - shift[:, None]), tl.exp2(row_max - shift)


# ------------------------------------------------------------------ the kernels


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_forward(
    q, k, v, out, lse,
    q_strides, k_strides, v_strides, out_strides,
    heads, H, group, Tq, Tk, low, high, scale, heads_at_once,
    POSITIVE_SCALE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and lse of BLOCK_Q queries, the tile with the most work first."""
    tiles = tl.cdiv(Tq, BLOCK_Q)
    head, tile_index = _assign_tile(heads, heads_at_once, tiles)
    first = (tiles - 1 - tile_index) * BLOCK_Q
    b, h = head // H, head % H
    q, out = _head_pointer(q, q_strides, b, h), _head_pointer(out, out_strides, b, h)
    k, v = _head_pointer(k, k_strides, b, h // group), _head_pointer(v, v_strides, b, h // group)
    queries = first + tl.arange(0, BLOCK_Q)
    q_tile = _load_tile(q, q_strides, first, Tq, D, BLOCK_Q, BLOCK_D, True)
    row_max = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    bounds = _loop_bounds(first, tl.minimum(first + BLOCK_Q, Tq), low, high, Tk, BLOCK_K)
    for masked in tl.static_range(2):
        for step in range(bounds[2 * masked], bounds[2 * masked + 1], BLOCK_K):
            start = _step_start(step, bounds) if masked else step
            k_tile = _load_tile(k, k_strides, start, Tk, D, BLOCK_K, BLOCK_D, masked)
            scores = _matmul_transposed(q_tile, k_tile)
            if not POSITIVE_SCALE:
                scores *= scale
            if masked:
                visible = _visible(queries, start + tl.arange(0, BLOCK_K), low, high, Tk)
                scores = tl.where(visible, scores, float("-inf"))
            score_scale = scale if POSITIVE_SCALE else 1.0
            row_max, probs, correction = _online_softmax(scores, score_scale, row_max)
            row_sum = row_sum * correction + tl.sum(probs, 1)
            v_tile = _load_tile(v, v_strides, start, Tk, D, BLOCK_K, BLOCK_D, masked)
            acc = acc * correction[:, None]
            acc = matmul_add(cast(probs, v_tile.dtype), v_tile, acc)
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    _store_tile(out, out_strides, first, Tq, acc / row_sum[:, None], D)
    log_sum_exp = tl.where(is_empty, float("inf"), (row_max + tl.log2(row_sum)) * LN_2)
    tl.store(lse + tl.cast(head, tl.int64) * Tq + queries, log_sum_exp, mask=queries < Tq)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_dq(
    q, k, v, out, lse, dout, dq, delta,
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides,
    heads, H, group, Tq, Tk, low, high, scale, heads_at_once,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dq of BLOCK_Q queries, and delta, which flash_dkdv reads."""
    tiles = tl.cdiv(Tq, BLOCK_Q)
    head, tile_index = _assign_tile(heads, heads_at_once, tiles)
    first = (tiles - 1 - tile_index) * BLOCK_Q
    b, h = head // H, head % H
    q, dq = _head_pointer(q, q_strides, b, h), _head_pointer(dq, dq_strides, b, h)
    out, dout = _head_pointer(out, out_strides, b, h), _head_pointer(dout, dout_strides, b, h)
    k, v = _head_pointer(k, k_strides, b, h // group), _head_pointer(v, v_strides, b, h // group)
    queries = first + tl.arange(0, BLOCK_Q)
    row_indices = tl.cast(head, tl.int64) * Tq + queries
    q_tile = _load_tile(q, q_strides, first, Tq, D, BLOCK_Q, BLOCK_D, True)
    dout_tile = _load_tile(dout, dout_strides, first, Tq, D, BLOCK_Q, BLOCK_D, True)
    out_tile = _load_tile(out, out_strides, first, Tq, D, BLOCK_Q, BLOCK_D, True)
    row_delta = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + row_indices, row_delta, mask=queries < Tq)
    row_lse = tl.load(lse + row_indices, mask=queries < Tq, other=float("inf")) * LOG2_E
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    bounds = _loop_bounds(first, tl.minimum(first + BLOCK_Q, Tq), low, high, Tk, BLOCK_K)
    for masked in tl.static_range(2):
        for step in range(bounds[2 * masked], bounds[2 * masked + 1], BLOCK_K):
            start = _step_start(step, bounds) if masked else step
            k_tile = _load_tile(k, k_strides, start, Tk, D, BLOCK_K, BLOCK_D, masked)
            scores = _matmul_transposed(q_tile, k_tile)
            probs = tl.exp2(scores * scale - row_lse[:, None])
            if masked:
                visible = _visible(queries, start + tl.arange(0, BLOCK_K), low, high, Tk)
                probs = tl.where(visible, probs, 0.0)
            v_tile = _load_tile(v, v_strides, start, Tk, D, BLOCK_K, BLOCK_D, masked)
            dprobs = _matmul_transposed(dout_tile, v_tile)
            dscores = cast(probs * (dprobs - row_delta[:, None]), k_tile.dtype)
            acc = matmul_add(dscores, k_tile, acc)
    _store_tile(dq, dq_strides, first, Tq, acc * (scale * LN_2), D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_dkdv(
    q, k, v, lse, delta, dout, dk, dv,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    heads, KV, group, Tq, Tk, low, high, scale, heads_at_once,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of BLOCK_K keys, summed over the heads that share them."""
    head, tile_index = _assign_tile(heads, heads_at_once, tl.cdiv(Tk, BLOCK_K))
    first = tile_index * BLOCK_K
    b, h = head // KV, head % KV
    k, dk = _head_pointer(k, k_strides, b, h), _head_pointer(dk, dk_strides, b, h)
    v, dv = _head_pointer(v, v_strides, b, h), _head_pointer(dv, dv_strides, b, h)
    keys = first + tl.arange(0, BLOCK_K)
    k_tile = _load_tile(k, k_strides, first, Tk, D, BLOCK_K, BLOCK_D, True)
    v_tile = _load_tile(v, v_strides, first, Tk, D, BLOCK_K, BLOCK_D, True)
    dk_acc = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv_acc = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    bounds = _loop_bounds(first, tl.minimum(first + BLOCK_K, Tk), -high, -low, Tq, BLOCK_Q)
    for masked in tl.static_range(2):
        for member in range(group):
            q_head = _head_pointer(q, q_strides, b, h * group + member)
            dout_head = _head_pointer(dout, dout_strides, b, h * group + member)
            row_offset = (tl.cast(head, tl.int64) * group + member) * Tq
            for step in range(bounds[2 * masked], bounds[2 * masked + 1], BLOCK_Q):
                start = _step_start(step, bounds) if masked else step
                queries = start + tl.arange(0, BLOCK_Q)
                q_tile = _load_tile(q_head, q_strides, start, Tq, D, BLOCK_Q, BLOCK_D, masked)
                scores = _matmul_transposed(k_tile, q_tile)
                row_lse = _load_vector(lse + row_offset, queries, Tq, float("inf"), masked)
                probs = tl.exp2(scores * scale - row_lse[None, :] * LOG2_E)
                if masked:
                    visible = _visible(keys, queries, -high, -low, Tq)
                    probs = tl.where(visible, probs, 0.0)
                dout_tile = _load_tile(
                    dout_head, dout_strides, start, Tq, D, BLOCK_Q, BLOCK_D, masked
                )
                dv_acc = matmul_add(cast(probs, q_tile.dtype), dout_tile, dv_acc)
                dprobs = _matmul_transposed(v_tile, dout_tile)
                row_delta = _load_vector(delta + row_offset, queries, Tq, 0.0, masked)
                dscores = cast(probs * (dprobs - row_delta[None, :]), q_tile.dtype)
                dk_acc = matmul_add(dscores, q_tile, dk_acc)
    _store_tile(dk, dk_strides, first, Tk, dk_acc * (scale * LN_2), D)
    _store_tile(dv, dv_strides, first, Tk, dv_acc, D)


# ------------------------------------------------------------------ launches


def forward(q: Tensor, k: Tensor, v: Tensor, limits: Band, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of every query (B, H, Tq)."""
    (B, H, Tq, D), (KV, Tk) = q.shape, k.shape[1:3]
    out = torch.empty_like(q)
    lse = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    tiling, _, _ = tilings(q)
    launch(
        flash_forward,
        (B * H * block_count(Tq, tiling.queries),),
        *(q, k, v, out, lse),
        *(x.stride() for x in (q, k, v, out)),
        *(B * H, H, H // KV, Tq, Tk, *limits, scale * LOG2_E.value),
        H // KV * _heads_at_once(B * KV, 2, k),
        POSITIVE_SCALE=scale > 0,
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
    """Return the gradients of q, k and v."""
    (B, H, Tq, D), (KV, Tk) = q.shape, k.shape[1:3]
    group = H // KV
    _, by_queries, by_keys = tilings(q)
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    shape = (group, Tq, Tk, *limits, scale * LOG2_E.value)
    launch(
        flash_dq,
        (B * H * block_count(Tq, by_queries.queries),),
        *(q, k, v, out, lse, dout, dq, delta),
        *(x.stride() for x in (q, k, v, out, dout, dq)),
        *(B * H, H, *shape, group * _heads_at_once(B * KV, 2, k)),
        **by_queries.constants(D),
    )
    launch(
        flash_dkdv,
        (B * KV * block_count(Tk, by_keys.keys),),
        *(q, k, v, lse, delta, dout, dk, dv),
        *(x.stride() for x in (q, k, v, dout, dk, dv)),
        *(B * KV, KV, *shape, _heads_at_once(B * KV, 2 * group, q)),
        **by_keys.constants(D),
    )
    return dq, dk, dv


def _heads_at_once(heads: int, heads_read: int, x: Tensor) -> int:
    """Return how many heads may run at once, if a program reads `heads_read` heads like x's."""
    bytes_per_head = heads_read * x.shape[2] * x.shape[3] * x.element_size()
    return max(1, min(heads, CACHE_BYTES // max(1, bytes_per_head)))


# ------------------------------------------------------------------ validation


def _with_int32_offsets(x: Tensor) -> Tensor:
    """Copy x to contiguous memory if offsets within a tile would exceed 32 bits."""
    overflows = any(MAX_HEAD_DIM * stride >= 2**31 for stride in x.stride()[2:])
    return x.contiguous() if overflows else x


def _require_supported(q: Tensor, v: Tensor, dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"got dropout={dropout}, which this kernel does not support; use "
            f"memlab.attention.flash_attention, or set it to 0"
        )
    if q.dtype not in DTYPES:
        raise ValueError(
            f"got {q.dtype}, and this kernel supports float32, float16 and bfloat16; cast q, k and "
            f"v, or use memlab.attention.flash_attention"
        )
    if q.shape[3] != v.shape[3]:
        raise ValueError(
            f"got a head dimension of {q.shape[3]} and one of {v.shape[3]} for v, which this "
            f"kernel does not support; use memlab.attention.flash_attention"
        )
    if q.shape[3] > MAX_HEAD_DIM:
        raise ValueError(
            f"got a head dimension of {q.shape[3]}, and this kernel supports up to "
            f"{MAX_HEAD_DIM}; use memlab.attention.flash_attention"
        )
