"""Temporarily replace functions of other modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
