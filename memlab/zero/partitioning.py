"""Plan which rank owns which elements. The ZeRO simulation and real processes share this plan.

    flat    the weights of a bucket end to end, padded, cut into R shards       stages 0, 1 and 2
            │a a a a a b│b b c c c c│c c c · · ·│
    rows    each weight cut by rows, ⌈rows/R⌉ per rank                          stage 3
            │a a b c c c│a a b c c c│a · · c c c│

One collective moves one bucket. A bucket is R shards of equal size, so it is padded: flat buckets
by up to R − 1 elements, row buckets by up to R − 1 rows of each weight, as in FSDP2. A rank may own
the middle of a row in a flat bucket, and owns only whole rows in a row bucket.

The plan contains names, shapes and dtypes, and no tensors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch

from memlab.zero.stages import ceil_div, require


@dataclass(frozen=True)
class Weight:
    """What the plan needs of a weight. A tied weight appears once, under its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    group: int = 0  # index of its parameter group in the optimizer
    unit: str = ""  # the weights of one unit are gathered or reduced together
    trained: bool = True

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """The rows to distribute; a weight without dimensions has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        return prod(self.shape[1:])


class ShardChunk(NamedTuple):
    """Elements `start` to `stop` - 1 of a flattened weight, stored from `at` on in a shard."""

    weight: Weight
    start: int
    stop: int
    at: int


class Slot(NamedTuple):
    """A weight's place in a bucket: `run` elements per rank, at `at` in each rank's shard.

    In a flat bucket, `run` is the whole weight and `at` counts from the start of the bucket.
    """

    weight: Weight
    at: int
    run: int


@dataclass(frozen=True)
class Bucket:
    """Weights that one collective moves, in R shards of equal size."""

    unit: str
    dtype: torch.dtype
    ranks: int
    slots: tuple[Slot, ...]
    shard_elements: int

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(slot.weight for slot in self.slots)

    @property
    def elements(self) -> int:
        """Elements without padding."""
        return sum(weight.elements for weight in self.weights)

    @property
    def padded_elements(self) -> int:
        return self.ranks * self.shard_elements

    @property
    def trained(self) -> bool:
        """Whether it has gradients to reduce."""
        return any(weight.trained for weight in self.weights)

    def span(self, rank: int) -> slice:
        """Return the slice of the whole bucket that holds a rank's shard."""
        return slice(rank * self.shard_elements, (rank + 1) * self.shard_elements)

    def chunks(self, rank: int) -> list[ShardChunk]:
        """Return the chunks of weights that a rank owns, in the order of its shard."""
        raise NotImplementedError

    def optimizer_spans(self) -> list[tuple[int, slice]]:
        """Return (parameter group, slice of the shard) for each tensor that the optimizer steps.

        The padding is stepped too: it and its gradient are zero.
        """
        raise NotImplementedError


class FlatBucket(Bucket):
    """Weights end to end; a shard is a contiguous range of the whole."""

    def chunks(self, rank: int) -> list[ShardChunk]:
        """Return the overlap of the rank's shard with each weight."""
        span = self.span(rank)
        found = []
        for weight, at, _ in self.slots:
            start, stop = max(at, span.start), min(at + weight.elements, span.stop)
            if start < stop:
                found.append(ShardChunk(weight, start - at, stop - at, start - span.start))
        return found

    def optimizer_spans(self) -> list[tuple[int, slice]]:
        """Return the whole shard."""
        return [(self.weights[0].group, slice(0, self.shard_elements))]


class RowBucket(Bucket):
    """Each weight cut by rows; a shard has rows of each weight."""

    def chunks(self, rank: int) -> list[ShardChunk]:
        """Return the rank's rows of each weight. The last ranks may own fewer rows, or none."""
        found = []
        for weight, at, run in self.slots:
            start, stop = rank * run, min((rank + 1) * run, weight.elements)
            if start < stop:
                found.append(ShardChunk(weight, start, stop, at))
        return found

    def optimizer_spans(self) -> list[tuple[int, slice]]:
        """Return the rows of adjacent weights of one group as one slice."""
        runs = []
        for (group, trained), neighbours in groupby(self.slots, _group_and_trained):
            slots = list(neighbours)
            if trained:
                runs.append((group, slice(slots[0].at, slots[-1].at + slots[-1].run)))
        return runs


@dataclass(frozen=True)
class Partition:
    """All buckets of a model, in the order of its weights."""

    stage: int
    ranks: int
    buckets: tuple[Bucket, ...]

    @property
    def elements(self) -> int:
        """Ψ, which counts a tied weight once."""
        return sum(bucket.elements for bucket in self.buckets)

    @property
    def padded_elements(self) -> int:
        """Ψ with padding, as stored and sent."""
        return sum(bucket.padded_elements for bucket in self.buckets)

    @property
    def shard_elements(self) -> int:
        """The elements that one rank stores, with padding."""
        return sum(bucket.shard_elements for bucket in self.buckets)


def partition(
    weights: Iterable[Weight], *, ranks: int, stage: int, by_unit: bool | None = None
) -> Partition:
    """Return the buckets of these weights for this number of ranks.

    Stages 0 and 1 have one bucket per parameter group and dtype. Stage 2 has one per unit,
    parameter group and dtype, and so have stages 0 and 1 with `by_unit`. Stage 3 has one per unit
    and dtype. Frozen weights have buckets only in stage 3: in the other stages every rank has them
    whole, and no rank sends them.
    """
    require(ranks, stage)
    weights = list(weights)
    if len({weight.name for weight in weights}) < len(weights):
        raise ValueError("got a weight twice; list a tied weight once")
    if stage == 3:
        keys: list[Any] = [(weight.unit, weight.dtype) for weight in weights]
        buckets: list[Any] = [row_bucket(grouped, ranks) for grouped in _grouped(weights, keys)]
    else:
        weights = [weight for weight in weights if weight.trained]
        by_unit = stage == 2 if by_unit is None else by_unit
        keys = [(w.unit if by_unit else "", w.group, w.dtype) for w in weights]
        buckets = [flat_bucket(grouped, ranks) for grouped in _grouped(weights, keys)]
    return Partition(stage, ranks, tuple(buckets))


def flat_bucket(weights: Sequence[Weight], ranks: int) -> FlatBucket:
    """Lay the weights end to end, padded to a multiple of the ranks."""
    slots, at = [], 0
    for weight in weights:
        slots.append(Slot(weight, at, weight.elements))
        at += weight.elements
    return FlatBucket(weights[0].unit, weights[0].dtype, ranks, tuple(slots), ceil_div(at, ranks))


def row_bucket(weights: Sequence[Weight], ranks: int) -> RowBucket:
    """Give each rank ⌈rows/R⌉ rows of each weight."""
    slots, at = [], 0
    for weight in weights:
        run = ceil_div(weight.rows, ranks) * weight.row_elements
        slots.append(Slot(weight, at, run))
        at += run
    return RowBucket(weights[0].unit, weights[0].dtype, ranks, tuple(slots), at)


def _group_and_trained(slot: Slot) -> tuple[int, bool]:
    return slot.weight.group, slot.weight.trained


def _grouped(weights: Iterable[Weight], keys: Iterable[object]) -> Iterator[list[Weight]]:
    """Yield the weights of each key as a list, in the order of the first weight of each key."""
    lists: dict[object, list[Weight]] = {}
    for weight, key in zip(weights, keys, strict=True):
        lists.setdefault(key, []).append(weight)
    yield from lists.values()
