"""The record of a training step: every allocation and free, in order.

A Trace is plain data. The producers (memlab.metering) make one; the allocator, the plots, the
planner and the exercises' checks read it. `peak_bytes` is the largest running sum of the events,
and `at_peak` splits that sum by category, so the categories always add up to the peak.
"""

import os
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from memlab.internals import snapshot
from memlab.internals.files import write_beside
from memlab.units import format_bytes

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "inputs",
    "activations",  # born in forward, alive when backward starts
    "forward_temporaries",
    "backward_temporaries",
    "optimizer_temporaries",
    "workspace",  # scratch of kernels and of the libraries below them
    "rounding",  # what an allocator hands out beyond what was asked for
    "unattributed",  # what a device reports and no category explains
)
PHASES = ("before", "forward", "backward", "optimizer")


class Event(NamedTuple):
    """One allocation (`bytes` > 0), free or shrinking (`bytes` < 0) of a storage.

    `storage` numbers storages in the order they were seen in this process; a number is never
    reused. `phase` is when the event happened, "before" for what was alive when metering began.
    The other fields describe the storage's birth: the operator, the module that was running
    (in backward: the module whose forward pass made the node), the dtype and shape of the first
    tensor on it, and the user's line, where lines were asked for.
    """

    bytes: int
    storage: int
    category: str
    operator: str
    module: str
    phase: str
    dtype: str
    shape: tuple[int, ...]
    line: str | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """What the device itself says, or a simulation of it, in bytes; None where there is no answer.

    `allocated_peak_bytes` is handed out to tensors and kernels, `reserved_peak_bytes` is held by
    the caching allocator, `used_bytes` is what the driver shows for the whole device at the end
    (the figure of `nvidia-smi`: other processes and every context included).
    """

    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    used_bytes: int | None = None


@dataclass(frozen=True)
class Trace:
    """All events of one metered run, and the questions people ask of them."""

    events: tuple[Event, ...]
    device: str = "cpu"
    dry: bool = False  # made on fake tensors: bytes are exact, values were never computed
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    notes: tuple[str, ...] = ()  # what this trace cannot promise, one sentence each
    # What came before the run, where it is known: the allocator's holes are from then. Its
    # storages have the same numbers in `events`, which begin with those still alive.
    history: tuple[Event, ...] = field(default=(), repr=False)

    @cached_property
    def _peak(self) -> tuple[int, int]:
        """(bytes, number of events up to the peak); the first peak if there are several."""
        running = peak = position = 0
        for index, event in enumerate(self.events, start=1):
            running += event.bytes
            if running > peak:
                peak, position = running, index
        return peak, position

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one moment."""
        return self._peak[0]

    @property
    def peak_position(self) -> int:
        """The number of events that had happened when the peak was reached."""
        return self._peak[1]

    @cached_property
    def live_bytes(self) -> int:
        """Bytes still alive when metering ended."""
        return sum(event.bytes for event in self.events)

    @property
    def allocated_bytes(self) -> int:
        """The peak as the allocator counts it: blocks that it could not split count whole. A real
        device's trace has those in its own peak, as rounding."""
        simulated = self.memory.allocated_peak_bytes if self.dry else None
        return simulated or self.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """The most bytes the device's caching allocator held; None where nothing reports it."""
        return self.memory.reserved_peak_bytes

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak, in the order of CATEGORIES; they sum to `peak_bytes`."""
        return _by_category(self.events[: self.peak_position])

    @cached_property
    def at_end(self) -> dict[str, int]:
        """Bytes by category when metering ended; they sum to `live_bytes`."""
        return _by_category(self.events)

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak was reached."""
        return self.events[self.peak_position - 1].phase if self.peak_position else "before"

    def alive(self, position: int | None = None) -> list[Event]:
        """One event for each storage alive after `position` events (default: all), with its
        bytes then; the largest first."""
        live: dict[int, Event] = {}
        for event in self.events[:position]:
            known = live.get(event.storage)
            event = event if known is None else known._replace(bytes=known.bytes + event.bytes)
            live[event.storage] = event
        return sorted((e for e in live.values() if e.bytes), key=lambda e: (-e.bytes, e.storage))

    def by_module(self, depth: int | None = None) -> dict[str, dict[str, int]]:
        """Bytes at the peak, by module and category, the largest module first.

        `depth` cuts names after so many parts: `blocks.0.mlp.up` at depth 2 counts for `blocks.0`.
        What no module made (the loss, the optimizer's state) stands under "".
        """
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        for event in self.alive(self.peak_position):
            module = ".".join(event.module.split(".")[:depth])
            sums[module][event.category] += event.bytes
        largest_first = sorted(sums, key=lambda module: (-sums[module].total(), module))
        return {module: _in_order(sums[module]) for module in largest_first}

    def diff(self, other: "Trace") -> "Difference":
        """What is alive at the end of `other` and was not at the end of this trace.

        For two steps of one run, that is what the second step left behind: storages that died
        are set against new ones of the same kind (a gradient thrown away and made anew), and
        what remains is growth. For two unrelated runs, it compares what each leaves alive.
        Both are traces of one process, whose storages they number alike.
        """
        before = {event.storage: event for event in self.alive()}
        after = {event.storage: event for event in other.alive()}
        counts: Counter[Remainder] = Counter()
        for storage, event in after.items():
            grown = event.bytes - (before[storage].bytes if storage in before else 0)
            if grown:
                counts[_remainder(event, grown)] += 1
        for storage in before.keys() - after.keys():
            counts[_remainder(before[storage], before[storage].bytes)] -= 1
        rows = [(key, count) for key, count in counts.items() if count]
        rows.sort(key=lambda row: (-abs(row[0].bytes * row[1]), row[0].module))
        return Difference(tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `Trace.from_dict` reads it back."""
        return {
            "device": self.device,
            "dry": self.dry,
            "peak_bytes": self.peak_bytes,
            "live_bytes": self.live_bytes,
            "at_peak": self.at_peak,
            "memory": asdict(self.memory),
            "notes": list(self.notes),
            "fields": list(Event._fields),
            "events": list(map(_row, self.events)),
            "history": list(map(_row, self.history)),
        }

    def to_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write what PyTorch's memory viewer (pytorch.org/memory_viz) opens, a pickle."""
        content = snapshot.snapshot(self.events)
        with write_beside(path) as beside:
            beside.write_bytes(pickle.dumps(content, protocol=snapshot.PROTOCOL))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Trace":
        """The inverse of `to_dict`."""
        events, history = (tuple(map(_event, plain[name])) for name in ("events", "history"))
        memory = DeviceMemory(**plain["memory"])
        return cls(events, plain["device"], plain["dry"], memory, tuple(plain["notes"]), history)

    def __str__(self) -> str:
        where = f"{self.device}, dry run" if self.dry else self.device
        lines = [f"peak {format_bytes(self.peak_bytes)} in {self.peak_phase} ({where})"]
        for category, count in sorted(self.at_peak.items(), key=lambda item: -item[1]):
            share = count / self.peak_bytes
            lines.append(f"  {category:<22}{format_bytes(count):>12}{share:>7.1%}  {_bar(share)}")
        lines.append(f"alive at the end {format_bytes(self.live_bytes)}")
        who = "the simulated allocator" if self.dry else "the device"
        for name, count in asdict(self.memory).items():
            if count is not None:
                label = name.removesuffix("_bytes").replace("_", " ")
                lines.append(f"{who} says: {label} {format_bytes(count)}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    __repr__ = __str__


class Remainder(NamedTuple):
    """A kind of storage that a difference counts: its size and where it came from."""

    bytes: int
    category: str
    module: str
    operator: str
    dtype: str
    shape: tuple[int, ...]
    line: str | None


@dataclass(frozen=True)
class Difference:
    """Rows of (kind of storage, how many more of them are alive); negative: fewer."""

    rows: tuple[tuple[Remainder, int], ...]

    @property
    def bytes(self) -> int:
        """How many bytes more are alive."""
        return sum(kind.bytes * count for kind, count in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "nothing more is alive than before"
        lines = [f"{'+' if self.bytes >= 0 else ''}{format_bytes(self.bytes)} alive"]
        for kind, count in self.rows:
            where = " ".join(part for part in (kind.module, kind.operator, kind.line) if part)
            shape = "×".join(map(str, kind.shape)) or "scalar"
            size = format_bytes(kind.bytes * count)
            what = f"{kind.category}: {where}" if where else kind.category
            lines.append(f"  {count:+d} × {shape} {kind.dtype} = {size}, {what}")
        return "\n".join(lines)

    __repr__ = __str__


def _row(event: Event) -> list[Any]:
    """An event as JSON has it."""
    return [*event[:7], list(event.shape), event.line]


def _event(row: Sequence[Any]) -> Event:
    return Event(*row[:7], tuple(row[7]), row[8])


def _by_category(events: Iterable[Event]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for event in events:
        sums[event.category] += event.bytes
    return _in_order(sums)


def _in_order(sums: Mapping[str, int]) -> dict[str, int]:
    """The sums that are not 0, in the order of CATEGORIES; a category beyond it is an error."""
    assert sums.keys() <= set(CATEGORIES), f"no category of a Trace: {sums.keys() - {*CATEGORIES}}"
    return {category: sums[category] for category in CATEGORIES if sums.get(category)}


def _remainder(event: Event, count: int) -> Remainder:
    return Remainder(
        count, event.category, event.module, event.operator, event.dtype, event.shape, event.line
    )


def _bar(share: float, width: int = 24) -> str:
    return "█" * round(share * width)
