"""Write files atomically, and remove unfinished files of killed processes.

A file is written under a temporary name in the same folder, synced to disk (fsync) and renamed;
then the folder is synced. After a crash or a power failure either the old file or the complete new
file exists. The cost is two disk syncs.

The unfinished file is locked while it is written. The operating system releases the lock of a
killed process, so a later writer can tell an orphan from a file in progress and removes it.
Temporary folders use the same lock. (Windows cannot rename a locked file, so unfinished files are
not locked there and orphans stay.)
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from filelock import FileLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk without room
_COUNTER = count()
_UNFINISHED = re.compile(r"\..+\.\d+-\d+(\.\w+)?")
TEMPORARY_LOCK = ".temporary.lock"  # held while a temporary folder is in use


@contextmanager
def write_beside(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block ends.

    If the block raises, Ctrl-C included, `path` is unchanged and the temporary file is removed. The
    folder must exist. If `path` is a symbolic link, its target is replaced and the link stays.
    `durable=False` skips the disk syncs. A nested block on a yielded path writes to it directly;
    the outer block keeps the lock and does the rename.
    """
    path = Path(path).resolve()
    if _UNFINISHED.fullmatch(path.name):
        yield path
        return
    remove_orphans(path.parent)
    beside = path.with_name(f".{path.stem}.{os.getpid()}-{next(_COUNTER)}{path.suffix}")
    with _locked(beside):
        try:
            yield beside
            if durable:
                sync(beside)
            beside.replace(path)
            if durable:
                # A finished rename can be lost without this. torch's distributed checkpoint syncs
                # neither the folder nor the rename
                # (test_the_data_is_synced_before_the_rename_and_the_folder_after).
                sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)


def remove_orphans(folder: Path) -> None:
    """Remove unfinished files that killed processes left in a folder."""
    if fcntl is None:
        return
    for path in folder.glob(".*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            with suppress(OSError), _locked(path):  # OSError: locked, so its process is alive
                path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; raise BlockingIOError if another process holds it."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # Not a process id: ids are reused, and on a shared disk they may belong to another machine
        # (test_the_next_write_removes_files_of_killed_processes).
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder in the system's temporary folder, and remove it when the block ends.

    Also remove folders with the same prefix whose process was killed.
    """
    parent = Path(tempfile.gettempdir())
    remove_orphaned_folders(parent, f"{prefix}*")
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with FileLock(folder / TEMPORARY_LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_orphaned_folders(parent: Path, pattern: str) -> None:
    """Remove temporary folders whose process was killed, so that their TEMPORARY_LOCK is free.

    Folders without that file belong to other programs and stay.
    """
    for folder in parent.glob(pattern):
        if (folder / TEMPORARY_LOCK).is_file():
            with suppress(OSError), FileLock(folder / TEMPORARY_LOCK, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Force a file's contents, or a folder's entries, to disk (fsync)."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
