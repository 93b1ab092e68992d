"""Tensor subclasses of other libraries in a dry run, such as bitsandbytes' `Params4bit`.

They are made by `torch.Tensor._make_subclass(cls, data)`, which fails on a fake tensor because that
already is an object of another class. In a dry run the result is a fake tensor whose class
inherits from `cls` as well: it has the methods of `cls`, and torch handles it as a fake tensor.

Wrappers made by `_make_wrapper_subclass`, such as torchao's optimizer state, work as they are,
except for `copy_`: `torch.Tensor.copy_` fails for a wrapper on a device that torch was built
without. The operator runs the wrapper's own code.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from memlab.internals.torch_internals import FakeTensor
from memlab.metering.tensors import has_own_handler


@cache
def _fake_class(cls: type) -> type:
    """Return `cls` itself if its objects are fake, else a fake class that inherits from it."""
    if issubclass(cls, FakeTensor):
        return cls
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls, FakeTensor), body)


def _make_subclass(real: Callable[..., Any]) -> Callable[..., Any]:
    def make(cls: type, data: torch.Tensor, require_grad: bool = False, **options: Any) -> Any:
        if not isinstance(data, FakeTensor):
            return real(cls, data, require_grad, **options)
        made = data.detach()
        made.__class__ = _fake_class(cls)
        return made.requires_grad_(require_grad)

    return make


def _copy_(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if has_own_handler((type(tensor),)):
        return torch.ops.aten.copy_.default(tensor, source, non_blocking)
    return tensor.copy_(source, non_blocking)


FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.Tensor.copy_: _copy_}


STAND_INS: dict[str, Callable[[Any], Any]] = {"subclass": _make_subclass}
