"""The batch and sequence length of a script's function, and the largest that fit.

    def build(batch=8, seq_len=1024):
        ...
        return step, model, optimizer

memlab calls the function with other values, so it must use them for the inputs of its step.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from memlab.cli.errors import UsageError
from memlab.planner.limits import largest
from memlab.planner.search import TOKENS

NAMES = {"batch": ("batch", "batch_size"), "length": ("seq", "seq_len")}
MOST = {"batch": 10**6, "length": 2**20}
STEPS = {"batch": 1, "length": TOKENS}
MOST_TRIES = 16  # between a size that fits and one that makes the script fail

Sizes = Mapping[str, "Size"]  # by what: "batch" or "length"


class Size(NamedTuple):
    """A parameter of the function, and its default."""

    name: str
    default: int


@dataclass(frozen=True)
class Limits:
    """The largest values that were predicted to fit, each with the other as given.

    None: the function does not take it, or the bytes do not depend on it.
    """

    batch: int | None = None
    length: int | None = None
    remarks: tuple[str, ...] = ()


def sizes_of(function: Callable[..., Any], name: str) -> dict[str, Size]:
    """Return the sizes that the function takes; raise UsageError if one has no default."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C without a signature
        return {}
    found: dict[str, Size] = {}
    for what, names in NAMES.items():
        for each in filter(parameters.__contains__, names):
            default, kind = parameters[each].default, parameters[each].kind
            if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                continue
            if default is inspect.Parameter.empty:
                raise UsageError(
                    f"got {name} with a parameter {each} without a default; give it one, such as "
                    f"{each}=8"
                )
            by_name = kind is not inspect.Parameter.POSITIONAL_ONLY
            if by_name and type(default) is int and default > 0:
                found.setdefault(what, Size(each, default))
    return found


def find_limits(
    needed: Callable[[dict[str, int]], int], sizes: Sizes, known: int, budget: int
) -> Limits:
    """Search the largest batch and length.

    Args:
        needed: predicts the script's bytes with these arguments; raises UsageError if it fails.
        known: the bytes with the defaults, at most `budget`.
    """
    found: dict[str, int | None] = {}
    remarks: list[str] = []
    for what, size in sizes.items():
        search = _Search(what, size, needed, {size.default: known}, budget)
        found[what] = search.largest()
        remarks += search.remarks()
    return Limits(**found, remarks=tuple(remarks))


@dataclass
class _Search:
    """Searches one size, up to the memory or up to where the script fails."""

    what: str
    size: Size
    needed: Callable[[dict[str, int]], int]
    known: dict[int, int]  # bytes by value
    budget: int
    failed: tuple[int, str] | None = None

    def largest(self) -> int | None:
        """Return the largest value found; None if the bytes do not depend on it."""
        step, limit = STEPS[self.what], max(MOST[self.what], self.size.default)
        # As if all bytes grew with the size: the first guess is below the limit.
        slope = self.known[self.size.default] / self.size.default
        for _ in range(MOST_TRIES):
            fits = self._within_budget()
            with suppress(_ScriptError):
                found = largest(self._predicted, fits, self.budget, limit, step=step, slope=slope)
                if limit - found.number >= step:  # the memory is the limit
                    self.failed = None
            if self.failed is None:
                break
            most, fails = max(self._within_budget()), self.failed[0]
            if fails - most <= step:
                break
            middle = (most + fails) // 2 if fails < 2 * most else math.isqrt(most * fails)
            limit = max(middle, most + step)
        return None if self._has_no_effect() else max(self._within_budget())

    def _within_budget(self) -> dict[int, int]:
        return {number: count for number, count in self.known.items() if count <= self.budget}

    def _predicted(self, number: int) -> int:
        try:
            self.known[number] = self.needed({self.size.name: number})
        except UsageError as error:
            self.failed = number, str(error)
            raise _ScriptError from error
        return self.known[number]

    def _has_no_effect(self) -> bool:
        return len(self.known) > 1 and len(set(self.known.values())) == 1

    def remarks(self) -> Iterator[str]:
        """Say why there is no limit, or that it is the script's."""
        name = self.size.name
        if self.failed is not None:
            number, error = self.failed
            yield f"{self.what} up to: the script fails with {name}={number}: {error}"
        elif self._has_no_effect():
            yield f"{self.what} up to: the bytes do not depend on {name}; use it for the inputs"


class _ScriptError(Exception):
    """The script raised an error."""


def no_sizes(function: str) -> str:
    """Say what a function needs so that its largest batch and length are predicted."""
    return (
        f"batch up to, length up to: not predicted, because {function} has no parameter "
        f"batch or seq_len with a default; write def build(batch=8, seq_len=1024) and use both for "
        f"the inputs"
    )
