"""Fold allocations that happen only because of the meter.

Under a dispatch mode, autograd computes `old + new` where it would otherwise run `old += new`. The
meter sees a new storage, and the old one dies right after. Such a pair is removed from the stream,
and the new storage continues the old one. observer.py lists the affected operators.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from memlab.metering.context import Context
from memlab.metering.frames import called_by_engine
from memlab.metering.observer import (
    COMPOSITE_TRACKER,
    OUT_OF_PLACE,
    is_formula_step,
    is_in_place_without_mode,
)
from memlab.metering.registry import REGISTRY, Storage
from memlab.metering.stream import Change, ChangeStream

aten = torch.ops.aten


class PendingPair(NamedTuple):
    """An operator that, without the meter, might write its result into its first input `old`."""

    func: Any
    old: Storage
    birth: Change  # the result's allocation


class Folding:
    """Keep the last operator's result pending until the next operator decides whether to fold it.

    Storages that need no folding are reported with `on_birth(record)`.
    """

    def __init__(
        self, stream: ChangeStream, context: Context, on_birth: Callable[[Storage], None]
    ) -> None:
        self._stream, self._context, self._on_birth = stream, context, on_birth
        self._pending: PendingPair | None = None

    def hold(self, func: Any, tensors: list[torch.Tensor], birth: Change) -> bool:
        """Make a result pending if it may replace the first input. Returns whether it did."""
        if func not in OUT_OF_PLACE or not tensors:
            return False
        found: list[Any] = [REGISTRY.find(tensor) for tensor in tensors]
        old, *others = found
        # Folding each of the engine's `add`s whose first input dies next would be too simple: in a
        # tiny GPT it folds 12 sums, but autograd adds only 4 in place
        # (test_the_meter_equals_a_recording_without_it).
        if old in others or not self._is_in_place_without_mode(func, tensors[0], old, birth.record):
            return False
        self._pending = PendingPair(func, old, birth)
        return True

    def close(self, func: Any = None, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Fold the pending result into its input if the input died right after the operator.

        `func` and `tensors` are the next operator and its inputs.
        """
        pair, self._pending = self._pending, None
        if pair is None:
            return
        new = pair.birth.record
        # Other storages may die too, so the two changes need not be neighbours in the stream.
        death = self._stream.death_of(pair.old)
        is_input = any(REGISTRY.find(tensor) is new for tensor in tensors)
        in_formula = is_input and is_formula_step(pair.func, func) and self._is_in_node(new)
        if death is None or in_formula or not new.alive:
            self._on_birth(new)
        else:
            self._stream.fold(pair.old, pair.birth, death)

    def _is_in_place_without_mode(
        self, func: Any, first: torch.Tensor, old: Storage, new: Storage
    ) -> bool:
        if COMPOSITE_TRACKER.depth:
            return func is aten.add.Tensor
        if new.phase != "backward" or torch.is_grad_enabled() or not called_by_engine():
            return False
        return is_in_place_without_mode(func, first, old, new, self._context.node())

    def _is_in_node(self, record: Storage) -> bool:
        """Return whether backward is still evaluating the node that made the storage."""
        node = self._context.node()
        return node is not None and record.node == node._sequence_nr()
