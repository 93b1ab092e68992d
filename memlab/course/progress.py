"""What a learner has done: one small file beside their copies of the lessons.

It is written whole or not at all, under a lock that two notebooks can share. A file that cannot be
read is put aside, never thrown away, and a new one begun.
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
class Record:
    """One exercise: how it stands, how often it was checked, how many hints were shown."""

    status: str = ""
    checks: int = 0
    hints: int = 0


@dataclass
class Progress:
    """`guesses` holds, for each id and quantity such as "peak_gib", what was guessed and, once it
    was revealed, what was measured, both in the quantity's own unit."""

    exercises: dict[str, Record] = field(default_factory=dict)
    guesses: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def exercise(self, id_: str) -> Record:
        """The record of an exercise, begun if need be."""
        return self.exercises.setdefault(id_, Record())

    def forget(self, day: int) -> None:
        """Begin a day again."""
        for kept in (self.exercises, self.guesses):
            for id_ in [id_ for id_ in kept if id_.startswith(f"{day}.")]:
                del kept[id_]


def read(folder: Path) -> Progress:
    """The progress in a folder; nothing done where no file is, or none that can be read."""
    try:
        return _read(folder / FILE)
    except _UNREADABLE:
        return update(folder, lambda progress: None)  # nobody else puts it aside meanwhile


def update(folder: Path, change: Callable[[Progress], None]) -> Progress:
    """Read, change, write; nobody else writes in between."""
    with FileLock(folder / f".{FILE}.lock"):
        progress = _read_or_begin(folder / FILE)
        change(progress)
        with write_beside(folder / FILE) as beside:
            beside.write_text(json.dumps(_to_plain(progress), indent=1) + "\n", encoding="utf-8")
    return progress


def note_check(progress: Progress, id_: str, status: str) -> None:
    """Count a check of an attempt; an exercise that was right once stays so."""
    record = progress.exercise(id_)
    record.checks += status != NOT_ATTEMPTED
    if record.status != OK:
        record.status = status


def _read_or_begin(path: Path) -> Progress:
    try:
        return _read(path)
    except _UNREADABLE:
        aside = _put_aside(path)
        print(f"{FILE} could not be read; it is now {aside.name}, and a new one begins")
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


def _record(plain: dict[str, Any]) -> Record:
    record = Record(**plain)
    if [type(value) for value in vars(record).values()] != [str, int, int]:
        raise TypeError(f"record {plain}")
    return record


def _numbers(plain: dict[str, float]) -> dict[str, float]:
    """What was guessed and, it may be, measured."""
    measured = {"measured": float(plain["measured"])} if "measured" in plain else {}
    return {"guessed": float(plain["guessed"])} | measured


def _put_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.unreadable-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
