"""Tensors that other libraries keep for the life of the process.

A fake tensor must not stay in such a cache after a dry run. And a dry run starts with empty caches:
the bytes of what a library keeps are then the same in each run.

    bitsandbytes    `functional.name2qmap`, the codebooks of quantized statistics
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from memlab.internals.threads import asked


class _Divided(MutableMapping[Any, Any]):
    """A cache that is empty at first for the threads that asked, and the real one for others."""

    checks_thread = True  # for `replaced`

    def __init__(self, real: dict[Any, Any]) -> None:
        self._real = real
        self._own: dict[Any, Any] = {}

    @property
    def _cache(self) -> dict[Any, Any]:
        return self._own if asked() else self._real

    def __getitem__(self, key: Any) -> Any:
        return self._cache[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._cache[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._cache[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)


# A codebook that stayed made the second prediction of nested quantization 1 KiB lower
# (test_a_librarys_cache_is_empty_in_a_dry_run_and_restored_after_it).
STAND_INS: dict[str, Callable[[Any], Any]] = {"own_dict": _Divided}
