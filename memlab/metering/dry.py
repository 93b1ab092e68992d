"""The interface between the meter and a dry run. `memlab.dry_runs` implements it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from memlab.internals.threads import asked


class _PerThread(type):
    """Metaclass with `active`, which only the threads that asked for the dry run see."""

    _active: "DryRun | None" = None

    @property
    def active(cls) -> "DryRun | None":
        return DryRun._active if asked() else None

    @active.setter
    def active(cls, running: "DryRun | None") -> None:
        DryRun._active = running


class DryRun(metaclass=_PerThread):
    """A dry run as the meter uses it.

    DryRun.active   the running dry run, or None
    stream   the number of the accelerator's current stream, 0 for the default one
    """

    stream: ClassVar[int] = 0

    def release_mode(self) -> bool:
        """Leave the dispatch mode, so that a starting meter calls `arguments` and `execute` itself.

        Returns False, and does nothing, if another mode has started since.
        """
        raise NotImplementedError

    def reclaim_mode(self) -> None:
        """Undo `release_mode`."""
        raise NotImplementedError

    def arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return an operator's arguments with every tensor fake."""
        raise NotImplementedError

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors."""
        raise NotImplementedError

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor for a real one from outside, the same one each time."""
        raise NotImplementedError

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether this dry run made the fake tensor."""
        raise NotImplementedError

    def observed(self, observer: Callable[..., None]) -> AbstractContextManager[None]:
        """Call `observer(func, args, kwargs, result)` after each operator inside `with`."""
        raise NotImplementedError

    def notes(self) -> tuple[str, ...]:
        """Return the assumptions behind the byte counts, one sentence each."""
        raise NotImplementedError
