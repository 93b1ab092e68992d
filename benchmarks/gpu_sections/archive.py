"""Histories that our own runs recorded on GPUs, in one file for each device: fixtures for tests.

A line is one recording as JSON, in the form that `memlab.allocator.replay` reads, with its name,
what was run and the allocator's own figures. Every line is compressed by itself, so that one more
can be put behind the others and a run that is killed loses nothing; of two with one name, the
later counts.
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
    """All recordings, by name; of a file that ends within one, those before it, and of one that is
    no archive, none."""
    found: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return found
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                recording = json.loads(line)
                found[recording["name"]] = recording
    except (EOFError, gzip.BadGzipFile, zlib.error, json.JSONDecodeError):
        pass  # what was being written when the run was stopped
    return found


def add(path: Path, recording: Mapping[str, Any]) -> None:
    """Put a recording behind the others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_line(recording))


def tidy(path: Path) -> None:
    """Write the file anew, each recording once, in the order of their names."""
    if path.exists():
        recordings = read(path)
        with write_beside(path) as beside:
            beside.write_bytes(b"".join(_line(recordings[name]) for name in sorted(recordings)))


def _line(recording: Mapping[str, Any]) -> bytes:
    text = json.dumps(recording, separators=(",", ":"), ensure_ascii=False)
    return gzip.compress(text.encode() + b"\n", mtime=0)
