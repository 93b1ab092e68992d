"""Day 13: ZeRO on real processes."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memlab.course.checks.day11 import in_chunks
from memlab.course.exercises import Bill, Day, Exercise, WrongAnswer, equal, require
from memlab.course.peers import Peer, Stuck, Work, counted, in_turns
from memlab.internals.torch_internals import storage_from_weak_pointer, tree_leaves
from memlab.metering.modes import LightMode

# ------------------------------------------------------------------ what is built


def ring_reduce_scatter(peer: Any, whole: Tensor) -> Tensor:
    """Piece `peer.rank` of the sum; numbers go from each rank to the next."""
    pieces = list(whole.chunk(peer.ranks))
    for turn in range(peer.ranks - 1):
        peer.send(pieces[(peer.rank - turn - 1) % peer.ranks])
        coming = (peer.rank - turn - 2) % peer.ranks
        pieces[coming] = peer.receive() + pieces[coming]
    return pieces[peer.rank].clone()


def reduce_in_buckets(
    peer: Any, made: Iterator[tuple[str, Tensor]], buckets: list[list[str]]
) -> list[Tensor]:
    """The sums over all ranks, bucket by bucket, begun while gradients are still being made."""
    there: dict[str, Tensor] = {}
    on_the_way: deque[Any] = deque()
    sums: list[Tensor] = []
    left = deque(buckets)
    for name, gradient in made:
        there[name] = gradient
        while left and all(n in there for n in left[0]):
            if len(on_the_way) == 2:
                sums.append(on_the_way.popleft().wait())
            names = left.popleft()  # the bucket itself gets no name: it would stay
            on_the_way.append(peer.begin(torch.cat([there.pop(n).flatten() for n in names])))
    return sums + [work.wait() for work in on_the_way]


def agreed_steps(peer: Any, weight: Tensor, gradients: Iterator[Tensor], lr: float) -> int:
    """Steps by the mean gradient, in place; the number of them is the same at all ranks."""
    steps = 0
    while True:
        gradient = next(gradients, None)
        mine = 2 if gradient is None else 0 if gradient.isfinite().all() else 1
        worst = peer.most(mine)
        if worst == 2:
            return steps
        if worst == 0:
            weight -= lr * peer.sum(gradient) / peer.ranks
            steps += 1


def resharded(
    read: Callable[[int, int, int], Tensor], n: int, old: int, new: int, rank: int
) -> Tensor:
    """The shard of rank `rank` of `new`, from the files of `old` ranks."""
    size, mine = -(-n // old), -(-n // new)
    start, stop = min(rank * mine, n), min((rank + 1) * mine, n)
    parts = [read(0, 0, 0)]
    for source in range(old):
        first, last = max(start, source * size), min(stop, (source + 1) * size)
        if first < last:
            parts.append(read(source, first - source * size, last - source * size))
    found = torch.cat(parts)
    return F.pad(found, (0, mine - len(found)))


def of_a_rank(
    block: int, layers: int, width: int, tensor: int, pipeline: int, data: int, k: int, tokens: int
) -> tuple[int, int, int, int]:
    """Bytes that a rank holds of states, and sends for tensor, pipeline and data parallelism."""
    blocks = -(-layers // pipeline)
    weights = blocks * block // tensor
    activation = 2 * tokens * width
    held = 4 * weights + 12 * -(-weights // data)
    by_tensor = k * blocks * 4 * 2 * (tensor - 1) * (activation // tensor)
    by_pipeline = k * min(pipeline - 1, 2) * activation
    by_data = 2 * 2 * (data - 1) * -(-weights // data)
    return held, by_tensor, by_pipeline, by_data


# ------------------------------------------------------------------ what checks share


def _numbers(x: Tensor) -> str:
    shown = ", ".join(f"{n:g}" for n in x.flatten()[:8].tolist())
    return f"[{shown}{', …' if x.numel() > 8 else ''}]"


def _require_tensor(call: str, got: Any, like: Tensor) -> None:
    require(
        isinstance(got, Tensor),
        f"{call} gave {type(got).__name__}; wanted a tensor."
        f"{' Is there a return?' if got is None else ''}",
    )
    require(
        got.shape == like.shape and got.dtype == like.dtype,
        f"{call} gave {tuple(got.shape)} of {got.dtype}; wanted {tuple(like.shape)} of "
        f"{like.dtype}.",
    )


def _require_equal(call: str, got: Any, wanted: Tensor) -> None:
    _require_tensor(call, got, wanted)
    require(torch.equal(got, wanted), f"{call} gave {_numbers(got)}; wanted {_numbers(wanted)}.")


def _in_turns(call: str, *args: Any, **settings: Any) -> list[Any]:
    """The same; that ranks wait in vain is said with the case."""
    try:
        return in_turns(*args, **settings)
    except Stuck as stuck:
        raise Stuck(f"{call}: {stuck}") from None


def _all(peer: Peer, what: str) -> list[Any]:
    return [value for event, value in peer.events if event == what]


# ------------------------------------------------------------------ 13.1: a ring

RINGS = (
    (2, 4, torch.float32),
    (3, 6, torch.float32),
    (1, 3, torch.float32),
    (4, 32, torch.bfloat16),
    (5, 10, torch.float64),
)


def _wholes(ranks: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Whole numbers, so that every order of a sum is exact."""
    first = torch.arange(1, length + 1)
    return [((first * (rank + 1) + rank) % 13).to(dtype) for rank in range(ranks)]


def _check_ring(answer: Any) -> str:
    for ranks, length, dtype in RINGS:
        wholes = _wholes(ranks, length, dtype)
        before, peers = [w.clone() for w in wholes], []
        call = f"ring_reduce_scatter of {ranks} × {length} numbers"
        got = _in_turns(call, answer, [(w,) for w in wholes], peers=peers)
        wanted = torch.stack(before).sum(0).chunk(ranks)
        for rank, peer in enumerate(peers):
            _require_tensor(f"{call}, at rank {rank},", got[rank], wanted[rank])
            _require_messages(call, rank, peer, ranks, before[rank])
            _require_of_its_own(f"{call}, at rank {rank},", got[rank])
        for rank in range(ranks):
            _require_equal(f"{call}, at rank {rank},", got[rank], wanted[rank])
            got[rank].add_(1)
            require(
                torch.equal(wholes[rank], before[rank]),
                f"{call} changed what rank {rank} was given, at once or with its result; wanted "
                f"it left alone.",
            )
    _check_hops(answer)
    return (
        "sums exact on rings of 1 to 5 · R − 1 messages from each rank, a piece each: (R − 1)/R "
        "of the whole"
    )


def _require_of_its_own(call: str, got: Tensor) -> None:
    """No view of something larger, all of which would live as long as the result."""
    held = got.untyped_storage().nbytes()
    require(
        held <= got.nbytes,
        f"{call} gave a view of {held} bytes for a piece of {got.nbytes}: all of them live as "
        f"long as it does. Wanted a tensor of its own.",
    )


def _require_messages(call: str, rank: int, peer: Peer, ranks: int, whole: Tensor) -> None:
    require(
        not _all(peer, "begin") and not _all(peer, "most"),
        f"{call}: rank {rank} used a collective of all ranks; wanted send and receive alone, of "
        f"which those are made.",
    )
    sent, piece = _all(peer, "send"), whole.nbytes // ranks
    other = [dtype for dtype in peer.dtypes if dtype != whole.dtype]
    require(
        not other,
        f"{call}: rank {rank} sent numbers of {other[0] if other else ''}; wanted "
        f"{whole.dtype}, in which they were given.",
    )
    require(
        sent == [piece] * (ranks - 1),
        f"{call}: rank {rank} sent {counted(len(sent), 'message')}{_sizes(sent)}; wanted "
        f"{ranks - 1} of {piece} bytes.",
    )
    received = len(_all(peer, "receive"))
    require(
        received == ranks - 1,
        f"{call}: rank {rank} received {counted(received, 'message')}; wanted {ranks - 1}.",
    )


def _sizes(sent: list[int]) -> str:
    sizes = " or ".join(str(size) for size in sorted(set(sent)))
    return f" of {sizes} bytes" if sent else ""


def _check_hops(answer: Any) -> None:
    """Every message arrives with 100 more: a sum that came round the ring shows it."""
    wholes = _wholes(3, 6, torch.float32)
    got = in_turns(answer, [(w,) for w in wholes], altered=lambda numbers: numbers + 100)
    for rank, wanted in enumerate(torch.stack(wholes).sum(0).chunk(3)):
        require(
            torch.equal(got[rank], wanted + 200),
            "of 3 ranks, a sum is right whatever has arrived: wanted sums that went round the "
            "ring.",
        )


def _ring_but(
    first: int = 1,
    turns: Callable[[int], int] = lambda ranks: ranks - 1,
    sends: Callable[[list[Tensor], int, Tensor], Tensor] = lambda pieces, which, whole: pieces[
        which
    ],
    receives_first: bool = False,
    in_place: bool = False,
    adds: bool = True,
    gives: Callable[[Tensor, int], Tensor] = lambda piece, ranks: piece.clone(),
) -> Any:
    """The right one, with something in it that is not."""

    def answer(peer: Any, whole: Tensor) -> Tensor:
        pieces = list(whole.chunk(peer.ranks))
        for turn in range(turns(peer.ranks)):
            which = (peer.rank - turn - first) % peer.ranks
            coming = (which - 1) % peer.ranks
            arrived = peer.receive() if receives_first else None
            peer.send(sends(pieces, which, whole))
            arrived = peer.receive() if arrived is None else arrived
            arrived = arrived[: len(pieces[coming])]
            if in_place:
                pieces[coming] += arrived
            elif adds:
                pieces[coming] = arrived + pieces[coming]
            else:
                pieces[coming] = arrived
        return gives(pieces[(peer.rank + 1 - first) % peer.ranks], peer.ranks)

    return answer


def _shifted_ring(peer: Any, whole: Tensor, given: int = 1) -> Tensor:
    """Begins with its own piece, and ends with that of the next, or gives its own all the same."""
    pieces = list(whole.chunk(peer.ranks))
    for turn in range(peer.ranks - 1):
        peer.send(pieces[(peer.rank - turn) % peer.ranks])
        coming = (peer.rank - turn - 1) % peer.ranks
        pieces[coming] = peer.receive() + pieces[coming]
    return pieces[(peer.rank + given) % peer.ranks].clone()


def _wholes_round(peer: Any, whole: Tensor) -> Tensor:
    """Wholes go round, and each takes its piece of their sum."""
    total, passing = whole, whole
    for _ in range(peer.ranks - 1):
        peer.send(passing)
        passing = peer.receive()
        total = total + passing
    return total.chunk(peer.ranks)[peer.rank].clone()


_RING = Exercise(
    id="13.1",
    title="Reduce-scatter on a ring",
    minutes=18,
    difficulty=3,
    hints=(
        "Follow one piece on its way: it begins at the rank after the one that it belongs to, and "
        "at each rank that it comes to, this one's own numbers are added. After R − 1 messages it "
        "is at home.",
        "In turn t (from 0) rank r sends piece r − t − 1 and gets piece r − t − 2, both modulo R; "
        "what it gets, with its own added, it sends in the next turn. Send first, then receive: "
        "if all receive first, nobody ever sends.",
        "pieces = list(whole.chunk(peer.ranks)); for turn in range(peer.ranks - 1): "
        "peer.send(pieces[(peer.rank - turn - 1) % peer.ranks]); coming = (peer.rank - turn - 2) "
        "% peer.ranks; pieces[coming] = peer.receive() + pieces[coming]. What is returned must be "
        "a tensor of its own with a single rank, too.",
    ),
    reference=ring_reduce_scatter,
    check=_check_ring,
    wrong_answers=(
        WrongAnswer(
            _ring_but(receives_first=True),
            "Every rank waits for a message before it sends one: send first.",
        ),
        WrongAnswer(
            _wholes_round,
            "Wholes are sent round: send one piece in each turn, with its sum so far.",
        ),
        WrongAnswer(
            lambda peer, whole: _shifted_ring(peer, whole, given=0),
            "After R − 1 messages a rank that began with its own piece has the sum of the next "
            "one's: begin with piece r − 1.",
        ),
        WrongAnswer(
            _shifted_ring,
            "Each rank has the piece of the next: begin with piece r − 1, not with r.",
        ),
        WrongAnswer(
            _ring_but(in_place=True), "The sums are written into what was given: chunk gives views."
        ),
        WrongAnswer(
            _ring_but(turns=lambda ranks: ranks),
            "One turn too many: a piece is at home after R − 1.",
        ),
        WrongAnswer(
            _ring_but(adds=False), "What arrives is passed on, and a rank's own is never added."
        ),
        WrongAnswer(
            _ring_but(gives=lambda piece, ranks: piece / ranks),
            "This is the mean; a reduce-scatter adds.",
        ),
        WrongAnswer(
            lambda peer, whole: peer.sum(whole).chunk(peer.ranks)[peer.rank].clone(),
            "peer.sum hides what is to be built here.",
        ),
        WrongAnswer(
            lambda peer, whole: ring_reduce_scatter(peer, whole.double()).to(whole.dtype),
            "Each number takes twice the bytes on its way: send it as it is.",
        ),
        WrongAnswer(
            lambda peer, whole: whole.chunk(peer.ranks)[peer.rank].clone(),
            "Nothing was sent: a rank's own piece is one part of the sum.",
        ),
    ),
)

# ------------------------------------------------------------------ 13.2: buckets


# Each gradient has numbers of its own, and every sum of two or three is greater than any of them:
# so a copy of a gradient is known by its numbers.
NUMBERS = 1000 + torch.randperm(1000, generator=torch.Generator().manual_seed(13))
OF_A_RANK = 72


@dataclass(frozen=True)
class _Backward:
    """Gradients in the order that each rank makes them, and the buckets that they travel in."""

    buckets: tuple[tuple[str, ...], ...]
    orders: tuple[str, ...]  # of each rank; a name is one letter

    def gradient(self, name: str, rank: int) -> Tensor:
        """A matrix, of another size for each name."""
        place = ord(name) - ord("a")
        first = OF_A_RANK * rank + place * (place + 1)
        return NUMBERS[first : first + 2 * (place + 1)].float().view(2, place + 1)

    def sums(self, more: float) -> list[Tensor]:
        ranks = range(len(self.orders))
        return [
            torch.cat([sum(self.gradient(n, r) for r in ranks).flatten() for n in bucket]) + more
            for bucket in self.buckets
        ]

    def in_order(self, rank: int) -> list[int]:
        """Where bucket after bucket can begin: places in the rank's order, for each bucket."""
        return [
            max(self.orders[rank].index(n) for bucket in self.buckets[: last + 1] for n in bucket)
            for last in range(len(self.buckets))
        ]


BACKWARDS = (
    _Backward((("a", "b"), ("c", "d")), ("abcd", "abcd")),
    _Backward((("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")), ("abcdefgh",) * 3),
    _Backward((("b", "a"), ("c", "d"), ("f", "e")), ("abcdef", "badcfe")),
    _Backward((("a", "b"), ("c", "d"), ("e", "f")), ("abcdef", "cdabef")),
    _Backward((("a", "b", "c"),), ("cab", "abc")),
)


def _check_buckets(answer: Any) -> str:
    for case in BACKWARDS:
        _check_backward(answer, case, more=0.0)
    _check_backward(answer, BACKWARDS[0], more=100.0)
    return (
        "sums exact · each bucket begun with its last gradient, in one order at all ranks · at "
        "most 2 on the way, nobody waits before he must · gradients that were sent are gone"
    )


def _check_backward(answer: Any, case: _Backward, more: float) -> None:
    orders = " and ".join(dict.fromkeys(case.orders))
    names = [list(bucket) for bucket in case.buckets]
    call = f"reduce_in_buckets of {orders} in {', '.join(''.join(b) for b in names)}"
    peers: list[Peer] = []

    def program(peer: Peer, buckets: list[list[str]]) -> Any:
        with _Memory(peer) as memory:
            return answer(peer, _made(call, case, peer, memory), buckets)

    given = [([list(bucket) for bucket in names],) for _ in case.orders]
    got = _in_turns(call, program, given, altered=lambda x: x + more, peers=peers)
    wanted = case.sums(more)
    for rank, peer in enumerate(peers):
        at = f"{call}, rank {rank}"
        _require_taken(at, peer, case)
        _require_begun(at, peer, case)
        _require_waits(at, peer)
        require(
            given[rank][0] == names,
            f"{at}: `buckets` is {given[rank][0]} afterwards; wanted it left as it was.",
        )
        require(
            isinstance(got[rank], (list, tuple)) and len(got[rank]) == len(wanted),
            f"{at} gave {_what(got[rank])}; wanted a list of {len(wanted)} sums.",
        )
        for number, (found, sum_) in enumerate(zip(got[rank], wanted, strict=True)):
            require(
                not isinstance(found, Work),
                f"{at}: place {number} of the result is a sum that is still on its way; wanted "
                f"what its wait() gives.",
            )
            if more:
                require(
                    isinstance(found, Tensor) and torch.equal(found, sum_),
                    f"{at}: sum {number} is not what came by the wire.",
                )
            _require_equal(f"{at}: sum {number}, of {''.join(names[number])},", found, sum_)


def _what(got: Any) -> str:
    return f"{len(got)} of them" if isinstance(got, (list, tuple)) else type(got).__name__


class _Memory(LightMode):
    """What one rank's answer has made and still holds, its copies of gradients too."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._looks = True
        self._made: dict[StorageWeakRef, torch.dtype] = {}
        begin = peer.begin

        def watched(flat: Tensor) -> Work:
            with self.not_looking():
                work = begin(flat)
            wait = work.wait

            def watched_wait() -> Tensor:
                with self.not_looking():
                    return wait()

            work.wait = watched_wait
            return work

        peer.begin = watched

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if self._looks and isinstance(tensor, Tensor):
                if "empty" in func.__name__:
                    tensor.zero_()  # where a gradient was freed its numbers may still stand
                self._made[StorageWeakRef(tensor.untyped_storage())] = tensor.dtype
        return made

    @contextmanager
    def not_looking(self) -> Iterator[None]:
        before, self._looks = self._looks, False
        try:
            yield
        finally:
            self._looks = before

    def numbers(self) -> Tensor:
        """All that is held: a bucket on its way is the wire's, and no answer's."""
        found = [torch.empty(0)]
        for ref, dtype in self._made.items():
            storage = storage_from_weak_pointer(ref.cdata)
            if storage is not None:
                found.append(torch.empty(0, dtype=dtype).set_(storage).float())
        return torch.cat(found)


def _made(call: str, case: _Backward, peer: Peer, memory: _Memory) -> Iterator[tuple[str, Tensor]]:
    """Gradients, one after the other; those of buckets that were begun must be gone by then."""
    storages: dict[str, StorageWeakRef] = {}

    def require_gone(last: str, when: str) -> None:
        begun = "".join(map("".join, case.buckets[: len(_all(peer, "begin"))]))
        copies = memory.numbers()
        held = [
            n
            for n in begun
            if n in storages
            and n != last  # the loop's own variable
            and (
                not storages[n].expired()
                or torch.isin(case.gradient(n, peer.rank), copies).any().item()
            )
        ]
        what = "gradient {} is" if len(held) == 1 else "gradients {} are"
        message = (
            f"{call}, rank {peer.rank}: {what.format(', '.join(held))} still held when {when}, "
            f"though sent. (A copy counts, and so does a variable's name.)"
        )
        # Its own tensor and a copy of it are held by different mistakes.
        itself = [n for n in held if not storages[n].expired()]
        require(not held, message, evidence=(message, itself))

    last = ""
    for name in case.orders[peer.rank]:
        with memory.not_looking():
            require_gone(last, f"{name} is made")
            peer.events.append(("made", name))
            gradient = case.gradient(name, peer.rank)
            storages[name] = StorageWeakRef(gradient.untyped_storage())
        last = name
        yield name, gradient
        del gradient
    with memory.not_looking():
        require_gone(last, "backward is over")


def _require_taken(at: str, peer: Peer, case: _Backward) -> None:
    taken, wanted = _all(peer, "made"), len(case.orders[peer.rank])
    require(
        len(taken) == wanted,
        f"{at}: {counted(len(taken), 'gradient')} taken of `made`; wanted {wanted}.",
    )


def _require_begun(at: str, peer: Peer, case: _Backward) -> None:
    """Each bucket as soon as it can be."""
    made, begun, wanted = [], [], case.in_order(peer.rank)
    for event, value in peer.events:
        if event == "made":
            made.append(value)
        elif event == "begin":
            begun.append((made[-1] if made else "nothing", value))
    require(
        len(begun) == len(wanted),
        f"{at}: {counted(len(begun), 'bucket')} begun; wanted {len(wanted)}.",
    )
    for number, ((after, size), place) in enumerate(zip(begun, wanted, strict=True)):
        bucket = case.buckets[number]
        nbytes = sum(case.gradient(n, 0).nbytes for n in bucket)
        require(
            size == nbytes,
            f"{at}: bucket {number}, {''.join(bucket)}, is sent with {size} bytes; wanted "
            f"{nbytes}.",
        )
        soonest = case.orders[peer.rank][place]
        require(
            after == soonest,
            f"{at}: bucket {number}, {''.join(bucket)}, is begun after gradient {after}; wanted "
            f"after {soonest}.",
        )


def _require_waits(at: str, peer: Peer) -> None:
    """At most two on the way; no wait before the place is needed."""
    events = [event for event, _ in peer.events]
    on_the_way, total = 0, events.count("made")
    for place, event in enumerate(events):
        if event == "begin":
            on_the_way += 1
            then_waits = events[place + 1 : place + 2] == ["wait"]
            require(
                on_the_way <= 2,
                f"{at}: {on_the_way} buckets are on the way; wanted 2"
                f"{', and the wait for the older before the next begins' if then_waits else ''}.",
            )
        if event == "wait":
            backward_is_over = events[:place].count("made") == total
            needed = on_the_way == 2 and events[place + 1 : place + 2] == ["begin"]
            require(
                backward_is_over or needed,
                f"{at}: waits with {on_the_way} on the way, before the next gradient is made.",
            )
            later = [number for event, number in peer.events[place + 1 :] if event == "wait"]
            require(
                backward_is_over or all(number > peer.events[place][1] for number in later),
                f"{at}: waits for the newer of the two on their way; wanted the older, which has "
                f"travelled longer.",
            )
            on_the_way -= 1
    require(on_the_way == 0, f"{at}: {counted(on_the_way, 'bucket')} begun and not waited for.")


def _buckets_but(
    most: int = 2,
    at_once: bool = False,
    at_the_end: bool = False,
    as_complete: bool = False,
    keeps: bool = False,
    as_they_came: bool = False,
    gives: Callable[[Any, int], Any] = lambda sums, ranks: sums,
    waits: bool = True,
    eager: bool = False,
    begins_first: bool = False,
    one_each: bool = False,
    names_flat: bool = False,
) -> Any:
    """The right one, with something in it that is not."""

    def answer(peer: Any, made: Any, buckets: list[list[str]]) -> Any:
        there: dict[str, Tensor] = {}
        kept: list[Tensor] = []
        way: deque[tuple[int, Any]] = deque()
        sums: dict[int, Any] = {}
        left = list(range(len(buckets)))

        def land() -> None:
            number, work = way.popleft()
            sums[number] = work.wait()

        def begin() -> None:
            nonlocal kept
            choice = left if as_complete else left[:1]
            ready = [b for b in choice if all(n in there for n in buckets[b])]
            for number in ready:
                if len(way) == most and not begins_first:
                    land()
                names = buckets[number]
                if as_they_came:
                    names = [n for n in there if n in names]
                kept.extend(there[n] for n in names if keeps)
                flat = torch.cat([there.pop(n).flatten() for n in names])
                kept = [flat] if names_flat else kept
                way.append((number, peer.begin(flat)))
                left.remove(number)
                if begins_first and len(way) > most:
                    land()
                if at_once or (eager and len(way) == most):
                    land()
            if ready and left and not one_each:
                begin()

        for name, gradient in made:
            there[name] = gradient
            if not at_the_end:
                begin()
        begin()
        if not waits:
            return [work for _, work in way]
        while way:
            land()
        return gives([sums[number] for number in sorted(sums)], peer.ranks)

    return answer


_BUCKETS = Exercise(
    id="13.2",
    title="Buckets that travel while backward goes on",
    minutes=20,
    difficulty=4,
    hints=(
        "Three things to keep: gradients that have come and are not sent, the sums on their way, "
        "the oldest first, and the buckets that are not begun. After each gradient ask: is the "
        "first of these complete?",
        "while left and all(name in there for name in left[0]): one gradient can make two buckets "
        "ready. In it: if two are on their way, wait for the older; torch.cat the bucket's "
        "gradients, flat, each taken out of what has come (pop), so that it is freed; begin. "
        "buckets stays as it is: list(buckets) is one of your own.",
        "there, way, sums, left = {}, [], [], list(buckets). for name, gradient in made: "
        "there[name] = gradient; while left and all(n in there for n in left[0]): if len(way) == "
        "2: sums.append(way.pop(0).wait()); way.append(peer.begin(torch.cat([there.pop(n)"
        ".flatten() for n in left.pop(0)]))), without a name for the bucket. When backward is "
        "over, up to two are still on their way.",
    ),
    reference=reduce_in_buckets,
    check=_check_buckets,
    wrong_answers=(
        WrongAnswer(
            _buckets_but(at_once=True),
            "Each sum is waited for as soon as it is begun: backward stands still meanwhile.",
        ),
        WrongAnswer(
            _buckets_but(eager=True),
            "A place is made long before the next bucket needs it: wait just before you begin it.",
        ),
        WrongAnswer(
            _buckets_but(at_the_end=True),
            "Nothing is sent before backward is over: begin a bucket with its last gradient.",
        ),
        WrongAnswer(
            _buckets_but(as_complete=True),
            "Buckets are begun as they are complete, which is another order at another rank: keep "
            "to the order of the list.",
        ),
        WrongAnswer(
            _buckets_but(most=9), "Nothing limits what is on the way: wait for the oldest of two."
        ),
        WrongAnswer(
            _buckets_but(begins_first=True),
            "For a moment three are there: wait for the older, then begin.",
        ),
        WrongAnswer(
            _buckets_but(one_each=True),
            "One gradient can make two buckets ready, where the later one was complete before: "
            "`while`, not `if`.",
        ),
        WrongAnswer(
            _buckets_but(names_flat=True),
            "The last bucket that was begun still has a name, flat, while the next gradients are "
            "made: hand torch.cat(…) to begin as it is, or del flat.",
        ),
        WrongAnswer(
            _buckets_but(keeps=True),
            "What was sent is kept, gradients or their buckets: all of them are there in the end.",
        ),
        WrongAnswer(
            _buckets_but(as_they_came=True),
            "Gradients stand in their bucket as they came, in another order at each rank: put "
            "them in as the bucket names them.",
        ),
        WrongAnswer(
            _buckets_but(gives=lambda sums, ranks: [s / ranks for s in sums]),
            "These are means, and sums were asked for.",
        ),
        WrongAnswer(
            _buckets_but(gives=lambda sums, ranks: sums[:-1]), "The last bucket is not returned."
        ),
        WrongAnswer(_buckets_but(waits=False), "What begin gives is no sum yet: call its wait()."),
    ),
)

# ------------------------------------------------------------------ 13.3: one decision


@dataclass(frozen=True)
class _Run:
    """Of each rank its gradients, a letter each: f is finite, l large, h so large that the sum of
    its numbers is not finite, n is nan, i is inf."""

    ranks: tuple[str, ...]
    lr: float = 0.25

    def gradients(self, rank: int) -> Iterator[Tensor]:
        numbers = {"n": float("nan"), "i": float("inf"), "l": 2.0**40}
        for step, letter in enumerate(self.ranks[rank]):
            gradient = torch.tensor([step + 1.0, rank + 1.0, 2.0 * step - rank])
            if letter == "h":
                gradient.fill_(2.0**127)
            if letter in numbers:
                gradient[step % 3] = numbers[letter]
            yield gradient

    def together(self) -> int:
        """How often all ranks have a gradient."""
        return min(map(len, self.ranks))

    def good(self) -> list[int]:
        return [s for s in range(self.together()) if all(r[s] in "flh" for r in self.ranks)]

    def weight(self, rounds: int | None = None) -> Tensor:
        """After so many rounds, or all."""
        weight = torch.tensor([1.0, 2.0, 3.0])
        each = [list(self.gradients(rank)) for rank in range(len(self.ranks))]
        for step in self.good():
            if rounds is None or step < rounds:
                weight -= self.lr * torch.stack([mine[step] for mine in each]).mean(0)
        return weight


RUNS = (
    _Run(("ff", "ff")),
    _Run(("fffff", "fff"), lr=0.5),
    _Run(("ff", "fff")),
    _Run(("fl", "ff"), lr=0.125),
    _Run(("ffh", "fff")),
    _Run(("fff", "fnf")),
    _Run(("iff", "fff", "ffn"), lr=2.0),
    _Run(("n", "")),
    _Run(("fnfff", "fffif", "ffff", "ffffff")),
)


def _check_agreed(answer: Any) -> str:
    for run in RUNS:
        _check_run(answer, run)
    return (
        "the same weights and steps at all ranks, with nan, inf and ranks that end early · one "
        "number each round, and gradients sent in good steps alone"
    )


def _check_run(answer: Any, run: _Run) -> None:
    call = f"agreed_steps of {' and '.join(r or 'no gradient' for r in run.ranks)}, lr={run.lr},"
    ranks = range(len(run.ranks))
    weights, peers = [torch.tensor([1.0, 2.0, 3.0]) for _ in ranks], []
    held = [weight.view(-1) for weight in weights]  # what was handed over, whatever it is named

    def program(peer: Peer, weight: Tensor) -> Any:
        return answer(peer, weight, _asked_for(call, run, peer, held[peer.rank]), run.lr)

    steps = _in_turns(call, program, [(weight,) for weight in weights], peers=peers)
    good = run.good()
    for rank, peer in enumerate(peers):
        _require_weight(f"{call} at the end, rank {rank}", held[rank], run.weight())
        equal(f"{call} at rank {rank},", steps[rank], len(good), "steps")
        begun, most = _all(peer, "begin"), len(_all(peer, "most"))
        require(
            len(begun) == len(good),
            f"{call} rank {rank} sent {counted(len(begun), 'gradient')}; wanted {len(good)}, "
            f"those of good steps.",
        )
        for nbytes in begun:
            require(
                nbytes == weights[rank].nbytes,
                f"{call} rank {rank} sent a gradient of {nbytes} bytes; wanted "
                f"{weights[rank].nbytes}, in its own dtype.",
            )
        rounds = run.together() + 1
        require(
            most == rounds,
            f"{call} rank {rank} called peer.most {counted(most, 'time')}; wanted {rounds}, once "
            f"a round.",
        )


def _asked_for(call: str, run: _Run, peer: Peer, weight: Tensor) -> Iterator[Tensor]:
    """A rank's gradients. Whenever it asks, all that went before must be done."""
    at = f"{call} rank {peer.rank}"
    for number, gradient in enumerate(run.gradients(peer.rank)):
        _require_ready(at, run, peer, weight, number)
        before = gradient.clone()
        yield gradient
        require(
            torch.equal(gradient.view(torch.int32), before.view(torch.int32)),
            f"{at} changed gradient {number} to {_numbers(gradient)}; wanted it left as it was, "
            f"{_numbers(before)}.",
        )
    _require_ready(at, run, peer, weight, len(run.ranks[peer.rank]))


def _require_ready(at: str, run: _Run, peer: Peer, weight: Tensor, number: int) -> None:
    asked = len(_all(peer, "most"))
    require(
        asked >= number,
        f"{at} takes gradient {number} when peer.most was called {counted(asked, 'time')}; "
        f"wanted {number}: one gradient a round.",
    )
    _require_weight(f"{at}, after {counted(number, 'round')}", weight, run.weight(number))


def _require_weight(at: str, got: Tensor, wanted: Tensor) -> None:
    require(
        torch.allclose(got, wanted, rtol=1e-5, atol=1e-5),
        f"{at}: the weight that was given is {_numbers(got)}; wanted {_numbers(wanted)}.",
    )


def _agreed_but(
    stops: str = "together",
    skips: str = "together",
    calls: int = 1,
    mean: bool = True,
    out_of_place: bool = False,
    counts_skipped: bool = False,
    only: Callable[[Tensor], Tensor] = lambda gradient: gradient.isfinite(),
    sends: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> Any:
    """The right one, with something in it that is not."""

    def answer(peer: Any, weight: Tensor, gradients: Any, lr: float) -> int:
        steps = 0
        while True:
            gradient = next(gradients, None)
            if gradient is None and stops == "alone":
                return steps
            fine = gradient is None or bool(only(gradient).all())
            if not fine and skips == "alone":
                continue
            ended = gradient is None
            code = 2 if ended and stops == "together" else 0
            code = 1 if not fine and skips != "late" and skips != "never" else code
            worst = code
            for _ in range(calls):
                worst = peer.most(code)
            if stops == "last":
                if peer.most(0 if ended else 1) == 0:
                    return steps
                gradient = torch.zeros_like(weight) if ended else gradient
            if worst == 2:
                return steps
            if worst == 1:
                if skips == "ends":
                    return steps
                steps += counts_skipped
                continue
            total = peer.sum(sends(gradient))
            if skips == "late" and not total.isfinite().all():
                continue
            change = lr * total / (peer.ranks if mean else 1)
            if out_of_place:
                weight = weight - change
            else:
                weight -= change
            steps += 1

    return answer


def _two_questions(peer: Any, weight: Tensor, gradients: Any, lr: float) -> int:
    """Right, with a collective too many."""
    steps = 0
    while True:
        gradient = next(gradients, None)
        if peer.most(gradient is None):
            return steps
        if not peer.most(not gradient.isfinite().all()):
            weight -= lr * peer.sum(gradient) / peer.ranks
            steps += 1


_AGREED = Exercise(
    id="13.3",
    title="One decision of all ranks",
    minutes=15,
    difficulty=3,
    hints=(
        'One number a round has to carry two pieces of news: "I have none left" and "mine is not '
        'finite". If both come up in one round, at two ranks, which must win?',
        "Give each state a number, and let the worst win: 0 for a good gradient, 1 for one that "
        "is not finite, 2 for none at all. peer.most of it is the same at all ranks: stop at 2, "
        "go on to the next gradient at 1, and step at 0.",
        "while True: gradient = next(gradients, None); mine = 2 if gradient is None else 0 if "
        "gradient.isfinite().all() else 1; worst = peer.most(mine); if worst == 2: return steps. "
        "At 0, two lines: the step in place, by the mean, and the count.",
    ),
    reference=agreed_steps,
    check=_check_agreed,
    wrong_answers=(
        WrongAnswer(
            _agreed_but(stops="alone"),
            "A rank without data leaves, and the others wait for it: say it to all, and leave "
            "together.",
        ),
        WrongAnswer(
            _agreed_but(skips="alone"),
            "A rank skips a step by itself, and is a round ahead of the others from then on: skip "
            "together.",
        ),
        WrongAnswer(
            _agreed_but(skips="never"), "Nobody looks for nan: one gradient spoils all weights."
        ),
        WrongAnswer(
            _agreed_but(skips="late"),
            "The sum shows a nan to all, but had to be sent: with shards a rank would see its own "
            "piece alone. Ask first.",
        ),
        WrongAnswer(_agreed_but(skips="ends"), "A bad gradient ends the run: skip it, and go on."),
        WrongAnswer(
            _agreed_but(stops="last"),
            "Ranks without data go on with zeros until the last has ended: these shorten every "
            "mean.",
        ),
        WrongAnswer(
            _agreed_but(only=lambda gradient: ~gradient.isnan()),
            "An inf is as bad as a nan: isfinite() knows both.",
        ),
        WrongAnswer(_agreed_but(mean=False), "The sum of the ranks' gradients is not their mean."),
        WrongAnswer(
            _agreed_but(out_of_place=True),
            "weight = weight - … makes another tensor, as weight.data = … does: what was handed "
            "over stays as it was. Use -=.",
        ),
        WrongAnswer(_agreed_but(counts_skipped=True), "A step that was skipped is counted as one."),
        WrongAnswer(
            lambda peer, weight, gradients, lr: agreed_steps(peer, weight, iter([*gradients]), lr),
            "All gradients are taken before the first step: on a real rank each is a backward "
            "pass, by weights that have been stepped.",
        ),
        WrongAnswer(
            lambda peer, weight, gradients, lr: agreed_steps(peer, weight, gradients, 0.25),
            "lr is given.",
        ),
        WrongAnswer(
            _agreed_but(only=lambda gradient: gradient.abs() < 100),
            "Large is not infinite: isfinite() knows.",
        ),
        WrongAnswer(
            _agreed_but(sends=torch.Tensor.bfloat16),
            "In bfloat16 a sum of gradients loses most of its digits: send them as they are.",
        ),
        WrongAnswer(
            _two_questions, "Two questions a round, where one number can carry both answers."
        ),
    ),
)

# ------------------------------------------------------------------ 13.4: other ranks

RESHARDS = (
    (8, 2, 4, torch.float32),
    (8, 4, 2, torch.float32),
    (10, 4, 3, torch.float32),
    (7, 2, 3, torch.float32),
    (5, 4, 1, torch.float32),
    (5, 1, 4, torch.bfloat16),
    (1000, 8, 6, torch.float64),
)


def _check_resharded(answer: Any) -> str:
    for n, old, new, dtype in RESHARDS:
        drawn = torch.Generator().manual_seed(n * old * new)
        whole = torch.randint(1, 200, (n,), generator=drawn).to(dtype)
        size, mine = -(-n // old), -(-n // new)
        files = F.pad(whole, (0, size * old - n)).chunk(old)
        wanted = F.pad(whole, (0, mine * new - n)).split(mine)
        for rank in range(new):
            call = f"resharded(read, {n}, old={old}, new={new}, rank={rank})"
            files_read = _Files(call, [f.clone() for f in files])
            got = answer(files_read, n, old, new, rank)
            _require_dtype(call, got, wanted[rank])
            _require_equal(call, got, wanted[rank])
            needed = range(min(n, rank * mine), min(n, (rank + 1) * mine))
            places = [(i // size, i % size) for i in needed]
            _require_read(call, files_read.places, places)
            files_needed = len({source for source, _ in places})
            require(
                files_read.reads <= files_needed,
                f"{call} read {counted(files_read.reads, 'time')}; wanted {files_needed}: what is "
                f"needed of a file, at once.",
            )
            require(
                got.untyped_storage().nbytes() <= 2 * max(1, mine) * got.element_size(),
                f"{call} gave a view of {got.untyped_storage().nbytes()} bytes; wanted a tensor "
                f"of its own.",
            )
    return "shards exact for 1 to 8 ranks from 1 to 8 · every number read once, padding never"


def _require_dtype(call: str, got: Any, wanted: Tensor) -> None:
    require(
        not isinstance(got, Tensor) or got.dtype == wanted.dtype,
        f"{call} gave {getattr(got, 'dtype', None)}; wanted {wanted.dtype}, that of the files: "
        f"every read has it, also an empty one, read(0, 0, 0).",
    )


def _require_read(call: str, places: list[tuple[int, int]], needed: list[tuple[int, int]]) -> None:
    require(
        len(places) == len(needed),
        f"{call} read {counted(len(places), 'number')}; wanted {len(needed)}.",
    )
    other = sorted({*places} - {*needed})
    require(
        not other,
        f"{call} read number {other[0][1] if other else ''} of file "
        f"{other[0][0] if other else ''}, which is not in this shard.",
    )
    missing = sorted({*needed} - {*places})
    require(
        not missing,
        f"{call} never read number {missing[0][1] if missing else ''} of file "
        f"{missing[0][0] if missing else ''}, and another one twice.",
    )


class _Files:
    """The shards that ranks have written; notes what is read of them."""

    def __init__(self, call: str, shards: Sequence[Tensor]) -> None:
        self._call, self._shards = call, shards
        self.places: list[tuple[int, int]] = []  # file, place in it
        self.reads = 0  # that gave anything

    def __call__(self, source: int, start: int, stop: int) -> Tensor:
        asked = f"{self._call}: read({source}, {start}, {stop})"
        require(
            all(type(n) is int for n in (source, start, stop)),
            f"{asked}; wanted whole numbers: use // for /.",
        )
        require(
            0 <= source < len(self._shards),
            f"{asked}; there are files 0 to {len(self._shards) - 1}.",
        )
        length = len(self._shards[source])
        require(0 <= start <= stop <= length, f"{asked}; a file has numbers 0 to before {length}.")
        self.reads += start < stop
        self.places.extend((source, place) for place in range(start, stop))
        return self._shards[source][start:stop].clone()


def _resharded_but(
    size_of: Callable[[int, int], int] = lambda n, ranks: -(-n // ranks),
    end_of: Callable[[int, int, int], int] = lambda n, old, size: n,
    pads: bool = True,
    everything: bool = False,
    whole_files: bool = False,
    relative: bool = True,
    first_only: bool = False,
    one_by_one: bool = False,
) -> Any:
    """The right one, with something in it that is not."""

    def answer(read: Any, n: int, old: int, new: int, rank: int) -> Tensor:
        size, mine = size_of(n, old), size_of(n, new)
        end = end_of(n, old, size)
        if everything:
            parts = [read(source, 0, min(size, max(n - source * size, 0))) for source in range(old)]
            found = torch.cat(parts)[rank * mine : (rank + 1) * mine]
            return F.pad(found, (0, mine - len(found)))
        start, stop = min(rank * mine, end), min((rank + 1) * mine, end)
        parts = [read(0, 0, 0)]
        for source in range(old):
            first, last = max(start, source * size), min(stop, (source + 1) * size)
            at = source * size if relative else 0
            if first < last and whole_files:
                there = read(source, 0, min(size, n - at))
                parts.append(there[first - at : last - at])
            elif first < last and one_by_one:
                parts += [read(source, n - at, n - at + 1) for n in range(first, last)]
            elif first < last:
                parts.append(read(source, first - at, last - at))
        found = torch.cat(parts[:2] if first_only else parts)
        return F.pad(found, (0, max(0, mine - len(found)))) if pads or first_only else found

    return answer


def _zeros_in_float32(read: Any, n: int, old: int, new: int, rank: int) -> Tensor:
    """Right, but for the dtype of a shard of padding alone."""
    share = -(-n // new)
    return resharded(read, n, old, new, rank) if rank * share < n else torch.zeros(share)


_RESHARDED = Exercise(
    id="13.4",
    title="Shards of R ranks for R′ ranks",
    minutes=12,
    difficulty=3,
    hints=(
        "Think of all n numbers in a row. Yours are those from rank · ⌈n/new⌉ on; file s has those "
        "from s · ⌈n/old⌉ on. What you read of a file is where the two overlap.",
        "Two intervals overlap from the greater of their begins to the smaller of their ends, if "
        "that is more than nothing. Cut yours at n first, so that padding is never read. read "
        "counts from the begin of its file.",
        "size, mine = -(-n // old), -(-n // new); start, stop = min(rank * mine, n), min((rank + "
        "1) * mine, n); parts = [read(0, 0, 0)]; for each source: first, last = max(start, source "
        "* size), min(stop, (source + 1) * size); if first < last: parts.append(read(source, "
        "first - source * size, last - source * size)). Then put the parts together; how many "
        "zeros are behind them?",
    ),
    reference=resharded,
    check=_check_resharded,
    wrong_answers=(
        WrongAnswer(
            _resharded_but(one_by_one=True),
            "A read for each number: a disk takes as long for one as for a million. Read what you "
            "need of a file at once.",
        ),
        WrongAnswer(
            _resharded_but(everything=True),
            "Every rank reads all that there is, which is what sharding was to spare.",
        ),
        WrongAnswer(
            _resharded_but(whole_files=True), "Whole files are read for what overlaps with a part."
        ),
        WrongAnswer(
            _resharded_but(size_of=lambda n, ranks: n // ranks),
            "A shard has ⌈n/R⌉ numbers, rounded up, in the files and here.",
        ),
        WrongAnswer(
            _resharded_but(end_of=lambda n, old, size: size * old),
            "The files' padding is read as if it were weights: only n numbers are.",
        ),
        WrongAnswer(_resharded_but(pads=False), "The last shards are short: pad them with zeros."),
        WrongAnswer(
            _resharded_but(relative=False),
            "read counts from the begin of its file, not of the whole.",
        ),
        WrongAnswer(
            _zeros_in_float32,
            "A rank with zeros alone reads nothing, and torch.zeros makes float32: begin with an "
            "empty read, or give torch.zeros its dtype.",
        ),
        WrongAnswer(
            _resharded_but(first_only=True),
            "A new shard can lie in several files: zeros stand where the next ones' numbers are.",
        ),
    ),
)

# ------------------------------------------------------------------ 13.5: three ways

SHAPES = (  # block, layers, width, tensor, pipeline, data, k, tokens
    (480, 4, 8, 1, 1, 1, 1, 4),
    (480, 4, 8, 1, 2, 1, 1, 4),
    (480, 4, 8, 1, 1, 4, 3, 4),
    (480, 4, 8, 4, 1, 1, 1, 4),
    (480, 4, 8, 1, 4, 1, 3, 4),
    (480, 6, 8, 2, 4, 3, 2, 4),
    (483, 9, 8, 4, 3, 2, 2, 4),
    (1008, 12, 16, 8, 4, 4, 5, 8),
)


def _check_three_ways(answer: Any) -> str:
    for shape in SHAPES:
        names = ("block", "layers", "width", "tensor", "pipeline", "data", "k", "tokens")
        call = f"of_a_rank({', '.join(f'{n}={s}' for n, s in zip(names, shape, strict=True))})"
        got = answer(*shape)
        require(
            isinstance(got, (tuple, list)) and len(got) == 4,
            f"{call} gave {_what(got)}; wanted four numbers: held, by tensor, pipeline and data."
            f"{' Is there a return?' if got is None else ''}",
        )
        words = ("held", "sent for tensor", "sent for pipeline", "sent for data")
        for word, number, wanted in zip(words, got, _counted(*shape), strict=True):
            equal(f"{call}, {word},", number, wanted, "bytes")
    return "as counted message by message: rings of t and d, neighbours of p, k micro-batches"


def _counted(
    block: int, layers: int, width: int, tensor: int, pipeline: int, data: int, k: int, tokens: int
) -> tuple[int, int, int, int]:
    """Of the rank that holds and sends the most, one message after the other."""
    stages = [range(s, layers, pipeline) for s in range(pipeline)]
    held, by_tensor, by_pipeline, by_data = [], [], [], []
    for number, blocks in enumerate(stages):
        weights = sum(block for _ in blocks) // tensor
        shard = next(s for s in range(weights + 1) if s * data >= weights)
        held.append(2 * weights + 2 * weights + 12 * shard)
        on_ring = sum(tokens * width // tensor * 2 for _ in range(2) for _ in range(tensor - 1))
        by_tensor.append(
            sum(on_ring for _ in range(k) for _ in blocks for _ in ("attention", "MLP") * 2)
        )
        neighbours = [n for n in (number - 1, number + 1) if 0 <= n < pipeline]
        by_pipeline.append(sum(2 * tokens * width for _ in range(k) for _ in neighbours))
        by_data.append(sum(2 * shard for _ in range(2) for _ in range(data - 1)))
    return max(held), max(by_tensor), max(by_pipeline), max(by_data)


def _ways_but(
    blocks_of: Callable[[int, int], int] = lambda layers, pipeline: -(-layers // pipeline),
    held_of: Callable[[int, int], int] = lambda weights, data: (
        4 * weights + 12 * -(-weights // data)
    ),
    reduces: int = 4,
    ends: Callable[[int], int] = lambda pipeline: min(pipeline - 1, 2),
    data_times: Callable[[int], int] = lambda k: 1,
    tensor_times: Callable[[int], int] = lambda k: k,
    pipeline_times: Callable[[int], int] = lambda k: k,
    data_passes: int = 2,
    weights_of: Callable[[int, int], int] = lambda weights, tensor: weights // tensor,
    element: int = 2,
    ring: Callable[[int], int] = lambda ranks: ranks - 1,
    line_cut: bool = False,
) -> Any:
    """The right one, with something in it that is not."""

    def answer(
        block: int,
        layers: int,
        width: int,
        tensor: int,
        pipeline: int,
        data: int,
        k: int,
        tokens: int,
    ) -> tuple[int, int, int, int]:
        blocks = blocks_of(layers, pipeline)
        weights = weights_of(blocks * block, tensor)
        activation = element * tokens * width
        return (
            held_of(weights, data),
            tensor_times(k) * blocks * reduces * 2 * ring(tensor) * (activation // tensor),
            pipeline_times(k) * ends(pipeline) * activation // (tensor if line_cut else 1),
            data_times(k) * data_passes * element * (data - 1) * -(-weights // data),
        )

    return answer


_WAYS = Exercise(
    id="13.5",
    title="Tensor × pipeline × data, of one rank",
    minutes=20,
    difficulty=4,
    hints=(
        "First what the rank has: ⌈layers/pipeline⌉ blocks, of each a share of 1/tensor. The rest "
        "counts from there. An activation is tokens · width numbers of 2 bytes.",
        "An all-reduce among R ranks sends 2 (R − 1) pieces, each 1/R of it. Tensor: four of an "
        "activation, for each block and micro-batch. Pipeline: an activation to each neighbour, "
        "of which an end of the line has one, for each micro-batch. Data: stage 1, two passes of "
        "(data − 1) shards, once a step.",
        "blocks = -(-layers // pipeline); weights = blocks * block // tensor; shard = -(-weights "
        "// data); activation = 2 * tokens * width; held = 4 * weights + 12 * shard; by_tensor = "
        "k * blocks * 4 * 2 * (tensor - 1) * (activation // tensor); by_pipeline = k * "
        "min(pipeline - 1, 2) * activation. by_data has two passes of data − 1 shards.",
    ),
    reference=of_a_rank,
    check=_check_three_ways,
    wrong_answers=(
        WrongAnswer(
            _ways_but(held_of=lambda weights, data: 16 * weights),
            "With stage 1 the 12 bytes of Adam are divided among the data ranks.",
        ),
        WrongAnswer(
            _ways_but(held_of=lambda weights, data: 16 * -(-weights // data)),
            "This is stage 3: in stage 1 weights and gradients, 4 bytes, are whole.",
        ),
        WrongAnswer(
            _ways_but(held_of=lambda weights, data: 2 * weights + 14 * -(-weights // data)),
            "This is stage 2: in stage 1 gradients are whole, too.",
        ),
        WrongAnswer(
            _ways_but(ends=lambda pipeline: 2 * min(pipeline - 1, 2)),
            "To each neighbour one thing goes: outputs to the next, gradients to the one before.",
        ),
        WrongAnswer(
            _ways_but(line_cut=True),
            "Each of the tensor ranks sends the whole activation down its own line: do not cut it.",
        ),
        WrongAnswer(
            _ways_but(blocks_of=lambda layers, pipeline: layers),
            "A rank has the blocks of its pipeline stage, not all.",
        ),
        WrongAnswer(
            _ways_but(blocks_of=lambda layers, pipeline: layers // pipeline),
            "The fullest stage counts: ⌈layers/pipeline⌉ blocks, rounded up.",
        ),
        WrongAnswer(
            _ways_but(weights_of=lambda weights, tensor: weights),
            "Each block's matrices are cut among the tensor ranks.",
        ),
        WrongAnswer(
            _ways_but(reduces=2),
            "Half of it: a block has two all-reduces in forward and two in backward, and each goes "
            "round the ring twice.",
        ),
        WrongAnswer(
            _ways_but(ring=lambda ranks: ranks),
            "On a ring of R, each of an all-reduce's two passes takes R − 1 messages.",
        ),
        WrongAnswer(
            _ways_but(ends=lambda pipeline: 2),
            "A line of one stage has no neighbours, and of two each has one.",
        ),
        WrongAnswer(
            _ways_but(ends=lambda pipeline: min(pipeline - 1, 1)),
            "A stage in the middle sends in both directions: outputs on, gradients back.",
        ),
        WrongAnswer(
            _ways_but(data_times=lambda k: k),
            "Gradients add up over the micro-batches, and are sent once a step.",
        ),
        WrongAnswer(
            _ways_but(tensor_times=lambda k: 1),
            "The tensor ranks' all-reduces are in every micro-batch.",
        ),
        WrongAnswer(
            _ways_but(pipeline_times=lambda k: 1), "Every micro-batch goes down the line, and back."
        ),
        WrongAnswer(
            _ways_but(data_passes=1),
            "Stage 1 sends gradients to shards, and gathers stepped weights: two passes.",
        ),
        WrongAnswer(_ways_but(element=1), "These are numbers; each has 2 bytes."),
    ),
)


# The bill's machine has one GPU, and nobody to share with: the line is that of the day before.
DAY = Day(
    exercises=(_RING, _BUCKETS, _AGREED, _RESHARDED, _WAYS),
    bill=Bill("day 13: real processes, and still one GPU", in_chunks),
)
