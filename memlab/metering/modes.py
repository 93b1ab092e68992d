"""A dispatch mode that costs little per operator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memlab.internals.torch_internals import (
    FrameAction,
    FrameExecStrategy,
    TorchDispatchMode,
    python_dispatch,
    set_code_exec_strategy,
)

_DEVICE = torch.ops.prim.device.default


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of the function and of all that it calls.

    A compiled function that runs under a mode calls the mode's handler, and in there the mode is
    off: Dynamo would compile the handler itself. That takes minutes, and guards and resumed frames
    keep tensors alive.
    """
    skip_all = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip_all)
    return function


# torch's record of whether a mode is on: one for all threads. What it held before is kept by each
# mode, so two threads whose modes end in another order than they began leave it set.
_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


@contextmanager
def flags_restored() -> Iterator[None]:
    """After threads that had modes on: torch's flags are as they were before.

    Otherwise torch.compile leaves functions uncompiled, and says nothing.
    """
    before = {name: getattr(python_dispatch, name) for name in _FLAGS}
    try:
        yield
    finally:
        vars(python_dispatch).update(before)
        python_dispatch.set_is_in_mode_without_ignore_compile_internals(before[_FLAGS[-1]])


class LightMode(TorchDispatchMode):
    """A mode whose handler, `handle(func, types, args, kwargs)`, is called for operators alone.

    Fake tensors ask for their device more often than for everything else together; that question
    is answered here. torch wraps the handlers of modes to keep its compiler out of them, which
    costs as much as a small operator; `never_compiled` costs nothing.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @never_compiled
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE:
            return getattr(args[0], "fake_device", None) or func(*args)
        return self.handle(func, types, args, kwargs or {})

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within `handle`: let the mode see the operators inside, too."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError
