"""QLoRA: a frozen weight in 4 bits, decoded for each use, and a trained low-rank change beside it.

Saves    the frozen weight takes 0.56 bytes per element instead of 2, and no gradient or state.
Costs    decoding the weight in forward and again in backward.
Source   Dettmers et al. 2023, arXiv 2305.14314, equation 5.

    y = x · decode(W)ᵀ + (alpha/rank) · x Aᵀ Bᵀ          A: (rank, in), B: (out, rank)

Backward needs W for the gradient of x. It decodes W again rather than keep it, and it does not need
x, because W has no gradient. `memlab.qlora` is the version to train with.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from memlab.reference.nf4 import decode, encode


class Matmul(torch.autograd.Function):
    """x · decode(W)ᵀ. Only the codes and absmax are kept, which live as long as the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, absmax: Tensor, out_features: int) -> Tensor:
        ctx.weight = codes, absmax
        return x @ decode(codes, absmax).view(out_features, -1).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weight = decode(*ctx.weight).view(gradient.shape[-1], -1)
        return gradient @ weight.to(gradient.dtype), None, None, None


class QLoRALinear(nn.Module):
    """In place of a linear layer without bias: only A and B are trained."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        codes, absmax = encode(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("absmax", absmax)
        self.A = nn.Parameter(torch.empty(rank, linear.in_features, dtype=torch.float32))
        self.B = nn.Parameter(
            torch.zeros(linear.out_features, rank, dtype=torch.float32)
        )  # no change
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        frozen = Matmul.apply(x, self.codes, self.absmax, len(self.B))
        return frozen + self.scale * (x @ self.A.T @ self.B.T)
