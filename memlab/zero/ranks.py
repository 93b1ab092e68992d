"""One rank: its model, what it holds of weights, gradients and state, and its step.

Stages 0, 1 and 2 are a `WholeRank`: the weights are views of flat buckets, of which the rank steps
its shard, and gathers the others' afterwards. Stage 3 is a `ShardedRank` (memlab.zero.sharded).

Stages 0 and 1 add each gradient to its bucket as soon as backward has made it, and drop it. Stages
2 and 3 wait until all gradients of a bucket are there, put them together, reduce them at once and
keep their shard of the sum.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.zero.collectives import Wire
from memlab.zero.elementwise import with_weights
from memlab.zero.layout import overlaps
from memlab.zero.partitioning import Bucket, Partition, Slot

SUB_GROUP = 2**26  # numbers that the optimizer steps as one: what it makes on the way is as large

SumOfLosses = Callable[[nn.Module, Any], tuple[Tensor, "float | Tensor"]]


class Stepped(NamedTuple):
    """What the optimizer of a rank steps as one: a part of the rank's shard of a bucket, or a
    float32 copy of it."""

    bucket: int
    span: slice  # in the shard
    parameter: nn.Parameter


class Rank:
    """What the stages have in common; a bucket is known by its number in the plan."""

    def __init__(
        self,
        index: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Partition,
        wire: Wire,
        *,
        master_weights: bool = False,
    ) -> None:
        self.index, self.plan, self.wire = index, plan, wire
        self.model = model
        self.wholes: list[Tensor] = []  # of the buckets that are whole all the time
        self.parameters = dict(self.model.named_parameters())
        self.gradients: dict[int, Tensor] = {}  # whole, while they accumulate
        self.shard_gradients: dict[int, Tensor] = {}
        self.arrived: set[str] = set()  # weights whose gradient came in this backward pass
        self._trained = [{w.name for w in b.weights if w.trained} for b in plan.buckets]
        self.shards = [self.take_over(number) for number in range(len(plan.buckets))]
        self._watch_gradients()
        self.master_weights = master_weights
        self.stepped = [
            step
            for number, bucket in enumerate(plan.buckets)
            if bucket.trained
            for step in self._stepped(number, bucket)
        ]
        self.optimizer = with_weights(optimizer, self._by_group(len(optimizer.param_groups)))

    # -------------------------------------------------------------- what each stage brings

    def take_over(self, number: int) -> Tensor:
        """Move the bucket's weights to where this rank is to hold them; the shard that it steps."""
        raise NotImplementedError

    def used(self, number: int) -> None:
        """All gradients of the bucket were made in this backward pass, and none is sent yet."""

    def end_backward(self) -> None:
        """A backward pass is over."""

    def reduce(self) -> None:
        """After the last backward pass: send the gradients that were not sent in it."""

    def gather(self) -> None:
        """After the optimizer's step: get the weights that other ranks have stepped."""

    # -------------------------------------------------------------- forward and backward

    def run(self, micro_batch: Any, sum_of_losses: SumOfLosses, scaler: Any) -> tuple[float, float]:
        """Forward and backward; the sum of the losses and the number of tokens in it."""
        self.arrived.clear()
        loss, tokens = sum_of_losses(self.model, micro_batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        missing = set().union(*self._trained) - self.arrived
        if missing:
            raise ValueError(
                f"backward made no gradient of {', '.join(sorted(missing))}; each rank sends the "
                f"gradients of all weights: call requires_grad_(False) of those that are not used"
            )
        self.end_backward()
        return float(loss.detach()), float(tokens)

    def _watch_gradients(self) -> None:
        for number, bucket in enumerate(self.plan.buckets):
            for slot in bucket.slots:
                if slot.weight.trained:
                    weight = self.parameters[slot.weight.name]
                    weight.register_post_accumulate_grad_hook(self._on_gradient(number, slot))

    def _on_gradient(self, number: int, slot: Slot) -> Callable[[Tensor], None]:
        def on_gradient(weight: Tensor) -> None:
            self.arrived.add(slot.weight.name)
            if not self.reduces_in_backward:
                self._add(number, slot)
            elif self._trained[number] <= self.arrived:
                self.used(number)
                for each in self.plan.buckets[number].slots:
                    self._add(number, each)
                self.reduce_scatter(number)

        return on_gradient

    @property
    def reduces_in_backward(self) -> bool:
        """Bucket by bucket, as soon as all gradients of one are there."""
        return self.plan.stage >= 2

    @torch.no_grad()
    def _add(self, number: int, slot: Slot) -> None:
        """Add a weight's gradient to the whole bucket's, and drop it."""
        weight = self.parameters[slot.weight.name]
        gradient, weight.grad = weight.grad, None
        bucket, whole = self.plan.buckets[number], self.gradients.get(number)
        if whole is None:
            # Zeros, because the padding is sent and stepped too.
            whole = torch.zeros(bucket.padded_elements, dtype=bucket.dtype, device=weight.device)
            self.gradients[number] = whole
        if gradient is not None:
            for there, here in overlaps(bucket, slot, whole, gradient.contiguous()):
                there.add_(here)

    @torch.no_grad()
    def reduce_scatter(self, number: int) -> None:
        """Send the bucket's gradients, and keep the rank's own shard of them, as large as it is:
        the sum is written into it when all ranks have run."""
        bucket, whole = self.plan.buckets[number], self.gradients.pop(number)
        self.wire.reduce_scatter(self.index, number, whole)
        if number not in self.shard_gradients:
            self.shard_gradients[number] = whole[bucket.span(self.index)].clone()

    def receive(self) -> None:
        """Write the sums over all ranks into what this rank keeps of them."""
        for number, shard in self.shard_gradients.items():
            self.wire.summed(number, shard, self.owned(number))

    def owned(self, number: int) -> slice:
        """Where in the whole bucket lies what this rank steps."""
        return self.plan.buckets[number].span(self.index)

    # -------------------------------------------------------------- the step

    @torch.no_grad()
    def hand_to_optimizer(self, divisor: float) -> None:
        """Give the optimizer the rank's gradients, divided."""
        self.gradients.clear()
        for number, steps in groupby(self.stepped, key=lambda step: step.bucket):
            shard = self.shard_gradients.pop(number)
            for _, span, parameter in steps:
                # In float32 it is another tensor, and the bucket's shard is dropped after it.
                parameter.grad = shard[span].float() if self.master_weights else shard[span]
                parameter.grad.div_(divisor)

    @torch.no_grad()
    def overflows(self) -> float:
        """1.0 where one of the rank's gradients is inf or nan, else 0.0."""
        return 0.0 if all(map(_is_finite, self._own_gradients())) else 1.0

    def unscale(self, scaler: Any, overflowed: bool) -> None:
        """Divide the gradients by the scale. Where those of another rank overflowed, this one's
        are made to: its scaler skips the step and lowers the scale as theirs do."""
        if overflowed:
            self.stepped[0].parameter.grad.view(-1)[:1].fill_(inf)
        scaler.unscale_(self.optimizer)

    @torch.no_grad()
    def squares(self) -> float:
        """The sum of the squares of the rank's gradients: its part of the global norm."""
        norms = [float(torch.linalg.vector_norm(g)) for g in self._own_gradients()]
        return sum(norm**2 for norm in norms)

    @torch.no_grad()
    def clip(self, coefficient: float) -> None:
        """Shorten the gradients."""
        for gradient in self._own_gradients():
            gradient.mul_(coefficient)

    def make_state(self) -> None:
        """Step once by gradients of zeros, which makes the optimizer's state."""
        for _, _, parameter in self.stepped:
            parameter.grad = torch.zeros_like(parameter)
        self.step(None)

    def step(self, scaler: Any) -> None:
        """Step what is owned, and drop the gradients."""
        self.optimizer.step() if scaler is None else scaler.step(self.optimizer)
        for number, span, parameter in self.stepped:
            parameter.grad = None
            if self.master_weights:
                with torch.no_grad():
                    self.shards[number][span].copy_(parameter)

    def _own_gradients(self) -> list[Tensor]:
        return [step.parameter.grad for step in self.stepped]

    def _stepped(self, number: int, bucket: Bucket) -> list[Stepped]:
        found = []
        for _, span in in_sub_groups(self.spans(bucket)):
            part = self.shards[number].detach()[span]
            copy_ = part.to(torch.float32, copy=True) if self.master_weights else part
            found.append(Stepped(number, span, nn.Parameter(copy_)))
        return found

    def spans(self, bucket: Bucket) -> list[tuple[int, slice]]:
        """(parameter group, where in the shard) of what is stepped."""
        return bucket.stepped()

    def _by_group(self, groups: int) -> list[list[nn.Parameter]]:
        by_group: list[list[nn.Parameter]] = [[] for _ in range(groups)]
        trained = (bucket for bucket in self.plan.buckets if bucket.trained)
        wanted = (group for b in trained for group, _ in in_sub_groups(self.spans(b)))
        for group, step in zip(wanted, self.stepped, strict=True):
            by_group[group].append(step.parameter)
        return by_group


def in_sub_groups(spans: Iterable[tuple[int, slice]]) -> Iterator[tuple[int, slice]]:
    """The spans, in runs of SUB_GROUP numbers and a rest."""
    for group, span in spans:
        for start in range(span.start, max(span.stop, span.start + 1), SUB_GROUP):
            yield group, slice(start, min(start + SUB_GROUP, span.stop))


class WholeRank(Rank):
    """Stages 0, 1 and 2: all weights whole, in flat buckets."""

    @torch.no_grad()
    def take_over(self, number: int) -> Tensor:
        """Make the weights views of one flat storage."""
        bucket = self.plan.buckets[number]
        device = self.parameters[bucket.weights[0].name].device
        whole = torch.zeros(bucket.padded_elements, dtype=bucket.dtype, device=device)
        for slot in bucket.slots:
            weight = self.parameters[slot.weight.name]
            view = whole[slot.at : slot.at + slot.run].view(weight.shape)
            weight.data = view.copy_(weight)
        self.wholes.append(whole)
        shard = whole[self.owned(number)]
        self.wire.publish(self.index, number, shard)
        return shard

    def owned(self, number: int) -> slice:
        """All of it in stage 0."""
        return slice(None) if self.plan.stage == 0 else super().owned(number)

    def spans(self, bucket: Bucket) -> list[tuple[int, slice]]:
        """All of the bucket in stage 0."""
        if self.plan.stage == 0:
            return [(bucket.weights[0].group, slice(0, bucket.padded_elements))]
        return super().spans(bucket)

    @torch.no_grad()
    def reduce(self) -> None:
        """Stages 0 and 1 have added up all micro-batches; the sum goes to where they lie."""
        if self.reduces_in_backward:
            return
        for number, whole in self.gradients.items():
            if self.plan.stage == 0:
                self.wire.all_reduce(self.index, number, whole)
            else:
                self.wire.reduce_scatter(self.index, number, whole)
            self.shard_gradients[number] = whole[self.owned(number)]

    @torch.no_grad()
    def gather(self) -> None:
        """In stage 0 every rank has stepped everything."""
        if self.plan.stage > 0:
            for number, whole in enumerate(self.wholes):
                self.wire.all_gather(self.index, number, whole)


def _is_finite(gradient: Tensor) -> bool:
    """In one pass that takes no memory: of a nan both extremes are nan."""
    return not gradient.numel() or all(isfinite(n.item()) for n in torch.aminmax(gradient))
