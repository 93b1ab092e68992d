"""Stand in for missing data, in its true shapes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from memlab.world.data import vision_data
from memlab.world.data.columns import Columns
from memlab.world.data.hub import Hub
from memlab.world.data.pretrained import Pretrained
from memlab.world.data.tiktoken_encodings import Encodings
from memlab.world.entering import Replacements, enter

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
        with enter(self._stand_ins()):
            yield

    def _stand_ins(self) -> Replacements:
        return {
            "memmap": self._memmap,
            "images": vision_data.stand_in(self._note),
            **self._hub.stand_ins(),
            **self._pretrained.stand_ins(),
            **self._encodings.stand_ins(),
        }

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each stand-in."""
        for missing, instead in self._used:
            yield f"not on this machine: {missing}; instead: {instead}"

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
