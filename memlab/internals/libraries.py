"""Tell a library's files from a script's own, which may have a library's name."""

import json
import os
import sys
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, distributions
from urllib.parse import urlparse
from urllib.request import url2pathname

_PYTHONS = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)
_ENVIRONMENTS = frozenset({"site-packages", "dist-packages"})


@cache
def is_pythons(file: str) -> bool:
    """Return whether a file is a module of Python itself, or generated code such as `<string>`."""
    if file.startswith("<"):
        return True
    path = os.path.realpath(file)
    return path.startswith(_PYTHONS) and not _ENVIRONMENTS & set(path.split(os.sep))


def is_librarys(file: str) -> bool:
    """Return whether a file is Python's or was installed, in any folder of `sys.path`."""
    path = os.path.realpath(file)
    return (
        is_pythons(file)
        or bool(_ENVIRONMENTS & set(path.split(os.sep)))
        or any(_is_installed_in(os.path.realpath(folder), path) for folder in sys.path)
    )


@cache
def _is_installed_in(folder: str, path: str) -> bool:
    """Return whether pip or uv installed the file into the folder, as `--target` does."""
    if not path.startswith(folder + os.sep):
        return False
    name = path[len(folder) + 1 :].split(os.sep)[0].removesuffix(".py")
    return any(found.read_text("RECORD") for found in distributions(name=name, path=[folder]))


def is_module_of(library: str, file: str) -> bool:
    """Return whether the file of a module with a library's name is that library's: installed, or
    in the sources of an editable installation."""
    if is_librarys(file):
        return True
    try:
        origin = json.loads(distribution(library).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return False
    project = url2pathname(urlparse(origin.get("url", "")).path)
    return bool(project) and os.path.realpath(file).startswith(os.path.realpath(project) + os.sep)
