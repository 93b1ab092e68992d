"""Flash attention: attention in tiles, without storing the score matrix.

Saves    the T² probabilities per head. Backward keeps q, k, v, the output and one log-sum-exp per
         query.
Costs    the scores are recomputed in backward: 7 matmuls where `attention_reference` takes 6. It is
         still faster: a tile stays in the processor's cache, and a causal mask skips half the work.
Source   Dao et al. 2022, arXiv 2205.14135; Dao 2023 (FlashAttention-2), 2307.08691, algorithms 1
         and 2. Online softmax: Milakov and Gimelshein 2018, 1805.02867.

memlab.reference.tiled_attention is the short version. This file adds grouped queries, windows,
dropout, any alignment and dtype, autocast, several heads per tile, and powers of 2 for speed.

Softmax needs the maximum of a row before it can sum. Online softmax keeps a running max and
corrects the row sum and accumulator when a tile raises it:

    row_max    max(scores)                    row_max' = max(row_max, max(scores))
    row_sum    Σ e^(scores - row_max)         row_sum' = row_sum · e^(row_max - row_max')
                                                         + Σ e^(scores - row_max')
    acc        Σ e^(scores - row_max)·v       acc'     = acc · e^(row_max - row_max')
                                                         + e^(scores - row_max') v
    result     out = acc / row_sum            lse      = row_max + ln row_sum    (log-sum-exp)

Backward recomputes the probabilities in one step, as e^(scores - lse):

    dv = probsᵀ dout                     dscores = probs ∘ (dout vᵀ - rowsum(dout ∘ out))
    dq = scale · dscores k               dk      = scale · dscoresᵀ q

Common mistakes:

    autograd through the loop    saves every tile, T² again; use a custom Function
    -∞ - (-∞)                    is NaN in a row that has seen no key yet; subtract 0 instead
    a row that sees no key       has row_sum = 0; set its output to 0 and its lse to +∞, so that
                                 e^(… - ∞) = 0 makes its gradients 0 too
    the scale                    applies to the lse as well as to the scores
    grouped queries              a key's gradient is the sum over all queries that share the key;
                                 the matmul sums them because they are rows of one matrix
    dropout                      multiplies the probabilities by `kept`, 0 or 1/(1 - p), and their
                                 gradient; the probabilities in dscores stay undropped

Dropout's mask is not saved. Both passes seed their own generator alike and visit tiles in the same
order. The seed is one draw from torch's CPU generator, for any device and size.

Everything is computed in float32 (float64 inputs in float64). Powers are of 2, as in production
kernels: scores are multiplied by log₂e together with the scale, because 2^x takes a third of the
time of e^x.

Production kernels keep a tile in GPU registers and round the probabilities to bfloat16 for tensor
cores. Their backward adds to dq from many blocks at once, in no fixed order. This version is
deterministic.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from memlab.attention.reference import queries_per_key_head
from memlab.attention.tiling import (
    Alignment,
    Band,
    Tile,
    TileRow,
    Window,
    band,
    hidden,
    spans,
    tile_rows,
)
from memlab.internals.torch_internals import has_values
from memlab.internals.transforms import require_no_transform

LOG2_E = math.log2(math.e)
TILES_AT_ONCE = 4  # batch this many tiles' worth of heads: small matmuls underuse the processor


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
    tile: int = 256,
) -> Tensor:
    """Compute exact attention with memory linear in the sequence length.

    Scores are computed for `tile` queries and keys at a time, and for as many heads as fill 4
    tiles: at most max(4, H/KV)·tile² elements. Backward needs twice that (with dropout, four
    times). On a GPU, a larger tile launches fewer kernels.

    Args:
        q: (B, H, Tq, D).
        k: (B, KV, Tk, D), with H divisible by KV.
        v: (B, KV, Tk, Dv). In multi-head latent attention (MLA) Dv is smaller than D.
        alignment, window: as in `attention_reference`.
        dropout: the probability of dropping each attention probability, from 0 to 1.

    Returns:
        (B, H, Tq, Dv), with q's memory layout.

    Raises:
        ValueError: for shapes, dtypes or settings that do not fit.
        RuntimeError: in a second derivative.
    """
    if has_torch_function((q, k, v)):  # for modes that handle attention as one operator
        given: dict[str, Any] = {"causal": causal, "alignment": alignment, "scale": scale}
        given |= {"window": window, "dropout": dropout, "tile": tile}
        return handle_torch_function(flash_attention, (q, k, v), q, k, v, **given)
    q, k, v = cast_for_autocast(q, k, v)
    check_inputs(q, k, v)
    _require_settings(dropout, tile)
    limits = band(q.shape[2], k.shape[2], causal=causal, alignment=alignment, window=window)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    seed = _draw_seed() if dropout and has_values(q) else 0
    settings = FlashSettings(limits, scale, dropout, tile, seed)
    return FlashAttention.apply(q, k, v, settings)


@dataclass(frozen=True)
class FlashSettings:
    """The non-tensor arguments."""

    limits: Band
    scale: float
    dropout: float
    tile: int
    seed: int


# ------------------------------------------------------------------ a tile


def compute_scores(q: Tensor, keys: Tensor, tile: Tile, settings: FlashSettings) -> Tensor:
    """Compute scores (S, R, keys) from q (S, R, D) and keys (S, keys, D), in base 2.

    S counts heads. R counts the tile's queries once per query head that shares the keys.
    """
    scores = (q * (settings.scale * LOG2_E)) @ keys.mT
    if tile.kind == "partial":
        outside = hidden(tile.queries, tile.keys, settings.limits, q.device)
        scores.unflatten(1, (-1, len(tile.queries))).masked_fill_(outside, -math.inf)
    return scores


class OnlineSoftmax:
    """Compute softmax(scores) @ values for R rows, one tile of keys at a time.

    Scores are in base 2. row_max and row_sum are (S, R, 1), acc is (S, R, Dv).
    """

    def __init__(self, q: Tensor, value_dim: int) -> None:
        self.row_max = q.new_full((*q.shape[:2], 1), -math.inf)
        self.row_sum = torch.zeros_like(self.row_max)
        self.acc = q.new_zeros(*q.shape[:2], value_dim)

    def add_(self, scores: Tensor, values: Tensor, kept: Tensor | None = None) -> None:
        """Add scores (S, R, keys), which are overwritten, and values (S, keys, Dv)."""
        row_max = torch.maximum(self.row_max, scores.amax(dim=-1, keepdim=True))
        safe_max = row_max.masked_fill(row_max == -math.inf, 0)  # -inf - (-inf) is NaN
        probs = scores.sub_(safe_max).exp2_()
        correction = self.row_max.sub_(safe_max).exp2_()
        self.row_max = row_max
        self.row_sum.mul_(correction).add_(probs.sum(dim=-1, keepdim=True))
        if kept is not None:
            probs.mul_(kept)
        self.acc.mul_(correction).baddbmm_(probs, values)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return out (S, R, Dv) and lse (S, R, 1); 0 and +inf for rows without visible keys."""
        saw_nothing = self.row_sum == 0
        out = self.acc / self.row_sum.masked_fill(saw_nothing, 1)
        lse = (self.row_max + self.row_sum.log2()) / LOG2_E
        return out, lse.masked_fill_(saw_nothing, math.inf)


class RowGradients:
    """The gradients of R queries and their contributions to key and value gradients."""

    def __init__(self, q: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> None:
        self.q, self.dout, self.lse = q, dout, lse * LOG2_E
        self.delta = (dout * out).sum(dim=-1, keepdim=True)  # (S, R, 1)
        self.dq = q.new_zeros(q.shape)

    def add_(
        self,
        scores: Tensor,
        keys: Tensor,
        values: Tensor,
        dk: Tensor,
        dv: Tensor,
        kept: Tensor | None = None,
    ) -> None:
        """Add a tile's contribution to dq, dk and dv, without the scale. Overwrites scores."""
        probs = scores.sub_(self.lse).exp2_()  # (S, R, keys)
        dropped = probs if kept is None else probs * kept
        dv.baddbmm_(dropped.mT, self.dout)
        dprobs = self.dout @ values.mT  # (S, R, keys)
        if kept is not None:
            dprobs.mul_(kept)
        dscores = dprobs.sub_(self.delta).mul_(probs)
        self.dq.baddbmm_(dscores, keys)
        dk.baddbmm_(dscores.mT, self.q)


# ------------------------------------------------------------------ forward and backward passes


class Heads(NamedTuple):
    """S key/value heads of one sequence, each with the G query heads that share it."""

    sequence: int
    kv_heads: range
    group: int

    def view_queries(self, x: Tensor, queries: range) -> Tensor:
        """View (B, H, Tq, …) as (S, G, queries, …)."""
        by_group = x[self.sequence].unflatten(0, (-1, self.group))
        return _slice(_slice(by_group, 0, self.kv_heads), 2, queries)

    def rows(self, x: Tensor, queries: range) -> Tensor:
        """Return (B, H, Tq, …) as (S, R, …), where R = G·queries."""
        return self.view_queries(x, queries).flatten(1, 2).to(_accumulation_dtype(x))

    def columns(self, x: Tensor, keys: range) -> Tensor:
        """Return (B, KV, Tk, …) as (S, keys, …)."""
        stack = _slice(x[self.sequence], 0, self.kv_heads)
        return _slice(stack, 1, keys).to(_accumulation_dtype(x))

    def write_(self, x: Tensor, queries: range, rows: Tensor) -> None:
        """Copy rows (S, R, …) into x (B, H, Tq, …)."""
        rows_of_x = self.view_queries(x, queries)
        rows_of_x.copy_(rows.view(rows_of_x.shape))


def forward(q: Tensor, k: Tensor, v: Tensor, settings: FlashSettings) -> tuple[Tensor, Tensor]:
    """Return out (B, H, Tq, Dv) and lse (B, H, Tq)."""
    layout = sorted(range(4), key=q.stride, reverse=True)
    out_shape = (*q.shape[:3], v.shape[3])
    out = torch.empty_permuted(out_shape, layout, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=_accumulation_dtype(q), device=q.device)
    dropout = Dropout(q, settings)

    def fill(heads: Heads, row: TileRow) -> None:
        rows = heads.rows(q, row.queries)  # (S, R, D)
        softmax = OnlineSoftmax(rows, v.shape[3])
        for tile in row.visited:
            softmax.add_(
                compute_scores(rows, heads.columns(k, tile.keys), tile, settings),
                heads.columns(v, tile.keys),
                dropout.kept(rows, tile),
            )
        for whole, result in zip((out, lse.unsqueeze(-1)), softmax.result(), strict=True):
            heads.write_(whole, row.queries, result)

    for heads, row in _iter_rows(q, k, settings):
        fill(heads, row)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: FlashSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=_accumulation_dtype(x)) for x in (k, v))
    dropout = Dropout(q, settings)

    def fill(heads: Heads, row: TileRow) -> None:
        view_queries = (q, dout, out, lse.unsqueeze(-1))
        gradients = RowGradients(*(heads.rows(x, row.queries) for x in view_queries))
        for tile in row.visited:
            gradients.add_(
                compute_scores(gradients.q, heads.columns(k, tile.keys), tile, settings),
                heads.columns(k, tile.keys),
                heads.columns(v, tile.keys),
                heads.columns(dk, tile.keys),
                heads.columns(dv, tile.keys),
                dropout.kept(gradients.q, tile),
            )
        heads.write_(dq, row.queries, gradients.dq.mul_(settings.scale))

    for heads, row in _iter_rows(q, k, settings):
        fill(heads, row)
    return dq, dk.mul_(settings.scale).to(k.dtype), dv.to(v.dtype)


def _iter_rows(q: Tensor, k: Tensor, settings: FlashSettings) -> Iterator[tuple[Heads, TileRow]]:
    """Yield every row of tiles for every stack of heads.

    Each iteration frees its temporaries before the next one. For meta and fake tensors, one row and
    one tile of each shape therefore suffice: the peak memory is the same, to the byte.
    """
    (B, H, Tq, _), (KV, Tk) = q.shape, k.shape[1:3]
    group = H // KV
    scores = max(1, group * min(Tq, settings.tile) * min(Tk, settings.tile))
    stack = max(1, TILES_AT_ONCE * settings.tile**2 // scores)
    rows = tile_rows(Tq, Tk, settings.tile, settings.limits)
    stacks = [Heads(b, heads, group) for b in range(B) for heads in spans(KV, stack)]
    if not has_values(q):
        rows = list({row.shape: row.one_per_shape() for row in rows}.values())
        stacks = list({len(heads.kv_heads): heads for heads in stacks}.values())
    for heads in stacks:
        for row in rows:
            yield heads, row


class Dropout:
    """The dropout masks of one pass, tile by tile. Passes with equal settings get equal masks."""

    def __init__(self, q: Tensor, settings: FlashSettings) -> None:
        self.probability = settings.dropout
        self.generator: torch.Generator | None = None
        if self.probability and has_values(q):
            self.generator = torch.Generator(q.device).manual_seed(settings.seed)

    def kept(self, rows: Tensor, tile: Tile) -> Tensor | None:
        """Return a mask (S, R, keys): 0 with probability p, else 1/(1 - p). None if p is 0."""
        if not self.probability:
            return None
        keep = 1 - self.probability
        kept = rows.new_empty(*rows.shape[:2], len(tile.keys))
        return kept.bernoulli_(keep, generator=self.generator).div_(keep or 1)


def _draw_seed() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def _slice(x: Tensor, dim: int, span: range) -> Tensor:
    return x.narrow(dim, span.start, len(span))


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the accumulation dtype: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


# ------------------------------------------------------------------ autograd

NO_SECOND_DERIVATIVE = (
    "flash_attention has no second derivative: its backward saves no tensors; use "
    "attention_reference if you need one"
)


class FlashAttention(torch.autograd.Function):
    """The autograd function. It saves q, k, v, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: FlashSettings) -> Tensor:
        with _autocast_disabled(q):
            out, lse = forward(q, k, v, settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_FlashGradients.apply(dout, *ctx.saved_tensors, ctx.settings), None


class _FlashGradients(torch.autograd.Function):
    """A separate node for the gradients, so that a second derivative raises an error."""

    @staticmethod
    def forward(ctx: Any, dout: Tensor, *saved_and_settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        with _autocast_disabled(dout):
            return backward(dout, *saved_and_settings)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def cast_for_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast to the autocast dtype, like torch's attention; float64 stays."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    castable = (torch.float32, torch.bfloat16, torch.float16)
    return [x.to(dtype) if x.dtype in castable else x for x in tensors]


def _autocast_disabled(x: Tensor) -> Any:
    """Disable autocast, which would round the matmuls again."""
    available = torch.amp.is_autocast_available(x.device.type)
    return torch.autocast(x.device.type if available else "cpu", enabled=False)


# ------------------------------------------------------------------ checks


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the shapes and dtypes fit together."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"got {shapes}; give q as (B, H, Tq, D), k as (B, KV, Tk, D), and v as (B, KV, Tk, Dv)"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"got {shapes}; give all of them the same B, and q and k the same D, last")
    if not q.shape[3] or not v.shape[3]:
        raise ValueError(f"got {shapes}, with a head dimension of 0; give at least 1")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"got q in {q.dtype}, k in {k.dtype} and v in {v.dtype}; give all of them in one "
            f"floating-point dtype"
        )
    queries_per_key_head(q.shape[1], k.shape[1])
    require_no_transform("flash_attention", "use attention_reference there", (q, k, v))


def _require_settings(dropout: float, tile: int) -> None:
    if not 0 <= dropout <= 1:
        raise ValueError(f"got dropout={dropout}; give a probability from 0 to 1")
    if tile < 1:
        raise ValueError(f"got tile={tile}; give at least 1 query and key")
