"""Temporarily replace functions of other modules."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def importers(name: str, value: Any) -> Iterator[ModuleType]:
    """Yield the modules that have this value under this name: its own, and all importers."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is value:
            yield module


@contextmanager
def replaced(replacements: dict[tuple[Any, str], Callable[[Any], Any]]) -> Iterator[None]:
    """Replace each (owner, name) by `replacement(original)` inside the block, then restore it."""
    own = {(owner, name): vars(owner).get(name) for owner, name in replacements}
    try:
        for (owner, name), replacement in replacements.items():
            setattr(owner, name, replacement(getattr(owner, name)))
        yield
    finally:
        for (owner, name), value in own.items():
            if value is not None:
                setattr(owner, name, value)
            elif name in vars(owner):  # the original was inherited
                delattr(owner, name)
