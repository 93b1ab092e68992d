"""Block-wise quantization to 8, 4 or 2 bits, with one scale per block of elements.

Saves    each element shrinks from 4 bytes to bits/8, plus 4 bytes per block: 3.94× less at 8 bits
         and blocks of 256.
Costs    a rounding error per element, and a pass over the tensor to encode and to decode.
Source   Dettmers et al. 2021, arXiv 2110.02861 (dynamic codebook, blocks); Chen et al. 2021, arXiv
         2104.14129 (affine, stochastic).

Adds to the encode and decode functions of memlab.reference.adam8bit and
memlab.reference.activation_compression: any bit width and block size, bit packing, both rounding
modes, a lookup table instead of a search, and temporaries of a fixed size.

Two ways to map the 2ᵇ codes to values:

    codebook   x ≈ codebook[c]·scale      scale = absmax of the block
    affine     x ≈ offset + c·scale       offset = min of the block, scale = its range / (2ᵇ−1)

The dynamic codebook spreads its 256 entries over seven decades, half of them in the top one. It
suits optimizer moments, whose sizes differ by as much. Affine steps are uniform, which suits
activations of similar size.

Two ways to round: round to nearest has the smallest error, at most half a step. Stochastic rounding
goes up with a probability equal to the fractional distance. It is unbiased, so errors cancel in
sums.

With blocks, an outlier only costs precision in the block that shares its scale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from memlab.internals.chunks import chunk_size_on, chunk_starts
from memlab.internals.torch_internals import has_values
from memlab.quantize.codebooks import ThresholdTables, nearest_code
from memlab.quantize.packing import pack, unpack

Mode = Literal["nearest", "stochastic"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor of n elements, as `quantize_blockwise` returns it."""

    codes: Tensor  # uint8 (⌈n·bits/8⌉,); the first element of a byte in its lowest bits
    scales: Tensor  # (⌈n/block⌉,): float32 with a codebook, bfloat16 if affine
    offsets: Tensor | None  # bfloat16 (⌈n/block⌉,); None with a codebook
    codebook: Tensor | None  # the caller's tensor, shared; None if affine
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    block: int

    @property
    def nbytes(self) -> int:
        """Return ⌈n·bits/8⌉ + 4·⌈n/block⌉ bytes: per block one float32, or two bfloat16 if affine.

        Excludes the shared codebook (1 KiB).
        """
        offset_bytes = 0 if self.offsets is None else self.offsets.nbytes
        return self.codes.nbytes + self.scales.nbytes + offset_bytes


@torch.no_grad()
def quantize_blockwise(
    x: Tensor,
    *,
    block: int = 256,
    bits: int = 8,
    codebook: Tensor | None = None,
    mode: Mode = "nearest",
    generator: torch.Generator | None = None,
) -> Quantized:
    """Quantize `x` (any shape; float32, bfloat16 or float16) to 8, 4 or 2 bits per element.

    With a `codebook` of 2ᵇ distinct sorted entries in −1 … 1, or affine without one. Blocks are
    consecutive elements of the flattened `x`; the last may be short. Values beyond the codebook's
    ends map to its ends, also with stochastic rounding: −1 decodes as −0.993 in the signed dynamic
    codebook.

    A block of zeros stays zero. A block with an infinity or NaN decodes to NaN, and so does an
    affine block whose range overflows float32; other blocks are unaffected. `generator` is for
    stochastic rounding.
    """
    _check(x, block, bits, codebook, mode)
    out = _empty(x, block, bits, codebook)
    for chunk, codes, scales, offsets in _chunks(out, x.reshape(-1)):
        _encode_chunk(chunk, codes, scales, offsets, out, mode, generator)
    return out


def dequantize_blockwise(quantized: Quantized) -> Tensor:
    """Decode to the original shape and dtype."""
    q = quantized
    out = torch.empty(q.shape, dtype=q.dtype, device=q.codes.device)
    for chunk, codes, scales, offsets in _chunks(q, out.view(-1)):
        chunk.copy_(_decode_chunk(q, codes, scales, offsets).view(-1)[: len(chunk)])
    return out


def _empty(x: Tensor, block: int, bits: int, codebook: Tensor | None) -> Quantized:
    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=x.device)

    block_count = -(-x.numel() // block)
    codes = empty(-(-x.numel() * bits // 8), torch.uint8)
    scales = empty(block_count, torch.bfloat16 if codebook is None else torch.float32)
    offsets = empty(block_count, torch.bfloat16) if codebook is None else None
    return Quantized(codes, scales, offsets, codebook, x.shape, x.dtype, bits, block)


def _chunks(q: Quantized, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield views of x, codes, scales and offsets, a chunk of whole blocks at a time."""
    size = max(1, chunk_size_on(x.device) // q.block) * q.block
    for start in chunk_starts(x, size):
        codes = slice(start * q.bits // 8, (start + size) * q.bits // 8)
        blocks = slice(start // q.block, (start + size) // q.block)
        offsets = None if q.offsets is None else q.offsets[blocks]
        yield x[start : start + size], q.codes[codes], q.scales[blocks], offsets


def _encode_chunk(
    chunk: Tensor,
    packed: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    q: Quantized,
    mode: Mode,
    generator: torch.Generator | None,
) -> None:
    """Encode one chunk; its temporaries are freed before the next chunk."""
    blocks = _split_into_blocks(chunk, q.block)  # (blocks, block)
    if q.codebook is not None:
        codes = _encode_with_codebook(blocks, q.codebook, mode, generator, scales)
    else:
        assert offsets is not None
        codes = _encode_affine(blocks, q.bits, mode, generator, scales, offsets)
    packed.copy_(pack(codes.view(-1), q.bits, len(chunk)))


def _encode_with_codebook(
    blocks: Tensor,
    codebook: Tensor,
    mode: Mode,
    generator: torch.Generator | None,
    scales: Tensor,
) -> Tensor:
    """Return codes (blocks, block), and write the scales in place."""
    fractions, absmax = _divide_by_absmax(blocks)
    scales.copy_(absmax)
    return _encode(fractions, codebook, mode, generator)


def _encode_affine(
    blocks: Tensor,
    bits: int,
    mode: Mode,
    generator: torch.Generator | None,
    scales: Tensor,
    offsets: Tensor,
) -> Tensor:
    """Return codes (blocks, block), and write the scales and offsets in place."""
    levels = 2**bits - 1
    steps, new_scales, new_offsets = _affine(blocks, levels)
    scales.copy_(new_scales)
    offsets.copy_(new_offsets)
    return _round(steps, mode, generator).clamp_(0, levels).to(torch.uint8)


def _decode_chunk(q: Quantized, packed: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Return float32 (blocks, block)."""
    codes = unpack(packed, q.bits, len(scales) * q.block)
    scales = scales.float().view(-1, 1)
    if q.codebook is not None:
        return q.codebook.index_select(0, codes.int()).view(-1, q.block).mul_(scales)
    assert offsets is not None
    return torch.addcmul(offsets.float().view(-1, 1), codes.view(-1, q.block).float(), scales)


def _split_into_blocks(x: Tensor, block: int) -> Tensor:
    """Return float32 (blocks, block), padded with the last element, which widens no range."""
    flat = x.reshape(-1).float()
    padding = -len(flat) % block
    if padding:
        flat = torch.cat([flat, flat[-1:].expand(padding)])
    return flat.view(-1, block)


def _divide_by_absmax(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks divided by their absmax, in −1 … 1, and the absmax of each block."""
    scales = _nan_unless_finite(blocks.abs().amax(1))
    return blocks / _divisor(scales), scales


def _affine(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks in steps from 0 to `levels`, and the step size and offset of each block.

    Both are bfloat16, rounded so that the steps still cover the block: the offset down, and the
    step size up. The step size is computed from the rounded offset.
    """
    low, high = blocks.aminmax(dim=1)
    offsets = _round_bfloat16_towards(low, -math.inf)
    scales = _round_bfloat16_towards((high - offsets.float()) / levels, math.inf)
    scales = _nan_unless_finite(scales)
    steps = (blocks - offsets.float().view(-1, 1)).div_(_divisor(scales.float()))
    return steps, scales, offsets


def _round_bfloat16_towards(x: Tensor, end: float) -> Tensor:
    """Round to bfloat16 in the direction of `end`; bfloat16 values stay."""
    nearest = x.bfloat16()
    next_value = torch.nextafter(nearest, torch.full_like(nearest, end))
    overshot = nearest.float() > x if end < 0 else nearest.float() < x
    return torch.where(overshot, next_value, nearest)


def _nan_unless_finite(scales: Tensor) -> Tensor:
    return torch.where(scales.isfinite(), scales, math.nan)


def _divisor(scales: Tensor) -> Tensor:
    """Return the scales as divisors (blocks, 1), with 1 for blocks of zeros."""
    return torch.where(scales == 0, 1, scales).view(-1, 1)


def _round(steps: Tensor, mode: Mode, generator: torch.Generator | None) -> Tensor:
    """Round to integer steps, to nearest or stochastically."""
    if mode == "nearest":
        return steps.round_()
    down = steps.floor()
    return down.add_(_uniform(steps, generator) < steps - down)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=torch.float32, device=like.device)


def _encode(x: Tensor, codebook: Tensor, mode: Mode, generator: torch.Generator | None) -> Tensor:
    """Return the index of the nearest entry, or draw one of the two neighboring entries."""
    if mode == "nearest":
        return nearest_code(x, codebook)
    down = ThresholdTables.of(codebook, "below").count_below(x)
    index = down.view(-1).int()
    lower = codebook.index_select(0, index).view_as(x)
    upper = codebook.index_select(0, index.add_(1)).view_as(x)
    fraction = (x - lower) / (upper - lower)
    return down.add_(_uniform(x, generator) < fraction)


# ------------------------------------------------------------------ validation


def _check(x: Tensor, block: int, bits: int, codebook: Tensor | None, mode: str) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"got {x.dtype} to quantize; give float32, bfloat16 or float16")
    if bits not in (8, 4, 2):
        raise ValueError(f"got {bits} bits; give 8, 4 or 2, which fill a byte")
    if block < 1 or block % (8 // bits):
        raise ValueError(
            f"got blocks of {block} at {bits} bits; give a multiple of {8 // bits}, so that each "
            f"block starts at a byte"
        )
    if mode not in ("nearest", "stochastic"):
        raise ValueError(f"got mode {mode!r}; give 'nearest' or 'stochastic'")
    if codebook is not None:
        _check_codebook(codebook, bits)


def _check_codebook(codebook: Tensor, bits: int) -> None:
    if codebook.dtype != torch.float32 or codebook.shape != (2**bits,):
        raise ValueError(
            f"got a codebook of {codebook.dtype} and shape {tuple(codebook.shape)}; give {2**bits} "
            f"float32 entries for {bits} bits"
        )
    if ThresholdTables.knows(codebook):
        return
    is_fine = (codebook.diff() > 0).all() & (codebook[0] >= -1) & (codebook[-1] <= 1)
    if has_values(codebook) and not is_fine:
        raise ValueError(
            "got a codebook that is not sorted, repeats an entry, or has entries outside −1 … 1; "
            "sort it, make its entries distinct, and divide by its absmax"
        )
