"""bitsandbytes' paged optimizers in a prediction: most of their state is outside torch's allocator.

`PagedAdamW8bit` and the like keep the state of each weight with at least 100,000 elements in CUDA's
managed memory (`cudaMallocManaged`). The driver moves its pages between the GPU and the host. Such
state is a tensor on the host here: it is in no figure of torch's allocator, and a note has its
bytes. The smaller weights' state and all block-wise maxima are ordinary tensors on CUDA.

Checked with bitsandbytes 0.50.2 (`functional.get_paged`, `Optimizer8bit.get_state_buffer`).
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memlab.internals.replacing import always
from memlab.internals.threads import only_where_asked
from memlab.units import format_bytes
from memlab.world.entering import enter


class PagedState:
    """Replace the functions for managed memory, and count its bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_replaced = False

    @contextmanager
    def installed(self) -> Iterator["PagedState"]:
        """Replace them inside `with`, from the first step of a paged optimizer on."""
        with ExitStack() as self._stack:
            hook = register_optimizer_step_pre_hook(only_where_asked(self._before_step))
            self._stack.callback(hook.remove)
            yield self

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        functional = sys.modules.get("bitsandbytes.functional")
        if self._is_replaced or functional is None or not getattr(optimizer, "is_paged", False):
            return
        self._is_replaced = True
        kept = optimizer.page_mng.paged_tensors  # of the process
        self._stack.callback(_shorten, kept, len(kept))
        own = {"paged": always(self._get_paged), "unpaged": always(_nothing)}
        self._stack.enter_context(enter(own))

    def _get_paged(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> torch.Tensor:
        state = torch.empty(shape, dtype=dtype, device="cpu")
        state.is_paged = True  # type: ignore[attr-defined]
        self.num_bytes += state.nbytes
        return state

    def notes(self) -> tuple[str, ...]:
        """Return a note with the bytes in managed memory, if there are any."""
        if not self.num_bytes:
            return ()
        return (
            f"not counted: {format_bytes(self.num_bytes)} of paged optimizer state in CUDA's "
            f"managed memory, outside torch's allocator; it is on the GPU where there is room, "
            f"otherwise on the host",
        )


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _shorten(tensors: list[Any], count: int) -> None:
    del tensors[count:]
