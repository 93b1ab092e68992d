"""Quantization by blocks: a number in 8, 4 or 2 bits, and one scale for each block of numbers.

Saves    of 4 bytes a number all but bits/8, and 4 bytes a block: 3.94 × at 8 bits, blocks of 256.
Costs    a rounding error in each number, and a pass over the numbers to encode and to decode.
Source   Dettmers et al. 2021, arXiv 2110.02861 (dynamic code, blocks); Chen et al. 2021, arXiv
         2104.14129 (affine, stochastic).

Two ways to choose what 2ᵇ codes stand for:

    by a code  x ≈ code[c]·scale          scale = the block's largest |x|
    affine     x ≈ offset + c·scale       offset = the block's smallest x, scale = its range/(2ᵇ−1)

The dynamic code spends its 256 numbers on seven decades, half of them on the top one: an optimizer
keeps moments whose sizes differ by as much. Affine steps are even: activations of a block are much
of a size. And two ways to round. The nearest has the least error, at most half a step. Stochastic
rounding goes up with a probability equal to the fraction of the way: its mean is the number itself,
so errors cancel in sums.

Why blocks: an outlier costs precision, but only to the numbers that share its scale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.internals.chunks import size_on, starts
from memlab.internals.torch_internals import FakeTensor

Mode = Literal["nearest", "stochastic"]

_DECADES = 7
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Quantized:
    """What `quantize_blockwise` keeps of a tensor of n numbers."""

    codes: Tensor  # uint8 (⌈n·bits/8⌉,); the first of a byte's numbers in its lowest bits
    scales: Tensor  # (⌈n/block⌉,): float32 with a code, bfloat16 affine
    offsets: Tensor | None  # bfloat16 (⌈n/block⌉,); None with a code
    code: Tensor | None  # the caller's, shared by all that use it
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    block: int

    @property
    def nbytes(self) -> int:
        """⌈n·bits/8⌉ + 4·⌈n/block⌉ either way: one float32 a block, or two bfloat16.

        The code is not counted: its kilobyte is shared.
        """
        offset_bytes = 0 if self.offsets is None else self.offsets.nbytes
        return self.codes.nbytes + self.scales.nbytes + offset_bytes


def dynamic_code(signed: bool) -> Tensor:
    """256 float32 numbers in rising order, dense near zero: those of bitsandbytes and torchao.

    Decade i of 7 is cut into 2ⁱ equal parts (twice as many unsigned), and the code has their
    middles; and 0 and 1. Signed, the middles come with both signs: zero is number 127, and the
    first is −0.993, not −1. Unsigned, zero is number 0.
    """
    positive = torch.cat([_middles(i, 2**i if signed else 2 ** (i + 1)) for i in range(_DECADES)])
    negative = -positive if signed else positive[:0]
    return torch.cat([negative, positive, torch.tensor([0.0, 1.0])]).sort().values


def _middles(decade: int, parts: int) -> Tensor:
    """The middles of equal parts of 0.1 … 1, times a power of ten.

    In float32 step by step: rounded once from float64, a third of them differ in the last bit.
    """
    edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
    return (edges[:-1] + edges[1:]) / 2 * 10 ** (decade - _DECADES + 1)


# ------------------------------------------------------------------ a block at a time


@torch.no_grad()
def quantize_blockwise(
    x: Tensor,
    *,
    block: int = 256,
    bits: int = 8,
    code: Tensor | None = None,
    mode: Mode = "nearest",
    generator: torch.Generator | None = None,
) -> Quantized:
    """`x` (any shape; float32, bfloat16 or float16) in `bits` a number: 8, 4 or 2.

    With a `code` of 2ᵇ rising numbers within −1 … 1, or affine without one. The blocks are runs of
    the flattened `x`; the last may be short. What lies beyond a code's ends gets the end: −1 of the
    signed dynamic code comes back as −0.993, stochastic too.

    A block of zeros stays zero. A block that holds an infinity or NaN, or affine spans more than a
    float32 can, comes back as NaN, all of it: what went wrong stays to be seen, and the other
    blocks are untouched. `generator` is for the stochastic mode.
    """
    _check(x, block, bits, code, mode)
    kept = _empty(x, block, bits, code)
    for part, *views in _chunks(kept, x.reshape(-1)):
        _quantize_into(part, *views, kept, mode, generator)
    return kept


def dequantize_blockwise(quantized: Quantized) -> Tensor:
    """The numbers again, in their first shape and dtype, each as near as its code is."""
    q = quantized
    out = torch.empty(q.shape, dtype=q.dtype, device=q.codes.device)
    for part, *views in _chunks(q, out.view(-1)):
        part.copy_(_dequantized(q, *views).view(-1)[: len(part)])
    return out


def _empty(x: Tensor, block: int, bits: int, code: Tensor | None) -> Quantized:
    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=x.device)

    block_count = -(-x.numel() // block)
    codes = empty(-(-x.numel() * bits // 8), torch.uint8)
    scales = empty(block_count, torch.bfloat16 if code is None else torch.float32)
    offsets = empty(block_count, torch.bfloat16) if code is None else None
    return Quantized(codes, scales, offsets, code, x.shape, x.dtype, bits, block)


def _chunks(
    q: Quantized, numbers: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Views of numbers, codes, scales and offsets, a chunk of whole blocks at a time."""
    size = max(1, size_on(numbers.device) // q.block) * q.block
    for start in starts(numbers, size):
        codes = slice(start * q.bits // 8, (start + size) * q.bits // 8)
        blocks = slice(start // q.block, (start + size) // q.block)
        offsets = None if q.offsets is None else q.offsets[blocks]
        yield numbers[start : start + size], q.codes[codes], q.scales[blocks], offsets


def _quantize_into(
    part: Tensor,
    packed: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    q: Quantized,
    mode: Mode,
    generator: torch.Generator | None,
) -> None:
    """One chunk: nothing that it takes is there when the next one begins."""
    blocks = _in_blocks(part, q.block)  # (blocks, block)
    if q.code is None:
        codes = _write_affine(blocks, q.bits, mode, generator, scales, offsets)
    else:
        codes = _write_by_code(blocks, q.code, mode, generator, scales)
    packed.copy_(pack(codes.view(-1), q.bits, len(part)))


def _write_by_code(
    blocks: Tensor,
    code: Tensor,
    mode: Mode,
    generator: torch.Generator | None,
    scales: Tensor,
) -> Tensor:
    """The codes (blocks, block); the blocks' scales go to where they are kept."""
    fractions, found = _by_largest(blocks)
    scales.copy_(found)
    return _encode(fractions, code, mode, generator)


def _write_affine(
    blocks: Tensor,
    bits: int,
    mode: Mode,
    generator: torch.Generator | None,
    scales: Tensor,
    offsets: Tensor,
) -> Tensor:
    """The codes (blocks, block); the blocks' scales and offsets go to where they are kept."""
    levels = 2**bits - 1
    steps, found_scales, found_offsets = _affine(blocks, levels)
    scales.copy_(found_scales)
    offsets.copy_(found_offsets)
    return _round(steps, mode, generator).clamp_(0, levels).to(torch.uint8)


def _dequantized(q: Quantized, packed: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """float32 (blocks, block)"""
    codes = unpack(packed, q.bits, len(scales) * q.block)
    scales = scales.float().view(-1, 1)
    if offsets is None:
        return q.code.index_select(0, codes.int()).view(-1, q.block).mul_(scales)
    return torch.addcmul(offsets.float().view(-1, 1), codes.view(-1, q.block).float(), scales)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """float32 (blocks, block); the last number fills the last block: it stretches no range."""
    flat = x.reshape(-1).float()
    missing = -len(flat) % block
    if missing:
        flat = torch.cat([flat, flat[-1:].expand(missing)])
    return flat.view(-1, block)


def _by_largest(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks as fractions of their largest |x|, within −1 … 1; and those, a scale a block."""
    scales = _nan_unless_finite(blocks.abs().amax(1))
    return blocks / _divisor(scales), scales


def _affine(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks as steps from 0 to `levels`; a step's size and the offset of each block.

    Both are bfloat16, and rounded so that the steps still span the block: the offset down, and the
    step, which is reckoned from the offset that is kept, up.
    """
    low, high = blocks.aminmax(dim=1)
    offsets = _bfloat16_towards(low, -math.inf)
    scales = _bfloat16_towards((high - offsets.float()) / levels, math.inf)
    scales = _nan_unless_finite(scales)
    steps = (blocks - offsets.float().view(-1, 1)).div_(_divisor(scales.float()))
    return steps, scales, offsets


def _bfloat16_towards(numbers: Tensor, end: float) -> Tensor:
    """The next bfloat16 in the direction of `end`, or the number itself if it is one."""
    nearest = numbers.bfloat16()
    beyond = torch.nextafter(nearest, torch.full_like(nearest, end))
    passed = nearest.float() > numbers if end < 0 else nearest.float() < numbers
    return torch.where(passed, beyond, nearest)


def _nan_unless_finite(scales: Tensor) -> Tensor:
    return torch.where(scales.isfinite(), scales, math.nan)


def _divisor(scales: Tensor) -> Tensor:
    """(blocks, 1): the scales to divide by; where one is 0, so is all of its block: 1."""
    return torch.where(scales == 0, 1, scales).view(-1, 1)


def _round(steps: Tensor, mode: Mode, generator: torch.Generator | None) -> Tensor:
    """Whole steps: the nearest, or up with a probability equal to the fraction."""
    if mode == "nearest":
        return steps.round_()
    down = steps.floor()
    return down.add_(_uniform(steps, generator) < steps - down)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device)


# ------------------------------------------------------------------ codes of a table


@torch.no_grad()
def nearest_code(numbers: Tensor, code: Tensor) -> Tensor:
    """The index (uint8) of the number of `code` nearest to each of `numbers` (float32).

    At a tie, the lower. Right to the last bit: the thresholds are the middles in float64, rounded
    down to float32, and no float32 lies between the two.
    """
    return _Lookup.of(code, "nearest").count_below(numbers)


def _encode(numbers: Tensor, code: Tensor, mode: Mode, generator: torch.Generator | None) -> Tensor:
    """The index of the nearest, or of one of the two neighbours, with odds by the distance."""
    if mode == "nearest":
        return nearest_code(numbers, code)
    down = _Lookup.of(code, "below").count_below(numbers)
    index = down.view(-1).int()
    lower = code.index_select(0, index).view_as(numbers)
    upper = code.index_select(0, index.add_(1)).view_as(numbers)
    fraction = (numbers - lower) / (upper - lower)
    return down.add_(_uniform(numbers, generator) < fraction)


class _Thresholds:
    """Counts the thresholds below a number with one look-up and one compare, not eight compares.

    A float32's upper 16 bits are its sign, exponent and 7 bits of mantissa. All numbers that share
    them form a short interval. A table of 2¹⁶ has the count at its lower end; as there is at most
    one threshold inside, a compare with the next threshold settles the rest.
    """

    def __init__(self, thresholds: Tensor):
        ends = _interval_ends(thresholds.device)  # (2, 2¹⁶)
        low, high = torch.searchsorted(thresholds, ends, out_int32=True)
        is_too_close = (high - low).max() > 1
        if not isinstance(thresholds, FakeTensor) and is_too_close:
            raise ValueError(
                "got a code with numbers closer than 1/128 of their size; give fewer or wider ones"
            )
        self.count_at_low_end = low.to(torch.uint8)
        self.next = torch.cat([thresholds, thresholds.new_full((1,), math.inf)])

    def count_below(self, numbers: Tensor) -> Tensor:
        """uint8, of the shape of `numbers` (float32)."""
        flat = numbers.reshape(-1)
        upper_bits = flat.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        count = self.count_at_low_end.index_select(0, upper_bits)
        count += self.next.index_select(0, count.int()).lt_(flat).bool()  # in place: 0 or 1
        return count.view(numbers.shape)


def _interval_ends(device: torch.device) -> Tensor:
    """float32 (2, 2¹⁶): the smallest and the largest number with the same upper 16 bits."""
    upper = torch.arange(2**16, device=device, dtype=torch.int32) << 16
    ends = torch.stack([upper, upper | 0xFFFF])
    return torch.where(upper < 0, ends.flip(0), ends).view(torch.float32)


def middles_between(code: Tensor) -> Tensor:
    """The thresholds of the nearest: float64 middles, rounded down."""
    exact = code.double()
    return _float32_down((exact[:-1] + exact[1:]) / 2)


def _inner(code: Tensor) -> Tensor:
    """The thresholds of the number below: the code's own, but for its ends."""
    return code[1:-1].clone()


class _Lookup:
    """The thresholds of each code, of either kind: made when they are first asked for."""

    _known = WeakTensorKeyDictionary()  # 131 KiB a kind, as long as the code itself lives
    _of_kind: ClassVar = {"nearest": middles_between, "below": _inner}

    @classmethod
    def of(cls, code: Tensor, kind: str) -> _Thresholds:
        made = cls._known.setdefault(code, {})
        if kind not in made:
            made[kind] = _Thresholds(cls._of_kind[kind](code))
        return made[kind]


def _float32_down(numbers: Tensor) -> Tensor:
    """The largest float32 that is not above each float64."""
    nearest = numbers.float()
    down = torch.nextafter(nearest, torch.full_like(nearest, -math.inf))
    return torch.where(nearest.double() > numbers, down, nearest)


# ------------------------------------------------------------------ bits in bytes


def pack(codes: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes (uint8, below 2ᵇ, whole bytes of them) in ⌈count·bits/8⌉ bytes."""
    per_byte = 8 // bits
    codes[count:] = 0  # what the last byte has to spare
    in_byte = codes.view(-1, per_byte)
    packed = in_byte[:, 0].clone() if per_byte > 1 else codes
    for place in range(1, per_byte):
        packed |= in_byte[:, place] << place * bits
    return packed[: -(-count // per_byte)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """`count` codes again; zeros beyond those that were packed."""
    per_byte = 8 // bits
    if missing := count // per_byte - len(packed):
        packed = torch.cat([packed, packed.new_zeros(missing)])
    if per_byte == 1:
        return packed
    places = torch.arange(per_byte, device=packed.device, dtype=torch.uint8) * bits
    return (packed.view(-1, 1) >> places).bitwise_and_(2**bits - 1).view(-1)


# ------------------------------------------------------------------ what is refused


def _check(x: Tensor, block: int, bits: int, code: Tensor | None, mode: str) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"got {x.dtype} to quantize; give float32, bfloat16 or float16")
    if bits not in (8, 4, 2):
        raise ValueError(f"got {bits} bits; give 8, 4 or 2, which fill a byte")
    if block < 1 or block % (8 // bits):
        raise ValueError(
            f"got blocks of {block} at {bits} bits; give a multiple of {8 // bits}, so that each "
            f"block begins with a byte"
        )
    if mode not in ("nearest", "stochastic"):
        raise ValueError(f"got mode {mode!r}; give 'nearest' or 'stochastic'")
    if code is not None:
        _check_code(code, bits)


def _check_code(code: Tensor, bits: int) -> None:
    if code.dtype != torch.float32 or code.shape != (2**bits,):
        raise ValueError(
            f"got a code of {code.dtype} and shape {tuple(code.shape)}; give {2**bits} float32 "
            f"numbers for {bits} bits"
        )
    if code in _Lookup._known:
        return
    is_fine = (code.diff() > 0).all() & (code[0] >= -1) & (code[-1] <= 1)
    if not isinstance(code, FakeTensor) and not is_fine:
        raise ValueError(
            "got a code out of order or beyond −1 … 1; sort it, and divide by its largest"
        )
