"""Stores: keep tensors outside of device memory under a key, and load them again.

Saves    device memory for the stored values, except those being moved.
Costs    moving the bytes twice over a slower link. Data sheet bandwidths: GPU memory 1,000 to
         8,000 GB/s, host memory over PCIe 16 to 64 GB/s, a solid-state disk 2 to 14 GB/s.
Source   Rhu et al. 2016 (vDNN), arXiv 1602.08124, for prefetching; Ren et al. 2021 (ZeRO-Offload),
         arXiv 2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv 2104.07857.

    store.put("m", tensor)         starts a copy; the tensor may be freed or modified
    store.prefetch("m")            allocates a tensor on the device and starts to fill it
    tensor = store.get("m")        waits for the tensor
    store.cancel("m")              drops a prefetch
    store.traffic                  counts the bytes each way

All stores have this interface:

    HostStore    host memory, pinned if there is a GPU. Copies run on their own CUDA streams, and
                 users of a copy wait only for its event
    DiskStore    a folder (memlab.offload.disk), read and written by its own thread

Without a GPU, the device's memory is host memory. A HostStore then saves nothing: the memory meter
counts its copies, and only the traffic is meaningful. A DiskStore does reduce the metered memory.
It copies through a fixed number of its own buffers (`buffer_bytes`), which the meter does not
count.

A dry run counts bytes and allocates tensors, but copies and writes nothing. Its values never
replace real ones.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memlab.internals.shards import require_no_dtensors
from memlab.offload.records import Record, Value, contiguous_tensors, is_fake, make_record
from memlab.units import format_bytes

Wait = Callable[[], None]


class StoreError(RuntimeError):
    """A store cannot load or keep a value."""


@dataclass
class Traffic:
    """Bytes written to a store, read from it, and read by a prefetch."""

    written: int = 0
    read: int = 0
    prefetched: int = 0

    def reset(self) -> None:
        """Reset the counters."""
        self.written = self.read = self.prefetched = 0

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.written)} written, {format_bytes(self.read)} read, "
            f"{format_bytes(self.prefetched)} prefetched"
        )


def _no_owner() -> None:
    """The owner of an unclaimed store."""


class Store:
    """The base of all stores. A value is a tensor or a list of tensors."""

    # Whether the values are CPU tensors that the host can compute with: see `lend` and `keep`.
    is_memory = False
    # The step of the last commit that outlives this process; None if nothing does.
    step: int | None = None
    notes: Any = None  # committed with it

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._dry: dict[str, Record] = {}  # values of a dry run
        self._coming: dict[str, tuple[Record, list[Tensor], Wait]] = {}
        self._discarded: deque[str] = deque()
        self._modified: set[str] = set()  # keys whose source changed during the copy
        self._owners: dict[str, Callable[[], object]] = {}  # by purpose

    # -------------------------------------------------------------- put and get

    def put(self, key: str, value: Value, *, lasting: bool = False, about: Any = None) -> None:
        """Store a copy of a value, in place of any earlier one.

        A commit makes `lasting` values safe, with their `about` data, if the store outlives the
        process (see DiskStore).
        """
        self._delete_discarded()
        self._coming.pop(key, None)
        tensors = contiguous_tensors(value)
        record = make_record(value, tensors)
        self.traffic.written += record.bytes
        if is_fake(tensors):
            self._dry[key] = record
        else:
            _require_values(tensors)
            self._dry.pop(key, None)
            self._put(key, record, tensors, lasting, about)

    def prefetch(
        self, key: str, out: Sequence[Tensor] | None = None, *, device: Any = None
    ) -> None:
        """Start loading a value, into `out` or into new tensors on `device`.

        `device` None means the original device. The tensors use memory from now on.
        """
        self._delete_discarded()
        if key not in self._coming:
            self._coming[key] = self._start_get(key, out, device)
            self.traffic.prefetched += self._coming[key][0].bytes

    def get(self, key: str, out: Sequence[Tensor] | None = None, *, device: Any = None) -> Any:
        """Return the value, and keep it in the store. A prefetch determines tensors and device.

        Raises KeyError for an unknown key and StoreError for a damaged value.
        """
        self._delete_discarded()
        coming = self._coming.pop(key, None)
        record, tensors, wait = coming or self._start_get(key, out, device)
        wait()
        return record.value(tensors)

    def cancel(self, key: str) -> None:
        """Drop a prefetch. The store keeps the value."""
        self._coming.pop(key, None)

    def coming(self) -> list[str]:
        """Return the keys that were prefetched and not read yet."""
        self._delete_discarded()
        return list(self._coming)

    def delete(self, key: str) -> None:
        """Delete a value if there is one."""
        self._coming.pop(key, None)
        self._dry.pop(key, None)
        self._delete(key)

    def discard(self, key: str) -> None:
        """Delete a value at the next call of this store.

        This is safe in garbage collection and in any thread.
        """
        self._discarded.append(key)

    def keys(self) -> list[str]:
        """Return all keys in the order of their first put."""
        self._delete_discarded()
        return list(dict.fromkeys((*self._keys(), *self._dry)))

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored values, not counting a dry run."""
        self._delete_discarded()
        return sum(self._record(key).bytes for key in self._keys())

    def flush(self) -> None:
        """Wait until all values are stored."""

    # -------------------------------------------------------------- across processes

    def claim(self, name: str, fingerprint: str, owner: object) -> None:
        """Claim the store for an owner; raise StoreError if another living owner has it."""
        current = self._owners.get(name, _no_owner)
        if current() not in (None, owner):
            gc.collect()  # an optimizer and its hooks form a reference cycle
        if current() not in (None, owner):
            raise StoreError(
                f"this store has the {name} of another {type(current()).__name__}; use a separate "
                f"store for each"
            )
        self._owners[name] = weakref.ref(owner)

    def commit(self, step: int, notes: Any = None) -> None:
        """Make all lasting values safe at once, if the store outlives the process."""

    def rollback(self) -> None:
        """Return to the last commit."""

    def about(self, key: str) -> Any:
        """Return the `about` data of a lasting value."""

    # -------------------------------------------------------------- host memory

    def lend(self, key: str) -> list[Tensor]:
        """Return the store's own tensors, for computation on the host, without a copy."""
        raise NotImplementedError

    def keep(self, key: str, tensors: list[Tensor]) -> None:
        """Store host tensors without a copy."""
        raise NotImplementedError

    # -------------------------------------------------------------- implemented by each store

    def _put(
        self, key: str, record: Record, tensors: list[Tensor], lasting: bool, about: Any
    ) -> None:
        raise NotImplementedError

    def _record(self, key: str) -> Record:
        raise NotImplementedError

    def _fill(self, key: str, record: Record, tensors: list[Tensor]) -> Wait:
        """Start filling the tensors; return a function that waits for it."""
        raise NotImplementedError

    def _delete(self, key: str) -> None:
        raise NotImplementedError

    def _keys(self) -> Sequence[str]:
        raise NotImplementedError

    # -------------------------------------------------------------- shared by all stores

    def _start_get(
        self, key: str, out: Sequence[Tensor] | None, device: Any
    ) -> tuple[Record, list[Tensor], Wait]:
        record = self._find_record(key)
        tensors = record.empty(device) if out is None else list(out)
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        wanted = [(spec.shape, spec.dtype) for spec in record.specs]
        if got != wanted:
            raise ValueError(
                f"got tensors of {got} to put {key!r} into, wanted {wanted}; pass tensors of the "
                f"stored shapes and dtypes"
            )
        self.traffic.read += record.bytes
        if is_fake(tensors):
            return record, tensors, nothing
        if key not in self._keys():
            raise KeyError(f"{key!r} was put in a dry run, which has no values; put it again")
        _require_values(tensors)
        return record, tensors, self._fill(key, record, tensors)

    def _find_record(self, key: str) -> Record:
        is_stored = key in self._keys()
        if key in self._dry and not (is_stored and _creates_real_tensors()):
            return self._dry[key]
        if not is_stored:
            raise KeyError(f"the store has no {key!r}; put it before")
        return self._record(key)

    def _delete_discarded(self) -> None:
        while self._discarded:
            self.delete(self._discarded.popleft())


def nothing() -> None:
    """Return at once: there is nothing to wait for."""


def _require_values(tensors: Sequence[Tensor]) -> None:
    require_no_dtensors("a store", tensors)
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            "got a tensor on the meta device, which has no values to store or load; move the model "
            "to a device with `model.to_empty(device=...)` and set its values"
        )


def _creates_real_tensors() -> bool:
    """Return whether new tensors have values, unlike in a dry run."""
    return not is_fake([torch.empty(0, dtype=torch.float32, device="cpu")])


def was_modified(sources: Sequence[tuple[Tensor, int]]) -> bool:
    """Return whether one of the tensors has changed since its version was recorded."""
    return any(tensor._version != version for tensor, version in sources)


def modified_error(key: str) -> StoreError:
    """Return the error for a source that changed during its copy; the copy is undefined."""
    return StoreError(
        f"{key!r} was written to while it was copied from the device; write to a new tensor, for "
        f"example with x * 2 instead of x.mul_(2)"
    )


# ------------------------------------------------------------------ host memory


@dataclass
class _HostCopy:
    """Host tensors, and the event after which their copies are complete."""

    record: Record
    tensors: list[Tensor]
    written: Any = None


class HostStore(Store):
    """Tensors in host memory.

    On a GPU, values move to pinned memory and back on two CUDA streams, one per direction, in
    parallel with computation. At most `buffers` values are copied to the host at once, and each
    source lives until its copy is complete. If a source is modified before that, `get` raises
    StoreError.
    """

    is_memory = True

    def __init__(self, *, buffers: int = 2) -> None:
        super().__init__()
        if buffers < 1:
            raise ValueError(f"got {buffers} buffers; pass at least 1")
        self.buffers = buffers
        self._copies: dict[str, _HostCopy] = {}
        self._writing: deque[tuple[str, _HostCopy, list[tuple[Tensor, int]]]] = deque()
        # Made once: each new stream has its own memory pool.
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def lend(self, key: str) -> list[Tensor]:
        """Return the store's own tensors, for computation on the host, without a copy."""
        kept = self._copies[key]
        if kept.written is not None:
            kept.written.synchronize()
        return kept.tensors

    def keep(self, key: str, tensors: list[Tensor]) -> None:
        """Store host tensors without a copy."""
        self._copies[key] = _HostCopy(make_record(tensors, tensors), tensors)

    def flush(self) -> None:
        """Wait until all copies are complete."""
        while self._writing:
            self._finish_oldest()

    def _put(
        self, key: str, record: Record, tensors: list[Tensor], lasting: bool, about: Any
    ) -> None:
        kept = _HostCopy(record, [_host_tensor(tensor) for tensor in tensors])
        self._modified.discard(key)
        self._copies[key] = kept
        if record.device.type != "cuda":
            for copy, tensor in zip(kept.tensors, tensors, strict=True):
                copy.copy_(tensor)
            return
        while len(self._writing) >= self.buffers:
            self._finish_oldest()
        kept.written = self._copy(record.device, "down", kept.tensors, tensors)
        self._writing.append((key, kept, [(tensor, tensor._version) for tensor in tensors]))

    def _finish_oldest(self) -> None:
        key, kept, sources = self._writing.popleft()
        kept.written.synchronize()
        if self._copies.get(key) is kept and was_modified(sources):
            self._modified.add(key)

    def _fill(self, key: str, record: Record, tensors: list[Tensor]) -> Wait:
        kept = self._copies[key]
        while any(copied is kept for _, copied, _ in self._writing):
            self._finish_oldest()
        if key in self._modified:
            raise modified_error(key)
        device = tensors[0].device if tensors else record.device
        if device.type != "cuda":
            for tensor, copy in zip(tensors, kept.tensors, strict=True):
                tensor.data.copy_(copy)
            return nothing
        event = self._copy(device, "up", tensors, kept.tensors)
        return lambda: torch.cuda.current_stream(device).wait_event(event)

    def _copy(self, device: Any, way: str, to: list[Tensor], of: list[Tensor]) -> Any:
        """Copy on a separate stream; return the event at the end."""
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        stream = self._streams[device, way]
        stream.wait_stream(torch.cuda.current_stream(device))  # the target's memory may be in use
        with torch.cuda.stream(stream):
            for target, source in zip(to, of, strict=True):
                # Copy through `.data`, or autograd would see an in-place change of saved tensors.
                target.data.copy_(source, non_blocking=True)
                (source if way == "down" else target).record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def _record(self, key: str) -> Record:
        return self._copies[key].record

    def _delete(self, key: str) -> None:
        self._copies.pop(key, None)
        self._modified.discard(key)

    def _keys(self) -> Sequence[str]:
        return self._copies  # type: ignore[return-value]


def _host_tensor(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
