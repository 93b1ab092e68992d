"""Checks of a user's settings, whose errors name the setting."""

import numbers
from typing import Any

from torch import Tensor


def number(name: str, value: Any) -> float:
    """Return a setting as a Python number, or raise TypeError."""
    is_one_element = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if is_one_element or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        return float(value)
    raise TypeError(f"got {name}={value!r}; give a number, or a tensor of one element")


def require_counts(**counts: Any) -> None:
    """Raise ValueError for anything but integers from 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"got {name}={count!r}; give an integer from 1")


def require_bools(**settings: Any) -> None:
    """Raise TypeError for settings other than True and False."""
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise TypeError(f"got {name}={value!r}; give True or False")
