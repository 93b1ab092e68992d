"""Autocast inside compositions that the meter takes apart.

torch calls a mode with autocast's keys excluded, and then denies that autocast is on. Under
inference mode a composition reaches the mode whole, and what it consists of would not be cast as
it is unwatched: in einsum, tensordot and multi_dot, whose inner products autocast lowers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memlab.internals.replacing import replaced
from memlab.internals.torch_internals import (
    DispatchKey,
    ForceDispatchKeyGuard,
    dispatch_tls_local_exclude_set,
    dispatch_tls_local_include_set,
    has_kernel,
)

_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


class Casts:
    """Knows, between `start()` and `stop()`, where autocast is on and what it has cast.

    Whose list of operators it follows on the CPU's tensors, `cpu_list` says.
    """

    def __init__(self, cpu_list: str = "cpu") -> None:
        self._lists = {"cpu": _KEYS[cpu_list].name, "cuda": _KEYS["cuda"].name}
        self._on: set[str] = set()
        self._cast: set[str] = set()  # where an operator around the one that runs was cast

    def start(self) -> None:
        self._on = {device for device in _KEYS if torch.is_autocast_enabled(device)}
        self._replaced = replaced({(torch, "set_autocast_enabled"): self._noting})
        self._replaced.__enter__()

    def stop(self) -> None:
        self._replaced.__exit__(None, None, None)

    @contextmanager
    def inside(self, func: Any) -> Iterator[None]:
        """Let autocast see what the composition `func` consists of, unless it has cast its inputs
        or those of one around it."""
        before = self._cast
        on_a_list = {d for d, name in self._lists.items() if has_kernel(func.name(), name)}
        self._cast = before | (self._on & on_a_list)
        excluded = dispatch_tls_local_exclude_set()
        for device in self._on - self._cast:
            excluded = excluded.remove(_KEYS[device])
        included = dispatch_tls_local_include_set()
        try:
            with ForceDispatchKeyGuard(included, excluded):
                yield
        finally:
            self._cast = before

    def _noting(self, set_enabled: Callable[..., None]) -> Callable[..., None]:
        def set_and_note(*arguments: Any) -> None:
            set_enabled(*arguments)
            device, enabled = ("cuda", *arguments)[-2:]  # long ago there was one device
            (self._on.add if enabled else self._on.discard)(device)

        return set_and_note
