"""A store in a folder: files that a thread reads and writes, and that no crash can hurt.

Saves    all but the `buffers` records that are on their way, each once in the store's own memory.
Costs    the disk's time, as far as it is not hidden behind the device's. A checksum of each byte,
         written and read. For lasting values, while a step runs, the disk space of two generations.
Source   Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv 2104.07857, section 6; copies on write and a
         renamed manifest are how databases commit.

What is lost when a process is killed, or the power fails, in the middle of a step? Nothing, because
nothing is written over:

    put              a new file, beside that of the last step          state.000117
    when written     its bytes are forced to the disk (fsync)
    commit(n)        the folder's names are forced to the disk
                     the manifest, which names the file of each key, is written beside the old
                     one, forced to the disk, and renamed over it: this moment ends step n
                     the folder is forced to the disk again
                     only now are the files of the step before removed

The next start reads the manifest, which is that of one step or of the next and never of both, and
removes whatever files it doesn't name. So the lasting values take twice their bytes on the disk at
the end of each step, and once between steps. What is put without `lasting` (activations, weights
that are streamed) is neither forced to the disk nor named, and is gone at the next start; in a
temporary folder, which has no next start, nothing is forced to the disk.

A file is the record's bytes, each tensor from a multiple of 64 on; its checksum (CRC-32) is in the
manifest or in memory, and looked at on every read. Reading goes straight into the tensor on a CPU,
by way of a pinned buffer to a GPU. Writing goes by way of a buffer, so a tensor may be written to,
or die, as soon as `put` returns.

One process has the store at a time, by a lock that a killed process leaves open.
"""

import errno
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

from memlab.internals.files import TEMPORARY_LOCK, remove_orphaned_folders, sync, write_beside
from memlab.offload.records import Record, raw
from memlab.offload.stores import Store, StoreError, Wait, nothing, spoiled_error, was_written_to
from memlab.units import format_bytes

FORMAT = "memlab offload 1"
MANIFEST = "manifest.json"
MARK = ".store"  # says that the folder is one of a store: files that are in the way may be removed
_FILE = re.compile(r"state\.\d{6,}|\.manifest\.[\d-]+\.json")  # ours, of whatever step
_PREFIX = "memlab-"  # of temporary folders
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class _Entry:
    """Where a record is."""

    record: Record
    file: str
    lasting: bool
    about: Any
    checksum: "Future[int] | int"  # known when it is written

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "crc32": self._crc32(), "about": self.about,
                **self.record.to_json()}  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "_Entry":
        return cls(Record.from_json(data), data["file"], True, data["about"], data["crc32"])

    def _crc32(self) -> int:
        return self.checksum if isinstance(self.checksum, int) else self.checksum.result()


@dataclass(frozen=True)
class _Writing:
    """A record on its way, and the tensors of a GPU that must not be written to meanwhile."""

    key: str
    file: str
    buffer: "_Buffer"
    result: "Future[int]"
    sources: list[tuple[Tensor, int]]  # with their versions


class DiskStore(Store):
    """Tensors in a folder; without one, in a temporary folder that goes with the store.

    `buffers` records may be on their way to the disk at once; `put` waits for the oldest if there
    are more. `step` is the number of the last commit, None before the first; `notes` what was
    committed with it.

    Every read is held against the record's checksum (CRC-32); `verify=False` reads what is there.

    StoreError where another process has the folder, where the manifest or a file is damaged, cut
    short or missing, where a training of other shapes or another optimizer lies (another model of
    the same shapes goes on as that one: a folder for each training), and where the disk is full:
    what was committed last is as it was, and `rollback()` goes back to it. What a killed process
    left, its temporary folder too, is removed by the next store that is made in the same place.
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
            raise ValueError(f"got {buffers} buffers; give at least 1")
        self.buffers, self.verify = buffers, verify
        self.step: int | None = None
        self.notes: Any = None
        self._claims: dict[str, str] = {}
        self._entries: dict[str, _Entry] = {}
        self._committed: dict[str, _Entry] = {}
        self._named: set[str] = set()  # files of the manifest
        self._number = 0
        self._writing: deque[_Writing] = deque()
        self._spare: list[_Buffer] = []
        self._streams: dict[tuple[torch.device, str], Any] = {}
        self._folder: Path | None = None
        if folder is not None:
            self._open(Path(folder), temporary=False)

    # -------------------------------------------------------------- begin and end

    @property
    def folder(self) -> Path:
        """Where the files are; a temporary one is made when it is first asked for."""
        if self._folder is None:
            remove_orphaned_folders(Path(tempfile.gettempdir()), f"{_PREFIX}*")
            self._open(Path(tempfile.mkdtemp(prefix=_PREFIX)), temporary=True)
        assert self._folder is not None
        return self._folder

    def _open(self, folder: Path, temporary: bool) -> None:
        _require_ours(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / (TEMPORARY_LOCK if temporary else "lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(
                f"{folder} is in use, by another process or another store of this one; end that, "
                f"or give another folder"
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
            if _FILE.fullmatch(path.name) and path.name not in self._named:
                path.unlink()
        numbers = (int(name.rpartition(".")[2]) for name in self._named)
        self._number = max(numbers, default=0)

    def close(self) -> None:
        """Let go of the folder; what was not committed is gone. Nothing can be done with the store
        afterwards."""
        if self._folder is not None:
            self._close()

    def _later(self, task: Callable[..., Any], *given: Any) -> "Future[Any]":
        """In the store's thread, which does one thing after another."""
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
        """Say what is trained, and by whom; StoreError if something else was committed under that
        name, or another is still there."""
        there = self._claims.get(name) if self.step is not None else fingerprint
        if there != fingerprint:
            raise StoreError(
                f"{self.folder} holds a training of {there or 'something else'}, wanted one of "
                f"{fingerprint}; make the model and the optimizer as they were then, or give "
                f"another folder"
            )
        super().claim(name, fingerprint, owner)
        self._claims[name] = fingerprint

    def flush(self) -> None:
        """Return when the folder is as it should be: all that was put is written, and what that
        took the place of is removed."""
        while self._writing:
            self._finish_oldest()
        if self._folder is not None and self._close.alive:
            self._later(nothing).result()

    def commit(self, step: int, notes: Any = None) -> None:
        """Make the lasting values those that the next start finds, as of `step`. All or nothing.

        `notes` are plain data, kept with them.
        """
        self._require_open()
        self._tidy()
        self.flush()
        lasting = {key: entry for key, entry in self._entries.items() if entry.lasting}
        if spoiled := self._spoiled & lasting.keys():
            raise spoiled_error(min(spoiled))
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
            with write_beside(self.folder / MANIFEST, durable=self._lasts) as beside:
                beside.write_text(f"{zlib.crc32(text.encode())}\n{text}\n", encoding="utf-8")
        except OSError as error:
            raise self._failure("the manifest", len(text), error) from error
        before, self._committed, self.step, self.notes = self._named, lasting, step, notes
        self._named = {entry.file for entry in lasting.values()}
        for file in sorted(before - self._named):
            self._later(_remove, self.folder / file)

    def _sync(self, path: Path) -> None:
        """A temporary folder ends with this process: nothing has to survive it."""
        if self._lasts:
            sync(path)

    def rollback(self) -> None:
        """Forget what was put since the last commit, and whatever went wrong."""
        self._coming.clear()
        while self._writing:
            writing = self._writing.popleft()
            writing.result.exception()  # waits
            self._spare.append(writing.buffer)
        for entry in self._entries.values():
            self._remove_unless_committed(entry)
        self._entries = dict(self._committed)
        self._spoiled.clear()

    def about(self, key: str) -> Any:
        """What was said about a value when it was put."""
        return self._entries[key].about

    def _read_manifest(self) -> None:
        path = self.folder / MANIFEST
        if not path.exists():
            return
        checksum, _, text = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        if checksum != str(zlib.crc32(text.removesuffix("\n").encode())):
            raise StoreError(
                f"{path} is damaged: its checksum is another; put back a copy of the folder, or "
                f"begin in an empty one"
            )
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise StoreError(f"{path} is of {content['format']!r}, wanted {FORMAT!r}; begin anew")
        entries = content["entries"].items()
        self._committed = {key: _Entry.from_json(entry) for key, entry in entries}
        self._entries = dict(self._committed)
        self._named = {entry.file for entry in self._committed.values()}
        self.step, self.notes, self._claims = content["step"], content["notes"], content["claims"]
        if self.verify:
            self._require_whole_files()

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
        """What the store's own buffers take of the host's memory."""
        there = [*self._spare, *(writing.buffer for writing in self._writing)]
        return sum(buffer.size for buffer in there)

    def _put(
        self, key: str, record: Record, tensors: list[Tensor], lasting: bool, about: Any
    ) -> None:
        folder = self.folder
        buffer = self._buffer(record)
        ready = self._fill_buffer(buffer, record, tensors)
        sources = [] if ready is None else [(tensor, tensor._version) for tensor in tensors]
        self._number += 1
        path = folder / f"state.{self._number:06d}"
        result = self._later(_write, path, buffer, record, ready, lasting and self._lasts)
        self._writing.append(_Writing(key, path.name, buffer, result, sources))
        self._remove_unless_committed(self._entries.get(key))
        self._entries[key] = _Entry(record, path.name, lasting, about, result)
        self._spoiled.discard(key)

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
        """Wait for the oldest write, and raise what went wrong with it."""
        writing = self._writing[0]
        try:
            writing.result.result()
        except OSError as error:
            raise self._failure(repr(writing.key), writing.buffer.size, error) from error
        self._writing.popleft()
        self._spare.append(writing.buffer)
        entry = self._entries.get(writing.key)
        if entry is not None and entry.file == writing.file and was_written_to(writing.sources):
            self._spoiled.add(writing.key)

    def _fill_buffer(self, buffer: "_Buffer", record: Record, tensors: list[Tensor]) -> Any:
        """Copy the tensors; from a GPU, the event at the end of that."""
        if not buffer.pinned:
            for piece, tensor in zip(record.pieces, tensors, strict=True):
                buffer.bytes[piece.offset : piece.offset + piece.bytes] = raw(tensor)
            return None
        with self._stream(record.device, "down") as stream:
            for piece, tensor in zip(record.pieces, tensors, strict=True):
                place = buffer.tensor[piece.offset : piece.offset + piece.bytes]
                place.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
                tensor.record_stream(stream)
            return stream.record_event()

    def _failure(self, what: str, nbytes: int, error: OSError) -> StoreError:
        full = error.errno in _FULL
        reason = "there is no room left" if full else str(error)
        safe = "nothing was committed yet" if self.step is None else f"step {self.step} is intact"
        return StoreError(
            f"could not write {what} ({format_bytes(nbytes)}) in {self.folder}: {reason}; {safe}. "
            f"{'Free some space' if full else 'Repair that'}, and resume"
        )

    # -------------------------------------------------------------- reading

    def _fill(self, key: str, record: Record, tensors: list[Tensor]) -> Wait:
        entry = self._entries[key]
        path = self.folder / entry.file
        while any(writing.file == entry.file and writing.sources for writing in self._writing):
            self._finish_oldest()
        if key in self._spoiled:
            raise spoiled_error(key)
        if tensors and tensors[0].is_cuda:
            return self._fill_on_gpu(key, path, entry, tensors)
        # Through `.data`: autograd must not take it for a change of what it saved.
        numbers = [tensor.data for tensor in tensors]  # alive until they are read, whoever lets go
        reading = self._later(_read_into, path, entry, numbers, self.verify)
        return lambda: self._arrived(key, path, reading)

    def _fill_on_gpu(self, key: str, path: Path, entry: _Entry, tensors: list[Tensor]) -> Wait:
        device = tensors[0].device
        buffer = _Buffer(entry.record.extent, pinned=True)
        ready = torch.cuda.current_stream(device).record_event()  # memory that others have left

        copied: list[Any] = []

        def read_and_copy() -> "_Found":
            places = [buffer.of(piece) for piece in entry.record.pieces]
            found = _read(path, entry, places, self.verify)
            with self._stream(device, "up", wait=ready) as stream:
                for piece, tensor in zip(entry.record.pieces, tensors, strict=True):
                    place = buffer.tensor[piece.offset : piece.offset + piece.bytes]
                    tensor.data.view(-1).view(torch.uint8).copy_(place, non_blocking=True)
                    tensor.record_stream(stream)
                copied.append(stream.record_event())
            return found

        reading = self._later(read_and_copy)

        def wait() -> None:
            self._arrived(key, path, reading)
            torch.cuda.current_stream(device).wait_event(copied[0])

        return wait

    def _arrived(self, key: str, path: Path, reading: "Future[_Found]") -> None:
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
                f"{key!r} in {path} is damaged: its checksum is {found.crc32:08x}, and was "
                f"{found.crc32_wanted:08x}; put back a copy of the folder, or "
                f"give verify=False to read it as it is"
            )

    def _stream(self, device: torch.device, way: str, wait: Any = None) -> Any:
        """Copies inside `with` run on a stream of their own, made once."""
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        return _OnStream(self._streams[device, way], device, wait)

    # -------------------------------------------------------------- what is there

    def _record(self, key: str) -> Record:
        return self._entries[key].record

    def _keys(self) -> Sequence[str]:
        return self._entries  # type: ignore[return-value]

    def _delete(self, key: str) -> None:
        self._remove_unless_committed(self._entries.pop(key, None))

    def _remove_unless_committed(self, entry: _Entry | None) -> None:
        """By the thread that may still write or read it."""
        if entry is None or entry.file in self._named:
            return
        if self._close.alive:  # or the next start removes it
            self._later(_remove, self.folder / entry.file)


class _OnStream:
    """`with`: the stream, which first waits for what the current one has to do, or for an event."""

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
    """Memory of the host that is the store's own."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size, self.pinned = max(size, 1), pinned
        self.tensor: Any = None
        if pinned:
            self.tensor = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
            self.bytes = raw(self.tensor)
        else:
            self.bytes = memoryview(mmap.mmap(-1, self.size))

    def of(self, piece: Any) -> memoryview:
        """Where a piece lies in it."""
        return self.bytes[piece.offset : piece.offset + piece.bytes]


# ------------------------------------------------------------------ in the thread


def _write(path: Path, buffer: _Buffer, record: Record, ready: Any, forced: bool) -> int:
    """The record as a file that is whole or not there; its checksum."""
    if ready is not None:
        ready.synchronize()
    checksum, content = 0, buffer.bytes[: record.extent]
    for piece in record.pieces:
        checksum = zlib.crc32(buffer.of(piece), checksum)
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


class _Found(NamedTuple):
    """What a file has, and what it should have."""

    bytes: int
    bytes_wanted: int
    crc32: int
    crc32_wanted: int


def _read_into(path: Path, entry: _Entry, tensors: list[Tensor], verify: bool) -> _Found:
    try:
        return _read(path, entry, [raw(tensor) for tensor in tensors], verify)
    finally:
        # The thread lets go of a task a moment after whoever waits for it has gone on: what is
        # freed then, and asked for again, would be another matter each time.
        tensors.clear()


def _read(path: Path, entry: _Entry, places: list[memoryview], verify: bool) -> _Found:
    """Fill the places, as far as the file goes."""
    got = checksum = 0
    wanted = entry._crc32() if verify else 0
    with open(path, "rb", buffering=0) as file:
        for piece, place in zip(entry.record.pieces, places, strict=True):
            file.seek(piece.offset)
            while place and (count := file.readinto(place)):
                checksum = zlib.crc32(place[:count], checksum) if verify else 0
                place, got = place[count:], got + count
    return _Found(got, entry.record.bytes, checksum, wanted)


def _cut_short(key: str, path: Path, got: int, wanted: int) -> str:
    return (
        f"{key!r} in {path} is cut short: got {got:,} bytes of {wanted:,}; put back a copy of the "
        f"folder, or begin in an empty one"
    )


def _missing(key: str, path: Path) -> str:
    return (
        f"{key!r} should be in {path}, which is missing; put back a copy of the folder, or begin "
        f"in an empty one"
    )


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _require_ours(folder: Path) -> None:
    """StoreError for a folder with files of others that have names as ours have."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; give a folder, which may be new")
    if not folder.exists() or (folder / MARK).exists():
        return
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST or _FILE.fullmatch(path.name):
            raise StoreError(
                f"{folder} has a {path.name} that no store has written; give an empty or a new "
                f"folder"
            )


def _close(thread: ThreadPoolExecutor, lock: FileLock, folder: Path, temporary: bool) -> None:
    thread.shutdown(wait=True)
    lock.release()
    if temporary:
        shutil.rmtree(folder, ignore_errors=True)
