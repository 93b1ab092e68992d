"""What `memlab run` replaces in Python so that a script goes on: files, processes, the network.

Where the kernel confines the script, these let it find its own files and say why a connection or a
program is missing; elsewhere they also protect the machine.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A replacement.

    owner     the module or class
    names     of its attributes
    stand_in  the name of what replaces them
    why       what would happen otherwise
    seen      the version of the owner's library that it was seen in
    """

    owner: str
    names: tuple[str, ...]
    stand_in: str
    why: str
    seen: str = "Python 3.11"


_READING = ("stat", "lstat", "access", "readlink", "listxattr", "getxattr")
_CHANGING = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr")
_PROGRAM_FIRST = (
    *("execl", "execle", "execlp", "execlpe", "execv", "execve", "execvp", "execvpe"),
    *("posix_spawn", "posix_spawnp", "startfile"),
)
_PROGRAM_SECOND = (
    *("spawnl", "spawnle", "spawnlp", "spawnlpe"),
    *("spawnv", "spawnve", "spawnvp", "spawnvpe"),
)
TABLE: dict[str, tuple[Row, ...]] = {
    "files": (
        Row("builtins", ("open",), "open", "it would write a real file, or miss the script's own"),
        Row("io", ("open",), "open", "pathlib and zipfile open files with it"),
        Row("os", ("open",), "os_open", "tempfile and file locks open files with it"),
        Row("os", ("mkdir", "mkfifo", "mknod"), "make", "they would make a real folder or file"),
        Row("os", ("remove", "unlink", "rmdir"), "remove", "they would delete a real file"),
        Row("os", ("rename", "replace"), "rename", "they would move a real file"),
        Row("shutil", ("rmtree",), "rmtree", "it deletes by open folders, which have no paths"),
        Row("os", _READING, "read", "they would not see the script's own files"),
        Row("os", ("listdir", "scandir"), "list", "they would not list the script's own files"),
        Row("os", _CHANGING, "change", "they would change a real file"),
        Row("os", ("link",), "link", "a write to the link would change the real file"),
        Row("os", ("symlink",), "symlink", "it would make a real link"),
        Row("os", ("chdir",), "chdir", "a folder that the script made is elsewhere"),
        Row("os", ("getcwd",), "getcwd", "it would return that other place"),
        Row("torch", ("save",), "save", "it opens files in C++", "torch 2.13"),
        Row("sqlite3", ("connect",), "database", "it opens files in C"),
    ),
    "processes": (
        Row("subprocess.Popen", ("__init__",), "popen", "it would start a program"),
        Row("os", ("system",), "system", "it would start a shell"),
        Row("os", _PROGRAM_FIRST, "start_first", "they would start a program"),
        Row("os", _PROGRAM_SECOND, "start_second", "they would start a program"),
        Row("os", ("fork", "forkpty"), "fork", "the script would run on twice"),
        Row("os", ("_exit",), "exit", "it would end memlab without a result"),
    ),
    "network": (
        Row("socket.socket", ("connect", "connect_ex", "sendto"), "connect", "libraries wait"),
        Row("socket", ("create_connection", "getaddrinfo"), "look_up", "libraries wait for names"),
    ),
}


def missing(row: Row) -> Iterator[str]:
    """Yield the names that this Python or this system lacks."""
    try:
        owner = pkgutil.resolve_name(row.owner)
    except ImportError:
        yield from row.names
        return
    yield from (name for name in row.names if not hasattr(owner, name))


def replacements(
    room: str, stand_ins: Mapping[str, Callable[[Any], Any]]
) -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """Return the replacements of a room for `replaced`, with these stand-ins."""
    return {
        (pkgutil.resolve_name(row.owner), name): stand_ins[row.stand_in]
        for row in TABLE[room]
        for name in row.names
        if name not in missing(row)
    }
