"""Day 15's checks beyond what all days' have: other right answers, other wrong ones, the bill."""

import math

import numpy as np
import pytest
import torch
from edited import each, verdict_on

from memlab import ema
from memlab.course.checks import day15
from memlab.course.checks.day15 import DAY, Average, Mapped, Written, keep, solve, synthesize
from memlab.course.exercises import OK, WRONG, Wrong, judge
from memlab.ema import decay, inner_product

EXERCISES = {exercise.id: exercise for exercise in DAY.exercises}


def verdict(number, answer):
    return judge(EXERCISES[f"15.{number}"], answer)


# ------------------------------------------------------------------ other right answers


def by_newton(sigma):
    """From below: the formula falls with γ."""
    if not 0 < sigma < 1 / math.sqrt(12):
        raise ValueError("no")
    low, high = 0.0, 1e5
    for _ in range(200):
        middle = (low + high) / 2
        width = math.sqrt((middle + 1) / ((middle + 2) ** 2 * (middle + 3)))
        low, high = (middle, high) if width > sigma else (low, middle)
    return low


class ByFactors(Average):
    def update(self, weights, time):
        beta = decay(self.gamma, time - self.time, time)
        with torch.no_grad():
            for value, weight in zip(self.values, weights, strict=True):
                value.mul_(beta).add_(weight, alpha=1 - beta)
        self.time = time


class ByRatios(Average):
    def update(self, weights, time):
        beta = (self.time / time) ** (self.gamma + 1)
        for value, weight in zip(self.values, weights, strict=True):
            value.add_(weight.data - value, alpha=1 - beta)
        self.time = time


def with_a_side_condition(snapshots, target):
    """Sums of one, by Lagrange."""
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


def piece_by_piece_of_all_tensors(snapshots, shares, sizes, write, piece):
    """The last tensor first, half a piece at a time, in one product."""
    of_targets = torch.tensor(shares, dtype=torch.float32)
    half = max(1, piece // 2)
    for name in reversed(list(sizes)):
        for start in range(0, sizes[name], half):
            stop = min(start + half, sizes[name])
            sums = torch.zeros(of_targets.shape[1], stop - start)
            for row, snapshot in zip(of_targets, snapshots, strict=True):
                sums.add_(row[:, None] * snapshot.read(name, start, stop))
            for target in range(len(sums)):
                write(target, name, start, sums[target])


def by_linspace(times, count):
    places = np.linspace(0, len(times), count + 1)[1:].round().astype(int) - 1
    return [times[place] for place in places]


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (1, by_newton),
        (2, ByFactors),
        (2, ByRatios),
        (3, with_a_side_condition),
        (3, in_torch),
        (3, solve),
        (4, piece_by_piece_of_all_tensors),
        (4, synthesize),
        (5, by_linspace),
        (5, keep),
    ],
)
def test_other_right_answers_pass(number, answer):
    found = verdict(number, answer)
    assert found.status == OK, found.text


# ------------------------------------------------------------------ other wrong ones


class ForOneTensor(Average):
    def update(self, weights, time):
        share = 1 - decay(self.gamma, time - self.time, time)
        self.values[0].lerp_(next(iter(weights)).detach(), share)
        self.time = time


class InFloat16(Average):
    def update(self, weights, time):
        share = 1 - decay(self.gamma, time - self.time, time)
        for value, weight in zip(self.values, weights, strict=True):
            value.copy_(value.lerp(weight.detach(), share).half())
        self.time = time


def rounded(sigma):
    return round(EXERCISES["15.1"].reference(sigma), 3)


def clipped(snapshots, target):
    """No weight below zero."""
    weights = np.maximum(solve(snapshots, target), 0)
    return weights / weights.sum()


def twice_the_pieces(snapshots, shares, sizes, write, piece):
    synthesize(snapshots, shares, sizes, write, 3 * piece)


def written_twice(snapshots, shares, sizes, write, piece):
    synthesize(snapshots, shares, sizes, write, piece)
    synthesize(snapshots, shares, sizes, write, piece)


@pytest.mark.parametrize(
    ("number", "answer", "said"),
    [
        (1, rounded, "a profile of width"),
        (2, ForOneTensor, "the second is not"),
        (2, InFloat16, "count"),
        (3, clipped, "the profile's error is"),
        (4, twice_the_pieces, "bytes at once"),
        (4, written_twice, "these were written before"),
        (5, lambda times, count: [*times[: count - 1], times[-1]], "profile's error"),
        (5, lambda times, count: list(range(count)), "wanted a list of"),
    ],
)
def test_other_wrong_answers_fail(number, answer, said):
    found = verdict(number, answer)
    assert found.status == WRONG
    assert said in found.text


LIMIT, MOVE = "<= 12**-0.5", "value.lerp_(weight.detach(), share)"
CHOSEN, PLACED = "if snapshot.t <= target.t]", "weights[chosen] = x / x.sum()"
LOOP, MIXED = "            value.lerp_(weight.detach(), share)", "total.add_(part, alpha=share)"
LIVE = f"""            if not self.time:
                value.set_(weight.detach())
{LOOP}"""
ZEROED = """weights = x
    weights[[s.t > target.t for s in snapshots]] = 0
    weights /= weights.sum()"""
NAMES = "for name, size in sizes.items():"
AGAIN = """totals = [sum(column) for column in zip(*shares)]
    shares = [[s / t for s, t in zip(row, totals)] for row in shares]"""
BY_LOOP = "for n, w in zip(chosen, x / x.sum()):\n        weights[n] = w"
EVEN = "[times[(n + 1) * len(times) // count - 1] for n in range(count)]"
FROM_THE_END = "[times[len(times) - 1 - n * len(times) // count] for n in range(count)][::-1]"
SHARE = "times[-1] * (n + 1) / count"
BEFORE = f"[max((t for t in times if t <= {SHARE}), default=times[0]) for n in range(count)]"

REFUSED = [
    ("15.1", "a limit of 0.285", (LIMIT, "<= 0.285")),
    ("15.1", "a limit of 0.2887", (LIMIT, "<= 0.2887")),
    ("15.1", "γ = 0 refused", (LIMIT, "< 12**-0.5")),
    ("15.2", "the live weights", (LOOP, LIVE)),
    ("15.3", "later ones zeroed", (CHOSEN, "]"), (PLACED, ZEROED)),
    ("15.3", "weights at the front", (PLACED, "weights[: len(x)] = x / x.sum()")),
    ("15.4", "shares normalised again", (NAMES, f"{AGAIN}\n    {NAMES}")),
    ("15.4", "written to the file", ("stop).float()", "stop).mul_(1).float()")),
    ("15.1", "no exponent above 100", ("return float(", "return min(100.0, ")),
    ("15.2", "grad mode left off", (LOOP, f"            torch.set_grad_enabled(False)\n{LOOP}")),
    (
        "15.2",
        "the weights as scratch",
        (LOOP, f"            weight.detach().mul_(2).div_(2)\n{LOOP}"),
    ),
    ("15.5", "the last ones", (EVEN, "times[-count:]")),
    ("15.5", "the last ones of 39", (EVEN, "times[::-1][:: len(times) // count][:count][::-1]")),
    ("15.5", "times taken out", (EVEN, f"[{EVEN}, times.clear()][0]")),
    ("15.5", "the time before", (EVEN, BEFORE)),
]
ACCEPTED = [
    ("15.1", "the limit in other words", (LIMIT, "<= 1 / 12**0.5")),
    ("15.2", "mul_ and add_", (MOVE, "value.mul_(1 - share).add_(weight.detach(), alpha=share)")),
    ("15.3", "filled in by a loop", (PLACED, BY_LOOP)),
    ("15.4", "+=", (MIXED, "total += share * part")),
    ("15.5", "counted from the end", (EVEN, FROM_THE_END)),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


def from_the_library(sigma):
    return ema.gamma_from_sigma(sigma)


def solved_by_the_library(snapshots, target):
    return ema.solve_weights(snapshots, target)


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [(DAY.exercises[0], from_the_library), (DAY.exercises[2], solved_by_the_library)],
)
def test_who_asks_the_library_is_told_so(exercise, answer):
    assert "which this exercise rebuilds" in judge(exercise, answer).text


# ------------------------------------------------------------------ what is given


def test_a_snapshot_counts_what_is_read_and_refuses_what_is_not_there():
    snapshot = Mapped({"w": torch.arange(6.0).half()})
    assert snapshot.read("w", 2, 5).tolist() == [2, 3, 4]
    assert snapshot.read_numbers == 3
    for name, start, stop in (("v", 0, 1), ("w", 0, 7), ("w", 3, 3), ("w", -1, 2)):
        with pytest.raises(Wrong, match="read"):
            snapshot.read(name, start, stop)


def test_what_is_written_is_numbers_that_fit_and_once():
    written = Written(1, {"w": 4})
    written.write(0, "w", 1, torch.tensor([1.0, 2.0]))
    for start, numbers, said in (
        (1, torch.ones(1), "before"),
        (3, torch.ones(2), "left"),
        (3, [1.0], "wanted numbers"),
    ):
        with pytest.raises(Wrong, match=said):
            written.write(0, "w", start, numbers)


def test_only_the_first_targets_shares_sum_to_one_and_some_are_below_zero():
    shares = np.array(day15._shares(7, 3))
    assert shares.sum(axis=0) == pytest.approx([1, 1.5, 2])
    assert (shares < 0).any()


@pytest.mark.slow
def test_todays_bill_is_yesterdays_for_the_averages_are_on_the_disk():
    yesterday = day15.offloaded_to_the_disk()
    assert day15.averages_on_the_disk().at_peak == yesterday.at_peak
