"""Keep checkpoints in the temporary folder, where the script finds them again.

torch.save     of a dry run has no values, and writes placeholders (dry_runs/placeholders.py)
torch.jit      opens files in C++, unless it gets an open one
safetensors    in a dry run too; in a real run it opens files in Rust, and gets the path in the
               temporary folder here
tokenizers     opens files in Rust as well
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from memlab.dry_runs import placeholders
from memlab.dry_runs.weight_files import in_dry_runs_too, python_path
from memlab.world.entering import enter


def redirected(*, real: bool) -> AbstractContextManager[None]:
    """Let the script save its model inside `with`; its files must be isolated already."""
    weights = _REAL if real else placeholders.STAND_INS
    own = {"write_path": _writing, "read_path": _reading}
    return enter({**weights, **own})


def _writing(real: Callable[..., Any]) -> Callable[..., Any]:
    def write(written: Any, filename: Any, *args: Any, **options: Any) -> Any:
        with open(filename, "wb") as file:
            path = file.name
        return real(written, path, *args, **options)

    return write


def _jit_save(real: Callable[..., None]) -> Callable[..., None]:
    def save(m: Any, f: Any, *args: Any, **options: Any) -> None:
        if isinstance(f, (str, os.PathLike)):
            with open(f, "wb") as file:
                real(m, file, *args, **options)
        else:
            real(m, f, *args, **options)

    return save


def _reading(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda filename: real(python_path(filename))


_REAL: dict[str, Callable[[Any], Any]] = {
    "jit_save": _jit_save,
    "serialize_file": _writing,
    "safe_open": in_dry_runs_too,
}
