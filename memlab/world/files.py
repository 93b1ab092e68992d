"""Files that a script writes: in a temporary folder, which lies over the real files.

Python's functions are led there by what is here, C code and programs by the supervisor.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from memlab.internals.replacing import always
from memlab.world.callers import is_the_scripts_call

_FILE_URI = re.compile(
    r"file:(//(localhost)?(?=/))?(?P<path>(?!:memory:)[^?#]+)(?![^#]*mode=memory)"
)
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


class FileAttempts:
    """What a script tried to do to files.

    written      paths that it would have written
    deleted      real files that it would have deleted
    changed      real files whose mode, owner, time or attributes it would have changed
    missing      files that it looked for and did not find
    """

    def __init__(self) -> None:
        self.written: dict[str, None] = {}
        self.deleted: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self.missing: dict[str, None] = {}


def shown(what: str, start: str) -> str:
    """Return what an attempt was to, as a person would write it."""
    if what.lstrip("-").isdigit():
        return "its parent process" if int(what) == os.getppid() else f"process {what}"
    if not os.path.isabs(what):
        return what
    for folder, name in ((start, ""), (os.path.expanduser("~"), "~")):
        inside = os.path.relpath(what, folder) if what.startswith(folder + os.sep) else ""
        if inside:
            return os.path.join(name, inside)
    return what


class Files:
    """Files written since the start, in a folder that lies over the real ones."""

    def __init__(self, folder: Path, attempts: FileAttempts) -> None:
        self.over, self._temporary = folder / "files", folder / "tmp"
        self.over.mkdir()
        self._temporary.mkdir()
        self._own = str(folder)
        self._written, self._deleted = attempts.written, attempts.deleted
        self._changed, self._missing = attempts.changed, attempts.missing
        self._removed: set[str] = set()
        self._made_anew: set[str] = set()  # folders that were removed: nothing real shows in them
        self._current_real = os.getcwd
        self._start = self._current = os.getcwd()  # the script's current folder
        self._is_here = True  # else that folder is in the temporary one

    @property
    def environment(self) -> dict[str, str]:
        """Temporary files, and the cache of Hugging Face's data sets, which Arrow writes in C++."""
        temporary = str(self._temporary)
        return {"TMPDIR": temporary, "HF_DATASETS_CACHE": f"{temporary}/datasets"}

    # ------------------------------------------------------------------ paths

    def _is_redirected(self, path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # a file descriptor
        return not self._is_own(path) and not self._absolute(path).startswith(("/dev/", "/proc/"))

    def _is_own(self, path: Any) -> bool:
        return type(path) is not int and self._absolute(path).startswith(self._own)

    def _absolute(self, path: Any) -> str:
        return os.path.normpath(os.path.join(self._current, os.fsdecode(path)))

    def _above(self, absolute: str) -> str:
        """Return where the file lies if the script wrote it."""
        drive, rest = os.path.splitdrive(absolute)
        return os.path.join(self.over, drive.rstrip(":"), rest.lstrip("/\\"))

    def readable(self, path: Any) -> Any:
        """Return where the file is: above, or where the script expects it."""
        if not self._is_redirected(path):
            return path
        absolute = self._absolute(path)
        above = self._above(absolute)
        if self._is_gone(absolute) or self._real(os.lstat, above):
            return above
        return self._outside(path)

    def _is_gone(self, absolute: str) -> bool:
        """Return whether the script removed the file or a folder that it is in."""
        if not (self._removed or self._made_anew):
            return False  # the rule: libraries look for files by the ten thousand
        above = {str(each) for each in Path(absolute).parents}
        return bool({absolute, *above} & self._removed or above & self._made_anew)

    def _outside(self, path: Any) -> Any:
        """Return a path of the machine's own files that holds in any folder."""
        if self._is_here:
            return path
        return os.fsencode(self._absolute(path)) if type(path) is bytes else self._absolute(path)

    def writable(self, path: Any, *, keeps: bool = False) -> Any:
        """Return where to write the file, and note it. `keeps`: with its present content."""
        if not self._is_redirected(path):
            return path
        absolute = self._absolute(path)
        above = self._above(absolute)
        parent = os.path.dirname(absolute)
        if not self._exists(parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        self._note(self._written, absolute)
        self._removed.discard(absolute)
        self._call("makedirs", os.path.dirname(above), exist_ok=True)
        target = os.path.realpath(above)  # a link that the script made may lead outside
        if self._real(os.readlink, above) and not self._is_own(target):
            self._real(os.remove, above)
            absolute = target
        if keeps and not self._real(os.lstat, above) and self._exists(absolute):
            self._call("copyfile", absolute, above)
        return above

    def _note(self, attempts: dict[str, None], absolute: str) -> None:
        attempts.setdefault(shown(absolute, self._start))

    @contextmanager
    def _missing_noted(self, path: Any) -> Iterator[None]:
        """Note that the script looked for a file, if it is not there."""
        try:
            yield
        except FileNotFoundError:
            if self._is_redirected(path) and is_the_scripts_call():
                absolute = self._absolute(path)
                searched = os.environ.get("PATH", "").split(os.pathsep)  # by shutil.which
                if os.path.dirname(absolute) not in searched:
                    self._note(self._missing, absolute)
            raise

    def _remove_real(self, absolute: str) -> None:
        """Hide a file or folder from the script."""
        if self._real(os.lstat, absolute):
            self._note(self._deleted, absolute)
        self._removed.add(absolute)

    def _exists(self, path: str) -> bool:
        return bool(self._real(os.lstat, self.readable(path)))

    def _is_folder(self, path: Any) -> bool:
        """Return whether it is a folder; `tempfile` first tries to open an unnamed file in it."""
        if not self._is_redirected(path):
            return False
        found = self._real(os.stat, self.readable(path))
        return bool(found) and stat.S_ISDIR(found.st_mode)

    def _real(self, function: Callable[..., Any], path: str) -> Any:
        """Call the original of a replaced function, which follows no redirection."""
        try:
            return getattr(function, "__wrapped__", function)(path)
        except OSError:
            return None

    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Make folders or copy a file: the paths are in the temporary folder, or are only read."""
        (os.makedirs if name == "makedirs" else shutil.copyfile)(*args, **kwargs)

    # ------------------------------------------------------------------ functions

    def stand_ins(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "open": self._open,
            "os_open": self._os_open,
            "make": self._make,
            "remove": self._remove,
            "rename": self._rename,
            "rmtree": self._rmtree,
            "read": self._read,
            "list": self._list,
            "change": self._change,
            "link": self._link,
            "symlink": self._symlink,
            "chdir": self._change_folder,
            "getcwd": always(lambda: self._current),
            "save": self._save,
            "database": self._database,
        }

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wxa+") and not self._is_folder(file):
                if "x" in mode and self._is_redirected(file) and self._exists(self._absolute(file)):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
                file = self.writable(file, keeps="w" not in mode)
                return real(file, mode, *args, **kwargs)
            with self._missing_noted(file):
                return real(self.readable(file), mode, *args, **kwargs)

        return _as(real, opened)

    def _os_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & _UNNAMED == _UNNAMED != 0:  # tempfile then makes one with a name
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
            if flags & _WRITES:
                path = self.writable(path, keeps=not flags & os.O_TRUNC)
            else:
                path = self.readable(path)
            return real(path, flags, *args, **kwargs)

        return _as(real, opened)

    def _make(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_redirected(path):
                if self._exists(self._absolute(path)):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                if (absolute := self._absolute(path)) in self._removed:
                    self._made_anew.add(absolute)
                path = self.writable(path)
            real(path, *args, **kwargs)

        return _as(real, made)

    def _remove(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def removed(path: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("dir_fd") is not None or not self._is_redirected(path):
                real(path, *args, **kwargs)
                return
            absolute = self._absolute(path)
            if not self._exists(absolute):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if self._real(os.lstat, above := self._above(absolute)):
                real(above)
            self._remove_real(absolute)

        return _as(real, removed)

    def _rename(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def renamed(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_redirected(source):  # a temporary file that becomes a lasting one
                real(source, self.writable(target), *args, **kwargs)
                return
            absolute = self._absolute(source)
            if not self._exists(absolute):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            if os.path.isdir(source) and not self._real(os.lstat, self._above(absolute)):
                raise PermissionError(
                    errno.EPERM, "memlab run does not move folders; pass --allow-writes", source
                )
            real(self.writable(source, keeps=True), self.writable(target))
            self._remove_real(absolute)

        return _as(real, renamed)

    def _rmtree(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def removed(path: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_redirected(path):
                real(path, *args, **kwargs)
                return
            above = self._above(self._absolute(path))
            if self._real(os.lstat, above):
                real(above, *args, **kwargs)
            self._remove_real(self._absolute(path))

        return _as(real, removed)

    def _read(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:
                return real(path, *args, **kwargs)
            with self._missing_noted(path):
                return real(self.readable(path), *args, **kwargs)

        return _as(real, read)

    def _list(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """List a folder's own entries and the ones that the script wrote."""

        def entries(path: Any = ".") -> Any:
            if not self._is_redirected(path):
                return real(path)
            absolute = self._absolute(path)
            above = self._above(absolute)
            if not self._real(os.lstat, above):
                return real(self._outside(path))
            found = {_name(entry): entry for entry in real(above)}
            is_made = absolute in self._made_anew or self._is_gone(absolute)
            if self._real(os.lstat, absolute) and not is_made:
                for entry in real(self._outside(path)):
                    if os.path.join(absolute, os.fsdecode(_name(entry))) not in self._removed:
                        found.setdefault(_name(entry), entry)
            return list(found) if real.__name__ == "listdir" else _Entries(found.values())

        return _as(real, entries)

    def _change(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_redirected(path):
                real(path, *args, **kwargs)
            elif self._real(os.lstat, above := self._above(self._absolute(path))):
                real(above, *args, **kwargs)
            else:
                self._note(self._changed, self._absolute(path))

        return _as(real, changed)

    def _change_folder(self, real: Callable[[Any], None]) -> Callable[[Any], None]:
        """Go to a folder. One that the script made is elsewhere, and keeps its name."""

        def changed(path: Any) -> None:
            if type(path) is int:  # an open folder's descriptor
                real(path)
                self._current, self._is_here = self._current_real(), True
                return
            absolute = self._absolute(path)
            is_made = absolute in self._made_anew or self._is_gone(absolute)
            is_made = is_made or not self._real(os.stat, absolute)
            real(self._above(absolute) if is_made else absolute)
            self._current, self._is_here = absolute, not is_made

        return _as(real, changed)

    def _database(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Redirect sqlite3, which opens files in C."""

        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("uri") and (found := _FILE_URI.match(os.fsdecode(database))):
                path = self.writable(unquote(found["path"]), keeps=True)
                database = f"file:{quote(path)}{database[found.end() :]}"
            elif database not in ("", ":memory:") and not kwargs.get("uri"):
                database = self.writable(database, keeps=True)
            return real(database, *args, **kwargs)

        return _as(real, connect)

    def _save(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Redirect `torch.save`, which opens files in C++."""

        def save(saved: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            real(saved, self.writable(f), *args, **kwargs)

        return _as(real, save)

    def _link(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Copy, because a write to a link of a real file would change that file."""

        def linked(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_redirected(target) and self._exists(self._absolute(target)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            self._call("copyfile", source, self.writable(target))

        return _as(real, linked)

    def _symlink(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def linked(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            source = self.readable(source) if os.path.isabs(source) else source
            real(source, self.writable(target), *args, **kwargs)

        return _as(real, linked)


class _Entries:
    """The result of `os.scandir`: an iterator that can be closed."""

    def __init__(self, entries: Any) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> "_Entries":
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _name(entry: Any) -> Any:
    return getattr(entry, "name", entry)


def _as(real: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """Let the new function be recognized as the replacement of the real one."""
    new.__name__ = getattr(real, "__name__", new.__name__)
    new.__wrapped__ = real  # type: ignore[attr-defined]
    return new
