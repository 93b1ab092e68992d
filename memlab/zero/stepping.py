"""One step of ZeRO for the ranks in this process: all simulated ranks, or one real rank.

    run each micro-batch ── sum gradients over ranks ── divide by all tokens ── clip ── step

The ranks take turns in each phase. A communicator exchanges shared values: the number of tokens,
the norm, and any overflow. The step is the same for simulated ranks and for real processes.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab.trace import Trace
from memlab.zero.collectives import CollectiveTraffic, Communicator
from memlab.zero.partitioning import Partition
from memlab.zero.ranks import Rank, SumOfLosses
from memlab.zero.traces import gathered_at_peak, join_traces
from memlab.zero.units import ROOT

Meter = Callable[[nn.Module, torch.optim.Optimizer], Any]  # memlab.meter


@dataclass(frozen=True, repr=False)
class Step:
    """The result of a step: mean loss per token, gradient norm if clipped, and skipped or not.

    `traffic` and `traces` have one entry per rank; `traces` is empty without a meter. `units` lists
    the units of the plan without the root, in the order of their weights.
    """

    loss: float
    tokens: float
    norm: float | None
    stepped: bool
    traffic: tuple[CollectiveTraffic, ...]
    traces: tuple[Trace, ...]
    stage: int
    units: tuple[str, ...]

    def gathered_at_peak(self, rank: int = 0) -> dict[str, int]:
        """Return the bytes of whole weights at the rank's peak, by unit (stage 3)."""
        if self.stage < 3:
            return {}
        if not self.traces:
            raise ValueError(
                "this step was not metered, so its peak is not known; pass meter=memlab.meter to "
                "simulate or one_rank (a rank in a real process meters itself)"
            )
        return gathered_at_peak(self.traces[rank], self.units)

    def __repr__(self) -> str:
        norm = "" if self.norm is None else f", norm {self.norm:.4g}"
        skipped = "" if self.stepped else ", skipped"
        metered = ", metered" if self.traces else ""
        return (
            f"<Step of stage {self.stage}, {len(self.traffic)} ranks{metered}: "
            f"loss {self.loss:.4g} over {self.tokens:g} tokens{norm}{skipped}>"
        )


class RankGroup:
    """The ranks in this process, all or one of them, and their step."""

    def __init__(
        self, plan: Partition, ranks: Sequence[Rank], comm: Communicator, meter: Meter | None
    ) -> None:
        _require_meter(meter)
        self.plan, self.ranks, self.comm = plan, ranks, comm
        self._meter = meter
        self._traces: list[list[Trace]] = []  # by rank: one trace per turn
        self._phases: list[str | None] = []

    def step(
        self,
        micro_batches: Iterable[Any],
        sum_of_losses: SumOfLosses,
        *,
        clip_norm: float | None = None,
        scaler: Any = None,
    ) -> Step:
        """Step the optimizer with the gradient of the mean loss over all tokens.

        `sum_of_losses(model, micro_batch)` returns the sum of the losses of its tokens and the
        number of tokens, as for `accumulate`:

            def sum_of_losses(model, batch):
                tokens, targets = batch
                return model(tokens, targets) * targets.numel(), targets.numel()

        Pass as many micro-batches as simulated ranks, or a multiple. `clip_norm` clips the
        gradients to this norm over all weights. `scaler`, a LossScaler or torch's GradScaler,
        scales each loss; the ranks agree on whether to step.
        """
        require_norm(clip_norm)
        count, micro_batches = len(self.ranks), list(micro_batches)
        if not micro_batches or len(micro_batches) % count:
            raise ValueError(
                f"got {len(micro_batches)} micro-batches for {count} ranks; pass the same number "
                f"for each rank"
            )
        self._begin()
        ran: list[tuple[float, float]] = []
        dealt = iter(micro_batches)
        rounds = len(micro_batches) // count
        for number in range(rounds):
            for rank in self.ranks:
                rank.last = number == rounds - 1
            ran += self._each(lambda rank: rank.run(next(dealt), sum_of_losses, scaler))
        return self._finish(ran, clip_norm, scaler)

    # -------------------------------------------------------------- parts of the step

    def _begin(self) -> None:
        """Reset the traffic counters and the traces."""
        self.comm.reset_traffic()
        self._traces, self._phases = [[] for _ in self.ranks], []

    def _finish(self, ran: list[tuple[float, float]], clip_norm: float | None, scaler: Any) -> Step:
        """Run everything that follows the last backward pass."""
        loss, tokens = self._reduce_gradients(ran)
        overflowed = scaler is not None and self._unscale(scaler)
        norm = None if clip_norm is None else self._clip(clip_norm)
        self._each(lambda rank: rank.step(scaler), "optimizer")
        if scaler is not None:
            scaler.update()
        self._each(lambda rank: rank.gather(), "optimizer")
        return Step(
            loss / max(tokens, 1),
            tokens,
            norm,
            not overflowed,
            tuple(self.comm.traffic[rank.index] for rank in self.ranks),
            tuple(join_traces(traces, self._phases) for traces in self._traces if traces),
            self.plan.stage,
            self._units(),
        )

    def _units(self) -> tuple[str, ...]:
        """Return the units of all weights; in stages 0 and 1 a bucket may span several units."""
        units = dict.fromkeys(w.unit for bucket in self.plan.buckets for w in bucket.weights)
        return tuple(unit for unit in units if unit != ROOT)

    def _reduce_gradients(self, ran: list[tuple[float, float]]) -> tuple[float, float]:
        """Hand the summed gradients, divided by the number of tokens, to the optimizers.

        Returns the sums of losses and tokens over all ranks.
        """
        self._each(lambda rank: rank.reduce(), "backward")
        for rank in self.ranks:
            rank.read_sums()
        self.comm.clear_sums()
        loss, tokens = self._totals(ran)
        self._each(lambda rank: rank.set_gradients_(max(tokens, 1)), "optimizer")
        return loss, tokens

    def _totals(self, ran: list[tuple[float, float]]) -> tuple[float, float]:
        """Return the losses and tokens of all ranks; each is one scalar to communicate."""
        loss, tokens = (sum(numbers) for numbers in zip(*ran, strict=True))
        return self.comm.all_reduce_scalar([loss]), self.comm.all_reduce_scalar([tokens])

    def _unscale(self, scaler: Any) -> bool:
        """Divide the gradients by the scale; return whether any rank overflowed."""
        flags = self._each(lambda rank: rank.overflows(), "optimizer")
        overflowed = self._sum_over_ranks(flags) > 0
        self._each(lambda rank: rank.unscale(scaler, overflowed), "optimizer")
        return overflowed

    def _clip(self, clip_norm: float) -> float:
        """Clip the gradients; return the norm before clipping."""
        squared_norms = self._each(lambda rank: rank.squared_norm(), "optimizer")
        norm = self._sum_over_ranks(squared_norms) ** 0.5
        coefficient = min(1.0, clip_norm / (norm + 1e-6))
        self._each(lambda rank: rank.clip(coefficient), "optimizer")
        return norm

    def _sum_over_ranks(self, numbers: list[float]) -> float:
        """Sum one scalar per shard. In stage 0 every rank has all gradients and sends nothing."""
        return self.comm.all_reduce_scalar(numbers) if self.plan.stage else numbers[0]

    def _each(self, turn: Callable[[Rank], Any], phase: str | None = None) -> list[Any]:
        """Run `turn` for each rank under its own meter."""
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
        # Without a forward pass, tensors that outlive the turn are not activations.
        running = self._meter(rank.model, rank.optimizer)
        with torch.set_grad_enabled(not in_step), running:
            yield
        self._traces[number].append(running.trace)


def require_norm(clip_norm: float | None) -> None:
    """Raise ValueError for a norm that gradients cannot be clipped to."""
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"got clip_norm={clip_norm!r}; pass a norm above 0, or None not to clip")


def _require_meter(meter: Any) -> None:
    """Raise TypeError for a meter that cannot be made from a rank's model and optimizer."""
    if meter is None:
        return
    try:
        inspect.signature(meter).bind("model", "optimizer")
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"got meter={getattr(meter, '__name__', repr(meter))}, which is not a context manager "
            f"made from a model and an optimizer; pass meter=memlab.meter"
        ) from error
