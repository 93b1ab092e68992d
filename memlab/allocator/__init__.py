"""CUDA's caching allocator: from the bytes that tensors ask for to the bytes a card must have.

Asking the driver for memory is slow, so torch asks seldom and keeps what it got. Three numbers
follow: what tensors asked for, what was handed out (*allocated*), and what the driver gave
(*reserved*). A step runs out of memory by the last. The rules, as of torch 2.13:

    round     a request takes a multiple of 512 B, or the next step of `roundup_power2_divisions`
    pool      up to 1 MiB is small, the rest is large; each stream has a pool of either kind
    fit       the smallest free block of the pool that is large enough, the lowest among equals
    split     what is left becomes a free block: at least 512 B of a small one, more than 1 MiB of
              a large one; less than that goes with the block and is wasted
    segment   where nothing fits, the driver is asked: for 2 MiB (small), 20 MiB (below 10 MiB), or
              for the request alone, rounded up to 2 MiB
    merge     a freed block joins its free neighbours; segments never join, and stay reserved
    retry     where the driver refuses, segments that are all free go back, and it is asked again

Fragmentation is the price: a request finds no room although more than its size is free, because
the free bytes lie in pieces. The settings trade one price for another: `max_split_size_bytes` keeps
large blocks whole, `garbage_collection_threshold` gives old ones back before the driver refuses,
and with `expandable_segments` a pool is one long segment that grows by pages, whose free pages
anywhere can be given back: fewer pieces.

`simulate` runs a Trace through these rules. `replay` holds them against a history that CUDA
recorded: the driver's answers come from the recording, every decision from here.

Source   torch's c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h. Graph captures
         and user-made pools are left out.
"""

from memlab.allocator.caching import Allocator
from memlab.allocator.recordings import history, read_recording, recording
from memlab.allocator.replaying import Replay, Score, replay
from memlab.allocator.settings import Settings
from memlab.allocator.simulation import (
    Blocks,
    OutOfMemory,
    Piece,
    Segment,
    segments,
    simulate,
)
from memlab.allocator.sizes import block_bytes, segment_bytes

__all__ = [
    "Allocator",
    "Blocks",
    "OutOfMemory",
    "Piece",
    "Replay",
    "Score",
    "Segment",
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
