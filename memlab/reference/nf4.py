"""NF4: a weight in 4 bits per element, and double quantization of its scales.

Saves    0.516 bytes per weight instead of 2 in bfloat16: 1/2 for the code, 1/64 for its share of an
         8-bit absmax, 4/(64·256) for that of a scale.
Costs    rounding errors, and decoding the weight for each use.
Source   Dettmers et al. 2023, arXiv 2305.14314, section 3.

    encode    absmax = max |w| of the block of 64;  code = index of the level nearest to w / absmax
    decode    levels[code] · absmax

The levels are quantiles of the normal distribution, because trained weights are nearly normal.
`memlab.quantize` is the version to train with.
"""

from statistics import NormalDist

import torch
from torch import Tensor

BLOCK = 64
OUTERMOST = 1 - (1 / 32 + 1 / 30) / 2  # the probability whose quantile becomes level 1


def levels() -> Tensor:
    """Return the 16 levels: seven below zero, zero, and eight above, from −1 to 1."""

    def quantiles(count: int) -> list[float]:
        step = (OUTERMOST - 0.5) / count
        return [NormalDist().inv_cdf(0.5 + step * i) for i in range(1, count + 1)]

    found = sorted([*(-q for q in quantiles(7)), 0.0, *quantiles(8)])
    found = torch.tensor(found, dtype=torch.float32)
    return found / found.max()


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (n/2,), two per byte, and the absmax (n/64,) of each block."""
    blocks = weight.flatten().float().view(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    fractions = blocks / absmax.where(absmax > 0, 1).view(-1, 1)
    table = levels()
    codes = torch.bucketize(fractions, (table[:-1] + table[1:]) / 2).to(torch.uint8)
    first, second = codes.view(-1, 2).unbind(1)
    return first << 4 | second, absmax


def decode(codes: Tensor, absmax: Tensor) -> Tensor:
    """Return the float32 weights (n,)."""
    indices = torch.stack([codes >> 4, codes & 15], 1).int()
    return (levels()[indices].view(-1, BLOCK) * absmax.view(-1, 1)).flatten()


def double_encode(absmax: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 8-bit codes of the absmax, a scale per 256 of them, and the mean taken off before.

    `codebook` is 8-bit Adam's signed one: memlab.reference.adam8bit.dynamic_code(True).
    """
    mean = absmax.mean() if absmax.sum().isfinite() else (absmax / len(absmax)).sum()
    centered = torch.nn.functional.pad(absmax - mean, (0, -len(absmax) % 256)).view(-1, 256)
    scales = centered.abs().amax(1)
    fractions = centered / scales.where(scales > 0, 1).view(-1, 1)
    codes = torch.bucketize(fractions, (codebook[:-1] + codebook[1:]) / 2).to(torch.uint8)
    return codes.flatten()[: len(absmax)].clone(), scales, mean


def double_decode(codes: Tensor, scales: Tensor, mean: Tensor, codebook: Tensor) -> Tensor:
    """Return the float32 absmax."""
    restored = codebook[codes.int()] * scales.repeat_interleave(256)[: len(codes)] + mean
    # The code may round up, beyond the largest number of float32. An infinite mean stays infinite.
    return restored.minimum(mean.clamp(min=torch.finfo(torch.float32).max))
