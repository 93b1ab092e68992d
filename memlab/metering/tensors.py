"""The plain tensors, those with a storage, among everything that a step hands around."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memlab.internals.torch_internals import (
    FakeTensor,
    functorch,
    is_traceable_wrapper_subclass,
)
from memlab.metering.dry import DryRun


def tensors_among(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, in order."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found += [value] if value.layout is torch.strided else _sparse_parts(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_among(value)
    return found


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a sparse one consists of; none of an opaque layout (MKL-DNN's)."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def sharing_the_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Another sparse tensor of the same indices and values."""
    return torch.sparse_coo_tensor(
        tensor._indices(),
        tensor._values(),
        tensor.shape,
        is_coalesced=tensor.is_coalesced(),
        check_invariants=False,
    )


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an optimizer's state, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_within(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_within(inner)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or what a wrapper consists of: a subclass (sharded or quantized), or one
    of torch.func's transforms, inside of which parameters have no storage of their own."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in tensors_among(getattr(tensor, name) for name in names):
            yield from plain_tensors(part)  # a DTensor also names its mesh
    else:
        yield from tensors_among((tensor,))


@functools.cache
def has_a_handler_of_its_own(types: tuple[type, ...]) -> bool:
    """Whether one of the types, a wrapper, runs an operator on the plain tensors within."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def is_of_another_run(tensor: torch.Tensor) -> bool:
    """Whether the tensor is fake, and not of the dry run that is active now, if one is.

    Inside a real step, DTensor and torch.compile run operators on fake tensors to learn their
    shapes.
    """
    if not isinstance(tensor, FakeTensor):
        return False
    return DryRun.active is None or not DryRun.active.owns(tensor)
