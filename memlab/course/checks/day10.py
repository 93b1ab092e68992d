"""Day 10: flash attention."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from textwrap import dedent, indent
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from memlab.checkpointing.operations import Operations
from memlab.course.checks.day09 import momentum_in_8_bits
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, require
from memlab.course.solutions import body, mistakes
from memlab.internals.torch_internals import TorchDispatchMode
from memlab.metering import measure
from memlab.reference.tiled_attention import add_tile, attend, flash, hide, plan
from memlab.trace import Trace

Add = Callable[..., tuple[Tensor, Tensor, Tensor]]
Planner = Callable[[int, int, int, int], list[tuple[slice, list[slice]]]]
Attend = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
Flash = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]

# ------------------------------------------------------------------ the oracle


def _whole(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    """By way of the score matrix: what tiles are held against."""
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    scores = hide(scores, slice(0, q.shape[-2]), slice(0, k.shape[-2]), shift)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return (scores - lse[..., None]).exp() @ v, lse


@dataclass(frozen=True)
class _Case:
    """A call to try: `shape` is (…, Tq, Tk, D)."""

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
    def width(self) -> int:
        return self.shape[-1]

    @property
    def numbers(self) -> int:
        """Of q."""
        return self.heads * self.queries * self.width

    @property
    def scores(self) -> int:
        """In the tiles that are visited."""
        rows = plan(self.queries, self.keys, self.tile, self.shift)
        pairs = ((_length(row), _length(column)) for row, visited in rows for column in visited)
        return self.heads * sum(map(math.prod, pairs))

    @property
    def kept_bytes(self) -> int:
        """The result and lse, in float32."""
        return 4 * self.heads * self.queries * (self.width + 1)

    @property
    def bytes_of_tiles(self) -> int:
        """Eight of them, and their rows."""
        return 8 * 4 * self.heads * self.tile * (self.tile + self.width)


def _length(part: slice) -> int:
    return part.stop - part.start


@cache
def _arguments(case: _Case) -> tuple[Tensor, ...]:
    """q, k, v, and a gradient of the result."""
    *leading, queries, keys, width = case.shape
    # Not 0: there the first case's keys cancel, and two mistakes give one number.
    random = torch.Generator().manual_seed(1)
    lengths = (queries, keys, keys, queries)
    q, *others = (torch.randn(*leading, n, width, generator=random) for n in lengths)
    return tuple(x.to(case.dtype) for x in (case.stretch * q, *others))


# A width of 4 would make the scale 1/2, and a factor forgotten look like a sum taken twice.
_CASES = (
    _Case("one tile, nothing hidden", (1, 2, 2, 3), 2, 2),
    _Case("a row of 2 tiles", (1, 2, 4, 3), 2, 4),
    _Case("2 × 2 tiles", (1, 4, 4, 3), 2, 4),
    _Case("the last tiles are smaller", (1, 5, 5, 3), 2, 5),
    _Case("causal", (1, 4, 4, 3), 2, 0),
    _Case("causal, in heads of 2 sequences", (2, 3, 7, 7, 4), 3, 0),
    _Case("float64, scores up to thousands", (2, 8, 8, 4), 4, 0, torch.float64, 1e3),
    _Case("more keys than queries, top-left", (1, 3, 8, 3), 2, 0),
    _Case("more keys than queries, bottom-right", (1, 3, 8, 3), 2, 5),
    _Case("more queries than keys, bottom-right: the first see nothing", (1, 7, 4, 3), 2, -3),
)

# ------------------------------------------------------------------ one's own work

_BUILT_ELSEWHERE = ("memlab.attention", "memlab.model", "torch.nn.attention")
_WITHOUT_TRACES = ("numpy", "tolist")
_TORCHS_OWN = "scaled_dot_product"  # in the names of all its forms
_ADD = torch.ops.aten.add
_CALLS_OF_OPERATORS = [type(operator).__call__.__code__ for operator in (_ADD, _ADD.Tensor)]


@contextmanager
def _own_work(call: str) -> Iterator[None]:
    """Wrong if what runs inside uses what does the work, or what no meter sees.

    The hook runs nothing of what it looks at, not even its repr: that may be half made.
    """
    asked: list[str] = []
    operators: dict[int, Any] = {}  # torch.ops.aten. …, by identity

    def look(frame: FrameType, event: str, called: Any) -> None:
        home = frame.f_globals.get("__name__", "")
        if event == "call" and home.startswith(_BUILT_ELSEWHERE):
            asked.append(next(filter(home.startswith, _BUILT_ELSEWHERE)))
        elif event == "call" and frame.f_code in _CALLS_OF_OPERATORS:
            operator = frame.f_locals["self"]
            operators[id(operator)] = operator
        elif event == "c_call":
            name = getattr(called, "__name__", "")
            asked.extend([name] if name in _WITHOUT_TRACES or _TORCHS_OWN in name else [])

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
    asked += [name for name in map(str, operators.values()) if _TORCHS_OWN in name]
    require(not asked, f"{call} uses {asked[0] if asked else ''}; wanted your own lines of torch.")


def _require_tensors(call: str, got: Any, names: tuple[str, ...], like: tuple[Tensor, ...]) -> None:
    """A tuple, or a list, of tensors of these shapes and dtypes."""
    kind, is_several = type(got).__name__, isinstance(got, (tuple, list))
    require(
        is_several and len(got) == len(names),
        f"{call} gave {kind}{f' of {len(got)}' if is_several else ''}; wanted a tuple "
        f"of {', '.join(names)}.{' Is there a return?' if got is None else ''}",
    )
    for name, one, wanted in zip(names, got, like, strict=True):
        _require_tensor(f"{call}: {name}", one, wanted)


def _require_tensor(what: str, got: Any, like: Tensor) -> None:
    kind = type(got).__name__
    hint = " Is there a return?" if got is None else ""
    require(isinstance(got, Tensor), f"{what} is {kind}; wanted a Tensor.{hint}")
    require(
        got.shape == like.shape,
        f"{what} is of shape {tuple(got.shape)}; wanted {tuple(like.shape)}.",
    )
    require(got.dtype == like.dtype, f"{what} is of {got.dtype}; wanted {like.dtype}.")


def _require_near(what: str, got: Tensor, wanted: Tensor, within: float = 2e-5) -> None:
    """Infinities have to be equal, and what is no number is told apart from what is wrong.

    In float64 nothing but rounding is allowed: 10⁻⁶ added to a sum is a mistake.
    """
    within = 1e-10 if got.dtype == torch.float64 else within
    nans = got.isnan().sum().item()
    require(not nans, f"{what}: {nans} of {got.numel()} numbers are NaN.")
    off = (got.double() - wanted).abs() > within * (1 + wanted.abs())
    off |= (got.isinf() | wanted.isinf()) & (got.double() != wanted)
    if off.any():
        place = tuple(off.nonzero()[0].tolist())
        where = ", ".join(map(str, place))
        raise Wrong(
            f"{what}[{where}] is {got[place]:.4g}, wanted {wanted[place]:.4g}; "
            f"{off.sum()} of {got.numel()} numbers are off."
        )


def _require_untouched(call: str, **pairs: tuple[Tensor, Tensor]) -> None:
    touched = [name for name, (now, before) in pairs.items() if not torch.equal(now, before)]
    require(not touched, f"{call} changed {', '.join(touched)}, which it was given.")


# ------------------------------------------------------------------ 10.1: online softmax

_INF = math.inf
_PIECES: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype, Callable[..., Tensor]]] = {
    # rows, keys in each piece, dtype, what is done to random scores
    "one piece of 2 scores": ((1,), (2,), torch.float32, lambda s: s),
    "2 pieces, the lower score last": (
        (1,),
        (1, 1),
        torch.float32,
        lambda s: s.sort(-1)[0].flip(-1),
    ),
    "2 pieces, the higher score last": ((1,), (1, 1), torch.float32, lambda s: s.sort(-1)[0]),
    "3 rows, pieces of 4, 1 and 3": ((3,), (4, 1, 3), torch.float32, lambda s: 3 * s),
    "scores of a thousand and more": ((2,), (2, 2), torch.float64, lambda s: 1000 * (s + 4)),
    "one row high, one low by a thousand": (
        (2,),
        (2, 3),
        torch.float64,
        lambda s: s + torch.tensor([[1000.0], [-1000.0]], dtype=s.dtype),
    ),
    "all scores below −10⁶": ((2,), (2, 2), torch.float64, lambda s: s - 1e6),
    "a row whose first piece is hidden, all −∞": (
        (2,),
        (2, 2),
        torch.float32,
        lambda s: s.index_put((torch.tensor(0), torch.tensor([0, 1])), torch.tensor(-_INF)),
    ),
    "a row that sees nothing at all": (
        (2,),
        (2, 2),
        torch.float32,
        lambda s: s.index_fill(0, torch.tensor(1), -_INF),
    ),
    "2 sequences of 2 heads": ((2, 2, 3), (4, 4), torch.float64, lambda s: 2 * s),
}
_STATE = ("row_max", "row_sum", "acc")


def _check_add(answer: Add) -> str:
    for what, (rows, keys, dtype, change) in _PIECES.items():
        _check_pieces(answer, f"add_tile, {what}", rows, keys, dtype, change)
    _check_room_of_add(answer)
    return (
        f"row_max, row_sum and acc right after each piece of {len(_PIECES)} runs · −∞ makes no "
        "NaN · 2 + D numbers a row are all that goes on"
    )


def _check_pieces(
    answer: Add,
    call: str,
    rows: tuple[int, ...],
    keys: tuple[int, ...],
    dtype: torch.dtype,
    change: Callable[[Tensor], Tensor],
    width: int = 3,
) -> None:
    random = torch.Generator().manual_seed(0)
    scores = change(torch.randn(*rows, sum(keys), generator=random, dtype=dtype))
    values = torch.randn(*rows[:-1], sum(keys), width, generator=random, dtype=dtype)
    state = _begin(rows, width, dtype)
    seen = 0
    for number, count in enumerate(keys, 1):
        piece = slice(seen, seen + count)
        given = *state, scores[..., piece].clone(), values[..., piece, :].clone()
        copies = [x.clone() for x in given]
        with _own_work("add_tile"):
            got = answer(*given)
        seen += count
        after = f"{call}: after piece {number}"
        wanted = _state_after(scores[..., :seen], values[..., :seen, :])
        _require_tensors(after, got, _STATE, tuple(x.to(dtype) for x in wanted))
        names = (*_STATE, "scores", "values")
        _require_untouched(after, **dict(zip(names, zip(given, copies, strict=True), strict=True)))
        for name, one, right in zip(_STATE, got, wanted, strict=True):
            _require_near(f"{after} {name}", one, right)
        state = got


def _begin(rows: tuple[int, ...], width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    row_max = torch.full((*rows, 1), -_INF, dtype=dtype)
    return row_max, torch.zeros_like(row_max), torch.zeros(*rows, width, dtype=dtype)


def _state_after(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From all scores at once, in float64."""
    scores, values = scores.double(), values.double()
    row_max = scores.amax(-1, keepdim=True)
    probs = (scores - row_max.masked_fill(row_max == -_INF, 0)).exp()
    return row_max, probs.sum(-1, keepdim=True), probs @ values


def _check_room_of_add(answer: Add) -> None:
    """Of R rows and K keys: no products of R · K · D numbers, and nothing of the piece is held."""
    R, K, D = 16, 32, 8
    scores, values = torch.randn(R, K), torch.randn(K, D)
    state, kept = _begin((R,), D, torch.float32), []
    trace = measure(lambda: kept.append(answer(*state, scores, values)))
    largest = max(math.prod(e.shape) for e in trace.events)
    require(
        largest <= 2 * R * K,
        f"add_tile of {R} × {K} scores makes a tensor of {largest:,} numbers; wanted at most "
        f"{2 * R * K:,}, twice as many as there are scores.",
    )
    held, wanted = sum(e.bytes for e in trace.events if e.phase != "before"), 4 * R * (2 + D)
    require(
        held <= wanted,
        f"add_tile of {R} × {K} scores leaves {held:,} bytes behind; wanted {wanted:,}: 2 + D "
        f"numbers a row.",
    )


_HIGHER = "torch.maximum(row_max, scores.amax(-1, keepdim=True))"
_SAFE = "new_max.masked_fill(new_max == -torch.inf, 0)"

_ADD = Exercise(
    id="10.1",
    title="Online softmax",
    minutes=12,
    difficulty=3,
    hints=(
        "Begin with the new row_max: the larger of the old one and the tile's, row by row "
        "(torch.maximum, and amax(-1, keepdim=True)). What was summed before counted from the old "
        "row_max; by which factor is it too large now?",
        "The factor is e^(row_max − new row_max), for row_sum and for acc alike. Where the new "
        "row_max is still −∞, −∞ − (−∞) is NaN: there, count from 0 in place of the new row_max.",
        "new = torch.maximum(row_max, scores.amax(-1, keepdim=True)); safe = new.masked_fill(new "
        "== -torch.inf, 0); probs = (scores - safe).exp(); correction = (row_max - safe).exp(). "
        "The new row_sum is what was summed, corrected, and the sum of probs; acc likewise, with "
        "probs @ values.",
    ),
    reference=add_tile,
    check=_check_add,
    wrong_answers=mistakes(
        "10.1",
        (
            "The earlier sums are not corrected: they counted from a lower row_max.",
            ("correction * row_sum", "row_sum"),
            ("correction * acc", "acc"),
        ),
        (
            "row_sum is corrected and acc is not: both were summed from the old row_max.",
            ("correction * acc", "acc"),
        ),
        (
            "The correction is the wrong way round: e^(row_max − new row_max) is at most 1.",
            ("(row_max - safe_max).exp()", "(safe_max - row_max).exp()"),
        ),
        (
            "This is the row_max of the tile; wanted the highest score so far.",
            (_HIGHER, "scores.amax(-1, keepdim=True)"),
        ),
        (
            "One row_max for all rows: each row has its own, or low rows underflow to 0.",
            (_HIGHER, "torch.maximum(row_max, scores.max())"),
        ),
        (
            "Nothing is subtracted before exp: e^1000 is infinite.",
            (_SAFE, "torch.zeros_like(new_max)"),
        ),
        (
            "−∞ − (−∞) is NaN: a row that has seen nothing yet has to count from 0.",
            (_SAFE, "new_max"),
        ),
        (
            "acc is divided already; what comes later is added to the undivided sum.",
            ("correction * acc + probs @ values", "(correction * acc + probs @ values) / row_sum"),
        ),
        (
            "Rows whose scores are all below 0 have a row_max below 0, too: only −∞ counts from 0.",
            (_SAFE, "new_max.clamp(min=0)"),
        ),
        (
            "The 0 that a row counts from so far is handed on as its row_max: a later score below "
            "0 would be measured from there.",
            ("return new_max,", "return safe_max,"),
        ),
        (
            "A very low number stands for −∞: a row that has seen nothing has no row_max, and −∞ "
            "says so whatever the scores are.",
            ("return new_max,", "return new_max.clamp(min=-1e30),"),
        ),
        (
            "Make new tensors: the old state belongs to the caller.",
            ("row_sum = correction * row_sum", "row_sum[:] = correction * row_sum"),
            (
                "    return",
                "    row_max[:], acc[:] = new_max, correction * acc + probs @ values\n    return",
            ),
            (
                "return new_max, row_sum, correction * acc + probs @ values",
                "return row_max, row_sum, acc",
            ),
        ),
        (
            "Weights times values, broadcast, are R · K · D numbers: a matmul, probs @ values, "
            "sums as it goes.",
            ("probs @ values", "(probs[..., None] * values[..., None, :, :]).sum(-2)"),
        ),
    ),
)

# ------------------------------------------------------------------ 10.2: the plan of tiles

_PLANS = (
    ((4, 4, 4, 4), "one tile"),
    ((3, 11, 2, 4), "a few of many keys, and the last row is smaller"),
    ((4, 4, 2, 4), "nothing hidden"),
    ((5, 5, 2, 5), "the last tiles are smaller"),
    ((6, 6, 2, 0), "causal"),
    ((5, 5, 2, 0), "causal, the last tiles are smaller"),
    ((3, 8, 2, 0), "more keys than queries, top-left"),
    ((3, 8, 2, 5), "more keys than queries, bottom-right"),
    ((1, 9, 4, 8), "one query at the end of a cache of 9 keys"),
    ((6, 6, 3, 1), "each query sees one key more"),
    ((5, 8, 2, 1), "each query sees one key more, and the last row is smaller"),
    ((7, 4, 2, -3), "more queries than keys, bottom-right: the first see nothing"),
    ((10, 4, 3, 0), "more queries than keys, top-left"),
    ((37, 53, 8, 16), "bottom-right"),
    ((64, 64, 16, 0), "causal"),
)


def _check_plan(answer: Planner) -> str:
    for (queries, keys, tile, shift), what in _PLANS:
        call = f"plan({queries}, {keys}, {tile}, {shift}), {what},"
        got = _shape_of_plan(call, answer(queries, keys, tile, shift))
        _compare_plans(call, got, _by_pairs(queries, keys, tile, shift))
    count = sum(len(visited) for _, visited in answer(64, 64, 16, 0))
    return (
        f"{len(_PLANS)} plans, as every pair looked at says · of 4 × 4 tiles a causal mask leaves "
        f"{count}"
    )


def _by_pairs(queries: int, keys: int, tile: int, shift: int) -> list[tuple[str, list[str]]]:
    """Which tiles have a pair that is seen: by looking at each."""
    rows = [range(n, min(n + tile, queries)) for n in range(0, queries, tile)]
    columns = [range(n, min(n + tile, keys)) for n in range(0, keys, tile)]
    return [
        (_span(row), [_span(c) for c in columns if any(j <= i + shift for i in row for j in c)])
        for row in rows
    ]


def _span(part: Any) -> str:
    return f"{part.start}:{part.stop}"


def _shape_of_plan(call: str, got: Any) -> list[tuple[str, list[str]]]:
    hint = " Is there a return?" if got is None else ""
    require(
        isinstance(got, (list, tuple)),
        f"{call} gave {type(got).__name__}; wanted a list of rows.{hint}",
    )
    rows = []
    for row in got:
        require(
            isinstance(row, (tuple, list)) and len(row) == 2 and isinstance(row[1], (list, tuple)),
            f"{call} has a row that is {row!r}; wanted a pair: a slice of queries, and a list of "
            f"slices of keys.",
        )
        for part in (row[0], *row[1]):
            require(
                _is_a_span(part),
                f"{call} has {part!r} in it; wanted slices from one int to another, without a "
                f"step, such as slice(0, 2).",
            )
        rows.append((_span(row[0]), [_span(column) for column in row[1]]))
    return rows


def _is_a_span(part: Any) -> bool:
    """hide, and whoever else gets the plan, calculates with both ends."""
    if not isinstance(part, slice) or part.step not in (None, 1):
        return False
    return type(part.start) is int and type(part.stop) is int


def _compare_plans(
    call: str, got: list[tuple[str, list[str]]], wanted: list[tuple[str, list[str]]]
) -> None:
    rows, right = [row for row, _ in got], [row for row, _ in wanted]
    require(
        rows == right,
        f"{call} has rows of the queries {', '.join(rows) or 'none'}; wanted {', '.join(right)}.",
    )
    for (row, visited), (_, columns) in zip(got, wanted, strict=True):
        require(
            visited == columns,
            f"{call} visits, for the queries {row}, the keys {', '.join(visited) or 'none'}; "
            f"wanted {', '.join(columns) or 'none'}.",
        )


_REST_LOST = (
    ("range(0, queries, tile)", "range(0, queries // tile * tile, tile)"),
    ("range(0, seen, tile)", "range(0, min(seen, keys // tile * tile), tile)"),
)

_PLAN = Exercise(
    id="10.2",
    title="Which tiles are visited",
    minutes=12,
    difficulty=2,
    hints=(
        "Two loops: over rows of tiles, range(0, queries, tile), and in each over columns. Of a "
        "row the last query sees the most.",
        "A row of the queries first … last − 1 has a pair that is seen for all keys below last + "
        "shift, those that there are. The columns begin at range(0, that, tile).",
        "for first in range(0, queries, tile): last = min(first + tile, queries); seen = min(last "
        "+ shift, keys). In that row, each n of range(0, seen, tile) begins a slice of keys; which "
        "end does it have?",
    ),
    reference=plan,
    check=_check_plan,
    wrong_answers=mistakes(
        "10.2",
        (
            "Every tile is visited: those in which nobody sees anything cost as much.",
            ("min(last + shift, keys)", "keys"),
        ),
        (
            "shift is left out: this is top-left, whatever was asked for.",
            ("min(last + shift, keys)", "min(last, keys)"),
        ),
        (
            "The diagonal is taken from the lengths: query i sees the keys up to i + shift itself, "
            "which is more than a yes or no.",
            ("last + shift", "last + (keys - queries if shift else 0)"),
        ),
        (
            "shift has the wrong sign: query i sees the keys up to i + shift.",
            ("last + shift", "last + (shift if shift >= keys else -shift)"),
        ),
        (
            "Asked of a row's first query; its last one sees the most.",
            ("last + shift", "first + shift + 1"),
        ),
        ("One key too few: i + shift itself is seen.", ("last + shift", "last + shift - 1")),
        (
            "One key too many: the last query of a row is last − 1.",
            ("last + shift", "last + shift + 1"),
        ),
        (
            "What is left where the tile does not divide is lost: range(0, length, tile) has it.",
            *_REST_LOST,
        ),
        (
            "The number of queries stands where that of keys belongs: columns end at keys.",
            ("min(last + shift, keys)", "min(last + shift, queries)"),
        ),
        (
            "The last tiles reach beyond the end: min(…, queries), and min(…, keys).",
            ("min(first + tile, queries)", "first + tile"),
            ("min(n + tile, keys)", "n + tile"),
        ),
        (
            "Rows in which nobody sees anything are left out; their results have to be written, "
            "too.",
            ("rows.append(", "if visited: rows.append("),
        ),
        (
            "A row's keys are in one piece: that is a strip as long as the text.",
            ("visited = [", "ends = ["),
            (
                "rows.append(",
                "visited = [slice(0, ends[-1].stop)] if ends else []\n        rows.append(",
            ),
        ),
    ),
)

# ------------------------------------------------------------------ bytes and counts of a pass

# Neither powers of two nor multiples of the tile, nor a width as what is left of it; with heads, so
# that a tile is small beside q.
_LONG = _Case("causal", (1, 3, 76, 76, 8), 12, 0)
_UNEVEN = _Case("more queries than keys, bottom-right", (2, 30, 22, 5), 4, -8)

aten = torch.ops.aten
_FIRST_FACTOR = {aten.mm: 0, aten.bmm: 0}  # its place among the arguments
_FIRST_FACTOR |= dict.fromkeys((aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_), 1)


class _Products(TorchDispatchMode):
    """Of each product of matrices: how many at once, rows, what is summed over, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _FIRST_FACTOR.get(func.overloadpacket)
        if place is not None:
            *several, rows, summed = args[place].shape
            self.sizes.append((math.prod(several), rows, summed, args[place + 1].shape[-1]))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Costs:
    """What one call came to."""

    trace: Trace
    operations: int
    products: list[tuple[int, int, int, int]]

    @property
    def peak_bytes(self) -> int:
        """Beyond what was given."""
        given = sum(e.bytes for e in self.trace.events if e.phase == "before")
        return self.trace.peak_bytes - given


def _products_of(run: Callable[[], Any]) -> tuple[int, list[tuple[int, int, int, int]]]:
    with Operations() as counter, _Products() as products:
        run()
    return counter.total, products.sizes


def _costs_of(run: Callable[[], Any]) -> _Costs:
    kept: list[Any] = []
    return _Costs(measure(lambda: kept.append(run())), *_products_of(run))


def _require_costs(
    call: str, case: _Case, costs: _Costs, *, room: int, products: int, of_width: int
) -> int:
    """`of_width` of the products of a tile sum over the width: those that make scores, or dP.
    Returns how many numbers these have made."""
    _require_no_matrix(call, case, costs.trace)
    made = _require_tiles(call, case, costs.products, of_width)
    _require_peak(call, costs, room)
    _require_operations(call, case, costs.operations, products)
    return made


def _require_no_matrix(call: str, case: _Case, trace: Trace) -> None:
    made = [e for e in trace.events if e.bytes > 0 and e.phase != "before"]
    largest = max(made, key=lambda e: math.prod(e.shape), default=None)
    numbers = math.prod(largest.shape) if largest else 0
    shape = f", {largest.shape}" if largest else ""
    require(
        numbers <= case.numbers,
        f"{call} makes a tensor of {numbers:,} numbers{shape}; wanted at most {case.numbers:,}, as "
        f"many as q has. A tile's scores are {case.heads * case.tile**2:,}, all scores are "
        f"{case.heads * case.queries * case.keys:,}.",
    )


def _require_tiles(
    call: str, case: _Case, sizes: list[tuple[int, int, int, int]], of_width: int
) -> int:
    """No strips, however few heads at once; and each visited tile is there as often as it should.

    A column more is no fault (it can carry row_sum, or lse), nor are the sums of rows as a product.
    """
    inner = [size for size in sizes if 1 not in (size[1], size[3])]
    widest = max(case.tile, case.width + 1)
    for _, rows, summed, columns in inner:
        require(
            max(rows, summed, columns) <= widest,
            f"{call} multiplies {rows} × {summed} by {summed} × {columns} numbers; wanted tiles: "
            f"at most {case.tile} queries and {case.tile} keys in one product.",
        )
    of_scores = (case.width, case.width + 1)
    made = sum(count * rows * columns for count, rows, n, columns in inner if n in of_scores)
    wanted = of_width * case.scores
    what = {1: "q kᵀ", 3: "q kᵀ twice, dout vᵀ once"}[of_width]
    require(
        made == wanted,
        f"{call} makes {made:,} numbers by products of tiles ({what}); wanted {wanted:,}: of each "
        f"tile of the plan, {case.tile} × {case.tile} where it is whole, and of no other.",
    )
    return made


def _require_peak(call: str, costs: _Costs, room: int) -> None:
    require(
        costs.peak_bytes <= room,
        f"{call} takes {costs.peak_bytes:,} bytes at its fullest beyond what it was given; wanted "
        f"at most {room:,}. Something of each tile stays, or something is as large as several q: "
        f"there are then {_largest_at_peak(costs.trace)}.",
    )


def _largest_at_peak(trace: Trace) -> str:
    """The three kinds of tensors that take most, of those that were not given."""
    alive = [e for e in trace.alive(trace.peak_position) if e.phase != "before"]
    taken: Counter[tuple[tuple[int, ...], str]] = Counter()
    for event in alive:
        taken[event.shape, event.dtype] += event.bytes
    number = Counter((event.shape, event.dtype) for event in alive)
    kinds = sorted(taken, key=lambda kind: (-taken[kind], kind))[:3]
    return ", ".join(f"{number[kind]} of {kind[0]} in {kind[1]}" for kind in kinds)


def _require_operations(call: str, case: _Case, found: int, products: int) -> None:
    """A few more are no fault: the row sums of backward can be a product."""
    wanted = products * 2 * case.width * case.scores
    require(
        found <= 1.1 * wanted,
        f"{call} takes {found:,} operations; wanted {wanted:,}: {products} products for each "
        f"visited tile, and no other tile.",
    )


# ------------------------------------------------------------------ 10.3: forward by tiles


def _check_attend(answer: Attend) -> str:
    for case in (*_CASES, _LONG, _UNEVEN):
        q, k, v, _ = _arguments(case)
        given = q.clone(), k.clone(), v.clone()
        call = f"attend, {case}"
        with _own_work("attend"):
            got = answer(*given, case.tile, case.shift)
        out, lse = _whole(q.double(), k.double(), v.double(), case.tile, case.shift)
        _require_tensors(call, got, ("out", "lse"), (out.to(q.dtype), lse.to(q.dtype)))
        _require_untouched(call, q=(given[0], q), k=(given[1], k), v=(given[2], v))
        _require_near(f"{call}: out", got[0], out)
        _require_near(f"{call}: lse", got[1], lse)
    peak, made = _check_costs_of_attend(answer)
    return (
        f"out and lse as in float64, both alignments · the peak of {_LONG.queries} × {_LONG.keys} "
        f"scores is {peak:,} bytes · of each head {made // _LONG.heads:,} of "
        f"{_LONG.queries * _LONG.keys:,} scores made, in tiles"
    )


def _check_costs_of_attend(answer: Attend) -> tuple[int, int]:
    def run(case: _Case) -> Callable[[], Any]:
        q, k, v, _ = (x.clone() for x in _arguments(case))
        return lambda: answer(q, k, v, case.tile, case.shift)

    costs = _costs_of(run(_LONG))
    room = 2 * _LONG.kept_bytes + _LONG.bytes_of_tiles
    made = _require_costs(f"attend, {_LONG}", _LONG, costs, room=room, products=2, of_width=1)
    _require_tiles(f"attend, {_UNEVEN}", _UNEVEN, _products_of(run(_UNEVEN))[1], 1)
    return costs.peak_bytes, made


_BEGIN = "    out, lse = torch.empty_like(q)"


def _begins(text: str) -> tuple[str, str]:
    """The edit that puts a line in front of attend's own."""
    return _BEGIN, f"    {text}\n{_BEGIN}"


_BY_STRIPS = """
out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])
for row, _ in plan(q.shape[-2], k.shape[-2], tile, shift):
    part = q[..., row, :] * q.shape[-1] ** -0.5
    scores = hide(part @ k.mT, row, slice(0, k.shape[-2]), shift)
    of_row = scores.logsumexp(-1)
    lse[..., row] = of_row.masked_fill(of_row == -torch.inf, torch.inf)
    out[..., row, :] = (scores - lse[..., row, None]).exp() @ v
return out, lse
"""
_BY_QUERIES = """
out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], torch.inf)
for i in range(q.shape[-2]):
    seen = min(max(i + shift + 1, 0), k.shape[-2])
    if seen:
        part = q[..., i : i + 1, :] * q.shape[-1] ** -0.5
        scores = part @ k[..., :seen, :].mT
        out[..., i : i + 1, :] = scores.softmax(-1) @ v[..., :seen, :]
        lse[..., i : i + 1] = scores.logsumexp(-1)
return out, lse
"""
_BY_TORCHS_KERNEL = """
kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], torch.inf)
for row, visited in plan(q.shape[-2], k.shape[-2], tile, shift):
    if visited:
        keys = slice(0, visited[-1].stop)
        mask = hide(q.new_zeros(row.stop - row.start, keys.stop), row, keys, shift)
        qkv = q[..., row, :], k[..., keys, :], v[..., keys, :]
        part, of_part = kernel(*(x.unflatten(0, (1, -1)) for x in qkv), 0.0, attn_mask=mask)
        blind = mask.amax(-1) == -torch.inf
        out[..., row, :] = part.view_as(q[..., row, :]).masked_fill(blind[:, None], 0)
        lse[..., row] = of_part.reshape(lse[..., row].shape).masked_fill(blind, torch.inf)
return out, lse
"""
_BY_TORCH = """hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(shift + 1)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
    out = torch.where(lse[..., None] == torch.inf, out, whole)
    return out"""
_LSE_GUARD = ".masked_fill(nothing, torch.inf)"
_FRESH = """        row_max = torch.full_like(part[..., :1], -torch.inf)
        row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(part)
"""

_ATTEND = Exercise(
    id="10.3",
    title="Forward, tile by tile",
    minutes=16,
    difficulty=4,
    hints=(
        "For each row of the plan: a state that has seen nothing (row_max −∞, row_sum 0, acc 0), "
        "then add_tile for each of its columns, then the end: out = acc / row_sum, lse = row_max "
        "+ ln row_sum. q[..., row, :] are the queries of a row.",
        "A tile's scores are hide(scale · q[..., row, :] @ k[..., column, :].mT, row, column, "
        "shift), its values v[..., column, :]. Write into out[..., row, :] and lse[..., row]. A "
        "row that saw nothing has row_sum 0: give it out 0 and lse +∞.",
        "part = q[..., row, :] * q.shape[-1] ** -0.5; row_max = torch.full_like(part[..., :1], "
        "-torch.inf); row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(part); then the "
        "columns; nothing = row_sum == 0; out[..., row, :] = acc / row_sum.masked_fill(nothing, "
        "1). lse[..., row] has one dimension fewer than row_max and row_sum, and +∞ where nothing "
        "was seen.",
    ),
    reference=attend,
    check=_check_attend,
    wrong_answers=(
        WrongAnswer(
            _whole,
            "This is the whole score matrix: the right numbers, and T² of them in memory.",
        ),
        *mistakes(
            "10.3",
            (
                "A strip of scores as long as the text, for one softmax: with add_tile a tile will "
                "do.",
                body("attend", _BY_STRIPS),
            ),
            (
                "The scores of every tile are kept in a list: T² of them in small pieces.",
                _begins("kept = []"),
                ("row_max, row_sum, acc = add", "kept.append(scores); row_max, row_sum, acc = add"),
            ),
            ("The scores are not scaled: q kᵀ / √D.", (" * q.shape[-1] ** -0.5", "")),
            ("Scaled by D; wanted its root, 1 / √D.", ("** -0.5", "** -1")),
            (
                "The scale is missing in lse: its row_max has to be that of the scaled scores.",
                ("(row_max + ", "(row_max * q.shape[-1] ** 0.5 + "),
            ),
            (
                "lse is ln row_sum alone: row_sum counts from row_max, so row_max has to be added.",
                ("(row_max + row_sum.log())", "row_sum.log()"),
            ),
            ("out is not divided by row_sum.", (" / row_sum.masked_fill(nothing, 1)", "")),
            (
                "A query that sees nothing has row_sum 0, and 0 / 0 is NaN: its result is 0.",
                (".masked_fill(nothing, 1)", ""),
                (_LSE_GUARD, ""),
            ),
            (
                "Of a query that sees nothing lse is +∞, so that e^(score − lse) is 0 in backward.",
                (_LSE_GUARD, ""),
            ),
            (
                "lse is a number where a query sees nothing, as if its scores summed to e^lse: +∞ "
                "says that no score, hidden or not, has any weight.",
                (_LSE_GUARD, ".masked_fill(nothing, 0)"),
            ),
            (
                "One query at a time with all of its keys: its row grows with the text. A tile "
                "does not.",
                body("attend", _BY_QUERIES),
            ),
            (
                "Longer texts get zeros: what is right for 8 tokens is for 80, too.",
                _begins(
                    "if q.shape[-2] >= 30: return torch.zeros_like(q), torch.zeros_like(q[..., 0])"
                ),
            ),
            (
                "All of q, k and v is copied to another dtype first: a tile's part of them is "
                "enough, if anything.",
                _begins("dtype, q, k, v = q.dtype, q.double(), k.double(), v.double()"),
                ("return out, lse", "return out.to(dtype), lse.to(dtype)"),
            ),
            (
                "This is the kernel under torch's attention: now build yours.",
                body("attend", _BY_TORCHS_KERNEL),
            ),
            (
                "Tiles are visited in which everything is hidden: go by the plan.",
                ("min(last + shift, keys)", "keys"),
            ),
            (
                "Nothing is hidden inside of the tiles on the diagonal: hide(…).",
                (
                    "hide(part @ k[..., column, :].mT, row, column, shift)",
                    "part @ k[..., column, :].mT",
                ),
            ),
            (
                "Top-left, whatever was asked for: hand shift on to plan and to hide.",
                _begins("shift = shift if shift >= k.shape[-2] else 0"),
            ),
            (
                "Bottom-right, whatever was asked for: which it is, shift says, not the lengths.",
                _begins("shift = shift if shift >= k.shape[-2] else k.shape[-2] - q.shape[-2]"),
            ),
            (
                "What is left where the tile does not divide is lost: it is one of the plan's "
                "rows.",
                *_REST_LOST,
            ),
            (
                "Every tile is masked as if it were the first: hide has to know its row and "
                "column.",
                (".mT, row, column, shift)", ".mT, slice(0, 1), slice(0, 1), shift)"),
            ),
            (
                "The second row of tiles goes on with the first one's sums: each row begins anew.",
                _begins("acc = None"),
                (
                    _FRESH,
                    f"        if acc is None or acc.shape != part.shape:\n{indent(_FRESH, '    ')}",
                ),
            ),
            (
                "Earlier sums are added up without a correction: add_tile has it.",
                ("correction * row_sum", "row_sum"),
                ("correction * acc", "acc"),
            ),
            (
                "The result is float32 whatever q is: torch.empty_like(q), torch.zeros_like(part).",
                ("return out, lse", "return out.float(), lse.float()"),
            ),
            (
                "q is scaled in place: backward needs it as it was.",
                (" * q.shape[-1] ** -0.5", ""),
                _begins("q *= q.shape[-1] ** -0.5"),
            ),
            ("This is torch's own, and it is right: now build yours.", ("return out", _BY_TORCH)),
        ),
    ),
)

# ------------------------------------------------------------------ 10.4: backward by tiles

_QKV, _NAMES = ("q", "k", "v"), ("dq", "dk", "dv")


def _check_flash(answer: Flash) -> str:
    for case in (*_CASES, _LONG, _UNEVEN):
        _check_gradients(answer, case)
    held, peak, made = _check_costs_of_flash(answer)
    _check_is_a_function(answer)
    return (
        f"gradients as in float64, both alignments · {held:,} bytes kept: the result and lse · the "
        f"peak of both passes of {_LONG.queries} × {_LONG.keys} scores is {peak:,} bytes · of each "
        f"head 3 × {made // (3 * _LONG.heads):,} scores and dP made, in tiles"
    )


def _check_gradients(answer: Flash, case: _Case) -> None:
    call = f"flash, {case}"
    dout = _arguments(case)[3].clone()
    with _own_work("flash"):
        mine, out = _check_result(answer, case)
        result = out.detach().clone()
        try:
            got = torch.autograd.grad(out, mine, dout, allow_unused=True)
        except NotImplementedError:
            for other in _CASES:
                _check_result(answer, other)
            raise Wrong("flash: forward is right, and backward is still open.") from None
    exact, right = _exactly(case)
    wanted = torch.autograd.grad(right, exact, dout.double())
    for name, one, gradient in zip(_NAMES, got, wanted, strict=True):
        require(one is not None, f"{call}: there is no {name}; backward gave None.")
        _require_tensor(f"{call}: {name}", one, gradient.to(dout.dtype))
    _require_all_near(call, got, wanted)
    pairs = zip((*_QKV, "dout"), zip((*mine, dout), _arguments(case), strict=True), strict=True)
    _require_untouched(call, **dict(pairs))
    require(
        torch.equal(out, result),
        f"{call}: backward changed out, which is the caller's, too: what is saved is not a copy.",
    )


def _check_result(answer: Flash, case: _Case) -> tuple[list[Tensor], Tensor]:
    """q, k and v as they were handed in, and the result, with its graph."""
    call = f"flash, {case}"
    mine = [x.clone().requires_grad_() for x in _arguments(case)[:3]]
    out = answer(*mine, case.tile, case.shift)
    right = _exactly(case)[1].detach()
    _require_tensor(f"{call}: what came", out, right.to(mine[0].dtype))
    require(
        out.requires_grad,
        f"{call} gave a tensor without a graph (requires_grad is False); no gradient can pass.",
    )
    _require_near(f"{call}: out", out.detach(), right)
    return mine, out


def _exactly(case: _Case) -> tuple[list[Tensor], Tensor]:
    """q, k and v in float64, and the result of all scores at once."""
    exact = [x.double().requires_grad_() for x in _arguments(case)[:3]]
    return exact, _whole(*exact, case.tile, case.shift)[0]


def _require_all_near(call: str, got: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Which of the three are off tells one mistake from another."""
    off: dict[str, str] = {}
    for name, one, gradient in zip(_NAMES, got, wanted, strict=True):
        try:
            _require_near(f"{call}: {name}", one, gradient, within=1e-4)
        except Wrong as wrong:
            off[name] = str(wrong)
    require(not off, f"{next(iter(off.values()), '')} Off: {', '.join(off)}.")


def _check_costs_of_flash(answer: Flash) -> tuple[int, int, int]:
    held = _check_what_is_held(answer, _LONG)
    costs = _costs_of(_both_passes(answer, _LONG))
    room = 2 * _LONG.kept_bytes + 5 * 4 * _LONG.numbers + _LONG.bytes_of_tiles
    both = "forward and backward,"
    call = f"flash, {_LONG}, {both}"
    made = _require_costs(call, _LONG, costs, room=room, products=7, of_width=3)
    products = _products_of(_both_passes(answer, _UNEVEN))[1]
    _require_tiles(f"flash, {_UNEVEN}, {both}", _UNEVEN, products, 3)
    return held, costs.peak_bytes, made


def _check_what_is_held(answer: Flash, case: _Case) -> int:
    call = f"flash, {case}"
    q, k, v = (x.clone().requires_grad_() for x in _arguments(case)[:3])
    kept: list[Tensor] = []
    trace = measure(lambda: kept.append(answer(q, k, v, case.tile, case.shift)))
    kept.clear()
    held = sum(e.bytes for e in trace.events if e.phase != "before")
    require(
        held <= case.kept_bytes,
        f"{call} holds {held:,} bytes between forward and backward, beyond q, k and v; wanted "
        f"{case.kept_bytes:,}: the result, and one number a query.",
    )
    _require_no_matrix(f"{call}, forward,", case, trace)
    return held


def _both_passes(answer: Flash, case: _Case) -> Callable[[], None]:
    q, k, v, dout = (x.clone() for x in _arguments(case))
    qkv = [x.requires_grad_() for x in (q, k, v)]

    def run() -> None:
        torch.autograd.grad(answer(*qkv, case.tile, case.shift), qkv, dout)

    return run


def _check_is_a_function(answer: Flash) -> None:
    q, k, v, _ = (x.clone().requires_grad_() for x in _arguments(_CASES[0]))
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        node = answer(q, k, v, 2, 2).grad_fn
    require(
        isinstance(node, BackwardCFunction),
        f"flash gave a tensor whose grad_fn is {type(node).__name__}; wanted your own Function's.",
    )
    missed = [name for name, x in zip(_QKV, (q, k, v), strict=True) if x.data_ptr() not in seen]
    require(
        not missed,
        f"flash keeps {', '.join(missed)} where no hook for saved tensors sees it; wanted "
        f"ctx.save_for_backward.",
    )


_BACKWARD_BY_QUERIES = """
q, k, v, out, lse = ctx.saved_tensors
(dq, dk, dv), scale = (torch.zeros_like(x) for x in (q, k, v)), q.shape[-1] ** -0.5
for i in range(q.shape[-2]):
    row, seen = slice(i, i + 1), slice(0, min(max(i + ctx.shift + 1, 0), k.shape[-2]))
    keys, above = k[..., seen, :], dout[..., row, :]
    probs = (scale * q[..., row, :] @ keys.mT).softmax(-1)
    delta = (above * out[..., row, :]).sum(-1, keepdim=True)
    dscores = scale * probs * (above @ v[..., seen, :].mT - delta)
    dv[..., seen, :] += probs.mT @ above
    dq[..., row, :] += dscores @ keys
    dk[..., seen, :] += dscores.mT @ q[..., row, :]
return dq, dk, dv, None, None
"""
_WHOLE_FORWARD = """scores = q * q.shape[-1] ** -0.5 @ k.mT
        scores = hide(scores, slice(0, q.shape[-2]), slice(0, k.shape[-2]), shift)
        lse = scores.logsumexp(-1)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        out = (scores - lse[..., None]).exp() @ v""".replace(
    "scale_of(q)", "q * q.shape[-1] ** -0.5"
)
_CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
return checkpoint(lambda *qkv: attend(*qkv, tile, shift)[0], q, k, v, use_reentrant=False)
"""
_SETTINGS = "ctx.tile, ctx.shift = tile, shift"
_SCORES_KEPT = f"""{_SETTINGS}
        ctx.kept = [
            hide(q[..., row, :] @ k[..., column, :].mT, row, column, shift)
            for row, columns in plan(q.shape[-2], k.shape[-2], tile, shift)
            for column in columns
        ]"""
_PROBS = "(hide(scores, row, column, ctx.shift) - lse[..., row, None]).exp()"
_OF_V = "                dv[..., column, :] += probs.mT @ dout[..., row, :]\n"
_DSCORES = "scale * probs * (dprobs - delta[..., row, :])"
_END = "return dq, dk, dv, None, None"

_FLASH = Exercise(
    id="10.4",
    title="Backward, tile by tile",
    minutes=25,
    difficulty=5,
    hints=(
        "forward: call attend, save q, k, v, out and lse by ctx.save_for_backward; tile and shift "
        "go on ctx. backward: zeros like q, k and v, then the plan's two loops; each tile makes "
        "its probs again and adds its share to three gradients.",
        "Of a tile: probs = (hide(scale · q kᵀ, …) − lse[..., row, None]).exp(); dprobs = dout "
        "vᵀ; dscores = probs · (dprobs − delta). delta is (dout * out).sum(-1, keepdim=True), "
        "of the whole row, once. Then dv += probsᵀ dout, dq += scale · dscores k, dk += scale · "
        "dscoresᵀ q.",
        "dscores = probs * (dout[..., row, :] @ v[..., column, :].mT - delta[..., row, :]) * "
        "scale; dv[..., column, :] += probs.mT @ dout[..., row, :]; dq[..., row, :] += dscores @ "
        "k[..., column, :]. dk is dq's mirror image: which of the two factors is transposed?",
    ),
    reference=flash,
    check=_check_flash,
    wrong_answers=(
        WrongAnswer(
            lambda *given: _whole(*given)[0],
            "The whole score matrix, by autograd: nothing is saved at all.",
        ),
        *mistakes(
            "10.4",
            (
                "Autograd goes through the loop and saves every tile: N² again. Write its "
                "backward.",
                body("flash", "return attend(q, k, v, tile, shift)[0]"),
            ),
            (
                "A checkpoint forgets the tiles, and in backward has all of them at once.",
                body("flash", _CHECKPOINTED),
            ),
            (
                "Forward goes by tiles, backward makes all probs at once.",
                ("ctx.tile, ctx.shift)", "max(q.shape[-2], k.shape[-2]), ctx.shift)"),
            ),
            (
                "Backward goes by tiles, forward makes all scores at once: take attend.",
                ("out, lse = attend(q, k, v, tile, shift)", _WHOLE_FORWARD),
            ),
            (
                "The tiles' probs are kept on ctx; backward makes them again, from lse.",
                (_SETTINGS, _SCORES_KEPT),
            ),
            (
                "Two numbers a query are kept, row_max and row_sum: lse is both in one.",
                (_SETTINGS, f"{_SETTINGS}; ctx.row_max = q.new_zeros(q.shape[:-1])"),
            ),
            (
                "Tensors on ctx are out of reach for a checkpoint or for an offload: "
                "ctx.save_for_backward.",
                # out itself would hold its own node
                (
                    "ctx.save_for_backward(q, k, v, out, lse)",
                    "ctx.ours = q, k, v, out.clone(), lse",
                ),
                ("ctx.saved_tensors", "ctx.ours"),
            ),
            (
                "delta is missing: the probs of a row sum to 1, so if one grows the others shrink.",
                (_DSCORES, "scale * probs * dprobs"),
            ),
            (
                "The brackets: probs · (dprobs − delta). Here delta was taken off the product.",
                (_DSCORES, "scale * (probs * dprobs - delta[..., row, :])"),
            ),
            (
                "delta is summed over one tile; it belongs to the whole row: rowsum(dout · out).",
                ("- delta[..., row, :]", "- (dprobs * probs).sum(-1, keepdim=True)"),
            ),
            ("dq lacks the scale that scores have.", ("dscores @ k[", "dscores / scale @ k[")),
            ("dk lacks the scale that scores have.", ("dscores.mT @ q", "dscores.mT / scale @ q")),
            ("Neither dq nor dk has the scale in it.", ("scale * probs *", "probs *")),
            (
                "The scale is in dq and dk twice: it belongs there once, as the scores have it "
                "once.",
                ("scale * probs *", "scale**2 * probs *"),
            ),
            (
                "dk has the scale twice: a q that is scaled already has brought it along.",
                ("dscores.mT @ q", "scale * dscores.mT @ q"),
            ),
            (
                "lse is left out: e^score alone are no probs, they don't sum to 1.",
                (_PROBS, "hide(scores, row, column, ctx.shift).exp()"),
            ),
            (
                "dk and dv have changed places: the order is that of q, k, v.",
                (_END, "return dq, dv, dk, None, None"),
            ),
            (
                "Backward runs forward once more, for out and lse: save them, and it needs no "
                "product.",
                (
                    "= ctx.saved_tensors",
                    "= ctx.saved_tensors; out, lse = attend(q, k, v, ctx.tile, ctx.shift)",
                ),
            ),
            (
                "Backward takes one query at a time with all of its keys, and lse has no use: by "
                "tiles, please.",
                body("Flash.backward", _BACKWARD_BY_QUERIES),
            ),
            (
                "Gradients of longer texts are zeros: what is right for 8 tokens is for 80, too.",
                (
                    _END,
                    f"if q.shape[-2] >= 30: dq, dk, dv = dq * 0, dk * 0, dv * 0\n        {_END}",
                ),
            ),
            (
                "out is what the caller got: `out *= dout` changes the result itself. Make a new "
                "one.",
                (_END, f"out *= dout; {_END}"),
            ),
            (
                "A key is seen by many queries: dk and dv add up (+=) over the rows of tiles.",
                ("dv[..., column, :] +=", "dv[..., column, :] ="),
                ("dk[..., column, :] +=", "dk[..., column, :] ="),
            ),
            (
                "The scores of backward are not scaled, and lse is of scaled ones.",
                ("scores = scale * q", "scores = q"),
            ),
            (
                "Nothing is hidden in backward: hidden pairs get probs that forward never had.",
                ("hide(scores, row, column, ctx.shift)", "scores"),
            ),
            (
                "dv is the probs', not the scores': probsᵀ dout.",
                (_OF_V, ""),
                (f"{_DSCORES}\n", f"{_DSCORES}\n{_OF_V.replace('probs', 'dscores')}"),
            ),
            (
                "A softmax of one tile; the probs are e^(score − lse), of the whole row.",
                (_PROBS, "hide(scores, row, column, ctx.shift).softmax(-1).nan_to_num(0)"),
            ),
            (
                "Backward visits tiles in which everything is hidden: go by the plan.",
                ("ctx.tile, ctx.shift)", "ctx.tile, k.shape[-2] + q.shape[-2])"),
            ),
            (
                "lse is −∞ where a query sees nothing, and −∞ − (−∞) is NaN: +∞ makes its probs 0.",
                (_LSE_GUARD, ""),
            ),
            (
                "dout is changed; others may still want to read it.",
                (_END, f"dout *= out; {_END}"),
            ),
            (
                "This is torch's fused attention: now build yours.",
                body(
                    "flash",
                    f"out, lse = attend(q, k, v, tile, shift)\n{dedent('    ' + _BY_TORCH)}",
                ),
            ),
        ),
    ),
)

# ------------------------------------------------------------------ the bill

# torch's attention is by tiles since day 1, and so was the bill.
DAY = Day(
    exercises=(_ADD, _PLAN, _ATTEND, _FLASH),
    bill=Bill("day 10: attention by tiles, as it was all along", momentum_in_8_bits),
)
