"""A store in a folder: a thread reads and writes files, and commits survive crashes.

Saves    device memory and host memory, except for `buffers` records in the store's own memory.
Costs    disk time that computation does not hide, and a checksum of every byte. During a step,
         lasting values need disk space for two generations.
Source   Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv 2104.07857, section 6; copy-on-write and a
         renamed manifest, as databases commit.

A kill or a power failure in the middle of a step loses nothing, because no file is overwritten:

    put              writes a new file beside the last step's file     state.000117
                     and syncs its bytes to disk (fsync)
    commit(n)        syncs the folder's names to disk
                     writes a new manifest, which names the file of each key, beside the old one,
                     syncs it, and renames it over the old one: the rename commits step n
                     syncs the folder again
                     removes the files of the previous step

The next start reads the manifest, which always describes exactly one step, and removes all files
outside it. So lasting values take twice their bytes at the end of a step, and once between steps.
Values stored without `lasting` (activations, streamed weights) are not synced, and are gone at the
next start. A temporary folder has no next start, so nothing in it is synced.

A file contains the bytes of a record; each tensor starts at a multiple of 64. Its checksum (CRC-32)
is in the manifest or in memory, and every read verifies it. Reads go straight into CPU tensors, and
through a pinned buffer to a GPU. Writes go through a buffer, so a tensor may be modified or freed
as soon as `put` returns.

A lock allows one process at a time; it is released when the process is killed.
"""

import json
import mmap
import os
import re
import shutil
import tempfile
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from memlab.internals.files import (
    FULL,
    TEMPORARY_LOCK,
    remove_orphaned_folders,
    sync,
    write_beside,
)
from memlab.offload.records import Record, is_count, raw
from memlab.offload.stores import Store, StoreError, Wait, modified_error, nothing, was_modified
from memlab.units import format_bytes

FORMAT = "memlab offload 1"
MANIFEST = "manifest.json"
MARK = ".store"  # marks the folder as a store's, so that leftover files may be removed
_VALUES = re.compile(r"state\.\d{6,18}")  # the file of a record
_FILE = re.compile(rf"{_VALUES.pattern}|\.manifest\.[\d-]+\.json")  # files that may be left over
_PREFIX = "memlab-"  # of temporary folders


@dataclass(frozen=True)
class _Entry:
    """The file of a record and its metadata."""

    record: Record
    file: str
    lasting: bool
    about: Any
    checksum: "Future[int] | int"  # a Future until the file is written

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "crc32": self._crc32(), "about": self.about,
                **self.record.to_json()}  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "_Entry":
        file, crc32 = data["file"], data["crc32"]
        if not isinstance(file, str) or not _VALUES.fullmatch(file):
            raise ValueError(f"the file name {file!r}")
        if not is_count(crc32):
            raise ValueError(f"the checksum {crc32!r}")
        return cls(Record.from_json(data), file, True, data["about"], crc32)

    def _crc32(self) -> int:
        return self.checksum if isinstance(self.checksum, int) else self.checksum.result()


@dataclass(frozen=True)
class _Writing:
    """A record being written, and its GPU sources, which must not change meanwhile."""

    key: str
    file: str
    buffer: "_Buffer"
    result: "Future[int]"
    sources: list[tuple[Tensor, int]]  # with their versions


class DiskStore(Store):
    """Tensors in a folder; by default, a temporary folder, removed with the store.

    At most `buffers` records are written at once; then `put` waits for the oldest. `step` is the
    number of the last commit, None before the first. `notes` were committed with it.

    Every read verifies the record's checksum (CRC-32); `verify=False` skips this.

    Raises StoreError in these cases:

    - another process has the folder
    - the manifest or a file is damaged, truncated or missing
    - the folder holds a training with other shapes or another optimizer. A different model with
      the same shapes is not detected, so use one folder per training
    - the disk is full. The last commit is intact, and `rollback()` returns to it

    The next store in the same place removes the leftovers of a killed process, including its
    temporary folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        buffers: int = 2,
        verify: bool = True,
    ) -> None:
        super().__init__()
        if buffers < 1:
            raise ValueError(f"got {buffers} buffers; pass at least 1")
        self.buffers, self.verify = buffers, verify
        self.step: int | None = None
        self.notes: Any = None
        self._claims: dict[str, str] = {}
        self._entries: dict[str, _Entry] = {}
        self._committed: dict[str, _Entry] = {}
        self._manifest_files: set[str] = set()
        self._number = 0
        self._writing: deque[_Writing] = deque()
        self._spare: list[_Buffer] = []
        self._streams: dict[tuple[torch.device, str], Any] = {}
        self._folder: Path | None = None
        if folder is not None:
            self._open(Path(folder), temporary=False)

    # -------------------------------------------------------------- open and close

    @property
    def folder(self) -> Path:
        """The folder of the files; a temporary one is created on first access."""
        if self._folder is None:
            remove_orphaned_folders(Path(tempfile.gettempdir()), f"{_PREFIX}*")
            self._open(Path(tempfile.mkdtemp(prefix=_PREFIX)), temporary=True)
        assert self._folder is not None
        return self._folder

    def _open(self, folder: Path, temporary: bool) -> None:
        _require_store_folder(folder)
        try:
            self._open_files(folder, temporary)
        except OSError as error:
            raise StoreError(
                f"could not open a store in {folder}: {error.strerror or error}; free some space "
                f"on its disk, or pass a folder that can be written"
            ) from error

    def _open_files(self, folder: Path, temporary: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / (TEMPORARY_LOCK if temporary else "lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(
                f"{folder} is in use, by another process or another store of this one; close it, "
                f"or pass another folder"
            ) from None
        self._folder, self._lasts = folder, not temporary
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memlab-disk")
        self._close = weakref.finalize(self, _close, self._thread, lock, folder, temporary)
        try:
            if not (folder / MARK).exists():
                (folder / MARK).write_text("memlab.offload.DiskStore\n", encoding="utf-8")
                self._sync(folder / MARK)
                self._sync(folder)
            self._read_manifest()
        except BaseException:
            self._close()
            raise
        for path in sorted(folder.iterdir()):
            if _FILE.fullmatch(path.name) and path.name not in self._manifest_files:
                path.unlink()
        numbers = (int(name.rpartition(".")[2]) for name in self._manifest_files)
        self._number = max(numbers, default=0)

    def close(self) -> None:
        """Release the folder and drop uncommitted values. The store cannot be used afterwards."""
        if self._folder is not None:
            self._close()

    def _submit(self, task: Callable[..., Any], *given: Any) -> "Future[Any]":
        """Run a task in the store's thread, after all earlier tasks."""
        self._require_open()
        return self._thread.submit(task, *given)

    def _require_open(self) -> None:
        if self._folder is not None and not self._close.alive:
            raise StoreError(f"the store in {self._folder} is closed; make another DiskStore")

    def __enter__(self) -> "DiskStore":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # -------------------------------------------------------------- commits

    def claim(self, name: str, fingerprint: str, owner: object) -> None:
        """Claim the store for a training with this fingerprint.

        Raises StoreError if another training was committed under the name, or another living owner
        has the store.
        """
        committed = self._claims.get(name) if self.step is not None else fingerprint
        if committed != fingerprint:
            raise StoreError(
                f"{self.folder} holds a training of {committed or 'something else'}, wanted one of "
                f"{fingerprint}; make the same model and optimizer as then, or pass another folder"
            )
        super().claim(name, fingerprint, owner)
        self._claims[name] = fingerprint

    def flush(self) -> None:
        """Wait until all values are written and all replaced files are removed."""
        while self._writing:
            self._finish_oldest()
        if self._folder is not None and self._close.alive:
            self._submit(nothing).result()

    def commit(self, step: int, notes: Any = None) -> None:
        """Commit all lasting values as of `step`, atomically.

        `notes` are plain data to store with them.
        """
        self._require_open()
        self._delete_discarded()
        self.flush()
        lasting = {key: entry for key, entry in self._entries.items() if entry.lasting}
        if spoiled := self._modified & lasting.keys():
            raise modified_error(min(spoiled))
        content = {
            "format": FORMAT,
            "step": step,
            "claims": self._claims,
            "notes": notes,
            "entries": {key: entry.to_json() for key, entry in lasting.items()},
        }
        text = json.dumps(content)
        try:
            self._sync(self.folder)
            with write_beside(self.folder / MANIFEST, durable=self._lasts) as temporary:
                temporary.write_text(f"{zlib.crc32(text.encode())}\n{text}\n", encoding="utf-8")
        except OSError as error:
            raise self._write_error("the manifest", len(text), error) from error
        before, self._committed, self.step, self.notes = self._manifest_files, lasting, step, notes
        self._manifest_files = {entry.file for entry in lasting.values()}
        for file in sorted(before - self._manifest_files):
            self._submit(_remove, self.folder / file)

    def _sync(self, path: Path) -> None:
        """Sync a path to disk, except in a temporary folder, which ends with this process."""
        if self._lasts:
            sync(path)

    def rollback(self) -> None:
        """Drop all changes and errors since the last commit."""
        self._coming.clear()
        while self._writing:
            writing = self._writing.popleft()
            writing.result.exception()  # waits
            self._spare.append(writing.buffer)
        for entry in self._entries.values():
            self._remove_unless_committed(entry)
        self._entries = dict(self._committed)
        self._modified.clear()

    def about(self, key: str) -> Any:
        """Return the `about` data of a value."""
        return self._entries[key].about

    def _read_manifest(self) -> None:
        path = self.folder / MANIFEST
        if not path.exists():
            return
        checksum, _, text = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        if checksum != str(zlib.crc32(text.removesuffix("\n").encode())):
            raise StoreError(
                f"{path} is damaged: its checksum differs; restore a copy of the folder, or start "
                f"in an empty one"
            )
        try:
            self._take_manifest(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"{path} was not written by a DiskStore: it has {error}; restore a copy of the "
                f"folder, or start in an empty one"
            ) from error
        if self.verify:
            self._require_whole_files()

    def _take_manifest(self, content: dict[str, Any]) -> None:
        """Take over the content. Nothing in it may name a path outside the folder."""
        if content["format"] != FORMAT:
            raise ValueError(f"the format {content['format']!r}, wanted {FORMAT!r}")
        if not is_count(content["step"]):
            raise ValueError(f"the step {content['step']!r}")
        committed = {key: _Entry.from_json(entry) for key, entry in content["entries"].items()}
        files = {entry.file for entry in committed.values()}
        if len(files) < len(committed):
            raise ValueError("two values in one file")
        claims = dict(content["claims"])
        if not all(isinstance(fingerprint, str) for fingerprint in claims.values()):
            raise ValueError(f"the claims {claims!r}")
        self._committed, self._entries, self._manifest_files = committed, dict(committed), files
        self.step, self.notes, self._claims = content["step"], content["notes"], claims

    def _require_whole_files(self) -> None:
        for key, entry in self._committed.items():
            file = self.folder / entry.file
            if not file.exists():
                raise StoreError(_missing(key, file))
            got, wanted = file.stat().st_size, entry.record.extent
            if got != wanted:
                raise StoreError(_cut_short(key, file, got, wanted))

    # -------------------------------------------------------------- writing

    @property
    def buffer_bytes(self) -> int:
        """Host memory of the store's own buffers."""
        buffers = [*self._spare, *(writing.buffer for writing in self._writing)]
        return sum(buffer.size for buffer in buffers)

    def _put(
        self, key: str, record: Record, tensors: list[Tensor], lasting: bool, about: Any
    ) -> None:
        folder = self.folder
        buffer = self._buffer(record)
        ready = self._fill_buffer(buffer, record, tensors)
        sources = [] if ready is None else [(tensor, tensor._version) for tensor in tensors]
        self._number += 1
        path = folder / f"state.{self._number:06d}"
        result = self._submit(_write, path, buffer, record, ready, lasting and self._lasts)
        self._writing.append(_Writing(key, path.name, buffer, result, sources))
        self._remove_unless_committed(self._entries.get(key))
        self._entries[key] = _Entry(record, path.name, lasting, about, result)
        self._modified.discard(key)

    def _buffer(self, record: Record) -> "_Buffer":
        if len(self._writing) >= self.buffers:
            self._finish_oldest()
        pinned = record.device.type == "cuda"
        for buffer in self._spare:
            if buffer.size >= record.extent and buffer.pinned == pinned:
                self._spare.remove(buffer)
                return buffer
        if len(self._spare) + len(self._writing) >= self.buffers:
            self._spare.pop()
        return _Buffer(record.extent, pinned)

    def _finish_oldest(self) -> None:
        """Wait for the oldest write and raise its error."""
        writing = self._writing[0]
        try:
            writing.result.result()
        except OSError as error:
            raise self._write_error(repr(writing.key), writing.buffer.size, error) from error
        self._writing.popleft()
        self._spare.append(writing.buffer)
        entry = self._entries.get(writing.key)
        if entry is not None and entry.file == writing.file and was_modified(writing.sources):
            self._modified.add(writing.key)

    def _fill_buffer(self, buffer: "_Buffer", record: Record, tensors: list[Tensor]) -> Any:
        """Copy the tensors into the buffer; from a GPU, return the event at the end of the copy."""
        if not buffer.pinned:
            for spec, tensor in zip(record.specs, tensors, strict=True):
                buffer.bytes[spec.offset : spec.offset + spec.bytes] = raw(tensor)
            return None
        with self._stream(record.device, "down") as stream:
            for spec, tensor in zip(record.specs, tensors, strict=True):
                place = buffer.tensor[spec.offset : spec.offset + spec.bytes]
                place.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
                tensor.record_stream(stream)
            return stream.record_event()

    def _write_error(self, what: str, nbytes: int, error: OSError) -> StoreError:
        full = error.errno in FULL
        reason = "there is no room left" if full else str(error)
        safe = "nothing is committed yet" if self.step is None else f"step {self.step} is intact"
        return StoreError(
            f"could not write {what} ({format_bytes(nbytes)}) in {self.folder}: {reason}; {safe}. "
            f"{'Free some space' if full else 'Fix the disk'}, and resume"
        )

    # -------------------------------------------------------------- reading

    def _fill(self, key: str, record: Record, tensors: list[Tensor]) -> Wait:
        entry = self._entries[key]
        path = self.folder / entry.file
        while any(writing.file == entry.file and writing.sources for writing in self._writing):
            self._finish_oldest()
        if key in self._modified:
            raise modified_error(key)
        if tensors and tensors[0].is_cuda:
            return self._fill_on_gpu(key, path, entry, tensors)
        # Read into `.data`, or autograd would see an in-place change of saved tensors. The list
        # keeps the tensors alive until they are read.
        targets = [tensor.data for tensor in tensors]
        reading = self._submit(_read_into, path, entry, targets, self.verify)
        return lambda: self._check_read(key, path, reading)

    def _fill_on_gpu(self, key: str, path: Path, entry: _Entry, tensors: list[Tensor]) -> Wait:
        device = tensors[0].device
        buffer = _Buffer(entry.record.extent, pinned=True)
        ready = torch.cuda.current_stream(device).record_event()  # the memory may still be in use

        copied: list[Any] = []

        def read_and_copy() -> "_ReadResult":
            places = [buffer.view(spec) for spec in entry.record.specs]
            found = _read(path, entry, places, self.verify)
            with self._stream(device, "up", wait=ready) as stream:
                for spec, tensor in zip(entry.record.specs, tensors, strict=True):
                    place = buffer.tensor[spec.offset : spec.offset + spec.bytes]
                    tensor.data.view(-1).view(torch.uint8).copy_(place, non_blocking=True)
                    tensor.record_stream(stream)
                copied.append(stream.record_event())
            return found

        reading = self._submit(read_and_copy)

        def wait() -> None:
            self._check_read(key, path, reading)
            torch.cuda.current_stream(device).wait_event(copied[0])

        return wait

    def _check_read(self, key: str, path: Path, reading: "Future[_ReadResult]") -> None:
        try:
            found = reading.result()
        except FileNotFoundError:
            raise StoreError(_missing(key, path)) from None
        except OSError as error:
            raise StoreError(f"could not read {key!r} from {path}: {error}; resume") from error
        if found.bytes != found.bytes_wanted:
            raise StoreError(_cut_short(key, path, found.bytes, found.bytes_wanted))
        if found.crc32 != found.crc32_wanted:
            raise StoreError(
                f"{key!r} in {path} is damaged: its checksum is {found.crc32:08x}, wanted "
                f"{found.crc32_wanted:08x}; restore a copy of the folder, or pass verify=False to "
                f"skip the checksums"
            )

    def _stream(self, device: torch.device, way: str, wait: Any = None) -> Any:
        """Return a context manager for copies on a separate stream; each stream is made once."""
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        return _OnStream(self._streams[device, way], device, wait)

    # -------------------------------------------------------------- records

    def _record(self, key: str) -> Record:
        return self._entries[key].record

    def _keys(self) -> Sequence[str]:
        return self._entries  # type: ignore[return-value]

    def _delete(self, key: str) -> None:
        self._remove_unless_committed(self._entries.pop(key, None))

    def _remove_unless_committed(self, entry: _Entry | None) -> None:
        """Remove a file in the thread, which may still write or read it."""
        if entry is None or entry.file in self._manifest_files:
            return
        if self._close.alive:  # otherwise the next start removes it
            self._submit(_remove, self.folder / entry.file)


class _OnStream:
    """Run on a stream that first waits for an event, or else for the current stream."""

    def __init__(self, stream: Any, device: torch.device, event: Any) -> None:
        self._stream, self._device, self._event = stream, device, event

    def __enter__(self) -> Any:
        if self._event is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(self._event)
        self._inside = torch.cuda.stream(self._stream)
        self._inside.__enter__()
        return self._stream

    def __exit__(self, *exception: Any) -> None:
        self._inside.__exit__(*exception)


class _Buffer:
    """A buffer in host memory, owned by the store."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size, self.pinned = max(size, 1), pinned
        self.tensor: Any = None
        if pinned:
            self.tensor = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
            self.bytes = raw(self.tensor)
        else:
            self.bytes = memoryview(mmap.mmap(-1, self.size))

    def view(self, spec: Any) -> memoryview:
        """Return the bytes of a tensor in the buffer."""
        return self.bytes[spec.offset : spec.offset + spec.bytes]


# ------------------------------------------------------------------ run in the thread


def _write(path: Path, buffer: _Buffer, record: Record, ready: Any, forced: bool) -> int:
    """Write the record to a file, completely or not at all; return its checksum."""
    if ready is not None:
        ready.synchronize()
    checksum, content = 0, buffer.bytes[: record.extent]
    for spec in record.specs:
        checksum = zlib.crc32(buffer.view(spec), checksum)
    try:
        with open(path, "xb", buffering=0) as file:
            while content:
                content = content[os.write(file.fileno(), content) :]
            if forced:
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return checksum


class _ReadResult(NamedTuple):
    """Size and checksum of a file, found and expected."""

    bytes: int
    bytes_wanted: int
    crc32: int
    crc32_wanted: int


def _read_into(path: Path, entry: _Entry, tensors: list[Tensor], verify: bool) -> _ReadResult:
    try:
        return _read(path, entry, [raw(tensor) for tensor in tensors], verify)
    finally:
        # The thread drops a task a moment after the waiting thread continues. Release the tensors
        # here, or the time at which their memory is free would vary from run to run: equal steps
        # had 1,216 and 1,218 events.
        tensors.clear()


def _read(path: Path, entry: _Entry, places: list[memoryview], verify: bool) -> _ReadResult:
    """Read the file into `places`, as far as it goes."""
    got = checksum = 0
    wanted = entry._crc32() if verify else 0
    with open(path, "rb", buffering=0) as file:
        for spec, place in zip(entry.record.specs, places, strict=True):
            file.seek(spec.offset)
            while place and (count := file.readinto(place)):
                checksum = zlib.crc32(place[:count], checksum) if verify else 0
                place, got = place[count:], got + count
    return _ReadResult(got, entry.record.bytes, checksum, wanted)


def _cut_short(key: str, path: Path, got: int, wanted: int) -> str:
    return (
        f"{key!r} in {path} is cut short: got {got:,} bytes of {wanted:,}; restore a copy of the "
        f"folder, or start in an empty one"
    )


def _missing(key: str, path: Path) -> str:
    return (
        f"{key!r} should be in {path}, which is missing; restore a copy of the folder, or start in "
        f"an empty one"
    )


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _require_store_folder(folder: Path) -> None:
    """Raise StoreError for a folder with foreign files that have the names of store files."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; pass a folder, which may be new")
    if not folder.exists() or (folder / MARK).exists():
        return
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST or _FILE.fullmatch(path.name):
            raise StoreError(
                f"{folder} has a {path.name} that no store has written; pass an empty or a new "
                f"folder"
            )


def _close(thread: ThreadPoolExecutor, lock: FileLock, folder: Path, temporary: bool) -> None:
    thread.shutdown(wait=True)
    lock.release()
    if temporary:
        shutil.rmtree(folder, ignore_errors=True)
