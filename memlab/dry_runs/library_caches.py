"""Tensors that other libraries keep for the life of the process.

A fake tensor must not stay in such a cache after a dry run. And a dry run starts with empty caches:
the bytes of what a library keeps are then the same in each run.

    bitsandbytes    `functional.name2qmap`, the codebooks of quantized statistics
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CACHES = (("bitsandbytes.functional", "name2qmap"),)


@contextmanager
def emptied() -> Iterator[None]:
    """Empty the caches inside `with`, and restore them afterwards."""
    before = [(cache, dict(cache)) for cache in _caches()]
    _clear()
    try:
        yield
    finally:
        _clear()
        for cache, values in before:
            cache.update(values)


def _clear() -> None:
    for cache in _caches():
        cache.clear()


def _caches() -> Iterator[dict[Any, Any]]:
    for module, name in _CACHES:
        if module in sys.modules:
            yield getattr(sys.modules[module], name, {})
