"""The largest number that fits is found by few predictions."""

import pytest

from memlab.planner.limits import MOST_PREDICTIONS, largest


@pytest.mark.parametrize(
    ("bytes_of", "budget", "maximum", "step", "start", "wanted"),
    [
        (lambda n: 100 + 10 * n, 1000, 4096, 1, 1, 90),
        (lambda n: 100 + 10 * n, 1000, 50, 1, 1, 50),
        (lambda n: 100 + 10 * n, 119, 4096, 1, 1, 1),  # not even a second one
        (lambda n: 100 + n, 1000, 10**6, 128, 128, 896),
        (lambda n: 100 + n, 1000, 10**6, 128, 100, 868),  # multiples of 128 above 100
        (lambda n: 100 + n * n // 10, 10_000, 10**6, 1, 4, 280),  # no line: 90 % of 314
        (lambda n: 500, 1000, 64, 1, 1, 64),  # no growth at all
        (lambda n: max(300, 100 + 10 * n), 1000, 4096, 1, 1, 90),  # none up to 20
        (lambda n: max(400 + n, 37 * n), 20_000, 4096, 1, 1, 540),  # slowly at first
        (lambda n: max(400, 100 + n * n // 10), 10_000, 10**6, 1, 4, 280),
    ],
)
def test_the_largest_number_that_fits(bytes_of, budget, maximum, step, start, wanted):
    asked = []

    def needed(number):
        asked.append(number)
        return bytes_of(number)

    found = largest(needed, {start: bytes_of(start)}, budget, maximum, step=step).number
    assert bytes_of(found) <= budget
    assert 0.98 * wanted <= found
    assert (found - start) % step == 0 or found == maximum
    assert len(asked) <= MOST_PREDICTIONS


def test_a_slope_saves_the_doubling():
    asked = []

    def needed(number):
        asked.append(number)
        return 100 + 10 * number

    assert largest(needed, {1: 110}, 1000, 4096, slope=10.0).number == 90
    assert asked == [90]


def test_a_slope_that_is_too_steep_is_not_the_last_word():
    """Weights are most of the bytes, so 2 % of the budget are a fifth of the length."""
    found = largest(
        lambda n: 19_150 + 7 * n // 10, {2048: 20_583}, 21_640, 4096, step=128, slope=1.15
    )
    assert found.number == 3456


def test_more_than_fits_is_never_returned():
    """Bytes jump beyond 40, where a line does not expect it."""
    found = largest(lambda n: 10 * n if n <= 40 else 1000 + n, {1: 10}, 1000, 4096)
    assert found.number <= 40
