"""Offloaded activations: what backward needs waits in a store, not on the device.

Saves    what is saved for backward, each storage once, but for weights and small tensors.
Costs    its bytes there and back; some once more, where operators that are far apart saved one
         storage. While backward uses one, the next is on its way; one in between may be held.
Source   Rhu et al. 2016 (vDNN), arXiv 1602.08124; torch's `save_on_cpu` without prefetching, which
         moves what several operators save of one tensor several times, and weights too.

    with offloaded_activations(store):
        loss = model(tokens, targets)
    loss.backward()

Each operator's saved tensors are asked for in the order in which it saved them, the operators' in
reverse. All that they save is noted with its operator's number, so it is known what comes next.

A tensor is in the store for as long as a graph wants it: backward lets go of what it has used,
unless it is told to retain it, and then the next backward pass brings it again.

Of two hooks the inner one counts. Around a checkpoint: its inputs wait in the store, and what runs
again begins with what comes back of them. Inside of a checkpoint: what that would have forgotten is
offloaded, and nothing is computed again. Around or inside of compressed activations, the inner one
has it.
"""

import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from memlab.internals.saved_tensors import Decode, Encode, TensorInfo, encoded
from memlab.internals.torch_internals import current_autograd_node, get_sequence_nr
from memlab.offload.stores import Store

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

    A storage of fewer than `minimum` numbers stays. So do weights, frozen ones too, and, if the
    `model` is given, its buffers, which look like any data.

    Any number of backward passes. ValueError for a minimum below 1.
    """
    if not isinstance(store, Store):
        raise TypeError(f"got {store!r} as the store; give a memlab.offload.DiskStore()")
    if minimum < 1:
        raise ValueError(f"got minimum={minimum} numbers; give at least 1")
    offload = _Offload(store, minimum, model)
    with encoded(offload.choose, offload.note):
        yield offload.report


class _Use(NamedTuple):
    """An operator's hold on a storage, in the order in which backward comes to it."""

    minus_node: int  # the number of the operator's node, which backward counts down
    number: int  # the order in which a node asks for what it saved
    storage: int


class _Offload:
    """The storages of one `with`, by their numbers."""

    def __init__(self, store: Store, minimum: int, model: nn.Module | None) -> None:
        self.store, self.minimum, self.report = store, minimum, Report()
        kept = () if model is None else model.buffers()
        self._kept = {tensor.untyped_storage()._cdata for tensor in kept}
        self._uses: list[_Use] = []  # sorted
        self._here: dict[int, WeakIdRef] = {}  # what was brought, for as long as it lives
        self._held: tuple[int, torch.UntypedStorage] | None = None  # here, and wanted next
        self._ahead: int | None = None  # asked for last

    def choose(self, facts: TensorInfo) -> Encode | None:
        """What is worth it."""
        return None if facts.is_weight or facts.numel < self.minimum else self.encode

    def encode(self, numbers: Tensor) -> Decode | None:
        """Put a storage into the store; what brings it back."""
        if numbers.untyped_storage()._cdata in self._kept:
            return None
        storage = next(_NUMBERS)
        self.store.put(_key(storage), numbers)
        self.report.storages += 1
        self.report.bytes += numbers.nbytes
        return _Offloaded(self, storage)

    def note(self, decode: Decode) -> "_Hold":
        """An operator saves what this brings back."""
        assert isinstance(decode, _Offloaded)
        # The node is made, and has taken its number, before it saves.
        node = get_sequence_nr() - 1
        use = _Use(-node, next(_NUMBERS), decode.storage)
        insort(self._uses, use)
        return _Hold(self, use)

    def bring(self, storage: int) -> Tensor:
        """The storage's numbers, and the next ones on their way."""
        numbers = self.store.get(_key(storage))
        self._here[storage] = WeakIdRef(numbers.untyped_storage())
        self._look_ahead(storage)
        return numbers

    def _look_ahead(self, storage: int) -> None:
        """Of what comes next, hold the first if it is here: before its time it might die, and would
        be brought again. Ask for the first that is not."""
        self._held = None
        for use in self._after(storage):
            found = self._here.get(use.storage)
            there = None if found is None else found()
            if there is None:
                return self._ask_for(use.storage)
            if self._held is None:
                self._held = use.storage, there

    def _ask_for(self, storage: int) -> None:
        """Nothing else is on its way then: what backward has passed by, no loss came of."""
        if self._ahead is not None and self._ahead != storage:
            self.store.cancel(_key(self._ahead))
        self._ahead = storage
        self.store.prefetch(_key(storage))

    def _after(self, storage: int) -> Iterator[_Use]:
        """The uses that backward comes to after the one for which it wants the storage."""
        node = current_autograd_node()
        if node is None:  # somebody looks at what was saved
            return
        of_node = -node._sequence_nr()
        later = islice(self._uses, bisect_left(self._uses, (of_node,)), None)
        asked = False
        for use in later:
            if asked or use.minus_node != of_node:
                yield use
            asked = asked or use.storage == storage

    def let_go_of(self, use: _Use) -> None:
        """An operator has done with it, or is no more."""
        del self._uses[bisect_left(self._uses, use)]

    def let_go(self, storage: int) -> None:
        """No graph wants it any more."""
        self._here.pop(storage, None)
        if self._ahead == storage:
            self._ahead = None
        if self._held is not None and self._held[0] == storage:
            self._held = None
        self.store.discard(_key(storage))


def _key(storage: int) -> str:
    return f"activation/{storage}"


class _Hold:
    """An operator's, on what stands in a tensor's place."""

    __slots__ = ("__weakref__",)

    def __init__(self, offload: _Offload, use: _Use) -> None:
        weakref.finalize(self, offload.let_go_of, use).atexit = False


class _Offloaded:
    """What the graph holds in a storage's place."""

    __slots__ = ("__weakref__", "_offload", "storage")

    def __init__(self, offload: _Offload, storage: int) -> None:
        self._offload, self.storage = offload, storage
        weakref.finalize(self, offload.let_go, storage).atexit = False

    def __call__(self) -> Tensor:
        return self._offload.bring(self.storage)
