"""A learner's folder: their copies of the lessons, which nothing overwrites and nothing deletes.

A copy carries the hash of the lesson that it was made from in its own metadata, where it survives
renaming, moving and Jupyter's saving: a lesson that changes later is told from one that doesn't.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from memlab.course import days, notebooks, progress
from memlab.internals.files import write_beside

NEW, KEPT, OUTDATED, UNREADABLE = "new", "kept", "outdated", "unreadable"


@dataclass(frozen=True)
class Copy:
    """A learner's copy. `state` is NEW, KEPT, OUTDATED (kept, although the lesson has changed
    since), or UNREADABLE (kept, although it is no notebook)."""

    path: Path
    lesson: Path
    state: str


def folder(root: Path | None = None) -> Path:
    """Where a learner's copies are, in the repository or below another root."""
    return (root or days.ROOT) / "work"


def copy_of(number: int, root: Path | None = None) -> Path:
    """Where the learner's copy of a day is, or will be; ValueError if there is no such lesson."""
    days.require_day(number)
    return folder(root) / days.notebook(number).name


def start(number: int, root: Path | None = None) -> Copy:
    """Copy a day's lesson unless a copy is there, and begin to note progress.

    ValueError if there is no such lesson; OSError, and no copy, if the folder cannot be written.
    """
    path, lesson = copy_of(number, root), days.notebook(number)
    fresh = _fresh(lesson)
    _begin(path.parent)
    if _is_there(path):
        return Copy(path, lesson, _state(path, lesson))
    with write_beside(path) as beside:
        beside.write_text(fresh, encoding="utf-8")
    return Copy(path, lesson, NEW)


def reset(number: int, root: Path | None = None) -> Path | None:
    """Begin a day again with a fresh copy, its progress forgotten; gives where the learner's copy
    is now, below backups/, or None if there was none.

    ValueError and OSError as of `start`: the learner's copy is then where it was.
    """
    path, lesson = copy_of(number, root), days.notebook(number)
    fresh = _fresh(lesson)
    _begin(path.parent)
    backup = _moved_aside(path) if _is_there(path) else None
    try:
        with write_beside(path) as beside:
            beside.write_text(fresh, encoding="utf-8")
    except BaseException:
        if backup is not None and not _is_there(path):
            backup.rename(path)
        raise
    progress.update(path.parent, lambda p: p.forget(number))
    return backup


def next_backup(path: Path) -> Path:
    """Where `reset` would move a copy: the first number that is free."""
    number = 1
    while _is_there(aside := path.parent / "backups" / f"{path.stem}.{number}{path.suffix}"):
        number += 1
    return aside


def _begin(where: Path) -> None:
    """The folder, and in it the file by which memlab.course.gate knows it."""
    where.mkdir(parents=True, exist_ok=True)
    if not (where / progress.FILE).exists():
        progress.update(where, lambda p: None)


def _moved_aside(path: Path) -> Path:
    aside = next_backup(path)
    aside.parent.mkdir(exist_ok=True)
    return path.rename(aside)


def _is_there(path: Path) -> bool:
    """Also where it is a link that leads nowhere: that is the learner's, too."""
    return path.is_symlink() or path.exists()


# ------------------------------------------------------------------ the lesson of a copy


def _fresh(lesson: Path) -> str:
    """The text of a copy: the lesson, and the hash that tells which."""
    notebook = notebooks.read(lesson)
    notebook.setdefault("metadata", {})["memlab"] = {"lesson": _hash(lesson)}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _hash(path: Path) -> str:
    """Of what the cells say: line endings and the file's layout may differ."""
    return hashlib.sha256(json.dumps(notebooks.cells(path)).encode()).hexdigest()


def _state(path: Path, lesson: Path) -> str:
    try:
        notebook = notebooks.read(path)
    except (ValueError, OSError):
        return UNREADABLE
    try:
        copied = notebook["metadata"]["memlab"]["lesson"]
    except (KeyError, TypeError):  # made by hand, or saved by an editor that keeps no metadata
        return KEPT
    return KEPT if copied == _hash(lesson) else OUTDATED
