"""Detect `while` loops that would never end in a dry run.

    while next_t > t1:      # an ODE solver with adaptive steps
        t1 = attempt(...)   # accepted if the error is small enough

A dry run gives the same answer in every iteration, so such a loop could run forever. It raises
instead of guessing, because the number of iterations decides the memory. A `for` loop always ends.
"""

import itertools
from types import CodeType, FrameType

from memlab.dry_runs.validations import can_iterate_again, ends_of
from memlab.metering.frames import frames, user_line

MAX_ITERATIONS = 100
_MAX_DISTANCE = 3  # frames from the read to the loop; `while not done: train()` is further away


class LoopGuard:
    """Count how often each instruction reads a bool inside a `while` loop."""

    def __init__(self) -> None:
        self._counts: dict[tuple[CodeType, int], int] = {}

    def count(self, answer: bool) -> None:
        """Count an answer. Raises ValueError after too many iterations of a loop."""
        near = list(itertools.islice(frames(), _MAX_DISTANCE))
        # Rounds of the `while` after the answer, not calls: `trunc_normal_` ends after its first
        # round (test_loops_that_end_after_one_iteration_are_allowed).
        if not _loop_can_continue(near, answer):
            return
        place = near[0].f_code, near[0].f_lasti
        self._counts[place] = self._counts.get(place, 0) + 1
        # Changing the answer from time to time would also end the loop, but change other branches.
        if self._counts[place] > MAX_ITERATIONS:
            raise ValueError(
                f"{user_line()}: a loop here depends on a value that a dry run does not have, and "
                f"did not end after {MAX_ITERATIONS} iterations; use a fixed number, such as an "
                f"ODE solver with fixed steps, or measure a real step"
            )


def _loop_can_continue(near: list[FrameType], answer: bool | None) -> bool:
    """Return whether a `while` in one of these frames can iterate again after this answer.

    `trunc_normal_` redraws until all values are in range, so the answer True ends its loop.
    """
    for frame in near:
        place = frame.f_code, frame.f_lasti
        if can_iterate_again(*place, answer):
            return True
        ends = set() if answer is None else ends_of(*place, answer)
        answer = True in ends if ends in ({True}, {False}) else None
    return False
