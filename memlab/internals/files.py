"""Files that are whole or not there, and what killed processes left of them.

A file is written beside its final name, forced to the disk (fsync) and renamed, and then the folder
is forced to the disk: after a crash or a power failure the old file is there, or the new one,
whole. It costs two waits for the disk.

While it is written the unfinished file is locked. The system releases the lock of a killed process,
so whoever writes into the same folder later can tell an orphan from a file that is being written,
and removes it. Temporary folders work the same way. (On Windows unfinished files are not locked,
because a locked file cannot be renamed there, and orphans stay.)
"""

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

_NUMBERS = count()
_UNFINISHED = re.compile(r"\..+\.\d+-\d+(\.\w+)?")
TEMPORARY_LOCK = ".temporary.lock"  # held for as long as a temporary folder is in use


@contextmanager
def write_beside(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """Where to write what will be `path` when the block ends: `with write_beside(path) as beside:`.

    If the block raises, Ctrl-C included, `path` is as it was and nothing lies beside it. The folder
    must be there. A link stays a link: what it leads to is replaced. Without `durable` nothing is
    forced to the disk. Inside another such block, what that gave is written in place: it keeps its
    lock, and is whole or not there as the outer block is.
    """
    path = Path(path).resolve()
    if _UNFINISHED.fullmatch(path.name):
        yield path
        return
    remove_orphans(path.parent)
    beside = path.with_name(f".{path.stem}.{os.getpid()}-{next(_NUMBERS)}{path.suffix}")
    with _locked(beside):
        try:
            yield beside
            if durable:
                sync(beside)
            beside.replace(path)
            if durable:
                sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)


def remove_orphans(folder: Path) -> None:
    """Remove the unfinished files that killed processes left in a folder."""
    if fcntl is None:
        return
    for path in folder.glob(".*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            with suppress(OSError), _locked(path):  # OSError: locked, so its process is alive
                path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """BlockingIOError if another holds the lock."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder in the system's temporary one, removed when the block ends; so are those of the same
    prefix whose process was killed."""
    parent = Path(tempfile.gettempdir())
    remove_orphaned_folders(parent, f"{prefix}*")
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with FileLock(folder / TEMPORARY_LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_orphaned_folders(parent: Path, pattern: str) -> None:
    """Remove the temporary folders whose process was killed: nobody holds their TEMPORARY_LOCK.

    A folder without that file is somebody else's.
    """
    for folder in parent.glob(pattern):
        if (folder / TEMPORARY_LOCK).is_file():
            with suppress(OSError), FileLock(folder / TEMPORARY_LOCK, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Force a file, or a folder's names, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
