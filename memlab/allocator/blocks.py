"""Blocks, linked in address order within a segment, and pools of free blocks ordered by size."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from memlab.allocator.sizes import GRANULE_BYTES, SMALL_BYTES, round_up

FREE, ALLOCATED, UNMAPPED = range(3)


class MemoryBlock:
    """A contiguous part of a segment, linked to its neighbours."""

    __slots__ = (
        *("address", "size", "requested_bytes", "state", "free_pending", "owner"),
        *("pool", "segment_address", "previous", "next", "searches_at_birth"),
    )

    def __init__(
        self,
        address: int,
        size: int,
        pool: "Pool",
        state: int = FREE,
        segment_address: int | None = None,
    ) -> None:
        self.address = address
        self.segment_address = address if segment_address is None else segment_address
        self.size = size
        self.requested_bytes = 0
        self.state = state
        self.free_pending = False  # freed by its user, but a stream may still use it
        self.owner: Any = None
        self.pool = pool
        self.previous: MemoryBlock | None = None
        self.next: MemoryBlock | None = None
        self.searches_at_birth = 0

    @property
    def spans_segment(self) -> bool:
        """Whether this block spans its whole segment."""
        return self.previous is None and self.next is None

    def cut(self, size: int) -> "MemoryBlock":
        """Shrink this block to its first `size` bytes. Return the rest as a new block."""
        address, left = self.address + size, self.size - size
        rest = MemoryBlock(address, left, self.pool, self.state, self.segment_address)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Merge with the next block."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.previous = self

    def run(self) -> Iterator["MemoryBlock"]:
        """Yield this block and all blocks above it in the segment."""
        block: MemoryBlock | None = self
        while block is not None:
            yield block
            block = block.next


class Pool:
    """The free blocks of one stream and kind, sorted by (size, address).

    `owner` is the number of the private pool that it belongs to, 0 for none.
    """

    def __init__(self, stream: int, kind: str, page_bytes: int, owner: int = 0) -> None:
        self.stream = stream
        self.kind = kind
        self.owner = owner
        self.page_bytes = page_bytes  # for expandable segments
        self.free: list[tuple[int, int, MemoryBlock]] = []
        self.unmapped: list[tuple[int, MemoryBlock]] = []  # by address

    def add(self, block: MemoryBlock) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def splits(self, block: MemoryBlock, size: int) -> bool:
        """Whether the rest of `block` beyond `size` bytes is large enough for a block."""
        rest = block.size - size
        return rest >= GRANULE_BYTES if self.kind == "small" else rest > SMALL_BYTES


class Pools(dict[tuple[int, int], Pool]):
    """The pools of one kind, by (stream, owner). Pools are created on first use."""

    def __init__(self, kind: str, page_bytes: int) -> None:
        self._kind = kind
        self._page_bytes = page_bytes

    def __missing__(self, key: tuple[int, int]) -> Pool:
        stream, owner = key
        pool = self[key] = Pool(stream, self._kind, self._page_bytes, owner)
        return pool


# ------------------------------------------------------------------ expandable segments


def whole_pages(block: MemoryBlock) -> tuple[int, int]:
    """Return the (start, end) addresses of the whole pages in a block."""
    base, page = block.segment_address, block.pool.page_bytes
    return base + round_up(block.address - base, page), base + (end_of(block) - base) // page * page


def end_of(block: MemoryBlock) -> int:
    """Return the address just past a block."""
    return block.address + block.size


def least_room(pool: Pool, index: int) -> int:
    """Return the first index from the best fit on whose successor cannot grow to a smaller size."""
    free = pool.free
    while index + 1 < len(free) and _room(free[index + 1][2]) < _room(free[index][2]):
        index += 1
    return index


def _room(block: MemoryBlock) -> int:
    """Return the size that a free block can grow to with the unmapped memory right above it."""
    above = block.next
    return block.size + (above.size if above is not None and above.state == UNMAPPED else 0)


def lowest_room(pool: Pool, size: int) -> MemoryBlock | None:
    """Return the lowest block that starts `size` contiguous bytes of free and unmapped memory.

    The range includes unmapped memory. It starts at an unmapped block or the free block below it.
    """
    for _, block in pool.unmapped:
        below = block.previous
        first = below if below is not None and below.state == FREE else block
        room = 0
        for part in first.run():
            if room >= size or part.state == ALLOCATED:
                break
            room += part.size
        if room >= size:
            return first
    return None
