"""Stage 3: a rank stores shards, and gathers whole weights only for the unit that runs.

    forward of a unit      gather its weights ── run it ── free them
    backward of a unit     gather them again ── run it ── free them ── reduce-scatter its gradients

A freed weight keeps its tensor and empties its storage. Tensors that autograd saved are views of
this storage, so backward finds the values there after the second gather. A unit's shards are
gathered into one flat buffer and copied into its weights, so both exist for a moment.

With `overlap` the next unit is gathered while the current one runs. The previous pass gives the
order, because all ranks gather units in the same order each time. The flat buffer of one unit then
lives longer. If the order changes, a gathered unit may go unused.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.internals.torch_internals import in_backward, tree_leaves
from memlab.zero.collectives import Pending
from memlab.zero.layout import matching_views
from memlab.zero.ranks import Rank
from memlab.zero.units import ROOT


class Gathering(NamedTuple):
    """A bucket whose all-gather has started."""

    whole: Tensor
    wait: Pending


class ShardedRank(Rank):
    """One rank of stage 3."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gathered: set[str] = set()
        self._ahead: dict[str, list[Gathering]] = {}  # prefetched and not used yet
        self._visited: list[str] = []  # the units gathered in this pass, in order
        self._orders: dict[bool, tuple[str, ...]] = {}  # of the last pass with / without grad
        self._trains = True
        super().__init__(*args, **kwargs)
        self._buckets_of: dict[str, list[int]] = {}
        for number, bucket in enumerate(self.plan.buckets):
            self._buckets_of.setdefault(bucket.unit, []).append(number)
        modules = dict(self.model.named_modules())
        for unit in self._buckets_of:
            self._add_hooks(unit, self.model if unit == ROOT else modules[unit])

    @torch.no_grad()
    def flatten_into_bucket(self, number: int) -> Tensor:
        """Copy this rank's chunks into one shard and empty the weights."""
        bucket = self.plan.buckets[number]
        device = self.parameters[bucket.weights[0].name].device
        shard = torch.zeros(bucket.shard_elements, dtype=bucket.dtype, device=device)
        for weight, start, stop, at in bucket.chunks(self.index):
            flat = self.parameters[weight.name].reshape(-1)
            shard[at : at + stop - start].copy_(flat[start:stop])
        for weight in bucket.weights:
            parameter = self.parameters[weight.name]
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            parameter.untyped_storage().resize_(0)
        self.comm.register_shard(self.index, number, shard)
        return nn.Parameter(shard, requires_grad=False)

    def begin_pass(self) -> None:
        """Keep the order of the previous pass for prefetching."""
        super().begin_pass()
        if self._visited:
            self._orders[self._trains] = tuple(self._visited)
        self._visited, self._trains = [], torch.is_grad_enabled()
        self._forget_ahead()

    def on_bucket_complete(self, number: int) -> None:
        """Free the unit if all its gradients are computed.

        A unit with frozen weights stays until the previous unit's backward begins, because frozen
        weights may still be needed.
        """
        unit = self.plan.buckets[number].unit
        weights = [w for n in self._buckets_of[unit] for w in self.plan.buckets[n].weights]
        if all(weight.trained and weight.name in self.seen_gradients for weight in weights):
            self._free(unit)

    def end_backward(self) -> None:
        """Free all units."""
        for unit in list(self._gathered):
            self._free(unit)
        self._forget_ahead()

    # -------------------------------------------------------------- gather and free a unit

    def _add_hooks(self, unit: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._gather(unit)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():  # a recompute: its backward follows
                return
            self._free(unit)
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._gather_in_backward(unit))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _gather_in_backward(self, unit: str) -> None:
        for other in self._gathered - {unit, ROOT}:
            if not any(
                w.trained and w.name not in self.seen_gradients for w in self._weights(other)
            ):
                self._free(other)
        self._gather(unit)

    @torch.no_grad()
    def _gather(self, unit: str) -> None:
        if unit in self._gathered:
            return
        self._gathered.add(unit)
        ahead = self._ahead.pop(unit, [])
        for number in self._buckets_of[unit]:
            whole, wait = ahead.pop(0) if ahead else self._start_gathering(number)
            wait()
            for slot in self.plan.buckets[number].slots:
                weight = self.parameters[slot.weight.name]
                weight.untyped_storage().resize_(weight.numel() * weight.element_size())
                # Copy through `.data`, or autograd would see an in-place change of saved tensors.
                views = matching_views(self.plan.buckets[number], slot, whole, weight.data)
                for bucket_view, weight_view in views:
                    weight_view.copy_(bucket_view)
            del whole
        if self.overlap:
            self._prefetch_after(unit)

    def _start_gathering(self, number: int) -> Gathering:
        bucket, shard = self.plan.buckets[number], self.shards[number]
        whole = shard.new_empty(bucket.padded_elements)
        whole[bucket.span(self.index)].copy_(shard)
        return Gathering(whole, self.comm.all_gather(self.index, number, whole))

    def _prefetch_after(self, unit: str) -> None:
        """Start gathering the unit that followed this one in the previous pass."""
        place, order = len(self._visited), self._orders.get(self._trains, ())
        self._visited.append(unit)
        following = order[place + 1 : place + 2] if order[place : place + 1] == (unit,) else ()
        for other in following:
            if other not in self._gathered and other not in self._ahead:
                self._ahead[other] = [self._start_gathering(n) for n in self._buckets_of[other]]

    def _forget_ahead(self) -> None:
        """Drop unused prefetches after their all-gathers finish."""
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
