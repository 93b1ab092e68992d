"""Activation compression in a kernel: one pass over the numbers to encode, one to decode.

Saves    bytes moved: of float32 at 8 bits 5 a number to encode and 5 to decode, where
         memlab.quantize, operator by operator, reads and writes 43 and 21. And what those need
         meanwhile: a kernel needs nothing but what is kept.
Costs    blocks of a power of two from 32 to 4096 numbers, affine alone; stochastic rounding draws
         other random numbers than memlab.quantize, of 16 bits (15 for codes of 8): the odds are
         the fraction's to 2⁻¹⁷.
Source   Chen et al. 2021 (ActNN), arXiv 2104.14129, whose coding was one CUDA kernel too.

What is kept is what `quantize_blockwise` keeps without a code, to the bit:

    offset  = bfloat16, rounded down,  of  the block's smallest x
    scale   = bfloat16, rounded up,    of  (largest − offset) / (2ᵇ − 1);   not finite: NaN
    c       = (x − offset) / scale, to the nearest, ties to even
    x       ≈ offset + c·scale

A float32's upper half is a bfloat16, that towards zero. So to round down is to cut the lower half
off, and to add one to what is left where x is negative and something was cut; up, where x is
positive. And c is in the lowest bits of (x − offset) / scale + 1.5·2²³: a float32 of that size has
no bits for a fraction, and the addition rounds as c has to be. No c is above 2ᵇ − 1, as no scale
falls short by more than 2⁻¹⁷ of itself, the subnormal ones included.

What is easily done wrong:

    a division by multiplying    with 1/scale: one more rounding, and c is off by one near a tie.
                                 Triton's `/` is not exactly rounded either: hence `fractions`
    the minimum of NaN           a GPU's minimum takes the other number: NaN is looked for apart
    NaN, rounded by its bits     one added to all ones is zero: a scale is tested before
    the end                      a mask on every load would be a load of 4 bytes at a time where n
                                 is odd: the last program alone has one

On a GPU codes, scales and offsets are as exact as here: each operation is one of IEEE's, and there
is no product to be contracted with a sum. (memlab.quantize, on CUDA, is not: torch divides by 255
as by a product, and a scale can be a bfloat16 lower or higher.) Decoded, a float32 may differ in
its last bit, where offset + c·scale is rounded once and not twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

from memlab import compression
from memlab.compression import CodingKernel, Report
from memlab.internals.saved_tensors import Facts
from memlab.kernels.arithmetic import fractions, rounded
from memlab.kernels.launching import blocks, launch
from memlab.quantize import Mode, Quantized, quantize_blockwise

_TILE = 4096  # numbers of a program: 32 a thread
# Numbers side by side of one thread. Of 8, a warp has a block of 256, whose range it finds without
# another warp; its codes, at 2 bits, are 64 bytes in a row.
_RUN = tl.constexpr(8)
_LARGEST_BFLOAT16 = tl.constexpr(torch.finfo(torch.bfloat16).max)
_NO_FRACTION = tl.constexpr(1.5 * 2**23)


# ------------------------------------------------------------------ encoding


@torch.no_grad()
def quantize_affine(
    x: Tensor,
    *,
    block: int = 256,
    bits: int = 8,
    mode: Mode = "nearest",
    generator: torch.Generator | None = None,
) -> Quantized:
    """What `memlab.quantize.quantize_blockwise` makes of `x` without a code.

    Arguments and errors are the same; ValueError for a block that is no power of two from 32 to
    4096, too. Stochastic, a seed is drawn with `generator`, on the device of `x`.
    """
    quantize_blockwise(x.new_empty(0), block=block, bits=bits, mode=mode)  # or raise
    _check_block(block)
    kept = _empty(x, block, bits)
    seed = None
    if mode == "stochastic":
        seed = torch.randint(2**63 - 1, (1,), generator=generator, device=x.device)
    launch(
        _encode,
        (blocks(x.numel(), _TILE),),
        x.reshape(-1),
        kept.codes,
        kept.scales,
        kept.offsets,
        seed,
        x.numel(),
        BLOCK=block,
        BLOCKS=_TILE // block,
        BITS=bits,
        num_warps=4,
    )
    return kept


def _check_block(block: int) -> None:
    if block & (block - 1) or not 32 <= block <= _TILE:
        raise ValueError(
            f"got blocks of {block}; give a power of two from 32 to {_TILE}, or use "
            f"memlab.compression and memlab.quantize, which take any"
        )


def _empty(x: Tensor, block: int, bits: int) -> Quantized:
    block_count = blocks(x.numel(), block)
    codes = torch.empty(blocks(x.numel() * bits, 8), dtype=torch.uint8, device=x.device)
    scales, offsets = (
        torch.empty(block_count, dtype=torch.bfloat16, device=x.device) for _ in range(2)
    )
    return Quantized(codes, scales, offsets, None, x.shape, x.dtype, bits, block)


@triton.jit
def _encode(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    seed_ptr,
    count,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
):
    """BLOCKS whole blocks; the last program's may end before."""
    LEVELS: tl.constexpr = 2**BITS - 1
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first = first_block * BLOCK
    left = tl.minimum(count - first, BLOCKS * BLOCK).to(tl.int32)
    x = _loaded(x_ptr + first, left, BLOCK, BLOCKS)  # (BLOCKS, BLOCK)
    scales, offsets = _scales_and_offsets(x, LEVELS)  # (BLOCKS,)
    steps = fractions(x - offsets[:, None], scales)  # at most LEVELS·(1 + 2⁻¹⁷)
    if seed_ptr is None:
        codes = (steps + _NO_FRACTION).to(tl.int32, bitcast=True)
    else:
        draws = _draws(tl.load(seed_ptr), BLOCK, BLOCKS)
        codes = _at_random(tl.minimum(steps, LEVELS), draws, min(16, 23 - BITS))
    codes &= tl.where(scales == scales, LEVELS, 0)[:, None]  # 0 of NaN
    _store_codes(codes_ptr + first * BITS // 8, codes, left, BITS)
    each_block = tl.arange(0, BLOCKS)
    is_block = each_block * BLOCK < left
    tl.store(scales_ptr + first_block + each_block, _upper_half(scales), is_block)
    tl.store(offsets_ptr + first_block + each_block, _upper_half(offsets), is_block)


@triton.jit
def _in_runs(LENGTH: tl.constexpr, RUN: tl.constexpr):
    """0 … LENGTH − 1, (LENGTH / RUN, RUN): as the last axis is so short, a thread has all of it."""
    return tl.arange(0, LENGTH // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]


@triton.jit
def _loaded(x_ptr, left, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """float32 (BLOCKS, BLOCK); beyond the end the last number again, which stretches no range."""
    places = _in_runs(BLOCKS * BLOCK, _RUN)
    if left == BLOCKS * BLOCK:
        x = tl.load(x_ptr + places)
    else:
        x = tl.load(x_ptr + places, places < left, other=tl.load(x_ptr + left - 1))
    return x.to(tl.float32).reshape(BLOCKS, BLOCK)


@triton.jit
def _scales_and_offsets(x, LEVELS: tl.constexpr):
    """Both float32, of which bfloat16 keeps every bit."""
    has_nan = tl.max((x != x).to(tl.int32), axis=1) == 1
    low = tl.min(x, axis=1)
    offsets = tl.where(has_nan, float("nan"), _bfloat16_down(low))
    steps = tl.div_rn(tl.max(x, axis=1) - offsets, tl.full(low.shape, LEVELS, tl.float32))
    scales = tl.where(steps <= _LARGEST_BFLOAT16, _bfloat16_up(steps), float("nan"))
    return scales, offsets


@triton.jit
def _bfloat16_down(x):
    bits = x.to(tl.uint32, bitcast=True)
    is_past = (bits >> 31 == 1) & (bits & 0xFFFF != 0)
    return ((bits & 0xFFFF0000) + tl.where(is_past, 0x10000, 0)).to(tl.float32, bitcast=True)


@triton.jit
def _bfloat16_up(x):
    bits = x.to(tl.uint32, bitcast=True)
    is_past = (bits >> 31 == 0) & (bits & 0xFFFF != 0)
    return ((bits & 0xFFFF0000) + tl.where(is_past, 0x10000, 0)).to(tl.float32, bitcast=True)


@triton.jit
def _upper_half(x):
    """float32 of which bfloat16 keeps every bit; by them, as the interpreter makes 0 of numbers
    below 2⁻¹²⁶."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _as_float32(x):
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _at_random(steps, draws, PLACES: tl.constexpr):
    """In the lowest bits the whole number below or, as often as the fraction says, above: a float32
    of this size has so many binary places, and draws that are added to them carry one."""
    fixed = (steps + 2.0 ** (23 - PLACES)).to(tl.int32, bitcast=True)
    return (fixed + (draws >> (16 - PLACES))) >> PLACES


@triton.jit
def _draws(seed, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """int32 (BLOCKS, BLOCK) from 0 to 2¹⁶ − 1: eight of each round of Philox, which counts by two
    words, the place here and the program, so that no tensor is too long."""
    place = _in_runs(BLOCKS * BLOCK // 8, BLOCK // 8)
    a, b, c, d = tl.philox(seed, place, tl.program_id(0), 0, 0)
    drawn = tl.join(tl.join(a, b), tl.join(c, d))
    halves = tl.join(drawn & 0xFFFF, drawn >> 16)
    return halves.to(tl.int32).reshape(BLOCKS, BLOCK)


@triton.jit
def _store_codes(codes_ptr, codes, left, BITS: tl.constexpr):
    """Packed: the first of a byte's numbers in its lowest bits; zeros in what the last spares."""
    PER_BYTE: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = codes.numel // PER_BYTE
    codes = codes.reshape(LENGTH // (_RUN // PER_BYTE), _RUN)
    is_code = _in_runs(LENGTH * PER_BYTE, _RUN) < left
    if PER_BYTE > 1:
        shape: tl.constexpr = (codes.shape[0], _RUN // PER_BYTE, PER_BYTE)
        shifts = (tl.arange(0, PER_BYTE) * BITS)[None, None, :]
        codes = tl.sum(tl.where(is_code, codes, 0).reshape(shape) << shifts, axis=2)
    places = _in_runs(LENGTH, _RUN // PER_BYTE)
    if left == LENGTH * PER_BYTE:
        tl.store(codes_ptr + places, codes.to(tl.uint8))
    else:
        tl.store(codes_ptr + places, codes.to(tl.uint8), places * PER_BYTE < left)


# ------------------------------------------------------------------ decoding


def dequantize_affine(quantized: Quantized) -> Tensor:
    """The numbers again, in their first shape and dtype, each as near as its code is.

    Those of `quantize_blockwise`, too. ValueError for numbers that were quantized by a code, and
    for blocks as there.
    """
    q = quantized
    _check_block(q.block)
    if q.offsets is None:
        raise ValueError(
            "got numbers quantized by a code, which have no offsets; decode them with "
            "memlab.quantize.dequantize_blockwise"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.codes.device)
    launch(
        _decode,
        (blocks(out.numel(), _TILE),),
        out.view(-1),
        q.codes,
        q.scales,
        q.offsets,
        out.numel(),
        BLOCK=q.block,
        BLOCKS=_TILE // q.block,
        BITS=q.bits,
        num_warps=4,
    )
    return out


@triton.jit
def _decode(
    out_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    count,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
):
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first = first_block * BLOCK
    left = tl.minimum(count - first, BLOCKS * BLOCK).to(tl.int32)
    RUN: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth  # a store of 16 bytes
    codes = _load_codes(codes_ptr + first * BITS // 8, left, BLOCKS * BLOCK, RUN, BITS)
    codes = codes.to(tl.float32).reshape(BLOCKS, BLOCK)
    each_block = tl.arange(0, BLOCKS)
    is_block = each_block * BLOCK < left
    scales = tl.load(scales_ptr + first_block + each_block, is_block, 0)
    offsets = tl.load(offsets_ptr + first_block + each_block, is_block, 0)
    x = _as_float32(offsets)[:, None] + codes * _as_float32(scales)[:, None]
    x = rounded(x, out_ptr.dtype.element_ty)
    x = x.reshape(BLOCKS * BLOCK // RUN, RUN)
    places = _in_runs(BLOCKS * BLOCK, RUN)
    if left == BLOCKS * BLOCK:
        tl.store(out_ptr + first + places, x)
    else:
        tl.store(out_ptr + first + places, x, places < left)


@triton.jit
def _load_codes(codes_ptr, left, LENGTH: tl.constexpr, RUN: tl.constexpr, BITS: tl.constexpr):
    """(LENGTH / RUN, RUN) of codes"""
    PER_BYTE: tl.constexpr = 8 // BITS
    places = _in_runs(LENGTH // PER_BYTE, RUN // PER_BYTE)
    if left == LENGTH:
        codes = tl.load(codes_ptr + places)
    else:
        codes = tl.load(codes_ptr + places, places * PER_BYTE < left, other=0)
    if PER_BYTE > 1:
        shifts = (tl.arange(0, PER_BYTE) * BITS)[None, None, :]
        codes = ((codes[:, :, None] >> shifts) & (2**BITS - 1)).reshape(LENGTH // RUN, RUN)
    return codes


# ------------------------------------------------------------------ the context

KERNEL = CodingKernel(quantize_affine, dequantize_affine)


def compressed_activations(
    bits: int = 8,
    group: int = 256,
    *,
    mode: Mode | None = None,
    min_numel: int = 1024,
    generator: torch.Generator | None = None,
    leave_alone: Callable[[Facts], bool] | None = None,
) -> AbstractContextManager[Report]:
    """`memlab.compression.compressed_activations` with these kernels: arguments, report and errors
    are the same; ValueError for a group that is no power of two from 32 to 4096, too."""
    return compression.compressed_activations(
        bits,
        group,
        mode=mode,
        min_numel=min_numel,
        generator=generator,
        leave_alone=leave_alone,
        kernel=KERNEL,
    )
