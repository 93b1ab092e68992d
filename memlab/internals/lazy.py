"""Names of a package that are imported when they are first used.

torch takes seconds, and neither `memlab --help` nor a hint needs any of it.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, home_of: Mapping[str, str]) -> Callable[[str], Any]:
    """The package's `__getattr__`; a name's home is the module that it is imported from, or "" for
    a module of the package itself."""

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        return getattr(import_module(home), name) if home else import_module(f"{package}.{name}")

    return find


class LazyModule:
    """A module that is imported when one of its names is first used: `optim.Adam8bit`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
