"""Where a weight's numbers lie in a bucket: pairs of views, to be copied one way or the other.

Whole, a bucket is R shards one after another. A weight cut by rows lies in it in R places, so what
was gathered has to be copied into weights, and gradients into what is to be scattered.
"""

from collections.abc import Iterable

from torch import Tensor

from memlab.internals.torch_internals import FakeTensor
from memlab.zero.partitioning import Bucket, FlatBucket, Slot


def overlaps(
    bucket: Bucket, slot: Slot, whole: Tensor, weight: Tensor
) -> Iterable[tuple[Tensor, Tensor]]:
    """(a part of the whole bucket, the same numbers of the weight), until all of it is there.

    whole is (R·shard,), the weight contiguous. Of fake tensors nothing: they have no numbers, and a
    large model has thousands of weights.
    """
    if isinstance(whole, FakeTensor):
        return
    flat, count = weight.view(-1), weight.numel()
    if isinstance(bucket, FlatBucket):
        yield whole[slot.at : slot.at + count], flat
        return
    by_rank = whole.view(bucket.ranks, -1)  # (R, shard)
    full, rest = divmod(count, slot.run) if slot.run else (0, 0)
    if full:
        column = by_rank[:full, slot.at : slot.at + slot.run]
        yield column, flat[: full * slot.run].view(full, slot.run)
    if rest:
        yield by_rank[full, slot.at : slot.at + rest], flat[full * slot.run :]
