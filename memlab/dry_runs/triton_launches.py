"""Triton kernels of other libraries in a dry run: a launch does nothing.

A kernel allocates no tensor: it writes into tensors that its caller made, and those were counted.
So the bytes are exact without it. It may write any of its arguments, so the values of all of them
become unknown. An autotuner takes no time and chooses no configuration.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from memlab.dry_runs import known_values
from memlab.internals.imports import when_imported
from memlab.internals.replacing import replaced
from memlab.internals.torch_internals import FakeTensor

_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
)


@contextmanager
def skipped() -> Iterator[None]:
    """Skip every launch with fake tensors inside `with`, also if Triton is imported only there."""
    with ExitStack() as stack:

        def replace_in(module: ModuleType, name: str) -> None:
            stack.enter_context(replaced({(getattr(module, name), "run"): _unless_fake}))

        functions = {
            module: lambda imported, name=name: replace_in(imported, name)
            for module, name in _LAUNCHERS
        }
        stack.enter_context(when_imported(functions))
        yield


def _unless_fake(run: Callable[..., Any]) -> Callable[..., Any]:
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = known_values.tensors_in((*args, *kwargs.values()))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return run(kernel, *args, **kwargs)
        known_values.forget(tensors)
        return None

    return launch
