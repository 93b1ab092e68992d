"""A learner's folder: their copies of the lessons, which memlab never overwrites or deletes.

A copy stores the hash of its lesson in its metadata, which survives renaming, moving and saving in
Jupyter. So a lesson that has changed since can be detected.
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
    since), or UNREADABLE (kept, although it is not a notebook)."""

    path: Path
    lesson: Path
    state: str


def folder(root: Path | None = None) -> Path:
    """Return the folder of the learner's copies: work/ in the clone, or below another root.

    Without a clone it is the current folder if it is such a folder, else work/ below it.
    """
    here = Path.cwd()
    if root is None and not days.IS_CLONE and (here / progress.FILE).exists():
        return here
    return (root or (days.ROOT if days.IS_CLONE else here)) / "work"


def copy_of(number: int, root: Path | None = None) -> Path:
    """Return the path of the learner's copy of a day; raise ValueError if there is no lesson."""
    days.require_day(number)
    return folder(root) / days.notebook(number).name


def start(number: int, root: Path | None = None) -> Copy:
    """Copy a day's lesson unless there is a copy, and start recording progress.

    Raises ValueError if there is no such lesson, and OSError if the folder is not writable.
    """
    path, lesson = copy_of(number, root), days.notebook(number)
    fresh = _fresh(lesson)
    _create(path.parent)
    if _exists(path):
        return Copy(path, lesson, _state(path, lesson))
    with write_beside(path) as beside:
        beside.write_text(fresh, encoding="utf-8")
    return Copy(path, lesson, NEW)


def reset(number: int, root: Path | None = None) -> Path | None:
    """Start a day over with a fresh copy, and delete its progress.

    Return the backup's path below backups/, or None if there was no copy. Raises ValueError and
    OSError as `start` does, and then leaves the copy where it was.
    """
    path, lesson = copy_of(number, root), days.notebook(number)
    fresh = _fresh(lesson)
    _create(path.parent)
    backup = _moved_aside(path) if _exists(path) else None
    try:
        with write_beside(path) as beside:
            beside.write_text(fresh, encoding="utf-8")
    except BaseException:
        if backup is not None and not _exists(path):
            backup.rename(path)
        raise
    progress.update(path.parent, lambda p: p.forget(number))
    return backup


def next_backup(path: Path) -> Path:
    """Return the path that `reset` would move a copy to: the first free number."""
    number = 1
    while _exists(aside := path.parent / "backups" / f"{path.stem}.{number}{path.suffix}"):
        number += 1
    return aside


def _create(where: Path) -> None:
    """Create the folder and the progress file, which memlab.course.gate recognizes it by."""
    where.mkdir(parents=True, exist_ok=True)
    if not (where / progress.FILE).exists():
        progress.update(where, lambda p: None)


def _moved_aside(path: Path) -> Path:
    aside = next_backup(path)
    aside.parent.mkdir(exist_ok=True)
    return path.rename(aside)


def _exists(path: Path) -> bool:
    """Return True also for a dangling link, which belongs to the learner, too."""
    return path.is_symlink() or path.exists()


# ------------------------------------------------------------------ recognizing a copy's lesson


def _fresh(lesson: Path) -> str:
    """Return the text of a new copy: the lesson with its hash in the metadata."""
    notebook = notebooks.read(lesson)
    notebook.setdefault("metadata", {})["memlab"] = {"lesson": _hash(lesson)}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _hash(path: Path) -> str:
    """Hash the cells only: line endings and the file's layout may differ."""
    return hashlib.sha256(json.dumps(notebooks.cells(path)).encode()).hexdigest()


def _state(path: Path, lesson: Path) -> str:
    try:
        notebook = notebooks.read(path)
    except (ValueError, OSError):
        return UNREADABLE
    try:
        copied = notebook["metadata"]["memlab"]["lesson"]
    except (KeyError, TypeError):  # made by hand, or saved by an editor that drops metadata
        return KEPT
    return KEPT if copied == _hash(lesson) else OUTDATED
