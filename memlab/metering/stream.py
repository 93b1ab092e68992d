"""The raw stream of one metered run: its storages, and each change of their bytes."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memlab.metering.dry import DryRun
from memlab.metering.registry import REGISTRY, Storage
from memlab.trace import EMPTY_CACHE


class Change(NamedTuple):
    """One entry of the raw stream."""

    record: Storage
    bytes: int
    phase: str


class MeteredRun:
    """The subject of a meter. Storages that one run leaves alive count in its next run."""

    def __init__(self, subject: Any) -> None:
        self._dry_run = DryRun.active
        self.set_subject(subject)

    def set_subject(self, subject: Any) -> None:
        try:
            self._subject: Callable[[], Any] = weakref.ref(subject)
        except TypeError:  # None, and objects without weak references
            self._subject = lambda: None

    def continues(self, earlier: "MeteredRun") -> bool:
        """Return whether both have the same model (or function) and dry run (or none)."""
        subject = self._subject()
        return (
            subject is not None
            and subject is earlier._subject()
            and self._dry_run is earlier._dry_run
        )


class ChangeStream:
    """The storages that count in one metered run, and the changes of their bytes in order.

    births       storages allocated in this run, by phase, until their category is known
    own          living storages allocated in this run, by number; `live_bytes` is their total
    """

    def __init__(self, run: MeteredRun, last_phase: Callable[[], str]) -> None:
        self.run = run
        self.births: dict[str, list[Storage]] = {"forward": [], "backward": [], "optimizer": []}
        self.own: dict[int, Storage] = {}
        self.live_bytes = 0
        self._last_phase = last_phase
        self._before: list[Change] = []
        self._changes: list[Change] = []
        self._counted: set[int] = set()  # numbers of the storages that count

    def start(self) -> None:
        """Note which storages are alive; none counts until it is found or included."""
        self._last_number = REGISTRY.last_number
        self._alive_before = {record.number: (record, record.bytes) for record in REGISTRY.alive()}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record every free and resize inside `with`, and count what earlier runs of the same model
        left alive."""
        REGISTRY.listen(self._changed)
        try:
            yield
        finally:
            REGISTRY.unlisten(self._changed)
        for record, _ in self._alive_before.values():
            if record not in self and record.run is not None and self.run.continues(record.run):
                self.include(record)

    def __contains__(self, record: Storage) -> bool:
        return record.number in self._counted

    def changes(self) -> Iterator[Change]:
        """Yield the storages from before, then each allocation, free and emptying of the cache."""
        for change in (*self._before, *self._changes):
            counts = change.bytes or change.record.operator == EMPTY_CACHE
            if counts and change.record in self:
                yield change

    @property
    def found(self) -> list[Storage]:
        """The storages from before this run, in the order they were found."""
        return [change.record for change in self._before]

    # ------------------------------------------------------------------ storages that count

    def find(self, tensor: torch.Tensor) -> Storage:
        """Count a storage from before this run that no meter had seen."""
        record = REGISTRY.add(tensor, self.run)
        self._counted.add(record.number)
        self._before.append(Change(record, record.bytes, "before"))
        return record

    def include(self, record: Storage, tensor: Any = None) -> None:
        """Count a storage that an earlier meter saw, or that was resized before its first use."""
        _, num_bytes = self._alive_before.get(record.number, (record, record.bytes))
        if record.run is None:
            record.run = self.run
            record.describe(tensor)
            num_bytes -= sum(change.bytes for change in self._changes if change.record is record)
        self._counted.add(record.number)
        self._before.append(Change(record, num_bytes, "before"))

    def add_birth(self, record: Storage) -> Change:
        """Count a storage that an operator has just allocated."""
        self.births[record.phase].append(record)
        self.own[record.number] = record
        self.live_bytes += record.bytes
        return self.add(record)

    def add(self, record: Storage) -> Change:
        """Count a storage as allocated now."""
        self._counted.add(record.number)
        change = Change(record, record.bytes, record.phase)
        # Python may collect a cycle after any call, and a storage in it then dies into the stream.
        # So the last change may be another one (an index taken here failed one test in 2,300).
        self._changes.append(change)
        return change

    def add_scratch(self, sizes: Sequence[int], func: Any, device: torch.device) -> None:
        """Count buffers that an operator's kernel allocated together and has freed."""
        phase = self._last_phase()
        records = [REGISTRY.number_bytes(size, device, self.run) for size in sizes]
        for record in records:
            record.operator, record.phase = func, phase
            record.mark("workspace")
            self.add(record)
        self._changes += [Change(record, -record.bytes, phase) for record in records]

    def _changed(self, record: Storage, change: int) -> None:
        self._changes.append(Change(record, change, self._last_phase()))
        if record.number in self.own:
            self.live_bytes += change
            if not record.alive:
                del self.own[record.number]

    # ------------------------------------------------------------------ corrections

    def death_of(self, record: Storage) -> int | None:
        """Return the position of the storage's death in the stream, None while it is alive."""
        return None if record.alive else self._position(lambda change: change.record is record)

    def fold(self, old: Storage, birth: Change, death: int) -> None:
        """Remove the birth and the death of `old`, and let the new storage continue `old`."""
        new = birth.record
        born = self._position(lambda change: change is birth)
        for position in sorted((death, born), reverse=True):
            del self._changes[position]
        births = self.births[new.phase]
        if births and births[-1] is new:  # backward may have ended in between, with its births
            births.pop()
        del self.own[new.number]
        if self._is_own(old):
            self.own[old.number] = old
        else:
            self.live_bytes -= new.bytes
        REGISTRY.continue_as(old, new)

    def _is_own(self, record: Storage) -> bool:
        return record.number > self._last_number and record.phase != "before"

    def _position(self, wanted: Callable[[Change], bool]) -> int:
        """Return the position of the last such change, which is near the end."""
        positions = reversed(range(len(self._changes)))
        return next(i for i in positions if wanted(self._changes[i]))
