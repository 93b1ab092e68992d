"""FP8 matmuls: inputs and weights in E4M3, gradients in E5M2, and one scale for each tensor.

Saves    half of the inputs that linear layers keep for backward: 1 byte per element, not 2.
Costs    4 significant bits for inputs and weights and 3 for gradients; casts, and a pass for amax.
Source   Micikevicius et al. 2022, arXiv 2209.05433; tiles: DeepSeek-V3, arXiv 2412.19437, 3.3.2.

    cast       scale = max |x| / largest of the format         codes = x / scale, rounded to 8 bits
    forward    y  = x8 · W8ᵀ · scales                          keeps x8, not x
    backward   dx = g8 · W8 · scales,   dW = g8ᵀ · x8 · scales

The optimizer steps W itself, so W keeps its dtype, and its FP8 copy lives only during a matmul.
`memlab.precision.fp8` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100  # of an amax, so that neither scale nor 1 / scale overflows


def cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return FP8 codes of the shape of x, and one float32 scale ()."""
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float().clamp(min=SMALLEST)
    return (x.float() * (largest / amax)).to(dtype), amax / largest


def cast_tiles(x: Tensor, dtype: torch.dtype, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return FP8 codes (n, k), and a scale for each tile (⌈n/rows⌉, ⌈k/columns⌉) of x (n, k)."""
    largest, (n, k) = torch.finfo(dtype).max, x.shape
    padded = nn.functional.pad(x, (0, -k % columns, 0, -n % rows))
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # (·, rows, ·, columns)
    amax = tiles.abs().amax((1, 3), keepdim=True).float().clamp(min=SMALLEST)
    codes = (tiles.float() * (largest / amax)).to(dtype).view(padded.shape)
    return codes[:n, :k].clone(), (amax / largest)[:, 0, :, 0].clone()


def multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a · b of (codes, scale) pairs, with float32 sums."""
    return (a[0].float() @ b[0].float() * (a[1] * b[1])).to(dtype)


class FP8Matmul(torch.autograd.Function):
    """x (n, in) times weight (out, in) transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, (w8, scale) = cast(x, E4M3), cast(weight, E4M3)
        ctx.save_for_backward(*x8, weight)
        return multiply(x8, (w8.T, scale), x.dtype)  # (n, out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight = ctx.saved_tensors
        g8, scale = cast(gradient, E5M2)
        dx = multiply((g8, scale), cast(weight, E4M3), gradient.dtype)  # (n, in)
        return dx, multiply((g8.T, scale), (x8, x_scale), weight.dtype)  # (out, in)


class FP8Linear(nn.Module):
    """A linear layer (..., in) to (..., out) without bias; it trains the weight it is given."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return FP8Matmul.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
