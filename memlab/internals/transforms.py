"""Transforms of torch.func, which torch does not apply to an autograd.Function with a context."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from memlab.internals.torch_internals import functorch


def is_transformed(tensors: Iterable[Any] = ()) -> bool:
    """Return whether a transform of torch.func runs, or a tensor is dual (forward mode)."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace these calls, and refuses by itself
        return False
    is_dual = any(isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in tensors)
    return is_dual or functorch.peek_interpreter_stack() is not None


def require_no_transform(name: str, instead: str, tensors: Iterable[Any] = ()) -> None:
    """Raise RuntimeError inside a transform of torch.func and for dual tensors."""
    if is_transformed(tensors):
        raise RuntimeError(
            f"got {name} inside vmap, jvp or another transform of torch.func, or with dual "
            f"tensors, which it does not support; {instead}"
        )
