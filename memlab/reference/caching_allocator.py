"""The caching allocator: cut requests from large segments, keep freed pieces for later requests.

Saves    time: cudaMalloc and cudaFree wait for the GPU.
Costs    memory: reserved but unallocated bytes, and fragmentation.
Source   torch/c10/cuda/CUDACachingAllocator.cpp, torch 2.13.

    round the request up to 512 bytes
    take the smallest free piece that fits, and split it if enough is left
    no piece fits: reserve a segment of 2 MiB, 20 MiB, or the request rounded up to 2 MiB
    free: merge the piece with free neighbours in its segment; keep the segment

`memlab.allocator.simulate` is the version to use.
"""

from dataclasses import dataclass

MIB = 2**20


def sizes(requested_bytes: int) -> tuple[int, int]:
    """Return the bytes of the block, and of a new segment for it."""
    block = -(-requested_bytes // 512) * 512
    if block <= MIB:
        return block, 2 * MIB
    if block < 10 * MIB:
        return block, 20 * MIB
    return block, -(-block // (2 * MIB)) * 2 * MIB


@dataclass
class Piece:
    segment: int
    address: int
    bytes: int
    free: bool


def take(pieces: list[Piece], size: int) -> int | None:
    """Allocate `size` bytes. Return their address, or None if no free piece is large enough."""
    fitting = [piece for piece in pieces if piece.free and piece.bytes >= size]
    if not fitting:
        return None
    best = min(fitting, key=lambda piece: (piece.bytes, piece.address))
    rest = best.bytes - size
    if rest >= 512 if size <= MIB else rest > MIB:
        above = Piece(best.segment, best.address + size, rest, free=True)
        pieces.insert(pieces.index(best) + 1, above)
        best.bytes = size
    best.free = False
    return best.address


def give_back(pieces: list[Piece], address: int) -> None:
    """Free the piece at `address`, and merge it with its free neighbours."""
    place = next(i for i, piece in enumerate(pieces) if piece.address == address)
    pieces[place].free = True
    for i in (place, place - 1):  # with the piece above, then with the one below
        if i >= 0 and i + 1 < len(pieces):
            one, other = pieces[i], pieces[i + 1]
            if one.free and other.free and one.segment == other.segment:
                one.bytes += other.bytes
                del pieces[i + 1]


class Cache:
    """Pools of small and large requests; `reserved` counts the bytes requested from the driver."""

    def __init__(self) -> None:
        self.pools: dict[str, list[Piece]] = {"small": [], "large": []}
        self.reserved = self.segments = 0
        self.held: dict[int, tuple[list[Piece], int]] = {}

    def malloc(self, storage: int, requested: int) -> None:
        block, segment = sizes(requested)
        pool = self.pools["small" if block <= MIB else "large"]
        address = take(pool, block)
        if address is None:
            pool.append(Piece(self.segments, self.reserved, segment, free=True))
            self.segments += 1
            self.reserved += segment
            address = take(pool, block)
        self.held[storage] = pool, address

    def free(self, storage: int) -> None:
        give_back(*self.held.pop(storage))
