"""Measure one technique against the plain step: trace, time and gradients.

The meter measures the second step. The first step creates the optimizer state. It starts from the
same weights with every technique, so its gradients are the ones to compare.

While the meter measures a step on an accelerator, nothing else may be alive there, because the
allocator's statistics cover the whole device. On the CPU the meter counts one model only. So there
the plain training stays in memory and is built once for all comparisons of time.

A setting is memlab.train's, with plugs as techniques, or a TransformersSetting, with recipes.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from memlab.cli.errors import UsageError, error_summary, is_out_of_memory
from memlab.planner.measuring import whole_trace
from memlab.trace import Trace
from memlab.train import TECHNIQUES, Setting, Training, measured

LONG_SECONDS = 0.4  # total time after which fewer rounds are enough
AGREEMENT = 1.1  # two ratios agree if they differ by at most this factor
SLOW = 5  # with a larger slowdown against float32, a dtype's rows get no time
MATMUL_SIZE = 256  # takes 0.5 ms, or 15 ms in a slow dtype

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """The result of one technique. Ratios and differences are relative to the plain step.

    A technique that could not be measured has a one-line `failure` and nothing else. One that was
    not timed has the reason in `dry_for`, and its bytes.
    """

    name: str
    trace: Trace | None = None
    seconds: float | None = None
    time_ratios: tuple[float, ...] = ()  # one per round
    gradient_difference: float | None = None
    largest_gradient: float | None = None
    failure: str | None = None
    dry_for: str | None = None
    estimated_time_ratio: float | None = None  # if the step does not run

    @property
    def time_ratio(self) -> float | None:
        """Return the median of the rounds, which one disturbed round does not change."""
        return statistics.median(self.time_ratios) if self.time_ratios else None

    def more_numbers(self) -> dict[str, Any]:
        """Return the numbers that only this kind of row has, for JSON."""
        return {}


def silent(stage: str) -> None:
    """Announce nothing."""


def by_peak(rows: Sequence[Row]) -> list[Row]:
    """Return the plain row, then the others, the smallest peak first and failures last."""

    def allocated(row: Row) -> float:
        return math.inf if row.trace is None else row.trace.allocated_bytes

    return [*rows[:1], *sorted(rows[1:], key=allocated)]


def dry_row(setting: Any, name: str, technique: Any) -> Row:
    """Measure the exact bytes without computing anything, or predict those on the setting's GPU."""
    if isinstance(setting, Setting):
        return Row(name, whole_trace(setting, name, technique))
    return Row(name, setting.dry_trace(technique))


def measured_rows(setting: Any, chosen: dict[str, Any], dry: bool, announce: Announce) -> list[Row]:
    """Measure one row per technique, the plain one first.

    A technique that fails gets a row with its error, so the other rows are not lost.
    """
    row_of = partial(dry_row, setting) if dry else PairedRuns(setting, chosen["plain"]).row
    rows = []
    for name, technique in chosen.items():
        announce(name)
        rows.append(_row_or_failure(row_of, setting, name, technique))
    return rows


def best_rows(
    setting: Any,
    chosen: dict[str, Any],
    announce: Announce,
    most: int,
    max_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """Measure the bytes of all techniques in dry runs. Then time real steps of the plain one and of
    the `most` with the smallest peaks, if they are likely to end within `max_seconds`."""
    began, longest = clock(), 0.0
    rows = {row.name: row for row in measured_rows(setting, chosen, True, announce)}
    runs = PairedRuns(setting, chosen["plain"])
    ranked = by_peak(list(rows.values()))
    for name, trace in ((row.name, row.trace) for row in ranked[: most + 1] if row.trace):
        announce(f"{name}: time")
        started = clock()
        is_late = started - began + longest > max_seconds
        if reason := _slow_dtype(name) or (is_late and f"{max_seconds:.0f} s were over"):
            rows[name] = replace(rows[name], dry_for=reason)
            continue
        rows[name] = _row_or_failure(partial(runs.row, trace=trace), setting, name, chosen[name])
        longest = max(longest, clock() - started)
    for row in ranked[most + 1 :]:
        rows[row.name] = replace(row, dry_for=f"only the {most} smallest peaks are timed")
    return list(rows.values())


def _row_or_failure(
    row_of: Callable[[str, Any], Row], setting: Any, name: str, technique: Any
) -> Row:
    try:
        return row_of(name, technique)
    except Exception as error:
        if name != "plain":
            return Row(name, failure=error_summary(error))
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            f"the plain step ran out of memory with {setting}; try "
            f"--batch {max(1, setting.batch // 2)}, or --dry-run, which allocates nothing"
        ) from error


def _slow_dtype(name: str) -> str | None:
    """Say why this CPU takes too long for the technique, or return None.

    A CPU without bfloat16 instructions takes 20 to 50 times as long for bfloat16 matmuls, and
    almost every CPU does for float16.
    """
    for part in name.split("+"):
        dtype = TECHNIQUES[part].matmul_dtype if part in TECHNIQUES else None
        if dtype and (slowdown := slowdown_of(getattr(torch, dtype))) > SLOW:
            return f"matmuls in {dtype} are {slowdown:.0f} × slower on this CPU"
    return None


@cache
def slowdown_of(dtype: torch.dtype) -> float:
    """Time a small matmul in the dtype, relative to float32. The result is cached."""
    return _matmul_seconds(dtype) / _matmul_seconds(torch.float32)


def _matmul_seconds(dtype: torch.dtype) -> float:
    """Return the fastest of five runs; the first run may include setup."""
    factor = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype)
    return min(_seconds(partial(torch.mm, factor, factor)) for _ in range(5))


class PairedRuns:
    """Runs real steps, each technique's in alternation with the plain one's."""

    def __init__(self, setting: Any, plain: Any) -> None:
        self._setting = setting
        self._plain = plain
        self._baseline: Training | None = None
        self._gradients: dict[str, torch.Tensor] = {}

    def row(self, name: str, technique: Any, trace: Trace | None = None) -> Row:
        """Measure the technique, only its time if the trace is known. The plain one comes first."""
        _clear_memory(self._setting)
        training = self._started(technique)
        difference, largest = self._compare(training)
        trace = measured(training) if trace is None else trace
        rounds = self._rounds(training, technique)
        seconds = statistics.median(ours for ours, *_ in rounds) if rounds else None
        return Row(name, trace, seconds, _ratios(rounds), difference, largest)

    def _started(self, technique: Any) -> Training:
        training = self._setting.build(technique)
        training.step()
        return training

    def _compare(self, training: Training) -> tuple[float | None, float | None]:
        """Return the largest difference from the plain gradients, and the largest gradient.

        Skip weights that the plain model lacks or that keep no gradient.
        """
        gradients = _copied_gradients(training)
        self._gradients = self._gradients or gradients
        both = [name for name in gradients if name in self._gradients]
        differences = (gradients[name] - self._gradients[name] for name in both)
        return _largest(differences), _largest(gradients[name] for name in both)

    def _rounds(self, training: Training, technique: Any) -> list[tuple[float, ...]]:
        """Time the technique's step and the plain one; return [] if both do not fit at once."""
        if technique is self._plain:
            self._keep(training)
            return time_in_turn(training.step)
        try:
            plain = self._baseline or self._started(self._plain)
            return time_in_turn(training.step, plain.step)
        except Exception as error:
            if is_out_of_memory(error):
                return []
            raise

    def _keep(self, plain: Training) -> None:
        if self._setting.device == "cpu":
            self._baseline = plain


def time_in_turn(*steps: Callable[[], object]) -> list[tuple[float, ...]]:
    """Time the steps in alternation, so that other load on the machine affects all of them.

    Run five rounds, or three if they are long, or two if they are long and agree.
    """
    rounds: list[tuple[float, ...]] = []
    while not _has_enough_rounds(rounds):
        rounds.append(tuple(map(_seconds, steps)))
    return rounds


def _has_enough_rounds(rounds: Sequence[tuple[float, ...]]) -> bool:
    is_long = sum(map(sum, rounds)) >= LONG_SECONDS
    wanted = 5 if not is_long else 2 if _ratios_agree(rounds[:2]) else 3
    return len(rounds) >= wanted


def _ratios_agree(rounds: Sequence[tuple[float, ...]]) -> bool:
    ratios = _ratios(rounds)
    return max(ratios) <= AGREEMENT * min(ratios)


def _ratios(rounds: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the ratio of the first step's time to the last one's in each round."""
    return tuple(seconds[0] / seconds[-1] for seconds in rounds)


def _seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def _copied_gradients(training: Training) -> dict[str, torch.Tensor]:
    """Copy the gradients, because references to them would keep them alive in the measured step.

    The copies are cast to float32 on the CPU, so the cast uses no device memory between the two
    steps. If the optimizer steps copies of the weights, those copies hold the gradients, in the
    model's order.
    """
    trained = {p: name for name, p in training.model.named_parameters() if p.requires_grad}
    groups = training.optimizer.param_groups
    stepped = [p for group in groups for p in group["params"] if p.requires_grad]
    are_own = all(p in trained for p in stepped)
    names = [trained[p] for p in stepped] if are_own else trained.values()
    gradients = {n: p.grad for n, p in zip(names, stepped, strict=True) if p.grad is not None}
    return {name: g.to("cpu", copy=True).float() for name, g in gradients.items()}


def _largest(tensors: Iterable[torch.Tensor]) -> float | None:
    """Return the largest absolute value, nan if there is any; None without tensors."""
    largest = [tensor.abs().max() for tensor in tensors]
    return torch.stack(largest).max().item() if largest else None


def _clear_memory(setting: Any) -> None:
    """Free the previous technique: a wrapped block and its wrapper form a reference cycle."""
    gc.collect()
    if setting.device != "cpu":
        torch.accelerator.empty_cache()
