"""The allocator itself: which block serves a request, and what is asked of the driver.

Adds to memlab.reference.caching_allocator: all of torch's settings, out-of-memory retries, garbage
collection, expandable segments, streams and the recorded history.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from memlab.allocator.blocks import (
    FREE,
    TAKEN,
    UNMAPPED,
    Block,
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
    SEGMENT_GRANULE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    block_bytes,
    round_up,
    segment_bytes,
)


class Allocator:
    """What torch asks for memory on a card, one call at a time.

    `place(bytes)` is the address at which the driver puts a segment; without it, one lies behind
    the other. With `keeps_history`, `history` holds what CUDA would record.
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
        self.heads: dict[int, Block] = {}  # the first block of each segment
        self._small = Pools("small", SMALL_SEGMENT_BYTES)
        self._large = Pools("large", self.settings.large_segment_bytes)
        self._place = place or self._behind_the_last
        self._end = 0
        self._block_bytes: dict[int, int] = {}  # of requests seen before
        self._letting_go: dict[int, Block] = {}  # freed by their users, still in use: by address
        self._searches = 0  # of the large pools: what the age of a free block is counted in
        self._expands = self.settings.expandable_segments
        self._collects = self.settings.garbage_collection_threshold is not None
        self._max_split_bytes = self.settings.max_split_size_bytes or UNLIMITED_BYTES
        self._is_plain = not self._expands and self._max_split_bytes == UNLIMITED_BYTES

    def malloc(self, requested_bytes: int, stream: int = 0) -> Block | None:
        """A block for so many bytes (at least 1); None where the card is out of memory."""
        size = self._block_bytes.get(requested_bytes)
        if size is None:
            size = block_bytes(requested_bytes, self.settings.roundup_power2_divisions)
            self._block_bytes[requested_bytes] = size
        pool = (self._small if size <= SMALL_BYTES else self._large)[stream]
        block = self._cached(pool, size) or self._fresh(pool, size)
        if block is None:
            return None
        if block.size != size and self._splits(block, size):
            self._put(pool, block.cut(size))
        block.state = TAKEN
        block.requested_bytes = requested_bytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes
        if self.history is not None:
            self._note("alloc", block.address, requested_bytes, pool)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool."""
        self.let_go(block)
        self.reclaim(block)

    def let_go(self, block: Block) -> None:
        """The block's user has freed it; until `reclaim`, a stream may still work on it."""
        if block.state != TAKEN or block.let_go:
            raise ValueError(f"the block at {block.address:#x} is not in use; free it once only")
        self.allocated_bytes -= block.size
        block.let_go = True
        self._letting_go[block.address] = block
        if self.history is not None:
            self._note("free_requested", block.address, block.requested_bytes, block.pool)

    def reclaim(self, block: Block) -> None:
        """Nothing works on the block any more: it joins its free neighbours in the pool."""
        if self.history is not None:
            self._note("free_completed", block.address, block.requested_bytes, block.pool)
        del self._letting_go[block.address]
        block.state = FREE
        block.let_go = False
        block.owner = None
        block.requested_bytes = 0
        self._put(block.pool, self._merged(block))

    def empty_cache(self) -> None:
        """Give back to the driver what no block in use needs: whole segments, or with expandable
        segments whole pages."""
        for block in list(self._letting_go.values()):
            self.reclaim(block)
        for block in self.releasable().values():
            self.give_back(block)

    def releasable(self) -> dict[tuple[int, int], Block]:
        """What could go back to the driver now: (address, bytes), and the free block it lies in."""
        found = {}
        for block in self.free_blocks():
            start, end = whole_pages(block) if self._expands else (block.address, end_of(block))
            if start < end and (self._expands or block.whole):
                found[start, end - start] = block
        return found

    def give_back(self, block: Block) -> None:
        """Give what is releasable of a free block back to the driver."""
        if self._expands:
            self._unmap(block)
        else:
            self._release(block)

    def makes_room(self, requested_bytes: int, stream: int = 0) -> bool:
        """Whether `malloc` would give something back to the driver before it gets a block."""
        size = block_bytes(requested_bytes, self.settings.roundup_power2_divisions)
        pool = (self._small if size <= SMALL_BYTES else self._large)[stream]
        if self._fit(pool, size) < len(pool.free):
            return False
        segment = segment_bytes(size, self.settings.large_segment_bytes)
        limit = min(self.settings.fraction_bytes, self.settings.driver_bytes)
        return self._excess_bytes > 0 or self.reserved_bytes + segment > limit

    def reset_peaks(self) -> None:
        """Let the peaks count from here, as `torch.cuda.reset_peak_memory_stats` does."""
        self.allocated_peak_bytes = self.allocated_bytes
        self.reserved_peak_bytes = self.reserved_bytes

    def largest_free_bytes(self) -> int:
        """The largest block that is reserved and free."""
        largest = 0
        for pools in (self._large, self._small):
            for pool in pools.values():
                if pool.free and pool.free[-1][0] > largest:
                    largest = pool.free[-1][0]
        return largest

    def free_blocks(self) -> list[Block]:
        """All blocks that are reserved and free."""
        pools = (*self._large.values(), *self._small.values())
        return [block for pool in pools for _, _, block in pool.free]

    # -------------------------------------------------------------- a state from before

    def adopt(self, address: int, size: int, stream: int, kind: str) -> Block:
        """A segment that was there before, as a free block."""
        pool = (self._small if kind == "small" else self._large)[stream]
        block = self.heads[address] = Block(address, size, pool)
        self._count_segment(size)
        self._put(pool, block)
        return block

    def adopt_pages(
        self, base: int, mapped: Iterable[tuple[int, int]], stream: int, kind: str
    ) -> dict[int, Block]:
        """An expandable segment that was there before, with (address, bytes) mapped: a free block
        for each, by address."""
        pool = (self._small if kind == "small" else self._large)[stream]
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

    def occupy(self, block: Block, address: int, size: int) -> Block:
        """A block that was in use before, out of the free block around it. What is free above it
        is the next block."""
        block.pool.remove(block)
        taken = block
        if address > block.address:
            taken = block.cut(address - block.address)
            self._put(block.pool, block)
        if size < taken.size:
            self._put(taken.pool, taken.cut(size))
        taken.state = TAKEN
        self.allocated_bytes += size
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return taken

    # -------------------------------------------------------------- a block from the pool

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best fit among the pool's free blocks, out of the pool."""
        if self._collects and pool.kind == "large":
            self._searches += 1
        index = self._fit(pool, size)
        if index == len(pool.free):
            return None
        block = pool.free[index][2]
        del pool.free[index]
        return block

    def _fit(self, pool: Pool, size: int) -> int:
        """Where the best fit stands in the pool; the number of its free blocks if none fits."""
        index = bisect_left(pool.free, (size,))
        none = len(pool.free)
        if self._is_plain or index == none:
            return index
        if self._expands:
            index = least_room(pool, index)
        found = pool.free[index][0]
        if size < self._max_split_bytes <= found:
            return none  # it is kept whole, for a request of its size
        if size >= self._max_split_bytes and found >= size + self._max_waste_bytes:
            return none
        return index

    @property
    def _max_waste_bytes(self) -> int:
        chosen = self.settings.max_non_split_rounding_bytes
        return self.settings.large_segment_bytes if chosen is None else chosen

    def _splits(self, block: Block, size: int) -> bool:
        if self._expands:
            return block.size - size >= GRANULE_BYTES
        if block.pool.kind == "large" and size >= self._max_split_bytes:
            return False
        return block.pool.splits(block, size)

    def _put(self, pool: Pool, block: Block) -> None:
        """A free block into its pool."""
        block.searches_at_birth = self._searches
        pool.add(block)

    def _merged(self, block: Block) -> Block:
        """A block that is in no pool, joined with its free neighbours, which leave theirs."""
        above, below = block.next, block.previous
        if above is not None and above.state == FREE:
            above.pool.remove(above)
            block.absorb_next()
        if below is not None and below.state == FREE:
            below.pool.remove(below)
            below.absorb_next()
            return below
        return block

    # -------------------------------------------------------------- a block from the driver

    def _fresh(self, pool: Pool, size: int) -> Block | None:
        """A block of new memory, for which cached memory may have to go; None if the driver
        refuses to the last."""
        if self._collects:
            self._collect()
        block = self._grown(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grown(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grown(pool, size)
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or an expandable one with new pages; None if the driver refuses."""
        segment = segment_bytes(size, self.settings.large_segment_bytes)
        if self.reserved_bytes + segment > self.settings.fraction_bytes:
            return None
        if self._expands:
            return self._expand(pool, size)
        if self.reserved_bytes + segment > self.settings.driver_bytes:
            return None
        address = self._place(segment)
        self._count_grant("segment_alloc", address, segment, pool)
        block = self.heads[address] = Block(address, segment, pool)
        return block

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give blocks that are too large to be split back to the driver, until the request has
        room: the smallest that is large enough, or the largest ones. Whether that may suffice."""
        if self._max_split_bytes == UNLIMITED_BYTES or self._expands:
            return False
        wanted = max(size, self._max_split_bytes)
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split_bytes:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _collect(self) -> None:
        """Give whole large segments back, those first that were not needed for long, until
        reserved memory is below the threshold."""
        goal = self._excess_bytes
        free = [block for pool in self._large.values() for _, _, block in pool.free if block.whole]
        ages = {block: self._searches - block.searches_at_birth for block in free}
        while goal > 0 and ages:
            mean = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean]:
                goal -= block.size
                del ages[block]
                self._release(block)

    @property
    def _excess_bytes(self) -> int:
        """What is reserved beyond the threshold of the garbage collection; 0 without one."""
        threshold = self.settings.garbage_collection_threshold
        if threshold is None:
            return 0
        return max(0, self.reserved_bytes - int(threshold * self.settings.fraction_bytes))

    def _release(self, block: Block) -> None:
        """Give a free block that is a segment back to the driver."""
        assert block.whole
        assert block.state == FREE
        block.pool.remove(block)
        del self.heads[block.address]
        self._count_return("segment_free", block.address, block.size, block.pool)

    def _behind_the_last(self, size: int) -> int:
        address = self._end
        self._end += round_up(size, SEGMENT_GRANULE_BYTES)
        return address

    def _count_grant(self, action: str, address: int, size: int, pool: Pool) -> None:
        self._count_segment(size)
        self.segment_allocations += 1
        if self.history is not None:
            self._note(action, address, size, pool)

    def _count_segment(self, size: int) -> None:
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)

    def _count_return(self, action: str, address: int, size: int, pool: Pool) -> None:
        self.reserved_bytes -= size
        self.segment_frees += 1
        if self.history is not None:
            self._note(action, address, size, pool)

    def _note(self, action: str, address: int, size: int, pool: Pool) -> None:
        assert self.history is not None
        self.history.append((action, address, size, pool.stream))

    # -------------------------------------------------------------- expandable segments

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size` bytes, out of the pool, at the lowest address where
        free and unmapped memory suffice; None if the driver has too few pages."""
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

    def _range(self, pool: Pool, address: int | None = None) -> Block:
        """Addresses for 9/8 of the card's memory, without any memory behind them yet."""
        capacity = self.settings.card_bytes
        size = round_up(capacity + capacity // 8, pool.page_bytes)
        block = Block(self._place(size) if address is None else address, size, pool, UNMAPPED)
        self.heads[block.address] = block
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Put pages behind the first `size` bytes of an unmapped block; the free block that they
        are then part of, or None if the driver has too few."""
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

    def _unmap(self, block: Block) -> None:
        """Give the pages that lie wholly in a free block back to the driver."""
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

    def _forget(self, block: Block) -> None:
        """Join an unmapped block with its unmapped neighbours; drop a range that is empty."""
        pool = block.pool
        above, below = block.next, block.previous
        if above is not None and above.state == UNMAPPED:
            del pool.unmapped[bisect_left(pool.unmapped, (above.address,))]
            block.absorb_next()
        if below is not None and below.state == UNMAPPED:
            del pool.unmapped[bisect_left(pool.unmapped, (below.address,))]
            below.absorb_next()
            block = below
        if block.whole:
            del self.heads[block.address]
        else:
            insort(pool.unmapped, (block.address, block))
