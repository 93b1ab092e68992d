"""DataLoaders in a dry run: their workers' work is done in this process.

Fake tensors cannot go from one process to another. So a loader with workers loads each batch when
it is asked for; the batches that workers would hold ready are not there.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from memlab.internals.replacing import replaced
from memlab.metering.frames import user_line


class Loaders:
    """Makes the iterators, and remembers whose workers were left out."""

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}  # how many, by the line that asked for batches

    def replacements(self) -> dict[tuple[Any, str], Callable[[Any], Any]]:
        """For `replaced`."""
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
        """What to know of each of them."""
        return tuple(
            f"{line}: a DataLoader with num_workers={count} loads in this process, because fake "
            f"tensors cannot leave it; batches that its workers would load ahead are not counted"
            for line, count in self._workers.items()
        )
