"""The caching allocator: split large segments into blocks, keep freed blocks for later requests.

Saves    time: cudaMalloc and cudaFree wait for the GPU.
Costs    memory: reserved but unallocated bytes, and fragmentation.
Source   torch/c10/cuda/CUDACachingAllocator.cpp, torch 2.13.

    round the request up to a multiple of 512 bytes
    best fit: allocate the smallest free block that fits, and split it if enough bytes remain
    no block fits: reserve a segment of 2 MiB, 20 MiB, or the request rounded up to 2 MiB
    free: merge the block with free neighbors in its segment; keep the segment

`memlab.allocator.simulate` is the version to use.
"""

from dataclasses import dataclass

MIB = 2**20


def sizes(requested_bytes: int) -> tuple[int, int]:
    """Return the bytes of the block, and of a new segment for it."""
    size = -(-requested_bytes // 512) * 512
    if size <= MIB:
        return size, 2 * MIB
    if size < 10 * MIB:
        return size, 20 * MIB
    return size, -(-size // (2 * MIB)) * 2 * MIB


@dataclass
class AllocatorBlock:
    segment: int
    address: int
    bytes: int
    free: bool


def allocate(pool: list[AllocatorBlock], size: int) -> int | None:
    """Allocate `size` bytes. Return their address, or None if no free block is large enough."""
    fitting = [block for block in pool if block.free and block.bytes >= size]
    if not fitting:
        return None
    best = min(fitting, key=lambda block: (block.bytes, block.address))
    remaining = best.bytes - size
    splits = remaining >= 512 if size <= MIB else remaining > MIB
    if splits:
        upper = AllocatorBlock(best.segment, best.address + size, remaining, free=True)
        pool.insert(pool.index(best) + 1, upper)
        best.bytes = size
    best.free = False
    return best.address


def free_block(pool: list[AllocatorBlock], address: int) -> None:
    """Free the block at `address`, and merge it with its free neighbors."""
    index = next(i for i, block in enumerate(pool) if block.address == address)
    pool[index].free = True
    for i in (index, index - 1):  # merge with the block above, then with the one below
        if i >= 0 and i + 1 < len(pool):
            lower, upper = pool[i], pool[i + 1]
            if lower.free and upper.free and lower.segment == upper.segment:
                lower.bytes += upper.bytes
                del pool[i + 1]


class Cache:
    """Pools of small and large blocks; `reserved` counts the bytes requested from the driver."""

    def __init__(self) -> None:
        self.pools: dict[str, list[AllocatorBlock]] = {"small": [], "large": []}
        self.reserved = self.segments = 0
        self.active_blocks: dict[int, tuple[list[AllocatorBlock], int]] = {}

    def malloc(self, storage: int, requested: int) -> None:
        size, segment_size = sizes(requested)
        pool = self.pools["small" if size <= MIB else "large"]
        address = allocate(pool, size)
        if address is None:
            pool.append(AllocatorBlock(self.segments, self.reserved, segment_size, free=True))
            self.segments += 1
            self.reserved += segment_size
            address = allocate(pool, size)
            assert address is not None
        self.active_blocks[storage] = pool, address

    def free(self, storage: int) -> None:
        free_block(*self.active_blocks.pop(storage))
