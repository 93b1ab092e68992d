"""DataLoaders in a dry run: load in this process, without workers.

Fake tensors cannot be sent between processes. So a loader with workers loads each batch on demand,
and the batches that workers would prefetch do not exist.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from memlab.internals.replacing import replaced
from memlab.metering.frames import user_line


class Loaders:
    """Create iterators without workers, and record the loaders that had workers."""

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}  # num_workers, by the line that iterates

    def replacements(self) -> dict[tuple[Any, str], Callable[[Any], Any]]:
        """Return the replacements, for `replaced`."""
        return {(DataLoader, "_get_iterator"): self._in_this_process}

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
                return make(loader)

        return get_iterator

    def notes(self) -> tuple[str, ...]:
        """Return a note for each loader with workers."""
        return tuple(
            f"{line}: a DataLoader with num_workers={count} loads in this process, because fake "
            f"tensors cannot leave it; batches that its workers would prefetch are not counted"
            for line, count in self._workers.items()
        )
