"""Python's collector of cycles, kept waiting."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Let no cycle of Python objects be searched for inside; everything else dies as always.

    The search runs whenever many objects were made, however little of it is garbage, and frees
    what it finds at a moment that depends on all Python code run before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
