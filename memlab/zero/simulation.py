"""ZeRO: R ranks that share what each of them need not hold alone, simulated in one process.

Saves    of 16 bytes a weight (bfloat16 weights and gradients, Adam by float32 copies) all but
         4 + 12/R (stage 1), 2 + 14/R (stage 2) or 16/R (stage 3).
Costs    nothing on the wire in stages 1 and 2, where a reduce-scatter and an all-gather replace an
         all-reduce; in stage 3 half as much again, and k times that for k micro-batches.
Source   Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277 (FSDP).

    zero = simulate(model, optimizer, ranks=4, stage=2, meter=memlab.meter)
    step = zero.step(micro_batches, sum_of_losses)
    step.traces[0].at_peak, step.traffic[0]

Tensors are real, and each rank has its own. Micro-batches are dealt out in turn: to rank 0, to
rank 1, …, and so on in the next round. The ranks' weights are, bit for bit, those of one process
that adds up the gradients of the same micro-batches in the same order:

    stages 2 and 3    one after the other, as they are dealt out
    stages 0 and 1    those of a rank first, then the ranks' sums in rank order

(with one micro-batch a rank, that is the same) if the optimizer's kernel computes the last numbers
of a run as it does the others. torch's fused AdamW, and its SGD in bfloat16, don't: a bit may
differ. Clipping sums squares by shards, another order, and agrees within rounding.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.trace import Trace
from memlab.zero.collectives import LooseEnd, Traffic, Wire
from memlab.zero.elementwise import require_elementwise
from memlab.zero.layout import overlaps
from memlab.zero.partitioning import Partition, partition, require
from memlab.zero.ranks import Rank, SumOfLosses, WholeRank
from memlab.zero.sharded import ShardedRank
from memlab.zero.traces import gathered_at_peak, joined
from memlab.zero.units import ROOT, describe

Meter = Callable[[nn.Module, torch.optim.Optimizer], Any]  # memlab.meter


@dataclass(frozen=True)
class Step:
    """What a step did: the mean loss of its tokens, the gradients' norm if they were clipped,
    whether the optimizers stepped, and for each rank what it sent and its trace, if metered."""

    loss: float
    tokens: float
    norm: float | None
    stepped: bool
    traffic: tuple[Traffic, ...]
    traces: tuple[Trace, ...]
    stage: int
    units: tuple[str, ...]

    def gathered_at_peak(self, rank: int = 0) -> dict[str, int]:
        """Stage 3: bytes of whole weights at the moment when the rank holds the most, by unit."""
        if self.stage < 3:
            return {}
        return gathered_at_peak(self.traces[rank], self.units)


class Simulation:
    """R ranks, or one of them, and their step."""

    def __init__(
        self, plan: Partition, ranks: Sequence[Rank], wire: Wire, meter: Meter | None
    ) -> None:
        self.plan, self.ranks, self.wire = plan, ranks, wire
        self._meter = meter
        self._pieces: list[list[Trace]] = []
        self._phases: list[str | None] = []

    def step(
        self,
        micro_batches: Sequence[Any],
        sum_of_losses: SumOfLosses,
        *,
        clip_norm: float | None = None,
        scaler: Any = None,
    ) -> Step:
        """One step of the optimizer by the gradient of the mean loss over all tokens.

        `sum_of_losses(model, micro_batch)` returns the sum of the losses of its tokens and their
        number, as for `accumulate`. Their count is a multiple of the simulated ranks'. With
        `clip_norm`, gradients are clipped to that norm over all weights. `scaler` is a LossScaler
        or torch's own GradScaler: it scales each loss, and ranks agree on whether to step.
        """
        count = len(self.ranks)
        if not micro_batches or len(micro_batches) % count:
            raise ValueError(
                f"got {len(micro_batches)} micro-batches for {count} ranks; give each rank as "
                f"many as every other"
            )
        self.wire.new_step()
        self._pieces, self._phases = [[] for _ in self.ranks], []
        ran: list[tuple[float, float]] = []
        dealt = iter(micro_batches)
        for _ in range(len(micro_batches) // count):
            ran += self._each(lambda rank: rank.run(next(dealt), sum_of_losses, scaler))
        self._each(lambda rank: rank.reduce(), "backward")
        for rank in self.ranks:
            rank.receive()
        self.wire.forget_sums()
        loss, tokens = (sum(numbers) for numbers in zip(*ran, strict=True))
        loss, tokens = self._agree(loss), self._agree(tokens)
        norm, stepped = self._update(max(tokens, 1), clip_norm, scaler)
        self._each(lambda rank: rank.gather(), "optimizer")
        return Step(
            loss / max(tokens, 1),
            tokens,
            norm,
            stepped,
            tuple(self.wire.traffic[: len(self.ranks)]),
            tuple(joined(pieces, self._phases) for pieces in self._pieces if pieces),
            self.plan.stage,
            tuple({b.unit for b in self.plan.buckets} - {ROOT}),
        )

    def weights(self) -> dict[str, Tensor]:
        """Copies of all weights, whole, as the ranks hold them now."""
        if self.plan.stage < 3:
            parameters = self.ranks[0].parameters
            return {name: weight.detach().clone() for name, weight in parameters.items()}
        found = {}
        for number, bucket in enumerate(self.plan.buckets):
            whole = torch.cat([rank.shards[number].detach() for rank in self.ranks])
            for slot in bucket.slots:
                weight = whole.new_empty(slot.weight.shape)
                for there, here in overlaps(bucket, slot, whole, weight):
                    here.copy_(there)
                found[slot.weight.name] = weight
        return found

    def _update(
        self, divisor: float, clip_norm: float | None, scaler: Any
    ) -> tuple[float | None, bool]:
        """(norm before clipping, whether the optimizers stepped)"""
        self._each(lambda rank: rank.hand_to_optimizer(divisor), "optimizer")
        overflowed = False
        if scaler is not None:
            flags = self._each(lambda rank: rank.overflows(), "optimizer")
            overflowed = self._over_shards(flags) > 0
            self._each(lambda rank: rank.unscale(scaler, overflowed), "optimizer")
        norm = None
        if clip_norm is not None:
            squares = self._each(lambda rank: rank.squares(), "optimizer")
            norm = self._over_shards(squares) ** 0.5
            coefficient = min(1.0, clip_norm / (norm + 1e-6))
            self._each(lambda rank: rank.clip(coefficient), "optimizer")
        self._each(lambda rank: rank.step(scaler), "optimizer")
        if scaler is not None:
            scaler.update()
        return norm, not overflowed

    def _over_shards(self, numbers: list[float]) -> float:
        """The sum of what each rank says of its shards. In stage 0 each has everything, and nobody
        has to be asked."""
        return self.wire.all_reduce_numbers(numbers) if self.plan.stage else numbers[0]

    def _agree(self, number: float) -> float:
        """What all ranks add up to; one number on the wire."""
        return self.wire.all_reduce_numbers([number])

    def _each(self, turn: Callable[[Rank], Any], phase: str | None = None) -> list[Any]:
        """Let each rank take its turn, under its own meter."""
        results = []
        self._phases.append(phase)
        for number, rank in enumerate(self.ranks):
            with self._metered(number, rank, in_step=phase is not None):
                results.append(turn(rank))
        return results

    @contextmanager
    def _metered(self, number: int, rank: Rank, *, in_step: bool) -> Iterator[None]:
        if self._meter is None:
            yield
            return
        # What a turn without a forward pass leaves is no activation.
        running = self._meter(rank.model, rank.optimizer)
        with torch.set_grad_enabled(not in_step), running:
            yield
        self._pieces[number].append(running.trace)


def simulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: int,
    stage: int,
    *,
    meter: Meter | None = None,
    units: Sequence[str] | None = None,
    master_weights: bool = False,
) -> Simulation:
    """R ranks that train copies of the model by the optimizer's settings; both are left alone.

    `stage` is 0 (data parallel) to 3. `meter=memlab.meter` has every step metered, each rank by
    itself. `units` names the modules whose weights are gathered or reduced together; without it,
    the blocks of the outermost lists. With `master_weights` the optimizer steps float32 copies of
    shards, for weights in bfloat16.

    Raises ValueError for an optimizer that has stepped already, or of another model, and TypeError
    for one that steps shards otherwise than whole weights.
    """
    require(ranks, stage)
    plan = _plan(model, optimizer, ranks, stage, units)
    wire = Wire(ranks)
    made = [
        _kind(stage)(
            index, copy.deepcopy(model), optimizer, plan, wire, master_weights=master_weights
        )
        for index in range(ranks)
    ]
    return Simulation(plan, made, wire, meter)


def one_rank(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: int,
    stage: int,
    *,
    meter: Meter | None = None,
    units: Sequence[str] | None = None,
    master_weights: bool = False,
) -> Simulation:
    """Rank 0 of R alone, on fake tensors: its bytes and what it sends are those of `simulate`.

    It is for models far larger than the machine: `with memlab.dry_run():`, make the model and the
    optimizer, and step this. It takes the model over. The optimizer's state is there from the
    start, as after a first step. Raises ValueError outside of a dry run, where its values would be
    wrong: nothing comes from the other ranks.
    """
    require(ranks, stage)
    if not all(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        raise ValueError(
            "got a model of real numbers, of which one rank alone would make wrong ones; make it "
            "inside `with memlab.dry_run():`, or simulate all ranks"
        )
    plan = _plan(model, optimizer, ranks, stage, units)
    wire = LooseEnd(ranks)
    rank = _kind(stage)(0, model, optimizer, plan, wire, master_weights=master_weights)
    rank.make_state()
    return Simulation(plan, [rank], wire, meter)


def _kind(stage: int) -> type[Rank]:
    return ShardedRank if stage == 3 else WholeRank


def _plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: int,
    stage: int,
    units: Sequence[str] | None,
) -> Partition:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"got a {type(optimizer).__name__} as optimizer; give a torch.optim.Optimizer of the "
            f"model's weights (for float32 copies of shards, master_weights=True)"
        )
    if optimizer.state:
        raise ValueError("got an optimizer that has stepped; give a new one, without state")
    require_elementwise(optimizer)
    return partition(describe(model, optimizer, units), ranks=ranks, stage=stage)
