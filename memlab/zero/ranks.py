"""One rank: its model, what it holds of weights, gradients and state, and its step.

Stages 0, 1 and 2 are a `WholeRank`: the weights are views of flat buckets, of which the rank steps
its shard, and gathers the others' afterwards. Stage 3 is a `ShardedRank` (memlab.zero.sharded).

Stages 0 and 1 add each gradient to its bucket as soon as backward has made it, and drop it. Stages
2 and 3 wait until all gradients of a bucket are there, put them together, reduce them at once and
keep their shard of the sum.

With `overlap`, what is sent is waited for late: the sums of a bucket when the next one is put
together (stages 2 and 3) or after backward (0 and 1, which begin in the last backward pass).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.zero.collectives import Pending, Wire
from memlab.zero.elementwise import with_weights
from memlab.zero.layout import overlaps
from memlab.zero.partitioning import Bucket, Partition, Piece, Slot

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
        overlap: bool = False,
    ) -> None:
        self.index, self.plan, self.wire = index, plan, wire
        self.overlap = overlap
        self.last = True  # whether the next backward pass is the last before the step
        self.model = model
        self.wholes: list[Tensor] = []  # of the buckets that are whole all the time
        self.parameters = dict(self.model.named_parameters())
        self.gradients: dict[int, Tensor] = {}  # whole, while they accumulate
        self.shard_gradients: dict[int, Tensor] = {}
        self.in_flight: list[tuple[int, Tensor, Pending]] = []  # whole buckets on the wire
        self.arrived: set[str] = set()  # weights whose gradient came in this backward pass
        self._ended = False  # this pass
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
        self.begin_pass()
        loss, tokens = _two(sum_of_losses(self.model, micro_batch))
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.end_pass()
        return float(loss.detach()), float(tokens)

    def begin_pass(self) -> None:
        """Before a forward pass."""
        self.arrived.clear()
        self._ended = False

    def end_pass(self) -> None:
        """After its backward pass; the second call does nothing."""
        if self._ended:
            return
        self._ended = True
        missing = set().union(*self._trained) - self.arrived
        self.arrived.clear()
        if missing:
            raise ValueError(
                f"backward made no gradient of {', '.join(sorted(missing))}; each rank sends the "
                f"gradients of all weights: call requires_grad_(False) of those that are not used"
            )
        self.end_backward()

    def _watch_gradients(self) -> None:
        for number, bucket in enumerate(self.plan.buckets):
            for slot in bucket.slots:
                if slot.weight.trained:
                    weight = self.parameters[slot.weight.name]
                    weight.register_post_accumulate_grad_hook(self._on_gradient(number, slot))

    def _on_gradient(self, number: int, slot: Slot) -> Callable[[Tensor], None]:
        def on_gradient(weight: Tensor) -> None:
            self.arrived.add(slot.weight.name)
            self._ended = False
            complete = self._trained[number] <= self.arrived
            if not self.reduces_in_backward:
                self._add(number, slot)
                if complete and self.overlap and self.last:
                    self.send(number)
            elif complete:
                self.used(number)
                self.land()
                for each in self.plan.buckets[number].slots:
                    self._add(number, each)
                self.send(number)
                if not self.overlap:
                    self.land()

        return on_gradient

    @property
    def reduces_in_backward(self) -> bool:
        """Bucket by bucket, as soon as all gradients of one are there, in every backward pass."""
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
    def send(self, number: int) -> None:
        """Begin to add up the bucket's gradients over all ranks."""
        whole = self.gradients.pop(number)
        begin = self.wire.all_reduce if self.plan.stage == 0 else self.wire.reduce_scatter
        self.in_flight.append((number, whole, begin(self.index, number, whole)))

    @torch.no_grad()
    def land(self) -> None:
        """Wait for what is on the wire, and keep the rank's own part of the sums, as large as it
        is. (Simulated ranks get the numbers in it later, when all have run.)"""
        while self.in_flight:
            number, whole, wait = self.in_flight.pop(0)
            wait()
            part = whole[self.owned(number)]
            if number in self.shard_gradients:
                self.wire.add(self.shard_gradients[number], part)
            else:
                part = part.clone() if self.reduces_in_backward else part
                self.shard_gradients[number] = part

    def receive(self) -> None:
        """Have the sums over all ranks in what this rank keeps of them."""
        self.land()
        for number, shard in self.shard_gradients.items():
            self.wire.summed(number, shard, self.owned(number))

    def owned(self, number: int) -> slice:
        """Where in the whole bucket lies what this rank steps."""
        return self.plan.buckets[number].span(self.index)

    def pieces(self, number: int) -> list[Piece]:
        """The weights in that, `at` their places in it."""
        return self.plan.buckets[number].pieces(self.index)

    # -------------------------------------------------------------- the step

    @torch.no_grad()
    def hand_to_optimizer(self, divisor: float) -> None:
        """Give the optimizer the rank's gradients, divided."""
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

    def pieces(self, number: int) -> list[Piece]:
        """All of them in stage 0."""
        if self.plan.stage > 0:
            return super().pieces(number)
        return [Piece(w, 0, w.elements, at) for w, at, _ in self.plan.buckets[number].slots]

    def spans(self, bucket: Bucket) -> list[tuple[int, slice]]:
        """In stage 0 weight by weight, as without ranks; the padding is left as it is."""
        if self.plan.stage == 0:
            return [(s.weight.group, slice(s.at, s.at + s.run)) for s in bucket.slots]
        return super().spans(bucket)

    def reduce(self) -> None:
        """Stages 0 and 1 have added up all micro-batches; the sum goes to where they lie."""
        for number in sorted(self.gradients):
            self.send(number)

    @torch.no_grad()
    def gather(self) -> None:
        """In stage 0 every rank has stepped everything."""
        if self.plan.stage > 0:
            begun = [
                self.wire.all_gather(self.index, number, whole)
                for number, whole in enumerate(self.wholes)
            ]
            for wait in begun:
                wait()


def _two(returned: Any) -> tuple[Tensor, "float | Tensor"]:
    """What a sum_of_losses is to return."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        loss, tokens = returned
        if isinstance(loss, Tensor):
            return loss, tokens
    raise TypeError(
        f"sum_of_losses returned {_in_words(returned)}; return two: the sum of the losses of the "
        f"micro-batch's tokens, as a tensor, and the number of these tokens"
    )


def _in_words(returned: Any) -> str:
    if isinstance(returned, (tuple, list)):
        kinds = ", ".join(type(one).__name__ for one in returned)
        return f"a {type(returned).__name__} of {len(returned)} ({kinds})"
    return f"a {type(returned).__name__} alone"


def _is_finite(gradient: Tensor) -> bool:
    """In one pass that takes no memory: of a nan both extremes are nan."""
    return not gradient.numel() or all(isfinite(n.item()) for n in torch.aminmax(gradient))
