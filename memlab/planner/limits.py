"""The largest batch or length that fits, found by few predictions."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

MOST_PREDICTIONS = 7
FURTHEST = 16  # times the largest number that fits, for the next one to try
CLOSE = 0.02  # of the number: so few more are not worth another prediction


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

    Bytes grow with the number, or with its square (eager attention), and often not at all at first:
    a small batch's peak is in the optimizer's step. So the number at least doubles until one does
    not fit; then a line or a parabola through the known points says where the budget is met. The
    result was predicted to fit.

    Args:
        needed: predicts the bytes of a number.
        known: known bytes; at least one number fits.
        step: numbers are multiples of it above the smallest known one.
    """
    known = dict(known)
    start, fits, too_many = min(known), max(known), maximum + 1
    measured = 0.0  # slope; a given one may be far too steep
    for _ in range(MOST_PREDICTIONS):
        few = max(step, CLOSE * fits)
        between = too_many - fits
        if between <= (few if too_many in known else step):
            break
        if budget - known[fits] < few * measured:
            break
        guess = _between(known, budget, fits, too_many) or _above(known, budget, fits, slope)
        guess = start + (guess - start) // step * step
        guess = min(max(guess, fits + step), fits + (too_many - 1 - fits) // step * step)
        known[guess] = needed(guess)
        slope = measured = (known[guess] - known[fits]) / (guess - fits)
        if known[guess] <= budget:
            fits = guess
        else:
            too_many = guess
    return Limit(fits, slope or 0.0)


def _above(known: dict[int, int], budget: int, fits: int, slope: float | None) -> int:
    """Return a larger number, while all known ones fit: where the latest slope meets the budget."""
    below = max((number for number in known if number < fits), default=None)
    if below is not None:
        slope = (known[fits] - known[below]) / (fits - below)
    if slope is None:
        return 2 * fits
    straight = fits + int((budget - known[fits]) / slope) if slope > 0 else FURTHEST * fits
    return straight if below is None else min(straight, FURTHEST * fits)


def _between(known: dict[int, int], budget: int, fits: int, too_many: int) -> int | None:
    """Return where a curve through the points nearest the budget meets it, between the largest
    number that fits and the smallest that does not; None if all known ones fit."""
    if too_many not in known:
        return None
    numbers = sorted(known, key=lambda number: abs(known[number] - budget))[:3]
    curve = np.polynomial.Polynomial.fit(
        numbers, [known[number] - budget for number in numbers], len(numbers) - 1
    )
    found: np.ndarray = curve.roots()
    roots = (root.real for root in found if abs(root.imag) < 1e-6)
    inside = [root for root in roots if fits < root < too_many]
    if not inside:  # a line between the two
        share = (budget - known[fits]) / (known[too_many] - known[fits])
        return fits + int(share * (too_many - fits))
    return int(min(inside))
