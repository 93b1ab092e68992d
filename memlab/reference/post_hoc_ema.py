"""Post-hoc EMA: track two averages of the weights, and synthesize any other one after training.

Saves    one training run per averaging length tried.
Costs    snapshots of two averages on disk, and a small linear system.
Source   Karras et al. 2023 (EDM2), arXiv 2312.02696, section 3 and appendix C. Derived
         independently.

An average with exponent γ at time t weights the model at time τ by p(τ) = (γ+1)·τ^γ / t^(γ+1). Its
relative width σ is the standard deviation of p divided by t:

    σ² = (γ+1) / ((γ+2)²·(γ+3))
    ⟨a, b⟩ = ∫ p_a·p_b = (γa+1)(γb+1)/(γa+γb+1) · min(ta, tb)^(γa+γb+1) / (ta^(γa+1)·tb^(γb+1))
    A·x = b, with Aᵢⱼ = ⟨i, j⟩ and bᵢ = ⟨i, target⟩: the weighted sum of averages nearest to it

`memlab.ema` is the version to train with. numpy computes the roots of a cubic in float64.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Profile(NamedTuple):
    t: float
    gamma: float


def exponent(sigma: float) -> float:
    """Return γ of an average with relative width σ."""
    if not 0 < sigma <= 12**-0.5:
        raise ValueError(f"got sigma {sigma}, wanted one above 0 and up to 0.2887")
    inverse = sigma**-2
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


class Average:
    """An average with exponent γ, updated at any interval."""

    def __init__(self, weights: Iterable[Tensor], gamma: float) -> None:
        self.gamma, self.time = gamma, 0.0
        self.values = [weight.detach().clone() for weight in weights]

    def update(self, weights: Iterable[Tensor], time: float) -> None:
        """Count the weights at `time` for the whole interval since the last update."""
        share = 1 - (1 - (time - self.time) / time) ** (self.gamma + 1)
        for value, weight in zip(self.values, weights, strict=True):
            value.lerp_(weight.detach(), share)
        self.time = time


def inner_product(a: Profile, b: Profile) -> float:
    """Return ∫ p_a·p_b dτ."""
    ratio = (a.t / b.t) ** b.gamma if a.t < b.t else (b.t / a.t) ** a.gamma
    both = (a.gamma + 1) * (b.gamma + 1) / (a.gamma + b.gamma + 1)
    return both * ratio / max(a.t, b.t)


def solve(snapshots: Sequence[Profile], target: Profile) -> np.ndarray:
    """Return each snapshot's coefficient; snapshots after the target get 0."""
    chosen = [n for n, snapshot in enumerate(snapshots) if snapshot.t <= target.t]
    known = [snapshots[n] for n in chosen]
    overlaps = np.array([[inner_product(p, q) for q in known] for p in known])
    x = np.linalg.solve(overlaps, [inner_product(p, target) for p in known])
    weights = np.zeros(len(snapshots))
    weights[chosen] = x / x.sum()
    return weights


def synthesize(
    snapshots: Sequence[Any],
    shares: Sequence[Sequence[float]],
    sizes: Mapping[str, int],
    write: Callable[[int, str, int, Tensor], None],
    chunk_size: int,
) -> None:
    """Write weighted sums of snapshots, `chunk_size` elements at a time."""
    for name, size in sizes.items():
        for start in range(0, size, chunk_size):
            stop = min(start + chunk_size, size)
            sums = torch.zeros(len(shares[0]), stop - start, dtype=torch.float32)
            for snapshot, of_each in zip(snapshots, shares, strict=True):
                part = snapshot.read(name, start, stop).float()
                for total, share in zip(sums, of_each, strict=True):
                    total.add_(part, alpha=share)
            for target, total in enumerate(sums):
                write(target, name, start, total)
