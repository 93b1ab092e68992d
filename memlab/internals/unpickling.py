"""Unpickle data safely.

`pickle.load` runs code from the file, so a snapshot or checkpoint from elsewhere could start any
program. Here a pickle may only contain Python's plain types (numbers, text, lists, dictionaries, …)
and the classes and functions that the caller allows.
"""

import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

Allowed = Mapping[tuple[str, str], Callable[..., Any]]  # (module, name): its replacement


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, allowed: Allowed) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it references {module}.{name}, which is not plain data")
        return self._allowed[module, name]


def unpickle_bytes(data: bytes, allowed: Allowed | None = None) -> Any:
    """Return the contents of a pickle in memory, as `unpickle` does for a file."""
    try:
        return _Unpickler(BytesIO(data), allowed or {}).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"it cannot be read: {error}; give a complete file of the expected format"
        ) from error


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
            f"{path} cannot be read: {error}; give a complete file of the expected format"
        ) from error
