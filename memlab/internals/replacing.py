"""Replace functions of other modules for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(replacements: dict[tuple[Any, str], Callable[[Any], Any]]) -> Iterator[None]:
    """Put `replacement(what is there)` in the place of each (owner, name), and take it back."""
    own = {(owner, name): vars(owner).get(name) for owner, name in replacements}
    try:
        for (owner, name), replacement in replacements.items():
            setattr(owner, name, replacement(getattr(owner, name)))
        yield
    finally:
        for (owner, name), value in own.items():
            if value is not None:
                setattr(owner, name, value)
            elif name in vars(owner):  # it was inherited
                delattr(owner, name)
