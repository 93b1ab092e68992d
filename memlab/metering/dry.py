"""What the meter asks of a dry run. `memlab.dry_runs` implements it, on top of the meter."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch


class DryRun:
    """A dry run, as the meter sees it; `DryRun.active` is the one that is on, or None."""

    active: ClassVar["DryRun | None"] = None

    def step_aside(self) -> bool:
        """Let a meter that is about to start call `arguments` and `execute` itself, which saves
        a dispatch mode. Returns False if another mode has started since."""
        raise NotImplementedError

    def step_back(self) -> None:
        """Undo `step_aside`."""
        raise NotImplementedError

    def arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return an operator's arguments with every tensor fake."""
        raise NotImplementedError

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors."""
        raise NotImplementedError

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake twin of a tensor made outside, the same one each time."""
        raise NotImplementedError

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether this dry run made the fake tensor."""
        raise NotImplementedError

    def observed(self, observer: Callable[..., None]) -> AbstractContextManager[None]:
        """Call `observer(func, args, kwargs, result)` after each operator inside `with`."""
        raise NotImplementedError

    def notes(self) -> tuple[str, ...]:
        """Return the assumptions that the byte counts rest on, one sentence each."""
        raise NotImplementedError
