"""Keep a script from changing anything: its files go to a temporary folder.

    files         a file that the script writes is in the temporary folder, where the script also
                  finds it again; a file that it deletes stays. Libraries that open files in C, such
                  as HDF5, are not redirected
    connections   refused, as on a machine without a network; libraries fall back on their caches
    processes     refused, as if the program did not exist

What was redirected or refused is recorded, for one sentence each.
"""

import builtins
import errno
import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from memlab.internals.replacing import replaced

# No library asks the network, logs to a service, or writes to a shared cache of data sets.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "TOKENIZERS_PARALLELISM": "false",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


class RefusedConnectionError(ConnectionRefusedError):
    """A connection that `memlab run` refused."""


class RefusedProcessError(FileNotFoundError):
    """A process that `memlab run` did not start."""


class Isolation:
    """What a script tried to change.

    written      paths that it would have written
    connections  hosts that it would have connected to
    processes    programs that it would have started
    """

    def __init__(self) -> None:
        self.written: dict[str, None] = {}
        self.connections: Counter[str] = Counter()
        self.processes: Counter[str] = Counter()

    @contextmanager
    def active(self, *, allow_writes: bool = False) -> Iterator[None]:
        """Isolate the code inside `with`. With `allow_writes`, nothing is kept from it."""
        if allow_writes:
            yield
            return
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memlab-run-"))
            files = _Files(Path(folder), self.written)
            stack.enter_context(environment({**_ENVIRONMENT, **files.environment}))
            stack.enter_context(_without_bytecode())
            stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
            tempfile.tempdir = files.environment["TMPDIR"]
            stack.enter_context(replaced(_offline_hub()))
            # last, because what comes before uses files
            stack.enter_context(replaced({**files.replacements(), **self._refusals()}))
            yield

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each kind of attempt."""
        if self.written:
            first, *others = self.written
            more = f" and {len(others)} more" if others else ""
            yield f"{first}{more} would have been written; --allow-writes lets the script write"
        for what, names in (
            ("a connection to", self.connections),
            ("the program", self.processes),
        ):
            if names:
                first, *others = names
                more = f" and {len(others)} more" if others else ""
                yield f"the script asked for {what} {first}{more}, and was refused"

    def _refusals(self) -> dict[tuple[Any, str], Callable[[Any], Any]]:
        def connection(*args: Any, **kwargs: Any) -> Any:
            address = next((a for a in args if isinstance(a, (tuple, str, bytes))), "a host")
            host = address[0] if isinstance(address, tuple) else address
            self.connections[str(host)] += 1
            raise RefusedConnectionError(f"memlab run does not connect to {host}")

        def process(*args: Any, **kwargs: Any) -> Any:
            words = next((a for a in args if isinstance(a, (str, bytes, list, tuple))), "")
            words = kwargs.get("args", words)
            name = words if isinstance(words, (str, bytes)) else (words[0] if words else "")
            name = os.path.basename(str(name).split(" ")[0])
            self.processes[name] += 1
            raise RefusedProcessError(errno.ENOENT, "memlab run does not start programs", name)

        return {
            (socket.socket, "connect"): lambda real: connection,
            (socket.socket, "connect_ex"): lambda real: connection,
            (socket, "create_connection"): lambda real: connection,
            (socket, "getaddrinfo"): lambda real: connection,
            (subprocess.Popen, "__init__"): lambda real: process,
            (os, "system"): lambda real: process,
        }


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _offline_hub() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """Return what stops huggingface_hub from trying to connect, if it has read its environment.
    It would try again and again, for minutes."""
    constants = sys.modules.get("huggingface_hub.constants")
    return {} if constants is None else {(constants, "HF_HUB_OFFLINE"): lambda real: True}


@contextmanager
def _without_bytecode() -> Iterator[None]:
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


class _Files:
    """Files written since the start, in a folder that lies over the real ones."""

    def __init__(self, folder: Path, written: dict[str, None]) -> None:
        self._over, self._temporary = folder / "files", folder / "temporary"
        self._over.mkdir()
        self._temporary.mkdir()
        self._own = str(folder)
        self._written = written
        self._removed: set[str] = set()
        self._lexists, self._isdir = os.path.lexists, os.path.isdir

    @property
    def environment(self) -> dict[str, str]:
        """Temporary files, and the cache of Hugging Face's data sets, which Arrow writes in C++."""
        temporary = str(self._temporary)
        return {"TMPDIR": temporary, "HF_DATASETS_CACHE": f"{temporary}/datasets"}

    # ------------------------------------------------------------------ paths

    def _is_redirected(self, path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # a file descriptor
        absolute = self._absolute(path)
        return not absolute.startswith((self._own, "/dev/", "/proc/"))

    def _absolute(self, path: Any) -> str:
        return os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(path)))

    def _above(self, absolute: str) -> str:
        """Return where the file lies if the script wrote it."""
        drive, rest = os.path.splitdrive(absolute)
        return os.path.join(self._over, drive.rstrip(":"), rest.lstrip("/\\"))

    def readable(self, path: Any) -> Any:
        """Return where the file is: above, or where the script expects it."""
        if not self._is_redirected(path):
            return path
        absolute = self._absolute(path)
        above = self._above(absolute)
        is_gone = any(str(each) in self._removed for each in (absolute, *Path(absolute).parents))
        return above if is_gone or self._real(os.lstat, above) else path

    def writable(self, path: Any, *, keeps: bool = False) -> Any:
        """Return where to write the file, and note it. `keeps`: with its present content."""
        if not self._is_redirected(path):
            return path
        absolute = self._absolute(path)
        above = self._above(absolute)
        parent = os.path.dirname(absolute)
        if not self._exists(parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        self._call("makedirs", os.path.dirname(above), exist_ok=True)
        if keeps and not self._real(os.lstat, above) and self._exists(absolute):
            self._call("copyfile", absolute, above)
        self._written.setdefault(os.path.relpath(absolute))
        self._removed.discard(absolute)
        return above

    def _exists(self, path: str) -> bool:
        return bool(self._real(os.lstat, self.readable(path)))

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

    def replacements(self) -> dict[tuple[Any, str], Callable[[Any], Any]]:
        reading = ("stat", "lstat", "listdir", "scandir", "access", "readlink", "chdir")
        return {
            (builtins, "open"): self._open,
            (io, "open"): self._open,
            (os, "open"): self._os_open,
            (os, "mkdir"): self._mkdir,
            **{(os, name): self._remove for name in ("remove", "unlink", "rmdir")},
            **{(os, name): self._rename for name in ("rename", "replace")},
            (shutil, "rmtree"): self._rmtree,
            **{(os, name): self._read for name in reading if hasattr(os, name)},
            **{(os, name): self._list for name in ("listdir", "scandir")},
            **{(os, name): self._change for name in ("chmod", "utime", "truncate")},
            **{(os, name): self._link for name in ("link", "symlink")},
            (torch, "save"): self._save,
        }

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wxa+"):
                if "x" in mode and self._is_redirected(file) and self._exists(self._absolute(file)):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
                file = self.writable(file, keeps="w" not in mode)
            else:
                file = self.readable(file)
            return real(file, mode, *args, **kwargs)

        return _as(real, opened)

    def _os_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & _WRITES:
                path = self.writable(path, keeps=not flags & os.O_TRUNC)
            else:
                path = self.readable(path)
            return real(path, flags, *args, **kwargs)

        return _as(real, opened)

    def _mkdir(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_redirected(path):
                if self._exists(self._absolute(path)):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
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
            self._removed.add(absolute)

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
            self._removed.add(absolute)

        return _as(real, renamed)

    def _rmtree(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def removed(path: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_redirected(path):
                real(path, *args, **kwargs)
                return
            above = self._above(self._absolute(path))
            if self._real(os.lstat, above):
                real(above, *args, **kwargs)
            self._removed.add(self._absolute(path))

        return _as(real, removed)

    def _read(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None:
                path = self.readable(path)
            return real(path, *args, **kwargs)

        return _as(real, read)

    def _list(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """List a folder's own entries and those that the script wrote there."""

        def entries(path: Any = ".") -> Any:
            if not self._is_redirected(path):
                return real(path)
            absolute = self._absolute(path)
            above = self._above(absolute)
            if not self._real(os.lstat, above):
                return real(path)
            found = {_name(entry): entry for entry in real(above)}
            if self._real(os.lstat, absolute) and absolute not in self._removed:
                for entry in real(path):
                    if os.path.join(absolute, os.fsdecode(_name(entry))) not in self._removed:
                        found.setdefault(_name(entry), entry)
            return list(found) if real.__name__ == "listdir" else _Entries(found.values())

        return _as(real, entries)

    def _change(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_redirected(path):
                real(path, *args, **kwargs)
            elif self._real(os.lstat, above := self._above(self._absolute(path))):
                real(above, *args, **kwargs)  # nothing changes for a real file

        return _as(real, changed)

    def _save(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Redirect `torch.save`, which opens files in C++."""

        def save(saved: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            real(saved, self.writable(f), *args, **kwargs)

        return _as(real, save)

    def _link(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def linked(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
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
