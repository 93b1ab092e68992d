"""Loops that run until a value that a dry run does not have is right.

    while next_t > t1:      # an ODE solver with adaptive steps
        t1 = attempt(...)   # which is accepted if its error is small enough

A dry run answers the same in every round, and such a loop could run for ever. How often it really
runs depends on values, and with it the memory: so this is refused. A `for` ends by itself.
"""

import itertools
from types import CodeType, FrameType

from memlab.dry_runs.validations import begins_another_round, ends_of
from memlab.metering.frames import frames, user_line

PATIENCE = 100  # rounds
_NEAR = 3  # frames between the read and the loop: `while not done: train()` is far


class Patience:
    """Counts the answers to each place that reads a truth value inside a `while`."""

    def __init__(self) -> None:
        self._count: dict[tuple[CodeType, int], int] = {}

    def round(self, answer: bool) -> None:
        """One more answer; ValueError where they lead to nothing."""
        near = list(itertools.islice(frames(), _NEAR))
        if not _goes_on(near, answer):
            return
        place = near[0].f_code, near[0].f_lasti
        self._count[place] = self._count.get(place, 0) + 1
        if self._count[place] > PATIENCE:
            raise ValueError(
                f"{user_line()}: a loop here runs until a value is right, and a dry run does not "
                f"know it ({PATIENCE} rounds were in vain); let the loop run a fixed number of "
                f"times, such as an ODE solver with fixed steps, or measure a real step"
            )


def _goes_on(near: list[FrameType], answer: bool | None) -> bool:
    """Whether a `while` of one of these functions can begin another round after this answer.

    `trunc_normal_` draws until all is in range: it hears that all is, and ends.
    """
    for frame in near:
        place = frame.f_code, frame.f_lasti
        if begins_another_round(*place, answer):
            return True
        ends = set() if answer is None else ends_of(*place, answer)
        answer = next(iter(ends)) if ends in ({True}, {False}) else None
    return False
