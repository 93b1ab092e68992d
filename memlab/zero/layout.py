"""Match each weight's elements to their places in a bucket, as pairs of views to copy between.

A whole bucket is R shards one after another. A weight sharded by rows lies in R places of it. So
gathered elements are copied into weights, and gradients are copied into the bucket to scatter.
"""

from collections.abc import Iterable

from torch import Tensor

from memlab.internals.torch_internals import FakeTensor
from memlab.zero.partitioning import Bucket, FlatBucket, Slot


def matching_views(
    bucket: Bucket, slot: Slot, whole: Tensor, weight: Tensor
) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield (view of the whole bucket, matching view of the weight) until the weight is covered.

    `whole` is (R·shard,), and the weight is contiguous. Fake tensors yield nothing: they have no
    values, and a large model has thousands of weights.
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
