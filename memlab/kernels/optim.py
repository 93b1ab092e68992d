"""Adam8bit and Lion8bit in Triton: one kernel launch per weight and step.

Saves    the temporaries of memlab.optim, 8 MiB per chunk; only bfloat16 weights with stochastic
         rounding need a seed of 8 bytes. Also time: weight, gradient, codes and scales are read
         once and written once.
Costs    Triton, and a GPU that it supports.
Source   Dettmers et al. 2021, arXiv 2110.02861, fused as in bitsandbytes; Salmon et al. 2011,
         "Parallel random numbers: as easy as 1, 2, 3" (Philox).

Adds to memlab.reference.adam8bit and memlab.reference.lion: a fused kernel, and everything that
memlab.optim adds.

A program processes several blocks of 256 elements, one per warp. It works in registers: decode,
update, compute each block's new scale, encode. A float32 weight moves 16 bytes per step with Adam
(8 weight, 4 gradient, 4 codes), and 14 with Lion.

The slow part is encoding. A binary search over 255 thresholds takes eight dependent table lookups.
The dynamic codebook needs one, because its entries are regular enough to compute a position. Let
|x| = y·10^(i−6) in decade i (y from 0.1 to 1), which has P = 64/2^(6−i) parts if signed and twice
as many if unsigned:

    u = (y − 0.1)/0.9·P          parts from the decade's lower end
    position = P + u             unsigned P − 1 + u; zero is at position 0

Thresholds lie at integer u, at u = 0.2 between two decades (their parts differ in size), at u = P −
0.25 above the last midpoint, and at u = 0.19 (unsigned 0.14) below the first. The code is therefore
⌊position − ½⌋ or the next one, even if u is rounded, because every threshold is at least 0.2 away
from the points where that estimate changes. Comparing with the threshold between the two gives the
exact code. Negative values count down from zero, entry 127.

Pitfalls: the step must use the moments before they are rounded. A positive second moment must not
get code 0 (memlab.optim.moments.keep_nonzero). Padding of a short last block must not affect its
scale. A maximum ignores NaN, because NaN compares as not larger.

The arithmetic rounds like memlab.optim: multiplications that torch fuses into additions use fma,
other operations do not, and roots and quotients are rounded to nearest. Moments, codes, scales and
Lion's weights are therefore bitwise equal to the reference on a CPU with fma. Adam's weights agree
within 1e-6 of a step plus their own rounding, because torch's square root is sometimes off by one
unit in the last place. torch's GPU operators round differently in places; compared with them, the
tests allow a relative error of 1e-6 in scales, and neighboring codes for one element in a thousand,
near thresholds.
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
from memlab.internals.shards import shard_of
from memlab.kernels.arithmetic import cast, divide_by_scales, divide_by_shared, fma
from memlab.kernels.launching import INTERPRETED, block_count, is_dry, launch, require_gpu
from memlab.optim.adamw import adam_settings
from memlab.optim.base import Optimizer
from memlab.optim.moments import BLOCK_SIZE, Chunk, Moment, QuantizedMoment
from memlab.quantize import thresholds

# Blocks per program, one per warp: 8 elements per thread, and each warp finds its block's absmax.
# The interpreter takes as long for a large tile as for a small one.
ROWS = 64 if INTERPRETED else 4

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = tl.constexpr(BLOCK_SIZE)
_INFINITY = tl.constexpr(math.inf)


# ------------------------------------------------------------------ the optimizers


@dataclass(frozen=True)
class FusedStep:
    """Step a chunk in one launch; implements memlab.optim.base.StepKernel.

    Supports weights with 8-bit moments in any dtype but float64. `arguments(step, group)` returns
    the kernel's scalars and its further constants.
    """

    kernel: Any
    arguments: Callable[[int, dict[str, Any]], tuple[tuple[float, ...], dict[str, Any]]]

    def takes(self, weight: Tensor, moments: Sequence[Moment]) -> bool:
        # A subclass of QuantizedMoment may encode differently.
        return weight.dtype in _DTYPES and all(
            type(moment) is QuantizedMoment for moment in moments
        )

    def require_device(self, weight: Tensor) -> None:
        """Raise RuntimeError for weights on a CPU, unless Triton's interpreter is on."""
        if not is_dry(weight):
            require_gpu(weight.device)

    def chunks(self, weight: Tensor) -> Iterable[Chunk]:
        """Return one chunk, because the kernel has no temporaries to limit.

        If the length is not a multiple of 16, the short last block becomes a second chunk: a GPU
        loads eight elements at once only if it can prove that all eight exist.
        """
        count = weight.numel()
        full = count if count % 16 == 0 else count // BLOCK_SIZE * BLOCK_SIZE
        return (Chunk(*span) for span in pairwise(sorted({0, full, count})))

    def step_chunk(
        self,
        optimizer: Optimizer,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[QuantizedMoment],
        chunk: Chunk,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """Step a chunk in place with one launch."""
        is_stochastic = group["rounding"] == "stochastic" and weight.dtype == torch.bfloat16
        seed = _drawn_seed(optimizer.generator, weight.device) if is_stochastic else None
        stored = [tensor for moment in moments for tensor in _moment_tensors(moment, state, chunk)]
        scalars, constants = self.arguments(state["step"], group)
        constants |= {"MAXIMIZE": group["maximize"], "STOCHASTIC": is_stochastic}
        tensors = [weight, gradient.contiguous(), *stored, seed]
        _launch(self.kernel, tensors, scalars, **constants)


def _drawn_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Return int64 (1,), read by the kernel, so that the host does not wait for it."""
    return torch.randint(2**63 - 1, (1,), generator=generator, device=device)


def _adam_arguments(step: int, group: dict[str, Any]) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the scalars of `adam_kernel`."""
    settings = adam_settings(group)
    lr, (beta1, beta2) = settings["lr"], settings["betas"]
    scalars = (
        1 - lr * settings["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        settings["eps"],
        -lr / (1 - beta1**step),
    )
    return scalars, {"FROM_END": 1 - beta1 >= 0.5}


def _lion_arguments(step: int, group: dict[str, Any]) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Return the scalars of `lion_kernel`."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    decay = 1 - lr * group["weight_decay"]
    return (decay, beta1, 1 - beta1, beta2, 1 - beta2, -lr), {}


def _moment_tensors(
    moment: QuantizedMoment, state: dict[str, Any], chunk: Chunk
) -> tuple[Tensor, ...]:
    """Return a chunk's codes and scales, the codebook and its thresholds."""
    codes, scales, codebook = (
        shard_of(state[f"{moment.name}_{part}"]) for part in ("codes", "scales", "code")
    )
    return (
        codes.view(-1)[chunk.as_slice],
        scales[chunk.blocks(BLOCK_SIZE)],
        codebook,
        thresholds_of(codebook),
    )


_cached_thresholds = WeakTensorKeyDictionary()  # 1 KiB per codebook, freed with it


def thresholds_of(codebook: Tensor) -> Tensor:
    """Return float32 (255,): for each code but the last, the largest value that rounds to it."""
    if codebook not in _cached_thresholds:
        _cached_thresholds[codebook] = thresholds(codebook)
    return _cached_thresholds[
        codebook
    ].detach()  # detach is an operator, so that a meter sees the tensor


def _launch(
    kernel: Any, tensors: list[Tensor | None], scalars: tuple[float, ...], **constants: Any
) -> None:
    count = tensors[0].numel()
    grid = (block_count(count, ROWS * BLOCK_SIZE),)
    # The kernels fuse explicitly with `fma`.
    options = {"num_warps": ROWS, "enable_fp_fusion": False}
    launch(kernel, grid, *tensors, count, *scalars, **constants, ROWS=ROWS, **options)


# ------------------------------------------------------------------ the kernels


@triton.jit
def adam_kernel(
    weight_ptr,
    gradient_ptr,
    m_codes_ptr,
    m_scales_ptr,
    m_codebook_ptr,
    m_thresholds_ptr,
    v_codes_ptr,
    v_scales_ptr,
    v_codebook_ptr,
    v_thresholds_ptr,
    seed_ptr,
    count,
    decay,
    m_fraction,
    beta2,
    v_fraction,
    root_correction,
    eps,
    step_size,
    MAXIMIZE: tl.constexpr,
    FROM_END: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """memlab.optim.adamw.adamw_ for ROWS blocks, between decoding and encoding."""
    m = decode(m_codes_ptr, m_scales_ptr, m_codebook_ptr, count, 127, ROWS)
    v = decode(v_codes_ptr, v_scales_ptr, v_codebook_ptr, count, 0, ROWS)
    gradient = load_descent_gradient(gradient_ptr, count, MAXIMIZE, ROWS)
    weight = load_float32(weight_ptr, count, ROWS) * decay
    m = lerp(m, gradient, m_fraction, FROM_END)
    v = fma(v_fraction * gradient, gradient, v * beta2)
    root = bias_corrected_root(v, root_correction) + eps
    weight += tl.div_rn(step_size * m, root)
    store_cast(weight_ptr, weight, seed_ptr, count, STOCHASTIC, ROWS)
    codes, scales = encode(m, m_thresholds_ptr, True)
    store_codes(m_codes_ptr, m_scales_ptr, codes, scales, count, ROWS)
    codes, scales = encode(v, v_thresholds_ptr, False)
    codes = tl.where(v == 0, codes, tl.maximum(codes, 1))
    store_codes(v_codes_ptr, v_scales_ptr, codes, scales, count, ROWS)


@triton.jit
def lion_kernel(
    weight_ptr,
    gradient_ptr,
    codes_ptr,
    scales_ptr,
    codebook_ptr,
    thresholds_ptr,
    seed_ptr,
    count,
    decay,
    beta1,
    average_fraction,
    beta2,
    m_fraction,
    step_size,
    MAXIMIZE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """memlab.optim.lion.lion_ for ROWS blocks, between decoding and encoding."""
    m = decode(codes_ptr, scales_ptr, codebook_ptr, count, 127, ROWS)
    gradient = load_descent_gradient(gradient_ptr, count, MAXIMIZE, ROWS)
    weight = load_float32(weight_ptr, count, ROWS) * decay
    average = fma(gradient, average_fraction, m * beta1)
    sign = tl.where(average > 0, 1.0, tl.where(average < 0, -1.0, 0.0))  # 0 for NaN
    weight = fma(sign, step_size, weight)
    store_cast(weight_ptr, weight, seed_ptr, count, STOCHASTIC, ROWS)
    m = fma(gradient, m_fraction, m * beta2)
    codes, scales = encode(m, thresholds_ptr, True)
    store_codes(codes_ptr, scales_ptr, codes, scales, count, ROWS)


# ------------------------------------------------------------------ arithmetic


@triton.jit
def lerp(start, end, fraction, FROM_END: tl.constexpr):
    """torch.lerp, which starts from the nearer end."""
    if FROM_END:
        return fma(tl.to_tensor(fraction) - 1.0, end - start, end)
    return fma(fraction, end - start, start)


@triton.jit
def bias_corrected_root(v, root_correction):
    """√v/root_correction; v can be infinite even if the gradient is finite."""
    root = tl.sqrt_rn(v)
    return tl.where(root < _INFINITY, divide_by_shared(root, root_correction), root)


# ------------------------------------------------------------------ loads and stores


@triton.jit
def element_indices(count, ROWS: tl.constexpr):
    """Return the program's element indices (ROWS, 256), and which are in bounds."""
    rows, _ = row_indices(count, ROWS)
    indices = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    return indices, indices < count


@triton.jit
def row_indices(count, ROWS: tl.constexpr):
    """Return the program's block indices (ROWS,), and which are in bounds."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows, rows * _BLOCK < count


@triton.jit
def load_float32(x_ptr, count, ROWS: tl.constexpr):
    """Load float32 (ROWS, 256), with zeros out of bounds."""
    indices, in_bounds = element_indices(count, ROWS)
    return tl.load(x_ptr + indices, in_bounds, other=0.0).to(tl.float32)


@triton.jit
def load_descent_gradient(gradient_ptr, count, MAXIMIZE: tl.constexpr, ROWS: tl.constexpr):
    """Load the gradient, negated if the step maximizes."""
    gradient = load_float32(gradient_ptr, count, ROWS)
    return -gradient if MAXIMIZE else gradient


@triton.jit
def store_cast(x_ptr, x, seed_ptr, count, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr):
    """Store rounded to nearest in the target dtype, or stochastically to bfloat16."""
    indices, in_bounds = element_indices(count, ROWS)
    if STOCHASTIC:
        x = stochastic_round(x, seed_ptr, ROWS)
    tl.store(x_ptr + indices, cast(x, x_ptr.dtype.element_ty), in_bounds)


# ------------------------------------------------------------------ codes


@triton.jit
def decode(codes_ptr, scales_ptr, codebook_ptr, count, ZERO: tl.constexpr, ROWS: tl.constexpr):
    """Return float32 (ROWS, 256), with code ZERO, which decodes to 0, out of bounds."""
    indices, in_bounds = element_indices(count, ROWS)
    rows, row_in_bounds = row_indices(count, ROWS)
    codes = tl.load(codes_ptr + indices, in_bounds, other=ZERO)
    scales = tl.load(scales_ptr + rows, row_in_bounds, other=0.0)
    return tl.load(codebook_ptr + codes.to(tl.int32)) * scales[:, None]


@triton.jit
def encode(x, thresholds_ptr, SIGNED: tl.constexpr):
    """Return the nearest codes, int32 (ROWS, 256), and the scales, float32 (ROWS,)."""
    magnitudes = tl.abs(x)
    # tl.max ignores NaN but not infinity.
    absmax = tl.max(tl.where(magnitudes < _INFINITY, magnitudes, _INFINITY), axis=1)
    scales = tl.where(absmax < _INFINITY, absmax, float("nan"))
    return nearest_entry(divide_by_scales(x, scales), thresholds_ptr, SIGNED), scales


@triton.jit
def nearest_entry(x, thresholds_ptr, SIGNED: tl.constexpr):
    """Return the index (int32) of the dynamic codebook's entry nearest to x ≥ −1 (unsigned x ≥ 0).

    x > 1 and NaN give the last entry.
    """
    magnitude = tl.abs(x)
    lower = estimate_position(tl.where(magnitude <= 1, magnitude, 1.0), SIGNED)
    if SIGNED:
        lower = tl.maximum(tl.where(x < 0, 126 - lower, 127 + lower), 0)
    return lower + tl.where(x <= tl.load(thresholds_ptr + lower), 0, 1)


@triton.jit
def estimate_position(magnitude, SIGNED: tl.constexpr):
    """Return ⌊position − ½⌋, at least 0, for a magnitude from 0 to 1; see the module's docstring.

    Three comparisons find the decade: whether it is among the lowest three of seven, then among the
    lowest two of the remaining, then the lowest.
    """
    parts = tl.where(magnitude <= 1e-4, 4.0, 64.0)
    magnitude = tl.where(magnitude <= 1e-4, magnitude * 1e4, magnitude)
    parts = tl.where(magnitude <= 1e-2, parts * 0.25, parts)
    magnitude = tl.where(magnitude <= 1e-2, magnitude * 1e2, magnitude)
    parts = tl.where(magnitude <= 1e-1, parts * 0.5, parts)
    magnitude = tl.where(magnitude <= 1e-1, magnitude * 1e1, magnitude)
    if SIGNED:
        return ((magnitude + 0.8) * (parts / 0.9) - 0.5).to(tl.int32)
    return ((magnitude + 0.8) * (parts / 0.45) - 1.5).to(tl.int32)


@triton.jit
def store_codes(codes_ptr, scales_ptr, codes, scales, count, ROWS: tl.constexpr):
    """Store codes and scales."""
    indices, in_bounds = element_indices(count, ROWS)
    rows, row_in_bounds = row_indices(count, ROWS)
    tl.store(codes_ptr + indices, codes.to(tl.uint8), in_bounds)
    tl.store(scales_ptr + rows, scales, row_in_bounds)


# ------------------------------------------------------------------ stochastic rounding


@triton.jit
def stochastic_round(x, seed_ptr, ROWS: tl.constexpr):
    """Round to float32 values that bfloat16 represents exactly; infinities and NaN stay."""
    bits = x.to(tl.uint32, bitcast=True) + random_halves(seed_ptr, ROWS)
    truncated = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < _INFINITY, truncated, x)


@triton.jit
def random_halves(seed_ptr, ROWS: tl.constexpr):
    """Return uint32 (ROWS, 256) random values below 2¹⁶, eight from each Philox call."""
    DRAWS: tl.constexpr = ROWS * _BLOCK // 8
    draws = tl.program_id(0) * DRAWS + tl.arange(0, DRAWS)
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), draws)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.uint32, bitcast=True)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, _BLOCK))


# ------------------------------------------------------------------ the optimizers with kernels


class Adam8bit(memlab.optim.Adam8bit):
    """memlab.optim.Adam8bit with a kernel: the same arguments and states, nearly the same steps.

    Stochastic rounding draws different random bits.
    """

    kernel = FusedStep(adam_kernel, _adam_arguments)


class Lion8bit(memlab.optim.Lion8bit):
    """memlab.optim.Lion8bit with a kernel: the same arguments, states and steps.

    Stochastic rounding draws different random bits.
    """

    kernel = FusedStep(lion_kernel, _lion_arguments)
