"""Loops that run until a value that a dry run does not have is right.

    while next_t > t1:      # an ODE solver with adaptive steps
        t1 = attempt(...)   # which is accepted if its error is small enough

A dry run answers the same in every round, and such a loop could run for ever. How often it really
runs depends on values, and with it the memory: so this is refused. A `for` ends by itself.
"""

import dis
import functools
import itertools
from types import CodeType

from memlab.metering.frames import frames, user_line

PATIENCE = 100  # rounds
_NEAR = 3  # frames between the read and the loop: `while not done: train()` is far


class Patience:
    """Counts the answers to each place that reads a truth value inside a `while`."""

    def __init__(self) -> None:
        self._count: dict[tuple[CodeType, int], int] = {}

    def round(self) -> None:
        """One more answer; ValueError where they lead to nothing."""
        near = list(itertools.islice(frames(), _NEAR))
        if not any(_is_in_a_while(frame.f_code, frame.f_lasti) for frame in near):
            return
        place = near[0].f_code, near[0].f_lasti
        self._count[place] = self._count.get(place, 0) + 1
        if self._count[place] > PATIENCE:
            raise ValueError(
                f"{user_line()}: a loop here runs until a value is right, and a dry run does not "
                f"know it ({PATIENCE} rounds were in vain); let the loop run a fixed number of "
                f"times, such as an ODE solver with fixed steps, or measure a real step"
            )


@functools.cache
def _is_in_a_while(code: CodeType, offset: int) -> bool:
    """Whether a jump leads from behind the instruction to before it, other than a `for`'s."""
    by_offset = {i.offset: i for i in dis.get_instructions(code)}
    return any(
        "JUMP" in i.opname and i.argval <= offset <= i.offset and not _iterates(by_offset, i.argval)
        for i in by_offset.values()
    )


def _iterates(by_offset: dict[int, dis.Instruction], offset: int) -> bool:
    while by_offset[offset].opname == "EXTENDED_ARG":  # of an instruction that jumps far
        offset += 2
    return by_offset[offset].opname in ("FOR_ITER", "SEND")
