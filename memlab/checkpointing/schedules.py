"""Checkpointing schedules: which stages keep their activations and which run again in backward.

A schedule is nested tuples. An int is a plain stage: it runs and saves tensors for backward. A
tuple is a segment: its stages save only the segment's input and run again in backward. The
outermost tuple is the chain itself.

    (0, 1, 2, 3)            everything is kept
    ((0,), (1,), (2,), (3,))    each stage by itself: four inputs are kept, each stage runs twice
    ((0, 1), (2, 3))        two inputs are kept; backward holds two stages at a time
    (((0, 1), 2, 3),)       the segment's second run keeps 2 and 3; 0 and 1 run a third time

memlab.checkpointing.optimal finds the best schedule for a budget; memlab.checkpointing.execution
runs a schedule.
"""

from collections.abc import Iterator
from itertools import accumulate, count, pairwise
from math import isqrt
from typing import Any, TypeAlias

Schedule: TypeAlias = tuple["int | Schedule", ...]


def plain_schedule(stages: int) -> Schedule:
    """Return the schedule that keeps everything."""
    return tuple(range(_at_least_one("stages", stages)))


def uniform_schedule(stages: int, every: int) -> Schedule:
    """Return segments of `every` stages; the last segment may be shorter.

    `every=1` keeps only the inputs of all stages. ("Checkpoint every second layer" sometimes means
    that the other layers stay plain: `tuple((i,) if i % 2 else i for i in range(stages))`.)
    """
    _at_least_one("stages", stages)
    _at_least_one("every", every)
    starts = range(0, stages, every)
    return tuple(tuple(range(start, min(start + every, stages))) for start in starts)


def sqrt_schedule(stages: int) -> Schedule:
    """Return ⌊√n⌋ segments of nearly equal length: about √n inputs, and √n stages at a time.

    Every segment is checkpointed. `torch.utils.checkpoint.checkpoint_sequential` instead leaves its
    last segment plain and gives it the remainder: 12 stages in 5 segments are 2, 2, 2, 2 and a
    plain 4. That avoids rerunning it if the chain is the whole model. In a language model, the
    logits follow the chain and need that memory.

    Source   Chen et al. 2016, arXiv 1604.06174.
    """
    # Best asymptotically. A transformer block saves twenty times its input, so up to about forty
    # blocks it is best to checkpoint each; for Llama 3 70B pairs are. Where the logits are the peak
    # (124M, 8 × 640 tokens) three segments of four are.
    segments = isqrt(_at_least_one("stages", stages))
    size, remainder = divmod(stages, segments)
    sizes = [size + 1] * remainder + [size] * (segments - remainder)
    borders = pairwise(accumulate(sizes, initial=0))
    return tuple(tuple(range(start, end)) for start, end in borders)


def flat(schedule: Schedule) -> Iterator[int]:
    """Yield the stages in the order of the schedule."""
    for part in schedule:
        if isinstance(part, int):
            yield part
        else:
            yield from flat(part)


def executions(schedule: Schedule) -> list[int]:
    """Return how often each stage's forward pass starts: once, plus once per enclosing segment.

    A segment at the end of another segment does not count: the rerun stops at its input.
    """
    runs: list[int] = []

    def visit(part: Schedule, so_far: int) -> None:
        for item in part[:-1]:
            place(item, so_far, is_last=False)
        place(part[-1], so_far, is_last=True)

    def place(item: int | Schedule, so_far: int, is_last: bool) -> None:
        if isinstance(item, int):
            runs.append(so_far)
        else:
            is_skipped = is_last and so_far > 1
            visit(item, so_far + (not is_skipped))

    visit(schedule, 1)
    return runs


def check_schedule(schedule: Any, stages: int) -> None:
    """Raise TypeError if `schedule` is malformed, ValueError unless it covers all the stages."""
    _check_type(schedule, schedule)
    wanted = f"wanted each of the stages 0 to {stages - 1} once, in order"
    for expected, stage in zip(count(), flat(schedule), strict=False):
        if stage == expected < stages:
            continue
        if not 0 <= stage < stages:
            what = f"names stage {stage}, and the chain has {stages}"
        elif stage < expected:
            what = f"comes to stage {stage} after stage {expected - 1}: twice, or out of order"
        else:
            what = f"leaves out stage {expected}, or names it later"
        raise ValueError(f"the schedule {schedule} {what}; {wanted}")
    found = len(list(flat(schedule)))
    if found < stages:
        raise ValueError(f"the schedule {schedule} ends before stage {found}; {wanted}")


def _check_type(part: Any, schedule: Any) -> None:
    if isinstance(part, bool) or not isinstance(part, (int, tuple)):
        raise TypeError(
            f"got {part!r} in the schedule {schedule!r}; a schedule is nested tuples of ints, "
            f"such as (0, (1, 2), 3)"
        )
    if isinstance(schedule, int):
        raise TypeError(f"got {schedule} as schedule; one stage alone is the tuple ({schedule},)")
    if part == ():
        raise ValueError(f"the schedule {schedule!r} has an empty segment; leave it out")
    for item in part if isinstance(part, tuple) else ():
        _check_type(item, schedule)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"got {name}={value}; give at least 1")
    return value
