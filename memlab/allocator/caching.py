"""The allocator: choose a block for each request, and decide when to ask the driver.

memlab.reference.caching_allocator is the short version. This file adds all of torch's settings,
out-of-memory retries, garbage collection, expandable segments, streams and a recorded history.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from memlab.allocator.addresses import DriverAddresses
from memlab.allocator.blocks import (
    ALLOCATED,
    FREE,
    UNMAPPED,
    MemoryBlock,
    Pool,
    Pools,
    end_of,
    least_room,
    lowest_room,
    whole_pages,
)
from memlab.allocator.settings import UNLIMITED_BYTES, Settings
from memlab.allocator.sizes import (
    GRANULE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    block_bytes,
    round_up,
    segment_bytes,
)


class Allocator:
    """Simulate torch's allocator on one device, one call at a time.

    `place(bytes)` returns the address of a new segment, by default as the driver would.
    With `keeps_history`, `history` holds the events that CUDA would record.

    A private pool, as of `torch.cuda.MemPool`, has a number from 1. Its free blocks serve only its
    own requests. `empty_cache`, retries and garbage collection leave it alone until `delete_pool`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        place: Callable[[int], int] | None = None,
        keeps_history: bool = False,
    ) -> None:
        self.settings = settings or Settings()
        self.settings.check_capacity()
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.reserved_bytes = self.reserved_peak_bytes = 0
        self.segment_allocations = self.segment_frees = self.retries = 0
        self.history: list[tuple[str, int, int, int]] | None = [] if keeps_history else None
        self.heads: dict[int, MemoryBlock] = {}  # the first block of each segment
        self._small = Pools("small", SMALL_SEGMENT_BYTES)
        self._large = Pools("large", self.settings.large_segment_bytes)
        addresses = DriverAddresses()
        self._place = place or addresses.place
        self._give_back = (lambda address, size: None) if place else addresses.release
        self._block_bytes: dict[int, int] = {}  # by requested bytes
        self._pending_frees: dict[
            int, MemoryBlock
        ] = {}  # freed but still in use by a stream, by address
        self._deleted_pools: set[int] = set()
        self._searches = 0  # searches of the large pools: the clock for a free block's age
        self._expands = self.settings.expandable_segments
        self._collects = self.settings.garbage_collection_threshold is not None
        self._max_split_bytes = self.settings.max_split_size_bytes or UNLIMITED_BYTES
        self._is_plain = not self._expands and self._max_split_bytes == UNLIMITED_BYTES

    def malloc(
        self, requested_bytes: int, stream: int = 0, private_pool: int = 0
    ) -> MemoryBlock | None:
        """Return a block of at least `requested_bytes` (at least 1), or None if out of memory."""
        size = self._block_bytes.get(requested_bytes)
        if size is None:
            size = block_bytes(requested_bytes, self.settings.roundup_power2_divisions)
            self._block_bytes[requested_bytes] = size
        pool = (self._small if size <= SMALL_BYTES else self._large)[stream, private_pool]
        block = self._take_cached(pool, size) or self._allocate_new(pool, size)
        if block is None:
            return None
        if block.size != size and self._splits(block, size):
            self._put(pool, block.cut(size))
        block.state = ALLOCATED
        block.requested_bytes = requested_bytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes
        if self.history is not None:
            self._record("alloc", block.address, requested_bytes, pool)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return a block to its pool."""
        self.request_free(block)
        self.complete_free(block)

    def request_free(self, block: MemoryBlock) -> None:
        """Record that the user freed the block. A stream may still use it until `complete_free`."""
        if block.state != ALLOCATED or block.free_pending:
            raise ValueError(f"the block at {block.address:#x} is not in use; free it once only")
        self.allocated_bytes -= block.size
        block.free_pending = True
        self._pending_frees[block.address] = block
        if self.history is not None:
            self._record("free_requested", block.address, block.requested_bytes, block.pool)

    def complete_free(self, block: MemoryBlock) -> None:
        """Return a freed block to its pool, merged with its free neighbours."""
        if self.history is not None:
            self._record("free_completed", block.address, block.requested_bytes, block.pool)
        del self._pending_frees[block.address]
        block.state = FREE
        block.free_pending = False
        block.owner = None
        block.requested_bytes = 0
        self._put(block.pool, self._merged(block))

    def empty_cache(self) -> None:
        """Release all unused segments to the driver, or unused pages of expandable segments."""
        for block in list(self._pending_frees.values()):
            self.complete_free(block)
        for block in self.releasable().values():
            self.release(block)

    def delete_pool(self, private_pool: int) -> None:
        """Delete a private pool, as when a `MemPool` is garbage collected: release its unused
        segments now. Those with live blocks are released by later calls of `empty_cache`."""
        self._deleted_pools.add(private_pool)
        for block in self._releasable_in(lambda pool: pool.owner == private_pool).values():
            self.release(block)

    def releasable(self) -> dict[tuple[int, int], MemoryBlock]:
        """Return the free block of each (address, bytes) that could be released now."""
        return self._releasable_in(lambda pool: not pool.owner or pool.owner in self._deleted_pools)

    def _releasable_in(
        self, may_release: Callable[[Pool], bool]
    ) -> dict[tuple[int, int], MemoryBlock]:
        found = {}
        for block in self.free_blocks():
            if not may_release(block.pool):
                continue
            start, end = whole_pages(block) if self._expands else (block.address, end_of(block))
            if start < end and (self._expands or block.spans_segment):
                found[start, end - start] = block
        return found

    def release(self, block: MemoryBlock) -> None:
        """Release the releasable part of a free block to the driver."""
        if self._expands:
            self._unmap(block)
        else:
            self._release_segment(block)

    def must_release_first(self, requested_bytes: int, stream: int = 0) -> bool:
        """Whether `malloc` would have to release memory to the driver first."""
        size = block_bytes(requested_bytes, self.settings.roundup_power2_divisions)
        pool = (self._small if size <= SMALL_BYTES else self._large)[stream, 0]
        if self._fit(pool, size) < len(pool.free):
            return False
        segment = segment_bytes(size, self.settings.large_segment_bytes)
        limit = min(self.settings.fraction_bytes, self.settings.driver_bytes)
        return self._excess_bytes > 0 or self.reserved_bytes + segment > limit

    def reset_peaks(self) -> None:
        """Restart the peaks, like `torch.cuda.reset_peak_memory_stats`."""
        self.allocated_peak_bytes = self.allocated_bytes
        self.reserved_peak_bytes = self.reserved_bytes

    def largest_free_bytes(self) -> int:
        """Return the size of the largest free block outside private pools."""
        largest = 0
        for pools in (self._large, self._small):
            for pool in pools.values():
                if pool.free and pool.free[-1][0] > largest and not pool.owner:
                    largest = pool.free[-1][0]
        return largest

    def free_blocks(self) -> list[MemoryBlock]:
        """Return all free blocks."""
        pools = (*self._large.values(), *self._small.values())
        return [block for pool in pools for _, _, block in pool.free]

    # -------------------------------------------------------------- restoring a state

    def adopt(self, address: int, size: int, stream: int, kind: str) -> MemoryBlock:
        """Add an existing segment as one free block."""
        pool = (self._small if kind == "small" else self._large)[stream, 0]
        block = self.heads[address] = MemoryBlock(address, size, pool)
        self._count_segment(size)
        self._put(pool, block)
        return block

    def adopt_pages(
        self, base: int, mapped: Iterable[tuple[int, int]], stream: int, kind: str
    ) -> dict[int, MemoryBlock]:
        """Add an existing expandable segment with `mapped` (address, bytes) ranges.

        Return one free block per range, by address.
        """
        pool = (self._small if kind == "small" else self._large)[stream, 0]
        block = self._range(pool, base)
        found = {}
        for start, size in sorted(mapped):
            if start > block.address:
                insort(pool.unmapped, (block.address, block))
                block = block.cut(start - block.address)
            rest = block.cut(size)
            block.state = FREE
            self._count_segment(size)
            self._put(pool, block)
            found[start] = block
            block = rest
        insort(pool.unmapped, (block.address, block))
        return found

    def occupy(self, block: MemoryBlock, address: int, size: int) -> MemoryBlock:
        """Mark `size` bytes at `address` as allocated within a free block. Return their block.

        Free memory above becomes the next block.
        """
        block.pool.remove(block)
        taken = block
        if address > block.address:
            taken = block.cut(address - block.address)
            self._put(block.pool, block)
        if size < taken.size:
            self._put(taken.pool, taken.cut(size))
        taken.state = ALLOCATED
        self.allocated_bytes += size
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return taken

    # -------------------------------------------------------------- cached blocks

    def _take_cached(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Remove the best fit from the pool's free blocks and return it."""
        if self._collects and pool.kind == "large":
            self._searches += 1
        index = self._fit(pool, size)
        if index == len(pool.free):
            return None
        block = pool.free[index][2]
        del pool.free[index]
        return block

    def _fit(self, pool: Pool, size: int) -> int:
        """Return the index of the best fit in the pool, or the pool's length if none fits."""
        index = bisect_left(pool.free, (size,))
        none = len(pool.free)
        if self._is_plain or index == none:
            return index
        if self._expands:
            index = least_room(pool, index)
        found = pool.free[index][0]
        if size < self._max_split_bytes <= found:
            return none  # keep the oversize block for a large request
        if size >= self._max_split_bytes and found >= size + self._max_waste_bytes:
            return none
        return index

    @property
    def _max_waste_bytes(self) -> int:
        chosen = self.settings.max_non_split_rounding_bytes
        return self.settings.large_segment_bytes if chosen is None else chosen

    def _splits(self, block: MemoryBlock, size: int) -> bool:
        if self._expands:
            return block.size - size >= GRANULE_BYTES
        if block.pool.kind == "large" and size >= self._max_split_bytes:
            return False
        return block.pool.splits(block, size)

    def _put(self, pool: Pool, block: MemoryBlock) -> None:
        """Add a free block to its pool."""
        block.searches_at_birth = self._searches
        pool.add(block)

    def _merged(self, block: MemoryBlock) -> MemoryBlock:
        """Merge a block outside its pool with its free neighbours, which leave the pool."""
        above, below = block.next, block.previous
        if above is not None and above.state == FREE:
            above.pool.remove(above)
            block.absorb_next()
        if below is not None and below.state == FREE:
            below.pool.remove(below)
            below.absorb_next()
            return below
        return block

    # -------------------------------------------------------------- new memory from the driver

    def _allocate_new(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Return a block of new memory, after releasing cached memory if needed; None if OOM."""
        if self._collects:
            self._collect()
        block = self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None and not pool.owner:  # torch does not retry while a private pool is in use
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, size)
        return block

    def _grow(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Add a segment, or pages to an expandable segment. Return None if the driver refuses."""
        segment = segment_bytes(size, self.settings.large_segment_bytes)
        if self.reserved_bytes + segment > self.settings.fraction_bytes:
            return None
        if self._expands:
            return self._expand(pool, size)
        if self.reserved_bytes + segment > self.settings.driver_bytes:
            return None
        address = self._place(segment)
        self._count_grant("segment_alloc", address, segment, pool)
        block = self.heads[address] = MemoryBlock(address, segment, pool)
        return block

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release oversize blocks to make room: the smallest that suffices, else the largest ones.

        Return whether enough may have been released.
        """
        if self._max_split_bytes == UNLIMITED_BYTES or self._expands:
            return False
        wanted = max(size, self._max_split_bytes)
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release_segment(pool.free[index][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split_bytes:
            released += pool.free[-1][0]
            self._release_segment(pool.free[-1][2])
        return released >= wanted

    def _collect(self) -> None:
        """Release the least recently used large segments until reserved memory is below the
        threshold."""
        goal = self._excess_bytes
        free = [
            block
            for pool in self._large.values()
            for _, _, block in pool.free
            if block.spans_segment and not pool.owner
        ]
        ages = {block: self._searches - block.searches_at_birth for block in free}
        while goal > 0 and ages:
            mean = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean]:
                goal -= block.size
                del ages[block]
                self._release_segment(block)

    @property
    def _excess_bytes(self) -> int:
        """Reserved bytes above the garbage collection threshold; 0 without a threshold."""
        threshold = self.settings.garbage_collection_threshold
        if threshold is None:
            return 0
        return max(0, self.reserved_bytes - int(threshold * self.settings.fraction_bytes))

    def _release_segment(self, block: MemoryBlock) -> None:
        """Release a free block that spans its segment to the driver."""
        assert block.spans_segment
        assert block.state == FREE
        block.pool.remove(block)
        del self.heads[block.address]
        self._give_back(block.address, block.size)
        self._count_return("segment_free", block.address, block.size, block.pool)

    def _count_grant(self, action: str, address: int, size: int, pool: Pool) -> None:
        self._count_segment(size)
        self.segment_allocations += 1
        if self.history is not None:
            self._record(action, address, size, pool)

    def _count_segment(self, size: int) -> None:
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)

    def _count_return(self, action: str, address: int, size: int, pool: Pool) -> None:
        self.reserved_bytes -= size
        self.segment_frees += 1
        if self.history is not None:
            self._record(action, address, size, pool)

    def _record(self, action: str, address: int, size: int, pool: Pool) -> None:
        assert self.history is not None
        self.history.append((action, address, size, pool.stream))

    # -------------------------------------------------------------- expandable segments

    def _expand(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Return a free block of at least `size` bytes, out of the pool.

        Use the lowest address with enough free and unmapped memory. Return None if the driver has
        too few pages.
        """
        block = lowest_room(pool, size)
        if block is None:
            block = self._range(pool)
            insort(pool.unmapped, (block.address, block))
        if block.state == UNMAPPED:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            above = block.next
            assert above is not None
            assert above.state == UNMAPPED
            mapped = self._map(above, min(size - block.size, above.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _range(self, pool: Pool, address: int | None = None) -> MemoryBlock:
        """Reserve addresses for 9/8 of the device's memory, all unmapped."""
        capacity = self.settings.card_bytes
        size = round_up(capacity + capacity // 8, pool.page_bytes)
        block = MemoryBlock(self._place(size) if address is None else address, size, pool, UNMAPPED)
        self.heads[block.address] = block
        return block

    def _map(self, block: MemoryBlock, size: int) -> MemoryBlock | None:
        """Map pages for the first `size` bytes of an unmapped block.

        Return the free block that contains them, or None if the driver has too few pages.
        """
        pool = block.pool
        size = round_up(size, pool.page_bytes)
        if self.reserved_bytes + size > self.settings.driver_bytes:
            return None
        del pool.unmapped[bisect_left(pool.unmapped, (block.address,))]
        if size < block.size:
            rest = block.cut(size)
            insort(pool.unmapped, (rest.address, rest))
        self._count_grant("segment_map", block.address, size, pool)
        block.state = FREE
        block = self._merged(block)
        self._put(pool, block)
        return block

    def _unmap(self, block: MemoryBlock) -> None:
        """Release the whole pages in a free block to the driver."""
        pool = block.pool
        start, end = whole_pages(block)
        pool.remove(block)
        if end < end_of(block):
            self._put(pool, block.cut(end - block.address))
        if start > block.address:
            pages = block.cut(start - block.address)
            self._put(pool, block)
            block = pages
        block.state = UNMAPPED
        self._count_return("segment_unmap", start, end - start, pool)
        self._forget(block)

    def _forget(self, block: MemoryBlock) -> None:
        """Merge an unmapped block with unmapped neighbours. Drop its range if it is empty."""
        pool = block.pool
        above, below = block.next, block.previous
        if above is not None and above.state == UNMAPPED:
            del pool.unmapped[bisect_left(pool.unmapped, (above.address,))]
            block.absorb_next()
        if below is not None and below.state == UNMAPPED:
            del pool.unmapped[bisect_left(pool.unmapped, (below.address,))]
            below.absorb_next()
            block = below
        if block.spans_segment:
            del self.heads[block.address]
            self._give_back(block.address, block.size)
        else:
            insort(pool.unmapped, (block.address, block))
