"""Schedules: their meaning, invalid schedules, and the simple ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.checkpointing.schedules import (
    check_schedule,
    executions,
    flat,
    plain_schedule,
    sqrt_schedule,
    uniform_schedule,
)

SIZES = st.integers(1, 200)


def sizes(schedule) -> list[int]:
    return [len(segment) for segment in schedule]


# ------------------------------------------------------------------ simple schedules


def test_a_plain_schedule_keeps_every_stage():
    assert plain_schedule(4) == (0, 1, 2, 3)


def test_a_uniform_schedule_keeps_one_input_per_segment():
    assert uniform_schedule(4, every=1) == ((0,), (1,), (2,), (3,))
    assert uniform_schedule(7, every=3) == ((0, 1, 2), (3, 4, 5), (6,))
    assert uniform_schedule(2, every=9) == ((0, 1),)


def test_the_square_root_schedule_checkpoints_its_last_segment_too():
    assert sqrt_schedule(4) == ((0, 1), (2, 3))
    assert sizes(sqrt_schedule(12)) == [4, 4, 4]
    assert sizes(sqrt_schedule(1)) == [1]


@given(SIZES)
def test_the_square_root_schedule_has_about_as_many_segments_as_stages_in_each(stages):
    lengths = sizes(sqrt_schedule(stages))
    assert len(lengths) ** 2 <= stages < (len(lengths) + 1) ** 2
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= len(lengths) + 2


@given(SIZES)
def test_the_square_root_schedule_is_within_one_of_the_best_even_split(stages):
    def together(segments: int) -> int:
        return segments + -(-stages // segments)  # inputs kept, and the longest segment

    schedule = sqrt_schedule(stages)
    assert together(len(schedule)) <= min(map(together, range(1, stages + 1))) + 1


@given(SIZES, st.integers(1, 60))
def test_the_simple_schedules_are_schedules(stages, every):
    for schedule in (
        plain_schedule(stages),
        sqrt_schedule(stages),
        uniform_schedule(stages, every),
    ):
        check_schedule(schedule, stages)
        assert list(flat(schedule)) == list(range(stages))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plain_schedule(0), "got stages=0; give at least 1"),
        (lambda: sqrt_schedule(-1), "got stages=-1; give at least 1"),
        (lambda: uniform_schedule(0, 1), "got stages=0; give at least 1"),
        (lambda: uniform_schedule(4, 0), "got every=0; give at least 1"),
    ],
)
def test_no_stages_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ------------------------------------------------------------------ meaning


@pytest.mark.parametrize(
    ("schedule", "runs"),
    [
        ((0, 1, 2), [1, 1, 1]),
        ((0, (1, 2)), [1, 2, 2]),
        (((0, 1, 2),), [2, 2, 2]),
        (((0, 1), 2), [2, 2, 1]),
        ((((0, 1), 2),), [3, 3, 2]),  # 0 and 1: the first time, for 2's backward, for their own
        ((((0,), 1), 2), [3, 2, 1]),
        ((((((0,), 1), 2), 3),), [5, 4, 3, 2]),
        # The rerun of (1, 2) needs only its input, so 1 and 2 run twice, not three times.
        (((0, (1, 2)),), [2, 2, 2]),
        ((((0, 1), (2, 3)),), [3, 3, 2, 2]),
        (((0, (1, (2,))),), [2, 2, 2]),
    ],
)
def test_a_stage_runs_once_plus_once_per_enclosing_segment_that_does_not_end_another(
    schedule, runs
):
    assert executions(schedule) == runs


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((0, 1), r"\(0, 1\) ends before stage 2; wanted each of the stages 0 to 2 once, in order"),
        ((0, 2), r"\(0, 2\) leaves out stage 1, or names it later"),
        ((1, 0, 2), "leaves out stage 0, or names it later"),
        ((0, (1, 1), 2), "comes to stage 1 after stage 1: twice, or out of order"),
        ((0, 1, 2, 0), "comes to stage 0 after stage 2: twice, or out of order"),
        ((0, 1, (2, 3)), "names stage 3, and the chain has 3"),
        ((-1, 0, 1, 2), "names stage -1, and the chain has 3"),
        ((0, (), 1, 2), r"\(0, \(\), 1, 2\) has an empty segment; leave it out"),
        ((), r"\(\) has an empty segment"),
    ],
)
def test_missing_misordered_or_repeated_stages_are_errors(schedule, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule, 3)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([0, 1, 2], r"got \[0, 1, 2\] in the schedule \[0, 1, 2\]; a schedule is nested tuples"),
        ((0, [1], 2), r"got \[1\] in the schedule"),
        ((0, 1.0, 2), r"got 1\.0 in the schedule"),
        ((False, True, 2), "got False in the schedule"),
        (3, r"got 3 as schedule; one stage alone is the tuple \(3,\)"),
    ],
)
def test_anything_else_than_nested_tuples_of_ints_is_an_error(schedule, message):
    with pytest.raises(TypeError, match=message):
        check_schedule(schedule, 3)
