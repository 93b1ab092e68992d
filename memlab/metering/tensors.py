"""Find the plain tensors, which have a storage, in arguments, results and optimizer state."""

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
    """Return the plain tensors among an operator's arguments or results, in order."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found += [value] if value.layout is torch.strided else _sparse_parts(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_among(value)
    return found


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors inside a sparse tensor; [] for opaque layouts such as MKL-DNN's."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def share_sparse_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new sparse tensor that shares the indices and values."""
    return torch.sparse_coo_tensor(
        tensor._indices(),
        tensor._values(),
        tensor.shape,
        is_coalesced=tensor.is_coalesced(),
        check_invariants=False,
    )


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an optimizer's state, at any nesting depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_within(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_within(inner)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor itself, or the plain tensors inside a wrapper.

    Wrappers are tensor subclasses (sharded or quantized) and the tensors of torch.func's
    transforms, which have no storage.
    """
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in tensors_among(getattr(tensor, name) for name in names):
            yield from plain_tensors(part)  # tensors_among skips a DTensor's mesh
    else:
        yield from tensors_among((tensor,))


@functools.cache
def has_own_handler(types: tuple[type, ...]) -> bool:
    """Return whether one of the types is a wrapper, which runs operators on its plain tensors."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def is_foreign_fake(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is fake and does not belong to the active dry run.

    In real steps, DTensor and torch.compile run operators on fake tensors to infer shapes.
    """
    if not isinstance(tensor, FakeTensor):
        return False
    return DryRun.active is None or not DryRun.active.owns(tensor)
