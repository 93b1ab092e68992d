"""Train in bfloat16 without losing small updates: stochastic rounding and Kahan summation.

Saves    the float32 copy of the weights, 4 bytes per weight.
Costs    random bits (stochastic rounding), or 2 bytes per weight (Kahan summation).
Source   Gupta et al. 2015, arXiv 1502.02551 (stochastic rounding); Kahan 1965, and for bfloat16
         training Zamirai et al. 2020, arXiv 2010.06192.

Above 1, neighboring bfloat16 values are 1/128 apart. An update of 1/1000 is always rounded away: 1
+ 1/1000 is 1. There are two remedies:

    stochastic  round up with a probability equal to the fractional distance to the next value;
                after 1000 such updates the weight has moved by 1 on average
    Kahan       store the rounding error in a second bfloat16, and add it to the next update

A float32 has 1 sign bit, 8 exponent bits and 23 mantissa bits; a bfloat16 is its upper half. The
lower 16 bits are the fractional distance to the next bfloat16, in units of 2⁻¹⁶. Adding a random
16-bit integer carries into the upper half with that probability; the lower half is then cut off.
"""

import torch
from torch import Tensor

CHUNK_SIZE = 2**20  # elements: 4 MiB of random bits and 4 MiB of sums
_LOW_BITS = 0xFFFF


def stochastic_round_(
    out: Tensor, precise: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Write `precise` (float32) into `out` (bfloat16) of the same shape with stochastic rounding.

    Rounding is unbiased and leaves bfloat16 values unchanged. Infinities and NaN stay. The next
    value above the largest bfloat16 is infinity. Temporaries take at most 12 MiB.
    """
    if out.dtype != torch.bfloat16 or precise.dtype != torch.float32:
        raise TypeError(
            f"got {precise.dtype} to round into {out.dtype}; give float32 and bfloat16 (float16 is "
            f"not the upper half of a float32)"
        )
    if out.shape != precise.shape:
        shapes = tuple(precise.shape), tuple(out.shape)
        raise ValueError(f"got shape {shapes[0]} to round into {shapes[1]}; give equal shapes")
    if not out.is_contiguous():
        dense = torch.empty_like(out, memory_format=torch.contiguous_format)
        return out.copy_(stochastic_round_(dense, precise, generator=generator))
    chunks = zip(out.view(-1).split(CHUNK_SIZE), precise.reshape(-1).split(CHUNK_SIZE), strict=True)
    for rounded, values in chunks:
        rounded.copy_(_rounded(values, generator))
    return out


def _rounded(values: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return float32 values that bfloat16 represents exactly."""
    bits = torch.randint(
        _LOW_BITS + 1, values.shape, generator=generator, dtype=torch.int32, device=values.device
    )
    bits.add_(values.view(torch.int32)).bitwise_and_(~_LOW_BITS)
    is_finite = values.abs() < torch.inf  # half as many operators as isfinite()
    return torch.where(is_finite, bits.view(torch.float32), values)


def kahan_add_(weight: Tensor, compensation: Tensor, update: Tensor) -> Tensor:
    """Add `update` to `weight` in place, and the rounding error to `compensation`.

    Start `compensation` at zero. All three have the same shape, and `weight` and `compensation` the
    same dtype. Needs one temporary of the same size.
    """
    compensation.add_(update)
    before = weight.clone()
    weight.add_(compensation)
    compensation.add_(before.sub_(weight))  # intended change − actual change
    return weight
