"""Power-function EMA profiles: their widths, overlaps and combinations.

Saves    choosing an averaging length before training: any length can be synthesized afterwards.
Costs    nothing: this file is float64 mathematics without tensors.
Source   Karras et al. 2023 (EDM2), arXiv 2312.02696, section 3 and appendix C. Derived
         independently.

memlab.reference.post_hoc_ema is the short version. This file adds exact exponents, targets at any
time, the constraint that the coefficients sum to 1, and the remaining error.

A profile is the weight of each moment τ in an average taken at time t:

    p(τ) = (γ+1)·τ^γ / t^(γ+1)          0 < τ ≤ t; its integral is 1

An exponential average remembers a fixed number of steps. A power-function average remembers a fixed
fraction of the training so far, so the random initial weights never count. The relative width σ is
the profile's standard deviation divided by t. With E[τⁿ] = t^n·(γ+1)/(γ+1+n):

    σ² = (γ+1)/(γ+3) − ((γ+1)/(γ+2))² = (γ+1) / ((γ+2)²·(γ+3))

γ = 0 is the plain mean of all weights, with width 1/√12 = 0.2887. A negative γ would give early
weights more than late ones, so larger widths are rejected.

The overlap of two profiles is

    ⟨a, b⟩ = ∫ p_a·p_b dτ = (γa+1)(γb+1)/(γa+γb+1) · m^(γa+γb+1) / (ta^(γa+1)·tb^(γb+1)),

where m = min(ta, tb). Averages are linear in the weights, so the sum Σ xᵢ·pᵢ of profiles is the
profile of the same sum of averages. To approximate a target p, minimize ∫(Σ xᵢ·pᵢ − p)² dτ =
xᵀAx − 2bᵀx + ⟨p, p⟩ with Aᵢⱼ = ⟨i, j⟩ and bᵢ = ⟨i, p⟩. The minimum satisfies A·x = b. The xᵢ must
also sum to 1, or the sum would scale weights that never change:

    A·x + λ = b,  Σ xᵢ = 1           λ is the Lagrange multiplier of the constraint

Snapshots after the target's time are excluded, because they contain later weights. If the target's
time t lies after the last snapshot, at s, then no snapshot contains the weights in between. They
make up 1 − (s/t)^(γ+1) of the target: 58 % for σ = 0.05 and t = 1.05·s. No sum can replace them;
`profile_error` reports the loss.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np

WIDEST = 1 / math.sqrt(12)  # the width of the plain mean


class Profile(NamedTuple):
    """The profile of an average with exponent `gamma` at time `t`, in any unit."""

    t: float
    gamma: float


def power_profile(sigma: float, t: float) -> Profile:
    """Return the profile of relative width `sigma` at time `t`."""
    return Profile(t, gamma_from_sigma(sigma))


# ------------------------------------------------------------------ widths


def gamma_from_sigma(sigma: float) -> float:
    """Return the exponent of the profile with relative width `sigma`.

    σ²·(γ+2)²·(γ+3) = γ+1 is a cubic in γ with one positive root if σ < 1/√12. Raise ValueError for
    other widths.
    """
    if not isinstance(sigma, Real) or not 0 < sigma < WIDEST:
        raise ValueError(
            f"got sigma {sigma!r}, wanted a value between 0 and 1/√12 = 0.2887, the plain mean of "
            f"all steps; a longer average would count the first weights most; give a smaller sigma"
        )
    inverse = float(sigma) ** -2
    gamma = float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())
    for _ in range(2):  # Newton's method, to full precision
        excess = gamma**3 + 7 * gamma**2 + (16 - inverse) * gamma + 12 - inverse
        gamma -= excess / (3 * gamma**2 + 14 * gamma + 16 - inverse)
    return gamma


def sigma_from_gamma(gamma: float) -> float:
    """Return the relative width of a profile with exponent `gamma`, at least 0."""
    if not isinstance(gamma, Real) or not 0 <= gamma < math.inf:
        raise ValueError(
            f"got gamma {gamma!r}, wanted a nonnegative number: a negative one would count the "
            f"first weights most"
        )
    return math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)))


# ------------------------------------------------------------------ tracked averages


def decay(gamma: float, step: float, t: float) -> float:
    """Return β for an update at time `t`, `step` after the last: avg ← β·avg + (1−β)·w.

    The average up to t − step is normalized by (t−step)^(γ+1). Normalizing it by t^(γ+1) multiplies
    it by (1 − step/t)^(γ+1). The first update has β = 0, so initial weights never count. Passing
    `step=1` for updates 10 steps apart would decay the average ten times too slowly. Raises
    ValueError unless 0 ≤ step ≤ t and t > 0.
    """
    if not 0 <= step <= t or t == 0:
        raise ValueError(
            f"got step={step} and t={t}; give the time of the update, above 0, and the time since "
            f"the last one, from 0 to t"
        )
    return (1 - step / t) ** (gamma + 1)


def impulse_response(times: Sequence[float], gamma: float) -> np.ndarray:
    """Return how much the weights at each update count in the final average.

    The weights at tₖ represent the interval since tₖ₋₁: ∫ p = (tₖ/t)^(γ+1) − (tₖ₋₁/t)^(γ+1). The
    products of `decay` give the same values.
    """
    edges = np.array([0.0, *times]) / times[-1]
    return np.diff(edges ** (gamma + 1))


def relative_width(times: Sequence[float], response: Sequence[float]) -> float:
    """Return the σ of an average from the contribution of the weights at each time."""
    at = np.asarray(times, dtype=np.float64)
    at = at / at[-1]
    counts = np.asarray(response, dtype=np.float64)
    counts = counts / counts.sum()
    return float(np.sqrt(np.sum(counts * (at - np.sum(counts * at)) ** 2)))


# ------------------------------------------------------------------ combining profiles


def inner_product(a: Profile, b: Profile) -> float:
    """Return the overlap of two profiles, ∫ p_a·p_b dτ."""
    return float(_inner_products([a], [b])[0, 0])


def _inner_products(rows: Sequence[Profile], columns: Sequence[Profile]) -> np.ndarray:
    """Return the overlaps of all pairs, using ratios of times because powers would overflow."""
    ta, gamma_a = np.array(rows, dtype=np.float64).T[:, :, None]  # (rows, 1) each
    tb, gamma_b = np.array(columns, dtype=np.float64).T[:, None, :]  # (1, columns) each
    late = np.maximum(ta, tb)
    ratio = np.where(ta < tb, (ta / late) ** gamma_b, (tb / late) ** gamma_a)
    return (gamma_a + 1) * (gamma_b + 1) / (gamma_a + gamma_b + 1) * ratio / late


def solve_weights(profiles: Sequence[Profile], target: Profile) -> np.ndarray:
    """Return the coefficients of the averages whose sum is nearest to the target profile.

    The result is float64 of the same length as `profiles`. It sums to 1 and is 0 for profiles
    after the target. Raise ValueError if no profile precedes the target or two are equal.
    """
    chosen = _usable(profiles, target)
    terms = [profiles[i] for i in chosen]
    products = _inner_products(terms, terms)
    # Normalizing the profiles improves conditioning and cancels the clock's unit. The constraint
    # becomes Σ xᵢ = Σ yᵢ/normᵢ = 1.
    norms = np.sqrt(products.diagonal())
    # Inside the least squares, because scaling x by 1/Σx afterwards is worse with few snapshots: an
    # error of 0.049 instead of 0.043 with two per average at σ = 0.15, and equal from eight on.
    ones = norms.min() / norms
    system = np.block([[products / np.outer(norms, norms), ones[:, None]], [ones, 0.0]])
    wanted = np.append(_inner_products(terms, [target])[:, 0] / norms, norms.min())
    weights = np.zeros(len(profiles))
    weights[chosen] = np.linalg.solve(system, wanted)[:-1] / norms
    return weights


def profile_error(
    profiles: Sequence[Profile],
    target: Profile,
    weights: Sequence[float] | np.ndarray | None = None,
) -> float:
    """Return the relative squared error of the sum of profiles, ∫(Σ xᵢ·pᵢ − p)² / ∫p².

    0 is exact; 1 is as bad as a zero profile. `weights` defaults to `solve_weights`. Reads no
    snapshot.
    """
    x = np.asarray(solve_weights(profiles, target) if weights is None else weights)
    used = np.flatnonzero(x).tolist()
    terms = [*(profiles[i] for i in used), target]
    factors = np.append(x[used], -1.0)
    square = factors @ _inner_products(terms, terms) @ factors
    return max(0.0, float(square)) / inner_product(target, target)


def _usable(profiles: Sequence[Profile], target: Profile) -> list[int]:
    """Return the indices of profiles at or before the target's time."""
    # So a target between two snapshots misses the steps since the last one: one snapshot 5 % too
    # early makes an error of 0.86 at σ = 0.05.
    chosen = [i for i, profile in enumerate(profiles) if profile.t <= target.t]
    if not chosen:
        raise ValueError(
            f"got {len(profiles)} snapshots, and none of them at or before {target.t}; give a "
            f"later target, or earlier snapshots"
        )
    if len({profiles[i] for i in chosen}) < len(chosen):
        twice = next(profiles[i] for i in chosen if profiles.count(profiles[i]) > 1)
        raise ValueError(
            f"got two snapshots at {twice.t} with gamma {twice.gamma:.6g}, which have the same "
            f"profile; give only one of them"
        )
    return chosen
