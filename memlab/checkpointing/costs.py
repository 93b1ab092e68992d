"""What a schedule costs before it runs: its peak in bytes, and what it runs again.

A chain is a row of stages: stage i reads the output of stage i-1. Backward goes through them from
the last to the first, whatever the schedule, and that makes the bill compositional. From the
moment when the input of stage i is there to the moment when the gradients of i … j are done, a
schedule adds a peak of its own to what was there before:

    i is plain              max of  saved_i + temporaries           while i runs
                                    saved_i + peak(i+1 … j)
                                    saved_i + temporaries           while its backward runs
    i … k-1 is a segment    max of  output_i-1 + output_i           while they run and keep nothing
                                    output_k-1 + peak(k … j)
                                    peak(i … k-1)                   they run again, keep, go back

where gradients grow: of the weights behind, and of the output of j. The two functions `if_plain`
and `if_segment` are these lines. This file's predictions and the search in
memlab.checkpointing.optimal use them; memlab.planner.block_costs compares them with the meter.

They are exact where all outputs have one size, as a transformer's. Where a later output is larger
than an earlier one, a segment within a segment can hold one input more than is counted here.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate

from memlab.checkpointing.schedules import Schedule, check_schedule


@dataclass(frozen=True)
class Costs:
    """What one stage takes: operations or time in any unit, and bytes. All are integers.

    Its input is not counted with it: that is the output of the stage before. In backward, the
    gradient of the output comes when the output has gone, and takes its place.
    """

    forward: int
    backward: int
    output_bytes: int
    saved_bytes: int  # kept from forward to backward, the output included
    forward_temporaries: int = 0  # bytes at most above saved_bytes, while it runs and keeps
    dropping_temporaries: int = 0  # … above output_bytes, while it runs and keeps nothing
    backward_temporaries: int = 0  # … above saved_bytes, in its backward
    rerun_temporaries: int = 0  # … above saved_bytes, if it ends a segment, from rerun to backward
    gradient_bytes: int = 0  # what its backward leaves: the gradients of its weights
    tail: int = 0  # of forward: what comes after the last tensor kept, where a rerun stops

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"got {field.name}={getattr(self, field.name)}; give 0 or more")
        if self.saved_bytes < self.output_bytes:
            raise ValueError(
                f"got saved_bytes={self.saved_bytes}, less than output_bytes={self.output_bytes}; "
                f"the next stage needs the output, so count it in"
            )


NOTHING = Costs(0, 0, 0, 0)


@dataclass(frozen=True)
class Chain:
    """The stages that a schedule arranges, and what stands around them.

    `first` (an embedding) and `last` (norm and loss) are always plain. `held_bytes` are there all
    the time (weights, tokens); `call_bytes` is what a segment keeps beside its input.
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
        """The stages by number, and last the last one."""
        return (*self.stages, self.last)

    @property
    def operations(self) -> int:
        """Of a step that keeps everything."""
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
        """Operations of running i … k-1."""
        return self._forward_before[k] - self._forward_before[i]

    def rerun(self, i: int, k: int) -> int:
        """Operations of running i … k-1 again, as far as backward needs it."""
        return self.forward(i, k) - self.row[k - 1].tail

    def gradient_bytes(self, i: int, k: int) -> int:
        """What the backward passes of i … k-1 leave."""
        return self._gradients_before[k] - self._gradients_before[i]

    def dropping_peak(self, i: int, k: int) -> int:
        """The most bytes while i … k-1 run and keep nothing: an input, an output, temporaries."""
        return self._dropping_peaks[i, k]

    def if_last(self, j: int) -> int:
        """The peak of j alone: it runs, and its backward follows at once."""
        return self.row[j].saved_bytes + self.row[j].rerun_temporaries

    def if_plain(self, i: int, j: int, rest: int) -> int:
        """The peak of i … j if i is plain and i+1 … j have the peak `rest`."""
        stage = self.row[i]
        return stage.saved_bytes + max(
            self.row[j].output_bytes + stage.forward_temporaries,  # the gradient of j's output
            rest,
            self.gradient_bytes(i + 1, j + 1) + stage.backward_temporaries,
        )

    def if_segment(self, i: int, k: int, j: int, own: int, rest: int) -> int:
        """The peak of i … j if i … k-1 is a segment of peak `own`, and k … j have `rest`."""
        running, behind, above = self.segment_terms(i, k, j)
        return max(running, behind + own, above + rest)

    def segment_terms(self, i: int, k: int, j: int) -> tuple[int, int, int]:
        """The three terms of `if_segment`, without `own` and `rest`."""
        return (
            self.call_bytes + self.row[j].output_bytes + self.dropping_peak(i, k),
            self.call_bytes + self.gradient_bytes(k, j + 1),
            self.call_bytes + self.row[k - 1].output_bytes,
        )

    def in_all(self, peak: int) -> int:
        """The peak of a step whose stages and last one have `peak`: with `first`, and all held."""
        all_gradients = self.gradient_bytes(0, len(self.row))
        above = max(
            self.first.forward_temporaries, peak, all_gradients + self.first.backward_temporaries
        )
        return self.held_bytes + self.first.saved_bytes + above


def predicted_peak_bytes(schedule: Schedule, chain: Chain) -> int:
    """The most bytes alive during a forward and a backward pass of the chain."""
    check_schedule(schedule, len(chain.stages))
    return chain.in_all(_peak((*schedule, len(chain.stages)), chain))


def recomputed(schedule: Schedule, chain: Chain) -> int:
    """The operations of forward that run again, in the unit of the stages' `forward`."""
    check_schedule(schedule, len(chain.stages))
    return sum(_again(part, chain) for part in schedule if isinstance(part, tuple))


def _peak(items: Schedule, chain: Chain) -> int:
    """Of stages that run, and go back, as `items` says: a segment's, when it runs again."""
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


def _again(segment: Schedule, chain: Chain) -> int:
    """Operations run again for a segment: all of it, and what the segments in it ask for.

    If it ends with a segment, its rerun has all that backward waits for at that one's input.
    """
    *before, last = segment
    inner = sum(_again(part, chain) for part in before if isinstance(part, tuple))
    start, end = _ends(segment)
    if isinstance(last, int):
        return chain.rerun(start, end + 1) + inner
    return chain.forward(start, _ends(last)[0]) + inner + _again(last, chain)


def _ends(part: int | Schedule) -> tuple[int, int]:
    """The first and the last stage of a part."""
    first, last = part, part
    while isinstance(first, tuple):
        first = first[0]
    while isinstance(last, tuple):
        last = last[-1]
    return first, last
