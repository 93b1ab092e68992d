"""Limit a table of all techniques to a minute and a half.

A CPU without bfloat16 instructions takes 20 to 50 times as long for bfloat16 matmuls, and almost
every CPU does for float16. One small timed matmul detects that. Other machines are slow or busy in
general, so the elapsed time is checked before each row as well. A row that would take too long gets
a dry run: the same bytes, but no time.
"""

import time
from collections.abc import Callable, Iterable
from functools import cache

import torch

from memlab.train import TECHNIQUES

MAX_SECONDS = 90.0
DRY_RUN_SECONDS = 0.3  # per row
SLOW = 5  # with a larger slowdown against float32, a dtype's rows get dry runs
MATMUL_SIZE = 256  # takes 0.5 ms, or 15 ms in a slow dtype


class TimeBudget:
    """Decides before each row of a table whether the row would take too long."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        max_seconds: float = MAX_SECONDS,
        slowdown: Callable[[torch.dtype], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = list(names)
        self._max_seconds = max_seconds
        self._slowdown = slowdown or (lambda dtype: slowdown_of(dtype))
        self._clock = clock
        self._started = self._before = clock()
        self._longest = 0.0
        self._overrun: str | None = None

    def reason_to_skip(self, name: str) -> str | None:
        """Return why the next row should be a dry run, or None.

        The row is expected to take as long as the longest one so far.
        """
        now = self._clock()
        self._longest = max(self._longest, now - self._before)
        self._before = now
        self._left.remove(name)
        for part in name.split("+"):
            dtype = TECHNIQUES[part].matmul_dtype if part in TECHNIQUES else None
            if dtype and (slowdown := self._slowdown(getattr(torch, dtype))) > SLOW:
                return f"matmuls in {dtype} are {slowdown:.0f} × slower on this CPU"
        end = now - self._started + self._longest + DRY_RUN_SECONDS * len(self._left)
        if end > self._max_seconds and self._overrun is None:
            self._overrun = f"the rows above took {now - self._started:.0f} s"
        return self._overrun


@cache
def slowdown_of(dtype: torch.dtype) -> float:
    """Time a small matmul in the dtype, relative to float32. The result is cached."""
    return _matmul_seconds(dtype) / _matmul_seconds(torch.float32)


def _matmul_seconds(dtype: torch.dtype) -> float:
    """Return the fastest of five runs; the first run may include setup."""
    factor = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        factor @ factor
        seconds.append(time.perf_counter() - started)
    return min(seconds)
