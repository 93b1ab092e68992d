"""Run the rest of a command in a child process that confines itself.

The child is a fork, made before anything large is imported: it has the parent's terminal, standard
input, process group and arguments, so Ctrl-C, a debugger and redirected output work as before. The
parent waits, passes on the signals that it alone gets, and ends as the child did. It also answers
the child's system calls (supervisor.py), and removes its temporary folder, however it ended.
"""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from memlab.internals.files import temporary_folder
from memlab.world import UNLISTED, landlock, seccomp

PREFIX = "memlab-run-"  # of temporary folders
_PASSED_ON = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_BY_A_PROCESS = 0  # what si_code is at most then; a terminal signals the whole group
_GET_DESCRIPTOR = 438  # pidfd_getfd
# In the folder of the run: the list of attempts, and a link to what lies over the files.
_ATTEMPTS, _OVER = "attempts", "over"
_SHARED = ("/dev/shm", "/dev/pts", "/dev/mqueue")  # shared memory, new terminals, queues


class Confinement:
    """The confined child's side.

    folder                     for its temporary files
    machines_temporary_folder  which it may only read
    """

    def __init__(self, folder: Path, pipe: tuple[int, int], keeps: ExitStack) -> None:
        self.folder, self._pipe = folder, pipe
        self._keeps = keeps  # the parent removes the folder

    def begin(self, folder: Path, *, network: bool = False) -> None:
        """Confine this process, and all that it starts, to its temporary folder and another one.

        network  whether it may connect: ranks of a training do
        """
        global active
        folder.mkdir(parents=True, exist_ok=True)
        self.machines_temporary_folder = tempfile.gettempdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)  # torch's caches go there
        (self.folder / UNLISTED).mkdir()
        (self.folder / _OVER).symlink_to(UNLISTED)
        _make_devices_of_gpus()
        own = [str(self.folder), str(folder)]
        landlock.restrict([*own, *_SHARED, *_devices(), "/proc/self", 1, 2], tcp=network)
        with suppress(OSError):  # another supervisor has this process
            self._ask_for_supervision(seccomp.listen(network=not network), folder)
        active = self

    @contextmanager
    def laid_over(self, files: Path) -> Iterator[None]:
        """Lead the writes of C code and programs to this folder inside `with`, and list them."""
        (link := self.folder / _OVER).unlink()
        link.symlink_to(files)
        try:
            yield
        finally:
            link.unlink()
            link.symlink_to(UNLISTED)

    def attempts(self) -> list[tuple[str, str]]:
        """Return the kind and the object of what was refused or led elsewhere."""
        try:
            text = (self.folder / _ATTEMPTS).read_text(errors="surrogateescape")
        except OSError:
            return []
        return [(kind, what) for kind, _, what in (x.partition("\t") for x in text.splitlines())]

    def _ask_for_supervision(self, listener: int, folder: Path) -> None:
        """Tell the parent, and wait until it has the descriptor."""
        asked, answered = self._pipe
        os.write(asked, f"{listener} {os.path.abspath(folder)}\n".encode())
        os.read(answered, 1)
        os.close(listener)


active: Confinement | None = None  # this process's, once it is confined


def unconfined_reason() -> str | None:
    """Return why a command cannot run in a confined child here; None: it can."""
    if sys.platform != "linux":
        return f"{sys.platform} cannot confine it"
    if not landlock.abi():
        return "this kernel has no Landlock"
    if not seccomp.is_known:
        return f"no table of system calls for {seccomp.MACHINE}"
    is_own = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    if not is_own or threading.active_count() > 1:
        return "memlab runs inside another program"
    return None


def fork(out: str) -> Confinement:
    """Return in the child; the parent waits here, and exits as the child did.

    out  the folder that the child will write; if the child leaves it empty, it is removed
    """
    sys.stdout.flush()
    sys.stderr.flush()
    missing = [each for each in (Path(out), *Path(out).parents) if not os.path.lexists(each)]
    stack = ExitStack()
    folder = stack.enter_context(temporary_folder(PREFIX))
    to_parent, to_child = os.pipe(), os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        landlock.die_with_the_parent(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(to_parent[0])
        return Confinement(folder, (to_parent[1], to_child[0]), stack)
    os.close(to_parent[1])
    with stack:
        supervising = (child, folder, to_parent[0], to_child[1])
        threading.Thread(target=_supervise, args=supervising, daemon=True).start()
        status = _wait_for(child)
    for each in missing:
        with suppress(OSError):  # it was not made, or has files
            each.rmdir()
    _exit_as(status)


def _supervise(child: int, folder: Path, asked: int, answer: int) -> None:
    """Wait until the child asks, take the descriptor from it, and answer its calls."""
    with open(asked, encoding="utf-8", errors="surrogateescape") as pipe:
        listener, _, out = pipe.readline().rstrip("\n").partition(" ")
    if not listener:  # it ended before
        return
    from memlab.world.supervisor import Supervisor  # Windows lacks what it imports

    process = os.pidfd_open(child)
    try:
        taken = landlock.system_call(_GET_DESCRIPTOR, process, int(listener), 0)
    finally:
        os.close(process)
        os.write(answer, b".")
    allowed = (folder, Path(out))
    Supervisor(taken, child, allowed, folder / _OVER, folder / _ATTEMPTS).answer_all()


def _wait_for(child: int) -> int:
    """Pass signals on until the child has ended; return its status."""
    while True:
        got = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if got.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif got.si_code <= _BY_A_PROCESS:
            os.kill(child, got.si_signo)


def _exit_as(status: int) -> NoReturn:
    """End with an exit status, or by the signal whose negative number it is."""
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _make_devices_of_gpus() -> None:
    """Let NVIDIA's driver make its last device, if CUDA has not been used since the machine
    started: a program with root's rights does it, and none starts in a confined process."""
    if os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/nvidia-uvm"):
        code = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)


def _devices() -> Iterator[str]:
    """Yield the devices that are read and written by the character, such as terminals and GPUs."""
    for folder, folders, files in os.walk("/dev"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in _SHARED]
        for name in files:
            path = os.path.join(folder, name)
            with suppress(OSError):  # it has gone
                if stat.S_ISCHR(os.lstat(path).st_mode):
                    yield path
