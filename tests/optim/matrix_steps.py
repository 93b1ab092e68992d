"""Steps with seeded gradients, for the optimizers of matrices."""

import torch
from torch import nn

SHAPES = [(40, 90), (90, 40), (30, 30)]


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(optimizer, steps: int = 7) -> list[torch.Tensor]:
    """Step with seeded gradients, of growing size; return the weights."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for step in range(steps):
        for place, weight in enumerate(weights):
            gradient = (1 + step) * seeded(*weight.shape, seed=100 * step + place)
            weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return [weight.detach() for weight in weights]


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(seeded(*shape).to(dtype))
