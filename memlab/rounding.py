"""Rounding to bfloat16 that small updates survive.

Saves    the float32 copy of the weights, 4 bytes each: bfloat16 weights can be trained directly.
Costs    random numbers (stochastic rounding), or 2 bytes a weight (Kahan's compensation).
Source   Gupta et al. 2015, arXiv 1502.02551 (stochastic rounding); Kahan 1965, and for bfloat16
         training Zamirai et al. 2020, arXiv 2010.06192.

A bfloat16 near 1 moves in steps of 1/128 upwards. An update of 1/1000 is rounded away, however
often it comes: 1 + 1/1000 is 1. Two ways out:

    stochastic  round up with a probability equal to the fraction of the way to the next number:
                after 1000 such updates the weight has moved by 1 in the mean
    Kahan       keep in a second bfloat16 what rounding took away, and add it to the next update

A float32 has the sign, 8 bits of exponent and 23 of mantissa; a bfloat16 is its upper half. So the
lower 16 bits are the way from one bfloat16 to the next, as a fraction of 2¹⁶. Add a random number
of 16 bits: with just that probability it carries into the upper half, which is then cut off.
"""

import torch
from torch import Tensor

CHUNK = 2**20  # numbers at a time: 4 MiB of random bits, 4 of sums
_LOW_BITS = 0xFFFF


def stochastic_round_(
    out: Tensor, precise: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Write `precise` (float32) into `out` (bfloat16), each number rounded up or down at random.

    The mean of many roundings is the number itself, and a bfloat16 stays as it is. Infinities and
    NaN pass; of a number beyond the largest bfloat16, the neighbour above is infinity. Both have
    one shape. At most 12 MiB are taken meanwhile, however large they are.
    """
    if out.dtype != torch.bfloat16 or precise.dtype != torch.float32:
        raise TypeError(
            f"got {precise.dtype} to round into {out.dtype}; give float32 and bfloat16: float16 is "
            f"not the upper half of a float32"
        )
    if out.shape != precise.shape:
        shapes = tuple(precise.shape), tuple(out.shape)
        raise ValueError(f"got shape {shapes[0]} to round into {shapes[1]}; give one shape")
    if not out.is_contiguous():
        dense = torch.empty_like(out, memory_format=torch.contiguous_format)
        return out.copy_(stochastic_round_(dense, precise, generator=generator))
    parts = zip(out.view(-1).split(CHUNK), precise.reshape(-1).split(CHUNK), strict=True)
    for rounded, numbers in parts:
        rounded.copy_(_rounded(numbers, generator))
    return out


def _rounded(numbers: Tensor, generator: torch.Generator | None) -> Tensor:
    """float32 numbers that are bfloat16s."""
    bits = torch.randint(
        _LOW_BITS + 1, numbers.shape, generator=generator, dtype=torch.int32, device=numbers.device
    )
    bits.add_(numbers.view(torch.int32)).bitwise_and_(~_LOW_BITS)
    is_finite = numbers.abs() < torch.inf  # in half of the operators of isfinite()
    return torch.where(is_finite, bits.view(torch.float32), numbers)


def kahan_add_(weight: Tensor, compensation: Tensor, update: Tensor) -> Tensor:
    """Add `update` to `weight`, and to `compensation` what rounding took away; begin it with zeros.

    All three have one shape, and the first two one dtype. One more tensor of it is taken meanwhile.
    """
    compensation.add_(update)
    before = weight.clone()
    weight.add_(compensation)
    compensation.add_(before.sub_(weight))  # what was to be added, less what was
    return weight
