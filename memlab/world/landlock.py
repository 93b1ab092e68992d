"""Landlock: the kernel lets this process, and all that it starts, write in some folders alone.

It needs no privileges, cannot be undone, and checks each file when it is opened, so files that are
open already stay usable. Reading is never restricted. What a kernel covers depends on its ABI:

    1   files: writing, making, removing (5.13)
    2   moves between folders (5.19); before, all are refused
    3   truncating (6.2)
    4   connecting by TCP (6.7)
    6   signals, and abstract sockets of other processes (6.12)

Never covered: modes, owners, times and attributes of files, and UDP.
"""

import ctypes
import os
import stat
import sys
from collections.abc import Iterable
from typing import Any

MOVES, CONNECTIONS, SIGNALS = 2, 4, 6  # the versions that cover them
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVILEGES, _SIGNAL_OF_PARENTS_DEATH = 38, 1  # of prctl
_WRITE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_IN_FOLDERS = sum(1 << bit for bit in range(4, 13))  # remove and make files of each kind
_CONNECT_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS = 1 << 1, 3


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scoped")]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # what `_pack_` implies; Python 3.14 wants it said
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def system_call(number: int, *arguments: Any) -> int:
    """Make a system call; raise OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def abi() -> int:
    """Return the version of the kernel's Landlock; 0: it has none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    try:
        return system_call(_CREATE, None, 0, _VERSION)
    except OSError:
        return 0


def without_new_privileges() -> None:
    """Let no program that this process starts gain rights, as sudo does."""
    _set(_NO_NEW_PRIVILEGES, 1)


def die_with_the_parent(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends."""
    _set(_SIGNAL_OF_PARENTS_DEATH, number)


def _set(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def restrict(paths: Iterable[str | int], *, tcp: bool = False) -> None:
    """Allow writing to these files and in these folders alone.

    paths  may have descriptors of open files
    tcp    whether connections are allowed

    The thread that asks, and all that it starts later, are confined for good.
    """
    version = abi()
    on_files = _WRITE | (_TRUNCATE if version >= 3 else 0)
    everything = on_files | _IN_FOLDERS | (_REFER if version >= MOVES else 0)
    rules = _Ruleset(
        everything,
        _CONNECT_TCP if version >= CONNECTIONS and not tcp else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if version >= SIGNALS else 0,
    )
    without_new_privileges()
    ruleset = system_call(_CREATE, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    try:
        for path in paths:
            _allow(ruleset, path, on_files, everything)
        system_call(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str | int, on_files: int, everything: int) -> None:
    """Add a rule for a file or folder, if it exists."""
    try:
        opened = path if isinstance(path, int) else os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        is_folder = stat.S_ISDIR(os.fstat(opened).st_mode)
        rule = _Beneath(everything if is_folder else on_files, opened)
        system_call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    except OSError:  # a pipe is no file, and needs no rule
        pass
    finally:
        if opened != path:
            os.close(opened)
