"""Measure or predict a test's memory, and say which lines exceeded its budget."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.configs.gpu_names import gpus_called
from memlab.metering.storages import Change, StorageMeter
from memlab.prediction import predict
from memlab.trace import Event, Trace
from memlab.units import format_bytes, parse_bytes

LINES = 5  # in a failure


@dataclass(frozen=True)
class Budget:
    """The arguments of a marker. Without a limit, the device's memory is the limit."""

    limit_bytes: int
    device: str | None = None
    assume: str | float | None = None
    counts_reserved: bool = False

    @classmethod
    def from_marker(
        cls, limit: int | str | None = None, *, device: str | None = None, assume: Any = None
    ) -> "Budget":
        if limit is not None:
            return cls(parse_bytes(limit), device, assume)
        gpus = gpus_called(str(device).removeprefix("cuda:"))
        if not gpus:
            raise ValueError(
                f"memory_budget got no limit and device={device!r}; pass a limit such as "
                f"'1.5 GiB', or a GPU such as device='cuda:rtx4090' for its whole memory"
            )
        free_bytes = max(gpu.total_bytes - gpu.context_bytes[1] for gpu in gpus)
        return cls(free_bytes, device, assume, counts_reserved=True)

    def failure_of(self, test: Callable[[], Any]) -> str | None:
        """Run the test; return why it exceeds the budget, or None."""
        trace = _measured(test) if self.device is None else self._predicted(test)
        peak = trace.reserved_bytes if self.counts_reserved else trace.allocated_bytes
        assert peak is not None  # a prediction for CUDA has both
        return None if peak <= self.limit_bytes else self._text(trace, peak)

    def _predicted(self, test: Callable[[], Any]) -> Trace:
        def run() -> None:
            built = test()
            step = built[0] if isinstance(built, tuple) and built else built
            if callable(step):
                step()
                step()

        return predict(
            lambda: (run, None, None), device=self.device, steps=1, lines=True, assume=self.assume
        )

    def _text(self, trace: Trace, peak: int) -> str:
        kind = "reserved" if self.counts_reserved else "allocated"
        over = peak - self.limit_bytes
        lines = [
            f"Memory budget exceeded: the peak is {format_bytes(peak)} {kind}, the budget "
            f"{format_bytes(self.limit_bytes)} ({format_bytes(over)} over the budget)."
        ]
        if self.device is not None:
            lines.append(
                f"Predicted for {self.device}: {format_bytes(trace.allocated_bytes)} allocated, "
                f"{format_bytes(trace.reserved_bytes or 0)} reserved."
            )
        return "\n".join(
            [
                *lines,
                "These lines allocated most of what is alive at the peak:",
                *(f"  {row}" for row in largest_lines(trace)),
            ]
        )


def budget_of(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Budget:
    """Return the budget of a marker. Raise ValueError if its arguments are wrong."""
    unknown = sorted(set(options) - {"limit", "device", "assume"})
    if unknown or len(arguments) > 1:
        got = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        raise ValueError(
            f"got memory_budget({', '.join(got)}); pass one limit such as '1.5 GiB', and device= "
            f"or assume= if you need them"
        )
    try:
        budget = Budget.from_marker(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"memory_budget: {error}") from error
    if budget.limit_bytes <= 0:
        raise ValueError(
            f"got memory_budget({budget.limit_bytes}); pass a positive limit such as '1.5 GiB'"
        )
    return budget


def _measured(test: Callable[[], Any]) -> Trace:
    with StorageMeter(lines=True) as meter:
        result = test()
    del result
    return Trace(tuple(_own_events(meter.changes())))


def _own_events(changes: Iterable[Change]) -> Iterator[Event]:
    """Yield the events of storages that the test allocated itself."""
    before: set[int] = set()
    for record, num_bytes, phase in changes:
        if phase == "before":
            before.add(record.number)
        if record.number not in before:
            yield record.event(num_bytes, phase)


def largest_lines(trace: Trace, count: int = LINES) -> Iterator[str]:
    """Yield the lines with the most bytes alive at the peak, each with its largest tensor."""
    by_line: dict[str, list[Event]] = defaultdict(list)
    for event in trace.alive(trace.peak_position):  # the largest first
        by_line[event.line or event.category].append(event)
    totals = {line: sum(event.bytes for event in events) for line, events in by_line.items()}
    for line in sorted(totals, key=lambda line: -totals[line])[:count]:
        events = by_line[line]
        tensors = "1 tensor" if len(events) == 1 else f"{len(events):,} tensors"
        yield f"{format_bytes(totals[line]):>11} in {tensors}: {line}, {_described(events[0])}"


def _described(event: Event) -> str:
    operator = f" by {event.operator}" if event.operator else ""
    where = f" in {event.module}" if event.module else ""
    return f"{event.dtype} {event.shape}{operator}{where}"
