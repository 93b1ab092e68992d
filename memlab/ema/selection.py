"""Choose tensors of a model by name, by pattern, or with a function.

only="head"                        a tensor, or every tensor of a module
only=["head", "blocks.*.norm"]     several; * fits any text
only=lambda name: "norm" in name   every name for which the function is true
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Only = str | Iterable[str] | Callable[[str], bool] | None


def chosen(
    names: Iterable[str], only: Only = None, *, tied: Mapping[str, str] | None = None
) -> list[str]:
    """Return the names that `only` fits, in their order. None chooses every name.

    `tied` maps further names to the name of the same tensor. Raise ValueError if a pattern or
    function fits no name, and TypeError for another kind of `only`.
    """
    every = list(names)
    if only is None:
        return every
    name_of = {**{name: name for name in every}, **(tied or {})}
    picked: set[str] = set()
    for one in _each(only):
        fit = {name_of[name] for name in name_of if _fits(name, one)}
        if not fit:
            raise ValueError(
                f"got only={one!r}, which fits none of {len(every)} tensors; give a name such as "
                f"{next(iter(every), '')!r}, or a pattern"
            )
        picked |= fit
    return [name for name in every if name in picked]


def _each(only: Only) -> list[str | Callable[[str], bool]]:
    several: list[Any] = (
        list(only) if isinstance(only, Iterable) and not isinstance(only, str) else [only]
    )
    if several and all(isinstance(one, str) or callable(one) for one in several):
        return several
    raise TypeError(
        f"got only={only!r}, wanted names, patterns, or a function of a name; give one such as "
        f"'head' or 'blocks.*.norm'"
    )


def _fits(name: str, one: str | Callable[[str], bool]) -> bool:
    """Whether a function is true, or a pattern matches the name or a module that contains it."""
    if callable(one):
        return bool(one(name))
    path = name.split(".")
    return any(
        fnmatch.fnmatchcase(".".join(path[:depth]), one) for depth in range(1, len(path) + 1)
    )
