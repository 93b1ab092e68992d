"""Activation compression in Triton: one pass over the elements to encode, one to decode.

Saves    memory traffic: at 8 bits 5 bytes per float32 element to encode and 5 to decode, where
         memlab.quantize moves 43 and 21 in separate operators. Also their temporaries.
Costs    blocks must be a power of two from 32 to 4096 elements, affine only. Stochastic rounding
         draws different random bits than memlab.quantize, 16 per element (15 for 8-bit codes), so
         probabilities are exact to 2⁻¹⁷.
Source   Chen et al. 2021 (ActNN), arXiv 2104.14129, which also used one CUDA kernel.

Adds to memlab.reference.activation_compression: one kernel each for encoding and decoding, 4 and 2
bits, and stochastic rounding.

Encoding is bitwise equal to `quantize_blockwise` without a codebook:

    offset  = min of the block, rounded down to bfloat16
    scale   = (max − offset) / (2ᵇ − 1), rounded up to bfloat16; NaN if not finite
    c       = (x − offset) / scale, rounded to nearest, ties to even
    x       ≈ offset + c·scale

The upper half of a float32 is the bfloat16 next to it towards zero. Rounding down clears the lower
half, and adds one to the upper half if x is negative and the lower half was not zero. Rounding up
does the same for positive x. The lowest bits of (x − offset) / scale + 1.5·2²³ are c: a float32
this large has no bits for a fraction, so the addition rounds. c never exceeds 2ᵇ − 1, because a
scale is at most 2⁻¹⁷ of itself too small, even if subnormal.

Pitfalls:

    multiplying by 1/scale       rounds once more, and c is off by one near ties. Triton's `/` is
                                 not exactly rounded either, hence `divide_by_scales`
    the minimum of NaN           a GPU's minimum ignores NaN, so NaN is detected separately
    rounding NaN by its bits     adding one to all ones gives zero, so scales are tested first
    the last block               a mask on every load would split it into loads of 4 bytes for odd
                                 n, so only the last program uses one

On a GPU codes, scales and offsets are equally exact: each operation is an IEEE operation, and no
multiplication is contracted with an addition. (memlab.quantize on CUDA is not: torch divides by 255
through a reciprocal, so a scale can be one bfloat16 off.) A decoded float32 may differ in its last
bit, where offset + c·scale is rounded once instead of twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

from memlab import compression
from memlab.compression import CompressionReport, QuantizationKernel
from memlab.internals.saved_tensors import TensorInfo
from memlab.kernels.arithmetic import cast, divide_by_scales
from memlab.kernels.launching import block_count, launch
from memlab.quantize import Mode, Quantized, quantize_blockwise

_TILE = 4096  # elements per program, 32 per thread
# Consecutive elements per thread. With 8, one warp holds a block of 256 and finds its range alone,
# and stores 2-bit codes as 64 consecutive bytes.
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
    """Encode `x` like `memlab.quantize.quantize_blockwise` without a codebook.

    Arguments and errors are the same, but blocks must be a power of two from 32 to 4096. Stochastic
    rounding draws a seed from `generator`, on the device of `x`.
    """
    quantize_blockwise(x.new_empty(0), block=block, bits=bits, mode=mode)  # validates
    _check_block(block)
    out = _empty(x, block, bits)
    seed = None
    if mode == "stochastic":
        seed = torch.randint(2**63 - 1, (1,), generator=generator, device=x.device)
    launch(
        _encode,
        (block_count(x.numel(), _TILE),),
        x.reshape(-1),
        out.codes,
        out.scales,
        out.offsets,
        seed,
        x.numel(),
        BLOCK=block,
        BLOCKS=_TILE // block,
        BITS=bits,
        num_warps=4,
    )
    return out


def _check_block(block: int) -> None:
    if block & (block - 1) or not 32 <= block <= _TILE:
        raise ValueError(
            f"got blocks of {block}; give a power of two from 32 to {_TILE}, or use "
            f"memlab.compression and memlab.quantize, which support any block"
        )


def _empty(x: Tensor, block: int, bits: int) -> Quantized:
    count = block_count(x.numel(), block)
    codes = torch.empty(block_count(x.numel() * bits, 8), dtype=torch.uint8, device=x.device)
    scales, offsets = (torch.empty(count, dtype=torch.bfloat16, device=x.device) for _ in range(2))
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
    """Encode BLOCKS whole blocks; the last program may have fewer."""
    LEVELS: tl.constexpr = 2**BITS - 1
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    start = first_block * BLOCK
    remaining = tl.minimum(count - start, BLOCKS * BLOCK).to(tl.int32)
    x = _load_blocks(x_ptr + start, remaining, BLOCK, BLOCKS)  # (BLOCKS, BLOCK)
    scales, offsets = _scales_and_offsets(x, LEVELS)  # (BLOCKS,)
    steps = divide_by_scales(x - offsets[:, None], scales)  # ≤ LEVELS·(1 + 2⁻¹⁷)
    if seed_ptr is None:
        codes = (steps + _NO_FRACTION).to(tl.int32, bitcast=True)
    else:
        random_bits = _random_halves(tl.load(seed_ptr), BLOCK, BLOCKS)
        codes = _stochastic_codes(tl.minimum(steps, LEVELS), random_bits, min(16, 23 - BITS))
    codes &= tl.where(scales == scales, LEVELS, 0)[:, None]  # 0 for NaN
    _store_codes(codes_ptr + start * BITS // 8, codes, remaining, BITS)
    block_indices = tl.arange(0, BLOCKS)
    is_block = block_indices * BLOCK < remaining
    tl.store(scales_ptr + first_block + block_indices, _to_bfloat16_exact(scales), is_block)
    tl.store(offsets_ptr + first_block + block_indices, _to_bfloat16_exact(offsets), is_block)


@triton.jit
def _tile_indices(LENGTH: tl.constexpr, RUN: tl.constexpr):
    """Return 0 … LENGTH − 1 as (LENGTH / RUN, RUN), so that a thread holds a whole short row."""
    return tl.arange(0, LENGTH // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]


@triton.jit
def _load_blocks(x_ptr, remaining, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Load float32 (BLOCKS, BLOCK), padded with the last element, which widens no range."""
    indices = _tile_indices(BLOCKS * BLOCK, _RUN)
    if remaining == BLOCKS * BLOCK:
        x = tl.load(x_ptr + indices)
    else:
        x = tl.load(x_ptr + indices, indices < remaining, other=tl.load(x_ptr + remaining - 1))
    return x.to(tl.float32).reshape(BLOCKS, BLOCK)


@triton.jit
def _scales_and_offsets(x, LEVELS: tl.constexpr):
    """Return both as float32 that bfloat16 represents exactly."""
    has_nan = tl.max((x != x).to(tl.int32), axis=1) == 1
    low = tl.min(x, axis=1)
    offsets = tl.where(has_nan, float("nan"), _bfloat16_down(low))
    steps = tl.div_rn(tl.max(x, axis=1) - offsets, tl.full(low.shape, LEVELS, tl.float32))
    scales = tl.where(steps <= _LARGEST_BFLOAT16, _bfloat16_up(steps), float("nan"))
    return scales, offsets


@triton.jit
def _bfloat16_down(x):
    bits = x.to(tl.uint32, bitcast=True)
    is_inexact = (bits >> 31 == 1) & (bits & 0xFFFF != 0)
    return ((bits & 0xFFFF0000) + tl.where(is_inexact, 0x10000, 0)).to(tl.float32, bitcast=True)


@triton.jit
def _bfloat16_up(x):
    bits = x.to(tl.uint32, bitcast=True)
    is_inexact = (bits >> 31 == 0) & (bits & 0xFFFF != 0)
    return ((bits & 0xFFFF0000) + tl.where(is_inexact, 0x10000, 0)).to(tl.float32, bitcast=True)


@triton.jit
def _to_bfloat16_exact(x):
    """Convert float32 that bfloat16 represents exactly, by its bits.

    The interpreter's cast would flush values below 2⁻¹²⁶ to 0.
    """
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _bfloat16_bits_to_float32(x):
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _stochastic_codes(steps, random_bits, PLACES: tl.constexpr):
    """Return in the lowest bits `steps` rounded up with its fraction's probability, else down.

    A float32 of this size has PLACES binary places, and adding random bits to them carries into the
    integer.
    """
    fixed = (steps + 2.0 ** (23 - PLACES)).to(tl.int32, bitcast=True)
    return (fixed + (random_bits >> (16 - PLACES))) >> PLACES


@triton.jit
def _random_halves(seed, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Return int32 (BLOCKS, BLOCK) random values below 2¹⁶, eight from each Philox call.

    The counter is the index in the tile and the program index, so any tensor size works.
    """
    index = _tile_indices(BLOCKS * BLOCK // 8, BLOCK // 8)
    a, b, c, d = tl.philox(seed, index, tl.program_id(0), 0, 0)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return halves.to(tl.int32).reshape(BLOCKS, BLOCK)


@triton.jit
def _store_codes(codes_ptr, codes, remaining, BITS: tl.constexpr):
    """Pack and store codes, the first of a byte in its lowest bits, with zeros as padding."""
    PER_BYTE: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = codes.numel // PER_BYTE
    codes = codes.reshape(LENGTH // (_RUN // PER_BYTE), _RUN)
    is_code = _tile_indices(LENGTH * PER_BYTE, _RUN) < remaining
    if PER_BYTE > 1:
        shape: tl.constexpr = (codes.shape[0], _RUN // PER_BYTE, PER_BYTE)
        shifts = (tl.arange(0, PER_BYTE) * BITS)[None, None, :]
        codes = tl.sum(tl.where(is_code, codes, 0).reshape(shape) << shifts, axis=2)
    indices = _tile_indices(LENGTH, _RUN // PER_BYTE)
    if remaining == LENGTH * PER_BYTE:
        tl.store(codes_ptr + indices, codes.to(tl.uint8))
    else:
        tl.store(codes_ptr + indices, codes.to(tl.uint8), indices * PER_BYTE < remaining)


# ------------------------------------------------------------------ decoding


def dequantize_affine(quantized: Quantized) -> Tensor:
    """Decode to the original shape and dtype; also decodes affine results of `quantize_blockwise`.

    Raise ValueError for tensors quantized with a codebook, and for unsupported block sizes.
    """
    q = quantized
    _check_block(q.block)
    if q.offsets is None:
        raise ValueError(
            "got a tensor quantized with a codebook, which has no offsets; decode it with "
            "memlab.quantize.dequantize_blockwise"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.codes.device)
    launch(
        _decode,
        (block_count(out.numel(), _TILE),),
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
    start = first_block * BLOCK
    remaining = tl.minimum(count - start, BLOCKS * BLOCK).to(tl.int32)
    RUN: tl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth  # stores of 16 bytes
    codes = _load_codes(codes_ptr + start * BITS // 8, remaining, BLOCKS * BLOCK, RUN, BITS)
    codes = codes.to(tl.float32).reshape(BLOCKS, BLOCK)
    block_indices = tl.arange(0, BLOCKS)
    is_block = block_indices * BLOCK < remaining
    scales = tl.load(scales_ptr + first_block + block_indices, is_block, 0)
    offsets = tl.load(offsets_ptr + first_block + block_indices, is_block, 0)
    x = (
        _bfloat16_bits_to_float32(offsets)[:, None]
        + codes * _bfloat16_bits_to_float32(scales)[:, None]
    )
    x = cast(x, out_ptr.dtype.element_ty)
    x = x.reshape(BLOCKS * BLOCK // RUN, RUN)
    indices = _tile_indices(BLOCKS * BLOCK, RUN)
    if remaining == BLOCKS * BLOCK:
        tl.store(out_ptr + start + indices, x)
    else:
        tl.store(out_ptr + start + indices, x, indices < remaining)


@triton.jit
def _load_codes(codes_ptr, remaining, LENGTH: tl.constexpr, RUN: tl.constexpr, BITS: tl.constexpr):
    """Load and unpack codes (LENGTH / RUN, RUN)."""
    PER_BYTE: tl.constexpr = 8 // BITS
    indices = _tile_indices(LENGTH // PER_BYTE, RUN // PER_BYTE)
    if remaining == LENGTH:
        codes = tl.load(codes_ptr + indices)
    else:
        codes = tl.load(codes_ptr + indices, indices * PER_BYTE < remaining, other=0)
    if PER_BYTE > 1:
        shifts = (tl.arange(0, PER_BYTE) * BITS)[None, None, :]
        codes = ((codes[:, :, None] >> shifts) & (2**BITS - 1)).reshape(LENGTH // RUN, RUN)
    return codes


# ------------------------------------------------------------------ the context manager

KERNEL = QuantizationKernel(quantize_affine, dequantize_affine)


def compressed_activations(
    bits: int = 8,
    group: int = 256,
    *,
    mode: Mode | None = None,
    min_numel: int = 1024,
    generator: torch.Generator | None = None,
    leave_alone: Callable[[TensorInfo], bool] | None = None,
) -> AbstractContextManager[CompressionReport]:
    """Run `memlab.compression.compressed_activations` with these kernels.

    Arguments, report and errors are the same, but groups must be a power of two from 32 to 4096.
    """
    return compression.compressed_activations(
        bits,
        group,
        mode=mode,
        min_numel=min_numel,
        generator=generator,
        leave_alone=leave_alone,
        kernel=KERNEL,
    )
