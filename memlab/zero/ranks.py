"""One rank: its model, its part of weights, gradients and optimizer state, and its step.

Stages 0, 1 and 2 use `ReplicatedRank`: weights are views of flat buckets. The rank steps its shard
of each bucket and then gathers the other shards. Stage 3 uses `ShardedRank` (memlab.zero.sharded).

Stages 0 and 1 add each gradient to its bucket as soon as backward has computed it, then free it.
Stages 2 and 3 wait for all gradients of a bucket, copy them together, reduce them at once and keep
only their shard of the sum.

With `overlap`, a rank waits for reductions late: when it fills the next bucket (stages 2 and 3) or
after backward (stages 0 and 1, which send in the last backward pass).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.zero.collectives import Communicator, Pending
from memlab.zero.elementwise import with_weights
from memlab.zero.layout import matching_views
from memlab.zero.partitioning import Bucket, Partition, ShardChunk, Slot

# AdamW needs three more buffers as large as what it steps, also for ten billion elements.
SUB_GROUP = 2**26  # elements per optimizer tensor; bounds the step's temporaries

SumOfLosses = Callable[[nn.Module, Any], tuple[Tensor, "float | Tensor"]]


class OptimizerShard(NamedTuple):
    """One tensor that a rank's optimizer steps: part of a bucket's shard, or its float32 copy."""

    bucket: int
    span: slice  # in the shard
    parameter: Any  # an nn.Parameter; its gradient is set whenever it is read


class Rank:
    """The base of all stages; a bucket is identified by its index `number` in the plan."""

    def __init__(
        self,
        index: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Partition,
        comm: Communicator,
        *,
        master_weights: bool = False,
        overlap: bool = False,
    ) -> None:
        self.index, self.plan, self.comm = index, plan, comm
        self.overlap = overlap
        self.last = True  # whether the next backward pass is the last one before the step
        self.model = model
        self.full_buckets: list[Tensor] = []  # of the stages that keep whole weights
        self.parameters = dict(self.model.named_parameters())
        self.gradients: dict[int, Tensor] = {}  # whole buckets during accumulation
        self.shard_gradients: dict[int, Tensor] = {}
        self.in_flight: list[tuple[int, Tensor, Pending]] = []  # whole buckets being reduced
        self.seen_gradients: set[str] = set()  # weights with a gradient in this backward pass
        self._ended = False  # whether this pass has ended
        self._trained = [{w.name for w in b.weights if w.trained} for b in plan.buckets]
        self.shards = [self.flatten_into_bucket(number) for number in range(len(plan.buckets))]
        self._watch_gradients()
        self.master_weights = master_weights
        self.optimizer_shards = [
            step
            for number, bucket in enumerate(plan.buckets)
            if bucket.trained
            for step in self._make_optimizer_shards(number, bucket)
        ]
        self.optimizer = with_weights(optimizer, self._by_group(len(optimizer.param_groups)))

    # -------------------------------------------------------------- overridden by the stages

    def flatten_into_bucket(self, number: int) -> Tensor:
        """Move the bucket's weights into this rank's storage; return the shard that it steps."""
        raise NotImplementedError

    def on_bucket_complete(self, number: int) -> None:
        """Run when backward has computed all gradients of a bucket, before they are sent."""

    def end_backward(self) -> None:
        """Run at the end of a backward pass."""

    def reduce(self) -> None:
        """Send the gradients that were not sent during the last backward pass."""

    def gather(self) -> None:
        """Gather the weights that other ranks have stepped."""

    # -------------------------------------------------------------- forward and backward

    def run(self, micro_batch: Any, sum_of_losses: SumOfLosses, scaler: Any) -> tuple[float, float]:
        """Run forward and backward; return the sum of losses and the number of tokens."""
        self.begin_pass()
        loss, tokens = _unpack(sum_of_losses(self.model, micro_batch))
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.end_pass()
        return float(loss.detach()), float(tokens)

    def begin_pass(self) -> None:
        """Prepare for a forward pass."""
        self.seen_gradients.clear()
        self._ended = False

    def end_pass(self) -> None:
        """Finish a backward pass. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        missing = set().union(*self._trained) - self.seen_gradients
        self.seen_gradients.clear()
        if missing:
            raise ValueError(
                f"backward made no gradient of {', '.join(sorted(missing))}; each rank sends the "
                f"gradients of all weights: call requires_grad_(False) on unused weights"
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
            self.seen_gradients.add(slot.weight.name)
            self._ended = False
            complete = self._trained[number] <= self.seen_gradients
            if not self.reduces_in_backward:
                self._add(number, slot)
                if complete and self.overlap and self.last:
                    self.send(number)
            elif complete:
                self.on_bucket_complete(number)
                self.wait_for_reductions()
                for each in self.plan.buckets[number].slots:
                    self._add(number, each)
                self.send(number)
                if not self.overlap:
                    self.wait_for_reductions()

        return on_gradient

    @property
    def reduces_in_backward(self) -> bool:
        """Whether every backward pass reduces each bucket once its gradients are complete."""
        return self.plan.stage >= 2

    @torch.no_grad()
    def _add(self, number: int, slot: Slot) -> None:
        """Add a weight's gradient to its whole bucket and free it."""
        weight = self.parameters[slot.weight.name]
        gradient, weight.grad = weight.grad, None
        bucket, whole = self.plan.buckets[number], self.gradients.get(number)
        if whole is None:
            # Start from zeros, because the padding is sent and stepped too.
            whole = torch.zeros(bucket.padded_elements, dtype=bucket.dtype, device=weight.device)
            self.gradients[number] = whole
        if gradient is not None:
            for bucket_view, grad in matching_views(bucket, slot, whole, gradient.contiguous()):
                bucket_view.add_(grad)

    @torch.no_grad()
    def send(self, number: int) -> None:
        """Start the sum of the bucket's gradients over all ranks."""
        whole = self.gradients.pop(number)
        start = self.comm.all_reduce if self.plan.stage == 0 else self.comm.reduce_scatter
        self.in_flight.append((number, whole, start(self.index, number, whole)))

    @torch.no_grad()
    def wait_for_reductions(self) -> None:
        """Wait for pending reductions and keep this rank's part of each sum.

        A simulated rank gets the values later, from `read_sums`, when all ranks have run.
        """
        while self.in_flight:
            number, whole, wait = self.in_flight.pop(0)
            wait()
            part = whole[self.owned_span(number)]
            if number in self.shard_gradients:
                self.comm.accumulate(self.shard_gradients[number], part)
            else:
                part = part.clone() if self.reduces_in_backward else part
                self.shard_gradients[number] = part

    def read_sums(self) -> None:
        """Write the sums over all ranks into this rank's gradient shards."""
        self.wait_for_reductions()
        for number, shard in self.shard_gradients.items():
            self.comm.read_sum(number, shard, self.owned_span(number))

    def owned_span(self, number: int) -> slice:
        """Return the slice of the whole bucket that this rank steps."""
        return self.plan.buckets[number].span(self.index)

    def chunks(self, number: int) -> list[ShardChunk]:
        """Return the chunks of weights in that slice."""
        return self.plan.buckets[number].chunks(self.index)

    # -------------------------------------------------------------- the step

    @torch.no_grad()
    def set_gradients_(self, divisor: float) -> None:
        """Hand this rank's gradients, divided, to the optimizer."""
        for number, steps in groupby(self.optimizer_shards, key=lambda step: step.bucket):
            shard = self.shard_gradients.pop(number)
            for _, span, parameter in steps:
                # A float32 copy is a new tensor; the bucket's shard is freed after the loop.
                parameter.grad = shard[span].float() if self.master_weights else shard[span]
                parameter.grad.div_(divisor)

    @torch.no_grad()
    def overflows(self) -> float:
        """Return 1.0 if one of this rank's gradients is inf or nan, else 0.0."""
        return 0.0 if all(map(_is_finite, self._own_gradients())) else 1.0

    def unscale(self, scaler: Any, overflowed: bool) -> None:
        """Divide the gradients by the scale.

        If another rank overflowed, set inf here too, so that every scaler skips the step and lowers
        the scale.
        """
        if overflowed:
            self._own_gradients()[0].view(-1)[:1].fill_(inf)
        scaler.unscale_(self.optimizer)

    @torch.no_grad()
    def squared_norm(self) -> float:
        """Return the sum of squares of this rank's gradients, for the global norm."""
        norms = [float(torch.linalg.vector_norm(g)) for g in self._own_gradients()]
        return sum(norm**2 for norm in norms)

    @torch.no_grad()
    def clip(self, coefficient: float) -> None:
        """Multiply the gradients by the clipping coefficient."""
        for gradient in self._own_gradients():
            gradient.mul_(coefficient)

    def init_optimizer_state(self) -> None:
        """Create the optimizer state with one step on zero gradients."""
        for _, _, parameter in self.optimizer_shards:
            parameter.grad = torch.zeros_like(parameter)
        self.step(None)

    def step(self, scaler: Any) -> None:
        """Step this rank's shards and free the gradients."""
        self.optimizer.step() if scaler is None else scaler.step(self.optimizer)
        for number, span, parameter in self.optimizer_shards:
            parameter.grad = None
            if self.master_weights:
                with torch.no_grad():
                    self.shards[number][span].copy_(parameter)

    def _own_gradients(self) -> list[Tensor]:
        return [step.parameter.grad for step in self.optimizer_shards]

    def _make_optimizer_shards(self, number: int, bucket: Bucket) -> list[OptimizerShard]:
        found = []
        for _, span in in_sub_groups(self.optimizer_spans(bucket)):
            part = self.shards[number].detach()[span]
            copy_ = part.to(torch.float32, copy=True) if self.master_weights else part
            found.append(OptimizerShard(number, span, nn.Parameter(copy_)))
        return found

    def optimizer_spans(self, bucket: Bucket) -> list[tuple[int, slice]]:
        """Return (parameter group, slice of the shard) for each tensor to step."""
        return bucket.optimizer_spans()

    def _by_group(self, groups: int) -> list[list[nn.Parameter]]:
        by_group: list[list[nn.Parameter]] = [[] for _ in range(groups)]
        trained = (bucket for bucket in self.plan.buckets if bucket.trained)
        wanted = (group for b in trained for group, _ in in_sub_groups(self.optimizer_spans(b)))
        for group, step in zip(wanted, self.optimizer_shards, strict=True):
            by_group[group].append(step.parameter)
        return by_group


def in_sub_groups(optimizer_spans: Iterable[tuple[int, slice]]) -> Iterator[tuple[int, slice]]:
    """Split the spans into runs of at most SUB_GROUP elements."""
    for group, span in optimizer_spans:
        for start in range(span.start, max(span.stop, span.start + 1), SUB_GROUP):
            yield group, slice(start, min(start + SUB_GROUP, span.stop))


class ReplicatedRank(Rank):
    """Stages 0, 1 and 2: every rank has all weights, as views of flat buckets."""

    @torch.no_grad()
    def flatten_into_bucket(self, number: int) -> Tensor:
        """Copy the bucket's weights into one flat tensor and make them views of it."""
        bucket = self.plan.buckets[number]
        device = self.parameters[bucket.weights[0].name].device
        whole = torch.zeros(bucket.padded_elements, dtype=bucket.dtype, device=device)
        for slot in bucket.slots:
            weight = self.parameters[slot.weight.name]
            view = whole[slot.at : slot.at + slot.run].view(weight.shape)
            weight.data = view.copy_(weight)
        self.full_buckets.append(whole)
        shard = whole[self.owned_span(number)]
        self.comm.register_shard(self.index, number, shard)
        return shard

    def owned_span(self, number: int) -> slice:
        """Return the whole bucket in stage 0."""
        return slice(None) if self.plan.stage == 0 else super().owned_span(number)

    def chunks(self, number: int) -> list[ShardChunk]:
        """Return all weights in stage 0."""
        if self.plan.stage > 0:
            return super().chunks(number)
        return [ShardChunk(w, 0, w.elements, at) for w, at, _ in self.plan.buckets[number].slots]

    def optimizer_spans(self, bucket: Bucket) -> list[tuple[int, slice]]:
        """Return one span per weight in stage 0, as without ranks; the padding is not stepped."""
        if self.plan.stage == 0:
            return [(s.weight.group, slice(s.at, s.at + s.run)) for s in bucket.slots]
        return super().optimizer_spans(bucket)

    def reduce(self) -> None:
        """Send the buckets that accumulated over all micro-batches (stages 0 and 1)."""
        for number in sorted(self.gradients):
            self.send(number)

    @torch.no_grad()
    def gather(self) -> None:
        """Do nothing in stage 0, where every rank steps all weights."""
        if self.plan.stage > 0:
            pending = [
                self.comm.all_gather(self.index, number, whole)
                for number, whole in enumerate(self.full_buckets)
            ]
            for wait in pending:
                wait()


def _unpack(returned: Any) -> tuple[Tensor, "float | Tensor"]:
    """Return (loss, tokens) from the result of a sum_of_losses."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        loss, tokens = returned
        if isinstance(loss, Tensor):
            return loss, tokens
    raise TypeError(
        f"sum_of_losses returned {_describe(returned)}; return two values: the sum of the losses "
        f"of the micro-batch's tokens, as a tensor, and the number of these tokens"
    )


def _describe(returned: Any) -> str:
    if isinstance(returned, (tuple, list)):
        kinds = ", ".join(type(value).__name__ for value in returned)
        return f"a {type(returned).__name__} of {len(returned)} ({kinds})"
    return f"a single {type(returned).__name__}"


def _is_finite(gradient: Tensor) -> bool:
    """Check in one pass without a temporary: aminmax returns nan if any element is nan."""
    return not gradient.numel() or all(isfinite(n.item()) for n in torch.aminmax(gradient))
