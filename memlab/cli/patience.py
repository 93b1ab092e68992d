"""How long anybody waits for a table of all techniques: a minute and a half.

A CPU without instructions for bfloat16 takes 20 to 50 times as long for products in it, and almost
every CPU does for those in float16. That is found out by one small product. Another machine is
slow in everything, or has other work: so the time is looked at as well, before each row. A row that
would take too long is measured dry: the same bytes, and no time.
"""

import time
from collections.abc import Callable, Iterable
from functools import cache

import torch

from memlab.train import TECHNIQUES

MOST_SECONDS = 90.0
DRY_SECONDS = 0.3  # of one row
SLOW = 5  # times as long as in float32
WIDTH = 256  # of the product that is timed: 15 ms where it is slow, 0.5 ms where not


class Patience:
    """Says before each row of a table whether it would take too long, and why."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        most_seconds: float = MOST_SECONDS,
        slowdown: Callable[[torch.dtype], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = list(names)
        self._most_seconds = most_seconds
        self._slowdown = slowdown or (lambda dtype: slowdown_of(dtype))
        self._clock = clock
        self._begun = self._before = clock()
        self._longest = 0.0
        self._at_its_end: str | None = None

    def too_long(self, name: str) -> str | None:
        """Why the row, the next in line, is to be measured dry; None if it is not.

        It is expected to take as long as the longest so far.
        """
        now = self._clock()
        self._longest = max(self._longest, now - self._before)
        self._before = now
        self._left.remove(name)
        for part in name.split("+"):
            dtype = TECHNIQUES[part].matmul_dtype if part in TECHNIQUES else None
            if dtype and (slowdown := self._slowdown(getattr(torch, dtype))) > SLOW:
                return f"this CPU takes {slowdown:.0f} × as long for matmuls in {dtype}"
        end = now - self._begun + self._longest + DRY_SECONDS * len(self._left)
        if end > self._most_seconds and self._at_its_end is None:
            self._at_its_end = f"the rows above took {now - self._begun:.0f} s"
        return self._at_its_end


@cache
def slowdown_of(dtype: torch.dtype) -> float:
    """How many times as long as in float32 a small product takes here; timed once."""
    return _seconds_of_a_product(dtype) / _seconds_of_a_product(torch.float32)


def _seconds_of_a_product(dtype: torch.dtype) -> float:
    """The least of five, the first of which may prepare something."""
    factor = torch.ones(WIDTH, WIDTH, dtype=dtype)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        factor @ factor
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
