"""Detect `while` loops that would never end in a dry run.

    while next_t > t1:      # an ODE solver with adaptive steps
        t1 = attempt(...)   # accepted if the error is small enough

A dry run gives the same answer in every iteration, so such a loop could run forever. It raises
instead of guessing, because the number of iterations decides the memory. A `for` loop always ends.
"""

import itertools
from types import CodeType, FrameType

from memlab.dry_runs.validations import begins_another_round, ends_of
from memlab.metering.frames import frames, user_line

PATIENCE = 100  # iterations
_NEAR = 3  # frames from the read to the loop; `while not done: train()` is further away


class Patience:
    """Count how often each instruction reads a bool inside a `while` loop."""

    def __init__(self) -> None:
        self._count: dict[tuple[CodeType, int], int] = {}

    def round(self, answer: bool) -> None:
        """Count an answer. Raises ValueError after too many iterations of a loop."""
        near = list(itertools.islice(frames(), _NEAR))
        if not _goes_on(near, answer):
            return
        place = near[0].f_code, near[0].f_lasti
        self._count[place] = self._count.get(place, 0) + 1
        if self._count[place] > PATIENCE:
            raise ValueError(
                f"{user_line()}: a loop here depends on a value that a dry run does not have, and "
                f"did not end after {PATIENCE} iterations; use a fixed number of iterations, such "
                f"as an ODE solver with fixed steps, or measure a real step"
            )


def _goes_on(near: list[FrameType], answer: bool | None) -> bool:
    """Return whether a `while` in one of these frames can iterate again after this answer.

    `trunc_normal_` redraws until all values are in range, so the answer True ends its loop.
    """
    for frame in near:
        place = frame.f_code, frame.f_lasti
        if begins_another_round(*place, answer):
            return True
        ends = set() if answer is None else ends_of(*place, answer)
        answer = next(iter(ends)) if ends in ({True}, {False}) else None
    return False
