"""Which parameters of a test are tried by `make test`: the others wait for `make slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test, all but the kept ones marked as slow."""
    return [value if value in kept else slow(value) for value in values]


def slow(value: Any) -> Any:
    """A parameter that `make test` leaves out; a tuple is several arguments."""
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=pytest.mark.slow)
