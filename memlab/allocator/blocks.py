"""Blocks, which lie side by side in segments, and pools, which keep the free ones in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from memlab.allocator.sizes import GRANULE_BYTES, SMALL_BYTES, round_up

FREE, TAKEN, UNMAPPED = range(3)


class Block:
    """A piece of a segment, linked to its neighbours there."""

    __slots__ = (
        *("address", "size", "requested_bytes", "state", "let_go", "owner"),
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
        self.let_go = False  # freed by its user, while a stream may still work on it
        self.owner: Any = None
        self.pool = pool
        self.previous: Block | None = None
        self.next: Block | None = None
        self.searches_at_birth = 0

    @property
    def whole(self) -> bool:
        """It is its segment."""
        return self.previous is None and self.next is None

    def cut(self, size: int) -> "Block":
        """Keep the first `size` bytes; the block of the others."""
        address, left = self.address + size, self.size - size
        rest = Block(address, left, self.pool, self.state, self.segment_address)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take in the neighbour above."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.previous = self

    def run(self) -> Iterator["Block"]:
        """This block and all above it in the segment."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.next


class Pool:
    """The free blocks of one stream and kind, by (size, address)."""

    def __init__(self, stream: int, kind: str, page_bytes: int) -> None:
        self.stream = stream
        self.kind = kind
        self.page_bytes = page_bytes  # of an expandable segment
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def splits(self, block: Block, size: int) -> bool:
        """Whether what `block` has beyond `size` bytes becomes a block, by the pool's own rule."""
        rest = block.size - size
        return rest >= GRANULE_BYTES if self.kind == "small" else rest > SMALL_BYTES


class Pools(dict[int, Pool]):
    """The pools of one kind, by stream; a stream that is new gets one."""

    def __init__(self, kind: str, page_bytes: int) -> None:
        self._kind = kind
        self._page_bytes = page_bytes

    def __missing__(self, stream: int) -> Pool:
        pool = self[stream] = Pool(stream, self._kind, self._page_bytes)
        return pool


# ------------------------------------------------------------------ of expandable segments


def whole_pages(block: Block) -> tuple[int, int]:
    """From where to where whole pages lie in a block of an expandable segment."""
    base, page = block.segment_address, block.pool.page_bytes
    return base + round_up(block.address - base, page), base + (end_of(block) - base) // page * page


def end_of(block: Block) -> int:
    """The address right above a block."""
    return block.address + block.size


def least_room(pool: Pool, index: int) -> int:
    """From the best fit on, the first block that no next one undercuts in what it can grow to."""
    free = pool.free
    while index + 1 < len(free) and _room(free[index + 1][2]) < _room(free[index][2]):
        index += 1
    return index


def _room(block: Block) -> int:
    """What a free block can grow to: its size and that of the unmapped memory right above."""
    above = block.next
    return block.size + (above.size if above is not None and above.state == UNMAPPED else 0)


def lowest_room(pool: Pool, size: int) -> Block | None:
    """The lowest unmapped block from which, or from the free block below it, `size` bytes reach
    over free and unmapped memory only."""
    for _, block in pool.unmapped:
        below = block.previous
        first = below if below is not None and below.state == FREE else block
        room = 0
        for part in first.run():
            if room >= size or part.state == TAKEN:
                break
            room += part.size
        if room >= size:
            return first
    return None
