"""Day 13: ZeRO on real processes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memlab.course.bill_steps import in_chunks
from memlab.course.exercises import Bill, Day, equal, require
from memlab.course.peers import Peer, Work, case_in_turns, counted, in_turns
from memlab.course.properties import (
    distinct_elements,
    is_tensor,
    limited_outside_of_tensors,
    rounding,
)
from memlab.course.solutions import checked
from memlab.internals.torch_internals import storage_from_weak_pointer, tree_leaves
from memlab.metering.modes import LightMode

# ------------------------------------------------------------------ shared by the checks


def _require_equal(call: str, got: Any, wanted: Tensor) -> None:
    is_tensor(call, got, dtype=wanted.dtype, shape=tuple(wanted.shape))
    mine, right = distinct_elements(got, wanted)
    require(torch.equal(got, wanted), f"{call} gave {mine}; wanted {right}.")


def _events(peer: Peer, kind: str) -> list[Any]:
    return [value for event, value in peer.events if event == kind]


def _described(got: Any) -> str:
    return f"{len(got)} values" if isinstance(got, (list, tuple)) else type(got).__name__


# ------------------------------------------------------------------ 13.1: a ring

RINGS = (  # ranks, elements, dtype
    (2, 4, torch.float32),
    (3, 6, torch.float32),
    (1, 3, torch.float32),
    (4, 32, torch.bfloat16),
    (5, 10, torch.float64),
)


def _wholes(ranks: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """One tensor per rank. Integers, so every order of summation gives the exact sum; in float64
    they have too many digits for float32."""
    first = torch.arange(1, length + 1)
    more = 2**40 if dtype == torch.float64 else 0
    return [((first * (rank + 1) + rank) % 13 + more).to(dtype) for rank in range(ranks)]


def _check_ring(answer: Any) -> str:
    for ring in RINGS:
        _check_one_ring(answer, *ring)
    _check_hops(answer)
    return (
        "exact sums on rings of 1 to 5 ranks · each rank sends R − 1 messages of one piece: "
        "(R − 1)/R of the whole"
    )


def _check_one_ring(answer: Any, ranks: int, length: int, dtype: torch.dtype) -> None:
    wholes, peers = _wholes(ranks, length, dtype), list[Peer]()
    before = [whole.clone() for whole in wholes]
    call = f"ring_reduce_scatter on {counted(ranks, 'rank')} of {length} elements"
    got = case_in_turns(call, answer, [(whole,) for whole in wholes], peers=peers)
    wanted = torch.stack(before).sum(0).chunk(ranks)
    for rank, peer in enumerate(peers):
        at = f"{call}, rank {rank},"
        is_tensor(at, got[rank], dtype=dtype, shape=tuple(wanted[rank].shape))
        _require_messages(at, peer, before[rank])
        held = got[rank].untyped_storage().nbytes()
        require(
            held <= got[rank].nbytes,
            f"{at} gave a view that keeps {held} bytes alive for a piece of {got[rank].nbytes} "
            f"bytes; wanted a tensor with its own memory.",
        )
    for rank, (given, found) in enumerate(zip(wholes, got, strict=True)):
        _require_equal(f"{call}, rank {rank},", found, wanted[rank])
        found.add_(1)
        require(
            torch.equal(given, before[rank]),
            f"{call} changed the input of rank {rank}, directly or through a result that shares "
            f"its memory; wanted the input unchanged.",
        )


def _require_messages(at: str, peer: Peer, whole: Tensor) -> None:
    """R − 1 messages, each one piece in the dtype of the input."""
    require(
        not _events(peer, "begin") and not _events(peer, "most"),
        f"{at} called a collective; wanted peer.send and peer.receive only.",
    )
    for dtype in peer.dtypes:
        require(
            dtype == whole.dtype,
            f"{at} sent elements of {dtype}; wanted {whole.dtype}, the dtype of the input.",
        )
    sent, piece, messages = _events(peer, "send"), whole.nbytes // peer.ranks, peer.ranks - 1
    sizes = f" of {' or '.join(map(str, sorted({*sent})))} bytes" if sent else ""
    require(
        sent == [piece] * messages,
        f"{at} sent {counted(len(sent), 'message')}{sizes}; wanted {messages} of {piece} bytes.",
    )
    received = len(_events(peer, "receive"))
    require(
        received == messages, f"{at} received {counted(received, 'message')}; wanted {messages}."
    )


def _check_hops(answer: Any) -> None:
    """Require that the sums come from received messages: the transport adds 100 to each, so after
    two hops a sum is 200 larger."""
    wholes = _wholes(3, 6, torch.float32)
    got = in_turns(answer, [(w,) for w in wholes], altered=lambda message: message + 100)
    for found, wanted in zip(got, torch.stack(wholes).sum(0).chunk(3), strict=True):
        require(
            torch.equal(found, wanted + 200),
            "ring_reduce_scatter on 3 ranks ignores the messages it receives; wanted sums of "
            "received pieces and the rank's own.",
        )


# ------------------------------------------------------------------ 13.2: buckets

# Every element of every gradient is unique, and every sum over ranks is larger than all of them.
# So a copy of a gradient is recognized by its elements.
# Far apart, so that no mean of some is another.
UNIQUE = 1000 + torch.randperm(2**20, generator=torch.Generator().manual_seed(13))[:1000]
ELEMENTS_PER_RANK = 72


@dataclass(frozen=True)
class BackwardCase:
    """Buckets, and each rank's order of gradients. A name is one letter."""

    buckets: tuple[str, ...]
    orders: tuple[str, ...]  # one per rank
    dtype: torch.dtype = torch.float32
    repeats: int = 1

    def gradient(self, name: str, rank: int) -> Tensor:
        """A matrix with a different size for each name."""
        place = ord(name) - ord("a")
        first = ELEMENTS_PER_RANK * rank + place * (place + 1)
        made = UNIQUE[first : first + 2 * (place + 1)].to(self.dtype).view(2, place + 1)
        return made.repeat(1, self.repeats)

    def sums(self) -> list[Tensor]:
        def summed(name: str) -> Any:
            return sum(self.gradient(name, rank) for rank in range(len(self.orders)))

        return [torch.cat([summed(n).flatten() for n in bucket]) for bucket in self.buckets]

    def last_needed(self, rank: int) -> list[str]:
        """Return the last gradient that each bucket needs before it can begin in list order."""
        order = self.orders[rank]
        names = ["".join(self.buckets[: n + 1]) for n in range(len(self.buckets))]
        return [max(needed, key=order.index) for needed in names]


BACKWARDS = (
    BackwardCase(("ab", "cd"), ("abcd", "abcd")),
    BackwardCase(("ab", "cd", "ef", "gh"), ("abcdefgh",) * 3),
    BackwardCase(("ba", "cd", "fe"), ("abcdef", "badcfe")),
    BackwardCase(("ab", "cd", "ef"), ("abcdef", "cdabef")),
    BackwardCase(("abc",), ("cab", "abc")),
    BackwardCase(("ab", "c"), ("abc", "acb"), torch.float64),
)


def _check_buckets(answer: Any) -> str:
    for case in BACKWARDS:
        _check_backward(answer, case, added=0)
    _check_backward(answer, BACKWARDS[0], added=100)
    long = BackwardCase(("ab", "cd", "ef", "gh"), ("abcdefgh",), repeats=4096)
    limited_outside_of_tensors(
        f"reduce_in_buckets of {4 * 4096 * ELEMENTS_PER_RANK:,} bytes of gradients",
        lambda: _check_backward(answer, long, added=0),
        4096 * ELEMENTS_PER_RANK,
    )
    return (
        "exact sums · each bucket begins when its last gradient arrives, in the same order on all "
        "ranks · "
        "at most 2 in flight, no early waits · sent gradients are freed"
    )


def _check_backward(answer: Any, case: BackwardCase, added: int) -> None:
    """The transport adds `added` to every sum."""
    orders = " and ".join(dict.fromkeys(case.orders))
    call = f"reduce_in_buckets of gradients {orders} in buckets {', '.join(case.buckets)}"
    peers: list[Peer] = []

    def program(peer: Peer, buckets: list[list[str]]) -> Any:
        with _WatchedRank(f"{call}, rank {peer.rank}", case, peer) as watched:
            return answer(peer, watched.gradients(), buckets)

    given = [([list(bucket) for bucket in case.buckets],) for _ in case.orders]
    got = case_in_turns(call, program, given, altered=lambda x: x + added, peers=peers)
    for rank, peer in enumerate(peers):
        at = f"{call}, rank {rank}"
        taken, wanted = len(_events(peer, "made")), len(case.orders[rank])
        require(
            taken == wanted,
            f"{at} took {counted(taken, 'gradient')} from `gradients`; wanted {wanted}.",
        )
        _require_begun(at, peer, case)
        _require_waits(at, peer)
        require(
            ["".join(bucket) for bucket in given[rank][0]] == [*case.buckets],
            f"{at} changed `buckets` to {given[rank][0]}; wanted it unchanged.",
        )
        _require_sums(at, got[rank], case, added)


def _require_sums(at: str, got: Any, case: BackwardCase, added: int) -> None:
    is_list = isinstance(got, (list, tuple)) and len(got) == len(case.buckets)
    require(is_list, f"{at} gave {_described(got)}; wanted a list of {len(case.buckets)} sums.")
    for bucket, found, wanted in zip(case.buckets, got, case.sums(), strict=True):
        require(
            not isinstance(found, Work),
            f"{at}: the sum of bucket {bucket} is still in flight; wanted the result of wait().",
        )
        if added:
            require(
                isinstance(found, Tensor) and torch.equal(found, wanted + added),
                f"{at}: the sum of bucket {bucket} is not the result of wait().",
            )
        _require_equal(f"{at}: the sum of bucket {bucket}", found, wanted + added)


class _WatchedRank(LightMode):
    """Yields a rank's gradients, and finds gradients held after sending."""

    def __init__(self, at: str, case: BackwardCase, peer: Any) -> None:
        super().__init__()
        self._at, self._case, self._peer = at, case, peer
        self._made: dict[StorageWeakRef, torch.dtype] = {}  # by the answer, copies included
        self._records = True
        begin = peer.begin

        def unrecorded_begin(flat: Tensor) -> Work:
            work = self._unrecorded(begin)(flat)
            work.wait = self._unrecorded(work.wait)
            return work

        peer.begin = unrecorded_begin

    def _unrecorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any) -> Any:
            before, self._records = self._records, False
            try:
                return function(*args)
            finally:
                self._records = before

        return paused

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if self._records and isinstance(tensor, Tensor):
                if "empty" in func.__name__:
                    tensor.zero_()  # freed memory may still contain a gradient
                self._made[StorageWeakRef(tensor.untyped_storage())] = tensor.dtype
        return made

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients. Before each, require that sent gradients are freed."""
        storages: dict[str, StorageWeakRef] = {}
        make = self._unrecorded(self._case.gradient)
        require_freed = self._unrecorded(self._require_freed)
        for name in self._case.orders[self._peer.rank]:
            require_freed(storages, f"{name} is computed")
            self._peer.events.append(("made", name))
            gradient = make(name, self._peer.rank)
            storages[name] = StorageWeakRef(gradient.untyped_storage())
            yield name, gradient
            del gradient
        require_freed(storages, "backward is over")

    def _require_freed(self, storages: dict[str, StorageWeakRef], when: str) -> None:
        """The last gradient may be alive, because the answer's loop variable refers to it."""
        begun = "".join(self._case.buckets[: len(_events(self._peer, "begin"))])
        sent = [name for name in begun if name in [*storages][:-1]]
        elements, rank = self._elements(), self._peer.rank
        for name in [*storages][-1:]:
            self._require_unwritten(name, storages[name])
        alive = [name for name in sent if not storages[name].expired()]
        copied = [n for n in sent if torch.isin(self._case.gradient(n, rank), elements).any()]
        kept = [name for name in sent if name in alive or name in copied]
        what = f"gradient{'s' if len(kept) > 1 else ''} {', '.join(kept)}"
        message = (
            f"{self._at} still holds {what} when {when}; wanted sent gradients freed. (Copies and "
            f"variables count too.)"
        )
        # Different mistakes hold the tensor itself and a copy of it.
        require(not kept, message, evidence=(message, alive))

    def _require_unwritten(self, name: str, ref: StorageWeakRef) -> None:
        storage = storage_from_weak_pointer(ref.cdata)
        if storage is not None:
            wanted = self._case.gradient(name, self._peer.rank)
            now = torch.empty(0, dtype=wanted.dtype).set_(storage)
            require(
                torch.equal(now, wanted.flatten()),
                f"{self._at} writes into gradient {name}; wanted the sum in memory of its own.",
            )

    def _elements(self) -> Tensor:
        """Return all elements that the answer holds. A bucket in flight does not count."""
        found = [torch.empty(0)]
        for ref, dtype in self._made.items():
            storage = storage_from_weak_pointer(ref.cdata)
            if storage is not None:
                found.append(torch.empty(0, dtype=dtype).set_(storage).float())
        return torch.cat(found)


def _require_begun(at: str, peer: Peer, case: BackwardCase) -> None:
    """Each bucket begins as soon as it can."""
    made, begun = "nothing", []
    for event, value in peer.events:
        if event == "made":
            made = value
        elif event == "begin":
            begun.append((made, value))
    soonest = case.last_needed(peer.rank)
    require(
        len(begun) == len(soonest),
        f"{at}: {counted(len(begun), 'bucket')} begun; wanted {len(soonest)}.",
    )
    for bucket, (after, size), last in zip(case.buckets, begun, soonest, strict=True):
        nbytes = sum(case.gradient(name, 0).nbytes for name in bucket)
        require(size == nbytes, f"{at}: bucket {bucket} is sent as {size} bytes; wanted {nbytes}.")
        require(
            after == last,
            f"{at}: bucket {bucket} begins after gradient {after}; wanted after {last}.",
        )


def _require_waits(at: str, peer: Peer) -> None:
    """Require at most two in flight, and no wait before a third bucket begins."""
    events = peer.events
    in_flight: list[Any] = []
    last_made = max((n for n, (event, _) in enumerate(events) if event == "made"), default=0)
    for place, (event, value) in enumerate(events):
        following = [kind for kind, _ in events[place + 1 : place + 2]]
        if event == "begin":
            in_flight.append(len(in_flight))
            too_late = ", so wait for the older bucket before you begin the next"
            require(
                len(in_flight) <= 2,
                f"{at}: {len(in_flight)} buckets are in flight; wanted at most 2"
                f"{too_late if following == ['wait'] else ''}.",
            )
        if event == "wait":
            needed = len(in_flight) == 2 and following == ["begin"]
            require(
                place > last_made or needed,
                f"{at} waits with {counted(len(in_flight), 'bucket')} in flight before the next "
                f"gradient is computed; wanted a wait only before a third bucket begins.",
            )
            later = [number for kind, number in events[place + 1 :] if kind == "wait"]
            require(
                place > last_made or value < min(later, default=value + 1),
                f"{at} waits for the newer of the two buckets in flight; wanted the older.",
            )
            in_flight.pop()
    require(not in_flight, f"{at}: {counted(len(in_flight), 'bucket')} begun and never waited for.")


# ------------------------------------------------------------------ 13.3: one decision


LETTERS = {
    **{"f": "finite", "l": "large but finite", "h": "huge but finite"},
    **{"n": "nan", "i": "inf", "m": "-inf"},
}


@dataclass(frozen=True)
class RunCase:
    """The gradients of each rank, one of LETTERS each. The elements of an `h` are finite, but their
    sum overflows."""

    ranks: tuple[str, ...]
    lr: float = 0.25

    def gradients(self, rank: int) -> Iterator[Tensor]:
        special = {"n": float("nan"), "i": float("inf"), "m": -float("inf"), "l": 2.0**40}
        for step, letter in enumerate(self.ranks[rank]):
            gradient = torch.tensor([step + 1.1, rank + 1.0, 2.0 * step - rank])
            if letter == "h":
                gradient.fill_(2.0**127)
            if letter in special:
                gradient[step % 3] = special[letter]
            yield gradient

    def complete_rounds(self) -> int:
        """Count the rounds until a rank has no gradient left."""
        return min(map(len, self.ranks))

    def good_rounds(self) -> list[int]:
        rounds = range(self.complete_rounds())
        return [n for n in rounds if all(letters[n] in "flh" for letters in self.ranks)]

    def weight_after(self, rounds: int) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0])
        each = [list(self.gradients(rank)) for rank in range(len(self.ranks))]
        for step in self.good_rounds():
            if step < rounds:
                weight -= self.lr * torch.stack([mine[step] for mine in each]).mean(0)
        return weight


RUNS = (
    RunCase(("ff", "ff")),
    RunCase(("fffff", "fff"), lr=0.5),
    RunCase(("ff", "fff")),
    RunCase(("fl", "ff"), lr=0.125),
    RunCase(("ffh", "fff")),
    RunCase(("fff", "fnf")),
    RunCase(("iff", "fff", "ffn"), lr=2.0),
    RunCase(("n", "")),
    RunCase(("fnfff", "fffif", "ffff", "ffffff")),
    RunCase(("fmf",)),
)


def _check_agreed(answer: Any) -> str:
    for run in RUNS:
        _check_run(answer, run)
    return (
        "the same weights and steps on all ranks, with nan, inf and ranks that end early · one "
        "peer.most per round, and no gradient sent in a skipped round"
    )


def _check_run(answer: Any, run: RunCase) -> None:
    names = [
        f"{letter}: {name}" for letter, name in LETTERS.items() if letter in "".join(run.ranks)
    ]
    of_ranks = " and ".join(letters or "no gradient" for letters in run.ranks)
    call = f"agreed_steps of {of_ranks} ({', '.join(names)}), lr={run.lr},"
    ranks = range(len(run.ranks))
    weights, peers = [torch.tensor([1.0, 2.0, 3.0]) for _ in ranks], list[Peer]()
    given = [weight.view(-1) for weight in weights]  # sees in-place changes only

    def program(peer: Peer, weight: Tensor) -> Any:
        return answer(peer, weight, _gradients_taken(call, run, peer, given[peer.rank]), run.lr)

    steps = case_in_turns(call, program, [(weight,) for weight in weights], peers=peers)
    good, rounds = len(run.good_rounds()), run.complete_rounds() + 1
    for rank, peer in enumerate(peers):
        _require_weight(f"{call} at the end, rank {rank}", given[rank], run.weight_after(rounds))
        equal(f"{call} at rank {rank},", steps[rank], good, "steps")
        sent = _events(peer, "begin")
        require(
            len(sent) == good,
            f"{call} rank {rank} sent {counted(len(sent), 'gradient')}; wanted {good}, one per "
            f"round whose gradients are all finite.",
        )
        for nbytes in sent:
            require(
                nbytes == given[rank].nbytes,
                f"{call} rank {rank} sent a gradient as {nbytes} bytes; wanted "
                f"{given[rank].nbytes}, in its own dtype.",
            )
        calls = len(_events(peer, "most"))
        require(
            calls == rounds,
            f"{call} rank {rank} called peer.most {counted(calls, 'time')}; wanted {rounds}, once "
            f"per round.",
        )


def _gradients_taken(call: str, run: RunCase, peer: Peer, weight: Tensor) -> Iterator[Tensor]:
    """Yield a rank's gradients. Before each, require that the earlier rounds are complete."""
    at = f"{call} rank {peer.rank}"
    for number, gradient in enumerate(run.gradients(peer.rank)):
        _require_rounds(at, run, peer, weight, number)
        before = gradient.clone()
        yield gradient
        now, was = distinct_elements(gradient, before)
        require(
            torch.equal(gradient.view(torch.int32), before.view(torch.int32)),
            f"{at} changed gradient {number} to {now}; wanted it unchanged, {was}.",
        )
    _require_rounds(at, run, peer, weight, len(run.ranks[peer.rank]))


def _require_rounds(at: str, run: RunCase, peer: Peer, weight: Tensor, number: int) -> None:
    calls = len(_events(peer, "most"))
    require(
        calls >= number,
        f"{at} takes gradient {number} after {counted(calls, 'call')} of peer.most; wanted "
        f"{number}: one gradient per round.",
    )
    _require_weight(f"{at}, after {counted(number, 'round')}", weight, run.weight_after(number))


def _require_weight(at: str, got: Tensor, wanted: Tensor) -> None:
    mine, right = distinct_elements(got, wanted)
    allowed = rounding(wanted.dtype) * wanted.abs().max().item()
    require(
        torch.allclose(got, wanted, rtol=0, atol=allowed),
        f"{at}: `weight` is {mine}; wanted {right}.",
    )


# ------------------------------------------------------------------ 13.4: other ranks

RESHARDS = (  # n, old, new, dtype
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
        whole = torch.randint(1, 200, (n,), generator=drawn).to(dtype) / 3
        for rank in range(new):
            _check_shard(answer, whole, old, new, rank)
    return "exact shards from 1 to 8 files for 1 to 6 ranks · every element read once, no padding"


def _check_shard(answer: Any, whole: Tensor, old: int, new: int, rank: int) -> None:
    n = len(whole)
    size, share = -(-n // old), -(-n // new)
    call = f"resharded(read, {n}, old={old}, new={new}, rank={rank})"
    files = _Files(call, F.pad(whole, (0, size * old - n)).chunk(old))
    wanted = F.pad(whole, (0, share * new - n)).split(share)[rank]
    with _FilledEmpties():
        got = answer(files, n, old, new, rank)
    if isinstance(got, Tensor):
        require(
            got.dtype == wanted.dtype,
            f"{call} gave {got.dtype}; wanted {wanted.dtype}, the dtype of the files. An empty "
            f"read, read(0, 0, 0), has it too.",
        )
    _require_equal(call, got, wanted)
    needed = [(i // size, i % size) for i in range(n)[rank * share :][:share]]
    _require_read(call, files.places, needed)
    files_needed = len({source for source, _ in needed})
    require(
        files.reads <= files_needed,
        f"{call} called read {counted(files.reads, 'time')}; wanted {files_needed}, once per file.",
    )
    kept = got.untyped_storage().nbytes()
    require(
        kept <= 2 * got.nbytes,
        f"{call} gave a view that keeps {kept} bytes alive; wanted a tensor with its own memory.",
    )


def _require_read(call: str, places: list[tuple[int, int]], needed: list[tuple[int, int]]) -> None:
    require(
        len(places) == len(needed),
        f"{call} read {counted(len(places), 'element')}; wanted {len(needed)}.",
    )
    for places_found, what in (
        ({*places} - {*needed}, "read element {1} of file {0}, which is not in this shard."),
        ({*needed} - {*places}, "never read element {1} of file {0}, and read another one twice."),
    ):
        first = min(places_found, default=(0, 0))
        require(not places_found, f"{call} {what.format(*first)}")


class _FilledEmpties(LightMode):
    """Fills torch.empty with 99, because its memory may contain zeros by chance."""

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        return made.fill_(99) if "empty" in func.__name__ else made


class _Files:
    """The shards on disk. Records the elements read."""

    def __init__(self, call: str, shards: Sequence[Tensor]) -> None:
        self._call, self._shards = call, shards
        self.places: list[tuple[int, int]] = []  # file, position in it
        self.reads = 0  # without empty ones

    def __call__(self, source: int, start: int, stop: int) -> Tensor:
        asked = f"{self._call}: called read({source}, {start}, {stop})"
        require(
            all(type(n) is int for n in (source, start, stop)),
            f"{asked}; wanted integers: use //, not /.",
        )
        files = len(self._shards)
        require(0 <= source < files, f"{asked}; the files are 0 to {files - 1}.")
        length = len(self._shards[source])
        require(0 <= start <= stop <= length, f"{asked}; a file has {length} elements.")
        self.reads += start < stop
        self.places.extend((source, place) for place in range(start, stop))
        return self._shards[source][start:stop].clone()


# ------------------------------------------------------------------ 13.5: three ways

SHAPES = (  # block, layers, width, tensor, pipeline, data, k, tokens
    (480, 4, 8, 1, 1, 1, 1, 4),
    (480, 4, 8, 1, 2, 1, 1, 4),
    (480, 4, 8, 1, 1, 4, 3, 4),
    (480, 4, 8, 4, 1, 1, 1, 4),
    (480, 4, 8, 1, 4, 1, 3, 4),
    (480, 9, 8, 2, 4, 3, 2, 4),
    (483, 9, 8, 4, 3, 2, 2, 4),
    (1008, 12, 16, 8, 4, 4, 5, 8),
)


def _check_three_ways(answer: Any) -> str:
    names = ("block", "layers", "width", "tensor", "pipeline", "data", "k", "tokens")
    words = ("held", "sent for tensor", "sent for pipeline", "sent for data")
    for shape in SHAPES:
        call = f"bytes_per_rank({', '.join(f'{n}={s}' for n, s in zip(names, shape, strict=True))})"
        got = answer(*shape)
        require(
            isinstance(got, (tuple, list)) and len(got) == 4,
            f"{call} gave {_described(got)}; wanted four byte counts: held, tensor, pipeline, data."
            f"{' Is there a return?' if got is None else ''}",
        )
        for word, number, wanted in zip(words, got, _counted(*shape), strict=True):
            equal(f"{call}, {word},", number, wanted, "bytes")
    return (
        "equal to a count of every message: rings of t and d ranks, pipeline neighbors, k "
        "micro-batches"
    )


def _counted(
    block: int, layers: int, width: int, tensor: int, pipeline: int, data: int, k: int, tokens: int
) -> tuple[int, int, int, int]:
    """Return the maxima over all ranks, counted message by message."""
    stages = [range(s, layers, pipeline) for s in range(pipeline)]
    held, by_tensor, by_pipeline, by_data = [], [], [], []
    for number, blocks in enumerate(stages):
        weights = sum(block for _ in blocks) // tensor
        shard = next(s for s in range(weights + 1) if s * data >= weights)
        held.append(2 * weights + 2 * weights + 12 * shard)
        all_reduce = sum(tokens * width // tensor * 2 for _ in range(2) for _ in range(tensor - 1))
        by_tensor.append(
            sum(all_reduce for _ in range(k) for _ in blocks for _ in ("attention", "MLP") * 2)
        )
        neighbors = [n for n in (number - 1, number + 1) if 0 <= n < pipeline]
        by_pipeline.append(sum(2 * tokens * width for _ in range(k) for _ in neighbors))
        by_data.append(sum(2 * shard for _ in range(2) for _ in range(data - 1)))
    return max(held), max(by_tensor), max(by_pipeline), max(by_data)


# The bill is for one GPU, so real processes change nothing.
DAY = Day(
    exercises=(
        checked("13.1", _check_ring),
        checked("13.2", _check_buckets),
        checked("13.3", _check_agreed),
        checked("13.4", _check_resharded),
        checked("13.5", _check_three_ways),
    ),
    bill=Bill("day 13: still one GPU, unchanged", in_chunks),
)
