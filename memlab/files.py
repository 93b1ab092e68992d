"""Files that are whole or not there: written beside, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write what will be `path` when the block ends: `with write_beside(path) as beside:`.

    If the block raises, Ctrl-C included, `path` is as it was and nothing lies beside it. The folder
    must be there. A link stays a link: what it leads to is replaced.
    """
    path = Path(path).resolve()
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
