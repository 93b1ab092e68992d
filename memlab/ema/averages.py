"""Averages of a model's weights by name, in memory or in a store.

Saves    in a store: all bytes of an average except two tensors.
Costs    in a store: each update reads and writes all its bytes. Updates can be rare, because one
         update with the right decay replaces ten single steps.
Source   memlab.offload's stores; any object with put, get, prefetch and claim works.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from memlab.internals.chunks import chunk_size_on, chunk_starts
from memlab.internals.torch_internals import foreach_lerp_

Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class InMemoryAverage(dict[str, Tensor]):
    """An average with its tensors in memory."""

    @property
    def kinds(self) -> Kinds:
        """The dtype and shape of each tensor."""
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.items()}

    @property
    def nbytes(self) -> int:
        """The total bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor. Store a changed tensor with `average[name] = tensor`."""
        return iter(self.items())

    def move_towards(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Compute avg ← avg + share·(weights − avg) in place.

        Tensors with the same dtype and device as their weight use one fused call without
        temporaries. Other weights are cast in chunks.
        """
        alike = [name for name, tensor in self.items() if _same_kind(tensor, weights[name])]
        if alike:
            here, there = [self[name] for name in alike], [weights[name] for name in alike]
            foreach_lerp_(here, there, share)
        for name in (name for name in self if name not in set(alike)):
            _lerp_in_chunks(self[name], weights[name], share)


class StoredAverage(MutableMapping[str, Tensor]):
    """An average with its tensors in a store. Reading a name fetches it; setting writes it."""

    def __init__(self, store: Any, sigma: float) -> None:
        self._store, self._sigma = store, sigma
        self.kinds: Kinds = {}

    @property
    def nbytes(self) -> int:
        """The total bytes of the tensors in the store."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.kinds.values())

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor while prefetching the next one."""
        for name, following in pairwise((*self.kinds, None)):
            assert name is not None
            brought = [self[name]]
            if following is not None:
                self._store.prefetch(self._key(following))
            yield name, brought.pop()  # drop the reference before fetching the next tensor

    def move_towards(self, weights: Mapping[str, Tensor], share: float) -> None:
        """Compute avg ← avg + share·(weights − avg), one tensor at a time."""
        for name, tensor in self.iter_tensors():
            InMemoryAverage({name: tensor}).move_towards(weights, share)
            self[name] = tensor
            del tensor  # at most this tensor and the prefetched one are in memory

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.kinds:
            raise KeyError(name)
        return self._store.get(self._key(name))

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.kinds[name] = tensor.dtype, tuple(tensor.shape)
        self._store.put(self._key(name), tensor)

    def __delitem__(self, name: str) -> None:
        raise TypeError("an average keeps all of its tensors")

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def _key(self, name: str) -> str:
        return f"average/{self._sigma}/{name}"


Average = InMemoryAverage | StoredAverage


def start_average(
    weights: Mapping[str, Tensor], sigma: float, *, device: Any, store: Any
) -> Average:
    """Return an average initialized with the weights, which the first update overwrites."""
    copies = ((name, _copied(weight, device)) for name, weight in weights.items())
    if store is None:
        return InMemoryAverage(copies)
    average = StoredAverage(store, sigma)
    for name, copy in copies:
        average[name] = copy
    return average


def require_store(store: Any) -> None:
    """Raise TypeError unless `store` is a store."""
    wanted = ("put", "get", "prefetch", "claim")
    if not all(callable(getattr(store, name, None)) for name in wanted):
        raise TypeError(
            f"got {store!r} as the store; give a memlab.offload.DiskStore(), or a HostStore()"
        )


def _copied(weight: Tensor, device: Any) -> Tensor:
    precision = torch.promote_types(weight.dtype, torch.float32)
    shape, where = weight.shape, weight.device if device is None else device
    return torch.empty(shape, dtype=precision, device=where).copy_(weight.detach())


def _same_kind(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.dtype, tensor.device) == (other.dtype, other.device)


def _lerp_in_chunks(average: Tensor, weight: Tensor, share: float) -> None:
    to, of = average.view(-1), weight.reshape(-1)  # copies only layouts such as channels_last
    size = chunk_size_on(average.device)
    for start in chunk_starts(to, size):
        # Don't name the cast chunk, so that it is freed before the next one.
        to[start : start + size].lerp_(of[start : start + size].to(to.device, to.dtype), share)
