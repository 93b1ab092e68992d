"""Read a pickle as data.

`pickle.load` runs whatever the file says: a memory snapshot or a checkpoint from somebody else
could start any program. Here a pickle may hold Python's own plain types (numbers, text, lists,
dictionaries, …), and of classes and functions only those that the caller names.
"""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

Allowed = Mapping[tuple[str, str], Callable[..., Any]]  # (module, name): what stands for it


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, allowed: Allowed) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no plain data")
        return self._allowed[module, name]


def unpickle(path: Path, allowed: Allowed | None = None) -> Any:
    """What a pickle holds; ValueError, and nothing has run, if that is more than plain data and
    what is `allowed`, or if the file is damaged."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file, allowed or {}).load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"{path} cannot be read: {error}; give a file that was written as expected and is whole"
        ) from error
