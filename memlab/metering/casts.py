"""Autocast inside composite operators that the meter decomposes.

torch calls a dispatch mode with autocast's keys excluded, and `torch.is_autocast_enabled` then
returns False. Under inference mode a composite operator reaches the mode undecomposed. Its inner
operators would then miss autocast: for example, the matmuls inside einsum, tensordot and multi_dot.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memlab.internals.torch_internals import (
    DispatchKey,
    ForceDispatchKeyGuard,
    dispatch_tls_local_exclude_set,
    dispatch_tls_local_include_set,
    has_kernel,
)

_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


class Casts:
    """Track autocast from `replacements()` on.

    `cpu_list` is the device whose autocast operator list applies to CPU tensors.
    """

    def __init__(self, cpu_list: str = "cpu") -> None:
        self._lists = {"cpu": _KEYS[cpu_list].name, "cuda": _KEYS["cuda"].name}
        self._on: set[str] = set()
        self._cast: set[str] = set()  # devices of enclosing operators that were cast

    def replacements(self) -> dict[tuple[Any, str], Callable[[Any], Any]]:
        """Return the function that changes autocast."""
        self._on = {device for device in _KEYS if torch.is_autocast_enabled(device)}
        return {(torch, "set_autocast_enabled"): self._tracking}

    @contextmanager
    def inside(self, func: Any) -> Iterator[None]:
        """Apply autocast to the operators inside the composite `func`.

        If autocast has already cast the inputs of `func` or of an enclosing composite, leave the
        inner operators alone.
        """
        before = self._cast
        on_a_list = {d for d, name in self._lists.items() if has_kernel(func.name(), name)}
        self._cast = before | (self._on & on_a_list)
        excluded = dispatch_tls_local_exclude_set()
        for device in self._on - self._cast:
            excluded = excluded.remove(_KEYS[device])
        included = dispatch_tls_local_include_set()
        try:
            # Otherwise the matmuls inside einsum run in float32
            # (test_a_metered_composite_has_the_same_result_as_without_the_meter). Kernels that call
            # a matmul themselves, such as `_transformer_encoder_layer_fwd`, still run without the
            # cast.
            with ForceDispatchKeyGuard(included, excluded):
                yield
        finally:
            self._cast = before

    def _tracking(self, set_enabled: Callable[..., None]) -> Callable[..., None]:
        def set_and_track(*arguments: Any) -> None:
            set_enabled(*arguments)
            device, enabled = ("cuda", *arguments)[-2:]  # the old signature had no device
            (self._on.add if enabled else self._on.discard)(device)

        return set_and_track
