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
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from memlab.internals.replacing import always, caller_of
from memlab.world import confinement, programs
from memlab.world.callers import is_called_by, is_the_scripts_call
from memlab.world.confinement import PREFIX
from memlab.world.entering import enter
from memlab.world.files import FileAttempts, Files, shown

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
    f"memlab.world.data.{name}"
    for name in ("hub", "pretrained", "tiktoken_encodings", "vision_data")
)
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|(ba|z)?sh|uv")
_NOT_FOUND = 127  # a shell's exit status for a program that does not exist
_FORKING = ("multiprocessing.popen_fork", "multiprocess.popen_fork")  # they run a given function


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


class Isolation(FileAttempts):
    """What a script tried to change.

    connections  hosts that it would have connected to
    processes    programs that it would have started
    """

    def __init__(self) -> None:
        super().__init__()
        self.connections: Counter[str] = Counter()
        self.processes: Counter[str] = Counter()
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
            files = Files(Path(folder), self)
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
        of_the_system = [(kind, shown(what, self._start)) for kind, what in self._supervised()]
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
                os.path.basename(_program_of(command))
                for command in self._commands
                if _may_make(missing, command)
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
        if not is_called_by(_STAND_INS):
            self.connections[str(host)] += 1
        raise RefusedConnectionError(str(host))

    def _popen(self, real: Callable[..., None]) -> Callable[..., None]:
        def start(popen: Any, args: Any, *others: Any, **kwargs: Any) -> None:
            program = args if kwargs.get("shell") else kwargs.get("executable") or args
            is_one = isinstance(program, (str, bytes, os.PathLike))
            words = [*map(os.fsdecode, [program] if is_one else program)]
            command = words[0] if kwargs.get("shell") else words
            folder = os.fsdecode(kwargs.get("cwd") or "")
            needs_pid = is_called_by({"asyncio.unix_events"})
            done = None if needs_pid else programs.done_here(command, folder)
            if done is not None:
                popen._execute_child = partial(_end_at_once, popen, done)
            elif programs.refused_program(" ".join(words)) is not None:
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
        program = os.fsdecode(words[0]) if len(words) > 1 else _program_of(text)
        if is_the_scripts_call():
            self.processes[os.path.basename(program)] += 1
            self._commands[text] = None
        return program

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


def _program_of(command: str) -> str:
    """Return the program for which a command is not started, as the command has it."""
    return programs.refused_program(command) or command.split(" ")[0]


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
    return bool(_LAUNCHER.fullmatch(os.path.basename(_program_of(command)))) or any(
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
