"""Averages of a model's weights, by their names: in memory, or in a store.

Saves    in a store: all of an average's bytes but those of two tensors.
Costs    in a store: its bytes read and written in each update; and updates may be rare, for the
         right share makes ten steps at once as good as one after the other.
Source   memlab.offload's stores; whatever has their put, get, prefetch and claim will do.
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


class InMemory(dict[str, Tensor]):
    """An average whose tensors are here."""

    @property
    def kinds(self) -> Kinds:
        """Dtype and shape of each."""
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.items()}

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensor in self.values())

    def one_by_one(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor; what was changed of it is put back by `average[name] = tensor`."""
        return iter(self.items())

    def move_towards(self, weights: Mapping[str, Tensor], share: float) -> None:
        """avg ← avg + share·(weights − avg), in place.

        Of a kind and on a device: in one call, which takes nothing beside. Others go through a
        piece in the average's dtype at a time.
        """
        alike = [name for name, tensor in self.items() if _is_alike(tensor, weights[name])]
        if alike:
            here, there = [self[name] for name in alike], [weights[name] for name in alike]
            foreach_lerp_(here, there, share)
        for name in (name for name in self if name not in set(alike)):
            _move_in_pieces(self[name], weights[name], share)


class InStore(MutableMapping[str, Tensor]):
    """An average whose tensors are in a store. To get one brings it, to set it sends it away."""

    def __init__(self, store: Any, sigma: float) -> None:
        self._store, self._sigma = store, sigma
        self.kinds: Kinds = {}

    @property
    def nbytes(self) -> int:
        """Of all of them, in the store."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.kinds.values())

    def one_by_one(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, while the next one is on its way."""
        for name, following in pairwise((*self.kinds, None)):
            assert name is not None
            brought = [self[name]]
            if following is not None:
                self._store.prefetch(self._key(following))
            yield name, brought.pop()  # held by nobody here when the next one comes

    def move_towards(self, weights: Mapping[str, Tensor], share: float) -> None:
        """avg ← avg + share·(weights − avg), a tensor at a time."""
        for name, tensor in self.one_by_one():
            InMemory({name: tensor}).move_towards(weights, share)
            self[name] = tensor
            del tensor  # one is here, and the next one on its way

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


Average = InMemory | InStore


def begun(weights: Mapping[str, Tensor], sigma: float, *, device: Any, store: Any) -> Average:
    """An average that is nothing yet: its numbers are the weights', and count 0 from the first
    update on."""
    copies = ((name, _copied(weight, device)) for name, weight in weights.items())
    if store is None:
        return InMemory(copies)
    average = InStore(store, sigma)
    for name, copy in copies:
        average[name] = copy
    return average


def require_store(store: Any) -> None:
    """TypeError for what is none."""
    wanted = ("put", "get", "prefetch", "claim")
    if not all(callable(getattr(store, name, None)) for name in wanted):
        raise TypeError(
            f"got {store!r} as the store; give a memlab.offload.DiskStore(), or a HostStore()"
        )


def _copied(weight: Tensor, device: Any) -> Tensor:
    precision = torch.promote_types(weight.dtype, torch.float32)
    shape, where = weight.shape, weight.device if device is None else device
    return torch.empty(shape, dtype=precision, device=where).copy_(weight.detach())


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.dtype, tensor.device) == (other.dtype, other.device)


def _move_in_pieces(average: Tensor, weight: Tensor, share: float) -> None:
    to, of = average.view(-1), weight.reshape(-1)  # a copy only of channels_last and its like
    size = chunk_size_on(average.device)
    for start in chunk_starts(to, size):
        # No name for what is cast: it is gone before the next piece is.
        to[start : start + size].lerp_(of[start : start + size].to(to.device, to.dtype), share)
