"""Profiles: widths, overlaps, and the nearest sum, against integrals and closed forms."""

import math

import numpy as np
import pytest

from memlab.ema import (
    Profile,
    decay,
    gamma_from_sigma,
    impulse_response,
    inner_product,
    power_profile,
    profile_error,
    relative_width,
    sigma_from_gamma,
    solve_weights,
)


def integral(function, to, parts=200_000):
    """Integrate with the midpoint rule."""
    middles = (np.arange(parts) + 0.5) * to / parts
    return np.sum(function(middles)) * to / parts


def density(profile):
    t, gamma = profile
    return lambda tau: np.where(tau <= t, (gamma + 1) * tau**gamma / t ** (gamma + 1), 0)


def snapshots(times, sigmas=(0.05, 0.10)):
    return [power_profile(sigma, t) for t in times for sigma in sigmas]


# ------------------------------------------------------------------ widths


@pytest.mark.parametrize(
    ("sigma", "gamma"),
    [(0.05, 16.9722), (0.10, 6.9372), (0.15, 3.5579), (0.20, 1.8262), (0.25, 0.7198)],
)
def test_gamma_equals_the_papers(sigma, gamma):
    assert gamma_from_sigma(sigma) == pytest.approx(gamma, abs=1e-4)


@pytest.mark.parametrize("sigma", [1e-4, 0.01, 0.05, 0.1, 0.2, 0.28, 0.2886])
def test_sigma_comes_back_from_gamma_to_the_last_digits(sigma):
    assert sigma_from_gamma(gamma_from_sigma(sigma)) == pytest.approx(sigma, rel=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.7, 6.9, 17.0])
def test_sigma_is_the_standard_deviation_of_the_profile(gamma):
    p = density(Profile(2.0, gamma))
    mean = integral(lambda tau: tau * p(tau), 2.0)
    variance = integral(lambda tau: (tau - mean) ** 2 * p(tau), 2.0)
    assert sigma_from_gamma(gamma) == pytest.approx(math.sqrt(variance) / 2.0, rel=1e-6)


@pytest.mark.parametrize("sigma", [1 / math.sqrt(12), 0.2887, 0.3, 0.5, 0.0, -0.1, math.nan, "0.1"])
def test_an_impossible_width_is_an_error_with_the_reason(sigma):
    with pytest.raises(ValueError, match=r"0\.2887, the plain mean of all steps"):
        gamma_from_sigma(sigma)


@pytest.mark.parametrize("gamma", [-0.1, math.inf, math.nan])
def test_a_negative_gamma_is_an_error(gamma):
    with pytest.raises(ValueError, match="would count the first weights most"):
        sigma_from_gamma(gamma)


def test_gamma_0_is_the_plain_mean():
    assert sigma_from_gamma(0) == pytest.approx(1 / math.sqrt(12), rel=1e-15)
    assert impulse_response([1, 2, 3, 4], 0.0) == pytest.approx([0.25] * 4)


# ------------------------------------------------------------------ updates


@pytest.mark.parametrize("times", [[1, 2, 3, 4], [10, 20, 30], [1, 3, 10, 100]])
def test_products_of_decays_equal_the_closed_form(times):
    """Uneven steps included."""
    gamma, counts, before = 6.9, [], 0
    for t in times:
        beta = decay(gamma, t - before, t)
        counts = [beta * count for count in counts] + [1 - beta]
        before = t
    assert impulse_response(times, gamma) == pytest.approx(counts, abs=1e-15)


def test_the_first_update_discards_the_initial_weights():
    assert decay(6.9, 10, 10) == 0


@pytest.mark.parametrize(("step", "t"), [(1, 0), (0, 0), (2, 1), (-1, 3), (1, -3)])
def test_a_time_without_a_decay_is_an_error(step, t):
    with pytest.raises(ValueError, match=f"got step={step} and t={t}; give the time of the update"):
        decay(6.9, step, t)


@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("sigma", [0.05, 0.10, 0.15])
def test_the_closed_form_has_the_requested_width(sigma, every):
    times = range(every, 10_001, every)
    response = impulse_response(times, gamma_from_sigma(sigma))
    assert relative_width(times, response) == pytest.approx(sigma, rel=0.02)
    assert response.sum() == pytest.approx(1, abs=1e-12)


# ------------------------------------------------------------------ overlaps


@pytest.mark.parametrize("a", [Profile(1.0, 6.9), Profile(2.0, 0.5)])
@pytest.mark.parametrize("b", [Profile(1.5, 17.0), Profile(2.0, 0.7)])
def test_the_inner_product_is_the_integral(a, b):
    wanted = integral(lambda tau: density(a)(tau) * density(b)(tau), max(a.t, b.t))
    assert inner_product(a, b) == pytest.approx(wanted, rel=1e-4)
    assert inner_product(b, a) == pytest.approx(inner_product(a, b), rel=1e-14)


def test_times_counted_in_tokens_do_not_overflow():
    """10¹³ to the power of γ = 10⁴ would overflow float64."""
    a, b = Profile(1e13, 1e4), Profile(0.9e13, 1e4)
    assert inner_product(a, a) == pytest.approx(10001**2 / 20001 / 1e13, rel=1e-12)
    assert 0 <= inner_product(a, b) < 1e-300


# ------------------------------------------------------------------ the nearest sum


@pytest.mark.parametrize("sigma", [0.05, 0.10])
def test_a_tracked_width_uses_only_its_own_snapshot(sigma):
    profiles, target = snapshots(range(1, 21)), power_profile(sigma, 20)
    wanted = np.array([profile == target for profile in profiles], dtype=float)
    assert solve_weights(profiles, target) == pytest.approx(wanted, abs=1e-9)
    assert profile_error(profiles, target) < 1e-12


@pytest.mark.parametrize("sigma", [0.03, 0.07, 0.15, 0.25])
@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_coefficients_sum_to_one(sigma, count):
    profiles = snapshots(range(1, count + 1))
    weights = solve_weights(profiles, power_profile(sigma, count))
    assert weights.dtype == np.float64
    assert weights.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("sigma", [0.07, 0.15, 0.25])
def test_no_other_coefficients_that_sum_to_one_are_nearer(sigma):
    """Perturbations in every direction that keep the sum are worse, and so is the unconstrained
    solution scaled to a sum of one, as in other libraries."""
    profiles, target = snapshots([1, 2, 3, 4]), power_profile(sigma, 4)
    best = solve_weights(profiles, target)
    least = profile_error(profiles, target, best)
    for one in range(8):
        for other in range(one):
            step = np.zeros(8)
            step[[one, other]] = 1e-3, -1e-3
            assert profile_error(profiles, target, best + step) > least
            assert profile_error(profiles, target, best - step) > least
    overlaps = [[inner_product(a, b) for b in profiles] for a in profiles]
    free = np.linalg.solve(overlaps, [inner_product(a, target) for a in profiles])
    assert profile_error(profiles, target, free / free.sum()) > least


@pytest.mark.parametrize("count", [8, 20, 64])
def test_rounding_errors_of_snapshots_grow_only_for_widths_below_the_tracked_ones(count):
    """Independent errors of snapshots add up to √Σxᵢ²."""

    def gain(sigma):
        profiles = snapshots(range(1, count + 1))
        return np.sqrt(np.sum(solve_weights(profiles, power_profile(sigma, count)) ** 2))

    assert all(gain(sigma) < 1.1 for sigma in (0.06, 0.07, 0.12, 0.15, 0.20, 0.25))
    assert 1.6 < gain(0.04) < 2.4
    assert 2.9 < gain(0.03) < 6


def test_coefficients_do_not_depend_on_the_clocks_unit():
    in_steps = solve_weights(snapshots(range(1, 9)), power_profile(0.07, 8))
    in_tokens = solve_weights(snapshots(range(10**9, 9 * 10**9, 10**9)), power_profile(0.07, 8e9))
    assert in_tokens == pytest.approx(in_steps, abs=1e-9)


def test_the_error_is_the_integral_of_the_square():
    profiles, target = snapshots([1, 2, 3]), power_profile(0.15, 3)
    weights = solve_weights(profiles, target)

    def off(tau):
        return sum(w * density(p)(tau) for w, p in zip(weights, profiles, strict=True)) - density(
            target
        )(tau)

    wanted = integral(lambda tau: off(tau) ** 2, 3) / integral(
        lambda tau: density(target)(tau) ** 2, 3
    )
    assert profile_error(profiles, target) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("sigma", [0.06, 0.07, 0.08, 0.12, 0.15])
def test_the_error_falls_with_the_fourth_power_of_the_number_of_snapshots(sigma):
    """The slope from 16 to 64 snapshots, as in the paper's figure."""
    errors = [profile_error(snapshots(range(1, n + 1)), power_profile(sigma, n)) for n in (16, 64)]
    assert 3.7 <= -math.log(errors[1] / errors[0]) / math.log(4) <= 4.1


def test_snapshots_after_the_target_get_coefficient_zero():
    target = power_profile(0.15, 5)
    weights = solve_weights(snapshots(range(1, 9)), target)
    assert np.all(weights[10:] == 0)
    assert weights[:10] == pytest.approx(solve_weights(snapshots(range(1, 6)), target), abs=1e-15)


def test_a_target_after_the_last_snapshot_lacks_the_weights_since():
    """At σ = 0.05 and 5 % after the last snapshot, 58 % of the profile is missing."""
    target = power_profile(0.05, 105)
    beyond = 1 - (100 / 105) ** (target.gamma + 1)
    assert beyond == pytest.approx(0.58, abs=0.005)
    assert profile_error(snapshots(range(5, 101, 5)), target) > beyond


def test_without_a_snapshot_before_the_target_there_is_nothing_to_sum():
    with pytest.raises(ValueError, match="none of them at or before 3"):
        solve_weights(snapshots([4, 5]), power_profile(0.1, 3))


def test_two_snapshots_of_the_same_profile_are_an_error():
    with pytest.raises(ValueError, match=r"two snapshots at 4 with gamma 16\.9722"):
        solve_weights(snapshots([4, 5, 4]), power_profile(0.07, 5))
