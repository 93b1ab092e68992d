"""DataLoaders in a dry run: load in this process, without workers.

Fake tensors cannot be sent between processes. So a loader with workers loads each batch on demand,
and the batches that workers would prefetch do not exist.

A prediction for a GPU does not count the CPU's memory. There a data set gives real tensors, which
take a fraction of the time of fake ones, and the batch becomes fake at its first operator. A data
set that holds fake tensors, made in the dry run, gives fake ones.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from memlab.dry_runs.fake_accelerator import StandIn
from memlab.internals.replacing import replaced
from memlab.internals.torch_internals import (
    FakeTensor,
    MapDatasetFetcher,
    disable_current_modes,
    len_torch_function_stack,
    pop_function_mode_temporarily,
)
from memlab.metering.frames import user_line


class Loaders:
    """Create iterators without workers, and record the loaders that had workers."""

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}  # num_workers, by the line that iterates

    def stand_ins(self) -> dict[str, Callable[[Any], Any]]:
        return {"without_workers": self._in_this_process}

    def _in_this_process(self, make: Callable[[DataLoader], Any]) -> Callable[[DataLoader], Any]:
        def get_iterator(loader: DataLoader) -> Any:
            settings: dict[str, Any] = {"pin_memory": False}
            if loader.num_workers:
                self._workers[user_line()] = loader.num_workers
                settings |= {"num_workers": 0, "timeout": 0}
            values = {
                (loader, name): lambda _, value=value: value for name, value in settings.items()
            }
            with replaced(values):
                iterator = make(loader)
            fetcher = getattr(iterator, "_dataset_fetcher", None)
            if isinstance(fetcher, MapDatasetFetcher) and StandIn.device != "cpu":
                # 0.03 ms per sample made of `torch.tensor`, on fake tensors 4 ms: minutes for ten
                # thousand samples, although only the batch matters
                # (test_a_data_set_from_outside_gives_real_tensors_and_the_copy_is_counted).
                fetcher.fetch = _real_if_possible(fetcher.fetch)
            return iterator

        return get_iterator

    def notes(self) -> tuple[str, ...]:
        """Return a note for each loader with workers."""
        return tuple(
            f"{line}: a DataLoader with num_workers={count} loads in this process, because fake "
            f"tensors cannot leave it; batches that its workers would prefetch are not counted"
            for line, count in self._workers.items()
        )


def _real_if_possible(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Load batches of real tensors, until one holds a fake tensor."""
    is_real = True

    def fetch_batch(indices: Any) -> Any:
        nonlocal is_real
        if is_real:
            with suppress(Exception), disable_current_modes(), _without_function_mode():
                batch = fetch(indices)
                if not _holds_fake(batch):
                    return batch
            is_real = False  # an error of the data set's own is raised again below
        return fetch(indices)

    return fetch_batch


@contextmanager
def _without_function_mode() -> Iterator[None]:
    """Suspend the dry run's mode. Raises RuntimeError if it isn't the only one: another may set a
    default device."""
    if len_torch_function_stack() != 1:
        raise RuntimeError("another function mode is active")
    with pop_function_mode_temporarily():
        yield


def _holds_fake(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor)
    if isinstance(value, Mapping):
        return any(map(_holds_fake, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_fake, value))
    return hasattr(value, "__dict__") and any(map(_holds_fake, vars(value).values()))
