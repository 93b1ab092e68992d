"""Simulate CUDA's caching allocator: from requested bytes to reserved bytes.

Memory calls to the driver are slow, so torch makes few of them and caches the memory. It counts
three sizes: requested by tensors, *allocated* (handed out as blocks), and *reserved* (obtained from
the driver). A step runs out of memory when reserved memory reaches the limit. The rules in
torch 2.13:

    round     round a request up to 512 B, or to the next step of `roundup_power2_divisions`
    pool      small for requests up to 1 MiB, large above; each stream has one pool of each kind
    fit       take the smallest free block in the pool that fits; the lowest address breaks ties
    split     return the rest to the pool: at least 512 B in a small pool, more than 1 MiB in a
              large pool; a smaller rest stays with the block and is wasted
    segment   if no block fits, ask the driver for 2 MiB (small), 20 MiB (below 10 MiB), or the
              request rounded up to 2 MiB
    merge     merge a freed block with free neighbours; segments never merge and stay reserved
    retry     if the driver refuses, release all entirely free segments and ask again

Fragmentation is the price: a request can fail although enough bytes are free, because they are
not contiguous. Three settings help. `max_split_size_bytes` keeps large blocks unsplit.
`garbage_collection_threshold` releases old blocks before the driver refuses. With
`expandable_segments`, a pool is one long segment that grows by pages and can release any free page.

A private pool (`torch.cuda.MemPool`) has its own free blocks: memory freed in it serves only its
own requests, and its segments stay until the pool is deleted. `simulate(trace, pool_of=...)` routes
each storage to a pool.

`simulate` runs a Trace through these rules. `replay` compares them with a history recorded by
CUDA: the driver's answers come from the recording, every other decision from the simulation.

Source   torch's c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h. Graph captures,
         and pools with use_on_oom, no_split or an allocator of their own, are not simulated.

memlab.reference.caching_allocator is the short version; `caching` lists what this one adds.
"""

from memlab.allocator.caching import Allocator
from memlab.allocator.recordings import history, read_recording, recording
from memlab.allocator.replaying import Replay, Score, replay
from memlab.allocator.settings import Settings
from memlab.allocator.simulation import (
    Blocks,
    OutOfMemory,
    Segment,
    SegmentBlock,
    segments,
    simulate,
)
from memlab.allocator.sizes import block_bytes, segment_bytes

__all__ = [
    "Allocator",
    "Blocks",
    "OutOfMemory",
    "Replay",
    "Score",
    "Segment",
    "SegmentBlock",
    "Settings",
    "block_bytes",
    "history",
    "read_recording",
    "recording",
    "replay",
    "segment_bytes",
    "segments",
    "simulate",
]
