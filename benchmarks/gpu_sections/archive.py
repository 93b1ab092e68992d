"""Allocator histories recorded on GPUs, one file per device, used as test fixtures.

Each line is one recording as JSON, in the format of `memlab.allocator.replay`, with its name, its
configuration and the allocator's statistics. Lines are compressed separately, so a recording can be
appended and a killed run loses nothing. If a name occurs twice, the later recording counts.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memlab.internals.files import write_beside

SUFFIX = ".jsonl.gz"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return all recordings by name.

    Ignores an incomplete recording at the end. Returns an empty dict if the file is no archive.
    """
    found: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return found
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                recording = json.loads(line)
                found[recording["name"]] = recording
    except (EOFError, gzip.BadGzipFile, zlib.error, json.JSONDecodeError):
        pass  # the run was stopped while writing
    return found


def add(path: Path, recording: Mapping[str, Any]) -> None:
    """Append a recording."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_line(recording))


def tidy(path: Path) -> None:
    """Rewrite the file with each recording once, sorted by name."""
    if path.exists():
        recordings = read(path)
        with write_beside(path) as beside:
            beside.write_bytes(b"".join(_line(recordings[name]) for name in sorted(recordings)))


def _line(recording: Mapping[str, Any]) -> bytes:
    text = json.dumps(recording, separators=(",", ":"), ensure_ascii=False)
    return gzip.compress(text.encode() + b"\n", mtime=0)
