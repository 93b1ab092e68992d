"""Collectives between simulated ranks: count each call, and sum in rank order.

Simulated ranks run one after another. An all-gather can return at once, because shards change only
in the optimizer step. Sums are delivered late: each rank adds its gradients to the running sum, and
the ranks read their parts after all have run. No gradient is read before the step, so this is early
enough. The result of a float sum depends on its order. This order matches one process that
accumulates the same gradients.

The communicator's own copies belong to no rank, so they are hidden from the memory meter.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.internals.torch_internals import disable_current_modes
from memlab.zero.formulas import ring_elements


class Collective(NamedTuple):
    """A kind of collective and its payload: weights, gradients, or numbers (norm, token count)."""

    kind: str
    payload: str


class CollectiveTraffic:
    """Calls, elements and bytes that one rank has sent, by collective."""

    def __init__(self) -> None:
        self.calls: Counter[Collective] = Counter()
        self.elements: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()

    def count(self, kind: str, payload: str, tensor: Tensor, ranks: int) -> None:
        """Record one call on a whole tensor.

        In a ring, a rank sends all shards but one. An all-reduce sends them twice.
        """
        passes = 2 if kind == "all_reduce" else 1
        elements = passes * ring_elements(tensor.numel(), ranks)
        collective = Collective(kind, payload)
        self.calls[collective] += 1
        self.elements[collective] += elements
        self.bytes[collective] += elements * tensor.element_size()

    def model_elements(self) -> int:
        """Return the elements of weights and gradients sent: the paper's multiple of Ψ."""
        return sum(n for sent, n in self.elements.items() if sent.payload != "numbers")

    def model_bytes(self) -> int:
        """Return the bytes of weights and gradients sent."""
        return sum(n for sent, n in self.bytes.items() if sent.payload != "numbers")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveTraffic) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        lines = [
            f"{c.kind} of {c.payload}: {self.calls[c]} calls, {self.elements[c]} elements, "
            f"{self.bytes[c]} B sent"
            for c in sorted(self.calls)
        ]
        return "\n".join(lines) or "nothing sent"

    __repr__ = __str__


Pending = Callable[[], None]  # waits until a started collective is complete


def no_wait() -> None:
    """Return at once: the collective is already complete."""


class Communicator:
    """Connect all ranks of a simulation. ProcessGroupCommunicator connects real processes."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.traffic = {rank: CollectiveTraffic() for rank in range(ranks)}
        self._sums: dict[Hashable, Tensor] = {}
        self._shards: dict[Hashable, dict[int, Tensor]] = {}

    def reset_traffic(self) -> None:
        """Reset the traffic counters."""
        self.traffic = {rank: CollectiveTraffic() for rank in self.traffic}

    def reduce_scatter(self, rank: int, bucket: Any, whole: Tensor) -> Pending:
        """Add a rank's gradients of a bucket to the running sum."""
        self.traffic[rank].count("reduce_scatter", "gradients", whole, self.ranks)
        self._add(bucket, whole)
        return no_wait

    def all_reduce(self, rank: int, bucket: Any, whole: Tensor) -> Pending:
        """Add a rank's gradients of a bucket to the running sum; each rank reads all of it."""
        self.traffic[rank].count("all_reduce", "gradients", whole, self.ranks)
        self._add(bucket, whole)
        return no_wait

    def accumulate(self, shard: Tensor, part: Tensor) -> None:
        """Add a later backward pass to a shard. Here the running sum already contains it."""

    def read_sum(self, bucket: Hashable, part: Tensor, span: slice) -> None:
        """Copy a rank's part of the completed sum into `part`."""
        with untracked():
            part.copy_(self._sums[bucket][span])

    def clear_sums(self) -> None:
        """Start the next sums from zero."""
        self._sums.clear()

    def register_shard(self, rank: int, bucket: Hashable, shard: Tensor) -> None:
        """Register where a rank's shard of a bucket is stored; all-gathers read it there."""
        self._shards.setdefault(bucket, {})[rank] = shard

    def all_gather(self, rank: int, bucket: Any, whole: Tensor) -> Pending:
        """Copy the other ranks' shards into a rank's whole bucket, which holds its own."""
        self.traffic[rank].count("all_gather", "weights", whole, self.ranks)
        with untracked():
            parts = whole.view(self.ranks, -1)
            for owner, shard in self._shards[bucket].items():
                if owner != rank:
                    parts[owner].copy_(shard)
        return no_wait

    def all_reduce_scalar(self, numbers: Iterable[float]) -> float:
        """Return the sum of one scalar per rank, in rank order."""
        self.count_scalar()
        return sum(numbers)

    def count_scalar(self) -> None:
        """Count one float64 scalar per rank: a count of tokens has to be exact."""
        number = torch.zeros((), dtype=torch.float64)
        for traffic in self.traffic.values():
            traffic.count("all_reduce", "numbers", number, self.ranks)

    def _add(self, bucket: Hashable, whole: Tensor) -> None:
        with untracked():
            if bucket in self._sums:
                self._sums[bucket].add_(whole)
            else:
                self._sums[bucket] = whole.clone()


class CountingCommunicator(Communicator):
    """A communicator for one rank alone: it counts traffic and moves no data."""

    def read_sum(self, bucket: Hashable, part: Tensor, span: slice) -> None:
        """Leave `part` unchanged: no other rank contributes."""

    def all_gather(self, rank: int, bucket: Hashable, whole: Tensor) -> Pending:
        """Count the call."""
        self.traffic[rank].count("all_gather", "weights", whole, self.ranks)
        return no_wait

    def _add(self, bucket: Hashable, whole: Tensor) -> None:
        pass


@contextmanager
def untracked() -> Iterator[None]:
    """Hide operations from every dispatch mode (such as a meter) and from autograd."""
    with disable_current_modes(), torch.no_grad():
        yield
