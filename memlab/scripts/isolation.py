"""Keep a script from changing anything: its files go to a temporary folder.

    files         a file that the script writes is in the temporary folder, where the script also
                  finds it again; a file that it deletes stays. What C code and programs write is
                  led there by memlab/world where the kernel can confine; elsewhere only sqlite3 is
    connections   to other machines and ports are refused, as without a network; libraries fall
                  back on their caches
    programs      refused, as if they did not exist, except for those that only read and those that
                  memlab does itself (world/programs.py); so are `fork` and `exec`. What `memlab
                  run` does with Python's own processes is in processes.py

What was redirected or refused is recorded, with what the operating system refused.
"""

import errno
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from memlab.internals.libraries import is_librarys, is_pythons
from memlab.internals.replacing import always, caller_of
from memlab.world import confinement, programs
from memlab.world.confinement import PREFIX
from memlab.world.entering import enter

# No library asks the network, logs to a service, or writes to a shared cache of data sets.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "TOKENIZERS_PARALLELISM": "false",
    "GIT_OPTIONAL_LOCKS": "0",  # git status then writes nothing
}
_FILE_URI = re.compile(
    r"file:(//(localhost)?(?=/))?(?P<path>(?!:memory:)[^?#]+)(?![^#]*mode=memory)"
)
# What a script may try, in words for a sentence.
_ATTEMPTS = {
    "write": "writing",
    "delete": "deleting",
    "move": "moving",
    "change": "changing",
    "connect": "connecting to",
    "start": "starting",
    "signal": "signalling",
}
# Modules that try to load what is missing before they replace it.
_STAND_INS = frozenset(
    f"memlab.scripts.{name}" for name in ("hub", "pretrained", "tiktoken_encodings", "vision_data")
)
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|(ba|z)?sh|uv")
_OWN = str(Path(__file__).parents[1])
_NOT_FOUND = 127  # a shell's exit status for a program that does not exist
_FORKING = ("multiprocessing.popen_fork", "multiprocess.popen_fork")  # they run a given function
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


class RefusedConnectionError(ConnectionRefusedError):
    """A connection that `memlab run` refused."""

    remedy = "--allow-writes permits it"

    def __init__(self, host: str) -> None:
        super().__init__(f"memlab run does not connect to {host}")


class RefusedProcessError(FileNotFoundError):
    """A process that `memlab run` did not start."""

    def __init__(self, program: str) -> None:
        super().__init__(errno.ENOENT, "memlab run does not start programs", program)

    @property
    def remedy(self) -> str:
        name = os.path.basename(self.filename).removesuffix(".exe")
        if _LAUNCHER.fullmatch(name):
            return "if it trains, give its command to memlab run; --allow-writes permits it"
        if name != "fork" and shutil.which(self.filename) is None:
            return "this machine does not have it either"
        return "--allow-writes permits it"


class Isolation:
    """What a script tried to change.

    written      paths that it would have written
    deleted      real files that it would have deleted
    changed      real files whose mode, owner, time or attributes it would have changed
    connections  hosts that it would have connected to
    processes    programs that it would have started
    missing      files that it looked for and did not find
    """

    def __init__(self) -> None:
        self.written: dict[str, None] = {}
        self.deleted: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self.connections: Counter[str] = Counter()
        self.processes: Counter[str] = Counter()
        self.missing: dict[str, None] = {}
        self._commands: dict[str, None] = {}
        self._with_status: Counter[str] = Counter()  # programs of os.system
        self._start = os.getcwd()
        self._earlier = len(confinement.active.attempts()) if confinement.active else 0

    @contextmanager
    def active(self, *, allow_writes: bool = False) -> Iterator[None]:
        """Isolate the code inside `with`. With `allow_writes`, nothing is kept from it."""
        if allow_writes:
            yield
            return
        with ExitStack() as stack:
            confined = confinement.active
            # Short names, because the path of a socket may have 107 characters.
            inside = {"prefix": "", "dir": confined.folder} if confined else {"prefix": PREFIX}
            folder = stack.enter_context(tempfile.TemporaryDirectory(**inside))
            stack.callback(os.chdir, os.getcwd())
            files = _Files(Path(folder), self)
            if confined:
                stack.enter_context(confined.laid_over(files.over))
            stack.enter_context(environment({**_ENVIRONMENT, **_caches(), **files.environment}))
            stack.enter_context(_without_bytecode())
            stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
            tempfile.tempdir = files.environment["TMPDIR"]
            # last, because what comes before uses files
            stack.enter_context(enter({**files.stand_ins(), **self._refusals()}))
            yield

    def attempts(self) -> list[tuple[str, str]]:
        """Return all that was refused, or done in the temporary folder: what it is, and to what."""
        of_the_system = [(kind, _shown(what, self._start)) for kind, what in self._supervised()]
        own: dict[str, Iterable[str]] = {
            "write": self.written,
            "delete": self.deleted,
            "change": self.changed,
            "connect": self.connections,
            "start": self.processes,
        }
        found = [(kind, what) for kind, each in own.items() for what in each] + of_the_system
        return sorted(dict.fromkeys(found), key=lambda attempt: list(_ATTEMPTS).index(attempt[0]))

    def _supervised(self) -> list[tuple[str, str]]:
        """Return what the operating system kept from this run."""
        confined = confinement.active
        return confined.attempts()[self._earlier :] if confined else []

    def notes(self) -> Iterator[str]:
        """Yield a sentence, if there was an attempt."""
        kinds: dict[str, list[str]] = {}
        for kind, what in self.attempts():
            kinds.setdefault(kind, []).append(what)
        written = kinds.get("write", ())
        if missing := [each for each in self.missing if each not in written]:
            yield f"missing files that the script looked for: {_first_of(missing)}"
        if kinds:
            parts = (f"{_ATTEMPTS[kind]} {_first_of(each)}" for kind, each in kinds.items())
            yield f"memlab kept the script from {', '.join(parts)}; --allow-writes permits it"

    @contextmanager
    def refusals_noted(self) -> Iterator[None]:
        """Add to an exception the refusal that caused it, or may have."""
        try:
            yield
        except (Exception, SystemExit) as error:
            for note in self._explanations(error):
                error.add_note(note)
            raise

    def _explanations(self, error: BaseException) -> Iterator[str]:
        """Yield the refusal that raised the error, or those that may have led to it."""
        chain = list(_chain(error))
        for each in chain:
            if isinstance(each, (RefusedConnectionError, RefusedProcessError)):
                yield each.remedy if each is error else f"{each}; {each.remedy}"
                return
            if self._is_of_the_system(each):
                yield "memlab run refused it; --allow-writes permits it"
                return
        missing = [each.filename for each in chain if isinstance(each, FileNotFoundError)]
        if missing:
            makers = Counter(
                _program_of(command) for command in self._commands if _may_make(missing, command)
            )
            for refused in _refused(self.connections, makers):
                yield f"{refused}; if that makes the missing file, pass --allow-writes"
        elif isinstance(error, (AssertionError, SystemExit)):
            for refused in _refused(Counter(), self._with_status):
                yield f"{refused}; if its exit status matters, pass --allow-writes"

    def _is_of_the_system(self, error: BaseException) -> bool:
        """Return whether the operating system raised the error because it confines the script."""
        if not isinstance(error, (PermissionError, ConnectionRefusedError)):
            return False
        refused = {os.path.abspath(what) for _, what in self._supervised()}
        return bool(refused) and (
            not error.filename or os.path.abspath(os.fsdecode(error.filename)) in refused
        )

    def _refusals(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "popen": self._popen,
            "system": always(self._refuse_command),
            "start_first": always(partial(self._refuse_at, 0)),
            "start_second": always(partial(self._refuse_at, 1)),
            "fork": self._fork,
            "exit": self._exit,
            "connect": self._connect,
            "look_up": self._look_up,
            # what huggingface_hub has read of its environment before
            "yes": always(lambda: True),
            "offline": always(True),
        }

    def _connect(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Refuse other machines; a socket between processes of this one may connect."""

        def connect(connecting: socket.socket, *args: Any) -> Any:
            if connecting.family not in (socket.AF_INET, socket.AF_INET6):
                return real(connecting, *args)
            self._refuse_host(args[-1][0])

        return connect

    def _look_up(self, real: Any) -> Callable[..., NoReturn]:
        def look_up(address: Any, *args: Any, **kwargs: Any) -> NoReturn:
            self._refuse_host(address[0] if isinstance(address, tuple) else address)

        return look_up

    def _refuse_host(self, host: Any) -> NoReturn:
        if not _is_a_stand_ins_call():
            self.connections[str(host)] += 1
        raise RefusedConnectionError(str(host))

    def _popen(self, real: Callable[..., None]) -> Callable[..., None]:
        def start(popen: Any, args: Any, *others: Any, **kwargs: Any) -> None:
            program = args if kwargs.get("shell") else kwargs.get("executable") or args
            is_one = isinstance(program, (str, bytes, os.PathLike))
            words = [*map(os.fsdecode, [program] if is_one else program)]
            command = words[0] if kwargs.get("shell") else words
            folder = os.fsdecode(kwargs.get("cwd") or "")
            needs_pid = _is_called_by({"asyncio.unix_events"})
            done = None if needs_pid else programs.done_here(command, folder)
            if done is not None:
                popen._execute_child = partial(_end_at_once, popen, done)
            elif not programs.only_reads(" ".join(words)):
                self._refuse_program(program)
            real(popen, args, *others, **kwargs)

        return start

    def _refuse_at(self, place: int, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse_program(args[place])

    def _refuse_program(self, command: Any) -> NoReturn:
        raise RefusedProcessError(self._note_program(command))

    def _refuse_command(self, command: Any) -> int:
        if (done := programs.done_here(os.fsdecode(command))) is not None:
            _print_of(done)
            return done.status << 8  # where a wait has it
        self._with_status[os.path.basename(self._note_program(command))] += 1
        return _NOT_FOUND

    def _note_program(self, command: Any) -> str:
        """Record a command if the script asked for it, and return its first word."""
        words = command if isinstance(command, (list, tuple)) else [command]
        text = " ".join(map(os.fsdecode, words))
        if _is_the_scripts_call():
            self.processes[_program_of(text)] += 1
            self._commands[text] = None
        return text.split(" ")[0]

    def _fork(self, real: Callable[[], Any]) -> Callable[[], Any]:
        """Let a library fork to call a function; a script would run on twice."""

        def fork() -> Any:
            caller = caller_of(sys._getframe())
            if caller is not None and caller.f_globals.get("__name__") in _FORKING:
                return real()
            self._refuse_program("fork")

        return fork

    def _exit(self, real: Callable[[int], None]) -> Callable[[int], None]:
        """End the script and not memlab. A forked process ends as it wants to."""
        own = os.getpid()

        def exit_at_once(status: int) -> None:
            if os.getpid() != own:
                real(status)
            raise SystemExit(status)

        return exit_at_once


def _shown(what: str, start: str) -> str:
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


def _program_of(command: str) -> str:
    return os.path.basename(command.split(" ")[0])


def _refused(connections: Counter[str], processes: Counter[str]) -> Iterator[str]:
    for what, names in (("a connection to", connections), ("the program", processes)):
        if names:
            yield f"the script asked for {what} {_first_of(names)}, and was refused"


def _first_of(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, what it came of, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _may_make(files: list[Any], command: str) -> bool:
    """Return whether a command names one of the files or its folders, or runs other commands."""
    parts = {part for file in files if file for part in Path(os.fsdecode(file)).parts}
    return bool(_LAUNCHER.fullmatch(_program_of(command))) or any(
        part in command for part in parts if len(part) > 1
    )


def _end_at_once(popen: Any, done: programs.Done, *arguments: Any) -> None:
    """Print what the program would, and end; replaces Popen's `_execute_child`, once."""
    pipes = arguments[10:16]  # p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
    _print_of(done, pipes[3], pipes[5])
    popen._close_pipe_fds(*pipes)
    popen.returncode = done.status
    del popen._execute_child


def _print_of(done: programs.Done, output: int = -1, errors: int = -1) -> None:
    to = ((done.output, output, sys.stdout), (done.error, errors, sys.stderr))
    for text, pipe, stream in to:
        if pipe == -1:  # not redirected
            print(text, end="", file=stream)
        else:
            os.write(pipe, text.encode())


def _is_the_scripts_call() -> bool:
    """Return whether the script itself made the refused call, and no library of its
    own accord, such as one that looks for nvidia-smi."""
    callers = list(_frames(sys._getframe(1)))
    if any(frame.f_code is _is_the_scripts_call.__code__ for frame in callers):
        return False  # this function looks for files, too
    for frame in callers:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN) and not is_pythons(file):
            return not is_librarys(file)
    return False


def _is_a_stand_ins_call() -> bool:
    """Return whether memlab will replace what the refused call wants, such as weights."""
    return _is_called_by(_STAND_INS)


def _is_called_by(modules: Set[str]) -> bool:
    return any(frame.f_globals.get("__name__") in modules for frame in _frames(sys._getframe(1)))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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


def _caches() -> dict[str, str]:
    """Return the environment variable that lets tiktoken find its cache. The default is a folder
    in the temporary folder, which is another one for the script."""
    if "TIKTOKEN_CACHE_DIR" in os.environ or "DATA_GYM_CACHE_DIR" in os.environ:
        return {}
    confined = confinement.active
    temporary = confined.machines_temporary_folder if confined else tempfile.gettempdir()
    return {"TIKTOKEN_CACHE_DIR": os.path.join(temporary, "data-gym-cache")}


@contextmanager
def _without_bytecode() -> Iterator[None]:
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


class _Files:
    """Files written since the start, in a folder that lies over the real ones."""

    def __init__(self, folder: Path, attempts: Isolation) -> None:
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
        attempts.setdefault(_shown(absolute, self._start))

    @contextmanager
    def _missing_noted(self, path: Any) -> Iterator[None]:
        """Note that the script looked for a file, if it is not there."""
        try:
            yield
        except FileNotFoundError:
            if self._is_redirected(path) and _is_the_scripts_call():
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
