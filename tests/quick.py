"""Parameters of tests: which ones `make test` tries, and which ones share one test.

quick(kept, values)       all but the named ones are slow
slow(value)               this one is slow
@pytest.mark.few(3)       three of them, evenly spread; the others are slow
@together(name, values)   all of them in one test
"""

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any

import pytest


def quick(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test, all but the kept ones marked as slow."""
    return [value if value in kept else slow(value) for value in values]


def slow(value: Any) -> Any:
    """A parameter that `make test` leaves out; a tuple is several arguments."""
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=pytest.mark.slow)


def leave_few(items: Iterable[pytest.Item]) -> None:
    """Of each test marked `few(n)`, mark all parameters but n as slow, the first never."""
    groups: dict[tuple[Any, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            groups.setdefault((item.parent, item.originalname), []).append(item)
    for group in groups.values():
        count = group[0].get_closest_marker("few").args[0]
        kept = {len(group) * i // count for i in range(count)}
        for place, item in enumerate(group):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


def together(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[..., Any]:
    """Like `pytest.mark.parametrize`, with all values in one test. A failure names its values.

    It is for checks of microseconds, because pytest itself needs milliseconds for each test.
    """
    names, cases = ((names,), [(v,) for v in values]) if isinstance(names, str) else (names, values)
    cases = [dict(zip(names, case, strict=True)) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def of_all(**fixtures: Any) -> None:
            for case in cases:
                try:
                    test(**fixtures, **case)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"with {case}")
                    raise

        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in names]
        of_all.__signature__ = signature.replace(parameters=others)
        return of_all

    return decorate
