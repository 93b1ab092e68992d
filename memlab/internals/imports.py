"""Change modules when they are imported, without importing them first."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Find the modules as usual, and let their loaders call a function at the end."""

    def __init__(self, then: Mapping[str, Callable[[ModuleType], Any]]) -> None:
        self._then = then
        self._finding: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._then or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._finding.remove(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then[name])
        return spec


class _Loader(Loader):
    def __init__(self, real: Loader, then: Callable[[ModuleType], Any]) -> None:
        self._real, self._then = real, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._real  # type: ignore[union-attr]
        self._then(module)


@contextmanager
def when_imported(then: Mapping[str, Callable[[ModuleType], Any]]) -> Iterator[None]:
    """Call a function with each of these modules: now if it is imported, else when it is."""
    for name, function in then.items():
        if name in sys.modules:
            function(sys.modules[name])
    finder = _Finder(then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
