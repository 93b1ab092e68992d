"""A learner's progress: one small file beside their copies of the lessons.

The file is written whole or not at all, under a lock that two notebooks can share. An unreadable
file is renamed, never deleted, and a new one is started.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from memlab.course.exercises import NOT_ATTEMPTED, OK
from memlab.internals.files import write_beside

FILE = "progress.json"
VERSION = 1
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
    try:
        return _read(folder / FILE)
    except _UNREADABLE:
        return update(folder, lambda progress: None)  # renames the file under the lock


def update(folder: Path, change: Callable[[Progress], None]) -> Progress:
    """Read, change and write the progress under a lock."""
    with FileLock(folder / f".{FILE}.lock"):
        progress = _read_or_begin(folder / FILE)
        change(progress)
        with write_beside(folder / FILE) as beside:
            beside.write_text(json.dumps(_to_plain(progress), indent=1) + "\n", encoding="utf-8")
    return progress


def note_check(progress: Progress, id_: str, status: str) -> None:
    """Count a check of an attempt. A solved exercise stays solved."""
    record = progress.exercise(id_)
    record.checks += status != NOT_ATTEMPTED
    if record.status != OK:
        record.status = status


def _read_or_begin(path: Path) -> Progress:
    try:
        return _read(path)
    except _UNREADABLE:
        aside = _put_aside(path)
        print(
            f"{FILE} could not be read; it was renamed to {aside.name}, and a new file was started"
        )
        return Progress()


def _read(path: Path) -> Progress:
    try:
        return _from_plain(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Progress()


def _to_plain(progress: Progress) -> dict[str, Any]:
    exercises = {id_: vars(record) for id_, record in progress.exercises.items()}
    return {"version": VERSION, "exercises": exercises, "guesses": progress.guesses}


def _from_plain(plain: dict[str, Any]) -> Progress:
    if plain["version"] != VERSION:
        raise ValueError(f"version {plain['version']}")
    exercises = {id_: _record(record) for id_, record in plain["exercises"].items()}
    guesses = {
        id_: {quantity: _numbers(numbers) for quantity, numbers in quantities.items()}
        for id_, quantities in plain["guesses"].items()
    }
    return Progress(exercises, guesses)


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
