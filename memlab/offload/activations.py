"""Offloaded activations: what backward needs waits in a store, not on the device.

Saves    what is saved for backward, each storage once, but for weights and small tensors.
Costs    its bytes there and back; back once more where operators that are far apart saved one
         storage. Backward asks for the tensors in about the reverse of the order in which they were
         saved, so while one is used the next is on its way.
Source   Rhu et al. 2016 (vDNN), arXiv 1602.08124; torch's `save_on_cpu` without prefetching, which
         moves what several operators save of one tensor several times, and weights too.

    with offloaded_activations(store):
        loss = model(tokens, targets)
    loss.backward()

Each operator's saved tensors are asked for in the order in which it saved them, the operators' in
reverse. So that is the order in which they are brought: one ahead of what was asked for last.

A tensor is in the store for as long as a graph wants it: backward lets go of what it has used,
unless it is told to retain it, and then the next backward pass brings it again.

Of two hooks the inner one counts. Around a checkpoint: its inputs wait in the store, and what runs
again begins with what comes back of them. Inside of a checkpoint: what that would have forgotten is
offloaded, and nothing is computed again. Around or inside of compressed activations, the inner one
has it.
"""

import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from memlab.offload.stores import Store
from memlab.saved import Decode, Encode, Facts, encoded

MINIMUM = 4096  # numbers; a smaller tensor costs more to move than to keep
_NUMBERS = count()


@dataclass
class Report:
    """What was offloaded inside one `with`."""

    storages: int = 0
    bytes: int = 0


@contextmanager
def offloaded_activations(
    store: Store, *, minimum: int = MINIMUM, model: nn.Module | None = None
) -> Iterator[Report]:
    """Keep what is saved for backward inside `with` in the store; values are those without.

    A storage of fewer than `minimum` numbers stays. So do weights that want a gradient, and, if the
    `model` is given, all its parameters and buffers: frozen weights (LoRA's) look like any data.

    Any number of backward passes. ValueError for a minimum below 1.
    """
    if not isinstance(store, Store):
        raise TypeError(f"got {store!r} as the store; give a memlab.offload.DiskStore()")
    if minimum < 1:
        raise ValueError(f"got minimum={minimum} numbers; give at least 1")
    offload = _Offload(store, minimum, model)
    with encoded(offload.choose):
        yield offload.report


class _Place(NamedTuple):
    """Of a storage among those that wait: in the order in which backward comes to them."""

    minus_node: int  # the number of the operator's node, which backward counts down
    number: float


class _Offload:
    """The storages of one `with`."""

    def __init__(self, store: Store, minimum: int, model: nn.Module | None) -> None:
        self.store, self.minimum, self.report = store, minimum, Report()
        kept = () if model is None else (*model.parameters(), *model.buffers())
        self._kept = {tensor.untyped_storage()._cdata for tensor in kept}
        self._waiting: list[_Place] = []  # sorted
        self._here: dict[_Place, WeakIdRef] = {}  # what was brought, for as long as it lives
        self._ahead: _Place | None = None

    def choose(self, facts: Facts) -> Encode | None:
        """What is worth it."""
        return None if facts.is_weight or facts.numbers < self.minimum else self.encode

    def encode(self, numbers: Tensor) -> Decode | None:
        """Put a storage into the store; what brings it back."""
        if numbers.untyped_storage()._cdata in self._kept:
            return None
        # The node is made, and has taken its number, before it saves.
        place = _Place(-(torch._C._autograd._get_sequence_nr() - 1), next(_NUMBERS))
        self.store.put(_key(place), numbers)
        insort(self._waiting, place)
        self.report.storages += 1
        self.report.bytes += numbers.nbytes
        return _Offloaded(self, place)

    def bring(self, place: _Place) -> Tensor:
        """The storage's numbers, and the next ones on their way."""
        numbers = self.store.get(_key(place))
        self._here[place] = WeakIdRef(numbers.untyped_storage())
        if self._ahead == place:
            self._ahead = None
        if self._ahead is None and (following := self._after(place)) is not None:
            self._ahead = following
            self.store.prefetch(_key(following))
        return numbers

    def _after(self, place: _Place) -> _Place | None:
        """What backward will want next. A storage that several operators saved is asked for by the
        last of them first, so it is their place in the graph that counts."""
        node = torch._C._current_autograd_node()
        if node is not None and -node._sequence_nr() != place.minus_node:
            place = _Place(-node._sequence_nr(), inf)
        later = islice(self._waiting, bisect_right(self._waiting, place), None)
        return next((other for other in later if not self._is_here(other)), None)

    def _is_here(self, place: _Place) -> bool:
        found = self._here.get(place)
        return found is not None and found() is not None

    def let_go(self, place: _Place) -> None:
        """No graph wants it any more."""
        del self._waiting[bisect_left(self._waiting, place)]
        self._here.pop(place, None)
        if self._ahead == place:
            self._ahead = None
        self.store.discard(_key(place))


def _key(place: _Place) -> str:
    return f"activation/{place.number}"


class _Offloaded:
    """What the graph holds in a storage's place."""

    __slots__ = ("__weakref__", "_offload", "_place")

    def __init__(self, offload: _Offload, place: _Place) -> None:
        self._offload, self._place = offload, place
        weakref.finalize(self, offload.let_go, place).atexit = False

    def __call__(self) -> Tensor:
        return self._offload.bring(self._place)
