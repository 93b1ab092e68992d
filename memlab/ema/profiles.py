"""Averages of weights by a power of time: their profiles, and one profile made of others.

Saves    the choice of an averaging length before training: any is made afterwards from a few.
Costs    nothing here: this file is mathematics, in float64, without a tensor.
Source   Karras et al. 2023 (EDM2), arXiv 2312.02696, section 3 and appendix C. Derived anew.

Adds to memlab.reference.post_hoc_ema: exact exponents, targets of any time, the side condition that
shares sum to one, and the error that is left.

A profile says how much the weights of each moment τ count in an average taken at time t:

    p(τ) = (γ+1)·τ^γ / t^(γ+1)          0 < τ ≤ t; its integral is 1

An exponential average has a fixed memory, in steps. This one remembers a fixed share of the
training, at whatever t: the first weights, which were random, never count. The share is said by the
profile's width, its standard deviation over t. With E[τⁿ] = t^n·(γ+1)/(γ+1+n):

    σ² = (γ+1)/(γ+3) − ((γ+1)/(γ+2))² = (γ+1) / ((γ+2)²·(γ+3))

γ = 0 is the plain mean of all that was, of width 1/√12 = 0.2887. A negative γ would count early
weights more than late ones, so no width above that is taken.

Two profiles overlap by

    ⟨a, b⟩ = ∫ p_a·p_b dτ = (γa+1)(γb+1)/(γa+γb+1) · m^(γa+γb+1) / (ta^(γa+1)·tb^(γb+1)),

m the earlier of ta and tb. An average is linear in the weights, so a sum of profiles Σ xᵢ·pᵢ is
the profile of the sum of averages. To come near a target p, make ∫(Σ xᵢ·pᵢ − p)² dτ small: with
Aᵢⱼ = ⟨i, j⟩ and bᵢ = ⟨i, p⟩, that is xᵀAx − 2bᵀx + ⟨p, p⟩, and where it is least, A·x = b. The xᵢ
have to sum to one, too, or weights that never move would come out longer or shorter than they are:

    A·x + λ = b,  Σ xᵢ = 1           λ the multiplier of the side condition

Snapshots after the target's time are left out: what the model was to become is no part of it. If
the target's time t is none of a snapshot, nothing knows the weights since the last one before, at
s. They are 1 − (s/t)^(γ+1) of the target: 58 % at σ = 0.05, t = 1.05·s. No sum can make up for
that, and `profile_error` says what is lost.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np

WIDEST = 1 / math.sqrt(12)  # the plain mean's


class Profile(NamedTuple):
    """An average with exponent `gamma`, as it is at time `t`, in whatever unit the clock has."""

    t: float
    gamma: float


def power_profile(sigma: float, t: float) -> Profile:
    """The profile of relative width `sigma` at time `t`."""
    return Profile(t, gamma_from_sigma(sigma))


# ------------------------------------------------------------------ widths


def gamma_from_sigma(sigma: float) -> float:
    """The exponent of a profile whose standard deviation is `sigma` times the training so far.

    σ²·(γ+2)²·(γ+3) = γ+1 is a cubic in γ, and below σ = 1/√12 it has one root above 0. ValueError
    for other widths.
    """
    if not isinstance(sigma, Real) or not 0 < sigma < WIDEST:
        raise ValueError(
            f"got sigma {sigma!r}, wanted one between 0 and 1/√12 = 0.2887, which is the plain "
            f"mean of all steps: a longer average would count the first weights most; give a "
            f"smaller one"
        )
    inverse = float(sigma) ** -2
    gamma = float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())
    for _ in range(2):  # Newton's steps, to the last digits
        excess = gamma**3 + 7 * gamma**2 + (16 - inverse) * gamma + 12 - inverse
        gamma -= excess / (3 * gamma**2 + 14 * gamma + 16 - inverse)
    return gamma


def sigma_from_gamma(gamma: float) -> float:
    """The relative width of a profile with exponent `gamma`, 0 or more."""
    if not isinstance(gamma, Real) or not 0 <= gamma < math.inf:
        raise ValueError(
            f"got gamma {gamma!r}, wanted a number that is not negative: below 0 the first weights "
            f"would count most"
        )
    return math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)))


# ------------------------------------------------------------------ what a tracked average counts


def decay(gamma: float, step: float, t: float) -> float:
    """β of an update that brings an average to time `t` from `step` before: avg ← β·avg + (1−β)·w.

    The average before is the integral up to t − step, over (t−step)^(γ+1); to be over t^(γ+1) it
    has to be times (1 − step/t)^(γ+1). At the first update that is 0: what was there before counts
    nothing. A `step` of 1 for updates that are 10 apart would make it forget ten times too slowly.
    """
    return (1 - step / t) ** (gamma + 1)


def impulse_response(times: Sequence[float], gamma: float) -> np.ndarray:
    """How much the weights at each update count in the average after the last.

    Weights that are seen at tₖ stand for all since the update before: ∫ p from tₖ₋₁ to tₖ, which is
    (tₖ/t)^(γ+1) − (tₖ₋₁/t)^(γ+1). It is what products of `decay` come to.
    """
    edges = np.array([0.0, *times]) / times[-1]
    return np.diff(edges ** (gamma + 1))


def relative_width(times: Sequence[float], response: Sequence[float]) -> float:
    """The σ of an average, from how much the weights of each time count in it."""
    at = np.asarray(times, dtype=np.float64)
    at = at / at[-1]
    counts = np.asarray(response, dtype=np.float64)
    counts = counts / counts.sum()
    return float(np.sqrt(np.sum(counts * (at - np.sum(counts * at)) ** 2)))


# ------------------------------------------------------------------ one profile of others


def inner_product(a: Profile, b: Profile) -> float:
    """∫ p_a·p_b dτ: how far two profiles overlap."""
    return float(_inner_products([a], [b])[0, 0])


def _inner_products(rows: Sequence[Profile], columns: Sequence[Profile]) -> np.ndarray:
    """Of each with each. By ratios of times, for their powers would overflow."""
    ta, gamma_a = np.array(rows, dtype=np.float64).T[:, :, None]  # (rows, 1) each
    tb, gamma_b = np.array(columns, dtype=np.float64).T[:, None, :]  # (1, columns) each
    late = np.maximum(ta, tb)
    ratio = np.where(ta < tb, (ta / late) ** gamma_b, (tb / late) ** gamma_a)
    return (gamma_a + 1) * (gamma_b + 1) / (gamma_a + gamma_b + 1) * ratio / late


def solve_weights(profiles: Sequence[Profile], target: Profile) -> np.ndarray:
    """What to multiply each average with, so that the sum's profile is nearest to the target's.

    float64, of the length of `profiles`; they sum to one, and are 0 for those after the target.
    ValueError if none is before it, and for two that are the same.
    """
    chosen = _before(profiles, target)
    terms = [profiles[i] for i in chosen]
    products = _inner_products(terms, terms)
    # Profiles of norm 1: the system is better conditioned, and the clock's unit cancels. The side
    # condition goes along: Σ xᵢ = Σ yᵢ/normᵢ.
    norms = np.sqrt(products.diagonal())
    ones = norms.min() / norms
    system = np.block([[products / np.outer(norms, norms), ones[:, None]], [ones, 0.0]])
    wanted = np.append(_inner_products(terms, [target])[:, 0] / norms, norms.min())
    weights = np.zeros(len(profiles))
    weights[chosen] = np.linalg.solve(system, wanted)[:-1] / norms
    return weights


def profile_error(
    profiles: Sequence[Profile], target: Profile, weights: Sequence[float] | None = None
) -> float:
    """How far the sum of `profiles` is from the target: ∫(Σ xᵢ·pᵢ − p)² over ∫p².

    0 is exact, 1 is as far as nothing at all. Without `weights` those of `solve_weights`. Known
    before a snapshot is read.
    """
    x = np.asarray(solve_weights(profiles, target) if weights is None else weights)
    used = np.flatnonzero(x)
    terms = [*(profiles[i] for i in used), target]
    factors = np.append(x[used], -1.0)
    square = factors @ _inner_products(terms, terms) @ factors
    return max(0.0, float(square)) / inner_product(target, target)


def _before(profiles: Sequence[Profile], target: Profile) -> list[int]:
    """Where the profiles are that a target may be made of."""
    chosen = [i for i, profile in enumerate(profiles) if profile.t <= target.t]
    if not chosen:
        raise ValueError(
            f"got {len(profiles)} snapshots, and none of them at or before {target.t}; give a "
            f"later target, or earlier snapshots"
        )
    if len({profiles[i] for i in chosen}) < len(chosen):
        twice = next(profiles[i] for i in chosen if profiles.count(profiles[i]) > 1)
        raise ValueError(
            f"got two snapshots at {twice.t} with gamma {twice.gamma:.6g}, which no weights can "
            f"tell apart; give one of them"
        )
    return chosen
