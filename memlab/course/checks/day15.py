"""Day 15: post-hoc EMA from disk."""

import math
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlab.course.checks.day14 import offloaded_to_the_disk
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, require
from memlab.course.properties import unchanged
from memlab.ema import (
    Profile,
    impulse_response,
    inner_product,
    power_profile,
    profile_error,
    sigma_from_gamma,
)
from memlab.metering import measure
from memlab.offload import DiskStore
from memlab.trace import Trace
from memlab.train import averaged

TRACKED = (0.05, 0.10)
# What 15.1 and 15.3 rebuild.
_ELSEWHERE = (
    "memlab.ema.gamma_from_sigma",
    "memlab.ema.solve_weights",
)


def _most(call: Callable[[], Any]) -> int:
    """The most bytes of tensors that were alive during the call, beside those before."""
    made = (event.bytes for event in measure(call).events if event.phase != "before")
    return max(accumulate(made), default=0)


def _briefly(value: Any) -> str:
    if value is None:
        return "nothing; is there a return"
    if getattr(value, "shape", ()):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and len(value) > 4:
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r:.60}"


# ------------------------------------------------------------------ 15.1: the exponent


WIDEST = 12**-0.5  # of γ = 0


def _cubic(sigma: float) -> np.ndarray:
    inverse = sigma**-2
    return np.roots([1, 7, 16 - inverse, 12 - inverse])


def exponent(sigma: float) -> float:
    """The γ of a profile of width σ."""
    if not 0 < sigma <= WIDEST:
        raise ValueError(f"got sigma {sigma}, wanted one above 0 and up to 0.2887")
    return float(_cubic(sigma).real.max())


def _exponent_but(
    *,
    limit: float = WIDEST,
    roots: Callable[[float], np.ndarray] = _cubic,
    pick: Callable[[np.ndarray], float] = lambda roots: roots.real.max(),
    with_limit: bool = True,
) -> Callable[[float], float]:
    def answer(sigma: float) -> float:
        if not (0 < sigma <= limit if with_limit else 0 < sigma < limit):
            raise ValueError("too wide")
        return float(pick(roots(sigma)))

    return answer


def _without_the_square(sigma: float) -> np.ndarray:
    """Of σ² = (γ+1) / ((γ+2)·(γ+3))."""
    inverse = sigma**-2
    return np.roots([1, 5 - inverse, 6 - inverse])


def _check_exponent(answer: Any) -> str:
    for sigma in (0.05, 0.10, 0.15, 0.25, 0.28, 0.286, 0.28867, WIDEST, 0.002):
        call = f"exponent({sigma})" if sigma < WIDEST else "exponent(12**-0.5), of γ = 0,"
        try:
            gamma = _number(call, answer(sigma))
        except ValueError as error:
            if sigma <= 0.28:
                raise
            require(False, f"{call} raised ValueError: {error}; wanted γ, which is not below 0.")
            continue
        require(
            -1e-9 <= gamma < 1e6,
            f"{call} gave {gamma:.4f}; wanted the root that is not below 0.",
        )
        width = sigma_from_gamma(max(gamma, 0.0))
        require(
            abs(width - sigma) < 1e-6 * sigma,
            f"{call} gave {gamma:.4f}, a profile of width {width:.4f}; wanted {sigma:.4f}.",
        )
    for sigma in (0.3, 0.5, 0.29, 0.28868, 0, -0.1):
        call = f"exponent({sigma})"
        wanted = "wanted a ValueError: no γ from 0 on has that width"
        try:
            gamma = _number(call, answer(sigma))
        except ValueError:
            continue
        except (ArithmeticError, IndexError) as error:
            raise Wrong(f"{call} raised {type(error).__name__}; {wanted}.") from None
        require(False, f"{call} gave {gamma:.4f}; {wanted}.")
    return "0.05 ↔ 16.97, 0.10 ↔ 6.94, 0.28 ↔ 0.17 · above 0.2887 refused"


def _number(call: str, value: Any) -> float:
    try:
        number = float("nan") if isinstance(value, (complex, bool, str)) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if math.isnan(number):
        raise Wrong(f"{call} gave {_briefly(value)}; wanted a number.")
    return number


_EXPONENT = Exercise(
    id="15.1",
    title="The exponent of a width",
    minutes=10,
    difficulty=2,
    hints=(
        "Multiply (γ+2)²·(γ+3) out, and divide σ²·(…) = γ + 1 by σ²: what stands before γ³, γ², γ, "
        "and alone? And what is γ where σ is 1/√12?",
        "Divided by σ²: γ³ + 7γ² + (16 − 1/σ²)·γ + (12 − 1/σ²) = 0. Of its three roots two are "
        "below 0. At σ = 1/√12 the third is 0, which is right; what is wider has none, and wants a "
        "ValueError.",
        "if not 0 < sigma <= 12**-0.5: raise ValueError('…'). inverse = sigma**-2; np.roots([1, 7, "
        "16 - inverse, 12 - inverse]) are three complex numbers. Which of them is γ, and how does "
        "it become a float?",
    ),
    reference=exponent,
    check=_check_exponent,
    rebuilds=_ELSEWHERE,
    wrong_answers=(
        WrongAnswer(
            _exponent_but(roots=_without_the_square),
            "(γ+2) has a square in the formula: without it a width of 0.05 comes out as 0.0025.",
        ),
        WrongAnswer(
            _exponent_but(roots=lambda sigma: _cubic(math.sqrt(sigma))),
            "1/σ² was wanted in the cubic, and σ, without the square, was put in.",
        ),
        WrongAnswer(
            _exponent_but(pick=lambda roots: sorted(roots.real)[0]),
            "The smallest root was picked. With a γ below 0 the first weights would count most.",
        ),
        WrongAnswer(
            _exponent_but(limit=math.inf),
            "Above 0.2887 the largest root is below 0, and further up complex: its real part looks "
            "like an answer and is none. Refuse.",
        ),
        WrongAnswer(
            _exponent_but(limit=0.295),
            "The limit is 1/√12 = 0.288675, the plain mean's; at 0.29 γ is below 0 already.",
        ),
        WrongAnswer(
            _exponent_but(limit=0.2887),
            "0.2887 is rounded up: the limit is 12**-0.5, a little less.",
        ),
        WrongAnswer(
            _exponent_but(limit=0.285),
            "The limit is too low: up to 12**-0.5 there is a γ that is not below 0.",
        ),
        WrongAnswer(
            _exponent_but(with_limit=False),
            "γ = 0 counts all weights alike, and is allowed: its width 12**-0.5, too.",
        ),
    ),
)

# ------------------------------------------------------------------ 15.2: the average


class Average:
    """Weights, averaged over time; the exponent says how far back."""

    def __init__(self, weights: Iterable[Tensor], gamma: float) -> None:
        self.gamma, self.time = gamma, 0.0
        self.values = [weight.detach().clone() for weight in weights]

    def update(self, weights: Iterable[Tensor], time: float) -> None:
        self._move(weights, self.share(time))
        self.time = time

    def share(self, time: float) -> float:
        return 1 - (1 - (time - self.time) / time) ** (self.gamma + 1)

    def _move(self, weights: Iterable[Tensor], share: float) -> None:
        for value, weight in zip(self.values, weights, strict=True):
            value.lerp_(weight.detach(), share)


def _check_average(answer: Any) -> str:
    for name, times in (
        ("updates at 1 and 2", [1, 2]),
        ("updates at 1, 2, 3, 4", [1, 2, 3, 4]),
        ("updates at 10, 20, 30", [10, 20, 30]),
        ("updates at 3, 4, 9, 20", [3, 4, 9, 20]),
    ):
        _check_response(answer, name, times)
    _check_place(answer)
    _check_live(answer)
    return (
        "what each step counts: (t/T)^(γ+1) less that of the update before, to 1e-12 · in place, "
        "nothing beside"
    )


def _check_response(answer: Any, name: str, times: Sequence[int]) -> None:
    """The weights of each moment are a direction of their own: the average says what they count."""
    gamma, directions = 2.5, torch.eye(len(times) + 1, dtype=torch.float64)
    average = _average_of(answer, [directions[0], directions[0][:1]], gamma)
    for n, time in enumerate(times, 1):
        with unchanged(f"{name}: an update"):
            average.update([directions[n], directions[n][:1]], time)
    counted = average.values[0]
    require(
        isinstance(counted, Tensor) and counted.shape == directions[0].shape,
        f"{name}: values[0] is {_briefly(counted)}; wanted a tensor like the first weight.",
    )
    first, *others = counted.tolist()
    require(
        abs(first) < 1e-12,
        f"{name}: the weights before training count {first:.4f}; wanted 0.",
    )
    for time, got, wanted in zip(times, others, impulse_response(times, gamma), strict=True):
        require(
            abs(got - wanted) < 1e-12,
            f"{name}, γ = {gamma}: those at {time} count {got:.9f}; wanted {wanted:.9f}.",
        )
    require(
        bool(average.values[1].abs().item() < 1e-12),
        f"{name}: the first weight is right, and the second is not.",
    )


def _average_of(answer: Any, weights: list[Tensor], gamma: float) -> Any:
    average = answer(weights, gamma)
    require(
        isinstance(getattr(average, "values", None), list) and hasattr(average, "update"),
        f"Average(weights, gamma) gave {_briefly(average)}; wanted one with values, a list of "
        f"tensors, and update.",
    )
    return average


def _check_place(answer: Any) -> None:
    weights = [torch.nn.Parameter(torch.ones(1000)), torch.nn.Parameter(torch.ones(30, 20))]
    case = "weights of 1,000 and 30 × 20 numbers"
    average = _average_of(answer, weights, 2.5)
    with unchanged(f"{case}: an update", weights=weights):
        average.update(weights, 1)
        places = [value.data_ptr() for value in average.values]
        beside = _most(lambda: average.update(weights, 2))
    require(
        all(bool((weight == 1).all()) for weight in weights),
        f"{case}: the update has changed the model's weights; wanted them as they are.",
    )
    require(
        not any(value.requires_grad for value in average.values),
        f"{case}: the average has a graph, which grows with each update; detach the weights.",
    )
    require(
        [value.data_ptr() for value in average.values] == places,
        f"{case}: after an update the average lies elsewhere; wanted it in place.",
    )
    require(
        beside <= 4 * 1000 + 64,
        f"{case}: an update takes {beside:,} bytes beside; wanted at most a tensor's, 4,000.",
    )


def _check_live(answer: Any) -> None:
    """An optimizer steps the weights in place: the average must be of what they were."""
    weights = [torch.full((3,), 1.0), torch.full((2, 2), 1.0)]
    average = _average_of(answer, weights, 2.5)
    average.update(weights, 1)
    for weight in weights:
        weight.fill_(100.0)
    now = [value.tolist() for value in average.values]
    require(
        now == [[1.0] * 3, [[1.0] * 2] * 2],
        f"weights that are changed in place after the first update: the values are {now}; wanted "
        f"what the weights were.",
    )


class _LiveWeights(Average):
    """At the first update the values are the weights themselves."""

    def update(self, weights: Iterable[Tensor], time: float) -> None:
        weights = list(weights)
        if not self.time:
            self.values = [weight.detach() for weight in weights]
        else:
            self._move(weights, self.share(time))
        self.time = time


class _StepIgnored(Average):
    """β is that of a step of 1, whatever was left out."""

    def share(self, time: float) -> float:
        return 1 - (1 - 1 / time) ** (self.gamma + 1)


class _StepsCounted(Average):
    """By the number of updates."""

    count = 0

    def share(self, time: float) -> float:
        self.count += 1
        return 1 - (1 - 1 / self.count) ** (self.gamma + 1)


class _OneLate(Average):
    """As packages have it: step + 1."""

    def share(self, time: float) -> float:
        return 1 - (1 - (time - self.time) / (time + 1)) ** (self.gamma + 1)


class _GammaAlone(Average):
    def share(self, time: float) -> float:
        return 1 - (1 - (time - self.time) / time) ** self.gamma


class _SwappedShare(Average):
    def share(self, time: float) -> float:
        return 1 - super().share(time)


class _TimeFirst(Average):
    """The clock is set before it is asked."""

    def update(self, weights: Iterable[Tensor], time: float) -> None:
        self.time = time
        self._move(weights, self.share(time))


class _ChangesWeights(Average):
    def _move(self, weights: Iterable[Tensor], share: float) -> None:
        for value, weight in zip(self.values, weights, strict=True):
            value.mul_(1 - share).add_(weight.detach().mul_(share))


class _TimeForgotten(Average):
    def update(self, weights: Iterable[Tensor], time: float) -> None:
        self._move(weights, self.share(time))


class _FirstIsKept(Average):
    """What was there at the begin stands for the first update."""

    def update(self, weights: Iterable[Tensor], time: float) -> None:
        if self.time:
            super().update(weights, time)
        self.time = time


class _NewTensors(Average):
    def _move(self, weights: Iterable[Tensor], share: float) -> None:
        pairs = zip(self.values, weights, strict=True)
        self.values = [v + share * (w.detach() - v) for v, w in pairs]


class _KeepsGraph(Average):
    def _move(self, weights: Iterable[Tensor], share: float) -> None:
        pairs = zip(self.values, weights, strict=True)
        self.values = [v + share * (w - v) for v, w in pairs]


_AVERAGE = Exercise(
    id="15.2",
    title="An update of an average",
    minutes=10,
    difficulty=2,
    hints=(
        "Three things: β from the two times; each value mixed in place; the clock. Is there a "
        "method of tensors that does v ← β·v + (1 − β)·w with no tensor beside?",
        "value.lerp_(weight, share) moves value by share of the way to weight: share is 1 − β. Of "
        "a Parameter take .detach(), or its graph comes along. And self.time is set after β was "
        "made.",
        "share = 1 - (1 - (time - self.time) / time) ** (self.gamma + 1). for value, weight in "
        "zip(self.values, weights): value moves by share towards weight.detach(), in place. One "
        "line is left.",
    ),
    reference=Average,
    check=_check_average,
    wrong_answers=(
        WrongAnswer(
            _StepIgnored,
            "Δ is ignored: an update after ten steps has to move ten times as far, or the average "
            "is longer than was asked for.",
        ),
        WrongAnswer(
            _StepsCounted,
            "Updates are counted, not time: right only while they come at even distances.",
        ),
        WrongAnswer(
            _OneLate, "t is the time after the update: with t + 1 the first weights count, too."
        ),
        WrongAnswer(_GammaAlone, "The power is γ + 1: the integral of τ^γ."),
        WrongAnswer(
            _SwappedShare, "β and 1 − β are swapped: β is what the average keeps, not what it gets."
        ),
        WrongAnswer(
            _TimeFirst,
            "Nothing has moved. Is each value changed in place, and self.time set after it was "
            "asked?",
        ),
        WrongAnswer(
            _ChangesWeights,
            "A method with _ at its end writes into what it is called on: here into the model's "
            "weights.",
        ),
        WrongAnswer(
            _TimeForgotten, "self.time is still 0: each update takes itself for the first one."
        ),
        WrongAnswer(
            _FirstIsKept,
            "The first update does nothing, so that random weights stand in for all before it.",
        ),
        WrongAnswer(
            _NewTensors,
            "New tensors take the averages' bytes again in each update: lerp_, or mul_ and add_.",
        ),
        WrongAnswer(
            _LiveWeights,
            "After the first update the values are the model's own weights: detach() shares their "
            "memory. Copy into the tensors that are there.",
        ),
        WrongAnswer(
            _KeepsGraph, "The weights want gradients, and so does now the average: weight.detach()."
        ),
    ),
)

# ------------------------------------------------------------------ 15.3: the least squares

Solve = Callable[[Sequence[Profile], Profile], Any]


def tracked_profiles(times: Iterable[float], sigmas: Sequence[float] = TRACKED) -> list[Profile]:
    """Of snapshots of each average at each time."""
    return [power_profile(sigma, time) for time in times for sigma in sigmas]


def _overlaps(rows: Sequence[Profile], columns: Sequence[Profile]) -> np.ndarray:
    products = [[inner_product(a, b) for b in columns] for a in rows]
    return np.array(products).reshape(len(rows), len(columns))


def _solve_but(
    *,
    before: Callable[[float, float], bool] = lambda t, end: t <= end,
    normalised: bool = True,
    dtype: Any = np.float64,
    with_target: bool = True,
    how: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.linalg.solve,
) -> Solve:
    def solve(snapshots: Sequence[Profile], target: Profile) -> np.ndarray:
        chosen = [n for n, snapshot in enumerate(snapshots) if before(snapshot.t, target.t)]
        known = [snapshots[n] for n in chosen]
        a = _overlaps(known, known).astype(dtype)
        b = _overlaps(known, [target])[:, 0].astype(dtype)
        x = how(a, b if with_target else np.ones_like(b)).astype(np.float64)
        weights = np.zeros(len(snapshots))
        weights[chosen] = x / x.sum() if normalised else x
        return weights

    return solve


solve = _solve_but()


MIXED = [(11 * n + 5) % 32 for n in range(32)]


def _check_solve(answer: Solve) -> str:
    one = [power_profile(0.05, 100)]
    _require_error(answer, "one snapshot of 0.05, wanted 0.05", one, one[0])
    few = tracked_profiles((50, 100))
    _require_error(answer, "0.05 and 0.10 at 50 and 100, wanted 0.10 at 100", few, few[3])
    many = tracked_profiles(range(10, 170, 10))
    for sigma, end in ((0.07, 160), (0.15, 160), (0.25, 160), (0.15, 80)):
        case = f"0.05 and 0.10 at 10, 20, … 160, wanted {sigma:.2f} at {end}"
        _require_error(answer, case, many, power_profile(sigma, end))
    case = "0.05 and 0.10 at 10, 20, … 160, wanted 0.15 at 75"  # between two snapshots
    _require_error(answer, case, many, power_profile(0.15, 75))
    mixed = [many[n] for n in MIXED]  # later ones stand between earlier ones
    case = "the same in no order, wanted 0.15 at 80"
    _require_error(answer, case, mixed, power_profile(0.15, 80))
    alike = tracked_profiles(range(1, 51), (0.20, 0.25))
    case = "0.20 and 0.25 at 1, 2, … 50, wanted 0.07 at 50"
    _require_error(answer, case, alike, power_profile(0.07, 50))
    off = profile_error(many, power_profile(0.15, 160))
    return (
        f"sums are 1, nothing after the target · of 16 times, width 0.15 is off by {off:.1e} · "
        f"none better"
    )


def _require_error(answer: Solve, case: str, snapshots: Sequence[Profile], target: Profile) -> None:
    try:
        given = answer(list(snapshots), target)
    except np.linalg.LinAlgError as error:
        raise Wrong(f"{case}: np.linalg says {str(error).rstrip('.')}; wanted weights.") from None
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        weights = np.array(math.nan)
    require(
        weights.shape == (len(snapshots),) and bool(np.isfinite(weights).all()),
        f"{case}: got {_briefly(given)}; wanted {len(snapshots)} weights.",
    )
    later = sum(x != 0 for x, s in zip(weights, snapshots, strict=True) if s.t > target.t)
    require(
        later == 0,
        f"{case}: {later} snapshots after {target.t:g} have a weight; wanted 0 for each of them.",
    )
    require(
        abs(weights.sum() - 1) < 1e-9,
        f"{case}: the weights sum to {weights.sum():.9f}; wanted 1, to a float64's digits.",
    )
    got = profile_error(snapshots, target, weights)
    best = profile_error(snapshots, target, solve(snapshots, target))
    require(
        got <= 1.05 * best + 1e-11,
        f"{case}: the profile's error is {got:.3g}; wanted {best:.3g}.",
    )


def _later_ones_zeroed(snapshots: Sequence[Profile], target: Profile) -> np.ndarray:
    """All are solved for, and those that are too late are taken out of the result."""
    x = np.linalg.solve(_overlaps(snapshots, snapshots), _overlaps(snapshots, [target])[:, 0])
    x[[s.t > target.t for s in snapshots]] = 0
    return x / x.sum()


def _at_the_front(snapshots: Sequence[Profile], target: Profile) -> np.ndarray:
    """The chosen ones' weights stand first, whatever their places are."""
    found = solve(snapshots, target)
    chosen = [s.t <= target.t for s in snapshots]
    return np.concatenate([found[chosen], np.zeros(chosen.count(False))])


def _nearest(snapshots: Sequence[Profile], target: Profile) -> list[float]:
    """The one snapshot that is nearest."""
    off = [math.inf if s.t > target.t else profile_error([s], target) for s in snapshots]
    return [float(n == off.index(min(off))) for n in range(len(snapshots))]


def _by_overlap(snapshots: Sequence[Profile], target: Profile) -> np.ndarray:
    """As much of each as it overlaps the target."""
    b = np.array([inner_product(s, target) * (s.t <= target.t) for s in snapshots])
    return b / b.sum()


_SOLVE = Exercise(
    id="15.3",
    title="The least squares",
    minutes=15,
    difficulty=3,
    hints=(
        "Which two profiles belong to row i, column j of A, and which two to place i of b? And "
        "which of the snapshots have a row at all: is the one at the target's own time among them?",
        "chosen = [n for n, s in enumerate(snapshots) if s.t <= target.t]; A and b of these alone, "
        "by np.array of lists; np.linalg.solve. The others stay zeros of np.zeros(len(snapshots)); "
        "weights[chosen] = … fills in yours, divided by their sum.",
        "chosen = [n for n, s in enumerate(snapshots) if s.t <= target.t]. known = [snapshots[n] "
        "for n in chosen]. a = np.array([[inner_product(p, q) for q in known] for p in known]). b "
        "= np.array([inner_product(p, target) for p in known]). x = np.linalg.solve(a, b). weights "
        "= np.zeros(len(snapshots)) for all; x, divided by its sum, is for the chosen.",
    ),
    reference=solve,
    check=_check_solve,
    rebuilds=_ELSEWHERE,
    wrong_answers=(
        WrongAnswer(
            _solve_but(normalised=False),
            "The nearest profile has an area that is not 1: weights that never move would come out "
            "shorter. Divide by the sum.",
        ),
        WrongAnswer(
            _solve_but(before=lambda t, end: True),
            "Snapshots after the target's time know weights that it must not know: leave them out.",
        ),
        WrongAnswer(
            _later_ones_zeroed,
            "All were solved for and the later ones set to 0 afterwards: the others' weights still "
            "lean on them. Choose first, then solve.",
        ),
        WrongAnswer(
            _at_the_front,
            "The weights stand at the front: each belongs to the place of its snapshot.",
        ),
        WrongAnswer(
            _solve_but(before=lambda t, end: t < end),
            "The snapshot at the target's own time is the best of all: t <= target.t.",
        ),
        WrongAnswer(
            _solve_but(dtype=np.float32),
            "Neighbours are nearly alike, so digits cancel: float32 has too few. Solve in float64.",
        ),
        WrongAnswer(
            _solve_but(how=lambda a, b: np.linalg.pinv(a, rcond=1e-3) @ b),
            "A cut-off hides what is nearly singular, and the best answer with it: np.linalg.solve "
            "in float64.",
        ),
        WrongAnswer(
            _solve_but(with_target=False),
            "b is what the snapshots have in common with the target: inner_product(p, target).",
        ),
        WrongAnswer(
            _nearest, "The nearest snapshot alone was taken: a sum of several comes far nearer."
        ),
        WrongAnswer(
            _by_overlap,
            "Each was weighed by its overlap with the target, as if they didn't overlap each "
            "other: solve with A.",
        ),
    ),
)

# ------------------------------------------------------------------ 15.4: the synthesis

Write = Callable[[int, str, int, Tensor], None]


def synthesize(
    snapshots: Sequence[Any],
    shares: Sequence[Sequence[float]],
    sizes: dict[str, int],
    write: Write,
    piece: int,
) -> None:
    """Sums of snapshots, a piece of a tensor at a time, for all targets together."""
    for name, size in sizes.items():
        for start in range(0, size, piece):
            stop = min(start + piece, size)
            sums = torch.zeros(len(shares[0]), stop - start)
            for snapshot, of_each in zip(snapshots, shares, strict=True):
                part = snapshot.read(name, start, stop).float()
                for total, share in zip(sums, of_each, strict=True):
                    total.add_(part, alpha=share)
            for target, total in enumerate(sums):
                write(target, name, start, total)


class Mapped:
    """A snapshot that is looked at, not loaded: what is read is the file's."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.read_numbers = 0

    def read(self, name: str, start: int, stop: int) -> Tensor:
        require(
            name in self._tensors, f"read({name!r}, …): wanted one of {', '.join(self._tensors)}."
        )
        size = len(self._tensors[name])
        require(
            0 <= start < stop <= size,
            f"read({name!r}, {start}, {stop}): that tensor has {size} numbers.",
        )
        self.read_numbers += stop - start
        return self._tensors[name][start:stop]


class Written:
    """Where sums go: to files."""

    def __init__(self, targets: int, sizes: dict[str, int]) -> None:
        self.tensors = [
            {name: torch.full((size,), math.nan) for name, size in sizes.items()}
            for _ in range(targets)
        ]

    def write(self, target: int, name: str, start: int, numbers: Tensor) -> None:
        call = f"write({target}, {name!r}, {start}, …)"
        require(
            isinstance(numbers, Tensor) and numbers.dtype == torch.float32,
            f"{call}: wanted numbers in float32, got {getattr(numbers, 'dtype', type(numbers))}.",
        )
        place = self.tensors[target][name][start : start + numbers.numel()]
        require(
            place.shape == numbers.shape,
            f"{call}: got {tuple(numbers.shape)} numbers where {len(place)} are left.",
        )
        require(bool(place.isnan().all()), f"{call}: these were written before.")
        place.copy_(numbers)


def _snapshots(count: int, sizes: dict[str, int]) -> list[Mapped]:
    random = torch.Generator().manual_seed(count)
    return [
        Mapped({n: torch.randn(size, generator=random).half() for n, size in sizes.items()})
        for _ in range(count)
    ]


def _shares(snapshots: int, targets: int) -> list[list[float]]:
    """Some are below zero, and only the first target's sum to one: they are used as they are."""
    made = torch.randn(
        snapshots, targets, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    sums = 1 + 0.5 * torch.arange(targets)
    return (made + (sums - made.sum(0)) / snapshots).tolist()


def _check_synthesize(answer: Any) -> str:
    for case, sizes, snapshots, targets, piece in (
        ("one tensor of 6 numbers, pieces of 3, 2 snapshots, 1 target", {"w": 6}, 2, 1, 3),
        ("7 numbers, pieces of 3, 2 snapshots, 1 target", {"w": 7}, 2, 1, 3),
        ("tensors of 5 and 3, pieces of 4, 3 snapshots, 2 targets", {"a": 5, "b": 3}, 3, 2, 4),
    ):
        _require_sums(answer, case, sizes, snapshots, targets, piece)
    few, many = (_bytes_beside(answer, count) for count in (4, 40))
    _require_sums(answer, _CASE, _SIZES, 4, _TARGETS, _PIECE)
    # The last piece's, by the names of a loop, are still there when the next one's are made.
    allowed = 3 * 4 * (_TARGETS + 1) * _PIECE + 1024
    for count, beside in ((4, few), (40, many)):
        require(
            beside <= allowed,
            f"{_CASE}, {count} snapshots: {beside:,} bytes at once; wanted at most {allowed:,}: "
            f"{_TARGETS} sums of a piece and a snapshot's piece in float32, three times.",
        )
    require(
        _outside(answer) < 64 * 1024,
        f"{_CASE}: more than 64 KiB are outside of tensors, in arrays or lists; wanted less.",
    )
    return f"sums right, all is read once · {many:,} bytes at once, of 40 snapshots as of 4"


_PIECE, _TARGETS = 2048, 2
_SIZES = {"a": 9 * _PIECE + 100, "b": 300}
_CASE = f"{sum(_SIZES.values()):,} numbers, pieces of {_PIECE:,}, {_TARGETS} targets"


def _require_sums(
    answer: Any, case: str, sizes: dict[str, int], snapshots: int, targets: int, piece: int
) -> None:
    found, shares, written = (
        _snapshots(snapshots, sizes), _shares(snapshots, targets), Written(targets, sizes)
    )  # fmt: skip
    before = [{n: t.clone() for n, t in snapshot._tensors.items()} for snapshot in found]
    answer(found, shares, sizes, written.write, piece)
    require(
        all(torch.equal(s._tensors[n], t) and s._tensors[n]._version == 0
            for s, b in zip(found, before, strict=True) for n, t in b.items()),
        f"{case}: a snapshot's numbers were written to; what is read is the file's.",
    )  # fmt: skip
    for target, sums in enumerate(written.tensors):
        for name, got in sums.items():
            missing = int(got.isnan().sum())
            require(
                missing == 0,
                f"{case}: {missing} of {len(got)} numbers of {name!r}, target {target}, were "
                f"never written.",
            )
            parts = torch.stack([tensors[name].double() for tensors in before])
            wanted = torch.tensor(shares, dtype=torch.float64)[:, target] @ parts
            off = (got.double() - wanted).abs() > 1e-6 * (1 + parts.abs().sum(0))
            at = int(off.int().argmax())
            require(
                not off.any(),
                f"{case}: number {at} of {name!r}, target {target}, is {got[at].item():.5f}; "
                f"wanted {wanted[at].item():.5f}.",
            )
    read = sum(snapshot.read_numbers for snapshot in found)
    wanted_reads = snapshots * sum(sizes.values())
    require(
        read == wanted_reads,
        f"{case}: {read} numbers were read; wanted {wanted_reads}, each of them once.",
    )


def _bytes_beside(answer: Any, count: int) -> int:
    """The most bytes that a synthesis takes of its own."""
    found, shares = _snapshots(count, _SIZES), _shares(count, _TARGETS)
    return _most(lambda: answer(found, shares, _SIZES, _dropped, _PIECE))


def _outside(answer: Any) -> int:
    """And those of Python's and numpy's, which the meter does not see."""
    found, shares = _snapshots(4, _SIZES), _shares(4, _TARGETS)
    tracemalloc.start()
    try:
        answer(found, shares, _SIZES, _dropped, _PIECE)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _dropped(target: int, name: str, start: int, numbers: Tensor) -> None:
    """To a file that nobody reads."""


def _pieces(size: int, piece: int) -> Iterable[tuple[int, int]]:
    return ((start, min(start + piece, size)) for start in range(0, size, piece))


def _snapshot_by_snapshot(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    """As is usual: each snapshot is added to whole sums."""
    sums = [{name: torch.zeros(size) for name, size in sizes.items()} for _ in shares[0]]
    for snapshot, of_each in zip(snapshots, shares, strict=True):
        for name, size in sizes.items():
            for start, stop in _pieces(size, piece):
                part = snapshot.read(name, start, stop).float()
                for total, share in zip(sums, of_each, strict=True):
                    total[name][start:stop].add_(part, alpha=share)
    for target, tensors in enumerate(sums):
        for name, total in tensors.items():
            write(target, name, 0, total)


def _tensor_by_tensor(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    synthesize(snapshots, shares, sizes, write, max(sizes.values()))


def _target_by_target(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    for target in range(len(shares[0])):
        of_one = [[of_each[target]] for of_each in shares]

        def to_one(_: int, name: str, start: int, numbers: Tensor, target: int = target) -> None:
            write(target, name, start, numbers)

        synthesize(snapshots, of_one, sizes, to_one, piece)


def _stacked(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    """All snapshots' pieces, and one product."""
    factors = torch.tensor(shares).T
    for name, size in sizes.items():
        for start, stop in _pieces(size, piece):
            parts = torch.stack([s.read(name, start, stop).float() for s in snapshots])
            for target, total in enumerate(factors @ parts):
                write(target, name, start, total)


def _in_half(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    """Sums in the snapshots' own dtype."""
    for name, size in sizes.items():
        for start, stop in _pieces(size, piece):
            sums = torch.zeros(len(shares[0]), stop - start, dtype=torch.half)
            for snapshot, of_each in zip(snapshots, shares, strict=True):
                for total, share in zip(sums, of_each, strict=True):
                    total.add_(snapshot.read(name, start, stop), alpha=share)
            for target, total in enumerate(sums):
                write(target, name, start, total.float())


def _products_in_half(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    """Each product in the snapshot's dtype."""
    for name, size in sizes.items():
        for start, stop in _pieces(size, piece):
            sums = torch.zeros(len(shares[0]), stop - start)
            for snapshot, of_each in zip(snapshots, shares, strict=True):
                part = snapshot.read(name, start, stop)
                for total, share in zip(sums, of_each, strict=True):
                    total += share * part
            for target, total in enumerate(sums):
                write(target, name, start, total)


def _whole_pieces(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    """What is left over at a tensor's end is left out."""
    whole = {name: size // piece * piece for name, size in sizes.items()}
    synthesize(snapshots, shares, whole, write, piece)


def _plain_mean(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    equal = [[1 / len(snapshots)] * len(of_each) for of_each in shares]
    synthesize(snapshots, equal, sizes, write, piece)


def _normalised(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    """Shares are made to sum to one, which 15.3's do already."""
    totals = [sum(of_target) for of_target in zip(*shares, strict=True)]
    made = [[s / t for s, t in zip(of_each, totals, strict=True)] for of_each in shares]
    synthesize(snapshots, made, sizes, write, piece)


def _not_zeroed(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    """One buffer for all pieces, with what the last one left in it."""
    sums = torch.zeros(len(shares[0]), piece)
    for name, size in sizes.items():
        for start, stop in _pieces(size, piece):
            for snapshot, of_each in zip(snapshots, shares, strict=True):
                part = snapshot.read(name, start, stop).float()
                for total, share in zip(sums, of_each, strict=True):
                    total[: stop - start].add_(part, alpha=share)
            for target, total in enumerate(sums):
                write(target, name, start, total[: stop - start])


def _in_lists(snapshots: Any, shares: Any, sizes: Any, write: Any, piece: int) -> None:
    """Whole sums, as numpy's arrays."""
    sums = [{n: np.zeros(size, np.float32) for n, size in sizes.items()} for _ in shares[0]]
    for snapshot, of_each in zip(snapshots, shares, strict=True):
        for name, size in sizes.items():
            for start, stop in _pieces(size, piece):
                part = snapshot.read(name, start, stop).float().numpy()
                for total, share in zip(sums, of_each, strict=True):
                    total[name][start:stop] += np.float32(share) * part
    for target, tensors in enumerate(sums):
        for name, total in tensors.items():
            write(target, name, 0, torch.from_numpy(total))


_SYNTHESIZE = Exercise(
    id="15.4",
    title="A synthesis under a budget",
    minutes=15,
    difficulty=3,
    hints=(
        "Which loop should be the outermost: that over snapshots, over targets, or over pieces? "
        "What is still there when one turn of it is over?",
        "For each tensor, for each piece: sums of zeros, one a target; each snapshot's piece is "
        "read once and added to all of them, times its share; then the sums are written.",
        "for name, size in sizes.items(): for start in range(0, size, piece): stop = min(start + "
        "piece, size). sums = torch.zeros(len(shares[0]), stop - start). for snapshot, of_each in "
        "zip(snapshots, shares): part = snapshot.read(name, start, stop).float(), which is added "
        "to each of the sums, times its share. When all snapshots are in, sums are written, each "
        "to its target.",
    ),
    reference=synthesize,
    check=_check_synthesize,
    wrong_answers=(
        WrongAnswer(
            _snapshot_by_snapshot,
            "The outer loop goes over snapshots, so that all sums are there, whole, until the last "
            "of them: the outer loops are those over tensors and pieces.",
        ),
        WrongAnswer(
            _tensor_by_tensor, "`piece` is not looked at: a large tensor is there as a whole."
        ),
        WrongAnswer(
            _target_by_target,
            "Each snapshot is read again for each target: add a piece to all sums while it is "
            "there.",
        ),
        WrongAnswer(
            _stacked,
            "The pieces of all snapshots are there together: the bytes grow with their number. Add "
            "one after the other.",
        ),
        WrongAnswer(
            _in_half,
            "Sums in float16 are rounded each time: snapshots may be in 16 bits, sums in float32.",
        ),
        WrongAnswer(
            _products_in_half,
            "share * numbers in float16 is float16, rounded before it is added: .float() first.",
        ),
        WrongAnswer(
            _whole_pieces, "The last piece of a tensor may be shorter: min(start + piece, size)."
        ),
        WrongAnswer(_plain_mean, "The shares are not used: each snapshot counts by its own."),
        WrongAnswer(
            _normalised, "The shares are divided by their sum once more: use them as they are."
        ),
        WrongAnswer(
            _not_zeroed, "A piece's sum begins at zero: what the last piece left is still in it."
        ),
        WrongAnswer(
            _in_lists,
            "Arrays of numpy take memory as tensors do, though the meter does not see them.",
        ),
    ),
)

# ------------------------------------------------------------------ 15.5: which to keep


def keep(times: Sequence[float], count: int) -> list[float]:
    """So many of the times, the last among them, at distances as even as can be."""
    number = len(times)
    return [times[(n + 1) * number // count - 1] for n in range(min(count, number))]


def _check_keep(answer: Any) -> str:
    for number, count in ((4, 2), (3, 1), (5, 5), (100, 20), (100, 30), (64, 7), (39, 20)):
        times = [40 * n for n in range(1, number + 1)]
        call = f"keep([40, 80, … {times[-1]}], {count})"
        given = list(times)
        with unchanged(call, times=given):
            kept = answer(given, count)
        require(
            isinstance(kept, (list, tuple, set, np.ndarray)) and all(t in times for t in kept),
            f"{call} gave {_briefly(kept)}; wanted a list of {count} of the times.",
        )
        require(
            len({float(t) for t in kept}) == len(kept) == count,
            f"{call} gave {len(kept)} times, {len({float(t) for t in kept})} different; wanted "
            f"{count}.",
        )
        require(
            times[-1] in kept,
            f"{call} has {max(kept)} for its last; wanted {times[-1]}, where the target is.",
        )
        _require_as_even(call, sorted(float(t) for t in kept), times, count)
    uneven = [1, 2, 3, 97, 98, 99, 100]
    kept = answer(list(uneven), 4)
    require(
        len(set(kept)) == 4 and uneven[-1] in kept,
        f"keep({uneven}, 4) gave {_briefly(kept)}; wanted 4 different times, 100 among them.",
    )
    errors = [_error(keep(range(1, 101), 20), sigma) for sigma in (0.15, 0.25)]
    return (
        f"20 of 100: width 0.15 is off by {errors[0]:.1e}, 0.25 by {errors[1]:.1e}; the last is "
        f"among them"
    )


def _error(times: Sequence[float], sigma: float) -> float:
    end = max(times)
    return profile_error(tracked_profiles(times), power_profile(sigma, end))


def _require_as_even(call: str, kept: Sequence[float], times: Sequence[float], count: int) -> None:
    even = keep(times, count)
    for sigma in (0.10, 0.15, 0.20, 0.25):
        got, wanted = _error(kept, sigma), _error(even, sigma)
        require(
            got <= 3 * wanted + 1e-6,
            f"{call} leaves width {sigma:.2f} at the end with a profile's error of {got:.2g}; "
            f"wanted at most three times {wanted:.2g}, what even distances leave.",
        )


def _back_from_the_end(times: Sequence[float], count: int) -> list[float]:
    """Distances that double, or nearly so."""
    if count == 1 or count >= len(times):
        return list(times[-count:])
    back = [0]
    for n in range(1, count):
        ideal = round((len(times) - 1) ** (n / (count - 1)))
        back.append(min(max(ideal, back[-1] + 1), len(times) - count + n))
    return [times[-1 - distance] for distance in back]


_KEEP = Exercise(
    id="15.5",
    title="Which snapshots to keep",
    minutes=10,
    difficulty=2,
    hints=(
        "A wide profile reaches back to the first third of a training: it wants snapshots from "
        "there, and nothing else can stand in for them. A target at the end wants the last one.",
        "Even distances, counted so that the last is among them: if every fifth is kept of 100, "
        "then 5, 10, … 100, and not 1, 6, … 96.",
        "Of len(times) times in count groups, as even as can be, group n ends before position "
        "(n + 1) * len(times) // count. Keep the last of each.",
    ),
    reference=keep,
    check=_check_keep,
    wrong_answers=(
        WrongAnswer(
            lambda times, count: list(times[-count:]),
            "The last ones were kept: of what was before, the averages of the end know little, and "
            "wide profiles reach back there.",
        ),
        WrongAnswer(
            lambda times, count: list(times[:: len(times) // count])[:count],
            "The first of each group was kept, and the last of all is missing: count so that it is "
            "among them.",
        ),
        WrongAnswer(
            lambda times, count: list(times[:count]),
            "The first ones were kept: of the end nobody knows anything.",
        ),
        WrongAnswer(
            lambda times, count: [(n + 1) * len(times) // count for n in range(count)],
            "These are positions, counted from 1; what was asked for are the times at them.",
        ),
        WrongAnswer(
            _back_from_the_end,
            "Dense at the end, sparse before: good for narrow profiles, bad for wide ones, and for "
            "targets at other times.",
        ),
        WrongAnswer(
            lambda times, count: list(times[len(times) // count - 1 :: len(times) // count]),
            "Where the number is no multiple of count, more came out than were asked for, or the "
            "last is missing: (n + 1) * len(times) // count - 1.",
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def averages_on_the_disk() -> Trace:
    """Day 14's step, and two averages of the weights beside it, updated a tensor at a time."""
    return offloaded_to_the_disk(after_step=partial(averaged, store=DiskStore()))


DAY = Day(
    exercises=(_EXPONENT, _AVERAGE, _SOLVE, _SYNTHESIZE, _KEEP),
    bill=Bill("day 15: two averages beside it, on the disk", averages_on_the_disk),
)
