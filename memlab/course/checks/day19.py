"""Day 19: eight bits in the matmul."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memlab.course.bill_steps import everything_elsewhere
from memlab.course.exercises import Bill, Day, Wrong, distinct, require
from memlab.course.properties import (
    SLACK,
    elements,
    gradients,
    is_tensor,
    is_tuple,
    keep_no_more,
    limited,
    new_bytes,
    normal,
    peaks,
    returned_gradients,
    same_bytes,
    same_gradients,
    same_second_backward,
    unchanged,
)
from memlab.course.solutions import checked, solution
from memlab.metering import measure
from memlab.reference.fp8 import E4M3, E5M2, FP8Matmul, cast, cast_tiles

_LIBRARIES = ("memlab.precision", "torchao")
_NAMES = {E4M3: "E4M3", E5M2: "E5M2"}

saved_bytes = solution("19.4")


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return FP8Matmul.apply(x, weight)


# ------------------------------------------------------------------ 19.1: a cast with a scale

Cast = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]


def _tensors() -> dict[str, Tensor]:
    """Return the tensors to cast, the smallest first."""
    return {
        "[1, −2, 0.3]": torch.tensor([1.0, -2.0, 0.3]),
        "four zeros": torch.zeros(4),
        "one element": torch.tensor([-3.0]),
        "gradients near 10⁻⁶, (8, 16)": 1e-6 * normal(8, 16),
        "gradients below 10⁻²⁴": 1e-25 * normal(40),
        "activations up to 10⁴, (4, 5, 6)": 3e3 * normal(4, 5, 6),
        "a matrix in bfloat16, (16, 24)": normal(16, 24, seed=1).bfloat16(),
        "a non-contiguous matrix, (12, 10)": normal(10, 12).T,
        "a matrix over many decades, (20, 30)": elements(20, 30),
    }


def _check_cast(answer: Cast) -> str:
    for name, x in _tensors().items():
        for dtype in (E4M3, E5M2):
            call = f"cast of {name} to {_NAMES[dtype]}"
            codes, scale = _pair(call, answer, (x, dtype), "codes and scale")
            is_tensor(f"{call}, codes,", codes, dtype=dtype, shape=tuple(x.shape))
            is_tensor(f"{call}, the scale,", scale, dtype=torch.float32, shape=())
            keep_no_more(call, (codes, scale))
            _require_scale(call, "the scale", x, scale, dtype)
            _require_nearest(call, x, codes, scale, dtype)
    return "the largest |x| becomes 448 or 57,344 · every other element has the nearest code"


def _pair(
    call: str, answer: Callable[..., Any], arguments: tuple[Any, ...], parts: str
) -> tuple[Any, Any]:
    x, *others = arguments
    mine = x.clone(memory_format=torch.preserve_format)
    with unchanged(call, x=mine):
        got = answer(mine, *others)
    if not (isinstance(got, tuple) and len(got) == 2):
        is_tuple(call, got, 2, parts)
        raise Wrong(f"{call} gave no tuple of {parts}.", (call, "no tuple"))
    return got[0], got[1]


def _require_scale(call: str, what: str, x: Tensor, scale: Any, dtype: torch.dtype) -> None:
    """Require that the scale maps the amax to the largest value of the format."""
    if not isinstance(scale, Tensor) or scale.numel() != 1:
        return
    wanted, got = x.double().abs().max().item() / torch.finfo(dtype).max, scale.item()
    if wanted == 0:
        require(0 < got < float("inf"), f"{call}: {what} is {got:.3g}; wanted a positive number.")
        return
    mine, right = distinct(got, wanted)
    require(
        abs(got - wanted) <= 1e-5 * wanted,
        f"{call}: {what} is {mine}; wanted {right}, the largest |x| divided by "
        f"{torch.finfo(dtype).max:,.0f}.",
    )


def _require_nearest(call: str, x: Tensor, codes: Any, scale: Any, dtype: torch.dtype) -> None:
    """Require the nearest code, by distance in float64. At a tie, both neighbors are right."""
    if not isinstance(codes, Tensor) or codes.shape != x.shape:
        return
    exact = (x.double() / scale.double()).flatten()
    got = codes.flatten().double()
    table = _values(dtype)
    wanted = table[(exact.view(-1, 1) - table).abs().argmin(1)]
    further = (got - exact).abs() - (wanted - exact).abs()
    off = (~(further <= 1e-5 * exact.abs())).nonzero().flatten().tolist()
    for k in off[:1]:
        require(
            False,
            f"{call}: element {k} is {exact[k]:.5g} · scale and has code {got[k]:.5g}; wanted "
            f"{wanted[k]:.5g}. {len(off)} of {len(got)} codes are wrong.",
        )


def _values(dtype: torch.dtype) -> Tensor:
    """Return all finite values of the format, in float64."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return every[every.isfinite()]


# ------------------------------------------------------------------ 19.2: a scale for each tile

CastTiles = Callable[[Tensor, torch.dtype, int, int], tuple[Tensor, Tensor]]


class TileCase(NamedTuple):
    n: int
    k: int
    rows: int
    columns: int
    dtype: torch.dtype = E4M3
    of: torch.dtype = torch.float32
    size: float = 1.0  # of the elements

    def __str__(self) -> str:
        in_ = "" if self.of == torch.float32 else ", bfloat16"
        in_ += "" if self.size == 1 else f", × {self.size:g},"
        return (
            f"x ({self.n}, {self.k}){in_} to {_NAMES[self.dtype]} in tiles of {self.rows} × "
            f"{self.columns}"
        )

    @property
    def x(self) -> Tensor:
        """Return rows and columns of different sizes, so that each tile has its own amax."""
        sizes = torch.logspace(-4, 3, self.n).view(-1, 1) * torch.logspace(2, -3, self.k)
        return (normal(self.n, self.k, seed=self.n) * sizes * self.size).to(self.of)


TILES = (
    TileCase(1, 4, 1, 2),
    TileCase(4, 6, 2, 3),
    TileCase(4, 6, 1, 6, E5M2),
    TileCase(6, 8, 2, 2, E4M3, torch.bfloat16),
    TileCase(3, 7, 1, 4),
    TileCase(7, 4, 3, 4),
    TileCase(5, 11, 2, 4, E5M2),
    TileCase(40, 300, 16, 128),
    *(TileCase(6, 9, 2, 4, size=size) for size in (1e-20, 1e6)),
)


def _check_tiles(answer: CastTiles) -> str:
    for case in TILES:
        _check_tile_case(answer, case)
    zeros = torch.zeros(2, 4)
    zeros[0, 0] = 1.0
    call = "cast_tiles of three tiles of zeros and a tile [1, 0]"
    codes, scales = _pair(call, answer, (zeros, E4M3, 1, 2), "codes and scales")
    is_tensor(f"{call}, scales,", scales, dtype=torch.float32, shape=(2, 2))
    require(
        torch.equal(codes.float(), 448 * zeros),
        f"{call}: codes {codes.float().tolist()}; wanted 448 for the 1, and 0 for every 0.",
    )
    return f"{len(TILES)} matrices, 6 of them with smaller tiles at the edges · a scale per tile"


def _check_tile_case(answer: CastTiles, case: TileCase) -> None:
    call, x = f"cast_tiles of {case}", case.x
    arguments = (x, case.dtype, case.rows, case.columns)
    codes, scales = _pair(call, answer, arguments, "codes and scales")
    down, across = -(-case.n // case.rows), -(-case.k // case.columns)
    is_tensor(f"{call}, codes,", codes, dtype=case.dtype, shape=(case.n, case.k))
    is_tensor(f"{call}, scales,", scales, dtype=torch.float32, shape=(down, across))
    if not isinstance(scales, Tensor) or scales.shape != (down, across):
        return
    keep_no_more(call, (codes, scales))
    for i in range(down):
        for j in range(across):
            place = (
                slice(i * case.rows, (i + 1) * case.rows),
                slice(j * case.columns, (j + 1) * case.columns),
            )
            what, scale = f"the scale of tile ({i}, {j})", scales[i, j]
            _require_scale(call, what, x[place], scale, case.dtype)
            if isinstance(codes, Tensor) and codes.shape == x.shape:
                _require_nearest(
                    f"{call}, tile ({i}, {j})", x[place], codes[place], scale, case.dtype
                )


# ------------------------------------------------------------------ 19.3: forward and backward

MatmulFunction = Callable[[Tensor, Tensor], Tensor]


class MatmulCase(NamedTuple):
    n: int
    in_features: int
    out_features: int
    x_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    size: float = 1.0  # of the gradient

    def __str__(self) -> str:
        n, inner, out = self[:3]
        names = [str(d).removeprefix("torch.") for d in (self.x_dtype, self.weight_dtype)]
        small = "" if self.size == 1 else f", gradients of {self.size:.0e}"
        return f"x ({n}, {inner}), {names[0]}, and weight ({out}, {inner}), {names[1]}{small}"

    @property
    def x(self) -> Tensor:
        return normal(self.n, self.in_features, seed=1).to(self.x_dtype)

    @property
    def weight(self) -> Tensor:
        return (0.02 * normal(self.out_features, self.in_features, seed=2)).to(self.weight_dtype)


BF16 = torch.bfloat16
MATMULS = (
    MatmulCase(1, 2, 3),
    MatmulCase(5, 8, 12),
    MatmulCase(12, 40, 24, size=1e-7),
    MatmulCase(9, 24, 16, BF16, BF16),
    MatmulCase(9, 24, 16, BF16, torch.float32),
)
LARGE = MatmulCase(64, 256, 128, BF16, BF16)


def _check_matmul(answer: MatmulFunction) -> str:
    for case in MATMULS:
        _check_values(answer, case)
    _check_two_layers(answer)
    for case in MATMULS:
        _check_returned_dtypes(answer, case)
    return _check_bytes(answer)


def _check_values(answer: MatmulFunction, case: MatmulCase) -> None:
    call = f"matmul of {case}"
    given: dict[str, Any] = {"x": case.x, "weight": case.weight}

    def scaled(multiply: MatmulFunction, x: Tensor, weight: Tensor) -> Tensor:
        return multiply(x, weight) * case.size

    wanted = gradients(partial(scaled, matmul), **given)
    with unchanged(call, **given):
        out = answer(*given.values())
    is_tensor(call, out, dtype=case.x_dtype, shape=(case.n, case.out_features))
    if not isinstance(out, Tensor):
        raise Wrong(f"{call} gave no tensor.", (call, "no tensor"))
    got = gradients(partial(scaled, answer), **given)
    for name, right in wanted.items():
        is_bf16 = right is not None and right.dtype == BF16
        same_gradients(call, got, {name: right}, within=2**-7 if is_bf16 else 1e-4)


def _check_returned_dtypes(answer: MatmulFunction, case: MatmulCase) -> None:
    """Autograd casts a gradient of another dtype, so both are in memory for a moment."""
    out = answer(case.x.requires_grad_(), case.weight.requires_grad_())
    wanted = {"x": case.x_dtype, "weight": case.weight_dtype}
    for (name, dtype), sent in zip(wanted.items(), returned_gradients(out), strict=False):
        got = getattr(sent, "dtype", None)
        require(
            got in (dtype, None),
            f"matmul of {case}: backward returns the gradient of {name} in {got}; wanted {dtype}.",
        )


def _check_two_layers(answer: MatmulFunction) -> None:
    """Check two forward passes with different weights before backward, and a second backward."""
    first = MatmulCase(5, 8, 8)
    second = 0.02 * normal(8, 8, seed=3)
    call = "matmul of two layers, one after the other"

    def through(multiply: MatmulFunction, x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        return multiply(multiply(x, one), two)

    given: dict[str, Any] = {"x": first.x, "one": first.weight, "two": second}
    wanted = gradients(partial(through, matmul), **given)
    got = gradients(partial(through, answer), **given)
    same_gradients(call, got, wanted, within=1e-4)
    x = first.x.requires_grad_()
    out = through(answer, x, first.weight, second)
    same_second_backward(call, out, x)


def _check_bytes(answer: MatmulFunction) -> str:
    call = f"matmul of {LARGE}"
    weight, leaf, outputs, inputs = LARGE.weight.requires_grad_(), LARGE.x.requires_grad_(), [], []

    def run() -> None:
        x = leaf * 1  # not a leaf, so only the graph could keep it alive
        inputs.append(StorageWeakRef(x.untyped_storage()))
        outputs.append(answer(x, weight))

    trace = measure(run)
    held = new_bytes(trace) - outputs[0].nbytes
    require(
        inputs[0].expired(),
        f"{call} keeps x for backward: {2 * leaf.numel():,} bytes. Keep its FP8 codes instead.",
        evidence=(call, "keeps x"),
    )
    most = leaf.numel() + 4
    require(
        held <= most,
        f"{call} keeps {held:,} bytes for backward; wanted {most:,}: {leaf.numel():,} codes of x "
        f"and a scale (the weight has {weight.numel():,} elements).",
        evidence=(call, "keeps", held),
    )
    limited(call, peaks(lambda: answer(leaf * 1, weight)), left=SLACK)
    return (
        f"result and both gradients match FP8 matmuls · {held:,} bytes kept for backward, "
        f"{2 * leaf.numel():,} in BF16"
    )


# ------------------------------------------------------------------ 19.4: saved tensors

Kept = Callable[..., int]

_BLOCKS: tuple[tuple[int, int, int, int, str, int | None], ...] = (
    (1, 1, 1, 1, "bf16", None),
    (1, 10, 3, 100, "bf16", None),
    (2, 10, 3, 100, "own", None),
    (2, 10, 3, 100, "shared", None),
    (3, 10, 3, 100, "own", 5),
    (3, 11, 4, 102, "shared", 4),
    (7, 256, 128, 700, "own", 128),
    (8192, 4096, 4096, 11_008, "bf16", None),
    (8192, 4096, 4096, 11_008, "shared", 128),
)


def _check_kept(answer: Kept) -> str:
    for tokens, C, Q, F, way, columns in _BLOCKS:
        tail = "" if columns is None else f", {columns}"
        call = f'saved_bytes({tokens}, {C}, {Q}, {F}, "{way}"{tail})'
        extra = () if columns is None else (columns,)
        units = {"bytes per token": tokens} if tokens > 1 else {}
        same_bytes(
            call,
            answer(tokens, C, Q, F, way, *extra),
            saved_bytes(tokens, C, Q, F, way, *extra),
            units,
        )
    return f"{len(_BLOCKS)} blocks match to the byte"


# ------------------------------------------------------------------ the bill

DAY = Day(
    exercises=(
        checked("19.1", _check_cast, cast, rebuilds=_LIBRARIES),
        checked("19.2", _check_tiles, cast_tiles, rebuilds=_LIBRARIES),
        checked("19.3", _check_matmul, matmul, rebuilds=_LIBRARIES),
        checked("19.4", _check_kept, saved_bytes),
    ),
    bill=Bill("day 19: FP8 matmuls, the peak is elsewhere", everything_elsewhere),
)
