"""Track storages: their size, origin and death.

Several tensors can share a storage, which dies with the last of them. Python keeps one object per
C++ storage for the storage's lifetime, so a weak reference to that object reports its death.
Addresses are reused, so each storage gets a unique number.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memlab.internals.torch_internals import exclude_from_dynamo
from memlab.metering.dry import DryRun
from memlab.trace import CATEGORIES, Event

_RANKS = {category: rank for rank, category in enumerate(CATEGORIES)}
_META = torch.device("meta")  # the device of fake tensors' storages


class KnownAddress(NamedTuple):
    """A storage's address, and the number of storages that had been numbered by then.

    `in_place` marks an address that the storage has only under a meter: without it, autograd would
    have written to the previous address in place.
    """

    last_number: int
    address: int
    in_place: bool = False


class Storage:
    """A record of one storage. It does not keep the storage alive."""

    __slots__ = (
        "addresses",
        "bytes",
        "category",
        "device",
        "dtype",
        "line",
        "module",
        "node",
        "number",
        "operator",
        "phase",
        "reference",
        "run",
        "shape",
        "stream",
    )

    def __init__(
        self, number: int, tensor: "torch.Tensor | _BytesTensor", num_bytes: int, run: Any
    ) -> None:
        self.number = number
        self.bytes = num_bytes
        self.run = run  # the first run that saw one of its tensors; None before that
        self.describe(tensor)
        self.category: str | None = None
        self.operator: Any = ""
        self.module = ""
        self.node: int | None = None  # sequence number of the autograd node that made it
        self.phase = "before"
        self.line: str | None = None
        self.stream = DryRun.stream
        self.reference: _Reference | None = None
        self.addresses: tuple[KnownAddress, ...] = ()  # one for each of its addresses

    def describe(self, tensor: "torch.Tensor | _BytesTensor") -> None:
        self.device, self.dtype, self.shape = tensor.device, tensor.dtype, tuple(tensor.shape)

    @property
    def alive(self) -> bool:
        return self.reference is not None and self.reference() is not None

    def mark(self, category: str) -> None:
        """Set the category; the earliest in CATEGORIES wins."""
        if self.category is None or _RANKS[category] < _RANKS[self.category]:
            self.category = category

    def event(self, num_bytes: int, phase: str) -> Event:
        """Return an event of `num_bytes` on this storage."""
        return Event(
            bytes=num_bytes,
            storage=self.number,
            category=self.category or f"{self.phase}_temporaries",
            operator=_name(self.operator),
            module=self.module,
            phase=phase,
            dtype=_name(self.dtype),
            shape=self.shape,
            line=self.line,
            stream=self.stream,
        )


@functools.cache
def _name(of: Any) -> str:
    """Return the name of an operator or dtype, such as `aten.mm.default` or `float32`."""
    return str(of).removeprefix("torch.")


class _BytesTensor(NamedTuple):
    """A placeholder for the tensor of a storage without a known tensor."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Reference(weakref.ref):
    """A weak reference to a torch storage, with its record."""

    __slots__ = ("key", "record")

    key: int
    record: Storage


class Registry:
    """All living storages that a meter in this process has seen.

    Listeners are called with (record, change in bytes) when a storage dies or is resized, in the
    same thread.
    """

    def __init__(self) -> None:
        self._alive: dict[int, Storage] = {}
        self._listeners: tuple[Callable[[Storage, int], None], ...] = ()
        self.last_number = 0

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """Return the record of the tensor's storage, None if no meter has seen it."""
        # `_cdata` is an address, reused within microseconds: it finds living storages only, and the
        # number names a storage for good (test_numbers_are_never_reused_though_addresses_are).
        return self._alive.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: torch.Tensor, run: object) -> Storage:
        """Number the tensor's storage and track it until it dies."""
        # zero tensors, such as unused forward-mode gradients, have no memory
        has_memory = not tensor._is_zerotensor()
        return self._add(tensor.untyped_storage(), tensor, run, has_memory=has_memory)

    def _add(
        self,
        untyped: torch.UntypedStorage,
        tensor: "torch.Tensor | _BytesTensor",
        run: object,
        *,
        has_memory: bool = True,
    ) -> Storage:
        self.last_number += 1
        record = Storage(self.last_number, tensor, untyped.nbytes() if has_memory else 0, run)
        reference = _Reference(untyped, self._died)
        reference.key = untyped._cdata
        self._tie(reference, record)
        if has_memory:
            self._record_address(record, untyped)
        return record

    def number_bytes(self, num_bytes: int, device: torch.device, run: object) -> Storage:
        """Number memory that has no tensor, such as a kernel's buffer."""
        self.last_number += 1
        as_bytes = _BytesTensor(device, torch.uint8, (num_bytes,))
        return Storage(self.last_number, as_bytes, num_bytes, run)

    def continue_as(self, dead: Storage, successor: Storage) -> None:
        """Let the storage of `successor` continue the record `dead`, with its number."""
        assert successor.reference is not None
        self._tie(successor.reference, dead)
        dead.addresses += tuple(seen._replace(in_place=True) for seen in successor.addresses)

    def alive(self) -> list[Storage]:
        """Return the records of all living storages."""
        return list(self._alive.values())

    def listen(self, listener: Callable[[Storage, int], None]) -> None:
        self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[Storage, int], None]) -> None:
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def check_size(self, untyped: torch.UntypedStorage) -> None:
        """Notify the listeners if the storage's size has changed."""
        record = self._alive.get(untyped._cdata)
        if record is not None and (change := untyped.nbytes() - record.bytes):
            if not record.bytes:
                record.stream = DryRun.stream  # FSDP2 frees and refills a storage by its size
            record.bytes += change
            self.last_number += 1  # an unused number, which separates entries before and after
            self._record_address(record, untyped)
            self._notify(record, change)

    def _record_address(self, record: Storage, untyped: torch.UntypedStorage) -> None:
        if untyped.device == _META or not untyped.nbytes():
            return
        address = untyped.data_ptr()
        if not record.addresses or record.addresses[-1].address != address:
            record.addresses += (KnownAddress(self.last_number, address),)

    def _tie(self, reference: _Reference, record: Storage) -> None:
        reference.record = record
        record.reference = reference
        self._alive[reference.key] = record

    @exclude_from_dynamo  # a tensor can also die inside a compiled function
    def _died(self, reference: _Reference) -> None:
        if self._alive.get(reference.key) is reference.record:
            del self._alive[reference.key]
        self._notify(reference.record, -reference.record.bytes)

    def _notify(self, record: Storage, change: int) -> None:
        for listener in self._listeners:
            listener(record, change)

    def replacements(self) -> dict[tuple[Any, str], Callable[[Any], Any]]:
        """Return the function that changes a storage's size past the dispatcher; FSDP uses it."""
        return {(torch.UntypedStorage, "resize_"): self._wrapped_resize}

    def _wrapped_resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(untyped: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            # FSDP2 frees a weight by resizing its storage to 0. A meter that took such storages for
            # older ones was 15 to 24 % too high
            # (test_an_unknown_storage_that_was_empty_before_the_step_is_new).
            if untyped._cdata not in self._alive:
                as_bytes = _BytesTensor(untyped.device, torch.uint8, (untyped.nbytes(),))
                self._add(untyped, as_bytes, run=None)  # so that its growth counts as new
            result = resize(untyped, *args, **kwargs)
            self.check_size(untyped)
            return result

        return resize_


REGISTRY = Registry()
