"""ZeRO, stages 0 to 3, in real processes that share one optimizer and one model.

Saves    the same as the simulation (memlab.zero.simulation). Each rank is a process, and
         torch.distributed runs the collectives.
Costs    the same communication. `overlap` hides much of it behind backward. It needs memory for one
         gathered unit (stage 3) and keeps one bucket of gradients for longer (stages 2 and 3).
Source   Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277 (FSDP).

A training script, to start with `torchrun --nproc-per-node 2 train.py`:

    import torch
    from memlab.model import GPT, PRESETS
    from memlab.zero import processes

    with processes.joined("gloo", timeout=60) as rank:          # "nccl" on GPUs
        torch.manual_seed(rank)                                 # each rank draws its own data
        model = GPT(PRESETS["tiny"])                            # every rank gets rank 0's values
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

Three lines differ from a script for one process: joined, shard, and zero.step. The gradient is the
mean of the ranks' gradients, as with DistributedDataParallel. If ranks have different numbers of
tokens, this is not the mean over tokens. The following call takes the mean over all tokens, and
also accumulates:

    step = zero.step(micro_batches, sum_of_losses, clip_norm=1.0, scaler=None)

It works as in a simulation, but with this rank's own micro-batches. To run its parts one by one,
call `zero.backward(loss, tokens)` for each micro-batch, with the sum of its losses, then
`zero.step()`.

`zero.save(folder)` and `zero.load(folder)` work with any number of ranks and any stage.

With two ranks and one micro-batch each, weights match the simulation bit for bit. With more ranks,
gloo and NCCL sum in their own order.

Errors reach every rank:

- If a rank dies, stops, or has another model, every other rank raises an error that names it, at
  the latest after the group's timeout.
- If a loss or a gradient of one rank is inf or nan, all ranks raise the same FloatingPointError
  before the step.
- If ranks call `backward` a different number of times in a step, gloo may abort the process without
  a Python error. Set TORCH_DISTRIBUTED_DEBUG=DETAIL to make torch compare the calls first.
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
from memlab.zero.collectives import CollectiveTraffic
from memlab.zero.joining import RankLost, joined
from memlab.zero.partitioning import Partition
from memlab.zero.process_group import ProcessGroupCommunicator
from memlab.zero.ranks import Rank, SumOfLosses
from memlab.zero.simulation import make_plan, rank_class
from memlab.zero.stepping import RankGroup, Step, require_norm

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
    """Shard a model and its optimizer over a process group (None: all processes).

    `stage` is 0 (data parallel) to 3. Every rank gets rank 0's weights and buffers. `units` names
    the modules whose weights are gathered or reduced together; by default, the blocks of the
    outermost lists. With `master_weights` the optimizer steps float32 copies of the shards, for
    bfloat16 weights. With `overlap`, gradients are sent during backward, and the next unit is
    gathered while the current one runs. Without it, memory is the same as in the simulation.

    Raises ValueError on all ranks if their weights, optimizers or settings differ. Otherwise raises
    the errors of `simulate`, on the rank that has them.
    """
    if not dist.is_initialized():
        raise ValueError(
            "this process is in no process group; call shard inside `with processes.joined():`, or "
            "after torch.distributed.init_process_group"
        )
    device = next(model.parameters()).device
    comm = ProcessGroupCommunicator(group, device)
    settings = {"stage": stage, "master_weights": master_weights, "overlap": overlap}
    comm.plan = _agreed_plan(comm, model, optimizer, units, settings)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            comm.broadcast_from_rank_0(tensor)
    rank = rank_class(stage)(
        *(comm.index, model, optimizer, comm.plan, comm),
        master_weights=master_weights,
        overlap=overlap,
    )
    # The user's own optimizer steps the shards from now on, so that its LR schedulers still work.
    optimizer.param_groups = rank.optimizer.param_groups
    optimizer.state = rank.optimizer.state
    rank.optimizer = optimizer
    return Zero(rank, comm)


class Zero(RankGroup):
    """One rank in its process; `model` and `optimizer` are the ones passed to `shard`."""

    comm: ProcessGroupCommunicator

    def __init__(self, rank: Rank, comm: ProcessGroupCommunicator) -> None:
        super().__init__(rank.plan, [rank], comm, meter=None)
        self.rank = rank
        self.model, self.optimizer = rank.model, rank.optimizer
        self._ran: list[tuple[float, float]] = []
        self._totals_of_step: tuple[float, float] | None = None
        self._scaler: Any = None
        self._stepping = False
        self._queued = False
        self._begin()
        # Prepend: a pass begins before the hook that gathers the root's weights.
        self.model.register_forward_pre_hook(self._before_forward, prepend=True)
        self.model.register_forward_hook(self._after_forward)
        self.optimizer.register_step_pre_hook(self._refuse_direct_step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        return self.model(*args, **kwargs)

    @property
    def traffic(self) -> CollectiveTraffic:
        """What this rank has sent since the last step began."""
        return self.comm.traffic[self.rank.index]

    def backward(self, loss: Tensor, tokens: float | Tensor, *, scaler: Any = None) -> None:
        """Run backward on a sum of losses over `tokens` tokens.

        The step divides the gradients by the number of tokens of all ranks.
        """
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.rank.end_pass()
        self._ran.append((float(loss.detach()), float(tokens)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: in stages 0 and 1, backward passes in this block send nothing.

        Wrap every backward pass but the last before a step. Other stages are not affected.
        """
        self.rank.last = False
        try:
            yield
        finally:
            self.rank.last = True

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip all ranks' gradients by their global norm; return the norm before clipping.

        torch's own function does not work here: sums go to the shards and `.grad` is None, so it
        would clip nothing and return 0.
        """
        require_norm(max_norm)
        self._require_gradients()
        self._reduce_gradients(self._ran)
        return self._clip(max_norm)

    def step(
        self,
        micro_batches: Iterable[Any] | None = None,
        sum_of_losses: SumOfLosses | None = None,
        *,
        clip_norm: float | None = None,
        scaler: Any = None,
    ) -> Step:
        """Step with the gradients accumulated since the last step.

        With this rank's micro-batches and `sum_of_losses`, as in a simulation, run those first. The
        result contains only this rank's traffic. Its loss is 0 if gradients did not come from
        `backward(loss, tokens)`.
        """
        require_norm(clip_norm)
        self._scaler = scaler
        try:
            if micro_batches is None:
                self._require_gradients()
                return self._finish(self._ran, clip_norm, scaler)
            if sum_of_losses is None:
                raise TypeError("got micro-batches without sum_of_losses; pass both, or neither")
            micro_batches = list(micro_batches)
            self._require_equal_counts(len(micro_batches))
            return super().step(micro_batches, sum_of_losses, clip_norm=clip_norm, scaler=scaler)
        finally:  # after an error, do not wait for pending collectives
            self._scaler = None
            self.rank.in_flight.clear()
            self.comm.forget_pending()
            self.zero_grad()
            self._begin()

    def zero_grad(self) -> None:
        """Drop accumulated gradients. `step` does this too."""
        self.rank.wait_for_reductions()
        self.rank.gradients.clear()
        self.rank.shard_gradients.clear()
        for optimizer_shard in self.rank.optimizer_shards:
            optimizer_shard.parameter.grad = None
        self._ran, self._totals_of_step = [], None
        self.comm.pop_non_finite()

    def save(self, folder: Path | str, **also: Any) -> None:
        """Save weights, optimizer state and `also`: plain data and tensors, taken from rank 0.

        Each rank writes its own shards. An existing checkpoint is replaced once all ranks wrote.
        """
        save(self.rank, self.comm, Path(folder), also)

    def load(self, folder: Path | str) -> dict[str, Any]:
        """Load what `save` wrote, with any number of ranks and any stage; return `also`.

        Raises FileNotFoundError or ValueError on every rank if one of them finds no checkpoint of
        this model.
        """
        return self._each(lambda rank: load(rank, self.comm, Path(folder)))[0]

    # -------------------------------------------------------------- parts of the step

    def _reduce_gradients(self, ran: list[tuple[float, float]]) -> tuple[float, float]:
        """Reduce the gradients once per step: `clip_grad_norm_` may have done it already."""
        if self._totals_of_step is None:
            self.rank.end_pass()
            self._totals_of_step = super()._reduce_gradients(ran)
        return self._totals_of_step

    def _totals(self, ran: list[tuple[float, float]]) -> tuple[float, float]:
        """Return the same totals on every rank. A rank with non-finite values sends a nan loss."""
        ran = ran or [(0.0, 1.0)]  # each rank's gradient counts as one token
        loss = sum(loss for loss, _ in ran)
        bad = self.comm.pop_non_finite()
        if not isfinite(loss):
            bad = f"the loss ({loss})"
        if self._scaler is not None:  # the scaler finds non-finite gradients and skips the step
            bad = None
        loss, tokens = super()._totals([(nan, 0.0), *ran] if bad else ran)
        if self._scaler is None and not isfinite(loss):
            raise self._not_finite(bad)
        return loss, tokens

    def _clip(self, clip_norm: float) -> float:
        norm = super()._clip(clip_norm)
        if self._scaler is None and not isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} although each rank's gradients are finite: their "
                f"sum overflows; scale the loss, or use a wider dtype for the gradients"
            )
        return norm

    def _not_finite(self, mine: str | None) -> FloatingPointError:
        """Return the same error on every rank."""
        blamed = [
            f"{problem} of rank {rank}"
            for rank, problem in enumerate(self.comm.gather_objects(mine))
            if problem is not None
        ]
        return FloatingPointError(
            f"not finite: {', '.join(blamed) or 'the sum of the losses of all ranks'}; no rank has "
            f"stepped; inspect that rank's batch, lower the learning rate, or clip (clip_norm=), "
            f"and in float16 scale the loss (scaler=)"
        )

    def _require_equal_counts(self, count: int) -> None:
        """Raise ValueError on all ranks if their numbers of micro-batches differ.

        Otherwise collectives of different sizes would meet, and gloo aborts the process.
        """
        counts = self.comm.gather_ints(count)
        for rank, theirs in enumerate(counts):
            if theirs != counts[0]:
                raise ValueError(
                    f"rank {rank} has {theirs} micro-batches where rank 0 has {counts[0]}; pass "
                    f"the same number on every rank"
                )

    def _require_gradients(self) -> None:
        rank = self.rank
        if not (rank.gradients or rank.shard_gradients or rank.in_flight or self._totals_of_step):
            raise RuntimeError(
                "there are no gradients to step with; call loss.backward(), or zero.backward(loss, "
                "tokens), before zero.step()"
            )

    # -------------------------------------------------------------- hooks for a plain training loop

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not in_backward():  # not while a checkpointed model recomputes
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

    def _refuse_direct_step(self, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                "this optimizer holds only one rank's shards, and all ranks have to step together; "
                "call zero.step() instead"
            )


# ------------------------------------------------------------------ agreement between ranks


def _agreed_plan(
    comm: ProcessGroupCommunicator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: Sequence[str] | None,
    settings: dict[str, Any],
) -> Partition:
    """Return this rank's plan after checking that every rank has the same one."""
    stage, problem, lines = settings["stage"], None, []
    by_unit = True if settings["overlap"] and stage in (0, 1) else None
    try:
        plan = make_plan(model, optimizer, comm.ranks, stage, units, by_unit)
        lines = [*_settings_lines(optimizer, settings), *_weight_lines(plan, model)]
    except (TypeError, ValueError) as error:
        problem = error
    reports = comm.gather_objects(
        (None if problem is None else f"{type(problem).__name__}: {problem}", lines)
    )
    if problem is not None:
        raise problem
    for rank, (reason, theirs) in enumerate(reports):
        if reason is not None:
            raise ValueError(f"rank {rank} cannot take part: {reason}")
        if theirs != reports[0][1]:
            raise ValueError(
                f"rank {rank} has {_first_difference(theirs, reports[0][1])}; make the same model "
                f"and optimizer on every rank, and shard them with the same settings"
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
        return f"[{theirs[len(first)]}], which rank 0 does not have"
    return f"no [{first[len(theirs)]}], which rank 0 has"
