"""Who owns which numbers: the plan that a ZeRO simulation and real processes share.

    flat    the weights of a bucket laid end to end, padded, cut into R runs    stages 0, 1 and 2
            │a a a a a b│b b c c c c│c c c · · ·│
    rows    each weight cut by its rows, ⌈rows/R⌉ to a rank                     stage 3
            │a a b c c c│a a b c c c│a · · c c c│

A bucket is what one collective moves. It is R shards of one size, so it is padded: flat buckets by
up to R − 1 numbers, rows by up to R − 1 rows of each weight, which is what FSDP2 does. In a flat
bucket a rank may own the middle of a weight; by rows it always owns whole ones.

Nothing here touches a number: weights are names, shapes and dtypes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

STAGES = {
    0: "data parallel: everything on every rank",
    1: "the optimizer's state in shards",
    2: "the gradients too",
    3: "the weights too",
}


@dataclass(frozen=True)
class Weight:
    """What is to be known of a weight. A tied one is one, under its first name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    group: int = 0  # of the optimizer's parameter groups
    unit: str = ""  # what is gathered, or reduced, together with it
    trained: bool = True

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """What can be dealt out by rows; a weight without dimensions is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        return prod(self.shape[1:])


class Piece(NamedTuple):
    """The numbers from `start` to before `stop` of a flattened weight, `at` a place in a shard."""

    weight: Weight
    start: int
    stop: int
    at: int


class Slot(NamedTuple):
    """A weight's place in a bucket: runs of `run` numbers, each `at` its place in a rank's shard.

    In a flat bucket there is one run, and `at` counts from the begin of the bucket.
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
        """Without padding."""
        return sum(weight.elements for weight in self.weights)

    @property
    def padded_elements(self) -> int:
        return self.ranks * self.shard_elements

    @property
    def trained(self) -> bool:
        """Whether it has gradients to reduce."""
        return any(weight.trained for weight in self.weights)

    def span(self, rank: int) -> slice:
        """Where the shard of a rank is in the whole bucket."""
        return slice(rank * self.shard_elements, (rank + 1) * self.shard_elements)

    def pieces(self, rank: int) -> list[Piece]:
        """What a rank owns, in the order of its shard."""
        raise NotImplementedError

    def stepped(self) -> list[tuple[int, slice]]:
        """(parameter group, where in a shard) of what the optimizer of a rank steps as one.

        The padding is stepped too: it is zero, and so is its gradient.
        """
        raise NotImplementedError


class FlatBucket(Bucket):
    """Weights end to end; a shard is a run of the whole."""

    def pieces(self, rank: int) -> list[Piece]:
        """The overlap of the rank's span with each weight."""
        span = self.span(rank)
        found = []
        for weight, at, _ in self.slots:
            start, stop = max(at, span.start), min(at + weight.elements, span.stop)
            if start < stop:
                found.append(Piece(weight, start - at, stop - at, start - span.start))
        return found

    def stepped(self) -> list[tuple[int, slice]]:
        """All of it."""
        return [(self.weights[0].group, slice(0, self.shard_elements))]


class RowBucket(Bucket):
    """Each weight cut by rows; a shard has some of each."""

    def pieces(self, rank: int) -> list[Piece]:
        """The last ranks may have fewer rows of a weight, or none."""
        found = []
        for weight, at, run in self.slots:
            start, stop = rank * run, min((rank + 1) * run, weight.elements)
            if start < stop:
                found.append(Piece(weight, start, stop, at))
        return found

    def stepped(self) -> list[tuple[int, slice]]:
        """The rows of neighbours of one group."""
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
        """Ψ: a tied weight counts once."""
        return sum(bucket.elements for bucket in self.buckets)

    @property
    def padded_elements(self) -> int:
        """Ψ as it is stored and sent."""
        return sum(bucket.padded_elements for bucket in self.buckets)

    @property
    def shard_elements(self) -> int:
        """What one rank holds of it."""
        return sum(bucket.shard_elements for bucket in self.buckets)


def partition(
    weights: Iterable[Weight], *, ranks: int, stage: int, by_unit: bool | None = None
) -> Partition:
    """The buckets of these weights for so many ranks.

    Stages 0 and 1 have one for each parameter group and dtype, stage 2 one for each of these in
    each unit (so have 0 and 1 with `by_unit`), stage 3 one for each dtype in each unit. Weights
    that are not trained have a bucket in stage 3 alone: in the others each rank has them whole, and
    nobody sends them.
    """
    require(ranks, stage)
    weights = list(weights)
    if len({weight.name for weight in weights}) < len(weights):
        raise ValueError("got a weight twice; name a tied weight once")
    if stage == 3:
        keys = [(weight.unit, weight.dtype) for weight in weights]
        buckets = [row_bucket(together, ranks) for together in _grouped(weights, keys)]
    else:
        weights = [weight for weight in weights if weight.trained]
        by_unit = stage == 2 if by_unit is None else by_unit
        keys = [(w.unit if by_unit else "", w.group, w.dtype) for w in weights]
        buckets = [flat_bucket(together, ranks) for together in _grouped(weights, keys)]
    return Partition(stage, ranks, tuple(buckets))


def flat_bucket(weights: Sequence[Weight], ranks: int) -> FlatBucket:
    """The weights end to end, padded to a multiple of the ranks."""
    slots, at = [], 0
    for weight in weights:
        slots.append(Slot(weight, at, weight.elements))
        at += weight.elements
    return FlatBucket(weights[0].unit, weights[0].dtype, ranks, tuple(slots), ceil_div(at, ranks))


def row_bucket(weights: Sequence[Weight], ranks: int) -> RowBucket:
    """⌈rows/R⌉ rows of each weight to a rank."""
    slots, at = [], 0
    for weight in weights:
        run = ceil_div(weight.rows, ranks) * weight.row_elements
        slots.append(Slot(weight, at, run))
        at += run
    return RowBucket(weights[0].unit, weights[0].dtype, ranks, tuple(slots), at)


def require(ranks: int, stage: int) -> None:
    """ValueError for what is no number of ranks or no stage, TypeError for what is no whole one."""
    if not isinstance(ranks, int):
        raise TypeError(f"got {ranks!r} as number of ranks; give a whole number, such as 2")
    if ranks < 1:
        raise ValueError(f"got {ranks} ranks; give at least 1")
    if stage not in STAGES:
        listed = "; ".join(f"{number}, {what}" for number, what in STAGES.items())
        raise ValueError(f"got stage {stage!r}; give one of {listed}")


def ceil_div(count: int, parts: int) -> int:
    """⌈count / parts⌉"""
    return -(-count // parts)


def _group_and_trained(slot: Slot) -> tuple[int, bool]:
    return slot.weight.group, slot.weight.trained


def _grouped(weights: Iterable[Weight], keys: Iterable[object]) -> Iterator[list[Weight]]:
    """Lists of the weights with one key, by the first of each."""
    lists: dict[object, list[Weight]] = {}
    for weight, key in zip(weights, keys, strict=True):
        lists.setdefault(key, []).append(weight)
    yield from lists.values()
