"""Unpickle data safely.

`pickle.load` runs code from the file, so a snapshot or checkpoint from elsewhere could start any
program. Here a pickle may only contain Python's plain types (numbers, text, lists, dictionaries, …)
and the classes and functions that the caller allows.

A pickle of a few hundred bytes can also take hours (nested tuples as a key) or all memory, and
nothing can interrupt it. So `unpickle_bytes` first loads it in another process with limits.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from memlab.internals.cycles import no_cycle_collection

Allowed = Mapping[tuple[str, str], Callable[..., Any]]  # (module, name): its replacement


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, allowed: Allowed) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it references {module}.{name}, which is not plain data")
        return self._allowed[module, name]


def unpickle_bytes(data: bytes) -> Any:
    """Return the plain data of a pickle in memory.

    Raise ValueError as `unpickle` does, and for data that needs more than SECONDS (of the CPU, and
    one more for each SECOND_BYTES of the pickle) or MEMORY_BYTES (and MEMORY_SHARE times the
    pickle) to load.
    """
    _require_loadable(data)
    try:
        with no_cycle_collection():
            return _Unpickler(BytesIO(data), {}).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"it cannot be read: {_reason(error)}; give a complete file of the expected format"
        ) from error


SECONDS, SECOND_BYTES = 10, 2**21
MEMORY_BYTES, MEMORY_SHARE = 2**30, 60

# Loads standard input under limits of CPU time and memory. What else is wrong with the data, the
# parent finds.
_TRIAL = """
import gc, pickle, sys
gc.disable()
seconds, size = map(int, sys.argv[1:])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
except (ImportError, ValueError, OSError):  # Windows, and lower limits that are set already
    pass
class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError
try:
    Unpickler(sys.stdin.buffer).load()
except MemoryError:
    sys.exit(3)
except Exception:
    pass
import os
os._exit(0)  # without freeing the data, which takes time
"""


def _require_loadable(data: bytes) -> None:
    seconds = SECONDS + len(data) // SECOND_BYTES
    size = MEMORY_BYTES + MEMORY_SHARE * len(data)
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(seconds), str(size)]
    try:
        # The time on the clock is limited too, for systems without a limit of CPU time.
        tried = subprocess.run(
            command, input=data, stderr=subprocess.DEVNULL, timeout=20 * seconds, check=False
        )
    except subprocess.TimeoutExpired:
        tried = None
    if tried is None or tried.returncode:
        raise ValueError(
            f"its data takes more than {seconds} s or {size // 2**20} MiB to load, far more than a "
            f"file of {len(data):,} bytes needs; give a file that torch or memlab has written"
        )


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def unpickle(path: Path, allowed: Allowed | None = None) -> Any:
    """Return the contents of a pickle.

    Raise ValueError, before any code runs, if the file is damaged or contains anything but plain
    data and `allowed` classes and functions.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file, allowed or {}).load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"{path} cannot be read: {_reason(error)}; give a complete file of the expected format"
        ) from error
