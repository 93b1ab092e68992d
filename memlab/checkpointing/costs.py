"""Predict the peak memory and the recomputation of a schedule.

A chain is a list of stages: stage i reads the output of stage i-1. Every schedule runs backward
from the last stage to the first, so costs compose. Between the moment when stage i's input exists
and the moment when the gradients of i … j are done, a schedule adds this peak:

    i is plain              max of  saved_i + temporaries           while i runs
                                    saved_i + peak(i+1 … j)
                                    saved_i + temporaries           while its backward runs
    i … k-1 is a segment    max of  output_i-1 + output_i           first run, keeps nothing
                                    output_k-1 + peak(k … j)
                                    peak(i … k-1)                   second run, then backward

Gradients add to this: weight gradients of later stages, and the gradient of j's output. `if_plain`
and `if_segment` implement these formulas. This file's predictions and the search in
memlab.checkpointing.optimal use them; memlab.planner.block_costs compares them with the meter.

The formulas are exact if all outputs have the same size, as in a transformer. If a later output is
larger than an earlier one, nested segments can hold one more input than counted here.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate

from memlab.checkpointing.schedules import Schedule, check_schedule


@dataclass(frozen=True)
class Costs:
    """The costs of one stage, as integers: operations or time in any unit, and bytes.

    The input counts as the output of the previous stage. In backward, the gradient of the output
    takes the place of the output.
    """

    forward: int
    backward: int
    output_bytes: int
    saved_bytes: int  # kept from forward to backward, including the output
    forward_temporaries: int = 0  # peak bytes above saved_bytes in a forward that keeps tensors
    dropping_temporaries: int = 0  # … above output_bytes in a forward that keeps nothing
    backward_temporaries: int = 0  # … above saved_bytes in backward
    rerun_temporaries: int = 0  # … above saved_bytes from rerun to backward, at a segment's end
    gradient_bytes: int = 0  # weight gradients, which stay after backward
    tail: int = 0  # operations of forward after the last saved tensor, which a rerun skips

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"got {field.name}={getattr(self, field.name)}; give 0 or more")
        if self.saved_bytes < self.output_bytes:
            raise ValueError(
                f"got saved_bytes={self.saved_bytes}, less than output_bytes={self.output_bytes}; "
                f"the next stage needs the output, so include it in saved_bytes"
            )


NOTHING = Costs(0, 0, 0, 0)


@dataclass(frozen=True)
class Chain:
    """The stages that a schedule arranges, and the fixed parts around them.

    `first` (an embedding) and `last` (norm and loss) are always plain. `held_bytes` (weights,
    tokens) are always allocated. `call_bytes` are kept per segment besides its input.
    """

    stages: tuple[Costs, ...]
    first: Costs = NOTHING
    last: Costs = NOTHING
    held_bytes: int = 0
    call_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("got a chain of no stages; give at least one")

    @cached_property
    def row(self) -> tuple[Costs, ...]:
        """The stages, followed by `last`."""
        return (*self.stages, self.last)

    @property
    def operations(self) -> int:
        """The operations of a step without recomputation."""
        return sum(stage.forward + stage.backward for stage in (self.first, *self.row))

    @cached_property
    def _forward_before(self) -> list[int]:
        return [*accumulate((stage.forward for stage in self.row), initial=0)]

    @cached_property
    def _gradients_before(self) -> list[int]:
        return [*accumulate((stage.gradient_bytes for stage in self.row), initial=0)]

    @cached_property
    def _dropping_peaks(self) -> dict[tuple[int, int], int]:
        peaks = {}
        for i in range(len(self.row)):
            above = peak = 0
            for k, stage in enumerate(self.row[i:], start=i + 1):
                peak = max(peak, above + stage.output_bytes + stage.dropping_temporaries)
                above, peaks[i, k] = stage.output_bytes, peak
        return peaks

    def forward(self, i: int, k: int) -> int:
        """Return the operations of running stages i … k-1."""
        return self._forward_before[k] - self._forward_before[i]

    def rerun(self, i: int, k: int) -> int:
        """Return the operations of rerunning stages i … k-1 up to the last tensor needed."""
        return self.forward(i, k) - self.row[k - 1].tail

    def gradient_bytes(self, i: int, k: int) -> int:
        """Return the bytes of the weight gradients of stages i … k-1."""
        return self._gradients_before[k] - self._gradients_before[i]

    def dropping_peak(self, i: int, k: int) -> int:
        """Return the peak of running i … k-1 without saving: input, output and temporaries."""
        return self._dropping_peaks[i, k]

    def if_last(self, j: int) -> int:
        """Return the peak of stage j alone, whose backward follows immediately."""
        return self.row[j].saved_bytes + self.row[j].rerun_temporaries

    def if_plain(self, i: int, j: int, rest: int) -> int:
        """Return the peak of i … j if i is plain and i+1 … j have the peak `rest`."""
        stage = self.row[i]
        return stage.saved_bytes + max(
            self.row[j].output_bytes + stage.forward_temporaries,  # the gradient of j's output
            rest,
            self.gradient_bytes(i + 1, j + 1) + stage.backward_temporaries,
        )

    def if_segment(self, i: int, k: int, j: int, own: int, rest: int) -> int:
        """Return the peak of i … j for a segment i … k-1 with peak `own`, and k … j with `rest`."""
        running, behind, above = self.segment_terms(i, k, j)
        return max(running, behind + own, above + rest)

    def segment_terms(self, i: int, k: int, j: int) -> tuple[int, int, int]:
        """Return the three terms of `if_segment`, without `own` and `rest`."""
        return (
            self.call_bytes + self.row[j].output_bytes + self.dropping_peak(i, k),
            self.call_bytes + self.gradient_bytes(k, j + 1),
            self.call_bytes + self.row[k - 1].output_bytes,
        )

    def in_all(self, peak: int) -> int:
        """Return the peak of a whole step, given the `peak` of its stages and `last`."""
        all_gradients = self.gradient_bytes(0, len(self.row))
        above = max(
            self.first.forward_temporaries, peak, all_gradients + self.first.backward_temporaries
        )
        return self.held_bytes + self.first.saved_bytes + above


def predicted_peak_bytes(schedule: Schedule, chain: Chain) -> int:
    """Return the peak bytes of a forward and backward pass of the chain."""
    check_schedule(schedule, len(chain.stages))
    return chain.in_all(_peak((*schedule, len(chain.stages)), chain))


def recomputed(schedule: Schedule, chain: Chain) -> int:
    """Return the forward operations that run again, in the unit of the stages' `forward`."""
    check_schedule(schedule, len(chain.stages))
    return sum(_rerun_operations(part, chain) for part in schedule if isinstance(part, tuple))


def _peak(items: Schedule, chain: Chain) -> int:
    """Return the peak of running `items` forward and backward, as in a segment's second run."""
    *before, last = items
    j = _ends(last)[1]
    peak = chain.if_last(j) if isinstance(last, int) else chain.call_bytes + _peak(last, chain)
    for item in reversed(before):
        i, end = _ends(item)
        if isinstance(item, int):
            peak = chain.if_plain(i, j, peak)
        else:
            peak = chain.if_segment(i, end + 1, j, _peak(item, chain), peak)
    return peak


def _rerun_operations(segment: Schedule, chain: Chain) -> int:
    """Return the operations recomputed for a segment, including the segments inside it.

    If the last part is a segment, the rerun stops at its input.
    """
    *before, last = segment
    inner = sum(_rerun_operations(part, chain) for part in before if isinstance(part, tuple))
    start, end = _ends(segment)
    if isinstance(last, int):
        return chain.rerun(start, end + 1) + inner
    return chain.forward(start, _ends(last)[0]) + inner + _rerun_operations(last, chain)


def _ends(part: int | Schedule) -> tuple[int, int]:
    """Return the first and last stage of a part."""
    first, last = part, part
    while isinstance(first, tuple):
        first = first[0]
    while isinstance(last, tuple):
        last = last[-1]
    return first, last
