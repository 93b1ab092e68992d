"""Enter the world of a script or a dry run: replace names of the table, for the threads that asked.

A library's names are replaced when it is imported, if it is not yet.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from memlab.internals.imports import when_imported
from memlab.internals.replacing import install, modules_with
from memlab.internals.threads import scope
from memlab.world.table import TABLE, Row

Replacement = Callable[[Any], Any]  # gets the original
_OURS = sys.stdlib_module_names | {"torch", "numpy"}  # that a script cannot shadow
_BY_STAND_IN: defaultdict[str, list[Row]] = defaultdict(list)
for _row in TABLE:
    _BY_STAND_IN[_row.stand_in].append(_row)


class ByName(NamedTuple):
    """A stand-in that is another replacement for each name."""

    replacement: Callable[[str], Replacement]


Replacements = Mapping[str, Replacement | ByName]


@contextmanager
def enter(stand_ins: Replacements, *, leave: Collection[str] = ()) -> Iterator[None]:
    """Replace each name whose row has one of these stand-ins, except in the modules of `leave`."""
    rows = [row for name in stand_ins for row in _BY_STAND_IN[name] if row.module not in leave]
    later: defaultdict[str, list[Row]] = defaultdict(list)
    now: list[Row] = []
    for row in rows:
        (now if _is_ready(row.module) else later[row.module]).append(row)
    with scope(), ExitStack() as stack:
        install(_replacements(now, stand_ins), stack)
        if later:
            stack.enter_context(
                when_imported(
                    {name: partial(_in_library, of, stand_ins, stack) for name, of in later.items()}
                )
            )
        yield


def _is_ready(module: str) -> bool:
    """Return whether names are replaced now. Other libraries' are when a module of this name turns
    out to be the library's, and not a file beside the script."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        with suppress(ImportError):  # such as sqlite3, in some builds
            import_module(module)
    return root in _OURS and module in sys.modules


def _in_library(
    rows: list[Row], stand_ins: Replacements, stack: ExitStack, module: ModuleType
) -> None:
    install(_replacements(rows, stand_ins), stack)


def _replacements(
    rows: Iterable[Row], stand_ins: Replacements
) -> dict[tuple[Any, str], Replacement]:
    places = [(row, owner, name) for row in rows for owner, name in row.places()]
    importers = modules_with({name for row, _, name in places if row.also_in})
    found: dict[tuple[Any, str], Replacement] = {}
    for row, owner, name in places:
        stand_in = stand_ins[row.stand_in]
        new = stand_in.replacement(name) if isinstance(stand_in, ByName) else stand_in
        found[owner, name] = new
        # torch imports functions such as `init_process_group` into several modules by name. With
        # only one of them replaced, `init_device_mesh` waited for other ranks forever
        # (test_a_mesh_starts_the_process_group).
        for module in importers[name] if row.also_in else ():
            if vars(module)[name] is getattr(owner, name) and row.is_in(module.__name__):
                found[module, name] = new
    return found
