"""ZeRO: R simulated ranks in one process that shard their training state.

Saves    memory per weight: from 16 bytes (bfloat16 weights and gradients, Adam with float32 copies)
         to 4 + 12/R (stage 1), 2 + 14/R (stage 2) or 16/R (stage 3).
Costs    no extra communication in stages 1 and 2: a reduce-scatter and an all-gather replace an
         all-reduce. Stage 3 sends 1.5× as much, and k times that for k micro-batches.
Source   Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277 (FSDP).

Adds to memlab.reference.sharded_optimizer and sharded_weights: any model, optimizer and stage,
buckets, units, micro-batches, clipping and loss scaling, and a trace per rank.

    zero = simulate(model, optimizer, ranks=4, stage=2, meter=memlab.meter)
    step = zero.step(micro_batches, sum_of_losses)
    step.traces[0].at_peak, step.traffic[0]

    def sum_of_losses(model, batch):            # returns the sum of losses and the token count
        tokens, targets = batch
        return model(tokens, targets) * targets.numel(), targets.numel()

Tensors are real, and each rank has its own. Micro-batches are dealt out round-robin: to rank 0, to
rank 1, …, then to rank 0 again. The ranks' weights match, bit for bit, one process that accumulates
the gradients of the same micro-batches in this order:

    stages 2 and 3    one after another, as dealt out
    stages 0 and 1    first within each rank, then the ranks' sums in rank order

With one micro-batch per rank, both orders are the same. The match requires an optimizer kernel that
computes the last elements of a tensor like the others. torch's fused AdamW, and its SGD in
bfloat16, do not, and may differ by a bit. Clipping sums squares by shard, in another order, and
agrees within rounding.

State that gradients do not train is not synchronized: each rank's batch norm keeps the running
statistics of its own micro-batches (DistributedDataParallel broadcasts rank 0's). In stage 3 the
weights of `zero.ranks[0].model` have their whole shapes, but their storages are empty between
steps; `zero.weights()` returns the values.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memlab.internals.torch_internals import FakeTensor
from memlab.zero.collectives import Communicator, CountingCommunicator
from memlab.zero.elementwise import require_elementwise
from memlab.zero.layout import matching_views
from memlab.zero.partitioning import Partition, partition
from memlab.zero.ranks import Rank, ReplicatedRank
from memlab.zero.sharded import ShardedRank
from memlab.zero.stages import require
from memlab.zero.stepping import Meter, RankGroup, Step
from memlab.zero.units import describe

__all__ = ["Simulation", "Step", "one_rank", "simulate"]


class Simulation(RankGroup):
    """R ranks, or one of them, in this process."""

    def weights(self) -> dict[str, Tensor]:
        """Return copies of all whole weights, with the ranks' current values."""
        if self.plan.stage < 3:
            parameters = self.ranks[0].parameters
            return {name: weight.detach().clone() for name, weight in parameters.items()}
        found = {}
        for number, bucket in enumerate(self.plan.buckets):
            whole = torch.cat([rank.shards[number].detach() for rank in self.ranks])
            for slot in bucket.slots:
                weight = whole.new_empty(slot.weight.shape)
                for bucket_view, weight_view in matching_views(bucket, slot, whole, weight):
                    weight_view.copy_(bucket_view)
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
    """Simulate R ranks that train copies of the model; the model and the optimizer do not change.

    `stage` is 0 (data parallel) to 3. `meter=memlab.meter` meters every step of each rank. `units`
    names the modules whose weights are gathered or reduced together; by default, the blocks of the
    outermost lists. Stages 0 and 1 use one bucket for all units, unless `by_unit` is true, as in
    real processes that overlap. With `master_weights` the optimizer steps float32 copies of the
    shards, for bfloat16 weights.

    Raises ValueError for an optimizer that has stepped already or belongs to another model, and
    TypeError if the optimizer is not elementwise.
    """
    require(ranks, stage)
    plan = make_plan(model, optimizer, ranks, stage, units, by_unit)
    comm = Communicator(ranks)
    made = [
        rank_class(stage)(
            index, copy.deepcopy(model), optimizer, plan, comm, master_weights=master_weights
        )
        for index in range(ranks)
    ]
    return Simulation(plan, made, comm, meter)


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
    """Simulate only rank 0 of R, on fake tensors; its memory and traffic match `simulate`.

    Use it for models far larger than the machine: make the model and the optimizer inside
    `with memlab.dry_run():` and step the result. It modifies the model. The optimizer state exists
    from the start, as after a first step. Raises ValueError outside of a dry run, because without
    the other ranks the values would be wrong.
    """
    require(ranks, stage)
    if not all(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        raise ValueError(
            "got a model with real values, which one rank alone would train wrongly; make it "
            "inside `with memlab.dry_run():`, or simulate all ranks"
        )
    plan = make_plan(model, optimizer, ranks, stage, units)
    comm = CountingCommunicator(ranks)
    rank = rank_class(stage)(0, model, optimizer, plan, comm, master_weights=master_weights)
    rank.init_optimizer_state()
    return Simulation(plan, [rank], comm, meter)


def rank_class(stage: int) -> type[Rank]:
    """Return the class of a rank in this stage."""
    return ShardedRank if stage == 3 else ReplicatedRank


def make_plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: int,
    stage: int,
    units: Sequence[str] | None,
    by_unit: bool | None = None,
) -> Partition:
    """Return the partition of this model; every rank computes the same one."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"got a {type(optimizer).__name__} as optimizer; pass a torch.optim.Optimizer of the "
            f"model's weights (for float32 copies of shards, master_weights=True)"
        )
    if optimizer.state:
        raise ValueError("got an optimizer that has stepped; pass a new one, without state")
    require_elementwise(optimizer)
    weights = describe(model, optimizer, units)
    return partition(weights, ranks=ranks, stage=stage, by_unit=by_unit)
