"""Averages of a model's weights by name, in memory or in a store.

Saves    in a store: all bytes of an average except two tensors.
Costs    in a store: each update reads and writes all its bytes. Updates can be rare, because one
         update with the right decay replaces ten single steps.
Source   memlab.offload's stores; any object with put, get, prefetch and claim works.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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


def move_towards(
    averages: Sequence[Average], weights: Mapping[str, Tensor], shares: Sequence[float]
) -> None:
    """Compute avg ← avg + share·(weights − avg) in place, for each average and its share.

    Tensors with the same dtype and device as their weight use one fused call without temporaries.
    Other weights are cast or copied to the averages' device in chunks, once for all averages.
    Averages in a store are updated one tensor at a time.
    """
    in_memory = [
        (average, share)
        for average, share in zip(averages, shares, strict=True)
        if isinstance(average, InMemoryAverage)
    ]
    _move_in_memory(in_memory, weights)
    for average, share in zip(averages, shares, strict=True):
        if isinstance(average, StoredAverage):
            _move_stored(average, weights, share)


def _move_in_memory(
    averages: Sequence[tuple[InMemoryAverage, float]], weights: Mapping[str, Tensor]
) -> None:
    other: dict[str, list[tuple[Tensor, float]]] = {}
    for average, share in averages:
        alike = []
        for name, tensor in average.items():
            if _same_kind(tensor, weights[name]):
                alike.append(name)
            else:
                other.setdefault(name, []).append((tensor, share))
        if alike:
            foreach_lerp_([average[n] for n in alike], [weights[n] for n in alike], share)
    # A chunk moves once for all averages, in the weight's own dtype: 4 bytes per float32 weight and
    # 2 per bfloat16 weight. For four averages this is 2.2 × as fast as one by one, for one average
    # it gains nothing (1.05 ×).
    for name, several in other.items():
        _lerp_in_chunks(several, weights[name])


def _move_stored(average: StoredAverage, weights: Mapping[str, Tensor], share: float) -> None:
    for name, tensor in average.iter_tensors():
        _move_in_memory([(InMemoryAverage({name: tensor}), share)], weights)
        average[name] = tensor
        del tensor  # at most this tensor and the prefetched one are in memory


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


def _lerp_in_chunks(averages: Sequence[tuple[Tensor, float]], weight: Tensor) -> None:
    """Update one tensor of several averages, which share dtype and device."""
    first, _ = averages[0]
    of = weight.reshape(-1)  # copies only layouts such as channels_last
    size = chunk_size_on(first.device)
    for start in chunk_starts(of, size):
        # Send first, then cast: 16-bit weights cross the bus as 16 bits, and the cast chunk is on
        # the averages' device. Don't name the chunk, so that it is freed before the next one.
        _lerp_each(averages, start, of[start : start + size].to(first.device).to(first.dtype))


def _lerp_each(averages: Sequence[tuple[Tensor, float]], start: int, chunk: Tensor) -> None:
    for average, share in averages:
        average.view(-1)[start : start + len(chunk)].lerp_(chunk, share)
