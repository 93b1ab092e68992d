"""Collectives in a dry run: nothing is sent, since there are no values to send.

Every tensor that a collective writes to exists before it, but for the functional ones, whose
results torch knows. So a collective is answered by its own outputs and by work that is done. A
backend may take memory of its own for what is under way, which no dry run knows.
"""

from collections.abc import Callable
from typing import Any

import torch

from memlab.internals.torch_internals import (
    DisableTorchFunction,
    disable_current_modes,
    finished_work,
    sharding_propagator,
)


def is_collective(func: Any) -> bool:
    return func.namespace == "c10d"


def done(func: Any, args: Any) -> Any:
    """What the collective returns: its outputs, which come first, and its work."""
    outputs = args[0] if len(func._schema.returns) > 1 else None
    future = torch.futures.Future()
    future.set_result(outputs if isinstance(outputs, list) else [outputs])  # DDP reads its buckets
    work = finished_work(future)
    return work if outputs is None else (outputs, work)


def _for_real(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes(), DisableTorchFunction():
            return make(*args, **kwargs)

    return made


def _nothing(real: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def replacements() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """What reads values although it trains nothing: whether all ranks have the same model. And how
    DTensor learns the shape of a result: on fake tensors of its own."""
    if not torch.distributed.is_available():
        return {}
    return {
        (sharding_propagator(), "_propagate_tensor_meta_non_cached"): _for_real,
        (torch.distributed, "_verify_params_across_processes"): _nothing,
        # DDP's first guess at the buckets stays: another order of the same bytes.
        (torch.distributed.Reducer, "_rebuild_buckets"): _nothing,
    }
