"""The host memory that a process holds and cannot give back.

Resident memory (RSS) counts two kinds of pages. *Mapped* pages belong to a file. They are read from
disk when touched, dropped when memory is needed elsewhere, and shared by all processes that map the
file. *Anonymous* pages belong to the process and exist only in memory or swap. A mapped dataset of
100 GB can show an RSS of 100 GB without using up any memory. So only the anonymous part has to fit.

Source   Linux, Documentation/ABI/testing/procfs-smaps_rollup.
"""

import os
from pathlib import Path

PROCESSES = Path("/proc")
# `RssAnon` and `Anonymous` count a page that a forked worker shares with its parent twice.
_OWN = {"Pss_Anon", "Pss_Shmem", "SwapPss"}  # private pages, shared memory, and both swapped out


def anonymous_bytes(pid: int | None = None) -> int | None:
    """Return the bytes of memory that a process holds without a file behind them.

    The default is this process. A page that several processes share counts in equal parts with
    each, so the numbers of a process tree add up. (A worker starts as a copy of its parent.) Return
    None where the system does not report this, which is everywhere but on Linux.
    """
    path = PROCESSES / str(os.getpid() if pid is None else pid) / "smaps_rollup"
    try:
        lines = path.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    kibibytes = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    return 1024 * sum(kibibytes[name] for name in _OWN) if kibibytes.keys() >= _OWN else None
