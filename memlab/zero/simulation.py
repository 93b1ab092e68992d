"""ZeRO: R ranks that share what each of them need not hold alone, simulated in one process.

Saves    of 16 bytes a weight (bfloat16 weights and gradients, Adam by float32 copies) all but
         4 + 12/R (stage 1), 2 + 14/R (stage 2) or 16/R (stage 3).
Costs    nothing on the wire in stages 1 and 2, where a reduce-scatter and an all-gather replace an
         all-reduce; in stage 3 half as much again, and k times that for k micro-batches.
Source   Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277 (FSDP).

Adds to memlab.reference.sharded_optimizer and sharded_weights: any model, optimizer and stage,
buckets, units, micro-batches, clipping and loss scaling, and a trace per rank.

    zero = simulate(model, optimizer, ranks=4, stage=2, meter=memlab.meter)
    step = zero.step(micro_batches, sum_of_losses)
    step.traces[0].at_peak, step.traffic[0]

    def sum_of_losses(model, batch):            # of a micro-batch: the sum, and of how many tokens
        tokens, targets = batch
        return model(tokens, targets) * targets.numel(), targets.numel()

Tensors are real, and each rank has its own. Micro-batches are dealt out in turn: to rank 0, to
rank 1, …, and so on in the next round. The ranks' weights are, bit for bit, those of one process
that adds up the gradients of the same micro-batches in the same order:

    stages 2 and 3    one after the other, as they are dealt out
    stages 0 and 1    those of a rank first, then the ranks' sums in rank order

(with one micro-batch a rank, that is the same) if the optimizer's kernel computes the last numbers
of a run as it does the others. torch's fused AdamW, and its SGD in bfloat16, don't: a bit may
differ. Clipping sums squares by shards, another order, and agrees within rounding.

What is not trained by gradients is not shared: batch norm's running statistics stay each rank's
own, of its own micro-batches (DistributedDataParallel takes rank 0's for all). In stage 3 the
weights of `zero.ranks[0].model` show their whole shapes, though their storages are empty between
steps; `zero.weights()` has their values.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memlab.internals.torch_internals import FakeTensor
from memlab.zero.collectives import LooseEnd, Wire
from memlab.zero.elementwise import require_elementwise
from memlab.zero.layout import overlaps
from memlab.zero.partitioning import Partition, partition, require
from memlab.zero.ranks import Rank, WholeRank
from memlab.zero.sharded import ShardedRank
from memlab.zero.stepping import Meter, Ranks, Step
from memlab.zero.units import describe

__all__ = ["Simulation", "Step", "one_rank", "simulate"]


class Simulation(Ranks):
    """R ranks, or one of them, in this process."""

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


def simulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: int,
    stage: int,
    *,
    meter: Meter | None = None,
    units: Sequence[str] | None = None,
    by_unit: bool | None = None,
    master_weights: bool = False,
) -> Simulation:
    """R ranks that train copies of the model by the optimizer's settings; both are left alone.

    `stage` is 0 (data parallel) to 3. `meter=memlab.meter` has every step metered, each rank by
    itself. `units` names the modules whose weights are gathered or reduced together; without it,
    the blocks of the outermost lists. In stages 0 and 1 all units are one, unless `by_unit` is
    true: real processes that overlap have it so. With `master_weights` the optimizer steps float32
    copies of shards, for weights in bfloat16.

    Raises ValueError for an optimizer that has stepped already, or of another model, and TypeError
    for one that steps shards otherwise than whole weights.
    """
    require(ranks, stage)
    plan = plan_of(model, optimizer, ranks, stage, units, by_unit)
    wire = Wire(ranks)
    made = [
        kind_of(stage)(
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
    plan = plan_of(model, optimizer, ranks, stage, units)
    wire = LooseEnd(ranks)
    rank = kind_of(stage)(0, model, optimizer, plan, wire, master_weights=master_weights)
    rank.make_state()
    return Simulation(plan, [rank], wire, meter)


def kind_of(stage: int) -> type[Rank]:
    """The rank of a stage."""
    return ShardedRank if stage == 3 else WholeRank


def plan_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: int,
    stage: int,
    units: Sequence[str] | None,
    by_unit: bool | None = None,
) -> Partition:
    """The plan that every rank makes for itself."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"got a {type(optimizer).__name__} as optimizer; give a torch.optim.Optimizer of the "
            f"model's weights (for float32 copies of shards, master_weights=True)"
        )
    if optimizer.state:
        raise ValueError("got an optimizer that has stepped; give a new one, without state")
    require_elementwise(optimizer)
    weights = describe(model, optimizer, units)
    return partition(weights, ranks=ranks, stage=stage, by_unit=by_unit)
