"""Send the monitor's numbers to TensorBoard, Weights & Biases, a function or the terminal."""

from collections.abc import Callable
from typing import Any, NamedTuple

from memlab.units import format_bytes, plural

PEAK, RESERVED, GROWTH = "memory/peak_allocated", "memory/reserved", "memory/growth"


class StepMemory(NamedTuple):
    """The memory of one step, in bytes.

    `allocated_bytes` is allocated after the step. `growth_bytes` is the difference to the step
    before. `reserved_bytes` is None if the device does not report it.
    """

    step: int
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int | None
    growth_bytes: int


class Report(NamedTuple):
    """The memory of the steps since the report before."""

    step: int  # the last of them
    steps: int
    peak_bytes: int
    allocated_bytes: int  # after the last step
    reserved_bytes: int | None
    growth_bytes: int

    def values(self) -> dict[str, int]:
        """Return the numbers under the names that they are logged under."""
        found = {PEAK: self.peak_bytes, RESERVED: self.reserved_bytes, GROWTH: self.growth_bytes}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        parts = [
            f"peak {format_bytes(self.peak_bytes)}",
            f"{format_bytes(self.allocated_bytes)} after the step",
            *(
                []
                if self.reserved_bytes is None
                else [f"{format_bytes(self.reserved_bytes)} reserved"]
            ),
            f"growth {signed(self.growth_bytes)} in {plural(self.steps, 'step')}",
        ]
        return f"step {self.step}: {', '.join(parts)}"


class Interval:
    """Collect steps, and call `emit(report)` after every `every` of them (never, if None)."""

    def __init__(self, every: int | None, emit: Callable[[Report], Any] | None = None) -> None:
        self._every, self._emit = every, emit
        self._count = self._peak_bytes = self._growth_bytes = 0
        self._last: StepMemory | None = None

    def add(self, step: StepMemory) -> None:
        self._last = step
        self._count += 1
        self._peak_bytes = max(self._peak_bytes, step.peak_bytes)
        self._growth_bytes += step.growth_bytes
        if self._emit is not None and self._count == self._every:
            report = self.take()
            assert report is not None  # it has this step
            self._emit(report)

    def take(self) -> Report | None:
        """Return a report of the collected steps and begin anew; None if there are none."""
        if self._last is None:
            return None
        report = Report(
            self._last.step,
            self._count,
            self._peak_bytes,
            self._last.allocated_bytes,
            self._last.reserved_bytes,
            self._growth_bytes,
        )
        self._last = None
        self._count = self._peak_bytes = self._growth_bytes = 0
        return report


def emitter(target: Any) -> Callable[[Report], None]:
    """Return a function that sends a report to a writer, a run or a function.

    A W&B run gets `commit=False`: the values join the row of your next `run.log`, and its step
    counter does not move.
    """
    if hasattr(target, "add_scalar"):
        return lambda report: _send(report, target.add_scalar)
    if hasattr(target, "log"):
        return lambda report: target.log(report.values(), commit=False)
    if callable(target):
        return lambda report: _send(report, target)
    raise TypeError(
        f"got a {type(target).__name__} to log to; pass a SummaryWriter, a W&B run or a function "
        f"(name, value, step)"
    )


def _send(report: Report, scalar: Callable[[str, int, int], Any]) -> None:
    for name, value in report.values().items():
        scalar(name, value, report.step)


def signed(num_bytes: int) -> str:
    return f"{'+' if num_bytes >= 0 else '−'}{format_bytes(abs(num_bytes))}"
