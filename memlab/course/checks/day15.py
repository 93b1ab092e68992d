"""Day 15: post-hoc EMA from disk."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memlab.course.bill_steps import offloaded_to_the_disk
from memlab.course.exercises import Bill, Day, Wrong, distinct, require
from memlab.course.properties import (
    limited_outside_of_tensors,
    peak_bytes,
    require_none_wrong,
    rounding,
    unchanged,
)
from memlab.course.solutions import checked, solution
from memlab.ema import (
    Profile,
    impulse_response,
    power_profile,
    profile_error,
    sigma_from_gamma,
)
from memlab.metering import measure
from memlab.offload import DiskStore
from memlab.reference.post_hoc_ema import Average, exponent, solve, synthesize
from memlab.trace import Trace
from memlab.train.plugs import averaged

TRACKED = (0.05, 0.10)
_ELSEWHERE = ("memlab.ema.gamma_from_sigma", "memlab.ema.solve_weights")


def _briefly(value: Any) -> str:
    if value is None:
        return "None (is there a return?)"
    if getattr(value, "shape", ()):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and len(value) > 4:
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r:.60}"


# ------------------------------------------------------------------ 15.1: the exponent

_WIDEST = 12**-0.5  # the width for γ = 0


def _check_exponent(answer: Any) -> str:
    for sigma in (0.05, 0.10, 0.15, 0.25, 0.28, 0.286, 0.28867, _WIDEST, 0.002):
        _require_exponent(answer, sigma)
    for sigma in (0.3, 0.5, 0.29, 0.288676, 0, -0.1):
        _require_refused(answer, sigma)
    return "0.05 ↔ 16.97, 0.10 ↔ 6.94, 0.28 ↔ 0.17 · above 0.2887 refused"


def _require_exponent(answer: Any, sigma: float) -> None:
    call = f"exponent({sigma})" if sigma < _WIDEST else "exponent(12**-0.5), where γ is 0,"
    try:
        gamma = _number(call, answer(sigma))
    except ValueError as error:
        if sigma <= 0.28:
            raise
        require(False, f"{call} raised ValueError: {error}; wanted a γ of 0 or more.")
        return
    require(-1e-9 <= gamma < 1e6, f"{call} gave {gamma:.4f}; wanted the root that is 0 or more.")
    width = sigma_from_gamma(max(gamma, 0.0))
    mine, right = distinct(width, sigma)
    require(
        abs(width - sigma) < 1e-6 * sigma,
        f"{call} gave {gamma:.6g}, a profile of width {mine}; wanted {right}.",
    )


def _require_refused(answer: Any, sigma: float) -> None:
    call, wanted = f"exponent({sigma})", "wanted a ValueError: no γ of 0 or more has that width"
    try:
        gamma = _number(call, answer(sigma))
    except ValueError:
        return
    except (ArithmeticError, IndexError) as error:
        raise Wrong(f"{call} raised {type(error).__name__}; {wanted}.") from None
    require(False, f"{call} gave {gamma:.4f}; {wanted}.")


def _number(call: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (complex, bool, str)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise Wrong(f"{call} gave {_briefly(value)}; wanted a real number.")
    return number


# ------------------------------------------------------------------ 15.2: the average


def _check_average(answer: Any) -> str:
    for times in ([1, 2], [1, 2, 3, 4], [10, 20, 30], [3, 4, 9, 20], [0.5, 0.75, 2.25]):
        _check_response(answer, times)
    most = _check_in_place(answer)
    _check_owns_its_values(answer)
    return (
        f"the factor of each step in the average is exact to 1e-12 · in place, with {most:,} bytes "
        f"of extra memory"
    )


def _check_response(answer: Any, times: Sequence[float]) -> None:
    """Let each step's weights be another unit vector, so the average lists each step's factor."""
    case, gamma = f"updates at {', '.join(map(str, times))}", 2.5
    directions = torch.eye(len(times) + 1, dtype=torch.float64)
    average = _average_of(answer, [directions[0], directions[0][:1]], gamma)
    for n, time in enumerate(times, 1):
        with unchanged(f"{case}: an update"):
            average.update([directions[n], directions[n][:1]], time)
    response = average.values[0]
    require(
        isinstance(response, Tensor) and response.shape == directions[0].shape,
        f"{case}: values[0] is {_briefly(response)}; wanted a tensor like the first weight.",
    )
    first, *others = response.tolist()
    require(
        abs(first) < 1e-12,
        f"{case}: the weights from before training have a factor of {first:.4g}; wanted 0.",
    )
    for time, got, wanted in zip(times, others, impulse_response(times, gamma), strict=True):
        mine, right = distinct(got, wanted)
        require(
            abs(got - wanted) < 1e-12,
            f"{case}, γ = {gamma}: the factor of step {time} is {mine}; wanted {right}.",
        )
    require(
        bool(average.values[1].abs().item() < 1e-12),
        f"{case}: the first tensor is updated correctly, the second is not.",
    )


def _average_of(answer: Any, weights: Sequence[Tensor], gamma: float) -> Any:
    average = answer(weights, gamma)
    require(
        isinstance(getattr(average, "values", None), list) and hasattr(average, "update"),
        f"Average(weights, gamma) gave {_briefly(average)}; wanted an object with values, a list "
        f"of tensors, and update.",
    )
    return average


def _check_in_place(answer: Any) -> int:
    """Return the bytes that an update allocates."""
    first = torch.linspace(0.1, 0.9, 1000)  # no powers of two: they can be scaled and scaled back
    weights = [torch.nn.Parameter(first), torch.nn.Parameter(torch.ones(30, 20))]
    case = "weights of 1,000 and 30 × 20 elements"
    average = _average_of(answer, weights, 2.5)
    with unchanged(f"{case}: an update", weights=weights):
        average.update(weights, 1)
        places = [value.data_ptr() for value in average.values]
        most = peak_bytes(measure(lambda: average.update(weights, 2)))
    require(
        not any(value.requires_grad for value in average.values),
        f"{case}: the average has a graph, which grows with each update. Detach the weights.",
    )
    require(
        [value.data_ptr() for value in average.values] == places,
        f"{case}: an update moves the average to other memory; wanted it in place.",
    )
    require(
        most <= 4 * 1000 + 64,
        f"{case}: an update allocates {most:,} bytes; wanted at most 4,000, the largest tensor.",
    )
    return most


def _check_owns_its_values(answer: Any) -> None:
    """An optimizer steps the weights in place. The average must not change with them."""
    weights = [torch.full((3,), 1.0), torch.full((2, 2), 1.0)]
    average = _average_of(answer, weights, 2.5)
    average.update(weights, 1)
    for weight in weights:
        weight.fill_(100.0)
    now = [value.tolist() for value in average.values]
    require(
        now == [[1.0] * 3, [[1.0] * 2] * 2],
        f"after the first update the weights change in place, and the values are now {now}; wanted "
        f"the weights at the update.",
    )


# ------------------------------------------------------------------ 15.3: the least squares

Solve = Callable[[Sequence[Profile], Profile], Any]


def tracked_profiles(times: Iterable[float], sigmas: Sequence[float] = TRACKED) -> list[Profile]:
    """The profiles of a snapshot of each average at each time."""
    return [power_profile(sigma, time) for time in times for sigma in sigmas]


def _check_solve(answer: Solve) -> str:
    one = [power_profile(0.05, 100)]
    _require_error(answer, "one snapshot of width 0.05, target width 0.05", one, one[0])
    few = tracked_profiles((50, 100))
    case = "widths 0.05 and 0.10 at times 50 and 100, target 0.10 at 100"
    _require_error(answer, case, few, few[3])
    case = "widths 0.05 and 0.10 at times 50 and 100, target 0.25 at 100"
    _require_error(answer, case, few, power_profile(0.25, 100))
    many = tracked_profiles(range(10, 170, 10))
    for sigma, end in ((0.07, 160), (0.15, 160), (0.25, 160), (0.15, 80), (0.15, 75)):
        case = f"widths 0.05 and 0.10 at times 10, 20, … 160, target {sigma:.2f} at {end}"
        _require_error(answer, case, many, power_profile(sigma, end))
    shuffled = [many[(11 * n + 5) % 32] for n in range(32)]
    case = "the same snapshots shuffled, target 0.15 at 80"
    _require_error(answer, case, shuffled, power_profile(0.15, 80))
    alike = tracked_profiles(range(1, 51), (0.20, 0.25))
    case = "widths 0.20 and 0.25 at times 1, 2, … 50, target 0.07 at 50"
    _require_error(answer, case, alike, power_profile(0.07, 50))
    late = tracked_profiles(range(1001, 1021))
    case = "widths 0.05 and 0.10 at times 1001, 1002, … 1020, target the width 0.10 at 1010"
    own = profile_error(late, late[19], _weights_of(answer, case, late, late[19]))
    require(
        own < 1e-20,
        f"{case}: the profile error is {own:.0e}, although the target is one of the snapshots; "
        f"wanted less than 1e-20. Solve A·x = b as it is, without an inverse of A.",
        evidence=(case, f"{own:.0e}"),
    )
    error = profile_error(many, power_profile(0.15, 160))
    return (
        f"coefficients sum to 1, and are 0 after the target · with snapshots at 16 times, width "
        f"0.15 has a profile error of {error:.1e}"
    )


def _require_error(answer: Solve, case: str, snapshots: Sequence[Any], target: Any) -> None:
    weights = _weights_of(answer, case, snapshots, target)
    later = sum(x != 0 for x, s in zip(weights, snapshots, strict=True) if s.t > target.t)
    require(
        later == 0,
        f"{case}: {later} snapshots later than time {target.t:g} have a nonzero coefficient; "
        f"wanted 0.",
    )
    in_all, _ = distinct(float(weights.sum()), 1.0)
    require(
        abs(weights.sum() - 1) < 1e-9,
        f"{case}: the coefficients sum to {in_all}; wanted 1, to float64 precision.",
    )
    got = profile_error(snapshots, target, weights)
    best = profile_error(snapshots, target, solve(snapshots, target))
    mine, right = distinct(got, best, 3)
    require(
        got <= 1.05 * best + 1e-11,
        f"{case}: the profile error is {mine}; wanted {right}.",
    )


def _weights_of(
    answer: Solve, case: str, snapshots: Sequence[Profile], target: Profile
) -> np.ndarray:
    given = list(snapshots)
    try:
        with unchanged(f"{case}: your answer", snapshots=given):
            got = answer(given, target)
    except np.linalg.LinAlgError as error:
        require(False, f"{case}: np.linalg raised {str(error).rstrip('.')!r}.")
        return np.full(len(given), np.nan)
    try:
        weights = np.asarray(got, dtype=np.float64)
    except (TypeError, ValueError):
        weights = np.array(math.nan)
    require(
        weights.shape == (len(snapshots),) and bool(np.isfinite(weights).all()),
        f"{case}: got {_briefly(got)}; wanted {len(snapshots)} coefficients.",
    )
    return weights


# ------------------------------------------------------------------ 15.4: the synthesis


class MappedSnapshot:
    """A snapshot in a memory-mapped file. `read` returns a view and counts the elements read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.elements_read = 0

    def read(self, name: str, start: int, stop: int) -> Tensor:
        require(
            name in self.tensors, f"read({name!r}, …): wanted one of {', '.join(self.tensors)}."
        )
        size = len(self.tensors[name])
        require(
            0 <= start < stop <= size,
            f"read({name!r}, {start}, {stop}): that tensor has {size} elements.",
        )
        self.elements_read += stop - start
        return self.tensors[name][start:stop]


class SumWriter:
    """Keeps the sums. Each element has to be written once, in float32."""

    def __init__(self, targets: int, sizes: dict[str, int]) -> None:
        self.tensors = [
            {name: torch.full((size,), math.nan) for name, size in sizes.items()}
            for _ in range(targets)
        ]
        self._given: list[tuple[str, Tensor, Tensor]] = []

    def write(self, target: int, name: str, start: int, elements: Tensor) -> None:
        call = f"write({target}, {name!r}, {start}, …)"
        require(
            isinstance(elements, Tensor) and elements.dtype == torch.float32,
            f"{call}: wanted float32 elements, got {getattr(elements, 'dtype', type(elements))}.",
        )
        place = self.tensors[target][name][start : start + elements.numel()]
        require(
            place.shape == elements.shape,
            f"{call}: got shape {tuple(elements.shape)}; wanted one dimension with at most "
            f"{len(place)} elements, those left in {name!r}.",
        )
        require(bool(place.isnan().all()), f"{call}: some of these elements were already written.")
        place.copy_(elements)
        self._given.append((call, elements, elements.clone()))

    def require_unchanged(self, case: str) -> None:
        """A writer may write later, from the tensors that it was given."""
        for call, now, before in self._given:
            require(
                torch.equal(now, before),
                f"{case}: the elements of {call} changed later. Write each sum from a tensor of "
                f"its own.",
            )


def _snapshots(count: int, sizes: dict[str, int]) -> list[MappedSnapshot]:
    drawn = torch.Generator().manual_seed(count)
    return [
        MappedSnapshot({n: torch.randn(size, generator=drawn).half() for n, size in sizes.items()})
        for _ in range(count)
    ]


def _shares(snapshots: int, targets: int) -> list[list[float]]:
    """Return coefficients: some negative, small for the first snapshot. Only the first target's
    sum to 1."""
    drawn = torch.Generator().manual_seed(1)
    made = torch.randn(snapshots, targets, dtype=torch.float64, generator=drawn)
    made[0] *= 1e-4
    sums = 1 + 0.5 * torch.arange(targets)
    made[1:] += (sums - made.sum(0)) / (snapshots - 1)
    return made.tolist()


_CHUNK_SIZE, _TARGETS = 2048, 2
_SIZES = {"a": 9 * _CHUNK_SIZE + 100, "b": 300}
_CASE = f"{sum(_SIZES.values()):,} elements, chunks of {_CHUNK_SIZE:,}, {_TARGETS} targets"


def _check_synthesize(answer: Any) -> str:
    for case, sizes, snapshots, targets, chunk_size in (
        ("one tensor of 6 elements, chunks of 3, 2 snapshots, 1 target", {"w": 6}, 2, 1, 3),
        ("7 elements, chunks of 3, 2 snapshots, 1 target", {"w": 7}, 2, 1, 3),
        ("tensors of 5 and 3, chunks of 4, 3 snapshots, 2 targets", {"a": 5, "b": 3}, 3, 2, 4),
        (_CASE, _SIZES, 4, _TARGETS, _CHUNK_SIZE),
    ):
        _require_sums(answer, case, sizes, snapshots, targets, chunk_size)
    # A loop's variables keep the last chunk alive while the next one is made. Sums may be float64.
    allowed = 4 * 4 * (_TARGETS + 1) * _CHUNK_SIZE + 1024
    for count in (4, 40):
        most = peak_bytes(measure(_run(answer, count)))
        require(
            most <= allowed,
            f"{_CASE}, {count} snapshots: a peak of {most:,} bytes; wanted at most {allowed:,}, "
            f"{4 * (_TARGETS + 1)} chunks of float32 elements and 1,024 bytes.",
        )
    limited_outside_of_tensors(f"{_CASE}, 40 snapshots: your answer", _run(answer, 40), 2**16)
    return f"correct sums, each element read once · a peak of {most:,} bytes with 40 snapshots"


def _require_sums(
    answer: Any, case: str, sizes: dict[str, int], snapshots: int, targets: int, chunk_size: int
) -> None:
    found, shares = _snapshots(snapshots, sizes), _shares(snapshots, targets)
    writer, files = SumWriter(targets, sizes), [snapshot.tensors for snapshot in found]
    with unchanged(f"{case}: your answer", snapshots=files, shares=shares, sizes=sizes):
        answer(found, shares, sizes, writer.write, chunk_size)
    writer.require_unchanged(case)
    factors = torch.tensor(shares, dtype=torch.float64).T
    for name in sizes:
        parts = torch.stack([tensors[name].double() for tensors in files])
        for target, sums in enumerate(factors @ parts):
            what = f"{name!r}, target {target},"
            summed = factors[target].abs() @ parts.abs()
            _require_close(case, what, writer.tensors[target][name], sums, summed)
    read = sum(snapshot.elements_read for snapshot in found)
    wanted_reads = snapshots * sum(sizes.values())
    require(
        read == wanted_reads,
        f"{case}: {read} elements were read; wanted {wanted_reads}, each of them once.",
    )


def _require_close(case: str, what: str, got: Tensor, wanted: Tensor, summed: Tensor) -> None:
    missing = int(got.isnan().sum())
    require(
        missing == 0,
        f"{case}: {missing} of {len(got)} elements of {what} were never written.",
    )
    off = (got.double() - wanted).abs() > rounding(torch.float32, terms=16) * summed
    require_none_wrong(f"{case}: {what.rstrip(',')}", got, wanted, off)


def _run(answer: Any, count: int) -> Callable[[], Any]:
    """Return a call that synthesizes from `count` snapshots and drops the results."""
    found, shares = _snapshots(count, _SIZES), _shares(count, _TARGETS)
    return lambda: answer(found, shares, _SIZES, lambda *written: None, _CHUNK_SIZE)


# ------------------------------------------------------------------ 15.5: the snapshots to keep

keep = solution("15.5")


def _check_keep(answer: Any) -> str:
    for number, count in ((4, 2), (3, 1), (5, 5), (100, 20), (100, 30), (64, 7), (39, 20)):
        times = [40 * n for n in range(1, number + 1)]
        call = f"keep([40, 80, … {times[-1]}], {count})"
        kept = _kept(answer, call, times, count)
        _require_as_even(call, kept, times, count)
    uneven = [1, 2, 3, 97, 98, 99, 100]
    _kept(answer, f"keep({uneven}, 4)", uneven, 4)
    errors = [_error(keep(range(1, 101), 20), sigma) for sigma in (0.15, 0.25)]
    return (
        f"20 of 100 times, including the last: errors of {errors[0]:.1e} at width 0.15 and "
        f"{errors[1]:.1e} at 0.25"
    )


def _kept(answer: Any, call: str, times: Sequence[int], count: int) -> list[float]:
    """Return the kept times, sorted. Require `count` of them, including the last."""
    given = list(times)
    with unchanged(call, times=given):
        kept = answer(given, count)
    require(
        isinstance(kept, (list, tuple, set, np.ndarray)) and all(t in times for t in kept),
        f"{call} gave {_briefly(kept)}; wanted a list of {count} of the times.",
    )
    found = sorted({float(t) for t in kept})
    require(
        len(found) == len(kept) == count,
        f"{call} gave {len(kept)} times, {len(found)} of them different; wanted {count}.",
    )
    require(
        times[-1] in kept,
        f"{call} ends at {max(kept)}; wanted {times[-1]}, the last time.",
    )
    return found


def _error(times: Sequence[float], sigma: float) -> float:
    return profile_error(tracked_profiles(times), power_profile(sigma, max(times)))


def _require_as_even(call: str, kept: Sequence[float], times: Sequence[float], count: int) -> None:
    even = keep(times, count)
    for sigma in (0.10, 0.15, 0.20, 0.25):
        got, wanted = _error(kept, sigma), _error(even, sigma)
        require(
            got <= 3 * wanted + 1e-6,
            f"{call} gives a profile error of {got:.2g} at width {sigma:.2f}; wanted at most 3 × "
            f"{wanted:.2g}, the error with evenly spaced times.",
        )


# ------------------------------------------------------------------ the bill


def averages_on_the_disk() -> Trace:
    """Day 14's step with two averages of the weights, updated one tensor at a time."""
    return offloaded_to_the_disk(after_step=partial(averaged, store=DiskStore()))


DAY = Day(
    exercises=(
        checked("15.1", _check_exponent, exponent, rebuilds=_ELSEWHERE),
        checked("15.2", _check_average, Average),
        checked("15.3", _check_solve, solve, rebuilds=_ELSEWHERE),
        checked("15.4", _check_synthesize, synthesize),
        checked("15.5", _check_keep, keep),
    ),
    bill=Bill("day 15: two EMA averages on disk", averages_on_the_disk),
)
