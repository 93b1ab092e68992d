"""Collectives between simulated ranks: each is counted, and sums are taken in rank order.

Ranks run one after another, so a collective is complete when the last rank has come. Weights can
be gathered at once: shards change at the optimizer's step alone. Sums are handed over late: what a
rank contributes is added to what those before it did, and the ranks get their parts when all have
run, which is soon enough, because nobody reads a gradient before the step. The sum of floats
depends on their order; this order is that of one process that accumulates the same gradients.

The wire's own memory is no rank's, so its copies are hidden from a rank's meter.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.internals.torch_internals import disable_current_modes
from memlab.zero.formulas import ring_elements


class Collective(NamedTuple):
    """What was done, and with what: weights, gradients, or numbers (a norm, a count of tokens)."""

    kind: str
    of: str


class Traffic:
    """What one rank has sent: by collective, how often, how many elements, how many bytes."""

    def __init__(self) -> None:
        self.calls: Counter[Collective] = Counter()
        self.elements: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()

    def count(self, kind: str, of: str, tensor: Tensor, ranks: int) -> None:
        """Note one call on a whole tensor, all of it or what it is to become.

        In a ring, a rank sends all shards but one; an all-reduce does so twice.
        """
        passes = 2 if kind == "all_reduce" else 1
        elements = passes * ring_elements(tensor.numel(), ranks)
        collective = Collective(kind, of)
        self.calls[collective] += 1
        self.elements[collective] += elements
        self.bytes[collective] += elements * tensor.element_size()

    def model_elements(self) -> int:
        """Weights and gradients sent, without single numbers: the paper's multiple of Ψ."""
        return sum(n for of, n in self.elements.items() if of.of != "numbers")

    def model_bytes(self) -> int:
        """The same in bytes."""
        return sum(n for of, n in self.bytes.items() if of.of != "numbers")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traffic) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        lines = [
            f"{c.kind} of {c.of}: {self.calls[c]} calls, {self.elements[c]} elements, "
            f"{self.bytes[c]} B sent"
            for c in sorted(self.calls)
        ]
        return "\n".join(lines) or "nothing sent"

    __repr__ = __str__


Pending = Callable[[], None]  # waits until what was begun is complete


def done() -> None:
    """Nothing to wait for."""


class Wire:
    """Joins all the ranks of a simulation."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.traffic = {rank: Traffic() for rank in range(ranks)}
        self._sums: dict[Hashable, Tensor] = {}
        self._shards: dict[Hashable, dict[int, Tensor]] = {}

    def new_step(self) -> None:
        """Count from zero."""
        self.traffic = {rank: Traffic() for rank in self.traffic}

    def reduce_scatter(self, rank: int, bucket: Hashable, whole: Tensor) -> Pending:
        """Add a rank's gradients of a bucket to those of the ranks before it."""
        self.traffic[rank].count("reduce_scatter", "gradients", whole, self.ranks)
        self._add(bucket, whole)
        return done

    def all_reduce(self, rank: int, bucket: Hashable, whole: Tensor) -> Pending:
        """The same, of which each rank is to get all."""
        self.traffic[rank].count("all_reduce", "gradients", whole, self.ranks)
        self._add(bucket, whole)
        return done

    def add(self, shard: Tensor, part: Tensor) -> None:
        """Add what another backward pass brought to a rank's shard: here, the wire has done it."""

    def summed(self, bucket: Hashable, part: Tensor, span: slice) -> None:
        """Write the sum, now complete, into a rank's part of the bucket."""
        with unseen():
            part.copy_(self._sums[bucket][span])

    def forget_sums(self) -> None:
        """Begin the next sums from nothing."""
        self._sums.clear()

    def publish(self, rank: int, bucket: Hashable, shard: Tensor) -> None:
        """Say once where a rank's shard of a bucket lies; whoever gathers it, reads it there."""
        self._shards.setdefault(bucket, {})[rank] = shard

    def all_gather(self, rank: int, bucket: Hashable, whole: Tensor) -> Pending:
        """Fill the shards of the other ranks into a rank's whole bucket, which has its own."""
        self.traffic[rank].count("all_gather", "weights", whole, self.ranks)
        with unseen():
            parts = whole.view(self.ranks, -1)
            for owner, shard in self._shards[bucket].items():
                if owner != rank:
                    parts[owner].copy_(shard)
        return done

    def all_reduce_numbers(self, numbers: Iterable[float]) -> float:
        """The sum of one number of each rank, in rank order."""
        self.count_number()
        return sum(numbers)

    def count_number(self) -> None:
        """Each rank sends one, in float64: a count of tokens has to be exact."""
        number = torch.zeros((), dtype=torch.float64)
        for traffic in self.traffic.values():
            traffic.count("all_reduce", "numbers", number, self.ranks)

    def _add(self, bucket: Hashable, whole: Tensor) -> None:
        with unseen():
            if bucket in self._sums:
                self._sums[bucket].add_(whole)
            else:
                self._sums[bucket] = whole.clone()


class LooseEnd(Wire):
    """Has one rank at its end and nobody at the others: it counts, and moves nothing."""

    def summed(self, bucket: Hashable, part: Tensor, span: slice) -> None:
        """Nothing came."""

    def all_gather(self, rank: int, bucket: Hashable, whole: Tensor) -> Pending:
        """Count alone."""
        self.traffic[rank].count("all_gather", "weights", whole, self.ranks)
        return done

    def _add(self, bucket: Hashable, whole: Tensor) -> None:
        pass


@contextmanager
def unseen() -> Iterator[None]:
    """Hidden from every meter, and from autograd."""
    with disable_current_modes(), torch.no_grad():
        yield
