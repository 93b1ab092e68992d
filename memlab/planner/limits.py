"""The largest batch or length that fits, found by few predictions."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

MOST_PREDICTIONS = 6
CLOSE = 0.98  # of the budget: not worth another prediction


class Limit(NamedTuple):
    """The largest number that was predicted to fit, and the bytes that each further one adds."""

    number: int
    slope: float


def largest(
    needed: Callable[[int], int],
    known: dict[int, int],
    budget: int,
    maximum: int,
    *,
    step: int = 1,
    slope: float | None = None,
) -> Limit:
    """Return a number up to `maximum` that needs at most `budget` bytes, the largest or nearly.

    Bytes grow with the number, or with its square (eager attention). So each guess is where a line
    or a parabola through the known points meets the budget; the first is given by the slope, or is
    twice the number. The result was predicted to fit.

    Args:
        needed: predicts the bytes of a number.
        known: bytes that are known already; at least one number that fits.
        step: numbers are multiples of it above the smallest known one.
    """
    known = dict(known)
    start, fits, too_many = min(known), max(known), maximum + 1
    for _ in range(MOST_PREDICTIONS):
        if too_many - fits <= step or known[fits] > CLOSE * budget:
            break
        if len(known) > 1:
            guess = _where(known, budget, fits)
        else:
            guess = (
                2 * fits if slope is None else fits + int((budget - known[fits]) / max(1, slope))
            )
        guess = start + (guess - start) // step * step
        guess = min(max(guess, fits + step), fits + (too_many - 1 - fits) // step * step)
        known[guess] = needed(guess)
        slope = (known[guess] - known[fits]) / (guess - fits)
        if known[guess] <= budget:
            fits = guess
        else:
            too_many = guess
    return Limit(fits, slope or 0.0)


def _where(known: dict[int, int], budget: int, fits: int) -> int:
    """Return the number at which a curve through the three points nearest the budget meets it."""
    numbers = sorted(known, key=lambda number: abs(known[number] - budget))[:3]
    curve = np.polynomial.Polynomial.fit(
        numbers, [known[number] - budget for number in numbers], len(numbers) - 1
    )
    beyond = [root.real for root in curve.roots() if abs(root.imag) < 1e-6 and root.real > fits]
    return int(min(beyond, default=2 * fits))
