"""The system calls of a confined process that its parent answers (seccomp's user notification).

The kernel stops the process at such a call, and hands the parent its number and arguments. The
parent lets it go on, fails it, or answers for it (supervisor.py). The filter sees numbers alone, so
it cannot tell one path from another.
"""

import ctypes
import errno
import platform
import struct
from typing import NamedTuple

from memlab.world.landlock import system_call, without_new_privileges

_NEW_LISTENER, _SET_FILTER = 1 << 3, 1
_ALLOW, _NOTIFY, _FAIL = 0x7FFF0000, 0x7FC00000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in what the filter sees
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_X32 = 0x40000000  # numbers of another set of calls on x86-64


class Call(NamedTuple):
    """A system call.

    numbers    on x86-64 and aarch64; None: it does not exist there
    kind       what it does
    paths      the places of its paths among its arguments, each with its folder's place
    unless_0   the place of an argument without which it does nothing that matters: an address
    """

    numbers: tuple[int | None, int | None]
    kind: str
    paths: tuple[tuple[int | None, int], ...] = ()
    unless_0: int | None = None


_HERE, _AT = ((None, 0),), ((0, 1),)
CALLS = {
    "open": Call((2, None), "open", _HERE),
    "creat": Call((85, None), "create", _HERE),
    "openat": Call((257, 56), "open", _AT),
    "openat2": Call((437, 437), "open as described", _AT),
    "mkdir": Call((83, None), "mkdir", _HERE),
    "mkdirat": Call((258, 34), "mkdir", _AT),
    "mknod": Call((133, None), "make", _HERE),
    "mknodat": Call((259, 33), "make", _AT),
    "symlink": Call((88, None), "make", ((None, 1),)),
    "symlinkat": Call((266, 36), "make", ((1, 2),)),
    "link": Call((86, None), "make", ((None, 1),)),
    "linkat": Call((265, 37), "make", ((2, 3),)),
    "unlink": Call((87, None), "remove", _HERE),
    "unlinkat": Call((263, 35), "remove", _AT),
    "rmdir": Call((84, None), "remove", _HERE),
    "rename": Call((82, None), "rename", ((None, 0), (None, 1))),
    "renameat": Call((264, 38), "rename", ((0, 1), (2, 3))),
    "renameat2": Call((316, 276), "rename", ((0, 1), (2, 3))),
    "truncate": Call((76, 45), "truncate", _HERE),
    "chmod": Call((90, None), "change", _HERE),
    "fchmod": Call((91, 52), "change of an open file"),
    "fchmodat": Call((268, 53), "change", _AT),
    "fchmodat2": Call((452, 452), "change", _AT),
    "chown": Call((92, None), "change", _HERE),
    "fchown": Call((93, 55), "change of an open file"),
    "lchown": Call((94, None), "change", _HERE),
    "fchownat": Call((260, 54), "change", _AT),
    "utime": Call((132, None), "change", _HERE),
    "utimes": Call((235, None), "change", _HERE),
    "futimesat": Call((261, None), "change", _AT),
    "utimensat": Call((280, 88), "change", _AT),
    "setxattr": Call((188, 5), "change", _HERE),
    "lsetxattr": Call((189, 6), "change", _HERE),
    "fsetxattr": Call((190, 7), "change of an open file"),
    "removexattr": Call((197, 14), "change", _HERE),
    "lremovexattr": Call((198, 15), "change", _HERE),
    "fremovexattr": Call((199, 16), "change of an open file"),
    "connect": Call((42, 203), "connect"),
    "sendto": Call((44, 206), "send", unless_0=4),
    "sendmsg": Call((46, 211), "send message"),
    "sendmmsg": Call((307, 269), "send message"),
    "kill": Call((62, 129), "signal"),
    "tkill": Call((200, 130), "signal"),
    "tgkill": Call((234, 131), "signal"),
}
NETWORK = ("connect", "send", "send message")
_IO_URING = 425  # it would make these calls unseen; libraries do without
# Of each architecture: AUDIT_ARCH, the place in `Call.numbers`, the number of `seccomp`.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0, 317), "aarch64": (0xC00000B7, 1, 277)}
MACHINE = platform.machine()
is_known = MACHINE in _ARCHITECTURES


def calls_by_number() -> dict[int, Call]:
    """Return the calls of this architecture."""
    place = _ARCHITECTURES[MACHINE][1]
    found = ((call.numbers[place], call) for call in CALLS.values())
    return {number: call for number, call in found if number is not None}


def listen(*, network: bool) -> int:
    """Filter the calls of this thread, and of all that it starts; return the descriptor that the
    supervisor needs. Network: whether connections are filtered, too."""
    without_new_privileges()
    program = b"".join(_program(network=network))
    code = ctypes.create_string_buffer(program, len(program))
    count = len(program) // 8
    described = struct.pack("HxxxxxxQ", count, ctypes.addressof(code))
    return system_call(_ARCHITECTURES[MACHINE][2], _SET_FILTER, _NEW_LISTENER, described)


def _program(*, network: bool) -> list[bytes]:
    architecture = _ARCHITECTURES[MACHINE][0]
    failing = _operation(_RETURN, _FAIL | errno.ENOSYS)
    program = [
        _operation(_LOAD, _ARCHITECTURE),
        _operation(_EQUAL, architecture, 1, 0),
        failing,  # a program for another architecture
        _operation(_LOAD, _NUMBER),
        _operation(_AT_LEAST, _X32, 0, 1),
        failing,
        _operation(_EQUAL, _IO_URING, 0, 1),
        failing,
    ]
    for number, call in calls_by_number().items():
        if call.kind in NETWORK and not network:
            continue
        answer = [_operation(_RETURN, _NOTIFY)]
        if call.unless_0 is not None:
            answer = [
                _operation(_LOAD, _ARGUMENTS + 8 * call.unless_0),  # its lower half
                _operation(_EQUAL, 0, 1, 0),
                *answer,
                _operation(_RETURN, _ALLOW),
            ]
        program += [_operation(_EQUAL, number, 0, len(answer)), *answer]
    return [*program, _operation(_RETURN, _ALLOW)]


def _operation(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
