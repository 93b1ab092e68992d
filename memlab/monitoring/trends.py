"""Find a leak or fragmentation in the memory of successive steps. Plain numbers in and out.

A leak shows in the memory allocated *after* each step, when activations are gone. This number also
changes for good reasons: another sequence length, an evaluation, an accumulated
gradient. So the lowest values of windows are compared instead of single values:

    level 0    windows of 1 step     12 in a row, each lowest value above the one before: 12 steps
    level 1    windows of 2 steps    24 steps
    level j    windows of 2ʲ steps   finds slow leaks and leaks below noise, in the time they take

By chance, 12 unrelated values rise in a row once in 12! = 479,001,600 times. The peak separates
leaks from larger steps: longer sequences raise the peak by much more than the memory after the
step. A leak raises both by the same amount.
"""

from itertools import pairwise
from typing import NamedTuple

from memlab.monitoring.counters import Reading

WINDOWS = 12  # that rise in a row
WARM_UP_STEPS = 3  # optimizer state, compiled kernels and workspaces come with the first steps
MOST_PEAK_GROWTH = 2  # times the growth after the step; more means larger steps, not a leak
HARMLESS_STEPS = 10**6  # a leak that takes longer than this to fill the memory


class Window(NamedTuple):
    """The lowest values of some steps."""

    allocated_bytes: int
    peak_bytes: int


class Leak(NamedTuple):
    """Growth of the memory allocated after a step."""

    from_bytes: int
    to_bytes: int
    steps: int

    @property
    def bytes_per_step(self) -> float:
        return (self.to_bytes - self.from_bytes) / self.steps


class LeakDetector:
    """Detect growth over windows of 1, 2, 4, … steps, with 12 windows kept of each length."""

    def __init__(
        self, smallest_bytes: int, smallest_share: float, *, peak_is_per_step: bool
    ) -> None:
        self._smallest_bytes, self._smallest_share = smallest_bytes, smallest_share
        self._peak_is_per_step = peak_is_per_step
        self._levels: list[list[Window]] = []
        self._unpaired: list[Window | None] = []  # by level: waits for its neighbour
        self._to_skip = WARM_UP_STEPS

    def add(self, allocated_bytes: int, peak_bytes: int) -> Leak | None:
        """Add a step and return the leak that it completes, if any."""
        if self._to_skip:
            self._to_skip -= 1
            return None
        return self._add(Window(allocated_bytes, peak_bytes), level=0)

    def _add(self, window: Window, level: int) -> Leak | None:
        if level == len(self._levels):
            self._levels.append([])
            self._unpaired.append(None)
        windows = self._levels[level]
        windows.append(window)
        del windows[:-WINDOWS]
        leak = self._leak(windows, 2**level)
        earlier, self._unpaired[level] = self._unpaired[level], window
        if earlier is None:
            return leak
        self._unpaired[level] = None
        merged = Window(*map(min, earlier, window))
        return self._add(merged, level + 1) or leak

    def _leak(self, windows: list[Window], steps_per_window: int) -> Leak | None:
        first, last = windows[0], windows[-1]
        growth = last.allocated_bytes - first.allocated_bytes
        if len(windows) < WINDOWS or growth < self._smallest(last):
            return None
        if any(b.allocated_bytes <= a.allocated_bytes for a, b in pairwise(windows)):
            return None
        peak_growth = last.peak_bytes - first.peak_bytes
        if self._peak_is_per_step and peak_growth > MOST_PEAK_GROWTH * growth:
            return None
        steps = (WINDOWS - 1) * steps_per_window
        return Leak(first.allocated_bytes, last.allocated_bytes, steps)

    def _smallest(self, window: Window) -> float:
        return max(self._smallest_bytes, self._smallest_share * window.allocated_bytes)


def steps_until_full(leak: Leak, capacity_bytes: int | None) -> int | None:
    """Return in how many steps the leak fills the memory; None if its size is unknown."""
    if capacity_bytes is None:
        return None
    return max(0, round((capacity_bytes - leak.to_bytes) / leak.bytes_per_step))


# ------------------------------------------------------------------ fragmentation

LARGE_SHARE = 0.2  # of the reserved bytes
LARGE_BYTES = 256 * 2**20
FULL_SHARE = 0.5  # of the capacity: below, fragmentation does no harm
RISES = 3
RISE_SHARE = 0.02  # of the reserved bytes


class Fragmentation(NamedTuple):
    """Reserved memory that was never used, even at the run's peak."""

    reserved_bytes: int
    peak_bytes: int  # the most that was allocated
    retries: int  # so far

    @property
    def unused_bytes(self) -> int:
        return max(0, self.reserved_bytes - self.peak_bytes)

    @property
    def is_large(self) -> bool:
        return self.unused_bytes >= max(LARGE_BYTES, LARGE_SHARE * self.reserved_bytes)


class FragmentationDetector:
    """Detect retries of the allocator, or reserved memory that outgrows the peak again and again.

    A single rise is normal: the largest step so far reserved what later steps reuse.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self._capacity_bytes = capacity_bytes
        self._retries: int | None = None
        self._unused_bytes = 0
        self._rises = 0
        self._to_skip = WARM_UP_STEPS

    def add(self, reading: Reading, run_peak_bytes: int) -> Fragmentation | None:
        """Add a step and return the fragmentation that it shows, if any."""
        if reading.reserved_bytes is None:
            return None
        now = Fragmentation(reading.reserved_bytes, run_peak_bytes, reading.retries)
        had_retries, self._retries = self._retries, reading.retries
        if had_retries is not None and reading.retries > had_retries:
            return now
        if self._to_skip:
            self._to_skip -= 1
            self._unused_bytes = now.unused_bytes
        elif now.unused_bytes - self._unused_bytes > RISE_SHARE * now.reserved_bytes:
            self._rises += 1
            self._unused_bytes = now.unused_bytes
        return now if self._rises >= RISES and now.is_large and self._is_full(now) else None

    def _is_full(self, now: Fragmentation) -> bool:
        return now.reserved_bytes >= FULL_SHARE * (self._capacity_bytes or 0)
