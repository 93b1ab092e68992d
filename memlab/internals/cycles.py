"""Pause Python's cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Disable the cyclic collector inside `with`; reference counting still frees objects.

    The collector runs after a number of allocations, so the moment at which it frees a cycle
    depends on all Python code that ran before. While a file with millions of nested lists is read,
    it would run again and again, which takes 25 times as long as the reading.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
