"""The wire between real processes: the collectives of `torch.distributed`, counted.

It is to a rank what the wire of a simulation is, but that sums and shards come from other
processes: each collective is begun, and waited for when what it brings is needed. They all work in
place, in the bucket that is sent: a rank's own shard of it is where its part of the sums arrives.
The copies that a backend makes on the way (gloo adds up the whole bucket to give a rank its part)
are its own and on no meter.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memlab.internals.torch_internals import storage_use_count
from memlab.zero.collectives import Pending, Traffic, Wire, unseen
from memlab.zero.joining import lost
from memlab.zero.partitioning import Bucket, Partition

# torch 2.13 gave them new names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LETTING_GO_SECONDS = 1.0
GLANCE_SECONDS = 5e-5  # not 0: the thread that is to let go may need this core


class GroupWire(Wire):
    """Joins the rank of this process to those of the others in a process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(dist.get_world_size(group))
        self.index = dist.get_rank(group)
        self.traffic = {self.index: Traffic()}
        self.plan: Partition | None = None
        self.group, self._device = group, device
        # Only here: what is under way holds connections open, and they are to close if a rank is
        # lost.
        self._works: dict[int, dist.Work] = {}
        self._numbers = count()
        self._extremes: list[tuple[int, Tensor]] = []
        self._bad_weight: str | None = None

    # -------------------------------------------------------------- as in a simulation

    def reduce_scatter(self, rank: int, bucket: int, whole: Tensor) -> Pending:
        """Begin to add up: the sum of the rank's own part comes into its place."""
        self.traffic[rank].count("reduce_scatter", "gradients", whole, self.ranks)
        self._look_at(bucket, whole)
        span = self.plan.buckets[bucket].span(rank)
        doing = f"the reduce-scatter of {self._name(bucket)}"
        return self._begin(
            doing, lambda whole, **how: _reduce_scatter(whole[span], whole, **how), whole
        )

    def all_reduce(self, rank: int, bucket: int, whole: Tensor) -> Pending:
        """The same, of everything."""
        self.traffic[rank].count("all_reduce", "gradients", whole, self.ranks)
        self._look_at(bucket, whole)
        return self._begin(f"the all-reduce of {self._name(bucket)}", dist.all_reduce, whole)

    def all_gather(self, rank: int, bucket: int, whole: Tensor) -> Pending:
        """Begin to fill in the shards of the others."""
        self.traffic[rank].count("all_gather", "weights", whole, self.ranks)
        span = self.plan.buckets[bucket].span(rank)
        doing = f"the all-gather of {self._name(bucket)}"
        return self._begin(
            doing, lambda whole, **how: _all_gather(whole, whole[span], **how), whole
        )

    def add(self, shard: Tensor, part: Tensor) -> None:
        """Add what another backward pass brought."""
        shard.add_(part)

    def summed(self, bucket: Hashable, part: Tensor, span: slice) -> None:
        """It is there."""

    def publish(self, rank: int, bucket: Hashable, shard: Tensor) -> None:
        """Others get it by the all-gather alone."""

    def all_reduce_numbers(self, numbers: Iterable[float]) -> float:
        """The sum of one number of each rank, in the backend's order."""
        self.count_number()
        with unseen(), self.watched("the sum of a number over all ranks"):
            total = torch.tensor(sum(numbers), dtype=torch.float64, device=self._device)
            dist.all_reduce(total, group=self.group)
            return total.item()

    # -------------------------------------------------------------- beside the step

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank gives, in rank order. It is pickled: for what is small and rare."""
        found: list[Any] = [None] * self.ranks
        with unseen(), self.watched("the comparison of all ranks"):
            dist.all_gather_object(found, mine, group=self.group)
        return found

    def number_of_each(self, mine: int) -> list[int]:
        """The same for a number, which is cheap enough for every step; not counted."""
        with unseen(), self.watched("the count of micro-batches"):
            sent = torch.tensor([mine], device=self._device)
            found = [torch.empty_like(sent) for _ in range(self.ranks)]
            dist.all_gather(found, sent, group=self.group)
            return [int(number) for number in found]

    def copy_from_first(self, tensor: Tensor) -> None:
        """Write the values that rank 0 has into those of all."""
        with unseen(), self.watched("the copy of rank 0's values"):
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            values = tensor.detach().contiguous()
            dist.broadcast(values, source, group=self.group)
            tensor.detach().copy_(values)

    def not_finite(self) -> str | None:
        """The first of the rank's own gradients since the last call that held inf or nan."""
        found, self._bad_weight = self._bad_weight, None
        extremes, self._extremes = self._extremes, []
        if found or not extremes:
            return found
        with unseen():
            fine = torch.stack([e for _, e in extremes]).isfinite().all(dim=1).tolist()
        bad = [bucket for (bucket, _), good in zip(extremes, fine, strict=True) if not good]
        return f"a gradient of {self._name(bad[0])}" if bad else None

    def _look_at(self, number: int, whole: Tensor) -> None:
        """Note whether the gradients are finite, before those of others are added.

        One pass that takes no memory. On a GPU the answer is asked for later, when nobody has to
        wait for it, and then says no more than the bucket.
        """
        with unseen():
            extremes = torch.stack(torch.aminmax(whole)).double()
            if whole.device.type != "cpu":
                self._extremes.append((number, extremes))
            elif not self._bad_weight and not all(map(isfinite, extremes.tolist())):
                name = _first_not_finite(self.plan.buckets[number], whole)
                self._bad_weight = f"the gradient of {name}"

    # -------------------------------------------------------------- what is under way

    def forget_works(self) -> None:
        """Wait for nothing any more; what is written to stays alive until it is."""
        self._works.clear()

    def _begin(self, doing: str, collective: Callable[..., Any], whole: Tensor) -> Pending:
        """Begin, with views of a whole bucket, so that it can be told who still has one. Who waits
        has to hold the bucket itself."""
        number, storage = next(self._numbers), whole.untyped_storage()._cdata
        holders = _holders(storage)
        with unseen(), self.watched(doing):
            self._works[number] = collective(whole.view(-1), group=self.group, async_op=True)
        return partial(self._complete, doing, number, storage, holders)

    def _complete(self, doing: str, number: int, storage: int, holders: int) -> None:
        with unseen(), self.watched(doing):  # waiting, gloo copies what came
            self._works.pop(number).wait()
        # A thread of gloo lets go of the bucket a moment later, and until then it would not be
        # free: the same run took more memory one time than another.
        deadline = time.monotonic() + LETTING_GO_SECONDS
        while _holders(storage) > holders and time.monotonic() < deadline:
            time.sleep(GLANCE_SECONDS)

    @contextmanager
    def watched(self, doing: str) -> Iterator[None]:
        """Around what waits for all ranks: RankLost if one of them does not come."""
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self.forget_works()
            group, self.group = self.group, None
            raise lost(doing, error, time.monotonic() - begun, group) from error

    def _name(self, number: int) -> str:
        bucket = self.plan.buckets[number]
        return bucket.unit or f"{len(bucket.slots)} weights"


def _holders(storage: int) -> int:
    """How many tensors share a storage, here and in threads of torch; 0 where nothing tells."""
    return storage_use_count(storage)


def _first_not_finite(bucket: Bucket, whole: Tensor) -> str:
    """The weight that the first inf or nan of a bucket belongs to."""
    place = int((~whole.isfinite()).nonzero()[0])
    for rank in range(bucket.ranks):
        for piece in bucket.pieces(rank):
            at = bucket.span(rank).start + piece.at
            if at <= place < at + piece.stop - piece.start:
                return piece.weight.name
    raise AssertionError(f"{place} is in the padding, which is zero")
