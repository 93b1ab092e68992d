"""Stores: tensors that are kept elsewhere, under a key, and come back when they are wanted.

Saves    of the device's memory what was put, but for what is on its way.
Costs    its bytes over a slower road, twice. In GB/s, by data sheets: a GPU's own memory 1,000 to
         8,000, the host's by PCIe 16 to 64, a solid-state disk 2 to 14.
Source   Rhu et al. 2016 (vDNN), arXiv 1602.08124, for prefetching; Ren et al. 2021 (ZeRO-Offload),
         arXiv 2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv 2104.07857.

    store.put("m", tensor)         a copy is on its way; the tensor may die, or be written to
    store.prefetch("m")            a tensor for it on the device, filled while others compute
    tensor = store.get("m")        waits for what is not there yet
    store.cancel("m")              or it is not wanted after all
    store.traffic                  bytes each way, counted

Every store speaks this; what is behind it differs:

    HostStore    the host's memory, pinned where there is a GPU: there, copies run on streams of
                 their own, made once, and whoever needs a copy waits for its event alone
    DiskStore    a folder (memlab.offload.disk), read and written by a thread of its own

Without a GPU the device's memory *is* the host's. A HostStore then saves nothing: its copies count
with the meter like everything else, and only the traffic means something. A DiskStore does take
bytes out of the memory that the meter looks at; its buffers, through which they go, are the
store's own and as many as it was told (`buffer_bytes`).

In a dry run there are no numbers to move: bytes are counted, tensors made, and nothing is copied or
written. What a dry run puts never takes the place of what is really there.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memlab.offload.records import Record, Value, is_fake, listed, record_of
from memlab.units import format_bytes

Wait = Callable[[], None]


class StoreError(RuntimeError):
    """A store that can't give what it was given, or take more."""


@dataclass
class Traffic:
    """Bytes that were moved: `written` to the store, `read` from it, and of those read the ones
    that had been asked for before they were wanted."""

    written: int = 0
    read: int = 0
    prefetched: int = 0

    def reset(self) -> None:
        """Begin to count anew."""
        self.written = self.read = self.prefetched = 0

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.written)} written, {format_bytes(self.read)} read, "
            f"{format_bytes(self.prefetched)} of it ahead"
        )


def _nobody() -> None:
    """Who has a store that nobody has claimed."""


class Store:
    """What all stores are. A value is a tensor or a list of tensors, and comes back as such."""

    # Whether its tensors are in memory where the host can compute with them: see `lend`, `keep`.
    is_memory = False
    # The number of the step that survives the end of this process; None: nothing does.
    step: int | None = None
    notes: Any = None  # and what was committed with it

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._dry: dict[str, Record] = {}  # what was put in a dry run
        self._coming: dict[str, tuple[Record, list[Tensor], Wait]] = {}
        self._discarded: deque[str] = deque()
        self._spoiled: set[str] = set()  # written to while they were on their way
        self._owners: dict[str, Callable[[], object]] = {}  # who uses the store for what

    # -------------------------------------------------------------- what stores are for

    def put(self, key: str, value: Value, *, lasting: bool = False, about: Any = None) -> None:
        """Keep a copy; what was there under that key is forgotten.

        `lasting` values are those that a commit makes safe, with what is said `about` them, where
        the store outlives the process (see DiskStore).
        """
        self._tidy()
        self._coming.pop(key, None)
        tensors = listed(value)
        record = record_of(value, tensors)
        self.traffic.written += record.bytes
        if is_fake(tensors):
            self._dry[key] = record
        else:
            self._dry.pop(key, None)
            self._put(key, record, tensors, lasting, about)

    def prefetch(
        self, key: str, out: Sequence[Tensor] | None = None, *, device: Any = None
    ) -> None:
        """Begin to bring it, into tensors that take their bytes from now on: those of `out`, or new
        ones on `device` (None: where it came from)."""
        self._tidy()
        if key not in self._coming:
            self._coming[key] = self._start(key, out, device)
            self.traffic.prefetched += self._coming[key][0].bytes

    def get(self, key: str, out: Sequence[Tensor] | None = None, *, device: Any = None) -> Any:
        """The value, which the store keeps too. One that was prefetched is where it was asked for.

        KeyError where there is none. StoreError where it is damaged.
        """
        self._tidy()
        coming = self._coming.pop(key, None)
        record, tensors, wait = coming or self._start(key, out, device)
        wait()
        return record.value(tensors)

    def cancel(self, key: str) -> None:
        """Let go of what was prefetched: nobody will come for it. The store has it still."""
        self._coming.pop(key, None)

    def coming(self) -> list[str]:
        """The keys of what was prefetched and not got yet."""
        self._tidy()
        return list(self._coming)

    def delete(self, key: str) -> None:
        """Forget it; nothing happens where there is none."""
        self._coming.pop(key, None)
        self._dry.pop(key, None)
        self._delete(key)

    def discard(self, key: str) -> None:
        """Delete it at the next call of this store: whoever is collecting garbage may call this, in
        any thread."""
        self._discarded.append(key)

    def keys(self) -> list[str]:
        """All keys, in the order in which they were first put."""
        self._tidy()
        return list(dict.fromkeys((*self._keys(), *self._dry)))

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds; none of a dry run."""
        self._tidy()
        return sum(self._record(key).bytes for key in self._keys())

    def flush(self) -> None:
        """Return when all that was put is where it belongs."""

    # -------------------------------------------------------------- what outlives a process

    def claim(self, name: str, fingerprint: str, owner: object) -> None:
        """Say whose a store is; StoreError if it is another's, who is still there."""
        there = self._owners.get(name, _nobody)
        if there() not in (None, owner):
            gc.collect()  # an optimizer and its hooks know each other
        if there() not in (None, owner):
            raise StoreError(
                f"this store has the {name} of another {type(there()).__name__}; give each a store "
                f"of its own"
            )
        self._owners[name] = weakref.ref(owner)

    def commit(self, step: int, notes: Any = None) -> None:
        """Make the lasting values safe, all of them at once; nothing where nothing lasts."""

    def rollback(self) -> None:
        """Go back to the last commit."""

    def about(self, key: str) -> Any:
        """What was said about a lasting value."""

    # -------------------------------------------------------------- in memory

    def lend(self, key: str) -> list[Tensor]:
        """The tensors themselves, for whoever computes on the host: nothing is moved."""
        raise NotImplementedError

    def keep(self, key: str, tensors: list[Tensor]) -> None:
        """Take tensors of the host as they are: nothing is moved."""
        raise NotImplementedError

    # -------------------------------------------------------------- each store's own

    def _put(
        self, key: str, record: Record, tensors: list[Tensor], lasting: bool, about: Any
    ) -> None:
        raise NotImplementedError

    def _record(self, key: str) -> Record:
        raise NotImplementedError

    def _fill(self, key: str, record: Record, tensors: list[Tensor]) -> Wait:
        """Begin to fill the tensors; the function that is returned waits for it."""
        raise NotImplementedError

    def _delete(self, key: str) -> None:
        raise NotImplementedError

    def _keys(self) -> Sequence[str]:
        raise NotImplementedError

    # -------------------------------------------------------------- shared

    def _start(
        self, key: str, out: Sequence[Tensor] | None, device: Any
    ) -> tuple[Record, list[Tensor], Wait]:
        record = self._known(key)
        tensors = record.empty(device) if out is None else list(out)
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        wanted = [(piece.shape, piece.dtype) for piece in record.pieces]
        if got != wanted:
            raise ValueError(
                f"got tensors of {got} to put {key!r} into, wanted {wanted}; give tensors of the "
                f"shapes and dtypes that were put"
            )
        self.traffic.read += record.bytes
        if is_fake(tensors):
            return record, tensors, nothing
        if key not in self._keys():
            raise KeyError(f"{key!r} was put in a dry run, which has no numbers; put it for real")
        return record, tensors, self._fill(key, record, tensors)

    def _known(self, key: str) -> Record:
        there = key in self._keys()
        if key in self._dry and not (there and _is_for_real()):
            return self._dry[key]
        if not there:
            raise KeyError(f"the store has no {key!r}; put it before")
        return self._record(key)

    def _tidy(self) -> None:
        while self._discarded:
            self.delete(self._discarded.popleft())


def nothing() -> None:
    """What a wait is where there is nothing to wait for."""


def _is_for_real() -> bool:
    """Whether tensors that are made now have numbers."""
    return not is_fake([torch.empty(0, device="cpu")])


def was_written_to(sources: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether one of the tensors has another version than then."""
    return any(tensor._version != version for tensor, version in sources)


def spoiled_error(key: str) -> StoreError:
    """What to say of such a key: either content may have arrived."""
    return StoreError(
        f"{key!r} was written to while it was copied from the device; write into a new tensor, "
        f"such as x * 2 in place of x.mul_(2)"
    )


# ------------------------------------------------------------------ the host's memory


@dataclass
class _Kept:
    """Copies, and the event after which they are complete."""

    record: Record
    tensors: list[Tensor]
    written: Any = None


class HostStore(Store):
    """Tensors in the host's memory.

    From a GPU they go to pinned memory and back on two streams, one each way, beside what the GPU
    computes. `buffers` tensors may be on their way down at once, each alive until it has arrived;
    one that is written to before that would arrive with either content, so its `get` raises
    StoreError.
    """

    is_memory = True

    def __init__(self, *, buffers: int = 2) -> None:
        super().__init__()
        if buffers < 1:
            raise ValueError(f"got {buffers} buffers; give at least 1")
        self.buffers = buffers
        self._kept: dict[str, _Kept] = {}
        self._leaving: deque[tuple[str, _Kept, list[tuple[Tensor, int]]]] = deque()
        # Made once: each new one has a pool of memory of its own.
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def lend(self, key: str) -> list[Tensor]:
        """The tensors themselves, for whoever computes on the host: nothing is moved."""
        kept = self._kept[key]
        _wait_on_the_host(kept.written)
        return kept.tensors

    def keep(self, key: str, tensors: list[Tensor]) -> None:
        """Take tensors of the host as they are: nothing is moved."""
        self._kept[key] = _Kept(record_of(tensors, tensors), tensors)

    def flush(self) -> None:
        """Return when all copies have arrived."""
        while self._leaving:
            self._one_arrives()

    def _put(
        self, key: str, record: Record, tensors: list[Tensor], lasting: bool, about: Any
    ) -> None:
        kept = _Kept(record, [_host_tensor(tensor) for tensor in tensors])
        self._spoiled.discard(key)
        self._kept[key] = kept
        if record.device.type != "cuda":
            for copy, tensor in zip(kept.tensors, tensors, strict=True):
                copy.copy_(tensor)
            return
        while len(self._leaving) >= self.buffers:
            self._one_arrives()
        kept.written = self._copy(record.device, "down", kept.tensors, tensors)
        self._leaving.append((key, kept, [(tensor, tensor._version) for tensor in tensors]))

    def _one_arrives(self) -> None:
        key, kept, sources = self._leaving.popleft()
        kept.written.synchronize()
        if self._kept.get(key) is kept and was_written_to(sources):
            self._spoiled.add(key)

    def _fill(self, key: str, record: Record, tensors: list[Tensor]) -> Wait:
        kept = self._kept[key]
        while any(there is kept for _, there, _ in self._leaving):
            self._one_arrives()
        if key in self._spoiled:
            raise spoiled_error(key)
        device = tensors[0].device if tensors else record.device
        if device.type != "cuda":
            for tensor, copy in zip(tensors, kept.tensors, strict=True):
                tensor.data.copy_(copy)
            return nothing
        event = self._copy(device, "up", tensors, kept.tensors)
        return lambda: torch.cuda.current_stream(device).wait_event(event)

    def _copy(self, device: Any, way: str, to: list[Tensor], of: list[Tensor]) -> Any:
        """Copies on their own stream, and the event at their end."""
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        stream = self._streams[device, way]
        stream.wait_stream(torch.cuda.current_stream(device))  # its memory may still be in use
        with torch.cuda.stream(stream):
            for there, here in zip(to, of, strict=True):
                # Through `.data`: autograd must not take it for a change of what it saved.
                there.data.copy_(here, non_blocking=True)
                (here if way == "down" else there).record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def _record(self, key: str) -> Record:
        return self._kept[key].record

    def _delete(self, key: str) -> None:
        self._kept.pop(key, None)
        self._spoiled.discard(key)

    def _keys(self) -> Sequence[str]:
        return self._kept  # type: ignore[return-value]


def _host_tensor(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def _wait_on_the_host(event: Any) -> None:
    if event is not None:
        event.synchronize()
