"""Stand in for missing data, in its true shapes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from memlab.internals.imports import when_imported
from memlab.internals.replacing import replaced
from memlab.scripts import vision_data
from memlab.scripts.columns import Columns
from memlab.scripts.hub import Hub
from memlab.scripts.pretrained import Pretrained
from memlab.scripts.tiktoken_encodings import Encodings

_LENGTH = 2**24  # elements of a file whose size is not known


class StandIns:
    """The stand-ins that a script used."""

    def __init__(
        self, configs: Mapping[str, str] | None = None, columns: Columns | None = None
    ) -> None:
        self._used: dict[tuple[str, str], None] = {}  # (the missing thing, its stand-in)
        self._hub = Hub(self._note, configs, columns)
        self._pretrained = Pretrained(self._note)
        self._encodings = Encodings(self._note)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace missing data inside `with`."""
        with ExitStack() as stack:
            stack.enter_context(replaced({(np.memmap, "__new__"): self._memmap}))

            def replacing(patch: Callable[[ModuleType], Any]) -> Callable[[ModuleType], None]:
                return lambda module: stack.enter_context(replaced(dict(patch(module))))

            stack.enter_context(replaced(dict(self._pretrained.replacements())))
            patches = self.patches()
            stack.enter_context(
                when_imported({name: replacing(patch) for name, patch in patches.items()})
            )
            yield

    def patches(self) -> dict[str, Callable[[ModuleType], Any]]:
        """Return what to replace in each module of a library, once it is imported."""
        return {
            "torchvision.datasets": self._vision,
            **self._hub.patches(),
            **self._pretrained.patches(),
            **self._encodings.patches(),
        }

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each stand-in."""
        for missing, instead in self._used:
            yield f"not on this machine: {missing}; instead: {instead}"

    def _vision(self, datasets: ModuleType) -> Any:
        return vision_data.replacements(datasets, self._note)

    def _note(self, missing: str, instead: str) -> None:
        self._used[missing, instead] = None

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
