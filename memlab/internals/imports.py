"""Imports of a script: change a library's modules when they are imported, without importing them
first, and import the script's own modules as a new process would.

A script's own file may have a library's name, such as `datasets.py`. It stays as it is.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from memlab.internals.libraries import is_librarys, is_module_of

# Modules that memlab itself needs while a script runs.
_KEPT = sys.stdlib_module_names | {"__main__", "memlab", "numpy", "torch"}


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
        if spec is not None and spec.loader is not None and _is_the_librarys(spec):
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


def _is_the_librarys(spec: ModuleSpec) -> bool:
    library = spec.name.partition(".")[0]
    return is_module_of(library, spec.origin) if spec.origin else False


@contextmanager
def when_imported(then: Mapping[str, Callable[[ModuleType], Any]]) -> Iterator[None]:
    """Call a function with each of these libraries' modules: now if it is imported, else when it
    is."""
    for name, function in then.items():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and _is_the_librarys(spec):
            function(sys.modules[name])
    finder = _Finder(then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def of_a_new_process(folder: Path) -> Iterator[None]:
    """Import a script's own modules inside `with` as if nothing had been imported before.

    A module beside the script comes before a library that memlab has imported. At the end the
    script's modules are forgotten: they may hold tensors, which another run must not find.
    """
    names = {name.partition(".")[0] for name in sys.modules} - _KEPT
    beside = {entry.stem for entry in folder.glob("*")}
    own = {name for name in names & beside if _is_in(folder, name)}
    hidden = {name: sys.modules.pop(name) for name in _modules_of(own)}
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] in own or _is_the_scripts(name, folder):
                del sys.modules[name]
        sys.modules.update(hidden)


def _is_in(folder: Path, name: str) -> bool:
    """Return whether a module, imported from elsewhere, also exists in the folder."""
    files = (folder / f"{name}.py", folder / name / "__init__.py")
    imported = getattr(sys.modules.get(name), "__file__", None)
    return any(f.exists() and not (imported and f.samefile(imported)) for f in files)


def _modules_of(names: set[str]) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in names]


def _is_the_scripts(name: str, folder: Path) -> bool:
    """Return whether an imported module is the script's. An editable installation is, if the script
    runs in its folder."""
    library, file = name.partition(".")[0], getattr(sys.modules[name], "__file__", None)
    if not file or library in _KEPT or is_librarys(file):
        return False
    is_beside = any(Path(file).resolve().is_relative_to(each) for each in (folder, Path.cwd()))
    return is_beside or not is_module_of(library, file)
