"""Tensor subclasses of other libraries in a dry run, such as bitsandbytes' `Params4bit`.

They are made by `torch.Tensor._make_subclass(cls, data)`, which fails on a fake tensor because that
already is an object of another class. In a dry run the result is a fake tensor whose class
inherits from `cls` as well: it has the methods of `cls`, and torch handles it as a fake tensor.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from memlab.internals.torch_internals import FakeTensor


@cache
def _fake_class(cls: type) -> type:
    """Return `cls` itself if its objects are fake, else a fake class that inherits from it."""
    if issubclass(cls, FakeTensor):
        return cls
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls, FakeTensor), body)


def _make_subclass(real: Callable[..., Any]) -> Callable[..., Any]:
    def make(cls: type, data: torch.Tensor, require_grad: bool = False, **options: Any) -> Any:
        if not isinstance(data, FakeTensor):
            return real(cls, data, require_grad, **options)
        made = data.detach()
        made.__class__ = _fake_class(cls)
        return made.requires_grad_(require_grad)

    return make


def replacements() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """Return the function to replace in a dry run, for `replaced`."""
    return {(torch.Tensor, "_make_subclass"): _make_subclass}
