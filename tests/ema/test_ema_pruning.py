"""Pruning: the kept snapshots and the remaining error."""

from itertools import pairwise

import pytest

from memlab.ema import (
    errors_at_end,
    every_kth,
    last_n,
    log_spaced,
    power_profile,
    profile_error,
    prune,
)

HUNDRED = list(range(1, 101))
SIGMAS = (0.06, 0.07, 0.15, 0.20, 0.25)


def at(times):
    return [power_profile(sigma, t) for t in times for sigma in (0.05, 0.10)]


def test_every_kth_ends_with_the_last():
    assert every_kth(HUNDRED, 25) == [25, 50, 75, 100]
    assert every_kth(HUNDRED, 30) == [30, 60, 90, 100]
    assert every_kth([1, 2], 5) == [2]
    assert every_kth(HUNDRED, 1) == HUNDRED


def test_the_last_are_the_last():
    assert last_n(HUNDRED, 3) == [98, 99, 100]
    assert last_n([1, 2], 3) == [1, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 20, 99, 100, 150])
def test_log_spaced_has_the_requested_count_and_ends_with_the_last(count):
    kept = log_spaced(HUNDRED, count)
    assert len(set(kept)) == min(count, 100)
    assert kept == sorted(kept)
    assert kept[-1] == 100
    assert count == 1 or kept[0] == 1


def test_log_spaced_gaps_grow_towards_the_start():
    kept = log_spaced(HUNDRED, 20)
    gaps = [b - a for a, b in pairwise(kept)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 10


@pytest.mark.parametrize("choose", [last_n, log_spaced, every_kth])
def test_a_count_below_one_is_an_error(choose):
    with pytest.raises(ValueError, match="give 1 or more"):
        choose(HUNDRED, 0)


def errors_of_twenty(sigmas):
    """Return the errors for 20 of 100 snapshots, by selection method."""
    return {
        "even": errors_at_end(at(every_kth(HUNDRED, 5)), sigmas),
        "last": errors_at_end(at(last_n(HUNDRED, 20)), sigmas),
        "log": errors_at_end(at(log_spaced(HUNDRED, 20)), sigmas),
    }


@pytest.mark.parametrize("sigma", [0.12, 0.15, 0.20, 0.25])
def test_for_long_averages_every_fifth_is_best(sigma):
    found = {name: errors[sigma] for name, errors in errors_of_twenty([sigma]).items()}
    assert found["even"] < found["log"] < found["last"]
    assert found["even"] < found["last"] / 50


@pytest.mark.parametrize("sigma", [0.06, 0.07, 0.085])
def test_for_short_averages_at_the_end_a_dense_end_is_best(sigma):
    found = {name: errors[sigma] for name, errors in errors_of_twenty([sigma]).items()}
    assert found["log"] < found["even"] < 1e-5


def test_for_all_widths_together_every_fifth_is_best_by_far():
    worst = {name: max(errors.values()) for name, errors in errors_of_twenty(SIGMAS).items()}
    assert worst["even"] < worst["log"] / 10 < worst["last"] / 100


@pytest.mark.parametrize("error", [1e-2, 1e-3, 1e-4])
def test_prune_keeps_the_fewest_that_meet_the_error(error):
    pruned = prune(at(HUNDRED), (0.07, 0.15), error=error)
    assert [p.t for p in pruned.kept[::2]] == every_kth(HUNDRED, pruned.every)
    assert pruned.errors == errors_at_end(pruned.kept, (0.07, 0.15))
    assert max(pruned.errors.values()) <= error
    fewer = at(every_kth(HUNDRED, pruned.every + 1))
    assert max(errors_at_end(fewer, (0.07, 0.15)).values()) > error


def test_all_are_kept_or_dropped():
    everything = at(HUNDRED)
    pruned = prune(everything, [0.15], error=1e-3)
    assert sorted(pruned.kept + pruned.dropped) == sorted(everything)
    assert len(pruned.kept) == 2 * len(every_kth(HUNDRED, pruned.every))


def test_the_reported_error_is_the_kept_snapshots():
    pruned = prune(at(HUNDRED), [0.15], error=1e-3)
    assert pruned.errors[0.15] == profile_error(pruned.kept, power_profile(0.15, 100))


def test_an_unreachable_error_is_an_error():
    with pytest.raises(ValueError, match=r"even all 4 times leave 0\.15 at sigma 0\.25"):
        prune(at([1, 2, 3, 4]), (0.07, 0.25), error=1e-3)
