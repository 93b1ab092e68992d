"""Flash attention: attention by tiles, whose score matrix never exists.

Saves    the T² weights a head. For backward it keeps q, k, v, the result, and one number a query:
         the logarithm of the sum that softmax divides by.
Costs    the scores once more in backward: 7 products of matrices where `attention_reference` takes
         6. Yet it is faster: a tile stays in the processor's cache, and a causal mask skips half.
Source   Dao et al. 2022, arXiv 2205.14135; Dao 2023 (FlashAttention-2), 2307.08691, algorithms 1
         and 2; the running sum: Milakov and Gimelshein 2018, 1805.02867.

Adds to memlab.reference.tiled_attention: grouped queries, windows, dropout, any alignment and
dtype, autocast, several heads at once in a tile, and powers of 2.

Softmax needs the highest score of a row before it can sum. By tiles that is not known; so a row
carries what holds for the keys so far, and where a higher score turns up, corrects it:

    top    the highest score             top'   = max(top, max(scores))
    total  the sum of e^(score - top)    total' = total · e^(top - top') + Σ e^(scores - top')
    mixed  the sum of e^(score - top)·v  mixed' = mixed · e^(top - top') + e^(scores - top') v
    end    out = mixed / total           lse    = top + ln total          (log-sum-exp)

Backward makes the weights again, in one step, as e^(scores - lse):

    dv = weightsᵀ dout                   dscores = weights ∘ (dout vᵀ - rowsum(dout ∘ out))
    dq = scale · dscores k               dk      = scale · dscoresᵀ q

What is easily done wrong:

    autograd through the loop    would save every tile: T² again. Hence a Function of our own
    -∞ - (-∞)                    is NaN, in a row that has seen no key yet: it counts from 0
    a row that sees no key       has total = 0. Its result is 0, its lse +∞: e^(… - ∞) = 0 makes its
                                 gradients 0 too
    the scale                    belongs into the lse as into the scores
    grouped queries              the gradients of a key are summed over the queries that share it.
                                 They are rows of one matrix here, so the product does it
    dropout                      multiplies the weights by `kept`, 0 or 1/(1 - p), and their
                                 gradient too; but not the weights before it in dscores

Dropout's mask is not kept. Its generator is its own: both passes seed it alike and visit the tiles
in the same order. The seed is one number of torch's CPU generator, whatever the device and size.

All is computed in float32 (of float64, in float64). Powers are of 2, as in production: scores are
multiplied by log₂e up front, with the scale, and 2^x takes a third of the time of e^x.

Production's kernel keeps a tile in the registers of a GPU, where ours is a tensor, and rounds the
weights to bfloat16 for its tensor cores. Its backward adds to dq from many blocks at once, in no
fixed order; ours gives the same bits each time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from memlab.attention.reference import queries_to_a_key
from memlab.attention.tiling import (
    Alignment,
    Band,
    Tile,
    TileRow,
    Window,
    band,
    hidden,
    rows_of_tiles,
    spans,
)
from memlab.internals.torch_internals import FakeTensor

LOG2_E = math.log2(math.e)
TILES_AT_ONCE = 4  # of as many heads: small products leave a processor waiting


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
    """Attention, exactly, in memory that grows with the length and not with its square.

    q is (B, H, Tq, D), k and v are (B, KV, Tk, D), where KV divides H; returns (B, H, Tq, D), laid
    out in memory like q. alignment and window as in `attention_reference`. `dropout` is the
    probability that a weight is dropped. Scores are made for `tile` queries and keys and as many
    heads as fill 4 tiles: max(4, H/KV)·tile² numbers at most, for which backward takes room twice
    (with dropout, four times). On a GPU a larger tile has fewer kernels to start.

    ValueError for shapes, dtypes and settings that do not fit; RuntimeError in a second derivative.
    """
    if has_torch_function((q, k, v)):  # of a mode that wants to know that attention runs
        settings = {"causal": causal, "alignment": alignment, "scale": scale, "window": window}
        settings |= {"dropout": dropout, "tile": tile}
        return handle_torch_function(flash_attention, (q, k, v), q, k, v, **settings)
    q, k, v = as_autocast_wants(q, k, v)
    require_fit(q, k, v)
    _require_settings(dropout, tile)
    limits = band(q.shape[2], k.shape[2], causal=causal, alignment=alignment, window=window)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    seed = _drawn_seed() if dropout and not _has_no_values(q) else 0
    return FlashAttention.apply(q, k, v, Settings(limits, scale, dropout, tile, seed))


@dataclass(frozen=True)
class Settings:
    """All that is no tensor."""

    limits: Band
    scale: float
    dropout: float
    tile: int
    seed: int


# ------------------------------------------------------------------ a tile


def scores_of(q: Tensor, keys: Tensor, tile: Tile, settings: Settings) -> Tensor:
    """Of (S, R, D) and (S, keys, D): (S, R, keys), as powers of 2.

    S heads at once. The R rows are the tile's queries, once for each head that shares the keys.
    """
    scores = (q * (settings.scale * LOG2_E)) @ keys.mT
    if tile.kind == "partial":
        outside = hidden(tile.queries, tile.keys, settings.limits, q.device)
        scores.unflatten(1, (-1, len(tile.queries))).masked_fill_(outside, -math.inf)
    return scores


class RunningSoftmax:
    """softmax(scores) @ values for R rows, from as many keys at a time as one likes.

    Scores are powers of 2. top and total are (S, R, 1), mixed is (S, R, D).
    """

    def __init__(self, q: Tensor) -> None:
        self.top = q.new_full((*q.shape[:2], 1), -math.inf)
        self.total = torch.zeros_like(self.top)
        self.mixed = q.new_zeros(q.shape)

    def add_(self, scores: Tensor, values: Tensor, kept: Tensor | None = None) -> None:
        """(S, R, keys) more scores, which are overwritten, and (S, keys, D) values."""
        top = torch.maximum(self.top, scores.amax(dim=-1, keepdim=True))
        zero = top.masked_fill(top == -math.inf, 0)  # -inf - (-inf) is NaN
        weights = scores.sub_(zero).exp2_()
        correction = self.top.sub_(zero).exp2_()
        self.top = top
        self.total.mul_(correction).add_(weights.sum(dim=-1, keepdim=True))
        if kept is not None:
            weights.mul_(kept)
        self.mixed.mul_(correction).baddbmm_(weights, values)

    def result(self) -> tuple[Tensor, Tensor]:
        """(S, R, D), and its lse (S, R, 1): 0 and +inf for a row that saw nothing."""
        saw_nothing = self.total == 0
        out = self.mixed / self.total.masked_fill(saw_nothing, 1)
        lse = (self.top + self.total.log2()) / LOG2_E
        return out, lse.masked_fill_(saw_nothing, math.inf)


class RowGradients:
    """The gradients of R queries, and what they add to those of keys and values."""

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
        """A tile's share of dq, dk and dv; the scale is still to come. Scores are overwritten."""
        weights = scores.sub_(self.lse).exp2_()  # (S, R, keys)
        dropped = weights if kept is None else weights * kept
        dv.baddbmm_(dropped.mT, self.dout)
        dweights = self.dout @ values.mT  # (S, R, keys)
        if kept is not None:
            dweights.mul_(kept)
        dscores = dweights.sub_(self.delta).mul_(weights)
        self.dq.baddbmm_(dscores, keys)
        dk.baddbmm_(dscores.mT, self.q)


# ------------------------------------------------------------------ a row, and all of them


class Heads(NamedTuple):
    """A stack of S key/value heads of one sequence, with the G query heads that share each."""

    sequence: int
    kv_heads: range
    group: int

    def of_queries(self, x: Tensor, queries: range) -> Tensor:
        """(B, H, Tq, …) as (S, G, queries, …): a view."""
        by_group = x[self.sequence].unflatten(0, (-1, self.group))
        return _part(_part(by_group, 0, self.kv_heads), 2, queries)

    def rows(self, x: Tensor, queries: range) -> Tensor:
        """The same as rows of one matrix for each key/value head: (S, R, …), R = G·queries."""
        return self.of_queries(x, queries).flatten(1, 2).to(_precise(x))

    def columns(self, x: Tensor, keys: range) -> Tensor:
        """(B, KV, Tk, D) as (S, keys, D)."""
        stack = _part(x[self.sequence], 0, self.kv_heads)
        return _part(stack, 1, keys).to(_precise(x))

    def write_(self, x: Tensor, queries: range, rows: Tensor) -> None:
        """(S, R, …) into (B, H, Tq, …)."""
        rows_of_x = self.of_queries(x, queries)
        rows_of_x.copy_(rows.view(rows_of_x.shape))


def forward(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """The result, and the lse of every query: (B, H, Tq)."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=_precise(q), device=q.device)
    dropout = Dropout(q, settings)

    def fill(heads: Heads, row: TileRow) -> None:
        rows = heads.rows(q, row.queries)  # (S, R, D)
        softmax = RunningSoftmax(rows)
        for tile in row.visited:
            softmax.add_(
                scores_of(rows, heads.columns(k, tile.keys), tile, settings),
                heads.columns(v, tile.keys),
                dropout.kept(rows, tile),
            )
        for whole, result in zip((out, lse.unsqueeze(-1)), softmax.result(), strict=True):
            heads.write_(whole, row.queries, result)

    for heads, row in _walk(q, k, settings):
        fill(heads, row)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Those of keys and values are sums over all rows."""
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=_precise(x)) for x in (k, v))
    dropout = Dropout(q, settings)

    def fill(heads: Heads, row: TileRow) -> None:
        of_queries = (q, dout, out, lse.unsqueeze(-1))
        gradients = RowGradients(*(heads.rows(x, row.queries) for x in of_queries))
        for tile in row.visited:
            gradients.add_(
                scores_of(gradients.q, heads.columns(k, tile.keys), tile, settings),
                *(heads.columns(x, tile.keys) for x in (k, v, dk, dv)),
                dropout.kept(gradients.q, tile),
            )
        heads.write_(dq, row.queries, gradients.dq.mul_(settings.scale))

    for heads, row in _walk(q, k, settings):
        fill(heads, row)
    return dq, dk.mul_(settings.scale).to(k.dtype), dv.to(v.dtype)


def _walk(q: Tensor, k: Tensor, settings: Settings) -> Iterator[tuple[Heads, TileRow]]:
    """Every row of tiles, for every stack of heads.

    A row, and in it a tile, finds the memory as the one before it did: all that it made has died
    with the function that made it. So where tensors have no values, one of each shape is enough:
    it has the same peak, to the byte.
    """
    (B, H, Tq, _), (KV, Tk) = q.shape, k.shape[1:3]
    group = H // KV
    scores = max(1, group * min(Tq, settings.tile) * min(Tk, settings.tile))
    stack = max(1, TILES_AT_ONCE * settings.tile**2 // scores)
    rows = rows_of_tiles(Tq, Tk, settings.tile, settings.limits)
    stacks = [Heads(b, heads, group) for b in range(B) for heads in spans(KV, stack)]
    if _has_no_values(q):
        rows = list({row.shape: row.thinned() for row in rows}.values())
        stacks = list({len(heads.kv_heads): heads for heads in stacks}.values())
    for heads in stacks:
        for row in rows:
            yield heads, row


class Dropout:
    """The masks of a pass, tile by tile: the same in every pass with the same settings."""

    def __init__(self, q: Tensor, settings: Settings) -> None:
        self.probability = settings.dropout
        self.generator: torch.Generator | None = None
        if self.probability and not _has_no_values(q):
            self.generator = torch.Generator(q.device).manual_seed(settings.seed)

    def kept(self, rows: Tensor, tile: Tile) -> Tensor | None:
        """(S, R, keys): 0 with the probability p, else 1/(1 - p). None if nothing is dropped."""
        if not self.probability:
            return None
        keep = 1 - self.probability
        kept = rows.new_empty(*rows.shape[:2], len(tile.keys))
        return kept.bernoulli_(keep, generator=self.generator).div_(keep)


def _drawn_seed() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def _part(x: Tensor, dim: int, span: range) -> Tensor:
    return x.narrow(dim, span.start, len(span))


def _precise(x: Tensor) -> torch.dtype:
    """In which its sums are."""
    return torch.promote_types(x.dtype, torch.float32)


def _has_no_values(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


# ------------------------------------------------------------------ in autograd

NO_SECOND_DERIVATIVE = (
    "flash_attention has no second derivative: its backward keeps nothing of its own; use "
    "attention_reference where one is needed"
)


class FlashAttention(torch.autograd.Function):
    """The node of the graph: it saves q, k, v, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> Tensor:
        with _without_autocast(q):
            out, lse = forward(q, k, v, settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(dout, *ctx.saved_tensors, ctx.settings), None


class _Gradients(torch.autograd.Function):
    """A node of its own, so that a second derivative is refused where it is asked for."""

    @staticmethod
    def forward(ctx: Any, dout: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        with _without_autocast(dout):
            return backward(dout, *saved)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


def as_autocast_wants(*tensors: Tensor) -> list[Tensor]:
    """In the dtype of an autocast region, as torch's own attention is; float64 stays."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    asked_for = (torch.float32, torch.bfloat16, torch.float16)
    return [x.to(dtype) if x.dtype in asked_for else x for x in tensors]


def _without_autocast(x: Tensor) -> Any:
    """Its products would be rounded again."""
    available = torch.amp.is_autocast_available(x.device.type)
    return torch.autocast(x.device.type if available else "cpu", enabled=False)


# ------------------------------------------------------------------ what is refused


def require_fit(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError for shapes and dtypes of which there is no attention."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape:
        raise ValueError(f"got {shapes}; give q as (B, H, Tq, D), k and v alike as (B, KV, Tk, D)")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"got {shapes}; give all of them the same B and D, first and last")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"got q in {q.dtype}, k in {k.dtype} and v in {v.dtype}; give all of them in one dtype "
            f"of floating-point numbers"
        )
    queries_to_a_key(q.shape[1], k.shape[1])


def _require_settings(dropout: float, tile: int) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"got dropout={dropout}; give a probability from 0 to below 1")
    if tile < 1:
        raise ValueError(f"got tile={tile}; give at least 1 query and key")
