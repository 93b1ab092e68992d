"""Day 17: four bits under a frozen model."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memlab.course.bill_steps import everything_elsewhere
from memlab.course.exercises import Bill, Day, distinct, require
from memlab.course.properties import (
    MAGNITUDES,
    as_little_memory,
    elements,
    gradients,
    increasing,
    is_tensor,
    is_tuple,
    keep_no_more,
    named_errors,
    normal,
    require_none_wrong,
    rounding,
    same_block_maxima,
    same_byte_counts,
    same_gradients,
    same_second_backward,
    unchanged,
)
from memlab.course.solutions import checked, solution
from memlab.metering import measure
from memlab.reference.adam8bit import dynamic_code
from memlab.reference.nf4 import double_encode, encode, levels
from memlab.reference.qlora import Matmul

BLOCK = 64  # weights that share an absmax
ABSMAX_BLOCK = 256  # absmax values that share a scale
ZERO = 7  # the code of 0
_LIBRARIES = ("memlab.quantize", "memlab.qlora", "bitsandbytes", "torchao")

held = solution("17.5")


def matmul(x: Tensor, codes: Tensor, absmax: Tensor, out_features: int) -> Tensor:
    return Matmul.apply(x, codes, absmax, out_features)


# ------------------------------------------------------------------ 17.1: sixteen quantiles


def _check_levels(answer: Callable[[], Tensor]) -> str:
    got, wanted = answer(), levels()
    is_tensor("levels()", got, dtype=torch.float32, shape=(16,))
    increasing("levels()", got)
    require(bool((got == 0).any()), "levels() has no 0. Weights of exactly 0 need a level.")
    # A quantile is accurate to its own last bits; 0 is checked above.
    allowed = rounding(got.dtype, terms=16) * wanted.abs()
    require_none_wrong("levels()", got, wanted, ~((got - wanted).abs() <= allowed))
    return "16 levels from −1 to 1, right but for the last bits · zero is entry 7"


# ------------------------------------------------------------------ 17.2: encode and pack

MOST_BYTES = 64  # at the peak, per weight

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]


def _weights() -> dict[str, Tensor]:
    """Return the weights to encode, the smallest first."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    ends = torch.zeros(BLOCK)
    ends[0], ends[3] = 1.0, -1.0
    return {
        "[1, 0, 0, −1] and 60 zeros": ends,
        "64 weights": normal(BLOCK),
        "64 weights, the largest |w| below zero": -normal(BLOCK).abs() - 0.1,
        "3 blocks of different sizes, (3, 64)": normal(3, BLOCK)
        * torch.tensor([[1.0], [1e-4], [300.0]]),
        "a block of weights and a block of zeros": torch.cat([normal(BLOCK), torch.zeros(BLOCK)]),
        "64 weights below 10⁻²⁵": 1e-26 * normal(BLOCK),
        "a matrix with rows of 48, (4, 48)": normal(4, 48),
        "a non-contiguous matrix, (16, 12)": normal(12, 16).mT,
        "a tensor of shape (2, 8, 8)": normal(2, 8, 8),
        "a matrix in bfloat16, (32, 64)": normal(32, 64).bfloat16(),
        "a matrix over many decades, (20, 64)": elements(20, BLOCK),
    }


def _check_encode(answer: Encode) -> str:
    for name, weight in _weights().items():
        call = f"encode of {name}"
        codes, absmax = _encoded(call, answer, weight)
        same_block_maxima(call, "absmax", absmax, weight, BLOCK)
        _require_nearest_level(call, weight, codes)
    weight = torch.linspace(-1, 1, 2**14)
    per_weight = measure(lambda: answer(weight)).peak_bytes / weight.numel()
    require(
        per_weight <= MOST_BYTES,
        f"encode needs {per_weight:,.0f} bytes per weight at its peak; wanted at most "
        f"{MOST_BYTES}.",
    )
    return (
        f"each weight gets the nearest level · two codes per byte, the first in the upper bits · "
        f"192 weights in 108 bytes · at most {MOST_BYTES} bytes per weight at the peak"
    )


def _encoded(call: str, answer: Encode, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and absmax. Check their dtypes, shapes and storage."""
    mine = weight.clone(memory_format=torch.preserve_format)
    with unchanged(call, weight=mine):
        got = answer(mine)
    is_tuple(call, got, 2, "codes and absmax")
    count = weight.numel()
    is_tensor(f"{call}, codes,", got[0], dtype=torch.uint8, shape=(count // 2,))
    is_tensor(f"{call}, absmax,", got[1], dtype=torch.float32, shape=(count // BLOCK,))
    keep_no_more(call, got)
    return got


def _require_nearest_level(call: str, weight: Tensor, codes: Tensor) -> None:
    """Compare distances in float64. At a tie, both neighbors are right."""
    flat, table = weight.flatten().double(), levels().double()
    absmax = flat.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    indices = torch.stack([codes >> 4, codes & 15], 1).flatten().long()
    got = table[indices] * absmax
    nearest = (flat.view(-1, 1) - table * absmax.view(-1, 1)).abs().argmin(1)
    further = (got - flat).abs() - (table[nearest] * absmax - flat).abs()
    off = (further > 1e-6 * absmax).nonzero().flatten().tolist()
    for k in off[:1]:
        require(
            False,
            f"{call}: weight {k} is {flat[k] / absmax[k]:.4g} × its absmax and has code "
            f"{indices[k]}; wanted {nearest[k]}. {len(off)} of {len(flat)} codes are wrong.",
        )
    zeros = indices[(flat == 0) & (indices != ZERO)]
    require(
        not len(zeros),
        f"{call}: {len(zeros)} weights of 0 should have code {ZERO}, but the first of them has "
        f"code {zeros[:1].sum()}.",
    )


# ------------------------------------------------------------------ 17.3: double quantization

DoubleEncode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _absmax_values() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def near(count: int, around: float = 0.05) -> Tensor:
        return around * (1 + 0.2 * torch.randn(count, generator=random)).abs()

    return {
        "[1, 2, 3, 4, 10]": torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]),
        "256 values": near(256),
        "100 equal values": torch.full((100,), 0.5),
        "3 × 256 values, each block larger": torch.cat([near(256, a) for a in (0.02, 0.05, 0.3)]),
        "300 values": near(300),
        "700 values, one of them far away": torch.cat([near(699), torch.tensor([2.0])]),
        "[0.25]": torch.tensor([0.25]),
        **{f"300 values near {size:g}": near(300, size) for size in MAGNITUDES},
    }


def _codebooks() -> dict[str, Tensor]:
    """Return two codebooks whose zeros have different places."""
    uneven = torch.cat([torch.linspace(-1, 0, 101), torch.linspace(0, 1, 156)[1:]])
    return {"": dynamic_code(True), ", with a codebook whose entry 100 is 0": uneven}


def _check_double_encode(answer: DoubleEncode) -> str:
    for where, codebook in _codebooks().items():
        _check_codebook(answer, codebook, where)
    return (
        "each absmax minus the mean gets the code of the nearest entry · 300 values in 312 bytes · "
        "equal values get the code of zero"
    )


def _check_codebook(answer: DoubleEncode, codebook: Tensor, where: str) -> None:
    for name, absmax in _absmax_values().items():
        call = f"double_encode of {name}{where}"
        mine, mine_codebook = absmax.clone(), codebook.clone()
        is_short = len(absmax) % ABSMAX_BLOCK != 0  # the last block
        with (
            unchanged(call, absmax=mine, codebook=mine_codebook),
            named_errors(call, when=is_short),
        ):
            got = answer(mine, mine_codebook)
        is_tuple(call, got, 3, "codes, scales and the mean")
        blocks = -(-len(absmax) // ABSMAX_BLOCK)
        is_tensor(f"{call}, codes,", got[0], dtype=torch.uint8, shape=(len(absmax),))
        is_tensor(f"{call}, scales,", got[1], dtype=torch.float32, shape=(blocks,))
        is_tensor(f"{call}, mean,", got[2], dtype=torch.float32, shape=())
        keep_no_more(call, got)
        _require_double(call, absmax, got, codebook)


def _require_double(
    call: str, absmax: Tensor, got: tuple[Tensor, Tensor, Tensor], codebook: Tensor
) -> None:
    """Compare the mean and scales up to rounding, and codes by distance in float64."""
    codes, scales, mean = got
    exact = absmax.double()
    wanted_mean = exact.mean()
    mine, right = distinct(mean.item(), wanted_mean.item())
    require(
        abs(mean.double() - wanted_mean).item() <= 1e-6 * wanted_mean.item(),
        f"{call}: the mean is {mine}; wanted {right}.",
    )
    centered = exact - wanted_mean
    wanted_scales = torch.stack([b.abs().max() for b in centered.split(ABSMAX_BLOCK)])
    tolerance = 1e-6 * exact.max().item()  # differences of two rounded values
    for n, (one, right) in enumerate(zip(scales.tolist(), wanted_scales.tolist(), strict=True)):
        if not abs(one - right) <= tolerance:
            mine, meant = distinct(one, right)
            require(False, f"{call}: the scale of block {n} is {mine}; wanted {meant}.")
            break
    table, each = codebook.double(), wanted_scales.repeat_interleave(ABSMAX_BLOCK)[: len(exact)]
    decoded = table[codes.long()] * each
    nearest = table[(centered.view(-1, 1) - table * each.view(-1, 1)).abs().argmin(1)] * each
    further = (decoded - centered).abs() - (nearest - centered).abs()
    off = (further > 4 * tolerance).nonzero().flatten().tolist()
    for k in off[:1]:
        mine, right = distinct(float(decoded[k] + wanted_mean), float(nearest[k] + wanted_mean))
        require(
            False,
            f"{call}: {exact[k]:.4g} decodes to {mine}; wanted {right}. {len(off)} of {len(exact)} "
            f"values are wrong.",
        )
    zero = table.abs().argmin().item()
    lost = codes[(each == 0) & (codes != zero)]
    require(
        not len(lost),
        f"{call}: equal values should get code {zero}, the code of 0, but the first of them gets "
        f"{lost[:1].sum()}.",
    )


# ------------------------------------------------------------------ 17.4: decode, multiply, discard

MatmulFunction = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class MatmulCase(NamedTuple):
    out_features: int
    shape: tuple[int, ...]  # of x
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"x of shape {self.shape}, {dtype}, and W ({self.out_features}, {self.shape[-1]})"

    @property
    def weight(self) -> tuple[Tensor, Tensor]:
        """Codes and absmax."""
        return encode(normal(self.out_features, self.shape[-1], seed=self.out_features))

    @property
    def x(self) -> Tensor:
        return normal(*self.shape, seed=1, dtype=self.dtype)


MATMULS = (
    MatmulCase(8, (1, 8)),
    MatmulCase(24, (5, 40)),
    MatmulCase(40, (2, 3, 24)),
    MatmulCase(16, (36,)),
    MatmulCase(24, (5, 40), torch.bfloat16),
    MatmulCase(12, (2, 3, 16), torch.bfloat16),
)
LARGE = MatmulCase(256, (4, 512))


def _check_matmul(answer: MatmulFunction) -> str:
    for case in MATMULS:
        _check_values(answer, case)
    _check_two_layers(answer)
    _check_forgotten(answer, MATMULS[1])
    return _check_bytes(answer)


def _check_values(answer: MatmulFunction, case: MatmulCase) -> None:
    call = f"matmul of {case}"
    codes, absmax = case.weight
    wanted = gradients(lambda x: matmul(x, codes, absmax, case.out_features), x=case.x)
    with unchanged(call, codes=codes, absmax=absmax):
        got = gradients(lambda x: answer(x, codes, absmax, case.out_features), x=case.x)
    require("output 0" in got, f"{call} gave no tensor. Is there a return?")
    within = rounding(case.dtype) if case.dtype == torch.float32 else 2**-6
    same_gradients(call, got, wanted, within=within)


def _check_two_layers(answer: MatmulFunction) -> None:
    """Check two forward passes with different weights before backward, and a second backward."""
    first, second = MATMULS[1], MatmulCase(40, (5, 24))
    call = "matmul of two layers, one after the other"

    def through(multiply: MatmulFunction, x: Tensor) -> Tensor:
        hidden = multiply(x, *first.weight, first.out_features)
        return multiply(hidden, *second.weight, second.out_features)

    wanted = gradients(partial(through, matmul), x=first.x)
    got = gradients(partial(through, answer), x=first.x)
    same_gradients(call, got, wanted, within=rounding(torch.float32))
    x = first.x.requires_grad_()
    out = through(answer, x)
    same_second_backward(call, out, x)


def _check_forgotten(answer: MatmulFunction, case: MatmulCase) -> None:
    """Require that forward saves codes and absmax, but neither the decoded weight nor x."""
    call = f"matmul of {case}"
    codes, absmax = case.weight
    own = {t.untyped_storage().data_ptr() for t in (codes, absmax)}
    x = case.x.requires_grad_() * 1.0  # not a leaf, so only the graph could keep it alive
    inputs = StorageWeakRef(x.untyped_storage())
    saved: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        out = answer(x, codes, absmax, case.out_features)
    del x
    require(
        inputs.expired(),
        f"{call} keeps x for backward. Only the gradient of W needs x, and W is frozen.",
    )
    require(
        not saved,
        f"{call} saves {len(saved)} tensor{'s' * (len(saved) > 1)} for backward besides codes and "
        f"absmax, of shape {', '.join(map(str, saved))}.",
        evidence=(call, "saved", *sorted(saved)),
    )
    del out


def _check_bytes(answer: MatmulFunction) -> str:
    call, (codes, absmax), x = f"matmul of {LARGE}", LARGE.weight, LARGE.x.requires_grad_()
    weight_bytes = 4 * LARGE.out_features * LARGE.shape[-1]
    as_little_memory(
        call,
        lambda: answer(x, codes, absmax, LARGE.out_features),
        lambda: matmul(x, codes, absmax, LARGE.out_features),
        room=weight_bytes + 64,  # another copy of W
    )
    return (
        f"results and gradients are right, in float32 and bfloat16 · no decoded W "
        f"({weight_bytes:,} bytes) is kept for backward"
    )


# ------------------------------------------------------------------ 17.5: fixed memory

Held = Callable[[Sequence[tuple[int, int]], int, int, bool], dict[str, int]]

_MODELS: tuple[tuple[list[tuple[int, int]], int, int, bool], ...] = (
    ([(64, 64)], 0, 1, False),
    ([(64, 64)], 100, 2, False),
    ([(64, 64)], 100, 2, True),
    ([(512, 128)], 0, 4, True),
    ([(96, 40), (40, 96), (7, 5)], 33, 3, True),
    ([(128, 256), (256, 128), (300, 77)], 1000, 16, False),
    ([(4096, 4096)] * 4 + [(11_008, 4096)] * 2 + [(4096, 11_008)], 262_148_096, 16, True),
)


def _check_held(answer: Held) -> str:
    for shapes, others, rank, prepared in _MODELS:
        mine = list(shapes)
        listed = shapes if len(shapes) < 4 else f"the {len(shapes)} matrices of a 7B block"
        case = f"held({listed}, {others:,}, {rank}, {prepared})"
        with unchanged(case, shapes=mine):
            got = answer(mine, others, rank, prepared)
        same_byte_counts(case, got, held(shapes, others, rank, prepared), _units(shapes, others))
    return f"{len(_MODELS)} models match to the byte"


def _units(shapes: Sequence[tuple[int, int]], others: int) -> dict[str, dict[str, int]]:
    each = {"per matrix": len(shapes)} if len(shapes) > 1 else {}
    of_others = {"bytes per element": others} if others else {}
    return {"codes": {}, "others": of_others, "adapters": {}, "training": each}


# ------------------------------------------------------------------ the bill

DAY = Day(
    exercises=(
        checked("17.1", _check_levels, levels, rebuilds=_LIBRARIES),
        checked("17.2", _check_encode, encode, rebuilds=_LIBRARIES),
        checked("17.3", _check_double_encode, double_encode, rebuilds=_LIBRARIES),
        checked("17.4", _check_matmul, matmul, rebuilds=_LIBRARIES),
        checked(
            "17.5", _check_held, held, rebuilds=("memlab.quantize.nf4_bytes", "memlab.planner")
        ),
    ),
    bill=Bill("day 17: no frozen weights for NF4, unchanged", everything_elsewhere),
)
