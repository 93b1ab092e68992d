"""Stage 3: a rank that holds shards, and whole weights of the units that are at work alone.

    forward of a unit      gather its weights ── run it ── free them
    backward of a unit     gather them again ── run it ── free them ── reduce, scatter its gradients

A weight that is freed keeps its tensor, whose storage is emptied: what autograd saved of it is a
view of that storage, and finds the numbers there again in backward. A unit's shards are gathered
into one run of numbers and copied into its weights, so for a moment they are there twice.

With `overlap` the next unit is gathered while one is at work. Which is the next is known from the
pass before: units are gathered in the same order each time, on all ranks. That run of numbers, of
one unit, is then held for longer. Where the order changes, a unit may be gathered in vain.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.internals.torch_internals import in_backward, tree_leaves
from memlab.zero.collectives import Pending
from memlab.zero.layout import overlaps
from memlab.zero.ranks import Rank
from memlab.zero.units import ROOT


class Gathering(NamedTuple):
    """A bucket that is being gathered."""

    whole: Tensor
    wait: Pending


class ShardedRank(Rank):
    """One rank of stage 3."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gathered: set[str] = set()
        self._ahead: dict[str, list[Gathering]] = {}  # on its way, and not asked for yet
        self._visited: list[str] = []  # the units gathered in this pass, in order
        self._orders: dict[bool, tuple[str, ...]] = {}  # those of the last, by whether it trained
        self._trains = True
        super().__init__(*args, **kwargs)
        self._buckets_of: dict[str, list[int]] = {}
        for number, bucket in enumerate(self.plan.buckets):
            self._buckets_of.setdefault(bucket.unit, []).append(number)
        modules = dict(self.model.named_modules())
        for unit in self._buckets_of:
            self._surround(unit, self.model if unit == ROOT else modules[unit])

    @torch.no_grad()
    def take_over(self, number: int) -> Tensor:
        """Copy the rank's pieces into one shard, and empty the weights."""
        bucket = self.plan.buckets[number]
        device = self.parameters[bucket.weights[0].name].device
        shard = torch.zeros(bucket.shard_elements, dtype=bucket.dtype, device=device)
        for weight, start, stop, at in bucket.pieces(self.index):
            flat = self.parameters[weight.name].reshape(-1)
            shard[at : at + stop - start].copy_(flat[start:stop])
        for weight in bucket.weights:
            parameter = self.parameters[weight.name]
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            parameter.untyped_storage().resize_(0)
        self.wire.publish(self.index, number, shard)
        return nn.Parameter(shard, requires_grad=False)

    def begin_pass(self) -> None:
        """What was gathered in the pass before will be again."""
        super().begin_pass()
        if self._visited:
            self._orders[self._trains] = tuple(self._visited)
        self._visited, self._trains = [], torch.is_grad_enabled()
        self._forget_ahead()

    def used(self, number: int) -> None:
        """Free the unit: a weight whose gradient is there is not needed any more. One that is not
        trained may be, until the unit before is at work."""
        unit = self.plan.buckets[number].unit
        weights = [w for n in self._buckets_of[unit] for w in self.plan.buckets[n].weights]
        if all(weight.trained and weight.name in self.arrived for weight in weights):
            self._free(unit)

    def end_backward(self) -> None:
        """Nothing stays gathered."""
        for unit in list(self._gathered):
            self._free(unit)
        self._forget_ahead()

    # -------------------------------------------------------------- a unit at work

    def _surround(self, unit: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._gather(unit)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():  # computed again: its backward is next
                return
            self._free(unit)
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._gather_in_backward(unit))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _gather_in_backward(self, unit: str) -> None:
        for other in self._gathered - {unit, ROOT}:
            if not any(w.trained and w.name not in self.arrived for w in self._weights(other)):
                self._free(other)
        self._gather(unit)

    @torch.no_grad()
    def _gather(self, unit: str) -> None:
        if unit in self._gathered:
            return
        self._gathered.add(unit)
        ahead = self._ahead.pop(unit, [])
        for number in self._buckets_of[unit]:
            whole, wait = ahead.pop(0) if ahead else self._begin_to_gather(number)
            wait()
            for slot in self.plan.buckets[number].slots:
                weight = self.parameters[slot.weight.name]
                weight.untyped_storage().resize_(weight.numel() * weight.element_size())
                # Through `.data`: autograd must not take it for a change of what it saved.
                for there, here in overlaps(self.plan.buckets[number], slot, whole, weight.data):
                    here.copy_(there)
            del whole
        if self.overlap:
            self._look_ahead(unit)

    def _begin_to_gather(self, number: int) -> Gathering:
        bucket, shard = self.plan.buckets[number], self.shards[number]
        whole = shard.new_empty(bucket.padded_elements)
        whole[bucket.span(self.index)].copy_(shard)
        return Gathering(whole, self.wire.all_gather(self.index, number, whole))

    def _look_ahead(self, unit: str) -> None:
        """Begin to gather the unit that came after this one in the pass before."""
        place, order = len(self._visited), self._orders.get(self._trains, ())
        self._visited.append(unit)
        following = order[place + 1 : place + 2] if order[place : place + 1] == (unit,) else ()
        for other in following:
            if other not in self._gathered and other not in self._ahead:
                self._ahead[other] = [self._begin_to_gather(n) for n in self._buckets_of[other]]

    def _forget_ahead(self) -> None:
        """Drop what was gathered in vain, when it is no longer written to."""
        for gatherings in self._ahead.values():
            for gathering in gatherings:
                gathering.wait()
        self._ahead.clear()

    def _free(self, unit: str) -> None:
        self._gathered.discard(unit)
        for weight in self._weights(unit):
            self.parameters[weight.name].untyped_storage().resize_(0)

    def _weights(self, unit: str) -> list[Any]:
        return [w for number in self._buckets_of[unit] for w in self.plan.buckets[number].weights]
