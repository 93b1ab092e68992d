"""A learner's progress: one small file beside their copies of the lessons.

The file is written whole or not at all, under a lock that two notebooks can share. Each record is
a line with its own checksum, so a damaged file loses only the damaged lines:

    {
     "version": 2,
     "records": [
      ["3120cd86", ["exercise", "1.1", {"status": "ok", "checks": 1, "hints": 0}]],
      ["a5b4afc2", ["guesses", "1.1", {"peak_gib": {"guessed": 2.0, "measured": 4.5}}]]
     ]
    }

A damaged file is renamed, never deleted, and a new one gets the records that can be read.
"""

import json
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from memlab.course.exercises import NOT_ATTEMPTED, OK
from memlab.internals.files import write_beside

FILE = "progress.json"
VERSION = 2  # files of version 1 are one JSON document without checksums
_RECORD = re.compile(r'  \["([0-9a-f]{8})", (.*)\],?')
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass
class ExerciseProgress:
    """One exercise: its status, the number of checks, and the number of hints shown."""

    status: str = ""
    checks: int = 0
    hints: int = 0


@dataclass
class Progress:
    """`guesses` maps id and quantity, such as "peak_gib", to the guessed number and, once revealed,
    the measured one, both in the quantity's own unit."""

    exercises: dict[str, ExerciseProgress] = field(default_factory=dict)
    guesses: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def exercise(self, id_: str) -> ExerciseProgress:
        """Return the record of an exercise, creating it if needed."""
        return self.exercises.setdefault(id_, ExerciseProgress())

    def forget(self, day: int) -> None:
        """Delete a day's records."""
        for kept in (self.exercises, self.guesses):
            for id_ in [id_ for id_ in kept if id_.startswith(f"{day}.")]:
                del kept[id_]


def read(folder: Path) -> Progress:
    """Return the progress in a folder; empty if there is no readable file."""
    found, is_whole = _read(folder / FILE)
    return found if is_whole else update(folder, lambda progress: None)  # renames it under the lock


def update(folder: Path, change: Callable[[Progress], None]) -> Progress:
    """Read, change and write the progress under a lock."""
    with FileLock(folder / f".{FILE}.lock"):
        progress, is_whole = _read(folder / FILE)
        if not is_whole:
            count = len(progress.exercises) + len(progress.guesses)
            kept = f"the {count} records that could be read" if count else "nothing"
            aside = _put_aside(folder / FILE)
            print(f"{FILE} was damaged; it was renamed to {aside.name}. A new file has {kept}")
        change(progress)
        with write_beside(folder / FILE) as beside:
            beside.write_text(_to_text(progress), encoding="utf-8")
    return progress


def note_check(progress: Progress, id_: str, status: str) -> None:
    """Count a check of an attempt. A solved exercise stays solved."""
    record = progress.exercise(id_)
    record.checks += status != NOT_ATTEMPTED
    if record.status != OK:
        record.status = status


def _read(path: Path) -> tuple[Progress, bool]:
    """Return the records that can be read, and whether these are all."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return Progress(), True
    try:
        return _from_first_version(json.loads(text)), True
    except _UNREADABLE:
        found = Progress()
    for line in text.splitlines():
        if (record := _RECORD.fullmatch(line)) and _checksum(record[2]) == record[1]:
            with suppress(*_UNREADABLE):
                _add(found, *json.loads(record[2]))
    return found, _to_text(found) == text


def _to_text(progress: Progress) -> str:
    records = [
        *(["exercise", id_, vars(record)] for id_, record in progress.exercises.items()),
        *(["guesses", id_, guesses] for id_, guesses in progress.guesses.items()),
    ]
    texts = map(json.dumps, records)
    lines = ",\n".join(f'  ["{_checksum(text)}", {text}]' for text in texts)
    return f'{{\n "version": {VERSION},\n "records": [\n{lines}\n ]\n}}\n'


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _add(progress: Progress, kind: str, id_: str, plain: dict[str, Any]) -> None:
    if kind == "exercise":
        progress.exercises[id_] = _record(plain)
    else:
        progress.guesses[id_] = {name: _numbers(numbers) for name, numbers in plain.items()}


def _from_first_version(plain: dict[str, Any]) -> Progress:
    if plain["version"] != 1:
        raise ValueError(f"version {plain['version']}")
    found = Progress()
    for id_, record in plain["exercises"].items():
        _add(found, "exercise", id_, record)
    for id_, guesses in plain["guesses"].items():
        _add(found, "guesses", id_, guesses)
    return found


def _record(plain: dict[str, Any]) -> ExerciseProgress:
    record = ExerciseProgress(**plain)
    if [type(value) for value in vars(record).values()] != [str, int, int]:
        raise TypeError(f"record {plain}")
    return record


def _numbers(plain: dict[str, float]) -> dict[str, float]:
    """Return the guessed number and, if there is one, the measured number."""
    measured = {"measured": float(plain["measured"])} if "measured" in plain else {}
    return {"guessed": float(plain["guessed"])} | measured


def _put_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.unreadable-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
