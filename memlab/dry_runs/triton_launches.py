"""Triton kernels of other libraries in a dry run: a launch does nothing.

A kernel allocates no tensor: it writes into tensors that its caller made, and those were counted.
So the bytes are exact without it. It may write any of its arguments, so the values of all of them
become unknown. An autotuner takes no time and chooses no configuration.
"""

from collections.abc import Callable
from typing import Any

from memlab.dry_runs import known_values
from memlab.internals.torch_internals import FakeTensor


def _unless_fake(run: Callable[..., Any]) -> Callable[..., Any]:
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = known_values.tensors_in((*args, *kwargs.values()))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return run(kernel, *args, **kwargs)
        known_values.forget(tensors)
        return None

    return launch


STAND_INS: dict[str, Callable[[Any], Any]] = {"launch": _unless_fake}
