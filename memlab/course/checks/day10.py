"""Day 10: flash attention."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from memlab.checkpointing.operations import Operations
from memlab.course.bill_steps import momentum_in_8_bits
from memlab.course.exercises import Bill, Day, Wrong, distinct, require
from memlab.course.properties import (
    SLACK,
    is_tensor,
    limited,
    limited_outside_of_tensors,
    peaks,
    rounding,
    shares_no_storage,
)
from memlab.course.solutions import checked
from memlab.internals.torch_internals import TorchDispatchMode
from memlab.metering import measure
from memlab.reference.tiled_attention import add_tile, attend, flash, hide, plan
from memlab.trace import Trace

Add = Callable[..., tuple[Tensor, Tensor, Tensor]]
Planner = Callable[[int, int, int, int], list[tuple[slice, list[slice]]]]
Attend = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
Flash = Callable[..., Tensor]  # (q, k, v, tile, shift)

_TORCHS_OWN = "scaled_dot_product"
_LIBRARIES = (
    "memlab.attention",
    "memlab.model",
    "torch.nn.attention",
    "torch.nn.functional.scaled_dot_product_attention",
    "torch._scaled_dot_product_*",
)

# ------------------------------------------------------------------ cases and comparisons


def _whole(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    """out and lse from the whole score matrix: the oracle."""
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    scores = hide(scores, slice(0, q.shape[-2]), slice(0, k.shape[-2]), shift)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return (scores - lse[..., None]).exp() @ v, lse


@dataclass(frozen=True)
class AttentionCase:
    """One call of attend or flash; `shape` is (…, Tq, Tk, D)."""

    what: str
    shape: tuple[int, ...]
    tile: int
    shift: int
    dtype: torch.dtype = torch.float32
    stretch: float = 1

    def __str__(self) -> str:
        what = f"{self.queries} × {self.keys} scores, tile={self.tile}, shift={self.shift}"
        return f"{what} ({self.what})"

    @property
    def heads(self) -> int:
        return math.prod(self.shape[:-3])

    @property
    def queries(self) -> int:
        return self.shape[-3]

    @property
    def keys(self) -> int:
        return self.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.shape[-1]

    @property
    def elements(self) -> int:
        """The elements of q."""
        return self.heads * self.queries * self.head_dim

    @property
    def scores(self) -> int:
        """The scores of all visited tiles."""
        rows = plan(self.queries, self.keys, self.tile, self.shift)
        pairs = ((row, column) for row, visited in rows for column in visited)
        return self.heads * sum((r.stop - r.start) * (c.stop - c.start) for r, c in pairs)

    @property
    def kept_bytes(self) -> int:
        """Bytes of out and lse in float32."""
        return 4 * self.heads * self.queries * (self.head_dim + 1)

    @property
    def bytes_of_tiles(self) -> int:
        """Bytes of eight tiles and their rows."""
        return 8 * 4 * self.heads * self.tile * (self.tile + self.head_dim)


@cache
def _arguments(case: AttentionCase) -> tuple[Tensor, ...]:
    """q, k, v, and a gradient of the result."""
    *leading, queries, keys, head_dim = case.shape
    # With seed 0 the keys of the first case cancel, and two mistakes give the same result.
    random = torch.Generator().manual_seed(1)
    lengths = (queries, keys, keys, queries)
    q, *others = (torch.randn(*leading, n, head_dim, generator=random) for n in lengths)
    return tuple(x.to(case.dtype) for x in (case.stretch * q, *others))


# With a head dimension of 4 the scale is 1/2, and a forgotten scale looks like a doubled sum.
CASES = (
    AttentionCase("one tile, no mask", (1, 2, 2, 3), 2, 2),
    AttentionCase("a row of 2 tiles", (1, 2, 4, 3), 2, 4),
    AttentionCase("2 × 2 tiles", (1, 4, 4, 3), 2, 4),
    AttentionCase("the last tiles are smaller", (1, 5, 5, 3), 2, 5),
    AttentionCase("causal", (1, 4, 4, 3), 2, 0),
    AttentionCase("causal, 2 sequences in heads", (2, 3, 7, 7, 4), 3, 0),
    AttentionCase("float64, scores up to thousands", (2, 8, 8, 4), 4, 0, torch.float64, 1e3),
    AttentionCase("more keys than queries, top-left", (1, 3, 8, 3), 2, 0),
    AttentionCase("more keys than queries, bottom-right", (1, 3, 8, 3), 2, 5),
    AttentionCase("more queries than keys, the first see nothing", (1, 7, 4, 3), 2, -3),
)
# Costs are measured on these. Lengths are neither powers of two nor multiples of the tile, and with
# several heads a tile is small beside q.
LONG = AttentionCase("causal", (1, 3, 76, 76, 8), 12, 0)
FEWER_KEYS, MORE_KEYS = (
    AttentionCase("few queries", (1, 3, 32, keys, 2), 32, keys) for keys in (64, 512)
)
UNEVEN = AttentionCase("more queries than keys, bottom-right", (2, 30, 22, 5), 4, -8)
OUTSIDE = 4 * LONG.heads * LONG.queries * LONG.keys // 2  # half of the bytes of the score matrix


def _require_tuple(call: str, got: Any, names: tuple[str, ...], like: tuple[Tensor, ...]) -> None:
    """A tuple, or a list, of tensors of these shapes and dtypes."""
    kind, is_several = type(got).__name__, isinstance(got, (tuple, list))
    require(
        is_several and len(got) == len(names),
        f"{call} gave {kind}{f' of {len(got)}' if is_several else ''}; wanted a tuple "
        f"of {', '.join(names)}.{' Is there a return?' if got is None else ''}",
    )
    for name, one, wanted in zip(names, got, like, strict=True):
        is_tensor(f"{call}, {name},", one, dtype=wanted.dtype, shape=tuple(wanted.shape))


def _require_near(
    what: str, got: Tensor, wanted: Tensor, within: float = 2e-5, allowed: Tensor | None = None
) -> None:
    """Infinities have to be equal, and NaN has its own message.

    float64 allows rounding errors only: a row_sum with 10⁻⁶ added is refused.
    """
    within = 1e-10 if got.dtype == torch.float64 else within
    allowed = within * (1 + wanted.abs()) if allowed is None else allowed
    nans = got.isnan().sum().item()
    require(not nans, f"{what}: {nans} of {got.numel()} elements are NaN.")
    off = (got.double() - wanted).abs() > allowed
    off |= (got.isinf() | wanted.isinf()) & (got.double() != wanted)
    if off.any():
        place = tuple(off.nonzero()[0].tolist())
        where = ", ".join(map(str, place))
        mine, right = distinct(got[place].item(), wanted[place].item())
        require(
            False,
            f"{what}[{where}] is {mine}; wanted {right}. {off.sum()} of {got.numel()} elements are "
            f"wrong.",
        )


def _require_untouched(call: str, **pairs: tuple[Tensor, Tensor]) -> None:
    touched = [name for name, (now, before) in pairs.items() if not torch.equal(now, before)]
    require(not touched, f"{call} changed its arguments: {', '.join(touched)}.")


# ------------------------------------------------------------------ 10.1: online softmax

_STATE = ("row_max", "row_sum", "acc")


@dataclass(frozen=True)
class TileRun:
    """Several calls of add_tile, with `keys` keys in each; `change` is applied to the scores."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    change: Callable[[Tensor], Tensor] = lambda scores: scores


def _hide_first_keys(scores: Tensor) -> Tensor:
    return scores.index_put((torch.tensor(0), torch.tensor([0, 1])), torch.tensor(-math.inf))


def _hide_middle_keys(scores: Tensor) -> Tensor:
    return scores.index_fill(-1, torch.tensor([2, 3]), -math.inf)


def _low_and_high(scores: Tensor) -> Tensor:
    return scores + torch.tensor([[1000.0], [-1000.0]], dtype=scores.dtype)


TILE_RUNS = {
    "one tile of 2 scores": TileRun((1,), (2,)),
    "2 tiles, the lower score last": TileRun((1,), (1, 1), change=lambda s: s.sort(-1)[0].flip(-1)),
    "2 tiles, the higher score last": TileRun((1,), (1, 1), change=lambda s: s.sort(-1)[0]),
    "3 rows, tiles of 4, 1 and 3": TileRun((3,), (4, 1, 3), change=lambda s: 3 * s),
    "scores of a thousand and more": TileRun((2,), (2, 2), torch.float64, lambda s: 1000 * (s + 4)),
    "one row high, one low by a thousand": TileRun((2,), (2, 3), torch.float64, _low_and_high),
    "all scores below −10⁶": TileRun((2,), (2, 2), torch.float64, lambda s: s - 1e6),
    "a row whose first tile is hidden, all −∞": TileRun((2,), (2, 2), change=_hide_first_keys),
    "a tile that no row sees": TileRun((2,), (2, 2, 2), change=_hide_middle_keys),
    "a row that sees nothing": TileRun(
        (2,), (2, 2), change=lambda s: s.index_fill(0, torch.tensor(1), -math.inf)
    ),
    "2 sequences of 2 heads": TileRun((2, 2, 3), (4, 4), torch.float64, lambda s: 2 * s),
}


def _check_add(answer: Add) -> str:
    for what, run in TILE_RUNS.items():
        _check_run(answer, f"add_tile, {what}", run)
    _check_memory_of_add(answer)
    return (
        f"row_max, row_sum and acc are right after each tile of {len(TILE_RUNS)} runs · −∞ makes "
        f"no NaN · the state is 2 + D elements per row"
    )


def _check_run(answer: Add, call: str, run: TileRun, head_dim: int = 3) -> None:
    random = torch.Generator().manual_seed(0)
    total = sum(run.keys)
    scores = run.change(torch.randn(*run.rows, total, generator=random, dtype=run.dtype))
    values = torch.randn(*run.rows[:-1], total, head_dim, generator=random, dtype=run.dtype)
    state, seen = _empty_state(run.rows, head_dim, run.dtype), 0
    for number, count in enumerate(run.keys, 1):
        part = slice(seen, seen + count)
        given = *state, scores[..., part].clone(), values[..., part, :].clone()
        copies = [x.clone() for x in given]
        got = answer(*given)
        seen += count
        after = f"{call}: after tile {number}"
        wanted, summed = _state_after(scores[..., :seen], values[..., :seen, :])
        _require_tuple(after, got, _STATE, tuple(x.to(run.dtype) for x in wanted))
        pairs = zip((*_STATE, "scores", "values"), zip(given, copies, strict=True), strict=True)
        _require_untouched(after, **dict(pairs))
        names = (*_STATE, "scores", "values")
        for name, one, right, terms in zip(_STATE, got, wanted, summed, strict=True):
            _require_near(f"{after} {name}", one, right, allowed=rounding(run.dtype) * terms)
            shares_no_storage(f"{after}: {name}", one, **dict(zip(names, given, strict=True)))
        state = got


def _empty_state(rows: tuple[int, ...], head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    row_max = torch.full((*rows, 1), -math.inf, dtype=dtype)
    return row_max, torch.zeros_like(row_max), torch.zeros(*rows, head_dim, dtype=dtype)


def _state_after(scores: Tensor, values: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """From all scores at once, in float64; and the sizes of the terms that were summed."""
    scores, values = scores.double(), values.double()
    row_max = scores.amax(-1, keepdim=True)
    probs = (scores - row_max.masked_fill(row_max == -math.inf, 0)).exp()
    row_sum = probs.sum(-1, keepdim=True)
    return (row_max, row_sum, probs @ values), (0 * row_sum, row_sum, probs @ values.abs())


def _check_memory_of_add(answer: Add) -> None:
    """With R rows and K keys: no tensor of R · K · D elements, and only the state is left."""
    R, K, D = 16, 32, 8
    scores, values = torch.randn(R, K), torch.randn(K, D)
    state, kept = _empty_state((R,), D, torch.float32), []
    trace = measure(lambda: kept.append(answer(*state, scores, values)))
    largest = max(math.prod(e.shape) for e in trace.events)
    call = f"add_tile of {R} × {K} scores"
    require(
        largest <= 2 * R * K,
        f"{call} allocates a tensor of {largest:,} elements; wanted at most {2 * R * K:,}, twice "
        f"the number of scores.",
    )
    held, wanted = sum(e.bytes for e in trace.events if e.phase != "before"), 4 * R * (2 + D)
    require(
        held <= wanted, f"{call} keeps {held:,} bytes; wanted {wanted:,}, 2 + D elements per row."
    )


# ------------------------------------------------------------------ 10.2: the plan of tiles

PLANS = (
    ((8, 8, 2, -6), "the first queries see nothing, by several tiles"),
    ((4, 4, 4, 4), "one tile"),
    ((3, 11, 2, 4), "many keys, and a smaller last row"),
    ((4, 4, 2, 4), "no mask"),
    ((5, 5, 2, 5), "the last tiles are smaller"),
    ((6, 6, 2, 0), "causal"),
    ((5, 5, 2, 0), "causal, the last tiles are smaller"),
    ((3, 8, 2, 0), "more keys than queries, top-left"),
    ((3, 8, 2, 5), "more keys than queries, bottom-right"),
    ((1, 9, 4, 8), "one query at the end of a cache of 9 keys"),
    ((6, 6, 3, 1), "each query sees one more key"),
    ((5, 8, 2, 1), "each query sees one more key, and the last row is smaller"),
    ((7, 4, 2, -3), "more queries than keys, the first see nothing"),
    ((10, 4, 3, 0), "more queries than keys, top-left"),
    ((37, 53, 8, 16), "bottom-right"),
    ((64, 64, 16, 0), "causal"),
)

SpanRow = tuple[str, list[str]]  # queries and visited keys, each such as "0:2"


def _check_plan(answer: Planner) -> str:
    for (queries, keys, tile, shift), what in PLANS:
        call = f"plan({queries}, {keys}, {tile}, {shift}), {what},"
        got = _spans_of_plan(call, answer(queries, keys, tile, shift))
        _compare_plans(call, got, _plan_by_pairs(queries, keys, tile, shift))
    count = sum(len(visited) for _, visited in answer(64, 64, 16, 0))
    return (
        f"{len(PLANS)} plans match a test of every pair · a causal mask leaves {count} of 4 × 4 "
        f"tiles"
    )


def _plan_by_pairs(queries: int, keys: int, tile: int, shift: int) -> list[SpanRow]:
    """Visits a tile if any of its pairs is visible."""
    rows = [range(n, min(n + tile, queries)) for n in range(0, queries, tile)]
    columns = [range(n, min(n + tile, keys)) for n in range(0, keys, tile)]
    return [
        (_span(row), [_span(c) for c in columns if any(j <= i + shift for i in row for j in c)])
        for row in rows
    ]


def _span(part: Any) -> str:
    return f"{part.start}:{part.stop}"


def _spans_of_plan(call: str, got: Any) -> list[SpanRow]:
    require(
        isinstance(got, (list, tuple)),
        f"{call} gave {type(got).__name__}; wanted a list of rows."
        f"{' Is there a return?' if got is None else ''}",
    )
    rows = []
    for row in got:
        require(
            isinstance(row, (tuple, list)) and len(row) == 2 and isinstance(row[1], (list, tuple)),
            f"{call} has the row {row!r}; wanted a pair: a slice of queries, and a list of slices "
            f"of keys.",
        )
        for part in (row[0], *row[1]):
            require(
                _is_int_slice(part),
                f"{call} contains {part!r}; wanted slices from one int to another, without a step, "
                f"such as slice(0, 2).",
            )
        rows.append((_span(row[0]), [_span(column) for column in row[1]]))
    return rows


def _is_int_slice(part: Any) -> bool:
    """hide calculates with both ends."""
    if not isinstance(part, slice) or part.step not in (None, 1):
        return False
    return type(part.start) is int and type(part.stop) is int


def _compare_plans(call: str, got: list[SpanRow], wanted: list[SpanRow]) -> None:
    rows, right = [row for row, _ in got], [row for row, _ in wanted]
    require(
        rows == right,
        f"{call} has rows for the queries {', '.join(rows) or 'none'}; wanted {', '.join(right)}.",
    )
    for (row, visited), (_, columns) in zip(got, wanted, strict=True):
        require(
            visited == columns,
            f"{call} visits, for the queries {row}, the keys {', '.join(visited) or 'none'}; "
            f"wanted {', '.join(columns) or 'none'}.",
        )


# ------------------------------------------------------------------ bytes and matmuls

aten = torch.ops.aten
_FIRST_FACTOR = {aten.mm: 0, aten.bmm: 0}  # its position among the arguments
_FIRST_FACTOR |= dict.fromkeys((aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_), 1)

MatmulSize = tuple[int, int, int, int]  # batch, rows, inner dimension, columns


class MatmulRecorder(TorchDispatchMode):
    """Records the size of each matmul. torch's fused attention raises Wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[MatmulSize] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _FIRST_FACTOR.get(func.overloadpacket)
        if place is not None:
            *batch, rows, inner = args[place].shape
            self.sizes.append((math.prod(batch), rows, inner, args[place + 1].shape[-1]))
        if _TORCHS_OWN in str(func):
            raise Wrong(f"Your answer calls {func}. Write those lines yourself.")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class AttentionCosts:
    """The trace, operations and matmuls of one call."""

    trace: Trace
    operations: int
    matmuls: list[MatmulSize]

    @property
    def peak_bytes(self) -> int:
        """The peak without the arguments."""
        given = sum(e.bytes for e in self.trace.events if e.phase == "before")
        return self.trace.peak_bytes - given


def _matmuls_of(run: Callable[[], Any]) -> tuple[int, list[MatmulSize]]:
    with Operations() as counter, MatmulRecorder() as recorder:
        run()
    return counter.total, recorder.sizes


def _costs_of(run: Callable[[], Any]) -> AttentionCosts:
    operations, matmuls = _matmuls_of(run)
    kept: list[Any] = []
    return AttentionCosts(measure(lambda: kept.append(run())), operations, matmuls)


def _require_costs(
    call: str,
    case: AttentionCase,
    costs: AttentionCosts,
    *,
    room: int,
    matmuls: int,
    of_scores: int,
) -> int:
    """Require `matmuls` matmuls per visited tile; `of_scores` of them compute scores or dP.

    Return the number of elements that those compute."""
    _require_no_matrix(call, case, costs.trace)
    made = _require_tiles(call, case, costs.matmuls, of_scores)
    require(
        costs.peak_bytes <= room,
        f"{call} needs {costs.peak_bytes:,} bytes at its peak beside its arguments; wanted at most "
        f"{room:,}. Is a tensor kept for each tile, or one several times as large as q? Alive at "
        f"the peak: {_largest_at_peak(costs.trace)}.",
    )
    wanted = matmuls * 2 * case.head_dim * case.scores
    require(  # row sums as a matmul take a few more
        costs.operations <= 1.1 * wanted,
        f"{call} needs {costs.operations:,} operations; wanted {wanted:,}: {matmuls} matmuls for "
        f"each visited tile.",
    )
    return made


def _require_no_tile_stays(
    call: str, run: Callable[[AttentionCase], Callable[[], Any]], *, of_k: int
) -> None:
    """Require that more keys add at most `of_k` tensors of k's size, k and v included. Tiles kept
    until the end of their row would add 16 more."""
    few, many = (measure(run(case)).peak_bytes for case in (FEWER_KEYS, MORE_KEYS))
    more = 4 * MORE_KEYS.heads * MORE_KEYS.head_dim * (MORE_KEYS.keys - FEWER_KEYS.keys)
    require(
        many - few <= of_k * more,
        f"{call} has a peak {many - few:,} bytes higher than with {FEWER_KEYS.keys} keys, but k is "
        f"only {more:,} bytes larger. Is a tensor kept for each tile of a row?",
        evidence=(call, "tiles of a row"),
    )


def _require_no_matrix(call: str, case: AttentionCase, trace: Trace) -> None:
    made = [e for e in trace.events if e.bytes > 0 and e.phase != "before"]
    largest = max(made, key=lambda e: math.prod(e.shape), default=None)
    count = math.prod(largest.shape) if largest else 0
    shape = f", {largest.shape}" if largest else ""
    require(
        count <= case.elements,
        f"{call} allocates a tensor of {count:,} elements{shape}; wanted at most {case.elements:,},"
        f" as many as q has. A tile has {case.heads * case.tile**2:,} scores; the score matrix has "
        f"{case.heads * case.queries * case.keys:,}.",
    )


def _require_tiles(call: str, case: AttentionCase, sizes: list[MatmulSize], of_scores: int) -> int:
    """Require tiles, not strips, even within one head; each visited tile is computed `of_scores`
    times.

    One more column is allowed (for row_sum or lse), and so are row sums as a matmul.
    """
    inner = [size for size in sizes if 1 not in (size[1], size[3])]
    widest = max(case.tile, case.head_dim + 1)
    for _, rows, summed, columns in inner:
        require(
            max(rows, summed, columns) <= widest,
            f"{call} multiplies {rows} × {summed} by {summed} × {columns} elements; wanted tiles: "
            f"at most {case.tile} queries and {case.tile} keys in one matmul.",
        )
    widths = (case.head_dim, case.head_dim + 1)
    made = sum(batch * rows * columns for batch, rows, n, columns in inner if n in widths)
    wanted = of_scores * case.scores
    what = {1: "q kᵀ", 3: "q kᵀ twice, dout vᵀ once"}[of_scores]
    require(
        made == wanted,
        f"{call} computes {made:,} elements with matmuls of tiles ({what}); wanted {wanted:,}: "
        f"each tile of the plan, at most {case.tile} × {case.tile}, and no other.",
    )
    return made


def _largest_at_peak(trace: Trace) -> str:
    """The three shapes and dtypes that use the most bytes, without the arguments."""
    alive = [e for e in trace.alive(trace.peak_position) if e.phase != "before"]
    taken: Counter[tuple[tuple[int, ...], str]] = Counter()
    for event in alive:
        taken[event.shape, event.dtype] += event.bytes
    number = Counter((event.shape, event.dtype) for event in alive)
    kinds = sorted(taken, key=lambda kind: (-taken[kind], kind))[:3]
    return ", ".join(f"{number[kind]} of {kind[0]} in {kind[1]}" for kind in kinds)


# ------------------------------------------------------------------ 10.3: forward by tiles


def _check_attend(answer: Attend) -> str:
    for case in (*CASES, LONG, UNEVEN):
        q, k, v, _ = _arguments(case)
        given = q.clone(), k.clone(), v.clone()
        call = f"attend, {case}"
        got = answer(*given, case.tile, case.shift)
        out, lse = _whole(q.double(), k.double(), v.double(), case.tile, case.shift)
        _require_tuple(call, got, ("out", "lse"), (out.to(q.dtype), lse.to(q.dtype)))
        _require_untouched(call, q=(given[0], q), k=(given[1], k), v=(given[2], v))
        _require_near(f"{call}: out", got[0], out)
        _require_near(f"{call}: lse", got[1], lse)
    peak, made = _check_costs_of_attend(answer)
    return (
        f"out and lse match float64, with both alignments · {LONG.queries} × {LONG.keys} scores: a "
        f"peak of {peak:,} bytes, and per head {made // LONG.heads:,} of "
        f"{LONG.queries * LONG.keys:,} scores computed, in tiles"
    )


def _check_costs_of_attend(answer: Attend) -> tuple[int, int]:
    def run(case: AttentionCase) -> Callable[[], Any]:
        q, k, v, _ = (x.clone() for x in _arguments(case))
        return lambda: answer(q, k, v, case.tile, case.shift)

    costs = _costs_of(run(LONG))
    room = 2 * LONG.kept_bytes + LONG.bytes_of_tiles
    made = _require_costs(f"attend, {LONG}", LONG, costs, room=room, matmuls=2, of_scores=1)
    _require_tiles(f"attend, {UNEVEN}", UNEVEN, _matmuls_of(run(UNEVEN))[1], 1)
    _require_no_tile_stays(f"attend, {MORE_KEYS}", run, of_k=6)
    limited_outside_of_tensors(f"attend, {LONG},", run(LONG), OUTSIDE)
    return costs.peak_bytes, made


# ------------------------------------------------------------------ 10.4: backward by tiles

_QKV, _GRADIENTS = ("q", "k", "v"), ("dq", "dk", "dv")


def _check_flash(answer: Flash) -> str:
    for case in (*CASES, LONG, UNEVEN):
        _check_gradients(answer, case)
    held, peak, made = _check_costs_of_flash(answer)
    _check_is_a_function(answer)
    _check_two_graphs(answer)
    _check_nan_is_kept(answer)
    return (
        f"gradients match float64, with both alignments · {held:,} bytes held for backward: out "
        f"and lse · {LONG.queries} × {LONG.keys} scores: a peak of {peak:,} bytes in both passes, "
        f"and in tiles {made // (3 * LONG.heads):,} scores per head computed twice and dP once"
    )


def _check_gradients(answer: Flash, case: AttentionCase) -> None:
    call = f"flash, {case}"
    dout = _arguments(case)[3].clone()
    mine, out = _check_result(answer, case)
    result = out.detach().clone()
    try:
        got = torch.autograd.grad(out, mine, dout, allow_unused=True)
    except NotImplementedError:
        for other in CASES:
            _check_result(answer, other)
        raise Wrong("flash: forward is right; backward is not written yet.") from None
    exact, right = _exactly(case)
    wanted = torch.autograd.grad(right, exact, dout.double())
    for name, one, gradient in zip(_GRADIENTS, got, wanted, strict=True):
        require(one is not None, f"{call}: backward gave None for {name}.")
        is_tensor(f"{call}, {name},", one, dtype=dout.dtype, shape=tuple(gradient.shape))
    _require_all_near(call, got, wanted)
    pairs = zip((*_QKV, "dout"), zip((*mine, dout), _arguments(case), strict=True), strict=True)
    _require_untouched(call, **dict(pairs))
    require(
        torch.equal(out, result),
        f"{call}: backward changed out, which the caller also uses. Make a new tensor.",
    )


def _check_two_graphs(answer: Flash) -> None:
    """A second call before backward must not change the gradients of the first."""
    first, second = CASES[8], CASES[5]
    mine, out = _check_result(answer, first)
    _check_result(answer, second)
    dout = _arguments(first)[3]
    got = torch.autograd.grad(out, mine, dout.clone())
    exact, right = _exactly(first)
    wanted = torch.autograd.grad(right, exact, dout.double())
    call = f"flash, {first}, with another call before backward"
    _require_all_near(f"{call} (is anything kept outside of ctx?)", got, wanted)


def _check_nan_is_kept(answer: Flash) -> None:
    """nan_to_num would hide a wrong log-sum-exp, too."""
    case = CASES[2]
    q, k, v, dout = (x.clone() for x in _arguments(case))
    q[0, 1, 0] = math.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    dq, _, dv = torch.autograd.grad(answer(*inputs, case.tile, case.shift), inputs, dout)
    require(
        bool(dq[0, 1].isnan().all() and dv.isnan().all()),
        f"flash, {case}, with NaN in a query: dv begins {dv.flatten()[:2].tolist()}; wanted NaN. A "
        f"NaN that turns into a number hides mistakes.",
        evidence=(case, "NaN"),
    )


def _check_result(answer: Flash, case: AttentionCase) -> tuple[list[Tensor], Tensor]:
    """The q, k and v that were passed, and the result with its graph."""
    call = f"flash, {case}"
    mine = [x.clone().requires_grad_() for x in _arguments(case)[:3]]
    out = answer(*mine, case.tile, case.shift)
    right = _exactly(case)[1].detach()
    is_tensor(f"{call},", out, dtype=mine[0].dtype, shape=tuple(right.shape))
    require(out.requires_grad, f"{call} gave a tensor without a graph (requires_grad is False).")
    _require_near(f"{call}: out", out.detach(), right)
    return mine, out


def _exactly(case: AttentionCase) -> tuple[list[Tensor], Tensor]:
    """q, k and v in float64, and the result from the whole score matrix."""
    exact = [x.double().requires_grad_() for x in _arguments(case)[:3]]
    q, k, v = exact
    return exact, _whole(q, k, v, case.tile, case.shift)[0]


def _require_all_near(call: str, got: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Name every wrong gradient: the set of wrong gradients distinguishes mistakes."""
    wrong: dict[str, str] = {}
    for name, one, gradient in zip(_GRADIENTS, got, wanted, strict=True):
        try:
            _require_near(f"{call}: {name}", one, gradient, within=1e-4)
        except Wrong as found:
            wrong[name] = str(found)
    require(not wrong, f"{next(iter(wrong.values()), '')} Wrong: {', '.join(wrong)}.")


def _check_costs_of_flash(answer: Flash) -> tuple[int, int, int]:
    held = _check_held_bytes(answer, LONG)
    costs = _costs_of(_both_passes(answer, LONG))
    room = 2 * LONG.kept_bytes + 5 * 4 * LONG.elements + LONG.bytes_of_tiles
    call = f"flash, {LONG}, forward and backward,"
    made = _require_costs(call, LONG, costs, room=room, matmuls=7, of_scores=3)
    _, matmuls = _matmuls_of(_both_passes(answer, UNEVEN))
    _require_tiles(f"flash, {UNEVEN}, forward and backward,", UNEVEN, matmuls, 3)
    _require_no_tile_stays(
        f"flash, {MORE_KEYS}, forward and backward,", partial(_both_passes, answer), of_k=10
    )
    limited_outside_of_tensors(call, _both_passes(answer, LONG), OUTSIDE)
    q, k, v = (x.clone().requires_grad_() for x in _arguments(LONG)[:3])
    limited(call, peaks(lambda: answer(q, k, v, LONG.tile, LONG.shift)), left=SLACK)
    return held, costs.peak_bytes, made


def _check_held_bytes(answer: Flash, case: AttentionCase) -> int:
    call = f"flash, {case}"
    q, k, v = (x.clone().requires_grad_() for x in _arguments(case)[:3])
    kept: list[Tensor] = []
    trace = measure(lambda: kept.append(answer(q, k, v, case.tile, case.shift)))
    kept.clear()
    held = sum(e.bytes for e in trace.events if e.phase != "before")
    require(
        held <= case.kept_bytes,
        f"{call} holds {held:,} bytes between forward and backward, beside q, k and v; wanted "
        f"{case.kept_bytes:,}: out, and one element per query.",
    )
    _require_no_matrix(f"{call}, forward,", case, trace)
    return held


def _both_passes(answer: Flash, case: AttentionCase) -> Callable[[], None]:
    q, k, v, dout = (x.clone() for x in _arguments(case))
    qkv = [x.requires_grad_() for x in (q, k, v)]

    def run() -> None:
        torch.autograd.grad(answer(*qkv, case.tile, case.shift), qkv, dout)

    return run


def _check_is_a_function(answer: Flash) -> None:
    q, k, v, _ = (x.clone().requires_grad_() for x in _arguments(CASES[0]))
    seen: dict[int, int] = {}  # bytes by address

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = answer(q, k, v, 2, 2)
        node = out.grad_fn
    require(
        isinstance(node, BackwardCFunction),
        f"flash gave a tensor whose grad_fn is {type(node).__name__}; wanted your own Function.",
    )
    named = dict(zip((*_QKV, "out"), (q, k, v, out), strict=True))
    missed = [name for name, x in named.items() if x.data_ptr() not in seen]
    if not missed and sum(seen.values()) < sum(x.nbytes for x in (q, k, v)) + CASES[0].kept_bytes:
        missed = ["lse"]
    require(
        not missed,
        f"flash keeps {', '.join(missed)} where hooks for saved tensors can't see them. Use "
        f"ctx.save_for_backward.",
    )


# ------------------------------------------------------------------ the bill

# The bill has used torch's attention, which is tiled, since day 1.
DAY = Day(
    exercises=(
        checked("10.1", _check_add, add_tile, rebuilds=_LIBRARIES),
        checked("10.2", _check_plan, plan, rebuilds=_LIBRARIES),
        checked("10.3", _check_attend, attend, rebuilds=_LIBRARIES),
        checked("10.4", _check_flash, flash, rebuilds=_LIBRARIES),
    ),
    bill=Bill("day 10: tiled attention, in use since day 1", momentum_in_8_bits),
)
