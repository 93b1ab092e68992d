"""Pause Python's cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Disable the cyclic collector inside `with`; reference counting still frees objects.

    The collector runs after a number of allocations, so the moment at which it frees a cycle
    depends on all Python code that ran before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
