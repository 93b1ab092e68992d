"""A memory limit for a block of code; the exception names the allocation that exceeds it."""

from typing import Any

import torch

from memlab.internals.torch_internals import (
    exclude_frame_from_dynamo,
    exclude_from_dynamo,
    refuse_inside_compiled_code,
)
from memlab.metering.registry import Storage
from memlab.metering.storages import StorageMeter
from memlab.units import format_bytes, parse_bytes


class BudgetExceeded(MemoryError):  # noqa: N818 - reads better than BudgetExceededError
    """More bytes are alive than a `budget` allows."""


class budget:  # noqa: N801 - used as a function: `with memlab.budget("6 MiB"):`
    """Limit the bytes alive at once among tensors allocated inside `with`.

    Tensors from before the block do not count. The allocation that exceeds the limit raises
    BudgetExceeded, which names it, the live total and the five largest live tensors with their
    modules. After `with budget(...) as spent:`, `spent.peak_bytes` is the peak.
    """

    @exclude_from_dynamo
    def __init__(self, limit: int | str, *, model: torch.nn.Module | None = None) -> None:
        self._limit = parse_bytes(limit)
        self._storages = StorageMeter(model, on_birth=self._check)
        self.peak_bytes = 0

    @exclude_frame_from_dynamo
    def __enter__(self) -> "budget":
        refuse_inside_compiled_code("memlab.budget")
        self._storages.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._storages.__exit__(*exception)

    def _check(self, request: Storage) -> None:
        live = self._storages.live_bytes
        self.peak_bytes = max(self.peak_bytes, live)
        if live > self._limit:
            largest = "; ".join(map(_describe, self._storages.largest_live(5)))
            raise BudgetExceeded(
                f"{_describe(request)} brings the live total to {format_bytes(live)}, past the "
                f"budget of {format_bytes(self._limit)}. Largest alive: {largest}"
            )


def _describe(record: Storage) -> str:
    """Format a storage like `3.00 MiB float32 (768, 1024) by aten.mm.default in blocks.0.mlp`."""
    event = record.event(record.bytes, record.phase)
    where = f" in {event.module}" if event.module else ""
    return f"{format_bytes(event.bytes)} {event.dtype} {event.shape} by {event.operator}{where}"
