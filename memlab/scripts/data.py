"""Stand in for data that is not on this machine, in its true shapes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from memlab.internals.imports import when_imported
from memlab.internals.replacing import replaced
from memlab.scripts import vision_data

_LENGTH = 2**24  # elements of a file whose size is not known


class StandIns:
    """The stand-ins that a script used."""

    def __init__(self) -> None:
        self._used: dict[str, str] = {}  # what stands in, by what is missing

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace missing data inside `with`."""
        with ExitStack() as stack:
            stack.enter_context(replaced({(np.memmap, "__new__"): self._memmap}))

            def vision(datasets: ModuleType) -> None:
                constructors = dict(vision_data.replacements(datasets, self._note))
                stack.enter_context(replaced(constructors))

            stack.enter_context(when_imported({"torchvision.datasets": vision}))
            yield

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each stand-in."""
        for missing, instead in self._used.items():
            yield f"{missing} is not on this machine; {instead} are in its place"

    def _note(self, missing: str, instead: str) -> None:
        self._used[missing] = instead

    def _memmap(self, real: Any) -> Callable[..., Any]:
        def mapped(
            cls: type, filename: Any, dtype: Any = np.uint8, mode: str = "r+", **options: Any
        ) -> Any:
            try:
                return real(cls, filename, dtype, mode, **options)
            except FileNotFoundError:
                if "w" in mode:
                    raise
            shape = options.get("shape") or _LENGTH
            self._note(str(filename), f"{np.prod(shape):,} zeros")
            return np.zeros(shape, dtype)

        return mapped
