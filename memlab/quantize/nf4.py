"""NF4: a frozen weight in 4 bits per element, with one scale per block of 64 elements.

Saves    a weight takes 0.516 bytes per element instead of 2 in bfloat16: 3.88× less.
Costs    a rounding error per element, and a pass over the codes each time the weight is used.
Source   Dettmers et al. 2023, arXiv 2305.14314, section 3 (NF4, double quantization) and
         appendix E (the 16 levels).

Adds to memlab.reference.nf4: any even block size, temporaries of a fixed size, decoding into a
caller's buffer, float16 and bfloat16.

    encode    absmax = max |w| of the block;  code = index of the level nearest to w / absmax
    decode    levels[code] · absmax

The weights of a trained layer are roughly normally distributed. So the 16 levels are quantiles of
the normal distribution: dense near zero, where most weights are.

Double quantization also encodes the absmax values, because 4 bytes per 64 weights are 0.5 bits per
weight. It subtracts their mean and stores 8-bit codes with one scale per 256 of them:

    bytes per weight    0.5 + 4/64 = 0.5625               absmax in float32
                        0.5 + 1/64 + 4/(64·256) = 0.5159  absmax in 8 bits, plus 4 for the mean

The arithmetic matches bitsandbytes, to the last bit: multiply by 1/absmax in float32, take the
nearest level, ties to the lower. In two places bitsandbytes 0.50 differs on the CPU: it looks up
the 8-bit codes of absmax values on a grid of 65,536 points, so 1 or 2 in 1,000 are the second
nearest, and it stores 1e-38 as the absmax of a short last block of zeros.
"""

from collections.abc import Iterator
from ctypes import c_float
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.internals.chunks import chunk_size_on, chunk_starts
from memlab.internals.sizes import ABSMAX_BLOCK
from memlab.quantize.codebooks import dynamic_code

# The probability of the outermost quantile, 1 − (1/32 + 1/30)/2, as bitsandbytes rounds it: to
# 0.9677083, and then to float32.
OUTERMOST = 0.9677082896232605
SMALLEST_DIVISOR = 1e-38  # so that a block of zeros has fractions of zero

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Codebooks(NamedTuple):
    """The values of the codes, on one device, which any number of weights share (1,088 bytes)."""

    levels: Tensor  # float32 (16,)
    absmax: Tensor  # float32 (256,), the signed dynamic codebook


@dataclass(frozen=True)
class NF4:
    """A weight of n elements, as `quantize_nf4` returns it."""

    codes: Tensor  # uint8 (⌈n/2⌉,); the first element of a byte in its upper bits
    absmax: Tensor  # (⌈n/block⌉,): float32, or with double quantization uint8 codes
    scales: Tensor | None  # float32 (⌈len(absmax)/256⌉,) of the absmax codes
    mean: Tensor | None  # float32 (), subtracted from the absmax before they were encoded
    codebooks: Codebooks
    shape: torch.Size
    dtype: torch.dtype
    block: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors but the shared codebooks; see `nf4_bytes`."""
        tensors = (self.codes, self.absmax, self.scales, self.mean)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


# ------------------------------------------------------------------ levels


def nf4_code() -> Tensor:
    """Return the 16 levels of NF4: float32, sorted, from −1 to 1, with 0 at index 7.

    Eight positive and seven negative quantiles of the normal distribution, and zero, divided by the
    largest. Each side has its own spacing, so the two halves differ.
    """
    negative = [-quantile for quantile in _quantiles(7)]
    levels = torch.tensor(sorted([*negative, 0.0, *_quantiles(8)]), dtype=torch.float32)
    return levels / levels[-1]


def _quantiles(count: int) -> list[float]:
    """Return quantiles at `count` probabilities, evenly spaced from above 1/2 to OUTERMOST."""
    step = (OUTERMOST - 0.5) / count
    # Quantiles of float64 probabilities are other levels, and so are those of the paper's unrounded
    # probability (test_the_levels_equal_bitsandbytes_to_the_bit).
    return [NormalDist().inv_cdf(_float32(0.5 + step * i)) for i in range(1, count + 1)]


def _float32(x: float) -> float:
    """Round to float32: bitsandbytes' probabilities are float32, and its levels depend on it."""
    return c_float(x).value


def nf4_codebooks(device: torch.device | str | None = None) -> Codebooks:
    """Return the codebooks on a device."""
    return Codebooks(nf4_code().to(device), dynamic_code(signed=True).to(device))


# ------------------------------------------------------------------ encode


@torch.no_grad()
def quantize_nf4(
    weight: Tensor,
    *,
    block: int = 64,
    double: bool = True,
    codebooks: Codebooks | None = None,
) -> NF4:
    """Quantize a weight (any shape; float32, bfloat16 or float16) to 4 bits per element.

    Blocks are consecutive elements of the flattened weight; the last may be short. A block with an
    infinity or NaN decodes to nothing finite; with double quantization the mean spreads that to the
    whole weight.

    Args:
        double: quantize the absmax values too. Until the end this needs them in float32, 4 bytes
            per block. All other temporaries have a fixed size.
        codebooks: tensors to share with other weights; by default new ones.
    """
    _check(weight, block)
    codebooks = nf4_codebooks(weight.device) if codebooks is None else codebooks
    flat = weight.reshape(-1)
    codes = flat.new_empty(-(-len(flat) // 2), dtype=torch.uint8)
    absmax = flat.new_empty(-(-len(flat) // block), dtype=torch.float32)
    for at in _chunks(flat, block):
        encoded, absmax[at.blocks] = _encode(_rows(flat[at.elements], block), codebooks.levels)
        codes[at.codes] = _pack(encoded)[: len(codes[at.codes])]
    if not double:
        return NF4(codes, absmax, None, None, codebooks, weight.shape, weight.dtype, block)
    mean = _mean(absmax)
    small, scales = _encode_absmax(absmax.sub_(mean), codebooks.absmax)
    return NF4(codes, small, scales, mean, codebooks, weight.shape, weight.dtype, block)


def _mean(absmax: Tensor) -> Tensor:
    """Return the mean as bitsandbytes computes it, unless the sum overflows."""
    mean, count = absmax.mean(), len(absmax)
    parts = (absmax[at.elements].div(count).sum() for at in _chunks(absmax, ABSMAX_BLOCK))
    return torch.where(mean.isfinite(), mean, sum(parts))


def _encode_absmax(absmax: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes of the absmax values, and a scale per ABSMAX_BLOCK of them."""
    codes = torch.empty_like(absmax, dtype=torch.uint8)
    scales = absmax.new_empty(-(-len(absmax) // ABSMAX_BLOCK))
    for at in _chunks(absmax, ABSMAX_BLOCK):
        encoded, scales[at.blocks] = _encode(_rows(absmax[at.elements], ABSMAX_BLOCK), codebook)
        codes[at.elements] = encoded.view(-1)[: len(codes[at.elements])]
    return codes, scales


def _encode(rows: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Return the code of each element of float32 (blocks, block), and the absmax of each block."""
    absmax = rows.abs().amax(1)
    inverse = absmax.clamp(min=SMALLEST_DIVISOR).reciprocal_().view(-1, 1)
    thresholds = (codebook[:-1] + codebook[1:]) / 2
    return torch.bucketize(rows * inverse, thresholds, out_int32=True).to(torch.uint8), absmax


def _rows(chunk: Tensor, block: int) -> Tensor:
    """Return float32 (blocks, block), padded with zeros, which change no absmax."""
    return F.pad(chunk.float(), (0, -len(chunk) % block)).view(-1, block)


def _pack(codes: Tensor) -> Tensor:
    """Pack pairs of codes into bytes, the first of a pair in the upper four bits."""
    first, second = codes.view(-1, 2).unbind(1)
    return (first << 4).bitwise_or_(second)


# ------------------------------------------------------------------ decode


@torch.no_grad()
def dequantize_nf4(q: NF4, out: Tensor | None = None) -> Tensor:
    """Decode, into `out` if given: contiguous, of the weight's shape, in any of the three dtypes.

    Each element is computed in float32 and rounded once, to the dtype of `out`.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.codes.device)
    _check_out(q, out)
    flat = out.view(-1)
    level_pairs = torch.cartesian_prod(q.codebooks.levels, q.codebooks.levels)  # by byte: (256, 2)
    for at in _chunks(flat, q.block):
        flat[at.elements] = _decode_chunk(q, at, level_pairs)
    return out


def _decode_chunk(q: NF4, at: "_Chunk", level_pairs: Tensor) -> Tensor:
    """Return a chunk in float32."""
    absmax = _decode_absmax(q, at)
    values = level_pairs.index_select(0, q.codes[at.codes].int()).view(-1)
    values = values[: at.elements.stop - at.elements.start]  # without the padding of the last byte
    whole = len(values) // q.block
    values[: whole * q.block].view(whole, q.block).mul_(absmax[:whole].view(-1, 1))
    values[whole * q.block :].mul_(absmax[-1])  # the last block, if it is short
    return values


def _decode_absmax(q: NF4, at: "_Chunk") -> Tensor:
    """Return the float32 absmax of a chunk's blocks."""
    if q.scales is None or q.mean is None:
        return q.absmax[at.blocks]
    values = q.codebooks.absmax.index_select(0, q.absmax[at.blocks].int())
    scales = q.scales[at.scales].repeat_interleave(ABSMAX_BLOCK)[: len(values)]
    # The 8 bits may round a block's absmax up, beyond the largest number of the weight's dtype.
    # The last term is NaN if the weight had an infinity or NaN.
    largest = torch.finfo(q.dtype).max
    return values.mul_(scales).add_(q.mean).clamp_(max=largest).add_(q.mean - q.mean)


# ------------------------------------------------------------------ chunks


class _Chunk(NamedTuple):
    """A chunk of a weight as slices of each tensor."""

    elements: slice
    codes: slice
    blocks: slice
    scales: slice


def _chunks(flat: Tensor, block: int) -> Iterator[_Chunk]:
    """Cut a weight so that each chunk begins with a block, and with a block of absmax values."""
    unit = block * ABSMAX_BLOCK
    size = max(1, chunk_size_on(flat.device) // unit) * unit
    for start in chunk_starts(flat, size):
        stop = min(start + size, len(flat))
        yield _Chunk(*(slice(start // n, -(-stop // n)) for n in (1, 2, block, unit)))


# ------------------------------------------------------------------ validation


def _check(weight: Tensor, block: int) -> None:
    if weight.dtype not in _DTYPES:
        raise TypeError(f"got {weight.dtype} to quantize; give float32, bfloat16 or float16")
    if block < 2 or block % 2:
        raise ValueError(f"got blocks of {block}; give an even number, so that each starts a byte")


def _check_out(q: NF4, out: Tensor) -> None:
    if out.shape != q.shape or out.dtype not in _DTYPES or not out.is_contiguous():
        raise ValueError(
            f"got a buffer of {out.dtype} and shape {tuple(out.shape)}; give a contiguous one of "
            f"shape {tuple(q.shape)} in float32, bfloat16 or float16"
        )
