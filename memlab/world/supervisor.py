"""Answer the system calls of a confined process, in its parent.

    writes outside     go to the folder that lies over the real files, as Python's own do there
                       (world/isolation.py), so that what C code or a program writes is no error
    other changes      Landlock refuses them, and here they are listed; it does not cover modes,
                       owners, times and attributes, nor truncating before its version 3
    connections        refused as without a network; Landlock alone would refuse only TCP
    signals            to other processes are refused

Everything that is refused or led elsewhere is written to a file, one attempt a line. The parent is
not confined: links are followed before it writes, but a process that makes one in that moment could
mislead it. This keeps mistakes from the machine, not an attacker.
"""

import errno
import fcntl
import os
import shutil
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from memlab.world import UNLISTED, landlock
from memlab.world.seccomp import CALLS, Call, calls_by_number

_RECEIVE, _SEND, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40182103  # ioctls
_CALL = struct.Struct("QIIiIQ6Q")  # seccomp_notif
_ANSWER, _DESCRIPTOR = struct.Struct("QqiI"), struct.Struct("QIIII")
_GO_ON, _AND_ANSWER = 1, 2
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_HERE = -100  # AT_FDCWD
_LONGEST_PATH = 4096
_LOCAL = (socket.AF_UNSPEC, socket.AF_UNIX, getattr(socket, "AF_NETLINK", 16))


class _EndError(Exception):
    """The call ends with this error; 0: as if it had been done."""

    def __init__(self, number: int) -> None:
        self.number = number


class _AnsweredError(Exception):
    """The process has its answer already."""


class Supervisor:
    """Answers until all confined processes have ended.

    listener  the descriptor that the filter gave
    process   the confined one; it started all others
    allowed   folders that may be written
    over      leads to the folder that lies over the files
    attempts  the list's file
    """

    def __init__(
        self, listener: int, process: int, allowed: Sequence[Path], over: Path, attempts: Path
    ) -> None:
        self._listener, self._process = listener, process
        self._allowed = [os.path.realpath(each) for each in allowed]
        self._over, self._attempts = over, attempts
        self._moves_between_folders = landlock.abi() >= landlock.MOVES
        self._scopes_signals = landlock.abi() >= landlock.SIGNALS
        self._calls = calls_by_number()
        self._answers: dict[str, Callable[..., None]] = {
            "open": self._open,
            "create": self._open,
            "open as described": self._open,
            "mkdir": self._make_folder,
            "make": self._make,
            "remove": self._remove,
            "rename": self._rename,
            "truncate": self._truncate,
            "change": self._change,
            "change of an open file": self._change_open,
            "connect": self._connect,
            "send": self._send,
            "send message": self._send_message,
            "signal": self._signal,
        }
        self._noted: set[str] = set()

    def answer_all(self) -> None:
        while True:
            received = bytearray(_CALL.size)
            try:
                fcntl.ioctl(self._listener, _RECEIVE, received)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):  # a signal ended the call
                    continue
                return
            self._answer(received)

    def _answer(self, received: bytearray) -> None:
        self._id, self._thread, _, number, _, _, *self._arguments = _CALL.unpack(received)
        error, flags = 0, _GO_ON
        try:
            call = self._calls[number]
            self._answers[call.kind](call)
        except _EndError as end:
            error, flags = -end.number, 0
        except _AnsweredError:
            return
        except Exception:  # it ended, or its path is bad: the kernel says so. It must not wait
            pass
        with suppress(OSError):
            fcntl.ioctl(self._listener, _SEND, _ANSWER.pack(self._id, 0, error, flags))

    # ------------------------------------------------------------------ arguments

    def _read(self, address: int, count: int) -> bytes:
        with open(f"/proc/{self._thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(count)

    def _text(self, address: int) -> str:
        """Read a path. It may end just before memory that does not exist."""
        text = b""
        while len(text) < _LONGEST_PATH and b"\0" not in text:
            page = 4096 - (address + len(text)) % 4096
            text += self._read(address + len(text), page)
        return os.fsdecode(text.partition(b"\0")[0])

    def _path(self, folder: int | None, place: int) -> str:
        """Return the absolute path of an argument, as the script writes it."""
        address = self._arguments[place]
        text = self._text(address) if address else ""
        descriptor = _HERE if folder is None else _signed(self._arguments[folder])
        if os.path.isabs(text):
            return os.path.normpath(text)
        start = "cwd" if descriptor == _HERE else f"fd/{descriptor}"
        return os.path.normpath(os.path.join(os.readlink(f"/proc/{self._thread}/{start}"), text))

    def _paths(self, call: Call) -> list[str]:
        return [self._path(*place) for place in call.paths]

    # ------------------------------------------------------------------ files

    def _is_allowed(self, path: str) -> bool:
        """Return whether the process may change the file: it lies in an allowed folder."""
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        return real.startswith(("/dev/", "/proc/")) or self._is_inside(real)

    def _above(self, path: str, links: int = 8) -> str:
        """Return where the file lies if the script wrote it.

        A folder that the script linked to a real one is followed, and then what lies over that
        one: this process is not confined, so no path that it writes may lead outside.
        """
        parent, name = os.path.split(os.path.join(self._over, path.lstrip("/")))
        parent = os.path.realpath(parent)
        if self._is_inside(parent):
            return os.path.join(parent, name)
        if not links:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return self._above(os.path.join(parent, name), links - 1)

    def _is_inside(self, real: str) -> bool:
        return any(real == each or real.startswith(each + os.sep) for each in self._allowed)

    def _may_be_made(self, path: str) -> bool:
        """Return whether the file's folder exists."""
        parent = os.path.dirname(path)
        return os.path.isdir(parent) or os.path.isdir(self._above(parent))

    def _note(self, kind: str, what: object) -> None:
        over = os.path.realpath(self._over)  # the script's path may lead there by a link
        line = f"{kind}\t{str(what).removeprefix(over)}\n"
        if line not in self._noted and not over.endswith(f"/{UNLISTED}"):
            self._noted.add(line)
            with open(self._attempts, "a", errors="surrogateescape") as file:
                file.write(line)

    def _open(self, call: Call) -> None:
        """Open a file that the script writes, or has written, where its files are."""
        flags, mode = self._flags(call)
        if not flags & _WRITING and not os.listdir(self._over):
            return  # most files are read before the first is written
        [path] = self._paths(call)
        above = self._above(path)
        if flags & _WRITING:
            if not self._is_led_elsewhere(path, above, flags):
                return
            self._note("write", path)
            os.makedirs(os.path.dirname(above), exist_ok=True)
            real, target = os.path.realpath(path), os.path.realpath(above)
            if self._is_inside(target):
                above = target
            else:  # a link that the script made becomes a copy
                os.unlink(above)
                real = target
            if os.path.isfile(real) and not os.path.lexists(above):
                shutil.copyfile(real, above)
            flags |= os.O_NOFOLLOW
        elif not os.path.isfile(above):
            return
        opened = os.open(above, flags, mode)
        try:
            added = _DESCRIPTOR.pack(self._id, _AND_ANSWER, opened, 0, flags & os.O_CLOEXEC)
            fcntl.ioctl(self._listener, _ADD_DESCRIPTOR, added)
        finally:
            os.close(opened)
        raise _AnsweredError

    def _is_led_elsewhere(self, path: str, above: str, flags: int) -> bool:
        """Return whether a file to write lies outside, and can be written above."""
        real = os.path.realpath(path)
        if self._is_allowed(path) and self._is_allowed(real):
            return False
        is_new = not os.path.lexists(real) and not os.path.lexists(above)
        if is_new != bool(flags & os.O_CREAT) and (is_new or flags & os.O_EXCL):
            return False  # the kernel says that it does not exist, or does
        return self._may_be_made(path) and (not os.path.lexists(real) or os.path.isfile(real))

    def _flags(self, call: Call) -> tuple[int, int]:
        """Return the flags and the mode of an open call."""
        after = call.paths[0][1] + 1
        flags, mode = self._arguments[after : after + 2]
        if call.kind == "create":
            flags, mode = os.O_CREAT | os.O_WRONLY | os.O_TRUNC, flags
        elif call.kind == "open as described":
            flags, mode = struct.unpack("QQ", self._read(flags, 16))
        return flags & 0xFFFFFFFF, mode & 0o7777

    def _make_folder(self, call: Call) -> None:
        [path] = self._paths(call)
        above = self._above(path)
        if self._is_allowed(path) or os.path.lexists(path) or not self._may_be_made(path):
            return
        self._note("write", path)
        if os.path.lexists(above):
            raise _EndError(errno.EEXIST)
        os.makedirs(above)
        raise _EndError(0)

    def _make(self, call: Call) -> None:
        [path] = self._paths(call)
        if not self._is_allowed(path) and not os.path.lexists(path):
            self._note("write", path)

    def _remove(self, call: Call) -> None:
        [path] = self._paths(call)
        if self._is_allowed(path):
            return
        above = self._above(path)
        if os.path.lexists(above):
            (os.rmdir if os.path.isdir(above) else os.unlink)(above)
            raise _EndError(0)
        if os.path.lexists(path):
            self._note("delete", path)

    def _rename(self, call: Call) -> None:
        source, target = self._paths(call)
        if self._is_allowed(source) and self._is_allowed(target) and self._moves_between_folders:
            return
        found = source if self._is_allowed(source) else self._above(source)
        if os.path.lexists(found) and self._may_be_made(target):
            if not self._is_allowed(target):
                self._note("write", target)
            above = target if self._is_allowed(target) else self._above(target)
            os.makedirs(os.path.dirname(above), exist_ok=True)
            os.replace(found, above)
            raise _EndError(0)
        if os.path.lexists(source):
            self._note("move", source)

    def _truncate(self, call: Call) -> None:
        [path] = self._paths(call)
        if not self._is_allowed(os.path.realpath(path)) and os.path.exists(path):
            self._note("write", path)
            raise _EndError(errno.EACCES)

    def _change(self, call: Call) -> None:
        """Refuse another mode, owner, time or attribute. Without a path, it is of an open file."""
        if not self._arguments[call.paths[0][1]]:
            self._change_open(call)
            return
        [path] = self._paths(call)
        if not self._is_allowed(os.path.realpath(path)):
            self._refuse_change(path)

    def _change_open(self, call: Call) -> None:
        descriptor = _signed(self._arguments[0])
        path = os.readlink(f"/proc/{self._thread}/fd/{descriptor}")
        if path.startswith("/") and not self._is_allowed(path):
            self._refuse_change(path)

    def _refuse_change(self, path: str) -> NoReturn:
        if not os.path.lexists(path):
            raise _EndError(errno.ENOENT)
        self._note("change", path)
        raise _EndError(errno.EPERM)

    # ------------------------------------------------------------------ other processes

    def _connect(self, call: Call) -> None:
        self._refuse_address(*self._arguments[1:3])

    def _send(self, call: Call) -> None:
        self._refuse_address(*self._arguments[4:6])

    def _send_message(self, call: Call) -> None:
        """Look at the address of the message; of several, at the first one's."""
        address, count = struct.unpack("QI", self._read(self._arguments[1], 12))
        if address:
            self._refuse_address(address, count)

    def _refuse_address(self, address: int, count: int) -> None:
        given = self._read(address, min(count, 28))
        [family] = struct.unpack_from("H", given)
        if family in _LOCAL:
            return
        host = {socket.AF_INET: given[4:8], socket.AF_INET6: given[8:24]}.get(family)
        self._note("connect", socket.inet_ntop(family, host) if host else f"family {family}")
        raise _EndError(errno.ECONNREFUSED)

    def _signal(self, call: Call) -> None:
        receiver = _signed(self._arguments[0])
        if not self._arguments[2 if call is CALLS["tgkill"] else 1]:
            return  # it asks whether the process exists
        # Landlock leaves out the others of a group
        is_own = self._scopes_signals if receiver <= 0 else self._started(receiver)
        if not is_own:
            self._note("signal", receiver)
            raise _EndError(errno.EPERM)

    def _started(self, process: int) -> bool:
        """Return whether the process or thread is the confined one, or one that it started."""
        while process > 1:
            if process == self._process:
                return True
            try:
                status = Path(f"/proc/{process}/status").read_text(errors="replace")
            except OSError:
                return True  # it does not exist, as the kernel will say
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            process = int(fields["PPid"] if fields["Tgid"] == str(process) else fields["Tgid"])
        return False


def _signed(value: int) -> int:
    """Return an argument as the C int that it is."""
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
