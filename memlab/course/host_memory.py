"""What a process holds of the host's memory and cannot give back.

Resident memory (RSS) counts two kinds of pages. *Mapped* pages are a file's: read from disk when
they are touched, dropped without a word when memory is wanted elsewhere, and shared by all who map
the file. *Anonymous* pages are the process's own: nothing but memory (or swap) has them. A dataset
of 100 GB that is mapped can show an RSS of 100 GB, and not one byte of it is missing to anyone; so
what has to fit is the anonymous part.

Source   Linux, Documentation/ABI/testing/procfs-smaps_rollup.
"""

import os
from pathlib import Path

PROCESSES = Path("/proc")
_ITS_OWN = {"Pss_Anon", "Pss_Shmem", "SwapPss"}  # its own pages; shared memory; either swapped out


def anonymous_bytes(pid: int | None = None) -> int | None:
    """Bytes of memory that a process (None: this one) holds and that no file backs; None where the
    system does not tell, which is everywhere but on Linux.

    A page that several processes share (a worker begins as a copy of its parent) counts in equal
    parts with each, so the numbers of a family add up.
    """
    path = PROCESSES / str(os.getpid() if pid is None else pid) / "smaps_rollup"
    try:
        lines = path.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    kibibytes = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    return (
        1024 * sum(kibibytes[name] for name in _ITS_OWN) if kibibytes.keys() >= _ITS_OWN else None
    )
