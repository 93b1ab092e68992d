"""A dispatch mode with low overhead per operator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memlab.internals.torch_internals import (
    TorchDispatchMode,
    exclude_from_dynamo,
    python_dispatch,
)

_DEVICE = torch.ops.prim.device.default


# torch's flags for active modes are shared by all threads, and each mode restores the value it
# found. Two threads whose modes do not end in reverse order leave a flag set.
_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


@contextmanager
def restore_mode_flags() -> Iterator[None]:
    """Restore torch's mode flags after threads that used modes.

    With a flag left set, torch.compile silently leaves functions uncompiled.
    """
    before = {name: getattr(python_dispatch, name) for name in _FLAGS}
    try:
        yield
    finally:
        vars(python_dispatch).update(before)
        python_dispatch.set_is_in_mode_without_ignore_compile_internals(before[_FLAGS[-1]])


class LightMode(TorchDispatchMode):
    """A dispatch mode that calls `handle(func, types, args, kwargs)` for each operator.

    Queries of a fake tensor's device, the most frequent calls, do not reach `handle`. torch wraps a
    mode's handler to exclude it from its compiler, which costs as much as a small operator;
    `exclude_from_dynamo` costs nothing.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions run compiled under this mode, in all threads: torch's flag is shared."""
        # Otherwise Dynamo silently runs the Python code, and a meter reports eager memory: 5.31 MiB
        # for a pointwise MLP whose compiled code needs 1.94 MiB
        # (test_every_allocation_equals_the_compiled_codes).
        return True

    @exclude_from_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # 15,000 of the 25,000 calls in a dry step of a 7B model
        # (test_a_fake_tensors_device_query_is_not_handled).
        if func is _DEVICE:
            return getattr(args[0], "fake_device", None) or func(*args)
        return self.handle(func, types, args, kwargs or {})

    @contextmanager
    def reenter(self) -> Iterator[None]:
        """Re-enter the mode within `handle`, so that it also sees the operators inside."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError
