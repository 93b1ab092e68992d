"""8-bit Adam: both moments stored as one byte per element and one scale per block of 256.

Saves    three quarters of AdamW's state: 2N + 8⌈N/256⌉ bytes, not 8N.
Costs    decoding and encoding both moments in every step, and their rounding errors.
Source   Dettmers et al. 2021, arXiv 2110.02861, sections 2.1 and 2.2. Zero point: Li et al. 2023,
         arXiv 2309.01507, section 4.1.

    encode    scale = max |x| of the block; code = index of the codebook entry nearest to x / scale
    decode    codebook[code] · scale
    step      decode m and v, AdamW's step, encode them again

The codebook is dynamic: its entries are dense near zero, ten times coarser with each decade.
`memlab.optim.Adam8bit` is the version to train with.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def dynamic_code(signed: bool) -> Tensor:
    """Return the codebook: 256 values in seven decades, sorted, from 0 (or −1) to 1."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def encode(x: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Return uint8 codes (n,) and float32 scales (⌈n/256⌉,) of n elements."""
    n = x.numel()
    blocks = F.pad(x.flatten(), (0, -n % 256)).view(-1, 256)
    scales = blocks.abs().amax(1)
    fractions = blocks / scales.where(scales > 0, 1).view(-1, 1)
    thresholds = (codebook[:-1] + codebook[1:]) / 2
    codes = torch.bucketize(fractions, thresholds, out_int32=True).to(torch.uint8)
    return codes.flatten()[:n].clone(), scales


def encode_positive(x: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Encode second moments without rounding a positive element to 0, which would be a divisor."""
    codes, scales = encode(x, codebook)
    codes[(x.flatten() > 0) & (codes == 0)] = 1
    return codes, scales


def decode(codes: Tensor, scales: Tensor, codebook: Tensor) -> Tensor:
    """Return the decoded float32 elements (n,)."""
    each = scales.repeat_interleave(256)[: len(codes)]
    return codebook[codes.int()] * each


class Adam8bit(torch.optim.Optimizer):
    """Parameters with fewer than 4096 elements keep float32 moments."""

    codebooks = dynamic_code(True), dynamic_code(False)
    encode_v = staticmethod(encode_positive)

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self.step_weight(weight, weight.grad.flatten(), self.state[weight], group)

    def step_weight(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        signed, unsigned = self.codebooks
        if not state:
            m, v = torch.zeros_like(gradient), torch.zeros_like(gradient)
        elif len(gradient) < 4096:
            m, v = state["m"], state["v"]
        else:
            m, v = decode(*state["m"], signed), decode(*state["v"], unsigned)
        state["step"] = t = state.get("step", 0) + 1
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        root = (v / (1 - beta2**t)).sqrt() + eps
        weight -= lr * (m / (1 - beta1**t) / root).view_as(weight)
        if len(gradient) >= 4096:
            m, v = encode(m, signed), self.encode_v(v, unsigned)
        state["m"], state["v"] = m, v
