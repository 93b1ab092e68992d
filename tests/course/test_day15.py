"""Day 15's checks: right answers written in other ways, more wrong answers, the bill."""

import numpy as np
import pytest
import torch

from memlab import ema
from memlab.course import bill_steps
from memlab.course.checks import day15
from memlab.course.checks.day15 import DAY, MappedSnapshot, SumWriter
from memlab.course.exercises import OK, Wrong, judge
from memlab.ema import inner_product
from memlab.reference.post_hoc_ema import Average, synthesize

EXERCISES = {exercise.id: exercise for exercise in DAY.exercises}


def verdict(number, answer):
    return judge(EXERCISES[f"15.{number}"], answer)


# ------------------------------------------------------------------ other right answers


def by_bisection(sigma):
    if not 0 < sigma < 1 / 12**0.5:
        raise ValueError("no")
    low, high = 0.0, 1 / sigma
    for _ in range(200):
        middle = (low + high) / 2
        width = ((middle + 1) / ((middle + 2) ** 2 * (middle + 3))) ** 0.5
        low, high = (middle, high) if width > sigma else (low, middle)
    return low


class ByDifferences(Average):
    def update(self, weights, time):
        beta = (self.time / time) ** (self.gamma + 1)
        for value, weight in zip(self.values, weights, strict=True):
            value.add_(weight.data - value, alpha=1 - beta)
        self.time = time


def with_a_side_condition(snapshots, target):
    """Weights that sum to 1, by a Lagrange multiplier."""
    known = [s for s in snapshots if s.t <= target.t]
    n = len(known)
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = [[inner_product(p, q) for q in known] for p in known]
    system[n, n] = 0
    b = [*(inner_product(p, target) for p in known), 1]
    x = iter(np.linalg.solve(system, b)[:n])
    return [float(next(x)) if s.t <= target.t else 0.0 for s in snapshots]


def in_torch(snapshots, target):
    known = [n for n, s in enumerate(snapshots) if s.t <= target.t]
    a = torch.tensor(
        [[inner_product(snapshots[i], snapshots[j]) for j in known] for i in known],
        dtype=torch.float64,
    )
    b = torch.tensor([inner_product(snapshots[i], target) for i in known], dtype=torch.float64)
    weights = torch.zeros(len(snapshots), dtype=torch.float64)
    weights[known] = torch.linalg.solve(a, b)
    return weights / weights.sum()


def half_a_chunk_at_a_time(snapshots, shares, sizes, write, chunk_size):
    """The last tensor first, all targets in one product."""
    of_targets = torch.tensor(shares, dtype=torch.float32)
    half = max(1, chunk_size // 2)
    for name in reversed(list(sizes)):
        for start in range(0, sizes[name], half):
            stop = min(start + half, sizes[name])
            sums = torch.zeros(of_targets.shape[1], stop - start)
            for row, snapshot in zip(of_targets, snapshots, strict=True):
                sums.add_(row[:, None] * snapshot.read(name, start, stop))
            for target in range(len(sums)):
                write(target, name, start, sums[target])


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


def by_linspace(times, count):
    places = np.linspace(0, len(times), count + 1)[1:].round().astype(int) - 1
    return [times[place] for place in places]


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (1, by_bisection),
        (2, ByDifferences),
        (3, with_a_side_condition),
        (3, in_torch),
        (4, half_a_chunk_at_a_time),
        (5, by_linspace),
    ],
)
def test_other_right_answers_pass(number, answer):
    found = verdict(number, answer)
    assert found.status == OK, found.text


# ------------------------------------------------------------------ other wrong answers


def twice(snapshots, shares, sizes, write, chunk_size):
    for _ in range(2):
        synthesize(snapshots, shares, sizes, write, chunk_size)


def test_elements_written_twice_are_refused():
    assert "were already written" in verdict(4, twice).text


def test_chunks_written_from_one_buffer_are_refused():
    assert "changed later" in verdict(4, in_one_buffer).text


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (1, lambda sigma: ema.gamma_from_sigma(sigma)),
        (3, lambda snapshots, target: ema.solve_weights(snapshots, target)),
    ],
)
def test_an_answer_that_calls_the_library_is_told_so(number, answer):
    assert "which this exercise rebuilds" in verdict(number, answer).text


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
