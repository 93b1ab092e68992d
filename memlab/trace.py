"""The record of a training step: every allocation and free, in order.

A Trace is plain data, created by memlab.metering and read by the allocator, the plots, the planner
and the exercises' checks. `peak_bytes` is the largest running sum of the events. `at_peak` splits
that sum by category, so the categories always add up to the peak.
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
from memlab.units import format_bytes, paragraph

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "inputs",
    "activations",  # allocated in forward, still alive when backward starts
    "forward_temporaries",
    "backward_temporaries",
    "optimizer_temporaries",
    "workspace",  # scratch memory of kernels and libraries
    "rounding",  # allocated by an allocator beyond the requested size
    "unattributed",  # reported by a device but not explained by any category
)
PHASES = ("before", "forward", "backward", "optimizer")
EMPTY_CACHE = "empty_cache"  # the operator of an event of no bytes: unused segments are released


class Event(NamedTuple):
    """One allocation (`bytes` > 0), free or shrinking (`bytes` < 0) of a storage.

    `storage` numbers storages in order of appearance in this process and is never reused. `phase`
    is when the event happened; "before" marks storages alive when metering began. The other fields
    describe the creation of the storage: the operator, the module, the dtype and shape of its first
    tensor, and the user's source line, if recorded. In backward, `module` is the module whose
    forward pass created the node. `stream` is the accelerator's stream that allocated the storage
    in a dry run, 0 for the default one: CUDA's allocator has pools for each stream.
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
    stream: int = 0


@dataclass(frozen=True)
class DeviceMemory:
    """Memory reported by the device, or by a simulation, in bytes; None if not reported.

    allocated_peak_bytes   torch's `allocated_bytes.all.peak`: the caching allocator's blocks in
                           use, rounded up. Tensors, kernels' scratch and libraries' workspaces
                           (cuBLAS, cuDNN) count alike, because torch allocates all of them there
    reserved_peak_bytes    torch's `reserved_bytes.all.peak`: the segments that hold these blocks
    used_bytes             the driver's total for the whole device at the end, as in `nvidia-smi`,
                           including other processes and contexts
    reserved_most_bytes    upper bound of a predicted `reserved_peak_bytes`, for libraries that may
                           choose kernels that need more
    """

    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    used_bytes: int | None = None
    reserved_most_bytes: int | None = None


@dataclass(frozen=True)
class Trace:
    """All events of one metered run, with common queries."""

    events: tuple[Event, ...]
    device: str = "cpu"
    dry: bool = False  # made on fake tensors: bytes are exact, values were never computed
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    notes: tuple[str, ...] = ()  # limitations of this trace, one sentence each
    # Events before the run, if known; they determine the allocator's fragmentation. Storages have
    # the same numbers as in `events`, which begins with the ones still alive.
    history: tuple[Event, ...] = field(default=(), repr=False)
    allocator: str = ""  # PYTORCH_ALLOC_CONF of a prediction; "": torch's defaults

    @cached_property
    def _peak(self) -> tuple[int, int]:
        """The bytes at the first peak, and the number of events up to it."""
        running = peak = position = 0
        for index, event in enumerate(self.events, start=1):
            running += event.bytes
            if running > peak:
                peak, position = running, index
        return peak, position

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return self._peak[0]

    @property
    def peak_position(self) -> int:
        """The number of events up to the peak."""
        return self._peak[1]

    @cached_property
    def live_bytes(self) -> int:
        """The bytes alive when metering ended."""
        return sum(event.bytes for event in self.events)

    @property
    def allocated_bytes(self) -> int:
        """The peak including blocks that the allocator could not split.

        A real device's trace already contains this difference, as rounding.
        """
        # CUDA's memory history has requested sizes, `max_memory_allocated` has blocks, and a large
        # block is split only if more than 1 MiB remains: 7.59 and 7.63 GiB for a GPT of 124M
        # weights at 8 × 640.
        simulated = self.memory.allocated_peak_bytes if self.dry else None
        return simulated or self.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """The most bytes reserved by the caching allocator; None if not reported."""
        return self.memory.reserved_peak_bytes

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the peak, in the order of CATEGORIES; they sum to `peak_bytes`."""
        return _by_category(self.events[: self.peak_position])

    @cached_property
    def at_end(self) -> dict[str, int]:
        """The bytes by category when metering ended; they sum to `live_bytes`."""
        return _by_category(self.events)

    @property
    def peak_phase(self) -> str:
        """The phase of the peak."""
        return self.events[self.peak_position - 1].phase if self.peak_position else "before"

    def alive(self, position: int | None = None) -> list[Event]:
        """Return one event per storage alive after `position` events, with its bytes then.

        The default is after all events. The largest comes first.
        """
        live: dict[int, Event] = {}
        for event in self.events[:position]:
            known = live.get(event.storage)
            event = event if known is None else known._replace(bytes=known.bytes + event.bytes)
            live[event.storage] = event
        return sorted((e for e in live.values() if e.bytes), key=lambda e: (-e.bytes, e.storage))

    def by_module(self, depth: int | None = None) -> dict[str, dict[str, int]]:
        """Return bytes at the peak by module and category, the largest module first.

        `depth` truncates names: at depth 2, `blocks.0.mlp.up` counts for `blocks.0`. Storages
        created outside a module (the loss, optimizer state) count for "".
        """
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        for event in self.alive(self.peak_position):
            module = ".".join(event.module.split(".")[:depth])
            sums[module][event.category] += event.bytes
        largest_first = sorted(sums, key=lambda module: (-sums[module].total(), module))
        return {module: _ordered(sums[module]) for module in largest_first}

    def diff(self, other: "Trace") -> "Difference":
        """Return the storages alive at the end of `other` but not at the end of this trace.

        For two steps of one run, the result is what the second step left behind. A freed storage
        cancels a new one of the same kind, such as a gradient that was freed and recomputed, so
        only growth remains. For two unrelated runs, it compares the memory left alive. Both
        traces must come from one process, because storages are matched by number.
        """
        before = {event.storage: event for event in self.alive()}
        after = {event.storage: event for event in other.alive()}
        counts: Counter[StorageKind] = Counter()
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
        """Return plain data for JSON; `Trace.from_dict` reads it back."""
        return {
            "device": self.device,
            "dry": self.dry,
            "peak_bytes": self.peak_bytes,
            "live_bytes": self.live_bytes,
            "at_peak": self.at_peak,
            "memory": asdict(self.memory),
            "notes": list(self.notes),
            "allocator": self.allocator,
            "fields": list(Event._fields),
            "events": list(map(_row, self.events)),
            "history": list(map(_row, self.history)),
        }

    def to_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a pickle for PyTorch's memory viewer (pytorch.org/memory_viz)."""
        content = snapshot.snapshot(self.events)
        with write_beside(path) as beside:
            beside.write_bytes(pickle.dumps(content, protocol=snapshot.PROTOCOL))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Trace":
        """The inverse of `to_dict`."""
        events, history = (tuple(map(_event, plain[name])) for name in ("events", "history"))
        memory = DeviceMemory(**plain["memory"])
        notes, allocator = tuple(plain["notes"]), plain.get("allocator", "")
        return cls(events, plain["device"], plain["dry"], memory, notes, history, allocator)

    def __str__(self) -> str:
        where = f"{self.device}, dry run" if self.dry else self.device
        lines = [f"peak {format_bytes(self.peak_bytes)} in {self.peak_phase} ({where})"]
        for category, count in sorted(self.at_peak.items(), key=lambda item: -item[1]):
            share = count / self.peak_bytes
            lines.append(f"  {category:<22}{format_bytes(count):>12}{share:>7.1%}  {_bar(share)}")
        lines.append(f"alive at the end {format_bytes(self.live_bytes)}")
        source = "simulated allocator" if self.dry else "device"
        for name, count in asdict(self.memory).items():
            if count is not None:
                label = name.removesuffix("_bytes").replace("_", " ")
                lines.append(f"{source}: {label} {format_bytes(count)}")
        return "\n".join(lines + [paragraph(f"note: {note}") for note in self.notes])

    __repr__ = __str__


class StorageKind(NamedTuple):
    """A kind of storage in a difference: its size and origin."""

    bytes: int
    category: str
    module: str
    operator: str
    dtype: str
    shape: tuple[int, ...]
    line: str | None


@dataclass(frozen=True)
class Difference:
    """Rows of (kind of storage, change in the number alive)."""

    rows: tuple[tuple[StorageKind, int], ...]

    @property
    def bytes(self) -> int:
        """The change in bytes alive."""
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
    """Return an event as a JSON list."""
    return [*event[:7], list(event.shape), *event[8:]]


def _event(row: Sequence[Any]) -> Event:
    return Event(*[*row[:7], tuple(row[7]), *row[8:]])


def _by_category(events: Iterable[Event]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for event in events:
        sums[event.category] += event.bytes
    return _ordered(sums)


def _ordered(sums: Mapping[str, int]) -> dict[str, int]:
    """Return the nonzero sums in the order of CATEGORIES. Unknown categories are an error."""
    assert sums.keys() <= set(CATEGORIES), f"no category of a Trace: {sums.keys() - {*CATEGORIES}}"
    return {category: sums[category] for category in CATEGORIES if sums.get(category)}


def _remainder(event: Event, count: int) -> StorageKind:
    return StorageKind(
        count, event.category, event.module, event.operator, event.dtype, event.shape, event.line
    )


def _bar(share: float, width: int = 24) -> str:
    return "█" * round(share * width)
