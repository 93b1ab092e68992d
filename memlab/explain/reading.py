"""Read a file of any kind that memlab can explain, and say which kind it is.

Snapshots are pickles, which could run code. They are read with memlab.internals.unpickling, which
allows plain data only. Limits keep a damaged or hostile file from taking the machine:

    a log, of any length   the last MOST_TEXT_BYTES before its last out-of-memory message
    JSON, a pickle         MOST_JSON_BYTES, MOST_PICKLE_BYTES, also after decompression
    compressed data        expands to at most EXPANSION times its bytes, or MOST_TEXT_BYTES, which
                           limits the time as well
    nesting                as deep as Python's parser of JSON reads
    time, memory           of a pickle: see memlab.internals.unpickling
    sizes                  integers from 0 to MOST_SIZE
"""

import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from memlab.allocator import Allocator
from memlab.allocator.recorded_settings import KEY, as_stated, stated_settings
from memlab.allocator.settings import Settings
from memlab.explain.messages import KEYWORDS, MOST_HEAD, WIDEST_MESSAGE, messages_in
from memlab.internals.cycles import no_cycle_collection
from memlab.internals.snapshot import stack_frames
from memlab.internals.unpickling import unpickle_bytes
from memlab.trace import Trace
from memlab.units import format_bytes

PICKLE_START, GZIP_START, ZIP_START = b"\x80", b"\x1f\x8b", b"PK\x03\x04"
MOST_TEXT_BYTES = 2**26  # of a log, before its last message
MOST_JSON_BYTES, MOST_PICKLE_BYTES = 2**29, 2**31
EXPANSION = 200  # times as many bytes as a compressed file has; torch's snapshots reach 50
CHUNK_BYTES = 2**24
_JSON = re.compile(rb'\s*(\{\s*["}]|\[\s*[\[{])')  # a log may begin with [2026-01-01 or [rank0]
MOST_SIZE = 2**50  # of a block or segment
WANTED = (
    "give a snapshot of torch.cuda.memory._dump_snapshot, a log with an out-of-memory message, or "
    "a memlab trace (Trace.to_dict() as JSON)"
)


@dataclass(frozen=True)
class Source:
    """What a file holds: a snapshot's data or a log's text."""

    kind: str  # "snapshot", "recording", "trace" or "log"
    snapshot: Mapping[str, Any] | None = None
    text: str = ""
    unread_bytes: int = 0  # of a long log, left out of `text`


OnBytes = Callable[[int], None]  # called with the number of bytes read


def read_file(path: Path, on_bytes: OnBytes = lambda count: None) -> Source:
    """Return what a file holds. Raise ValueError if it is nothing that memlab can explain.

    The file is read once, so it may be a pipe. Of a long log, only a part is kept.
    """
    with path.open("rb") as file:
        return read_stream(file, on_bytes)


def read_stream(file: BinaryIO, on_bytes: OnBytes = lambda count: None) -> Source:
    """Return what an open file holds: a pickle, JSON or text, also compressed with gzip."""
    start = file.read(len(GZIP_START))
    if not start:
        raise ValueError(f"it is empty; {WANTED}")
    counted = _Counted(start, file)
    content = _Content()
    for chunk in _decompressed(counted) if start == GZIP_START else _chunks(counted):
        content.add(chunk)
        on_bytes(content.count)
    return content.source()


def of_bytes(content: bytes) -> Source:
    """Return what the bytes of a file hold."""
    return read_stream(BytesIO(content))


class _Counted:
    """A file whose start was taken from it. `count` is the number of bytes read."""

    def __init__(self, start: bytes, file: BinaryIO) -> None:
        self._start, self._file, self.count = start, file, 0

    def read(self, size: int) -> bytes:
        taken, self._start = self._start[:size], self._start[size:]
        taken += self._file.read(size - len(taken))
        self.count += len(taken)
        return taken


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _decompressed(file: _Counted) -> Iterator[bytes]:
    made = 0
    try:
        readable: Any = file
        for chunk in _chunks(gzip.GzipFile(fileobj=readable)):
            made += len(chunk)
            if made > max(MOST_TEXT_BYTES, EXPANSION * file.count):
                raise ValueError(
                    f"it expands to more than {EXPANSION} times its bytes; give the file "
                    f"uncompressed"
                )
            yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"it is damaged: {error}; give the complete file") from error


class _Content:
    """The bytes of a file; of a text that is too long, the part that ends with its last message."""

    def __init__(self) -> None:
        self.start, self.count = b"", 0
        self._kept: deque[bytes] = deque()  # the last chunks
        self._kept_bytes = 0
        self._with_message: tuple[bytes, ...] = ()  # the last chunks when a message was found

    def add(self, chunk: bytes) -> None:
        self.start = self.start or chunk[:MOST_HEAD]
        self.count += len(chunk)
        self._kept.append(chunk)
        self._kept_bytes += len(chunk)
        if self.start.startswith(PICKLE_START):
            if self.count > MOST_PICKLE_BYTES:
                raise _too_long(MOST_PICKLE_BYTES)
            return
        most = MOST_JSON_BYTES if _JSON.match(self.start) else MOST_TEXT_BYTES
        while self._kept_bytes - len(self._kept[0]) > most:
            self._kept_bytes -= len(self._kept.popleft())
        if self._has_message():
            self._with_message = tuple(self._kept)

    def _has_message(self) -> bool:
        """Whether the last chunk has a message or what follows one."""
        *_, before, chunk = b"", *self._kept
        found = before[-4 * WIDEST_MESSAGE :] + chunk
        encoding = _encoding(self.start)
        if not any(word.encode(encoding) in found for word in KEYWORDS):
            return False
        return any(messages_in(found.decode(encoding, "replace")))

    def source(self) -> Source:
        if self.start.startswith(ZIP_START):
            raise ValueError(f"it is a zip file, such as a checkpoint of torch.save; {WANTED}")
        whole = self.count == self._kept_bytes
        content = b"".join(self._kept if whole else self._with_message or self._kept)
        self._kept.clear()
        if self.start.startswith(PICKLE_START):
            return of_data(unpickle_bytes(content))
        encoding = _encoding(self.start)
        if whole:
            return of_text(content.decode(encoding, "replace").removeprefix("\ufeff"))
        if _JSON.match(self.start) and not self._with_message:
            raise _too_long(MOST_JSON_BYTES)
        head = self.start.decode(encoding, "replace")
        text = f"{head}\n{content.decode(encoding, 'replace')}"
        return Source("log", text=text, unread_bytes=self.count - len(content))


def _too_long(most: int) -> ValueError:
    return ValueError(
        f"it has more than {format_bytes(most)}; record fewer entries, such as "
        f"_record_memory_history(max_entries=200_000)"
    )


def _encoding(start: bytes) -> str:
    """Return the encoding of a text, which PowerShell writes as UTF-16."""
    return {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(start[:2], "utf-8")


def of_text(text: str) -> Source:
    """Return the source of a text: JSON, or a log."""
    if _JSON.match(text[:MOST_HEAD].encode(errors="replace")):
        try:
            with no_cycle_collection():
                data = json.loads(text)
        except (ValueError, RecursionError) as error:  # also for a number of too many digits
            if not any(messages_in(text)):
                raise ValueError(f"it is no complete JSON: {error}; {WANTED}") from error
        else:
            return of_data(data)
    return Source("log", text=text)


def of_data(data: Any) -> Source:
    """Return the source of a pickle's or a JSON document's data."""
    if _are_segments(data):  # torch.cuda.memory_snapshot() returns a list
        return Source("snapshot", _checked({"segments": data, "device_traces": []}))
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, and no snapshot; {WANTED}")
    if "fields" in data and "events" in data:
        return Source("trace", _checked(_trace(data)))
    if "events" in data and "segments_at_end" in data:
        return Source("recording", _checked(data))
    if "device_traces" in data or "segments" in data:
        return Source("snapshot", _checked(data))
    if "schema" in data and "command" in data:
        raise ValueError(
            f"it is the result of memlab {data['command']}, which holds peaks but no allocations; "
            f"write a trace instead: json.dump(trace.to_dict(), file)"
        )
    raise ValueError(f"its keys are {', '.join(map(str, list(data)[:6]))}; {WANTED}")


def _trace(data: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return snapshot_of(Trace.from_dict(data))
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"its trace is damaged: {error!r}; write it again with to_dict") from error


def _are_segments(data: Any) -> bool:
    return (
        isinstance(data, list)
        and bool(data)
        and all(isinstance(each, dict) and {"address", "blocks"} <= each.keys() for each in data)
    )


# ------------------------------------------------------------------ checks


_SIZES: tuple[str, ...] = (
    "size",
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "real_size",
)
_ADDRESSES = ("addr", "address")
_INTEGERS = ("stream", "device", "device_free")
_TEXTS = ("action", "segment_type", "state", "category")


def _checked(snapshot: Any) -> Mapping[str, Any]:
    """Return a snapshot or recording whose entries are those of torch. Raises ValueError."""
    frames: set[int] = set()  # lists and frames that were checked; entries share them
    for name in ("segments", "segments_at_end"):
        for segment in _dicts(snapshot.get(name, []), name):
            _check_entry(segment, frames)
            for block in _dicts(segment.get("blocks", []), "blocks"):
                _check_entry(block, frames)
                for past in _dicts(block.get("history", []), "history"):
                    _check_entry(past, frames)
    traces = snapshot.get("device_traces", [])
    for entries in [*_lists(traces, "device_traces"), snapshot.get("events", [])]:
        for entry in _dicts(entries, "events"):
            _check_entry(entry, frames)
    try:
        Settings(**stated_settings(snapshot.get(KEY, {})))
    except ValueError:
        pass  # a setting that is not simulated, which is reported where it is used
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(f"its {KEY} are damaged: {error!r}; {WANTED}") from error
    return snapshot


def _lists(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"its {name} must be lists, and one is a {type(value).__name__}; {WANTED}")
    return value


def _dicts(value: Any, name: str) -> Iterator[dict[str, Any]]:
    for each in _lists(value, name):
        if not isinstance(each, dict):
            raise ValueError(
                f"its {name} holds a {type(each).__name__}, which is no dictionary; {WANTED}"
            )
        yield each


def _check_entry(entry: dict[str, Any], checked: set[int]) -> None:
    for names, most in ((_SIZES, MOST_SIZE), (_ADDRESSES, 2**64)):
        for name in names:
            value = entry.get(name, 0)
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(
                    f"an entry has the {name} {_short(value)}; expected an integer from 0 to "
                    f"2^{most.bit_length() - 1}, as torch records"
                )
    for names, kind in ((_INTEGERS, int), (_TEXTS, str)):
        for name in names:
            if name in entry and type(entry[name]) is not kind:
                raise ValueError(f"an entry has the {name} {_short(entry[name])}; {WANTED}")
    frames = entry.get("frames") or []
    if id(frames) in checked:
        return
    checked.add(id(frames))
    for frame in _dicts(frames, "frames"):
        if id(frame) in checked:
            continue
        checked.add(id(frame))
        is_text = all(isinstance(frame.get(key, ""), str) for key in ("filename", "name"))
        if not is_text or type(frame.get("line", 0)) is not int:
            raise ValueError(f"an entry has the frame {_short(frame)}; {WANTED}")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, too deep
        return f"of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}…"


# ------------------------------------------------------------------ traces


def snapshot_of(trace: Trace) -> dict[str, Any]:
    """Return a trace as a snapshot whose addresses and segments come from the simulated allocator.

    Each entry also has memlab's category and the shape.
    """
    allocator = Allocator(keeps_history=True)
    writer = _TraceWriter(allocator)
    for event in trace.events:
        writer.take(event)
    return {
        "segments": [],
        "device_traces": [writer.entries],
        "allocator_settings": as_stated(allocator.settings),
    }


class _TraceWriter:
    """Writes the entries that CUDA would record for a trace's events."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.entries: list[dict[str, Any]] = []
        self._blocks: dict[int, Any] = {}  # by storage

    def take(self, event: Any) -> None:
        """Serve one event. A storage that changes its size moves to a new block."""
        if event.category == "rounding" or not event.bytes:
            return
        old = self._blocks.pop(event.storage, None)
        size = event.bytes + (old.requested_bytes if old else 0)
        if old:
            self.allocator.free(old)
        if size > 0:
            self._blocks[event.storage] = self.allocator.malloc(size)
        history = self.allocator.history
        assert history is not None
        for action, address, bytes_, stream in history:
            entry = {"action": action, "addr": address, "size": bytes_, "stream": stream}
            self.entries.append(entry | (_origin(event) if action == "alloc" else {}))
        history.clear()


def _origin(event: Any) -> dict[str, Any]:
    return {
        "category": event.category,
        "frames": list(stack_frames(event)),
        "shape": event.shape,
    }
