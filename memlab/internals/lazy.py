"""Lazy imports: import a package's module when one of its names is first used.

Importing torch takes seconds, and `memlab --help` and hints do not need it.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, home_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports names on first use.

    `home_of` maps each name to the module it is imported from, or to "" for a submodule.
    """

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        return getattr(import_module(home), name) if home else import_module(f"{package}.{name}")

    return find


class LazyModule:
    """A module imported on first use of one of its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
