"""Day 15: what its checks tell a learner, and what the lesson claims."""

import numpy as np
import pytest
import torch

from memlab.course import bill_steps
from memlab.course.checks import day15
from memlab.course.checks.day15 import DAY, MappedSnapshot, SumWriter
from memlab.course.exercises import Wrong, judge
from memlab.reference.post_hoc_ema import synthesize

EXERCISES = {exercise.id: exercise for exercise in DAY.exercises}


def verdict(number, answer):
    return judge(EXERCISES[f"15.{number}"], answer)


# ------------------------------------------------------------------ answers


def in_one_buffer(snapshots, shares, sizes, write, chunk_size):
    """Every chunk is summed in the same memory."""
    buffer = torch.empty(len(shares[0]), chunk_size)
    for name, size in sizes.items():
        for start in range(0, size, chunk_size):
            count = min(chunk_size, size - start)
            sums = buffer[:, :count].zero_()
            for snapshot, of_each in zip(snapshots, shares, strict=True):
                part = snapshot.read(name, start, start + count).float()
                sums.addr_(torch.tensor(of_each), part)
            for target, total in enumerate(sums):
                write(target, name, start, total)


def twice(snapshots, shares, sizes, write, chunk_size):
    for _ in range(2):
        synthesize(snapshots, shares, sizes, write, chunk_size)


def test_elements_written_twice_are_refused():
    assert "were already written" in verdict(4, twice).text


def test_chunks_written_from_one_buffer_are_refused():
    assert "changed later" in verdict(4, in_one_buffer).text


# ------------------------------------------------------------------ what the check provides


def test_a_snapshot_counts_elements_read_and_refuses_what_it_lacks():
    snapshot = MappedSnapshot({"w": torch.arange(6.0).half()})
    assert snapshot.read("w", 2, 5).tolist() == [2, 3, 4]
    assert snapshot.elements_read == 3
    for name, start, stop in (("v", 0, 1), ("w", 0, 7), ("w", 3, 3), ("w", -1, 2)):
        with pytest.raises(Wrong, match="read"):
            snapshot.read(name, start, stop)


def test_written_elements_are_float32_fit_and_come_once():
    writer = SumWriter(1, {"w": 4})
    writer.write(0, "w", 1, torch.tensor([1.0, 2.0]))
    for start, elements, said in (
        (1, torch.ones(1), "already written"),
        (3, torch.ones(2), "left"),
        (3, [1.0], "wanted float32 elements"),
    ):
        with pytest.raises(Wrong, match=said):
            writer.write(0, "w", start, elements)


def test_only_the_first_targets_shares_sum_to_1_and_some_are_negative():
    shares = np.array(day15._shares(7, 3))
    assert shares.sum(axis=0) == pytest.approx([1, 1.5, 2])
    assert (shares < 0).any()


@pytest.mark.slow
def test_averages_on_disk_leave_the_peak_as_it_was():
    yesterday = bill_steps.offloaded_to_the_disk()
    assert day15.averages_on_the_disk().at_peak == yesterday.at_peak
