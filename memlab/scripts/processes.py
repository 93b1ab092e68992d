"""Let a script believe that it is rank 0 of several processes: its collectives finish at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from memlab.internals.replacing import replaced
from memlab.internals.torch_internals import fake_process_group_store


@contextmanager
def one_rank(ranks: int | None) -> Iterator[None]:
    """Replace the process group by one that sends nothing. `ranks` is the launcher's number."""
    if not dist.is_available():
        yield
        return

    def initialize(real: Callable[..., None]) -> Callable[..., None]:
        def initialized(*args: Any, **kwargs: Any) -> None:
            size = kwargs.get("world_size", -1)
            size = size if size > 0 else (ranks or 1)
            real(
                "fake",
                store=fake_process_group_store(),
                rank=max(0, kwargs.get("rank", 0)),
                world_size=size,
            )

        return initialized

    owners = (dist, dist.distributed_c10d)
    with replaced({(owner, "init_process_group"): initialize for owner in owners}):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
