"""ZeRO, stages 0 to 3, in real processes: an optimizer and a model that R of them share.

Saves    what the simulation says (memlab.zero.simulation): each rank is one of its ranks, in a
         process of its own, whose collectives are those of torch.distributed.
Costs    the same on the wire. With `overlap`, which hides much of it behind backward, one unit's
         run of gathered numbers (stage 3) and one bucket of gradients for longer (2 and 3).
Source   Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277 (FSDP).

A script that trains, to be started by `torchrun --nproc-per-node 2 train.py`:

    import torch
    from memlab.model import GPT, PRESETS
    from memlab.zero import processes

    with processes.joined("gloo", timeout=60) as rank:          # "nccl" on GPUs
        torch.manual_seed(rank)                                 # each rank draws its own data
        model = GPT(PRESETS["tiny"])                            # rank 0's values become everyone's
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zero = processes.shard(model, optimizer, stage=2)
        for step in range(3):
            tokens = torch.randint(256, (4, 33))
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            zero.clip_grad_norm_(1.0)
            zero.step()                                         # in place of optimizer.step()
            zero.zero_grad()
        if rank == 0:
            print(f"loss {loss.item():.2f}")

Three lines are other than in a script for one process: joined, shard, and zero.step. The gradient
is then the mean of the ranks' own, as with DistributedDataParallel. Where ranks have different
numbers of tokens that is no mean over tokens; this is, and accumulates:

    step = zero.step(micro_batches, sum_of_losses, clip_norm=1.0, scaler=None)

as in a simulation, but with this rank's own micro-batches. Its parts can be called one by one:
`zero.backward(loss, tokens)` for each micro-batch, with the sum of its losses, then `zero.step()`.

`zero.save(folder)` and `zero.load(folder)` are for any number of ranks and any stage.

With two ranks weights are, bit for bit, those of the simulation, as long as each has one
micro-batch; gloo and NCCL add up more in an order of their own. If a rank dies, stops, or has
another model, every other rank raises an error that says so, at the latest when the group's time is
up; if a loss or a gradient of one is inf or nan, all of them raise the same FloatingPointError
before the step. Ranks that call `backward` a different number of times in a step may be ended by
gloo itself, without a Python error; TORCH_DISTRIBUTED_DEBUG=DETAIL has torch compare them first.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memlab.internals.torch_internals import in_backward, tree_leaves, when_backward_ends
from memlab.zero.checkpoints import load, save
from memlab.zero.collectives import Traffic
from memlab.zero.group_wire import GroupWire
from memlab.zero.joining import RankLost, joined
from memlab.zero.partitioning import Partition
from memlab.zero.ranks import Rank, SumOfLosses
from memlab.zero.simulation import kind_of, plan_of
from memlab.zero.stepping import Ranks, Step, require_norm

__all__ = ["RankLost", "Zero", "joined", "shard"]


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int,
    *,
    group: dist.ProcessGroup | None = None,
    units: Sequence[str] | None = None,
    master_weights: bool = False,
    overlap: bool = True,
) -> "Zero":
    """Take over a model and its optimizer for this rank of a process group (None: of all).

    `stage` is 0 (data parallel) to 3. Rank 0's weights and buffers become everyone's. `units` names
    the modules whose weights are gathered or reduced together; without it, the blocks of the
    outermost lists. With `master_weights` the optimizer steps float32 copies of shards, for weights
    in bfloat16. With `overlap`, gradients are sent while backward goes on, and the next unit is
    gathered while one is at work; without it, bytes are those of the simulation.

    On all ranks, raises ValueError if they have not the same weights, optimizer and settings; on
    one, what `simulate` raises.
    """
    if not dist.is_initialized():
        raise ValueError(
            "this process is in no process group; call it inside `with processes.joined():`, or "
            "after torch.distributed.init_process_group"
        )
    device = next(model.parameters()).device
    wire = GroupWire(group, device)
    settings = {"stage": stage, "master_weights": master_weights, "overlap": overlap}
    wire.plan = _agreed_plan(wire, model, optimizer, units, settings)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            wire.copy_from_first(tensor)
    rank = kind_of(stage)(
        *(wire.index, model, optimizer, wire.plan, wire),
        master_weights=master_weights,
        overlap=overlap,
    )
    # The user's own optimizer steps shards from now on: schedulers of its learning rate go on.
    optimizer.param_groups = rank.optimizer.param_groups
    optimizer.state = rank.optimizer.state
    rank.optimizer = optimizer
    return Zero(rank, wire)


class Zero(Ranks):
    """One rank in its process: `model` and `optimizer` are those that were given."""

    def __init__(self, rank: Rank, wire: GroupWire) -> None:
        super().__init__(rank.plan, [rank], wire, meter=None)
        self.rank = rank
        self.model, self.optimizer = rank.model, rank.optimizer
        self._ran: list[tuple[float, float]] = []
        self._totals_of_step: tuple[float, float] | None = None
        self._scaler: Any = None
        self._stepping = False
        self._queued = False
        self._begin()
        # Before the root's weights are gathered, which is of this pass.
        self.model.register_forward_pre_hook(self._before_forward, prepend=True)
        self.model.register_forward_hook(self._after_forward)
        self.optimizer.register_step_pre_hook(self._refuse_lonely_step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        return self.model(*args, **kwargs)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent since the last step."""
        return self.wire.traffic[self.rank.index]

    def backward(self, loss: Tensor, tokens: float | Tensor, *, scaler: Any = None) -> None:
        """The backward pass of a sum of losses of so many tokens: all ranks' tokens together will
        divide the gradients."""
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.rank.end_pass()
        self._ran.append((float(loss.detach()), float(tokens)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backward passes that are not the last before a step: stages 0 and 1 send nothing
        in them. In the others it changes nothing."""
        self.rank.last = False
        try:
            yield
        finally:
            self.rank.last = True

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients of all ranks to a norm over all weights; what it was before.

        torch's own finds none: `.grad` is None, for sums go straight to shards. It clips nothing,
        and says 0.
        """
        require_norm(max_norm)
        self._require_gradients()
        self._add_up(self._ran)
        return self._clip(max_norm)

    def step(
        self,
        micro_batches: Iterable[Any] | None = None,
        sum_of_losses: SumOfLosses | None = None,
        *,
        clip_norm: float | None = None,
        scaler: Any = None,
    ) -> Step:
        """Step by the gradients of the backward passes since the last step; or, given this rank's
        micro-batches and what a simulation is given, run those first.

        What it returns knows of this rank's traffic alone. Without `backward(loss, tokens)` nobody
        knows the losses: its loss is 0.
        """
        require_norm(clip_norm)
        self._scaler = scaler
        try:
            if micro_batches is None:
                self._require_gradients()
                return self._finish(self._ran, clip_norm, scaler)
            micro_batches = list(micro_batches)
            self._require_as_many(len(micro_batches))
            return super().step(micro_batches, sum_of_losses, clip_norm=clip_norm, scaler=scaler)
        finally:  # after an error nobody waits for what is on its way
            self._scaler = None
            self.rank.in_flight.clear()
            self.wire.forget_works()
            self.zero_grad()
            self._begin()

    def zero_grad(self) -> None:
        """Drop gradients that were not stepped by; after a step there are none."""
        self.rank.land()
        self.rank.gradients.clear()
        self.rank.shard_gradients.clear()
        for stepped in self.rank.stepped:
            stepped.parameter.grad = None
        self._ran, self._totals_of_step = [], None
        self.wire.not_finite()

    def save(self, folder: Path | str, **also: Any) -> None:
        """Write weights, optimizer's state and `also`, plain data and tensors of rank 0; each rank
        writes its own shards. A folder that is there is replaced when all is written."""
        save(self.rank, self.wire, Path(folder), also)

    def load(self, folder: Path | str, *, verify: bool = True) -> dict[str, Any]:
        """Go on from what `save` wrote, with any number of ranks and any stage; returns `also`.

        ValueError on every rank, and nothing has changed, for a damaged checkpoint; with
        `verify=False` it is read as it is.
        """
        return self._each(lambda rank: load(rank, self.wire, Path(folder), verify=verify))[0]

    # -------------------------------------------------------------- the step's parts

    def _add_up(self, ran: list[tuple[float, float]]) -> tuple[float, float]:
        """Once a step: clipping may have asked for it."""
        if self._totals_of_step is None:
            self.rank.end_pass()
            self._totals_of_step = super()._add_up(ran)
        return self._totals_of_step

    def _totals(self, ran: list[tuple[float, float]]) -> tuple[float, float]:
        """The same on every rank. A rank with something that is not finite says so by its loss."""
        ran = ran or [(0.0, 1.0)]  # each rank's gradient counts one
        loss = sum(loss for loss, _ in ran)
        bad = self.wire.not_finite()
        if not isfinite(loss):
            bad = f"the loss ({loss})"
        if self._scaler is not None:  # it will see, and skip the step
            bad = None
        loss, tokens = super()._totals([(nan, 0.0), *ran] if bad else ran)
        if self._scaler is None and not isfinite(loss):
            raise self._not_finite(bad)
        return loss, tokens

    def _clip(self, clip_norm: float) -> float:
        norm = super()._clip(clip_norm)
        if self._scaler is None and not isfinite(norm):
            raise FloatingPointError(
                f"the gradients' norm is {norm}, though those of each rank were finite: their sum "
                f"overflows; scale the loss, or keep gradients in a wider dtype"
            )
        return norm

    def _not_finite(self, mine: str | None) -> FloatingPointError:
        """The same sentence on every rank."""
        blamed = [
            f"{what} of rank {rank}"
            for rank, what in enumerate(self.wire.everyone(mine))
            if what is not None
        ]
        return FloatingPointError(
            f"not finite: {', '.join(blamed) or 'the sum of the losses of all ranks'}; no rank has "
            f"stepped; look at that rank's batch, lower the learning rate, or clip (clip_norm=), "
            f"and in float16 scale the loss (scaler=)"
        )

    def _require_as_many(self, count: int) -> None:
        """ValueError on all ranks if one has more micro-batches than another. (Sums of other sizes
        would meet on the wire, and gloo ends the whole process.)"""
        counts = self.wire.number_of_each(count)
        for rank, theirs in enumerate(counts):
            if theirs != counts[0]:
                raise ValueError(
                    f"rank {rank} has {theirs} micro-batches where rank 0 has {counts[0]}; give "
                    f"each rank as many as every other"
                )

    def _require_gradients(self) -> None:
        rank = self.rank
        if not (rank.gradients or rank.shard_gradients or rank.in_flight or self._totals_of_step):
            raise RuntimeError(
                "there are no gradients to step by; call loss.backward(), or zero.backward(loss, "
                "tokens), before zero.step()"
            )

    # -------------------------------------------------------------- a loop of the user's own

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not in_backward():  # not a second run of a checkpointed model
            self._queued = False
            self.rank.begin_pass()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not in_backward():
                tensor.register_hook(self._when_backward_begins)

    def _when_backward_begins(self, gradient: Tensor) -> None:
        if not self._queued:
            self._queued = True
            when_backward_ends(self._when_backward_ends)

    def _when_backward_ends(self) -> None:
        self._queued = False
        self.rank.end_pass()

    def _each(self, turn: Any, phase: str | None = None) -> list[Any]:
        self._stepping = True
        try:
            return super()._each(turn, phase)
        finally:
            self._stepping = False

    def _refuse_lonely_step(self, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                "this optimizer steps one rank's shards, and the ranks have to step together; call "
                "zero.step() instead"
            )


# ------------------------------------------------------------------ the same on all ranks


def _agreed_plan(
    wire: GroupWire,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: Sequence[str] | None,
    settings: dict[str, Any],
) -> Partition:
    """This rank's plan, which is that of all others."""
    stage, problem, lines = settings["stage"], None, []
    by_unit = True if settings["overlap"] and stage in (0, 1) else None
    try:
        plan = plan_of(model, optimizer, wire.ranks, stage, units, by_unit)
        lines = [*_settings_lines(optimizer, settings), *_weight_lines(plan, model)]
    except (TypeError, ValueError) as error:
        problem = error
    told = wire.everyone(
        (None if problem is None else f"{type(problem).__name__}: {problem}", lines)
    )
    if problem is not None:
        raise problem
    for rank, (error, theirs) in enumerate(told):
        if error is not None:
            raise ValueError(f"rank {rank} cannot take part: {error}")
        if theirs != told[0][1]:
            raise ValueError(
                f"rank {rank} has {_first_difference(theirs, told[0][1])}; make the same model and "
                f"optimizer on every rank, and shard them alike"
            )
    return plan


def _settings_lines(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> list[str]:
    kind = type(optimizer).__name__
    return [
        *(f"{name}={value}" for name, value in settings.items()),
        *(
            f"{kind}, group {number}: {name}={value}"
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        ),
    ]


def _weight_lines(plan: Partition, model: nn.Module) -> list[str]:
    places = {
        weight.name: f"unit {bucket.unit or 'all'}, group {weight.group}, trained: {weight.trained}"
        for bucket in plan.buckets
        for weight in bucket.weights
    }
    return [
        f"{name} {'x'.join(map(str, tensor.shape)) or 'single'} {tensor.dtype}, "
        f"{places.get(name, 'whole')}"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


def _first_difference(theirs: list[str], first: list[str]) -> str:
    for one, other in zip(theirs, first, strict=False):
        if one != other:
            return f"[{one}] where rank 0 has [{other}]"
    if len(theirs) > len(first):
        return f"[{theirs[len(first)]}], which rank 0 has not"
    return f"no [{first[len(theirs)]}], which rank 0 has"
