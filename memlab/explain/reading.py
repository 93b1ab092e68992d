"""Read a file of any kind that memlab can explain, and say which kind it is.

Snapshots are pickles, which could run code. They are read with memlab.internals.unpickling, which
allows plain data only.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab.allocator import Allocator
from memlab.allocator.recorded_settings import as_stated
from memlab.internals.snapshot import stack_frames
from memlab.internals.unpickling import unpickle_bytes
from memlab.trace import Trace

PICKLE_START, GZIP_START, ZIP_START = b"\x80", b"\x1f\x8b", b"PK\x03\x04"
MOST_TEXT_BYTES = 2**28  # of a log; only its end is read
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


def read_file(path: Path) -> Source:
    """Return what a file holds. Raise ValueError if it is nothing that memlab can explain.

    The file is read once, so it may be a pipe.
    """
    with path.open("rb") as file:
        return of_bytes(file.read())


def of_bytes(content: bytes) -> Source:
    """Return what the bytes of a file hold: a pickle, JSON or text, also compressed with gzip."""
    if not content:
        raise ValueError(f"it is empty; {WANTED}")
    if content.startswith(GZIP_START):
        content = _decompressed(content)
    if content.startswith(PICKLE_START):
        return of_data(unpickle_bytes(content))
    if content.startswith(ZIP_START):
        raise ValueError(f"it is a zip file, such as a checkpoint of torch.save; {WANTED}")
    return of_text(_decoded(content[-MOST_TEXT_BYTES:], content[:2]))


def _decoded(content: bytes, start: bytes) -> str:
    """Decode a text, which PowerShell writes as UTF-16."""
    encoding = "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    return content.decode(encoding, "replace")


def of_text(text: str) -> Source:
    """Return the source of a text: JSON, or a log."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return of_data(json.loads(text))
        except json.JSONDecodeError as error:
            if "out of memory" not in text:
                raise ValueError(f"it is no complete JSON: {error}; {WANTED}") from error
    return Source("log", text=text)


def of_data(data: Any) -> Source:
    """Return the source of a pickle's or a JSON document's data."""
    if _are_segments(data):  # torch.cuda.memory_snapshot() returns a list
        return Source("snapshot", {"segments": data, "device_traces": []})
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, and no snapshot; {WANTED}")
    if "fields" in data and "events" in data:
        return Source("trace", snapshot_of(_trace(data)))
    if "events" in data and "segments_at_end" in data:
        return Source("recording", data)
    if "device_traces" in data or "segments" in data:
        return Source("snapshot", data)
    if "schema" in data and "command" in data:
        raise ValueError(
            f"it is the result of memlab {data['command']}, which holds peaks but no allocations; "
            f"write a trace instead: json.dump(trace.to_dict(), file)"
        )
    raise ValueError(f"its keys are {', '.join(map(str, list(data)[:6]))}; {WANTED}")


def _trace(data: Mapping[str, Any]) -> Trace:
    try:
        return Trace.from_dict(data)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"its trace is damaged: {error!r}; write it again with to_dict") from error


def _are_segments(data: Any) -> bool:
    return (
        isinstance(data, list)
        and bool(data)
        and all(isinstance(each, dict) and {"address", "blocks"} <= each.keys() for each in data)
    )


def _decompressed(content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"it is damaged: {error}; give the complete file") from error


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
