"""Adam8bit and Lion8bit, a step of a weight in one kernel.

Saves    what memlab.optim's makes on the way, 8 MiB a piece: here it is nothing but, for bfloat16
         weights rounded at random, one seed of 8 bytes. And time: a weight, its gradient, its
         codes and its scales are read once and written once.
Costs    Triton, and a GPU that it compiles for.
Source   Dettmers et al. 2021, arXiv 2110.02861, whose bitsandbytes fuses so too; Salmon et al.
         2011, "Parallel random numbers: as easy as 1, 2, 3" (philox).

A program takes some blocks of 256 numbers, a warp each, and does in registers what memlab.optim
does in memory: decode, update, find each block's new scale, encode. A float32 weight moves 16
bytes in a step of Adam (8 weight, 4 gradient, 4 codes), and of Lion 14.

What is left to be slow is the encoding. A binary search for one of 255 thresholds is eight looks
at a table, each waiting for the one before. The dynamic code needs one: it is so regular that a
number's place can be reckoned. With |x| = y·10^(i−6) in decade i (y from 0.1 to 1), which is cut
into P parts, P = 64/2^(6−i) signed, twice as many unsigned,

    u = (y − 0.1)/0.9·P          parts from the decade's lower end
    place = P + u                unsigned P − 1 + u; 0 is number 0

A threshold lies where u is whole; between two decades at u = 0.2 (the parts there differ in size),
above the last middle at u = P − 0.25, below the first of all at u = 0.19, unsigned 0.14. So the
number's code is ⌊place − ½⌋ or the one above, however u was rounded: no threshold is nearer than
0.2 to where that guess changes. One look at the threshold between the two settles it, to the last
bit. Negative numbers are counted down from zero, number 127.

Easily done wrong: the step must come from the moments before they are rounded; a positive second
moment must not get code 0 (memlab.optim.moments.kept_positive); the numbers that a last, short
block lacks must not count in its scale; and NaN is not larger than anything, so a maximum passes
it over.

The arithmetic is memlab.optim's, rounding for rounding: products that torch adds on are fused with
the sum (fma), other operations are not, and roots and quotients are rounded to the nearest. So
moments, codes and scales are those of the reference on a CPU that has fma, to the bit, and so are
Lion's weights. Adam's are but for the last place of a step: torch's own root is at times a unit of
the last place off: weights agree within 1e-6 of a step and a rounding of their own. torch's
operators on a GPU round otherwise here and there. Against them the tests allow scales 1e-6 of their
size, and one code in a thousand to be a neighbour, where a number is that close to a threshold.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import memlab.optim
from memlab.kernels.arithmetic import fractions, fused, quotient, rounded
from memlab.kernels.launching import INTERPRETED, blocks, has_no_values, launch, require_gpu
from memlab.optim.adamw import adam_settings
from memlab.optim.base import Optimizer
from memlab.optim.moments import BLOCK, Dynamic, Moment, Piece
from memlab.quantize import middles_between

# Blocks a program, a warp each: 8 numbers a thread, and a block's largest is found within its warp.
# The interpreter takes as long for a large tile as for a small one.
ROWS = 64 if INTERPRETED else 4

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = tl.constexpr(BLOCK)
_INFINITY = tl.constexpr(math.inf)


# ------------------------------------------------------------------ the optimizers


@dataclass(frozen=True)
class FusedStep:
    """A step of a piece in one launch: see memlab.optim.base.StepKernel.

    It takes weights whose moments are in 8 bits and that are not float64. `arguments(step, group)`
    returns the kernel's numbers and its further constants.
    """

    kernel: Any
    arguments: Callable[[int, dict[str, Any]], tuple[tuple[float, ...], dict[str, Any]]]

    def takes(self, weight: Tensor, moments: Sequence[Moment]) -> bool:
        # Not for a subclass of Dynamic: it may encode otherwise.
        return weight.dtype in _DTYPES and all(type(moment) is Dynamic for moment in moments)

    def require_device(self, weight: Tensor) -> None:
        """Raise RuntimeError for weights on a CPU, unless Triton's interpreter is on."""
        if not has_no_values(weight):
            require_gpu(weight.device)

    def pieces(self, weight: Tensor) -> Iterable[Piece]:
        """One piece: the kernel makes no temporaries that pieces would keep small.

        A length that is no multiple of 16 leaves its last, short block to a piece of its own: a GPU
        reads eight elements at once only where it can tell that all eight are there.
        """
        count = weight.numel()
        whole = count if count % 16 == 0 else count // BLOCK * BLOCK
        return (Piece(*span) for span in pairwise(sorted({0, whole, count})))

    def step_piece(
        self,
        optimizer: Optimizer,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Dynamic],
        piece: Piece,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """In place, by one launch."""
        is_random = group["rounding"] == "stochastic" and weight.dtype == torch.bfloat16
        seed = _drawn_seed(optimizer.generator, weight.device) if is_random else None
        kept = [tensor for moment in moments for tensor in _kept(moment, state, piece)]
        numbers, constants = self.arguments(state["step"], group)
        constants |= {"MAXIMIZE": group["maximize"], "RANDOM": is_random}
        tensors = [weight, gradient.contiguous(), *kept, seed]
        _launch(self.kernel, tensors, numbers, **constants)


def _drawn_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """int64 (1,), read by the kernel: the host need not wait for it."""
    return torch.randint(2**63 - 1, (1,), generator=generator, device=device)


def _adam_arguments(step: int, group: dict[str, Any]) -> tuple[tuple[float, ...], dict[str, Any]]:
    """See `adam_kernel`."""
    settings = adam_settings(group)
    lr, (beta1, beta2) = settings["lr"], settings["betas"]
    numbers = (
        1 - lr * settings["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        settings["eps"],
        -lr / (1 - beta1**step),
    )
    return numbers, {"FROM_END": 1 - beta1 >= 0.5}


def _lion_arguments(step: int, group: dict[str, Any]) -> tuple[tuple[float, ...], dict[str, Any]]:
    """See `lion_kernel`."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    decay = 1 - lr * group["weight_decay"]
    return (decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr), {}


def _kept(moment: Dynamic, state: dict[str, Any], piece: Piece) -> tuple[Tensor, ...]:
    """Codes and scales of a piece, and the tables: the code and its thresholds."""
    codes, scales, code = (state[f"{moment.name}_{part}"] for part in ("codes", "scales", "code"))
    return codes[piece.span], scales[piece.blocks(BLOCK)], code, thresholds_of(code)


_thresholds = WeakTensorKeyDictionary()  # 1 KiB a code, as long as the code itself lives


def thresholds_of(code: Tensor) -> Tensor:
    """float32 (255,): the largest number whose nearest of `code` is c, for each c but the last."""
    if code not in _thresholds:
        _thresholds[code] = middles_between(code)
    return _thresholds[code].detach()  # an operator: a meter sees what goes through one


def _launch(
    kernel: Any, tensors: list[Tensor | None], numbers: tuple[float, ...], **constants: Any
) -> None:
    count = tensors[0].numel()
    grid = (blocks(count, ROWS * BLOCK),)
    # Whether to fuse is said in the kernel: see `fused`.
    options = {"num_warps": ROWS, "enable_fp_fusion": False}
    launch(kernel, grid, *tensors, count, *numbers, **constants, ROWS=ROWS, **options)


# ------------------------------------------------------------------ the kernels


@triton.jit
def adam_kernel(
    weight_ptr,
    gradient_ptr,
    m_codes_ptr,
    m_scales_ptr,
    m_code_ptr,
    m_thresholds_ptr,
    v_codes_ptr,
    v_scales_ptr,
    v_code_ptr,
    v_thresholds_ptr,
    seed_ptr,
    count,
    decay,
    m_share,
    beta2,
    v_share,
    root_bias,
    eps,
    step_size,
    MAXIMIZE: tl.constexpr,
    FROM_END: tl.constexpr,
    RANDOM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """memlab.optim.adamw.adamw_ of ROWS blocks, between decoding and encoding."""
    m = decoded(m_codes_ptr, m_scales_ptr, m_code_ptr, count, 127, ROWS)
    v = decoded(v_codes_ptr, v_scales_ptr, v_code_ptr, count, 0, ROWS)
    gradient = downhill(gradient_ptr, count, MAXIMIZE, ROWS)
    weight = read(weight_ptr, count, ROWS) * decay
    m = between(m, gradient, m_share, FROM_END)
    v = fused(v_share * gradient, gradient, v * beta2)
    root = unbiased_root(v, root_bias) + eps
    weight += tl.div_rn(step_size * m, root)
    write(weight_ptr, weight, seed_ptr, count, RANDOM, ROWS)
    codes, scales = encoded(m, m_thresholds_ptr, True)
    keep(m_codes_ptr, m_scales_ptr, codes, scales, count, ROWS)
    codes, scales = encoded(v, v_thresholds_ptr, False)
    codes = tl.where(v == 0, codes, tl.maximum(codes, 1))
    keep(v_codes_ptr, v_scales_ptr, codes, scales, count, ROWS)


@triton.jit
def lion_kernel(
    weight_ptr,
    gradient_ptr,
    codes_ptr,
    scales_ptr,
    code_ptr,
    thresholds_ptr,
    seed_ptr,
    count,
    decay,
    beta1,
    mix_share,
    beta2,
    m_share,
    step_size,
    MAXIMIZE: tl.constexpr,
    RANDOM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """memlab.optim.lion.lion_ of ROWS blocks, between decoding and encoding."""
    m = decoded(codes_ptr, scales_ptr, code_ptr, count, 127, ROWS)
    gradient = downhill(gradient_ptr, count, MAXIMIZE, ROWS)
    weight = read(weight_ptr, count, ROWS) * decay
    mix = fused(gradient, mix_share, m * beta1)
    sign = tl.where(mix > 0, 1.0, tl.where(mix < 0, -1.0, 0.0))  # of NaN, 0
    weight = fused(sign, step_size, weight)
    write(weight_ptr, weight, seed_ptr, count, RANDOM, ROWS)
    m = fused(gradient, m_share, m * beta2)
    codes, scales = encoded(m, thresholds_ptr, True)
    keep(codes_ptr, scales_ptr, codes, scales, count, ROWS)


# ------------------------------------------------------------------ arithmetic


@triton.jit
def between(start, end, share, FROM_END: tl.constexpr):
    """torch.lerp, which begins at the end that is nearer."""
    if FROM_END:
        return fused(tl.to_tensor(share) - 1.0, end - start, end)
    return fused(share, end - start, start)


@triton.jit
def unbiased_root(v, root_bias):
    """√v/root_bias, infinity included: a gradient may be finite and its square not."""
    root = tl.sqrt_rn(v)
    return tl.where(root < _INFINITY, quotient(root, root_bias), root)


# ------------------------------------------------------------------ a program's numbers


@triton.jit
def places(count, ROWS: tl.constexpr):
    """Where its numbers are, and which of them there are: (ROWS, 256)."""
    rows, _ = row_places(count, ROWS)
    at = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    return at, at < count


@triton.jit
def row_places(count, ROWS: tl.constexpr):
    """Where its blocks' scales are, and which of them there are: (ROWS,)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows, rows * _BLOCK < count


@triton.jit
def read(numbers_ptr, count, ROWS: tl.constexpr):
    """float32 (ROWS, 256); zeros where there is none."""
    at, there = places(count, ROWS)
    return tl.load(numbers_ptr + at, there, other=0.0).to(tl.float32)


@triton.jit
def downhill(gradient_ptr, count, MAXIMIZE: tl.constexpr, ROWS: tl.constexpr):
    """The gradient of what is to be small."""
    gradient = read(gradient_ptr, count, ROWS)
    return -gradient if MAXIMIZE else gradient


@triton.jit
def write(numbers_ptr, numbers, seed_ptr, count, RANDOM: tl.constexpr, ROWS: tl.constexpr):
    """Rounded to the nearest of the dtype, or to bfloat16 at random."""
    at, there = places(count, ROWS)
    if RANDOM:
        numbers = rounded_at_random(numbers, seed_ptr, ROWS)
    tl.store(numbers_ptr + at, rounded(numbers, numbers_ptr.dtype.element_ty), there)


# ------------------------------------------------------------------ codes


@triton.jit
def decoded(codes_ptr, scales_ptr, code_ptr, count, ZERO: tl.constexpr, ROWS: tl.constexpr):
    """float32 (ROWS, 256); where there is none, the number of code ZERO: 0."""
    at, there = places(count, ROWS)
    rows, row_there = row_places(count, ROWS)
    codes = tl.load(codes_ptr + at, there, other=ZERO)
    scales = tl.load(scales_ptr + rows, row_there, other=0.0)
    return tl.load(code_ptr + codes.to(tl.int32)) * scales[:, None]


@triton.jit
def encoded(numbers, thresholds_ptr, SIGNED: tl.constexpr):
    """The nearest codes, int32 (ROWS, 256), and the scales, float32 (ROWS,)."""
    sizes = tl.abs(numbers)
    # A maximum passes NaN over, but not infinity.
    largest = tl.max(tl.where(sizes < _INFINITY, sizes, _INFINITY), axis=1)
    scales = tl.where(largest < _INFINITY, largest, float("nan"))
    return nearest(fractions(numbers, scales), thresholds_ptr, SIGNED), scales


@triton.jit
def nearest(x, thresholds_ptr, SIGNED: tl.constexpr):
    """The index (int32) in the dynamic code of the number nearest to x: at least −1, unsigned 0.

    Of what is above 1, and of NaN, the last.
    """
    size = tl.abs(x)
    below = guess(tl.where(size <= 1, size, 1.0), SIGNED)
    if SIGNED:
        below = tl.maximum(tl.where(x < 0, 126 - below, 127 + below), 0)
    return below + tl.where(x <= tl.load(thresholds_ptr + below), 0, 1)


@triton.jit
def guess(size, SIGNED: tl.constexpr):
    """⌊place − ½⌋, at least 0, of a size from 0 to 1: the module says what a place is.

    Three halvings find the decade: is it among the lowest three of seven, of what is left among
    the lowest two, is it the lowest.
    """
    parts = tl.where(size <= 1e-4, 4.0, 64.0)
    size = tl.where(size <= 1e-4, size * 1e4, size)
    parts = tl.where(size <= 1e-2, parts * 0.25, parts)
    size = tl.where(size <= 1e-2, size * 1e2, size)
    parts = tl.where(size <= 1e-1, parts * 0.5, parts)
    size = tl.where(size <= 1e-1, size * 1e1, size)
    if SIGNED:
        return ((size + 0.8) * (parts / 0.9) - 0.5).to(tl.int32)
    return ((size + 0.8) * (parts / 0.45) - 1.5).to(tl.int32)


@triton.jit
def keep(codes_ptr, scales_ptr, codes, scales, count, ROWS: tl.constexpr):
    """Write codes and scales."""
    at, there = places(count, ROWS)
    rows, row_there = row_places(count, ROWS)
    tl.store(codes_ptr + at, codes.to(tl.uint8), there)
    tl.store(scales_ptr + rows, scales, row_there)


# ------------------------------------------------------------------ rounding at random


@triton.jit
def rounded_at_random(x, seed_ptr, ROWS: tl.constexpr):
    """float32 (ROWS, 256) that are bfloat16s: see memlab.rounding. Infinities and NaN pass."""
    carried = x.to(tl.uint32, bitcast=True) + random_halves(seed_ptr, ROWS)
    cut = (carried & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < _INFINITY, cut, x)


@triton.jit
def random_halves(seed_ptr, ROWS: tl.constexpr):
    """uint32 (ROWS, 256) below 2¹⁶: a draw of philox is 128 bits, for eight neighbours."""
    eighths: tl.constexpr = ROWS * _BLOCK // 8
    draws = tl.program_id(0) * eighths + tl.arange(0, eighths)
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), draws)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.uint32, bitcast=True)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, _BLOCK))


# ------------------------------------------------------------------ with the kernels


class Adam8bit(memlab.optim.Adam8bit):
    """memlab.optim.Adam8bit: its arguments, its states, and its steps but for the last place.

    Rounded stochastically, weights are other draws from the same distribution.
    """

    kernel = FusedStep(adam_kernel, _adam_arguments)


class Lion8bit(memlab.optim.Lion8bit):
    """memlab.optim.Lion8bit: its arguments, its states, its steps.

    Rounded stochastically, weights are other draws from the same distribution.
    """

    kernel = FusedStep(lion_kernel, _lion_arguments)
