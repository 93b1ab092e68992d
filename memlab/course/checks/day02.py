"""Day 2: reading the meter."""

import dis
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.allocator import Allocator, block_bytes, segment_bytes
from memlab.allocator.sizes import (
    GRANULE_BYTES,
    LARGE_REQUEST_BYTES,
    LARGE_SEGMENT_BYTES,
    MIB,
    SEGMENT_GRANULE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    round_up,
)
from memlab.course.bill import plain
from memlab.course.exercises import Bill, Day, Exercise, WrongAnswer, equal, require
from memlab.course.properties import unchanged
from memlab.metering import measure
from memlab.trace import DeviceMemory, Event, Trace
from memlab.units import format_bytes

# ------------------------------------------------------------------ 2.1: two sizes

Sizes = Callable[[int], tuple[int, int]]

# In an order in which two mistakes seldom fail first at the same request.
_REQUESTS = (
    *(1, 512, 513, 1_300, MIB, MIB + 1, 3 * MIB),
    *(25 * MIB, 15 * MIB, 10 * MIB, 10 * MIB - 1, 10 * MIB + 1, 10 * MIB - 512),
)


def _sizes(requested_bytes: int) -> tuple[int, int]:
    block = block_bytes(requested_bytes)
    return block, segment_bytes(block)


def _check_sizes(answer: Sizes) -> str:
    drawn = random.Random(2).choices(range(1, 64 * MIB), k=200)
    for requested in (*_REQUESTS, *drawn):
        got = answer(requested)
        require(
            isinstance(got, tuple) and [type(size) for size in got] == [int, int],
            f"sizes({requested:,}) gave {got!r}; wanted two whole numbers of bytes, those of the "
            f"block and those of the segment."
            f"{' Is there a return?' if got is None else ''}",
        )
        require(
            got == _sizes(requested),
            f"sizes({requested:,}) gave a block of {got[0]:,} and a segment of {got[1]:,} bytes; "
            "wanted {:,} and {:,}.".format(*_sizes(requested)),
        )
    return f"{len(_REQUESTS)} requests at the borders, {len(drawn)} in between"


def _block_but(block: Callable[[int], int]) -> Sizes:
    """The right sizes, of blocks that are cut otherwise."""
    return lambda requested_bytes: (
        block(requested_bytes),
        segment_bytes(block(requested_bytes)),
    )


def _segment_but(segment: Callable[[int], int]) -> Sizes:
    """The right block, and a segment found otherwise: by the block's size."""
    return lambda requested_bytes: (
        block_bytes(requested_bytes),
        segment(block_bytes(requested_bytes)),
    )


def _by_thresholds(
    small_below: int = SMALL_BYTES + 1,
    own_from: int = LARGE_REQUEST_BYTES,
    small_segment: int = SMALL_SEGMENT_BYTES,
    own_step: int = SEGMENT_GRANULE_BYTES,
) -> Callable[[int], int]:
    """`segment_bytes`, with borders and sizes that can be moved."""

    def segment(block: int) -> int:
        if block < small_below:
            return small_segment
        return LARGE_SEGMENT_BYTES if block < own_from else round_up(block, own_step)

    return segment


def _power_of_two(requested_bytes: int) -> int:
    return max(GRANULE_BYTES, 1 << (requested_bytes - 1).bit_length())


def _rounded_after(requested_bytes: int) -> tuple[int, int]:
    return block_bytes(requested_bytes), segment_bytes(requested_bytes)


_SIZES = Exercise(
    id="2.1",
    title="From a request to a block and a segment",
    minutes=8,
    difficulty=1,
    hints=(
        "Two roundings, one after the other: first the request becomes a block, then the block "
        "(no longer the request) decides which segment is asked for.",
        "Rounded up to a step of s, n bytes are -(-n // s) * s. A block of up to and with 1 MiB "
        "asks for 2 MiB, one below 10 MiB for 20 MiB, any other for itself in steps of 2 MiB.",
        "block = -(-requested_bytes // 512) * 512, and then three cases, each with a return: "
        "if block <= MIB: return block, 2 * MIB is the first. The last rounds up as the block "
        "does, in steps of 2 * MIB.",
    ),
    reference=_sizes,
    check=_check_sizes,
    wrong_answers=(
        WrongAnswer(
            lambda requested_bytes: (requested_bytes, segment_bytes(requested_bytes)),
            "A block is a multiple of 512 bytes: round the request up.",
        ),
        WrongAnswer(
            _block_but(lambda n: n // GRANULE_BYTES * GRANULE_BYTES),
            "Rounded down, a block is smaller than what was asked for.",
        ),
        WrongAnswer(
            _block_but(lambda n: max(GRANULE_BYTES, round(n / GRANULE_BYTES) * GRANULE_BYTES)),
            "Rounded to the nearest step, some blocks are too small: round up.",
        ),
        WrongAnswer(
            _block_but(lambda n: (n // GRANULE_BYTES + 1) * GRANULE_BYTES),
            "What is a multiple of 512 already stays as it is.",
        ),
        WrongAnswer(
            _block_but(_power_of_two),
            "Steps are 512 bytes everywhere; powers of two are another allocator's.",
        ),
        WrongAnswer(
            lambda requested_bytes: _sizes(requested_bytes)[::-1],
            "The block comes first, then the segment.",
        ),
        WrongAnswer(
            lambda requested_bytes: _sizes(requested_bytes)[1],
            "Both sizes are wanted: return block, segment.",
        ),
        WrongAnswer(
            _segment_but(lambda block: block),
            "The driver is never asked for a block alone: a small one gets a segment of 2 MiB.",
        ),
        WrongAnswer(
            _segment_but(_by_thresholds(small_segment=2 * 10**6)),
            "These are MiB, of 2**20 bytes, not MB.",
        ),
        WrongAnswer(
            _segment_but(_by_thresholds(small_below=0)),
            "Up to 1 MiB a block is small, and its segment has 2 MiB, not 20.",
        ),
        WrongAnswer(
            _segment_but(_by_thresholds(small_below=SMALL_BYTES)),
            "A block of exactly 1 MiB is still a small one.",
        ),
        WrongAnswer(
            _segment_but(lambda block: round_up(block, SEGMENT_GRANULE_BYTES)),
            "Between 1 and 10 MiB, blocks share segments of 20 MiB.",
        ),
        WrongAnswer(
            _segment_but(_by_thresholds(own_step=LARGE_SEGMENT_BYTES)),
            "From 10 MiB a segment grows in steps of 2 MiB, not of 20.",
        ),
        WrongAnswer(
            _segment_but(_by_thresholds(own_step=1)),
            "A segment of its own, too, is rounded up: to 2 MiB.",
        ),
        WrongAnswer(
            _segment_but(_by_thresholds(own_from=LARGE_SEGMENT_BYTES)),
            "Segments of 20 MiB end at blocks of 10 MiB, not of 20.",
        ),
        WrongAnswer(
            _segment_but(_by_thresholds(own_from=LARGE_REQUEST_BYTES + 1)),
            "A block of exactly 10 MiB has a segment of its own already.",
        ),
        WrongAnswer(
            _rounded_after,
            "The block decides, not the request: round first, then choose the segment.",
        ),
    ),
)

# ------------------------------------------------------------------ 2.2 and 2.3: the pool


@dataclass
class Piece:
    """As the notebook's: a part of a segment, in use or free."""

    segment: int
    address: int
    bytes: int
    free: bool


Pool = list[Piece]
Take = Callable[[Pool, int], int | None]
GiveBack = Callable[[Pool, int], None]
FREE, TAKEN = True, False


def _take(pieces: Pool, size: int) -> int | None:
    fitting = [piece for piece in pieces if piece.free and piece.bytes >= size]
    if not fitting:
        return None
    best = min(fitting, key=_by_size)
    _cut(pieces, best, size)
    return best.address


def _by_size(piece: Piece) -> tuple[int, int]:
    return piece.bytes, piece.address


def _is_worth_it(rest: int, size: int) -> bool:
    """Whether a rest becomes a piece of its own."""
    return rest >= GRANULE_BYTES if size <= SMALL_BYTES else rest > SMALL_BYTES


def _cut(
    pieces: Pool, piece: Piece, size: int, worth: Callable[[int, int], bool] = _is_worth_it
) -> None:
    """Take the first bytes of a free piece; what is left of it stays free if that is worth it."""
    rest = piece.bytes - size
    if worth(rest, size):
        above = Piece(piece.segment, piece.address + size, rest, FREE)
        pieces.insert(_place_of(pieces, piece.address) + 1, above)
        piece.bytes = size
    piece.free = TAKEN


def _give_back(pieces: Pool, address: int) -> None:
    place = _place_of(pieces, address)
    pieces[place].free = FREE
    for lower in (place, place - 1):  # with the piece above, then with the one below
        _join(pieces, lower)


def _join(pieces: Pool, lower: int) -> None:
    """Make one of a piece and the one above it, if both are free and of one segment."""
    if lower >= 0 and lower + 1 < len(pieces):
        one, other = pieces[lower], pieces[lower + 1]
        if one.free and other.free and one.segment == other.segment:
            one.bytes += other.bytes
            del pieces[lower + 1]


def _place_of(pieces: Pool, address: int) -> int:
    return next(place for place, piece in enumerate(pieces) if piece.address == address)


def _pool(*segments: Sequence[tuple[int, bool]]) -> Pool:
    """Segments of (bytes, free), one behind the other."""
    pieces: Pool = []
    address = 0
    for number, parts in enumerate(segments):
        for size, free in parts:
            pieces.append(Piece(number, address, size, free))
            address += size
    return pieces


def _in_words(pieces: Any) -> str:
    """Piece by piece, segments parted: "[0: 512 taken, 512: 1,024 free] [1,536: 512 free]"."""
    try:
        words = [
            (p.segment, f"{p.address:,}: {p.bytes:,} {'free' if p.free else 'taken'}")
            for p in pieces
        ]
    except (AttributeError, TypeError, ValueError):
        return "what is no list of pieces"
    text, before = "", None
    for segment, piece in words:
        text += f", {piece}" if segment == before else f"{']' if text else ''} [{piece}"
        before = segment
    return f"{text}]".strip()


_REST = 2 * MIB  # of a small segment, taken by others
_TAKE_CASES: dict[str, tuple[Pool, int]] = {
    "a piece that just fits": (
        _pool([(1024, TAKEN), (1024, FREE), (_REST - 2048, TAKEN)]),
        1024,
    ),
    "one large piece": (_pool([(_REST, FREE)]), 512),
    "no piece that is large enough": (_pool([(512, FREE), (_REST - 512, TAKEN)]), 1024),
    "a rest of 1,024 bytes": (_pool([(2048, FREE), (_REST - 2048, TAKEN)]), 1024),
    "a rest of 512 bytes": (_pool([(1536, FREE), (_REST - 1536, TAKEN)]), 1024),
    "three free pieces": (
        _pool([(4096, FREE), (512, TAKEN), (2048, FREE), (512, TAKEN), (8192, FREE)]),
        1024,
    ),
    "two free pieces of one size": (_pool([(2048, FREE), (512, TAKEN), (2048, FREE)]), 1024),
    "two segments": (_pool([(_REST, TAKEN)], [(_REST, FREE)]), 2048),
    "a request of exactly 1 MiB": (_pool([(_REST, FREE)]), MIB),
    "20 MiB, all free": (_pool([(20 * MIB, FREE)]), 5 * MIB),
    "a large piece with a rest of half a MiB": (
        _pool([(5 * MIB + MIB // 2, FREE), (14 * MIB + MIB // 2, TAKEN)]),
        5 * MIB,
    ),
    "a large request in a piece that is no larger than small segments are": (
        _pool([(MIB + MIB // 2, FREE), (18 * MIB + MIB // 2, TAKEN)]),
        MIB + 512,
    ),
    "a large piece with a rest of 1 MiB": (
        _pool([(6 * MIB, FREE), (14 * MIB, TAKEN)]),
        5 * MIB,
    ),
    "a large piece with a rest of 1 MiB and 512 bytes": (
        _pool([(6 * MIB + 512, FREE), (14 * MIB - 512, TAKEN)]),
        5 * MIB,
    ),
}


def _check_take(answer: Take) -> str:
    for name, (before, size) in _TAKE_CASES.items():
        pieces, wanted = _copy(before), _copy(before)
        wanted_address = _take(wanted, size)
        got = answer(pieces, size)
        require(
            _plain(pieces) == _plain(wanted)
            and got == wanted_address
            and type(got) is type(wanted_address),
            f"take({_in_words(before)}, {size:,}), {name}, gave {_address(got)} and left "
            f"{_in_words(pieces)}; wanted {_address(wanted_address)} and {_in_words(wanted)}.",
        )
    return f"{len(_TAKE_CASES)} cases by hand; {_against_cuda(answer, _give_back)}"


def _address(got: Any) -> str:
    return f"{got:,}" if type(got) is int else repr(got)


_GIVE_BACK_CASES: dict[str, tuple[Pool, int]] = {
    "between two in use": (_pool([(512, TAKEN), (1024, TAKEN), (2048, TAKEN)]), 512),
    "between two free ones": (
        _pool([(512, TAKEN), (1024, FREE), (512, TAKEN), (2048, FREE), (512, TAKEN)]),
        1536,
    ),
    "below a free one": (_pool([(512, TAKEN), (1024, TAKEN), (2048, FREE), (512, TAKEN)]), 512),
    "above a free one": (_pool([(512, TAKEN), (1024, FREE), (2048, TAKEN), (512, TAKEN)]), 1536),
    "the first of all, with a free one at the end": (
        _pool([(512, TAKEN), (512, TAKEN), (1024, FREE)]),
        0,
    ),
    "with a free one further off": (
        _pool([(512, FREE), (1024, TAKEN), (512, TAKEN), (2048, TAKEN)]),
        1536,
    ),
    "the last of its segment": (_pool([(512, TAKEN), (1536, TAKEN)], [(2048, FREE)]), 512),
    "the first of its segment": (_pool([(512, TAKEN), (1536, FREE)], [(2048, TAKEN)]), 2048),
}


def _check_give_back(answer: GiveBack) -> str:
    for name, (before, address) in _GIVE_BACK_CASES.items():
        pieces, wanted = _copy(before), _copy(before)
        _give_back(wanted, address)
        answer(pieces, address)
        require(
            _plain(pieces) == _plain(wanted),
            f"give_back({_in_words(before)}, {address:,}), {name}, left {_in_words(pieces)}; "
            f"wanted {_in_words(wanted)}."
            f"{' Its name for the list was given another list.' if _rebinds(answer) else ''}",
        )
    return f"{len(_GIVE_BACK_CASES)} cases by hand; {_against_cuda(_take, answer)}"


def _rebinds(answer: GiveBack) -> bool:
    """Whether a function assigns its first parameter anew, of which its caller sees nothing."""
    code = getattr(answer, "__code__", None)
    stores = [s for s in dis.get_instructions(code) if "STORE" in s.opname] if code else []
    # Python 3.13 stores two names in one instruction.
    stored = {n for s in stores for n in (s.argval if isinstance(s.argval, tuple) else (s.argval,))}
    return bool(code) and not stored.isdisjoint(code.co_varnames[:1])


def _copy(pieces: Pool) -> Pool:
    return [replace(piece) for piece in pieces]


def _plain(pieces: Any) -> Any:
    """What can be compared: the notebook's pieces are of a class of its own."""
    try:
        return [(p.segment, p.address, p.bytes, bool(p.free)) for p in pieces]
    except (AttributeError, TypeError):
        return None


# ------------------------------------------------------------------ beside CUDA's allocator

REQUESTS = 400


class _Cache:
    """The notebook's: two pools of pieces, and the driver behind them."""

    def __init__(self, take: Take, give_back: GiveBack) -> None:
        self.take, self.give_back = take, give_back
        self.pools: dict[bool, Pool] = {True: [], False: []}
        self.reserved_bytes = self.segments = 0

    def malloc(self, requested_bytes: int) -> int | None:
        block, segment = _sizes(requested_bytes)
        pool = self.pools[block <= SMALL_BYTES]
        address = self.take(pool, block)
        if address is None:
            pool.append(Piece(self.segments, self.reserved_bytes, segment, FREE))
            self.segments += 1
            self.reserved_bytes += segment
            address = self.take(pool, block)
        return address

    def free(self, address: int, requested_bytes: int) -> None:
        self.give_back(self.pools[_sizes(requested_bytes)[0] <= SMALL_BYTES], address)

    @property
    def largest_free_bytes(self) -> int:
        pieces = (*self.pools[True], *self.pools[False])
        return max((piece.bytes for piece in pieces if piece.free), default=0)


def _against_cuda(take: Take, give_back: GiveBack) -> str:
    """Random requests to both: the same addresses, reserved bytes and largest free piece."""
    cuda, ours = Allocator(), _Cache(take, give_back)
    held: list[tuple[Any, int]] = []
    for number, requested in enumerate(_random_requests(), 1):
        if requested:
            block = cuda.malloc(requested)
            held.append((block, requested))
            got = ours.malloc(requested)
            require(
                got == block.address,
                f"Beside CUDA's allocator, call {number} (a request of {requested:,} bytes) got "
                f"address {_address(got)}; wanted {block.address:,}.",
            )
        else:
            block, requested = held.pop(number % len(held))
            ours.free(block.address, requested)
            cuda.free(block)
        for what, got, wanted in (
            ("reserved", ours.reserved_bytes, cuda.reserved_bytes),
            ("in the largest free piece", ours.largest_free_bytes, cuda.largest_free_bytes()),
        ):
            equal(f"Beside CUDA's allocator, call {number}: {what}", got, wanted, "bytes")
    reserved = format_bytes(ours.reserved_bytes)
    return f"{number} calls as CUDA's allocator has them, {reserved} reserved"


def _random_requests() -> Iterator[int]:
    """Bytes to ask for, or 0: free one of those that are held."""
    numbers, held = random.Random(0), 0
    for _ in range(REQUESTS):
        if held and numbers.random() < 0.45:
            held -= 1
            yield 0
        else:
            held += 1
            yield int(2 ** numbers.uniform(4, 24.5))


# ------------------------------------------------------------------ mistakes in the pool


def _take_but(
    choose: Callable[[list[Piece]], Piece] = lambda fitting: min(fitting, key=_by_size),
    fits: Callable[[Piece, int], bool] = lambda piece, size: piece.free and piece.bytes >= size,
    worth: Callable[[int, int], bool] = _is_worth_it,
) -> Take:
    """The right answer, with another choice or another rule for the rest."""

    def answer(pieces: Pool, size: int) -> int | None:
        fitting = [piece for piece in pieces if fits(piece, size)]
        if not fitting:
            return None
        found = choose(fitting)
        _cut(pieces, found, size, worth)
        return found.address

    return answer


def _place_for_address(pieces: Pool, size: int) -> int | None:
    address = _take(pieces, size)
    return None if address is None else _place_of(pieces, address)


def _still_free(pieces: Pool, size: int) -> int | None:
    address = _take(pieces, size)
    if address is not None:
        pieces[_place_of(pieces, address)].free = FREE
    return address


def _rest_at_the_end(pieces: Pool, size: int) -> int | None:
    known = {piece.address for piece in pieces}
    address = _take(pieces, size)
    pieces.sort(key=lambda piece: piece.address not in known)
    return address


def _rest_in_segment_0(pieces: Pool, size: int) -> int | None:
    known = {piece.address for piece in pieces}
    address = _take(pieces, size)
    for piece in pieces:
        if piece.address not in known:
            piece.segment = 0
    return address


def _from_above(pieces: Pool, size: int) -> int | None:
    fitting = [piece for piece in pieces if piece.free and piece.bytes >= size]
    if not fitting:
        return None
    best = min(fitting, key=_by_size)
    if not _is_worth_it(best.bytes - size, size):
        best.free = TAKEN
        return best.address
    best.bytes -= size
    above = Piece(best.segment, best.address + best.bytes, size, TAKEN)
    pieces.insert(_place_of(pieces, best.address) + 1, above)
    return above.address


_TAKE = Exercise(
    id="2.2",
    title="Take a piece: best fit, and split",
    minutes=15,
    difficulty=3,
    hints=(
        "Three steps: find all pieces that are free and large enough, choose one of them, and "
        "decide whether what is left of it is worth a piece of its own.",
        "min(fitting, key=lambda piece: (piece.bytes, piece.address)) chooses. The rest becomes a "
        "piece from 512 bytes if size is up to and with 1 MiB, else only above 1 MiB.",
        "rest = best.bytes - size; if it is worth it: pieces.insert(pieces.index(best) + 1, "
        "Piece(best.segment, best.address + size, rest, free=True)) and best.bytes = size. In any "
        "case best.free = False, and return best.address; None where nothing fits.",
    ),
    reference=_take,
    check=_check_take,
    wrong_answers=(
        WrongAnswer(
            _take_but(fits=lambda piece, size: piece.free and piece.bytes > size),
            "A piece of exactly the right size fits.",
        ),
        WrongAnswer(
            _take_but(fits=lambda piece, size: piece.bytes >= size),
            "What is in use already cannot be taken: only free pieces count.",
        ),
        WrongAnswer(_still_free, "Mark the piece as taken, or the next request gets it as well."),
        WrongAnswer(_place_for_address, "Return the address of the piece, not its place."),
        WrongAnswer(
            _take_but(worth=lambda rest, size: False),
            "Split: without it a request of 512 bytes takes a whole segment.",
        ),
        WrongAnswer(_from_above, "The request gets the lower part; the rest lies above it."),
        WrongAnswer(
            _take_but(worth=lambda rest, size: rest > SMALL_BYTES),
            "The rule of 1 MiB is the large pool's; a small rest is worth it from 512 bytes.",
        ),
        WrongAnswer(
            _rest_at_the_end,
            "The list is in the order of addresses: the rest stands right behind its piece.",
        ),
        WrongAnswer(
            _take_but(
                worth=lambda rest, size: (
                    rest > (GRANULE_BYTES if size <= SMALL_BYTES else SMALL_BYTES)
                )
            ),
            "A rest of exactly 512 bytes is a piece already.",
        ),
        WrongAnswer(
            _take_but(choose=lambda fitting: fitting[0]),
            "This is the first fit; the best fit is the smallest piece that is large enough.",
        ),
        WrongAnswer(
            _take_but(choose=lambda fitting: max(fitting, key=_by_size)),
            "This is the largest piece; it is better kept whole, for a large request.",
        ),
        WrongAnswer(
            _take_but(choose=lambda fitting: min(fitting, key=lambda p: (p.bytes, -p.address))),
            "Of two pieces of one size, the one with the lower address is taken.",
        ),
        WrongAnswer(_rest_in_segment_0, "The rest belongs to the segment that it is cut from."),
        WrongAnswer(
            _take_but(worth=lambda rest, size: rest >= GRANULE_BYTES),
            "Of a large piece, a rest of up to 1 MiB is not split off: it goes with the request.",
        ),
        WrongAnswer(
            _take_but(
                worth=lambda rest, size: (
                    rest >= (GRANULE_BYTES if size <= SMALL_BYTES else SMALL_BYTES)
                )
            ),
            "A large rest of exactly 1 MiB is not split off: it must be more.",
        ),
        WrongAnswer(
            _take_but(
                worth=lambda rest, size: (
                    rest >= GRANULE_BYTES if size < SMALL_BYTES else rest > SMALL_BYTES
                )
            ),
            "A block of exactly 1 MiB is still a small one: its rest is a piece from 512 bytes.",
        ),
    ),
)


def _give_back_but(
    lowers: Callable[[int], tuple[int, ...]] = lambda place: (place, place - 1),
    may_join: Callable[[Piece, Piece], bool] = lambda one, other: (
        one.free and other.free and one.segment == other.segment
    ),
) -> GiveBack:
    """The right answer, with other neighbours or another rule for them."""

    def answer(pieces: Pool, address: int) -> None:
        place = _place_of(pieces, address)
        pieces[place].free = FREE
        for lower in lowers(place):
            if lower >= 0 and lower + 1 < len(pieces):
                one, other = pieces[lower], pieces[lower + 1]
                if may_join(one, other):
                    one.bytes, one.free = one.bytes + other.bytes, FREE
                    del pieces[lower + 1]

    return answer


def _before_the_first(pieces: Pool, address: int) -> None:
    """Looks at pieces[place - 1] without asking whether there is one."""
    place = _place_of(pieces, address)
    here = pieces[place]
    here.free = FREE
    if place + 1 < len(pieces):
        above = pieces[place + 1]
        if above.free and above.segment == here.segment:
            here.bytes += above.bytes
            del pieces[place + 1]
    below = pieces[place - 1]
    if below.free and below.segment == here.segment:
        below.bytes += here.bytes
        del pieces[place]


def _in_a_new_list(pieces: Pool, address: int) -> None:
    """What is right is assigned to the name alone: the caller's list stays as long as it was."""
    place = _place_of(pieces, address)
    pieces[place].free = FREE
    kept: Pool = []
    for piece in pieces:
        last = kept[-1] if kept else None
        if last and last.free and piece.free and last.segment == piece.segment:
            last.bytes += piece.bytes
        else:
            kept.append(piece)
    pieces = kept


def _remove(pieces: Pool, address: int) -> None:
    del pieces[_place_of(pieces, address)]


def _leave_the_absorbed(pieces: Pool, address: int) -> None:
    place = _place_of(pieces, address)
    pieces[place].free = FREE
    for one, other in ((place, place + 1), (place - 1, place)):
        if one >= 0 and other < len(pieces):
            lower, upper = pieces[one], pieces[other]
            if lower.free and upper.free and lower.segment == upper.segment:
                lower.bytes += upper.bytes


def _forget_the_bytes(pieces: Pool, address: int) -> None:
    before = {piece.address: piece.bytes for piece in pieces}
    _give_back(pieces, address)
    for piece in pieces:
        piece.bytes = before[piece.address]


def _compact(pieces: Pool, address: int) -> None:
    """Join all that is free in the segment, neighbours or not."""
    _give_back(pieces, address)
    segment = next(p.segment for p in pieces if p.address <= address < p.address + p.bytes)
    first, *others = [piece for piece in pieces if piece.free and piece.segment == segment]
    first.bytes += sum(piece.bytes for piece in others)
    pieces[:] = [piece for piece in pieces if all(piece is not other for other in others)]


_GIVE_BACK = Exercise(
    id="2.3",
    title="Give a piece back, and merge",
    minutes=10,
    difficulty=3,
    hints=(
        "Find the piece with this address and mark it as free. Then look at its two neighbours in "
        "the list: which of them may it join?",
        "A neighbour joins if it is free, too, and of the same segment. Begin with the one above: "
        "its bytes go to the lower piece, and it leaves the list. Then do the same with the one "
        "below.",
        "for i in (place, place - 1): one, other = pieces[i], pieces[i + 1] are the two that may "
        "join, where i is no index below 0 and i + 1 is one of the list. To join them: one.bytes "
        "+= other.bytes and del pieces[i + 1]. Which conditions have to hold before?",
    ),
    reference=_give_back,
    check=_check_give_back,
    wrong_answers=(
        WrongAnswer(
            lambda pieces, address: None, "The piece is still in use: mark it as free first."
        ),
        WrongAnswer(_remove, "A free piece stays in the list: the driver has not got it back."),
        WrongAnswer(
            _give_back_but(may_join=lambda one, other: one.segment == other.segment),
            "A neighbour in use cannot be joined: somebody's numbers are in it.",
        ),
        WrongAnswer(
            _give_back_but(lowers=lambda place: ()),
            "Without merging, memory only ever gets cut smaller.",
        ),
        WrongAnswer(
            _give_back_but(lowers=lambda place: (place - 1,)),
            "The piece above may be free, too: join it.",
        ),
        WrongAnswer(
            _give_back_but(lowers=lambda place: (place,)),
            "The piece below may be free, too: join it.",
        ),
        WrongAnswer(
            _leave_the_absorbed, "What was joined leaves the list, or its bytes are there twice."
        ),
        WrongAnswer(_forget_the_bytes, "The lower piece takes over the bytes of the upper one."),
        WrongAnswer(
            _compact,
            "Only neighbours join: what is in use between two free pieces cannot be moved.",
        ),
        WrongAnswer(
            _give_back_but(may_join=lambda one, other: one.free and other.free),
            "Two segments never join, even where their addresses meet: the driver gave two.",
        ),
        WrongAnswer(
            _before_the_first, "Before the first piece there is none: pieces[-1] is the last."
        ),
        WrongAnswer(
            _in_a_new_list,
            "Assigning the name changes nothing outside: use pieces[:] = … or del.",
        ),
    ),
)

# ------------------------------------------------------------------ 2.4: the leak

Leaks = dict[str, int]
Diagnose = Callable[[list[Trace]], Leaks]


class _Run:
    """Writes the traces of a run's epochs by hand."""

    def __init__(self) -> None:
        self.epochs: list[Trace] = []
        self._births = 0
        self._held: dict[int, Event] = {}
        self._events: list[Event] = []
        self._reserved_bytes = 0

    def take(self, line: str, size: int, category: str = "activations") -> int:
        self._births += 1
        event = Event(size, self._births, category, "aten.mul", "", "forward", "uint8", (), line)
        self._held[self._births] = event
        self._events.append(event)
        return self._births

    def drop(self, *storages: int) -> None:
        for storage in storages:
            event = self._held.pop(storage)
            self._events.append(event._replace(bytes=-event.bytes))

    def end(self) -> None:
        """The epoch is over; what is alive now was there before the next."""
        trace = Trace(tuple(self._events))
        self._reserved_bytes = max(self._reserved_bytes, 2 * trace.peak_bytes)
        memory = DeviceMemory(reserved_peak_bytes=self._reserved_bytes)
        self.epochs.append(replace(trace, memory=memory))
        self._events = [event._replace(phase="before") for event in self._held.values()]


def _that_keeps(run: _Run, epoch: int) -> None:
    for _ in range(2):
        run.take("log.py:7 note", 50)


def _that_keeps_nothing(run: _Run, epoch: int) -> None:
    run.drop(run.take("net.py:3 forward", 5_000))


class _Gradients:
    """Thrown away and made anew in each epoch."""

    def __init__(self) -> None:
        self.last: list[int] = []

    def __call__(self, run: _Run, epoch: int) -> None:
        run.drop(*self.last)
        self.last = [run.take("train.py:9 step", 300, "gradients")]


def _with_adam(run: _Run, epoch: int) -> None:
    if epoch == 0:
        run.take("train.py:10 step", 8_000, "optimizer_state")
    _that_keeps_nothing(run, epoch)


def _with_a_table(run: _Run, epoch: int) -> None:
    if epoch < 3:
        run.take("net.py:5 table", 700)
    _that_keeps_nothing(run, epoch)


def _with_two_leaks(run: _Run, epoch: int) -> None:
    _with_a_table(run, epoch)
    run.take("hook.py:2 watch", 3)
    run.take("log.py:7 note", 60)


def _with_longer_text(run: _Run, epoch: int) -> None:
    run.drop(run.take("net.py:3 forward", 1_000 + 100 * epoch))


def _that_validates_at_times(run: _Run, epoch: int) -> None:
    if epoch % 2:
        run.take("valid.py:4 score", 64)


def _that_starts_late(run: _Run, epoch: int) -> None:
    if epoch > 4:
        run.take("late.py:8 keep", 90)


class _Shrinking:
    """One line gives back what another takes."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def __call__(self, run: _Run, epoch: int) -> None:
        if epoch == 0:
            self.left = [run.take("data.py:6 load", 50) for _ in range(9)]
        run.drop(self.left.pop())
        run.take("log.py:7 note", 50)


def _traces(epoch_of: Callable[[_Run, int], None], epochs: int = 8) -> list[Trace]:
    run = _Run()
    run.take("net.py:1 build", 4_000, "parameters")
    for epoch in range(epochs):
        epoch_of(run, epoch)
        run.end()
    return run.epochs


_LEAK_CASES: dict[str, tuple[list[Trace], Leaks]] = {
    "a run that keeps two tensors of 50 bytes an epoch": (
        _traces(_that_keeps, 6),
        {"log.py:7 note": 100},
    ),
    "a run that keeps nothing": (_traces(_that_keeps_nothing), {}),
    "a run whose gradients are made anew": (_traces(_Gradients()), {}),
    "a run whose optimizer makes its state": (_traces(_with_adam), {}),
    "a run with a table that is full after three epochs": (_traces(_with_a_table), {}),
    "a run whose text gets longer": (_traces(_with_longer_text), {}),
    "a run that validates every second epoch": (
        _traces(_that_validates_at_times, 6),
        {"valid.py:4 score": 32},
    ),
    "a run with two leaks and a table": (
        _traces(_with_two_leaks, 7),
        {"log.py:7 note": 60, "hook.py:2 watch": 3},
    ),
    "a run with a line that is new since the middle": (
        _traces(_that_starts_late),
        {"late.py:8 keep": 90},
    ),
    "a run that gives back as much as it takes": (_traces(_Shrinking()), {"log.py:7 note": 50}),
}


def _leaks(epochs: list[Trace]) -> Leaks:
    middle = len(epochs) // 2
    return _growth(epochs[middle], epochs[-1], len(epochs) - 1 - middle)


def _growth(earlier: Trace, later: Trace, epochs: int) -> Leaks:
    before, after = _by_line(earlier), _by_line(later)
    grown = {line: after[line] - before[line] for line in after}
    return {line: size // epochs for line, size in grown.items() if size > 0}


def _by_line(trace: Trace) -> "Counter[str]":
    sums: Counter[str] = Counter()
    for event in trace.alive():
        sums[str(event.line)] += event.bytes
    return sums


def _check_leaks(answer: Diagnose) -> str:
    for name, (epochs, wanted) in _LEAK_CASES.items():
        got = answer(list(epochs))
        equal(f"leaks of {name}", _whole(got) if isinstance(got, dict) else got, wanted)
    return f"{len(_LEAK_CASES)} runs, each line and byte"


def _whole(got: dict[Any, Any]) -> dict[Any, Any]:
    """100.0 bytes are 100: who divided by / has found the leak."""
    return {
        line: int(size) if isinstance(size, float) and size.is_integer() else size
        for line, size in got.items()
    }


def _from_the_first(epochs: list[Trace]) -> Leaks:
    return _growth(epochs[0], epochs[-1], len(epochs) - 1)


def _from_the_first_of_all(epochs: list[Trace]) -> Leaks:
    return _growth(epochs[0], epochs[-1], len(epochs))


def _last_tensor_of_a_line(epochs: list[Trace]) -> Leaks:
    middle = len(epochs) // 2
    before, after = (
        {str(event.line): event.bytes for event in epochs[place].alive()} for place in (middle, -1)
    )
    grown = {line: after[line] - before.get(line, 0) for line in after}
    return {line: size // (len(epochs) - 1 - middle) for line, size in grown.items() if size > 0}


def _other_events(epochs: list[Trace]) -> Leaks:
    middle = len(epochs) // 2
    new = Trace(tuple(set(epochs[-1].alive()) - set(epochs[middle].alive())))
    return {line: size // (len(epochs) - 1 - middle) for line, size in _by_line(new).items()}


def _known_in_the_middle(epochs: list[Trace]) -> Leaks:
    known = _by_line(epochs[len(epochs) // 2])
    return {line: size for line, size in _leaks(epochs).items() if line in known}


def _the_last_two(epochs: list[Trace]) -> Leaks:
    return _growth(epochs[-2], epochs[-1], 1)


def _in_all(epochs: list[Trace]) -> Leaks:
    return _growth(epochs[len(epochs) // 2], epochs[-1], 1)


def _of_all_epochs(epochs: list[Trace]) -> Leaks:
    return _growth(epochs[len(epochs) // 2], epochs[-1], len(epochs))


def _of_the_half(epochs: list[Trace]) -> Leaks:
    return _growth(epochs[len(epochs) // 2], epochs[-1], len(epochs) // 2)


def _everything_alive(epochs: list[Trace]) -> Leaks:
    return {line: size // len(epochs) for line, size in _by_line(epochs[-1]).items()}


def _with_zeros(epochs: list[Trace]) -> Leaks:
    return {line: _leaks(epochs).get(line, 0) for line in _by_line(epochs[-1])}


def _with_falls(epochs: list[Trace]) -> Leaks:
    middle = len(epochs) // 2
    before, after = _by_line(epochs[middle]), _by_line(epochs[-1])
    grown = {line: after[line] - before[line] for line in before | after}
    return {line: size // (len(epochs) - 1 - middle) for line, size in grown.items() if size}


def _in_one_sum(epochs: list[Trace]) -> int:
    return sum(_leaks(epochs).values())


def _tensors(epochs: list[Trace]) -> Leaks:
    ones = [Trace(tuple(e._replace(bytes=1) for e in epoch.alive())) for epoch in epochs]
    return _leaks(ones)


def _by_kind(epochs: list[Trace]) -> Leaks:
    named = [Trace(tuple(e._replace(line=e.category) for e in t.alive())) for t in epochs]
    return _leaks(named)


def _births(epochs: list[Trace]) -> Leaks:
    sums: Counter[str] = Counter()
    for event in epochs[-1].events:
        if event.bytes > 0 and event.phase != "before":
            sums[str(event.line)] += event.bytes
    return dict(sums)


def _new_storages(epochs: list[Trace]) -> Leaks:
    middle = len(epochs) // 2
    known = {event.storage for event in epochs[middle].alive()}
    new = Trace(tuple(e for e in epochs[-1].alive() if e.storage not in known))
    return {line: size // (len(epochs) - 1 - middle) for line, size in _by_line(new).items()}


def _at_the_peak(epochs: list[Trace]) -> Leaks:
    return _leaks([Trace(tuple(epoch.alive(epoch.peak_position))) for epoch in epochs])


def _of_the_cache(epochs: list[Trace]) -> Leaks:
    middle = len(epochs) // 2
    grown = epochs[-1].memory.reserved_peak_bytes - epochs[middle].memory.reserved_peak_bytes
    return {"reserved": grown // (len(epochs) - 1 - middle)} if grown else {}


def _only_the_largest(epochs: list[Trace]) -> Leaks:
    found = _leaks(epochs)
    largest = max(found, key=lambda line: found[line], default=None)
    return {} if largest is None else {largest: found[largest]}


_LEAKS = Exercise(
    id="2.4",
    title="Find the leak, and its line",
    minutes=12,
    difficulty=3,
    hints=(
        "What is alive at the end of two epochs, summed by line: a leak is a line whose sum went "
        "up, whatever the tensors are.",
        "Sum event.bytes by event.line over epochs[len(epochs) // 2].alive(), and the same over "
        "epochs[-1].alive(). Their difference, line by line, came about in "
        "len(epochs) - 1 - len(epochs) // 2 epochs.",
        "A collections.Counter has 0 for a line that it never saw: for event in "
        "epochs[-1].alive(): after[event.line] += event.bytes, and the same for `before`. What is "
        "left is one dictionary: the lines of `after` that grew, and by how much in an epoch.",
    ),
    reference=_leaks,
    check=_check_leaks,
    wrong_answers=(
        WrongAnswer(_in_one_sum, "One number for all says nothing of where: a dictionary by line."),
        WrongAnswer(_by_kind, "The category says what it is; the line says who keeps it."),
        WrongAnswer(
            _of_the_cache,
            "Reserved bytes are the allocator's cache, which grows without any leak: look at what "
            "is alive.",
        ),
        WrongAnswer(_tensors, "These are tensors, counted; wanted are their bytes."),
        WrongAnswer(_everything_alive, "What is alive is no leak: what grows is."),
        WrongAnswer(
            _in_all, "This is the growth of all epochs in between: divide by their number."
        ),
        WrongAnswer(
            _of_all_epochs, "Divide by the epochs between the two that you compare, not by all."
        ),
        WrongAnswer(
            _of_the_half,
            "From the middle to the last are len(epochs) - 1 - len(epochs) // 2 epochs.",
        ),
        WrongAnswer(_with_zeros, "A line that does not grow is no leak: leave it out."),
        WrongAnswer(
            _births,
            "What is made and freed again in an epoch is no leak: look at what is alive after it.",
        ),
        WrongAnswer(
            _new_storages,
            "Gradients are new tensors in every step, and no more of them: compare sums, line by "
            "line, not tensors.",
        ),
        WrongAnswer(
            _from_the_first,
            "The first epochs fill what is then full (Adam's state, tables): begin in the middle.",
        ),
        WrongAnswer(
            _at_the_peak, "A longer text has a higher peak and leaves nothing: look at the end."
        ),
        WrongAnswer(
            _the_last_two,
            "The last epoch alone may have what others have not, or the other way round: compare "
            "with the middle.",
        ),
        WrongAnswer(_only_the_largest, "There may be more than one leak: each line that grows."),
        WrongAnswer(_with_falls, "A line that gives something back is no leak: leave it out."),
        WrongAnswer(
            _last_tensor_of_a_line,
            "A line has several tensors, and a dictionary keeps the last one put in: sum them.",
        ),
        WrongAnswer(
            _other_events,
            "A tensor that was there before is another event (its phase differs): compare sums of "
            "bytes, not sets of events.",
        ),
        WrongAnswer(
            _from_the_first_of_all,
            "Two things at once: compare with the middle, not with the first, and divide by the "
            "epochs from there to the last.",
        ),
        WrongAnswer(
            _known_in_the_middle,
            "A line may be new since the middle: go through the last epoch's lines, and take 0 for "
            "what the middle has not.",
        ),
    ),
)

# ------------------------------------------------------------------ 2.5: mended

Batch = tuple[Tensor, Tensor]
Notes = dict[str, Any]
TrainEpoch = Callable[
    [nn.Sequential, torch.optim.Optimizer, Sequence[Batch], Sequence[Batch], Notes], None
]
EPOCHS = 4
FEW, MANY = 2, 6  # batches in an epoch
SCALARS_BYTES = 16  # of numbers that a batch may leave until its epoch's end; no tensor fits in


def _soften(targets: Tensor) -> Tensor:
    return 0.9 * F.one_hot(targets, 256) + 0.1 / 256


def _new_notes() -> Notes:
    return {"losses": [], "scales": [], "soft": {}}


def _new_training() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 256))
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def _text(batches: int, seed: int) -> list[Batch]:
    """Batches of their own in each epoch, as a loader gives them."""
    numbers = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (batches, 4, 17), generator=numbers)
    return [(part[:, :-1].clone(), part[:, 1:].clone()) for part in text]


@dataclass(frozen=True)
class _Trained:
    """What came of a few epochs."""

    notes: Notes
    weights: list[Tensor]
    traces: list[Trace]
    hooks: int


def _trained(answer: TrainEpoch, epochs: int = EPOCHS, batches: int = FEW) -> _Trained:
    model, optimizer = _new_training()
    held_out, notes, traces = _text(batches, seed=100), _new_notes(), []
    for epoch in range(epochs):
        training = _text(batches, seed=epoch)
        step = partial(answer, model, optimizer, training, held_out, notes)
        traces.append(measure(step, model=model, optimizer=optimizer))
    weights = [weight.detach().clone() for weight in model.parameters()]
    return _Trained(notes, weights, traces, sum(len(m._forward_hooks) for m in model.modules()))


def _require_all_else_unchanged(answer: TrainEpoch) -> None:
    """The mode, and hooks that others have put there, beside its own of which none may stay."""
    model, optimizer = _new_training()
    for module in model:
        module.register_forward_hook(lambda module, args, output: None)
    text = _text(FEW, seed=7)
    with unchanged(
        "train_epoch", may_change=("values", "gradients", "state"), model=model, optimizer=optimizer
    ):
        answer(model, optimizer, text, text, _new_notes())


@cache
def _wanted() -> _Trained:
    return _trained(_mended)


def _check_train_epoch(answer: TrainEpoch) -> str:
    got = _trained(answer)
    alive = [trace.live_bytes for trace in got.traces]
    require(
        len(set(alive[1:])) == 1,
        f"train_epoch leaves {', '.join(f'{size:,}' for size in alive)} bytes alive after epochs "
        f"1 to {EPOCHS}; wanted the same after each from the second on. Of what the last one adds, "
        f"the largest is {_largest_growth(got.traces)}.",
    )
    require(
        got.hooks == 0,
        f"train_epoch leaves {got.hooks} hooks on the model after {EPOCHS} epochs; wanted none.",
    )
    _same_results(got, _wanted())
    _require_all_else_unchanged(answer)
    few, many = (_trained(answer, 2, batches).traces[-1] for batches in (FEW, MANY))
    higher = many.peak_bytes - few.peak_bytes
    inputs = _input_bytes(MANY) - _input_bytes(FEW)
    require(
        higher <= inputs + SCALARS_BYTES * (MANY - FEW),
        f"an epoch of {MANY} batches peaks {higher:,} bytes above one of {FEW}; wanted the "
        f"{inputs:,} bytes that its text has more: nothing may pile up within it. Of what does, "
        f"the largest is {_largest_growth([_made_by_peak(few), _made_by_peak(many)])}.",
    )
    return f"{alive[-1]:,} bytes alive after each epoch · losses, scales and weights as before"


def _largest_growth(traces: list[Trace]) -> str:
    """Of what the last of the traces has more: how many, of which shape, and what made them."""
    for kind, count in traces[-2].diff(traces[-1]).rows:
        if count > 0:
            shape = "×".join(map(str, kind.shape)) or "scalar"
            return f"{count} × {shape} {kind.dtype}, made by {kind.operator}"
    return "nothing: the epoch before it left more"


def _made_by_peak(trace: Trace) -> Trace:
    """What is alive at the peak, and was not handed over: no operator has made the text."""
    return Trace(tuple(event for event in trace.alive(trace.peak_position) if event.operator))


def _input_bytes(batches: int) -> int:
    """Of the text that an epoch is handed: for training, and held out."""
    return 2 * sum(tensor.nbytes for batch in _text(batches, 0) for tensor in batch)


def _same_results(got: _Trained, wanted: _Trained) -> None:
    """What is noted and learnt must be what the leaking loop notes and learns."""
    for name in ("losses", "scales"):
        numbers = _numbers(got.notes.get(name))
        require(
            numbers is not None and len(numbers) == len(wanted.notes[name]),
            f'notes["{name}"] has {_how_many(numbers)} after {EPOCHS} epochs; wanted '
            f"{len(wanted.notes[name])}, of all epochs.",
        )
        difference = max(abs(a - b) for a, b in zip(numbers, wanted.notes[name], strict=True))
        require(
            difference <= 1e-5,
            f'notes["{name}"] ends with {numbers[-1]:.4f}; wanted {wanted.notes[name][-1]:.4f}, '
            f"as before the repair.",
        )
    difference = max(
        (a - b).abs().max().item() for a, b in zip(got.weights, wanted.weights, strict=True)
    )
    require(difference <= 1e-5, f"the weights learnt differ by {difference:.4f}; wanted the same.")


def _numbers(noted: Any) -> list[float] | None:
    try:
        return [float(n.detach() if isinstance(n, Tensor) else n) for n in noted]
    except (TypeError, ValueError):
        return None


def _how_many(numbers: list[float] | None) -> str:
    if numbers is None:
        return "what are no numbers"
    return f"{len(numbers)} number{'s' if len(numbers) != 1 else ''}"


# What follows is one loop with places where it can be right or wrong.


def _note_number(losses: list[Any], loss: Tensor) -> None:
    losses.append(loss.item())


def _note_tensor(losses: list[Any], loss: Tensor) -> None:
    losses.append(loss.detach())


def _note_graph(losses: list[Any], loss: Tensor) -> None:
    losses.append(loss)


def _soft_anew(soft: dict[Any, Tensor], targets: Tensor) -> Tensor:
    return _soften(targets)


def _soft_by(key: Callable[[Tensor], Any]) -> Callable[[dict[Any, Tensor], Tensor], Tensor]:
    def find(soft: dict[Any, Tensor], targets: Tensor) -> Tensor:
        if key(targets) not in soft:
            soft[key(targets)] = _soften(targets)
        return soft[key(targets)]

    return find


_soft_by_tensor = _soft_by(lambda targets: targets)


def _hard(soft: dict[Any, Tensor], targets: Tensor) -> Tensor:
    return F.one_hot(targets, 256).float()


def _scale(output: Tensor) -> float:
    return output.detach().abs().mean().item()


def _train_epoch_but(
    note: Callable[[list[Any], Tensor], None] = _note_number,
    soft_targets: Callable[[dict[Any, Tensor], Tensor], Tensor] = _soft_anew,
    of_output: Callable[[Tensor], Any] = _scale,
    remove_hook: str = "after training",
    at_the_end: Callable[[Notes], None] = lambda notes: None,
) -> TrainEpoch:
    def train_epoch(
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        training: Sequence[Batch],
        held_out: Sequence[Batch],
        notes: Notes,
    ) -> None:
        seen: list[Any] = []
        hook = model[2].register_forward_hook(
            lambda module, args, output: seen.append(of_output(output))
        )
        for tokens, targets in training:
            optimizer.zero_grad()
            soft = soft_targets(notes["soft"], targets)
            F.cross_entropy(model(tokens).mT, soft.mT).backward()
            optimizer.step()
        if remove_hook == "after training":
            hook.remove()
        if remove_hook != "after validation":
            notes["scales"].append(_mean(seen))
        for tokens, targets in held_out:
            note(notes["losses"], F.cross_entropy(model(tokens).mT, targets))
        if remove_hook == "after validation":
            hook.remove()
            notes["scales"].append(_mean(seen))
        at_the_end(notes)

    return train_epoch


def _mean(seen: list[Any]) -> float:
    scales = [_scale(part) if isinstance(part, Tensor) else part for part in seen]
    return sum(scales) / len(scales) if scales else 0.0


_mended = _train_epoch_but()


def _clean_up(notes: Notes) -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _clear_cache(notes: Notes) -> None:
    notes["soft"].clear()


def _losses_as_numbers(notes: Notes) -> None:
    losses = notes["losses"]
    losses[:] = [loss.item() if isinstance(loss, Tensor) else loss for loss in losses]


def _forget_losses(notes: Notes) -> None:
    del notes["losses"][:-1]


_TRAIN_EPOCH = Exercise(
    id="2.5",
    title="Mend it",
    minutes=15,
    difficulty=3,
    hints=(
        "For each of the three, ask who still refers to the tensor when the epoch is over: a list "
        "of losses, a hook on the model, a dictionary.",
        "A loss as a number (.item()) has no graph, and under torch.no_grad() none is made. A "
        "hook's handle has .remove(); the mean can be taken inside the hook, output by output. A "
        "dictionary whose keys are tensors never finds one again: every batch is a new tensor.",
        'notes["losses"].append(loss.item()); hook = model[2].register_forward_hook(lambda module, '
        "args, output: seen.append(output.abs().mean().item())); soft = soften(targets), without "
        "the dictionary. Where does the hook go off the model again?",
    ),
    reference=_mended,
    check=_check_train_epoch,
    wrong_answers=(
        WrongAnswer(
            _train_epoch_but(_note_graph, _soft_by_tensor, Tensor.detach, "never", _clean_up),
            "Neither del nor gc.collect() nor empty_cache() frees what a list, a hook or a "
            "dictionary still refers to.",
        ),
        WrongAnswer(
            _train_epoch_but(_note_graph),
            "Each loss that is kept keeps its graph, and all that forward kept for backward.",
        ),
        WrongAnswer(
            _train_epoch_but(_note_tensor),
            "A detached loss is still a tensor on the device: .item() makes a number of it.",
        ),
        WrongAnswer(
            _train_epoch_but(of_output=Tensor.detach, remove_hook="never"),
            "The hook is never removed: what it refers to stays, and it goes on collecting.",
        ),
        WrongAnswer(
            _train_epoch_but(remove_hook="never"),
            "Hooks pile up, one an epoch: each runs in every forward pass from then on.",
        ),
        WrongAnswer(
            _train_epoch_but(remove_hook="after validation"),
            "Removed too late: the hook has seen the held-out text as well.",
        ),
        WrongAnswer(
            _train_epoch_but(soft_targets=_soft_by_tensor),
            "The dictionary's keys are tensors, each batch has a new one, and so it only grows.",
        ),
        WrongAnswer(
            _train_epoch_but(soft_targets=_soft_by(lambda targets: targets.shape)),
            "Two batches of one shape are not one batch: this finds another one's targets.",
        ),
        WrongAnswer(
            _train_epoch_but(soft_targets=_soft_by_tensor, at_the_end=_clear_cache),
            "Emptied or made anew once an epoch, the dictionary grows within it, and nothing is "
            "found in it.",
        ),
        WrongAnswer(
            _train_epoch_but(of_output=Tensor.detach),
            "The outputs of a whole epoch are kept until its end: take each one's mean at once.",
        ),
        WrongAnswer(
            _train_epoch_but(of_output=lambda output: output.abs().mean()),
            "A mean with a graph keeps its output for a backward pass: .detach() or .item().",
        ),
        WrongAnswer(
            _train_epoch_but(_note_graph, at_the_end=_losses_as_numbers),
            "The graphs of all held-out batches are alive at once: make each loss a number at "
            "once.",
        ),
        WrongAnswer(
            _train_epoch_but(soft_targets=_hard),
            "The targets are to stay soft: a repair must not change what is learnt.",
        ),
        WrongAnswer(
            _train_epoch_but(at_the_end=_forget_losses),
            "The history is gone: what was noted in earlier epochs must stay.",
        ),
    ),
)

DAY = Day(
    exercises=(_SIZES, _TAKE, _GIVE_BACK, _LEAKS, _TRAIN_EPOCH),
    # Reading saves nothing: the line is the plain step's, until Day 3 takes something off it.
    bill=Bill("day 2: read, not changed", plain),
)
