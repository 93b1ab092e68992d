"""Connect real processes: the collectives of `torch.distributed`, counted and checked.

ProcessGroupCommunicator has the interface of the simulation's Communicator. Each collective starts
asynchronously, and the rank waits when it needs the result. All collectives work in place: a rank's
own part of the sum arrives in its own shard of the bucket. Backends copy internally (gloo sums the
whole bucket to give a rank its part). No memory meter counts these copies.
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
from memlab.zero.collectives import CollectiveTraffic, Communicator, Pending, untracked
from memlab.zero.joining import rank_lost_error
from memlab.zero.partitioning import Bucket, Partition

# torch 2.13 renamed both functions.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

RELEASE_TIMEOUT_SECONDS = 1.0
RELEASE_POLL_SECONDS = 5e-5  # not 0: gloo's thread may need this core to release the bucket


class ProcessGroupCommunicator(Communicator):
    """Connect the rank in this process to the other ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(dist.get_world_size(group))
        self.index = dist.get_rank(group)
        self.traffic = {self.index: CollectiveTraffic()}
        self.plan: Partition  # set once all ranks have agreed on it
        self.group, self._device = group, device
        # Pending works hold connections open. Keep them only here, so that they can be closed when
        # a rank is lost.
        self._works: dict[int, dist.Work] = {}
        self._numbers = count()
        self._extremes: list[tuple[int, Tensor]] = []
        self._bad_weight: str | None = None

    # -------------------------------------------------------------- the simulation's interface

    def reduce_scatter(self, rank: int, bucket: int, whole: Tensor) -> Pending:
        """Start the sum over ranks; the rank's own part arrives in its shard of the bucket."""
        self.traffic[rank].count("reduce_scatter", "gradients", whole, self.ranks)
        self._check_finite(bucket, whole)
        span = self.plan.buckets[bucket].span(rank)
        doing = f"the reduce-scatter of {self._name(bucket)}"
        return self._start(
            doing, lambda whole, **how: _reduce_scatter(whole[span], whole, **how), whole
        )

    def all_reduce(self, rank: int, bucket: int, whole: Tensor) -> Pending:
        """Start the sum over ranks of the whole bucket."""
        self.traffic[rank].count("all_reduce", "gradients", whole, self.ranks)
        self._check_finite(bucket, whole)
        return self._start(f"the all-reduce of {self._name(bucket)}", dist.all_reduce, whole)

    def all_gather(self, rank: int, bucket: int, whole: Tensor) -> Pending:
        """Start filling in the shards of the other ranks."""
        self.traffic[rank].count("all_gather", "weights", whole, self.ranks)
        span = self.plan.buckets[bucket].span(rank)
        doing = f"the all-gather of {self._name(bucket)}"
        return self._start(
            doing, lambda whole, **how: _all_gather(whole, whole[span], **how), whole
        )

    def accumulate(self, shard: Tensor, part: Tensor) -> None:
        """Add a later backward pass to a shard."""
        shard.add_(part)

    def read_sum(self, bucket: Hashable, part: Tensor, span: slice) -> None:
        """Do nothing: the sum has already arrived in `part`."""

    def register_shard(self, rank: int, bucket: Hashable, shard: Tensor) -> None:
        """Do nothing: the all-gather sends the shard."""

    def all_reduce_scalar(self, numbers: Iterable[float]) -> float:
        """Return the sum of one scalar per rank, in the backend's order."""
        self.count_scalar()
        with untracked(), self.naming_lost_ranks("the all-reduce of a scalar"):
            total = torch.tensor(sum(numbers), dtype=torch.float64, device=self._device)
            dist.all_reduce(total, group=self.group)
            return total.item()

    # -------------------------------------------------------------- outside the step

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return one object per rank, in rank order; pickled, so only for small, rare objects."""
        found: list[Any] = [None] * self.ranks
        with untracked(), self.naming_lost_ranks("the comparison of all ranks"):
            dist.all_gather_object(found, mine, group=self.group)
        return found

    def gather_ints(self, mine: int) -> list[int]:
        """Return one integer per rank. Cheap enough for every step; not counted as traffic."""
        with untracked(), self.naming_lost_ranks("the count of micro-batches"):
            # gloo aborts a process, with SIGABRT and no Python error, if the ranks' sizes differ.
            # So they agree on the number of micro-batches first
            # (test_every_rank_gets_an_error_that_shows_the_difference).
            sent = torch.tensor([mine], dtype=torch.int64, device=self._device)
            found = [torch.empty_like(sent) for _ in range(self.ranks)]
            dist.all_gather(found, sent, group=self.group)
            return [int(number) for number in found]

    def broadcast_from_rank_0(self, tensor: Tensor) -> None:
        """Copy rank 0's values into the tensor of every rank."""
        with untracked(), self.naming_lost_ranks("the copy of rank 0's values"):
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            values = tensor.detach().contiguous()
            dist.broadcast(values, source, group=self.group)
            tensor.detach().copy_(values)

    def pop_non_finite(self) -> str | None:
        """Return the first of this rank's gradients since the last call to hold inf or nan."""
        found, self._bad_weight = self._bad_weight, None
        extremes, self._extremes = self._extremes, []
        if found or not extremes:
            return found
        with untracked():
            fine = torch.stack([e for _, e in extremes]).isfinite().all(dim=1).tolist()
        bad = [bucket for (bucket, _), good in zip(extremes, fine, strict=True) if not good]
        return f"a gradient of {self._name(bad[0])}" if bad else None

    def _check_finite(self, number: int, whole: Tensor) -> None:
        """Record whether this rank's gradients are finite, before the other ranks' are added.

        This takes one pass and no memory. On a GPU the result is read later, to avoid a
        synchronization, and then names only the bucket.
        """
        with untracked():
            extremes = torch.stack(torch.aminmax(whole)).double()
            if whole.device.type != "cpu":
                self._extremes.append((number, extremes))
            elif not self._bad_weight and not all(map(isfinite, extremes.tolist())):
                name = _first_not_finite(self.plan.buckets[number], whole)
                self._bad_weight = f"the gradient of {name}"

    # -------------------------------------------------------------- pending collectives

    def forget_pending(self) -> None:
        """Stop tracking pending works. torch keeps their tensors alive until they finish."""
        self._works.clear()

    def _start(self, doing: str, collective: Callable[..., Any], whole: Tensor) -> Pending:
        """Start a collective on a view of the bucket; the caller must hold the bucket itself.

        The storage's use count then shows when the backend has released the view.
        """
        number, storage = next(self._numbers), whole.untyped_storage()._cdata
        users = storage_use_count(storage)
        with untracked(), self.naming_lost_ranks(doing):
            self._works[number] = collective(whole.view(-1), group=self.group, async_op=True)
        return partial(self._wait, doing, number, storage, users)

    def _wait(self, doing: str, number: int, storage: int, users: int) -> None:
        with untracked(), self.naming_lost_ranks(doing):  # gloo copies the result inside wait()
            self._works.pop(number).wait()
        # A gloo thread releases the bucket a moment later, and until then its memory is not free.
        # Without this wait, the peak would vary from run to run.
        # A second reference to the same tensor does not change the use count, so the collective got
        # a view (test_without_overlap_the_peak_equals_the_simulations).
        deadline = time.monotonic() + RELEASE_TIMEOUT_SECONDS
        while storage_use_count(storage) > users and time.monotonic() < deadline:
            time.sleep(RELEASE_POLL_SECONDS)

    @contextmanager
    def naming_lost_ranks(self, doing: str) -> Iterator[None]:
        """Run a blocking collective; raise a RankLost that names the missing ranks if it fails."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self.forget_pending()
            group, self.group = self.group, None
            raise rank_lost_error(doing, error, time.monotonic() - start, group) from error

    def _name(self, number: int) -> str:
        bucket = self.plan.buckets[number]
        return bucket.unit or f"{len(bucket.slots)} weights"


def _first_not_finite(bucket: Bucket, whole: Tensor) -> str:
    """Return the name of the weight that holds the first inf or nan of a bucket."""
    place = int((~whole.isfinite()).nonzero()[0])
    for rank in range(bucket.ranks):
        for chunk in bucket.chunks(rank):
            at = bucket.span(rank).start + chunk.at
            if at <= place < at + chunk.stop - chunk.start:
                return chunk.weight.name
    raise AssertionError(f"element {place} is padding, which is zero")
