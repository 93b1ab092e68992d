"""How much memory a card must have for a step.

A step reserves more on a large card than on a nearly full one. When the driver refuses, torch
releases its entirely free segments and requests again. So a step whose reserved peak exceeds the
card may still run, at the price of releasing and allocating segments in each step.
"""

from memlab.allocator.simulation import simulate
from memlab.trace import Trace

PRECISION = 0.01  # of the reserved peak


def needed_bytes(trace: Trace, budget: int) -> int:
    """Return the bytes that a step needs on a card that has `budget` bytes for tensors.

    If the most that the step may reserve is within the budget, this is the result. Otherwise it is
    the smallest capacity that lets the simulated allocator serve all requests: at most `budget` if
    the step runs within it, and accurate to 1 % of the reserved peak. A device without a caching
    allocator needs the allocated bytes.
    """
    reserved = trace.reserved_bytes
    most = trace.memory.reserved_most_bytes or reserved
    if most is None or reserved is None:
        return trace.allocated_bytes
    # At the limit torch releases its free segments and requests again: Llama-2-7B with streamed
    # layers reserves 15.0 GiB on a large card, and runs in 12.6 GiB on a T4
    # (test_a_cache_that_can_be_released_is_needed_only_if_there_is_room).
    return most if most <= budget else _least_capacity(trace, budget, most)


def _least_capacity(trace: Trace, budget: int, most: int) -> int:
    """Search between the allocated bytes and `most`. Whether the budget suffices is exact."""
    too_small, enough = trace.allocated_bytes - 1, most
    guess = budget
    while True:
        if too_small < guess < enough:
            if _runs_in(trace, guess):
                enough = guess
            else:
                too_small = guess
        if enough - too_small <= max(1, PRECISION * most):
            return enough
        guess = (too_small + enough) // 2


def _runs_in(trace: Trace, capacity: int) -> bool:
    return simulate(trace, capacity_bytes=capacity).fits
