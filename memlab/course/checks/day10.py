"""Day 10: flash attention."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from memlab.checkpointing.operations import Operations
from memlab.course.checks.day09 import momentum_in_8_bits
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, require
from memlab.metering import measure
from memlab.torch_internals import TorchDispatchMode
from memlab.trace import Trace

Add = Callable[..., tuple[Tensor, Tensor, Tensor]]
Plan = list[tuple[slice, list[slice]]]
Planner = Callable[[int, int, int, int], Plan]
Attend = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
Flash = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]

# ------------------------------------------------------------------ what is built


def add_piece(
    top: Tensor, total: Tensor, mixed: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """top and total (…, R, 1) and mixed (…, R, D), with (…, R, K) more scores and (…, K, D)
    values."""
    higher = torch.maximum(top, scores.amax(-1, keepdim=True))
    zero = higher.masked_fill(higher == -math.inf, 0)
    weights, correction = (scores - zero).exp(), (top - zero).exp()
    total = correction * total + weights.sum(-1, keepdim=True)
    return higher, total, correction * mixed + weights @ values


def plan(queries: int, keys: int, tile: int, shift: int) -> Plan:
    """The rows of tiles, and in each the columns in which a query i sees a key up to i + shift."""
    rows = []
    for first in range(0, queries, tile):
        last = min(first + tile, queries)
        seen = min(last + shift, keys)
        visited = [slice(start, min(start + tile, keys)) for start in range(0, seen, tile)]
        rows.append((slice(first, last), visited))
    return rows


def hide(scores: Tensor, rows: slice, columns: slice, shift: int) -> Tensor:
    """−∞ where the key is beyond query + shift."""
    pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    hidden = pairs.triu(rows.start - columns.start + shift + 1)
    return scores.masked_fill(hidden, -math.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    """q (…, Tq, D), k and v (…, Tk, D): the result (…, Tq, D), and lse (…, Tq)."""
    return _tiled()(q, k, v, tile, shift)


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: int, shift: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of q, k and v, tile by tile."""
    return _gradients_but()(dout, q, k, v, out, lse, tile, shift)


def flash(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> Tensor:
    """The result (…, Tq, D), with a backward by tiles."""
    return _flash_but()(q, k, v, tile, shift)


# ------------------------------------------------------------------ the same, but for a mistake


def _scaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** -0.5


def _finished(top: Tensor, total: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    saw_nothing = total == 0
    lse = (top + total.log()).masked_fill(saw_nothing, math.inf)
    return mixed / total.masked_fill(saw_nothing, 1), lse.squeeze(-1)


def _tiled(
    scaled: Callable[[Tensor], Tensor] = _scaled,
    finished: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _finished,
    rows: Planner = plan,
    masked: Callable[[Tensor, slice, slice, int], Tensor] = hide,
    add: Add = add_piece,
    dtype: torch.dtype | None = None,
    is_fresh: bool = True,
    keeps_scores: bool = False,
) -> Attend:
    """The right forward pass with something in it that is not."""

    def answer(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
        outs, lses, state, kept = [], [], None, []
        for row, visited in rows(q.shape[-2], k.shape[-2], tile, shift):
            part = scaled(q[..., row, :])
            if is_fresh or state is None or state[2].shape != part.shape:
                top = torch.full_like(part[..., :1], -math.inf, dtype=dtype)
                state = top, torch.zeros_like(top), torch.zeros_like(part, dtype=dtype)
            for column in visited:
                scores = masked(part @ k[..., column, :].mT, row, column, shift)
                kept += [scores] if keeps_scores else []
                state = add(*state, scores, v[..., column, :])
            out, lse = finished(*state)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, -2), torch.cat(lses, -1)

    return answer


def _delta(dout: Tensor, out: Tensor, dweights: Tensor, weights: Tensor) -> Tensor:
    return (dout * out).sum(-1, keepdim=True)


def _gradients_but(
    scales: tuple[float, float] = (-0.5, -0.5),  # powers of D, of dq and dk
    delta: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _delta,
    rows: Planner = plan,
    masked: Callable[[Tensor, slice, slice, int], Tensor] = hide,
    is_summed: bool = True,
    scaled: Callable[[Tensor], Tensor] = _scaled,
    of_v: Callable[[Tensor, Tensor], Tensor] = lambda weights, dscores: weights,
    weights_of: Callable[[Tensor, Tensor], Tensor] = lambda s, lse: (s - lse[..., None]).exp(),
    of_scores: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda w, dw, delta: w * (dw - delta),
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The right gradients with something in them that is not."""

    def answer(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tile: int,
        shift: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for row, visited in rows(q.shape[-2], k.shape[-2], tile, shift):
            queries, dresult = q[..., row, :], dout[..., row, :]
            for column in visited:
                keys, values = k[..., column, :], v[..., column, :]
                scores = masked(scaled(queries) @ keys.mT, row, column, shift)
                weights = weights_of(scores, lse[..., row])
                dweights = dresult @ values.mT
                taken_off = delta(dresult, out[..., row, :], dweights, weights)
                dscores = of_scores(weights, dweights, taken_off)
                if not is_summed:
                    dk[..., column, :] = dv[..., column, :] = 0
                dv[..., column, :] += of_v(weights, dscores).mT @ dresult
                dq[..., row, :] += dscores @ keys * q.shape[-1] ** scales[0]
                dk[..., column, :] += dscores.mT @ queries * q.shape[-1] ** scales[1]
        return dq, dk, dv

    return answer


def _flash_but(
    back: Callable[..., tuple[Tensor, ...]] | None = None,
    forth: Attend | None = None,
    is_saved: bool = True,
    beside: Callable[..., Any] = lambda q, k, v, shift: None,
) -> Flash:
    """The right Function with something in it that is not."""
    forth, back = forth or _tiled(), back or _gradients_but()

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> Tensor:
            out, lse = forth(q, k, v, tile, shift)
            ctx.settings, ctx.beside = (tile, shift), beside(q, k, v, shift)
            if is_saved:
                ctx.save_for_backward(q, k, v, out, lse)
            else:
                ctx.tensors = q, k, v, out.clone(), lse  # out itself would hold its own node
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
            tensors = ctx.saved_tensors if is_saved else ctx.tensors
            return *back(dout, *tensors, *ctx.settings), None, None

    return Flash.apply


# ------------------------------------------------------------------ the oracle


def _whole(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    """By way of the score matrix: what tiles are held against."""
    scores = _scaled(q) @ k.mT
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


# ------------------------------------------------------------------ 10.1: the running softmax

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
_STATE = ("top", "total", "mixed")


def _check_add(answer: Add) -> str:
    for what, (rows, keys, dtype, change) in _PIECES.items():
        _check_pieces(answer, f"add_piece, {what}", rows, keys, dtype, change)
    _check_room_of_add(answer)
    return (
        f"top, total and mixed right after each piece of {len(_PIECES)} runs · −∞ makes no NaN · "
        "2 + D numbers a row are all that goes on"
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
        with _own_work("add_piece"):
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
    top = torch.full((*rows, 1), -_INF, dtype=dtype)
    return top, torch.zeros_like(top), torch.zeros(*rows, width, dtype=dtype)


def _state_after(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From all scores at once, in float64."""
    scores, values = scores.double(), values.double()
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -_INF, 0)).exp()
    return top, weights.sum(-1, keepdim=True), weights @ values


def _check_room_of_add(answer: Add) -> None:
    """Of R rows and K keys: no products of R · K · D numbers, and nothing of the piece is held."""
    R, K, D = 16, 32, 8
    scores, values = torch.randn(R, K), torch.randn(K, D)
    state, kept = _begin((R,), D, torch.float32), []
    trace = measure(lambda: kept.append(answer(*state, scores, values)))
    largest = max(math.prod(e.shape) for e in trace.events)
    require(
        largest <= 2 * R * K,
        f"add_piece of {R} × {K} scores makes a tensor of {largest:,} numbers; wanted at most "
        f"{2 * R * K:,}, twice as many as there are scores.",
    )
    held, wanted = sum(e.bytes for e in trace.events if e.phase != "before"), 4 * R * (2 + D)
    require(
        held <= wanted,
        f"add_piece of {R} × {K} scores leaves {held:,} bytes behind; wanted {wanted:,}: 2 + D "
        f"numbers a row.",
    )


def _add_but(
    higher: Callable[[Tensor, Tensor], Tensor] = (
        lambda top, scores: torch.maximum(top, scores.amax(-1, keepdim=True))
    ),
    zero: Callable[[Tensor], Tensor] = lambda top: top.masked_fill(top == -_INF, 0),
    of_total: Callable[[Tensor], Tensor] = lambda correction: correction,
    of_mixed: Callable[[Tensor], Tensor] = lambda correction: correction,
    end: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] = lambda *state: state,
) -> Add:
    """The right one with something in it that is not."""

    def answer(
        top: Tensor, total: Tensor, mixed: Tensor, scores: Tensor, values: Tensor
    ) -> tuple[Tensor, ...]:
        new = higher(top, scores)
        weights, correction = (scores - zero(new)).exp(), (top - zero(new)).exp()
        total = of_total(correction) * total + weights.sum(-1, keepdim=True)
        return end(new, total, of_mixed(correction) * mixed + weights @ values)

    return answer


def _add_in_place(
    top: Tensor, total: Tensor, mixed: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, ...]:
    got = add_piece(top, total, mixed, scores, values)
    return tuple(old.copy_(new) for old, new in zip((top, total, mixed), got, strict=True))


def _add_by_broadcasting(
    top: Tensor, total: Tensor, mixed: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, ...]:
    higher, total, _ = add_piece(top, total, mixed, scores, values)
    zero = higher.masked_fill(higher == -_INF, 0)
    products = (scores - zero).exp()[..., None] * values[..., None, :, :]
    return higher, total, (top - zero).exp() * mixed + products.sum(-2)


_ADD = Exercise(
    id="10.1",
    title="A softmax that runs",
    minutes=12,
    difficulty=3,
    hints=(
        "Begin with the new top: the larger of the old one and the piece's, row by row "
        "(torch.maximum, and amax(-1, keepdim=True)). What was summed before counted from the old "
        "top; by which factor is it too large now?",
        "The factor is e^(top − new top), for total and for mixed alike. Where the new top is "
        "still −∞, −∞ − (−∞) is NaN: there, count from 0 in place of the new top.",
        "new = torch.maximum(top, scores.amax(-1, keepdim=True)); zero = new.masked_fill(new == "
        "-torch.inf, 0); weights = (scores - zero).exp(); correction = (top - zero).exp(). The new "
        "total is what was summed, corrected, and the sum of weights; mixed likewise, with weights "
        "@ values.",
    ),
    reference=add_piece,
    check=_check_add,
    wrong_answers=(
        WrongAnswer(
            _add_but(of_total=torch.ones_like, of_mixed=torch.ones_like),
            "The earlier sums are not corrected: they counted from a lower top.",
        ),
        WrongAnswer(
            _add_but(of_mixed=torch.ones_like),
            "total is corrected and mixed is not: both were summed from the old top.",
        ),
        WrongAnswer(
            _add_but(of_total=torch.reciprocal, of_mixed=torch.reciprocal),
            "The correction is the wrong way round: e^(top − new top) is at most 1.",
        ),
        WrongAnswer(
            _add_but(higher=lambda top, scores: scores.amax(-1, keepdim=True)),
            "This is the top of the piece; wanted the highest score so far.",
        ),
        WrongAnswer(
            _add_but(higher=lambda top, scores: torch.maximum(top, scores.max())),
            "One top for all rows: each row has its own, or low rows underflow to 0.",
        ),
        WrongAnswer(
            _add_but(zero=torch.zeros_like),
            "Nothing is subtracted before exp: e^1000 is infinite.",
        ),
        WrongAnswer(
            _add_but(zero=lambda top: top),
            "−∞ − (−∞) is NaN: a row that has seen nothing yet has to count from 0.",
        ),
        WrongAnswer(
            _add_but(end=lambda top, total, mixed: (top, total, mixed / total)),
            "mixed is divided already; what comes later is added to the undivided sum.",
        ),
        WrongAnswer(
            _add_but(zero=lambda top: top.clamp(min=0)),
            "Rows whose scores are all below 0 have a top below 0, too: only −∞ counts from 0.",
        ),
        WrongAnswer(
            _add_but(end=lambda top, *sums: (top.masked_fill(top == -_INF, 0), *sums)),
            "The 0 that a row counts from so far is handed on as its top: a later score below 0 "
            "would be measured from there.",
        ),
        WrongAnswer(
            _add_but(end=lambda top, *sums: (top.clamp(min=-1e30), *sums)),
            "A very low number stands for −∞: a row that has seen nothing has no top, and −∞ says "
            "so whatever the scores are.",
        ),
        WrongAnswer(_add_in_place, "Make new tensors: the old state belongs to the caller."),
        WrongAnswer(
            _add_by_broadcasting,
            "Weights times values, broadcast, are R · K · D numbers: a product of matrices, "
            "weights @ values, sums as it goes.",
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


def _plan_but(
    seen: Callable[[int, int, int, int], int] = (
        lambda first, last, keys, shift: min(last + shift, keys)
    ),
    stop: Callable[[int, int], int] = min,
    whole: Callable[[int, int], int] = lambda length, tile: length,
    with_empty: bool = True,
) -> Planner:
    """The right plan with something in it that is not. `seen` is of a row's first query, and the
    one after its last; `whole` is how far tiles go."""

    def answer(queries: int, keys: int, tile: int, shift: int) -> Plan:
        rows = []
        for first in range(0, whole(queries, tile), tile):
            last = stop(first + tile, queries)
            end = min(seen(first, last, keys, shift), whole(keys, tile))
            visited = [slice(n, stop(n + tile, keys)) for n in range(0, end, tile)]
            if visited or with_empty:
                rows.append((slice(first, last), visited))
        return rows

    return answer


def _every_tile(queries: int, keys: int, tile: int, shift: int) -> Plan:
    return plan(queries, keys, tile, keys + queries)


def _by_the_lengths(queries: int, keys: int, tile: int, shift: int) -> Plan:
    return plan(queries, keys, tile, keys - queries if shift else 0)


def _by_queries_for_keys(queries: int, keys: int, tile: int, shift: int) -> Plan:
    rows = []
    for first in range(0, queries, tile):
        last = min(first + tile, queries)
        starts = range(0, min(last + shift, queries), tile)
        rows.append((slice(first, last), [slice(n, min(n + tile, keys)) for n in starts]))
    return rows


def _one_column(queries: int, keys: int, tile: int, shift: int) -> Plan:
    """Each row's keys in one piece."""
    rows = plan(queries, keys, tile, shift)
    return [(row, [slice(0, visited[-1].stop)] if visited else []) for row, visited in rows]


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
    wrong_answers=(
        WrongAnswer(
            _every_tile, "Every tile is visited: those in which nobody sees anything cost as much."
        ),
        WrongAnswer(
            _plan_but(seen=lambda first, last, keys, shift: last),
            "shift is left out: this is top-left, whatever was asked for.",
        ),
        WrongAnswer(
            _by_the_lengths,
            "The diagonal is taken from the lengths: query i sees the keys up to i + shift itself, "
            "which is more than a yes or no.",
        ),
        WrongAnswer(
            _plan_but(
                seen=lambda first, last, keys, shift: (
                    min(last + keys, keys) if shift >= keys else last - shift
                )
            ),
            "shift has the wrong sign: query i sees the keys up to i + shift.",
        ),
        WrongAnswer(
            _plan_but(seen=lambda first, last, keys, shift: first + shift + 1),
            "Asked of a row's first query; its last one sees the most.",
        ),
        WrongAnswer(
            _plan_but(seen=lambda first, last, keys, shift: last + shift - 1),
            "One key too few: i + shift itself is seen.",
        ),
        WrongAnswer(
            _plan_but(seen=lambda first, last, keys, shift: last + shift + 1),
            "One key too many: the last query of a row is last − 1.",
        ),
        WrongAnswer(
            _plan_but(whole=lambda length, tile: length // tile * tile),
            "What is left where the tile does not divide is lost: range(0, length, tile) has it.",
        ),
        WrongAnswer(
            _by_queries_for_keys,
            "The number of queries stands where that of keys belongs: columns end at keys.",
        ),
        WrongAnswer(
            _plan_but(stop=lambda end, length: end),
            "The last tiles reach beyond the end: min(…, queries), and min(…, keys).",
        ),
        WrongAnswer(
            _plan_but(with_empty=False),
            "Rows in which nobody sees anything are left out; their results have to be written, "
            "too.",
        ),
        WrongAnswer(
            _one_column, "A row's keys are in one piece: that is a strip as long as the text."
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

    A column more is no fault (it can carry total, or lse), nor are the sums of rows as a product.
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


def _by_strips(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    """Softmax over whole rows, so many at a time."""
    parts = []
    for row, _ in plan(q.shape[-2], k.shape[-2], tile, shift):
        scores = hide(_scaled(q[..., row, :]) @ k.mT, row, slice(0, k.shape[-2]), shift)
        lse = scores.logsumexp(-1)
        lse = lse.masked_fill(lse == -_INF, _INF)
        parts.append(((scores - lse[..., None]).exp() @ v, lse))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, -2), torch.cat(lses, -1)


def _by_queries(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    """Softmax over the whole row of one query after another."""
    outs, lses = torch.zeros_like(q), torch.full_like(q[..., 0], _INF)
    for i in range(q.shape[-2]):
        seen = min(max(i + shift + 1, 0), k.shape[-2])
        if seen:
            scores = _scaled(q[..., i : i + 1, :]) @ k[..., :seen, :].mT
            outs[..., i : i + 1, :] = scores.softmax(-1) @ v[..., :seen, :]
            lses[..., i : i + 1] = scores.logsumexp(-1)
    return outs, lses


def _zeros_if_large(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    return (out, lse) if q.shape[-2] >= 30 else attend(q, *others)


def _in_float64(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(x.to(q.dtype) for x in attend(q.double(), k.double(), v.double(), *others))


def _by_torchs_kernel(
    q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int
) -> tuple[Tensor, Tensor]:
    """A row of tiles at a time."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    outs, lses = torch.zeros_like(q), torch.full_like(q[..., 0], _INF)
    for row, visited in plan(q.shape[-2], k.shape[-2], tile, shift):
        if visited:
            keys = slice(0, visited[-1].stop)
            mask = hide(q.new_zeros(_length(row), keys.stop), row, keys, shift)
            given = (x.unflatten(0, (1, -1)) for x in (q[..., row, :], k[..., keys, :]))
            values = v[..., keys, :].unflatten(0, (1, -1))
            out, lse = kernel(*given, values, 0.0, False, attn_mask=mask)
            blind = mask.amax(-1) == -_INF
            outs[..., row, :] = out.view_as(q[..., row, :]).masked_fill(blind[:, None], 0)
            lses[..., row] = lse.reshape(lses[..., row].shape).masked_fill(blind, _INF)
    return outs, lses


def _top_left(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, tile, shift if shift >= k.shape[-2] else 0)


def _bottom_right(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    queries, keys = q.shape[-2], k.shape[-2]
    return attend(q, k, v, tile, shift if shift >= keys else keys - queries)


def _scaled_in_place(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _tiled(scaled=lambda x: x)(q.mul_(q.shape[-1] ** -0.5), *others)


def _zero_of_nothing(top: Tensor, total: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _finished(top, total, mixed)
    return out, lse.masked_fill(lse == _INF, 0)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, k, v, tile, shift)
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(shift + 1)
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
    return torch.where(lse[..., None] == _INF, out, whole), lse


def _without_scale_in_lse(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Tops of scores without the scale, which is applied in exp alone."""
    out, lse = _tiled()(q, *others)
    unscaled = _tiled(finished=lambda top, total, mixed: (mixed, top.squeeze(-1)))(q, *others)[1]
    return out, torch.where(lse == _INF, lse, lse + unscaled * (q.shape[-1] ** 0.5 - 1))


def _unguarded(top: Tensor, total: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    return mixed / total, (top + total.log()).squeeze(-1)


def _lse_of_nothing(top: Tensor, total: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    return _finished(top, total, mixed)[0], (top + total.log()).squeeze(-1)


_ATTEND = Exercise(
    id="10.3",
    title="Forward, tile by tile",
    minutes=16,
    difficulty=4,
    hints=(
        "For each row of the plan: a state that has seen nothing (top −∞, total 0, mixed 0), then "
        "add_piece for each of its columns, then the end: out = mixed / total, lse = top + "
        "ln total. q[..., row, :] are the queries of a row.",
        "A tile's scores are hide(scale · q[..., row, :] @ k[..., column, :].mT, row, column, "
        "shift), its values v[..., column, :]. Write into out[..., row, :] and lse[..., row]. A "
        "row that saw nothing has total 0: give it out 0 and lse +∞.",
        "part = q[..., row, :] * q.shape[-1] ** -0.5; top = torch.full_like(part[..., :1], "
        "-torch.inf); total, mixed = torch.zeros_like(top), torch.zeros_like(part); then the "
        "columns; nothing = total == 0; out[..., row, :] = mixed / total.masked_fill(nothing, 1). "
        "lse[..., row] has one dimension fewer than top and total, and +∞ where nothing was seen.",
    ),
    reference=attend,
    check=_check_attend,
    wrong_answers=(
        WrongAnswer(
            _whole,
            "This is the whole score matrix: the right numbers, and T² of them in memory.",
        ),
        WrongAnswer(
            _by_strips,
            "A strip of scores as long as the text, for one softmax: with add_piece a tile will "
            "do.",
        ),
        WrongAnswer(
            _tiled(keeps_scores=True),
            "The scores of every tile are kept in a list: T² of them in small pieces.",
        ),
        WrongAnswer(_tiled(scaled=lambda q: q), "The scores are not scaled: q kᵀ / √D."),
        WrongAnswer(
            _tiled(scaled=lambda q: q / q.shape[-1]), "Scaled by D; wanted its root, 1 / √D."
        ),
        WrongAnswer(
            _without_scale_in_lse,
            "The scale is missing in lse: its top has to be that of the scaled scores.",
        ),
        WrongAnswer(
            _tiled(
                finished=lambda top, total, mixed: (
                    _finished(top, total, mixed)[0],
                    _finished(torch.zeros_like(top), total, mixed)[1],
                )
            ),
            "lse is ln total alone: total counts from top, so top has to be added.",
        ),
        WrongAnswer(
            _tiled(finished=lambda top, total, mixed: (mixed, _finished(top, total, mixed)[1])),
            "out is not divided by total.",
        ),
        WrongAnswer(
            _tiled(finished=_unguarded),
            "A query that sees nothing has total 0, and 0 / 0 is NaN: its result is 0.",
        ),
        WrongAnswer(
            _tiled(finished=_lse_of_nothing),
            "Of a query that sees nothing lse is +∞, so that e^(score − lse) is 0 in backward.",
        ),
        WrongAnswer(
            _tiled(finished=_zero_of_nothing),
            "lse is a number where a query sees nothing, as if its scores summed to e^lse: +∞ says "
            "that no score, hidden or not, has any weight.",
        ),
        WrongAnswer(
            _by_queries,
            "One query at a time with all of its keys: its row grows with the text. A tile does "
            "not.",
        ),
        WrongAnswer(
            _zeros_if_large, "Longer texts get zeros: what is right for 8 tokens is for 80, too."
        ),
        WrongAnswer(
            _in_float64,
            "All of q, k and v is copied to another dtype first: a tile's part of them is enough, "
            "if anything.",
        ),
        WrongAnswer(
            _by_torchs_kernel, "This is the kernel under torch's attention: now build yours."
        ),
        WrongAnswer(
            _tiled(rows=_every_tile),
            "Tiles are visited in which everything is hidden: go by the plan.",
        ),
        WrongAnswer(
            _tiled(masked=lambda scores, *_: scores),
            "Nothing is hidden inside of the tiles on the diagonal: hide(…).",
        ),
        WrongAnswer(
            _top_left, "Top-left, whatever was asked for: hand shift on to plan and to hide."
        ),
        WrongAnswer(
            _bottom_right,
            "Bottom-right, whatever was asked for: which it is, shift says, not the lengths.",
        ),
        WrongAnswer(
            _tiled(rows=_plan_but(whole=lambda length, tile: length // tile * tile)),
            "What is left where the tile does not divide is lost: it is one of the plan's rows.",
        ),
        WrongAnswer(
            _tiled(masked=lambda s, row, column, shift: hide(s, slice(0, 1), slice(0, 1), shift)),
            "Every tile is masked as if it were the first: hide has to know its row and column.",
        ),
        WrongAnswer(
            _tiled(is_fresh=False),
            "The second row of tiles goes on with the first one's sums: each row begins anew.",
        ),
        WrongAnswer(
            _tiled(add=_add_but(of_total=torch.ones_like, of_mixed=torch.ones_like)),
            "Earlier sums are added up without a correction: add_piece has it.",
        ),
        WrongAnswer(
            lambda *given: tuple(x.float() for x in _tiled()(*given)),
            "The result is float32 whatever q is: torch.empty_like(q), torch.zeros_like(part).",
        ),
        WrongAnswer(_scaled_in_place, "q is scaled in place: backward needs it as it was."),
        WrongAnswer(_by_torch, "This is torch's own, and it is right: now build yours."),
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


def _through_the_loop(q: Tensor, k: Tensor, v: Tensor, tile: int, shift: int) -> Tensor:
    return attend(q, k, v, tile, shift)[0]


def _checkpointed(*given: Any) -> Tensor:
    return checkpoint(_through_the_loop, *given, use_reentrant=False)


def _whole_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: int, shift: int
) -> tuple[Tensor, ...]:
    """The right formulas, of all scores at once."""
    return gradients(dout, q, k, v, out, lse, max(q.shape[-2], k.shape[-2]), shift)


def _weights_of_all(q: Tensor, k: Tensor, v: Tensor, shift: int) -> list[Tensor]:
    return [
        hide(_scaled(q[..., row, :]) @ k[..., column, :].mT, row, column, shift)
        for row, visited in plan(q.shape[-2], k.shape[-2], 12, shift)
        for column in visited
    ]


def _twice_a_query(q: Tensor, k: Tensor, v: Tensor, shift: int) -> Tensor:
    return q.new_zeros(q.shape[:-1])


def _delta_of_a_tile(dout: Tensor, out: Tensor, dweights: Tensor, weights: Tensor) -> Tensor:
    return (dweights * weights).sum(-1, keepdim=True)


def _made_again(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return gradients(dout, q, k, v, *attend(q, k, v, *others), *others)


def _swapped(*given: Any) -> tuple[Tensor, ...]:
    dq, dk, dv = gradients(*given)
    return dq, dv, dk


def _backward_by_queries(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: int, shift: int
) -> tuple[Tensor, ...]:
    """A softmax over the whole row of one query after another."""
    (dq, dk, dv), scale = (torch.zeros_like(x) for x in (q, k, v)), q.shape[-1] ** -0.5
    for i in range(q.shape[-2]):
        row, seen = slice(i, i + 1), slice(0, min(max(i + shift + 1, 0), k.shape[-2]))
        keys, above = k[..., seen, :], dout[..., row, :]
        weights = (_scaled(q[..., row, :]) @ keys.mT).softmax(-1)
        delta = (above * out[..., row, :]).sum(-1, keepdim=True)
        dscores = scale * weights * (above @ v[..., seen, :].mT - delta)
        dv[..., seen, :] += weights.mT @ above
        dq[..., row, :] += dscores @ keys
        dk[..., seen, :] += dscores.mT @ q[..., row, :]
    return dq, dk, dv


def _zero_gradients_if_large(dout: Tensor, q: Tensor, *others: Any) -> tuple[Tensor, ...]:
    found = gradients(dout, q, *others)
    return tuple(x * 0 for x in found) if q.shape[-2] >= 30 else found


def _in_place_of_dout(dout: Tensor, *others: Any) -> tuple[Tensor, ...]:
    found = gradients(dout, *others)
    dout.mul_(others[3])
    return found


def _in_place_of_out(dout: Tensor, *others: Any) -> tuple[Tensor, ...]:
    found = gradients(dout, *others)
    others[3].mul_(dout)
    return found


_FLASH = Exercise(
    id="10.4",
    title="Backward, tile by tile",
    minutes=25,
    difficulty=5,
    hints=(
        "forward: call attend, save q, k, v, out and lse by ctx.save_for_backward; tile and shift "
        "go on ctx. backward: zeros like q, k and v, then the plan's two loops; each tile makes "
        "its weights again and adds its share to three gradients.",
        "Of a tile: weights = (hide(scale · q kᵀ, …) − lse[..., row, None]).exp(); dweights = dout "
        "vᵀ; dscores = weights · (dweights − delta). delta is (dout * out).sum(-1, keepdim=True), "
        "of the whole row, once. Then dv += weightsᵀ dout, dq += scale · dscores k, dk += scale · "
        "dscoresᵀ q.",
        "dscores = weights * (dout[..., row, :] @ v[..., column, :].mT - delta[..., row, :]) * "
        "scale; dv[..., column, :] += weights.mT @ dout[..., row, :]; dq[..., row, :] += dscores @ "
        "k[..., column, :]. dk is dq's mirror image: which of the two factors is transposed?",
    ),
    reference=flash,
    check=_check_flash,
    wrong_answers=(
        WrongAnswer(
            _through_the_loop,
            "Autograd goes through the loop and saves every tile: N² again. Write its backward.",
        ),
        WrongAnswer(
            _checkpointed,
            "A checkpoint forgets the tiles, and in backward has all of them at once.",
        ),
        WrongAnswer(
            lambda *given: _whole(*given)[0],
            "The whole score matrix, by autograd: nothing is saved at all.",
        ),
        WrongAnswer(
            _flash_but(_whole_backward),
            "Forward goes by tiles, backward makes all weights at once.",
        ),
        WrongAnswer(
            _flash_but(forth=_whole),
            "Backward goes by tiles, forward makes all scores at once: take attend.",
        ),
        WrongAnswer(
            _flash_but(beside=_weights_of_all),
            "The tiles' weights are kept on ctx; backward makes them again, from lse.",
        ),
        WrongAnswer(
            _flash_but(beside=_twice_a_query),
            "Two numbers a query are kept, top and total: lse is both in one.",
        ),
        WrongAnswer(
            _flash_but(is_saved=False),
            "Tensors on ctx are out of reach for a checkpoint or for an offload: "
            "ctx.save_for_backward.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(delta=lambda dout, *_: torch.zeros_like(dout[..., :1]))),
            "delta is missing: the weights of a row sum to 1, so if one grows the others shrink.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(of_scores=lambda w, dw, delta: w * dw - delta)),
            "The brackets: weights · (dweights − delta). Here delta was taken off the product.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(delta=_delta_of_a_tile)),
            "delta is summed over one tile; it belongs to the whole row: rowsum(dout · out).",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(scales=(0, -0.5))), "dq lacks the scale that scores have."
        ),
        WrongAnswer(
            _flash_but(_gradients_but(scales=(-0.5, 0))), "dk lacks the scale that scores have."
        ),
        WrongAnswer(
            _flash_but(_gradients_but(scales=(0, 0))), "Neither dq nor dk has the scale in it."
        ),
        WrongAnswer(
            _flash_but(_gradients_but(scales=(-1, -1))),
            "The scale is in dq and dk twice: it belongs there once, as the scores have it once.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(scales=(-0.5, -1))),
            "dk has the scale twice: a q that is scaled already has brought it along.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(weights_of=lambda scores, lse: scores.exp())),
            "lse is left out: e^score alone are no weights, they don't sum to 1.",
        ),
        WrongAnswer(
            _flash_but(_swapped), "dk and dv have changed places: the order is that of q, k, v."
        ),
        WrongAnswer(
            _flash_but(_made_again),
            "Backward runs forward once more, for out and lse: save them, and it needs no product.",
        ),
        WrongAnswer(
            _flash_but(_backward_by_queries),
            "Backward takes one query at a time with all of its keys, and lse has no use: by "
            "tiles, please.",
        ),
        WrongAnswer(
            _flash_but(_zero_gradients_if_large),
            "Gradients of longer texts are zeros: what is right for 8 tokens is for 80, too.",
        ),
        WrongAnswer(
            _flash_but(_in_place_of_out),
            "out is what the caller got: `out *= dout` changes the result itself. Make a new one.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(is_summed=False)),
            "A key is seen by many queries: dk and dv add up (+=) over the rows of tiles.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(scaled=lambda q: q)),
            "The scores of backward are not scaled, and lse is of scaled ones.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(masked=lambda scores, *_: scores)),
            "Nothing is hidden in backward: hidden pairs get weights that forward never had.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(of_v=lambda weights, dscores: dscores)),
            "dv is the weights', not the scores': weightsᵀ dout.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(weights_of=lambda s, lse: s.softmax(-1).nan_to_num(0))),
            "A softmax of one tile; the weights are e^(score − lse), of the whole row.",
        ),
        WrongAnswer(
            _flash_but(_gradients_but(rows=_every_tile)),
            "Backward visits tiles in which everything is hidden: go by the plan.",
        ),
        WrongAnswer(
            _flash_but(forth=_tiled(finished=_lse_of_nothing)),
            "lse is −∞ where a query sees nothing, and −∞ − (−∞) is NaN: +∞ makes its weights 0.",
        ),
        WrongAnswer(
            _flash_but(_in_place_of_dout), "dout is changed; others may still want to read it."
        ),
        WrongAnswer(
            lambda q, k, v, tile, shift: _by_torch(q, k, v, tile, shift)[0],
            "This is torch's fused attention: now build yours.",
        ),
    ),
)

# ------------------------------------------------------------------ the bill

# torch's attention is by tiles since day 1, and so was the bill.
DAY = Day(
    exercises=(_ADD, _PLAN, _ATTEND, _FLASH),
    bill=Bill("day 10: attention by tiles, as it was all along", momentum_in_8_bits),
)
