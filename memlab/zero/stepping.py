"""A step of ZeRO, as the ranks that one process has take it: all of a simulation, or its own one.

    run each micro-batch ── add gradients up over ranks ── divide by all tokens ── clip ── step

The ranks take turns at each of these, and what they have to agree on (the number of tokens, the
norm, whether anything overflowed) goes over the wire. Behind it are other ranks of this process, or
other processes; the step is the same.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab.trace import Trace
from memlab.zero.collectives import Traffic, Wire
from memlab.zero.partitioning import Partition
from memlab.zero.ranks import Rank, SumOfLosses
from memlab.zero.traces import gathered_at_peak, joined
from memlab.zero.units import ROOT

Meter = Callable[[nn.Module, torch.optim.Optimizer], Any]  # memlab.meter


@dataclass(frozen=True, repr=False)
class Step:
    """What a step did: the mean loss of its tokens, the gradients' norm if they were clipped,
    whether the optimizers stepped, and for each rank what it sent and its trace, if metered.

    `units` are those of the plan, in the order of their weights, without the root.
    """

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
        if not self.traces:
            raise ValueError(
                "this step was not metered, and nobody knows its peak; give simulate, or one_rank, "
                "meter=memlab.meter (a rank of real processes meters itself: `with memlab.meter(`)"
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


class Ranks:
    """The ranks in this process, all or one of them, and their step."""

    def __init__(
        self, plan: Partition, ranks: Sequence[Rank], wire: Wire, meter: Meter | None
    ) -> None:
        _require_meter(meter)
        self.plan, self.ranks, self.wire = plan, ranks, wire
        self._meter = meter
        self._pieces: list[list[Trace]] = []
        self._phases: list[str | None] = []

    def step(
        self,
        micro_batches: Iterable[Any],
        sum_of_losses: SumOfLosses,
        *,
        clip_norm: float | None = None,
        scaler: Any = None,
    ) -> Step:
        """One step of the optimizer by the gradient of the mean loss over all tokens.

        `sum_of_losses(model, micro_batch)` returns two, the sum of the losses of its tokens and
        their number, as for `accumulate`:

            def sum_of_losses(model, batch):
                tokens, targets = batch
                return model(tokens, targets) * targets.numel(), targets.numel()

        There are as many micro-batches as simulated ranks, or a multiple. With `clip_norm`,
        gradients are clipped to that norm over all weights. `scaler` is a LossScaler or torch's own
        GradScaler: it scales each loss, and ranks agree on whether to step.
        """
        require_norm(clip_norm)
        count, micro_batches = len(self.ranks), list(micro_batches)
        if not micro_batches or len(micro_batches) % count:
            raise ValueError(
                f"got {len(micro_batches)} micro-batches for {count} ranks; give each rank as "
                f"many as every other"
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

    # -------------------------------------------------------------- its parts

    def _begin(self) -> None:
        """Count, and meter, from zero."""
        self.wire.new_step()
        self._pieces, self._phases = [[] for _ in self.ranks], []

    def _finish(self, ran: list[tuple[float, float]], clip_norm: float | None, scaler: Any) -> Step:
        """All that follows the last backward pass."""
        loss, tokens = self._add_up(ran)
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
            tuple(self.wire.traffic[rank.index] for rank in self.ranks),
            tuple(joined(pieces, self._phases) for pieces in self._pieces if pieces),
            self.plan.stage,
            self._units(),
        )

    def _units(self) -> tuple[str, ...]:
        """In stages 0 and 1, where a bucket has weights of several, too."""
        units = dict.fromkeys(w.unit for bucket in self.plan.buckets for w in bucket.weights)
        return tuple(unit for unit in units if unit != ROOT)

    def _add_up(self, ran: list[tuple[float, float]]) -> tuple[float, float]:
        """Hand the gradients of all ranks to the optimizers, divided by the number of tokens; the
        sums of losses and tokens."""
        self._each(lambda rank: rank.reduce(), "backward")
        for rank in self.ranks:
            rank.receive()
        self.wire.forget_sums()
        loss, tokens = self._totals(ran)
        self._each(lambda rank: rank.hand_to_optimizer(max(tokens, 1)), "optimizer")
        return loss, tokens

    def _totals(self, ran: list[tuple[float, float]]) -> tuple[float, float]:
        """Losses and tokens of all micro-batches of all ranks; one number each on the wire."""
        loss, tokens = (sum(numbers) for numbers in zip(*ran, strict=True))
        return self.wire.all_reduce_numbers([loss]), self.wire.all_reduce_numbers([tokens])

    def _unscale(self, scaler: Any) -> bool:
        """Divide the gradients by the scale; whether those of any rank overflowed."""
        flags = self._each(lambda rank: rank.overflows(), "optimizer")
        overflowed = self._over_shards(flags) > 0
        self._each(lambda rank: rank.unscale(scaler, overflowed), "optimizer")
        return overflowed

    def _clip(self, clip_norm: float) -> float:
        """Shorten the gradients to the norm; what it was before."""
        squares = self._each(lambda rank: rank.squares(), "optimizer")
        norm = self._over_shards(squares) ** 0.5
        coefficient = min(1.0, clip_norm / (norm + 1e-6))
        self._each(lambda rank: rank.clip(coefficient), "optimizer")
        return norm

    def _over_shards(self, numbers: list[float]) -> float:
        """The sum of what each rank says of its shards. In stage 0 each has everything, and nobody
        has to be asked."""
        return self.wire.all_reduce_numbers(numbers) if self.plan.stage else numbers[0]

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


def require_norm(clip_norm: float | None) -> None:
    """ValueError for what gradients cannot be clipped to."""
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"got clip_norm={clip_norm!r}; give a norm above 0, or None not to clip")


def _require_meter(meter: Any) -> None:
    """TypeError for what cannot meter each rank in turn."""
    if meter is None:
        return
    try:
        inspect.signature(meter).bind("model", "optimizer")
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"got meter={getattr(meter, '__name__', repr(meter))}, which is no context manager "
            f"around a rank's turns, made of its model and optimizer; give meter=memlab.meter"
        ) from error
