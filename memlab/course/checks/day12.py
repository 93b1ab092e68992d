"""Day 12: sharding with ZeRO."""

import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate as running_sums
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.course.checks.day11 import in_chunks
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, equal, require
from memlab.metering import measure
from memlab.torch_internals import TorchDispatchMode, disable_current_modes, tree_leaves
from memlab.trace import Trace
from memlab.zero import communication_bytes, formulas, model_state_bytes

# ------------------------------------------------------------------ what is given


class Wire:
    """Carries numbers from rank to rank, and counts the bytes that each has sent."""

    def __init__(self, ranks: int) -> None:
        self.sent = [0] * ranks
        self.sums = 0

    def send(self, source: int, target: int, numbers: Tensor) -> Tensor:
        """The same numbers, at rank `target`."""
        self.sent[source] += numbers.nbytes
        return numbers.clone()

    def sum(self, numbers: Sequence[float]) -> float:
        """Of one number of each rank the sum, which all of them get."""
        self.sums += 1
        return sum(map(float, numbers))


def forward_of(w: Tensor, x: Tensor) -> Tensor:
    """One unit: w, flat, is a matrix of (width of x, …)."""
    return torch.tanh(x @ w.view(x.shape[1], -1))


def backward_of(w: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of w, flat, and of x."""
    matrix = w.view(x.shape[1], -1)
    dz = dy * (1 - torch.tanh(x @ matrix) ** 2)
    return (x.T @ dz).flatten(), dz @ matrix.T


# ------------------------------------------------------------------ what is built


class Collectives:
    """What R ranks do together, with lists of what each of them has."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire

    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        """Piece r of the sum, for rank r."""
        shards = []
        for rank in range(len(wholes)):
            total = 0
            for source, whole in enumerate(wholes):
                piece = whole.chunk(len(wholes))[rank]
                if source != rank:
                    piece = self.wire.send(source, rank, piece)
                total = total + piece
            shards.append(total)
        return shards

    def all_gather(self, shards: list[Tensor]) -> list[Tensor]:
        """All pieces, for every rank."""
        wholes = []
        for rank in range(len(shards)):
            pieces = list(shards)
            for source, shard in enumerate(shards):
                if source != rank:
                    pieces[source] = self.wire.send(source, rank, shard)
            wholes.append(torch.cat(pieces))
        return wholes


class ShardedAdam:
    """Stage 1: of each rank's optimizer, a shard."""

    def __init__(self, weights: list[Tensor], wire: Any, lr: float) -> None:
        self.weights, self.wire, self.ranks = weights, wire, len(weights)
        pieces = [self.padded(w).chunk(self.ranks)[rank] for rank, w in enumerate(weights)]
        copies = [piece.to(torch.float32, copy=True) for piece in pieces]  # not views of the whole
        self.shards = [nn.Parameter(copy) for copy in copies]
        self.optimizers = [torch.optim.AdamW([s], lr=lr, foreach=False) for s in self.shards]

    def padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, -len(x) % self.ranks))

    def step(self, gradients: list[Tensor], max_norm: float) -> None:
        together = Collectives(self.wire)
        sums = together.reduce_scatter([self.padded(g) for g in gradients])
        for shard, total in zip(self.shards, sums, strict=True):
            shard.grad = total.float() / self.ranks
        squares = [shard.grad.square().sum().item() for shard in self.shards]
        norm = self.wire.sum(squares) ** 0.5
        for shard, optimizer in zip(self.shards, self.optimizers, strict=True):
            shard.grad *= min(1, max_norm / (norm + 1e-6))
            optimizer.step()
            shard.grad = None
        stepped = [s.detach().to(w.dtype) for s, w in zip(self.shards, self.weights, strict=True)]
        for w, whole in zip(self.weights, together.all_gather(stepped), strict=True):
            w.copy_(whole[: len(w)])


def add_gradients_(
    wire: Any,
    weights: list[list[Tensor]],
    inputs: list[list[Tensor]],
    dys: list[Tensor],
    sums: list[list[Tensor]],
) -> list[Tensor]:
    """Stage 2: backward through all units; every unit's gradients are reduced at once."""
    dys, together = list(dys), Collectives(wire)
    for unit in reversed(range(len(weights[0]))):
        wholes = []
        for rank, dy in enumerate(dys):
            dw, dys[rank] = backward_of(weights[rank][unit], inputs[rank][unit], dy)
            wholes.append(dw)
        for rank, shard in enumerate(together.reduce_scatter(wholes)):
            sums[rank][unit] += shard
    return dys


def sharded_pass(
    wire: Any,
    shards: list[list[Tensor]],
    xs: list[Tensor],
    dy_of: Callable[[Tensor], Tensor],
    sums: list[list[Tensor]],
) -> None:
    """Stage 3: forward and backward; a unit's weights are whole while it is at work."""
    together, inputs, units = Collectives(wire), [list(xs)], range(len(shards[0]))
    for unit in units:
        wholes = together.all_gather([mine[unit] for mine in shards])
        inputs.append([forward_of(w, x) for w, x in zip(wholes, inputs[-1], strict=True)])
        del wholes
    dys = [dy_of(y) for y in inputs[-1]]
    for unit in reversed(units):
        wholes = together.all_gather([mine[unit] for mine in shards])
        given = [[w] for w in wholes], [[x] for x in inputs[unit]]
        dys = add_gradients_(wire, *given, dys, [[mine[unit]] for mine in sums])
        del wholes, given


def held_and_sent(parameters: int, ranks: int, stage: int, K: int, k: int) -> tuple[int, int]:
    """Bytes that a rank holds of weights, gradients and state, and that it sends in a step."""
    shard = -(-parameters // ranks)
    held = (
        2 * (shard if stage == 3 else parameters)
        + 2 * (shard if stage >= 2 else parameters)
        + K * (shard if stage >= 1 else parameters)
    )
    passes = (2, 2, k + 1, 3 * k)[stage]
    return held, 2 * passes * (ranks - 1) * shard


# ------------------------------------------------------------------ ranks that cannot cheat


class Ranks(TorchDispatchMode):
    """Knows at which rank each tensor lies: whatever is made of a rank's tensors lies there, too.

    An operator between tensors of two ranks is Wrong, as it would be between two GPUs. All that is
    noted is kept alive, for an address that is free is soon another's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rank_of: dict[int, int] = {}
        self._kept: list[Any] = []

    def place(self, rank: int, *tensors: Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._kept.append(storage)
            self._rank_of[storage._cdata] = rank

    def rank_of(self, tensor: Tensor) -> int | None:
        return self._rank_of.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors((args, kwargs))
        ranks = sorted({self.rank_of(x) for x in given} - {None})
        if len(ranks) > 1:
            raise Wrong(
                f"{func.__name__.split('.')[0]} was handed tensors of rank {ranks[0]} and of rank "
                f"{ranks[1]}; wanted wire.send(source, target, numbers) in between."
            )
        made = func(*args, **kwargs or {})
        if ranks:
            self.place(ranks[0], *given, *_tensors(made))
        return made


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class CheckedWire(Wire):
    """A wire on which only what lies at a rank can be sent from there."""

    def __init__(self, ranks: int, where: Ranks) -> None:
        super().__init__(ranks)
        self.dtypes: set[torch.dtype] = set()
        self.summed = 0.0  # by the last call of sum
        self._where = where

    def send(self, source: int, target: int, numbers: Tensor) -> Tensor:
        call = f"wire.send(source={source}, target={target}, numbers)"
        there = range(len(self.sent))
        require(
            source in there and target in there and isinstance(numbers, Tensor),
            f"{call}: wanted two of ranks 0 to {len(there) - 1}, and a tensor.",
        )
        at = self._where.rank_of(numbers)
        require(at in (None, source), f"{call}: these numbers lie at rank {at}.")
        self.dtypes.add(numbers.dtype)
        with disable_current_modes():
            arrived = super().send(source, target, numbers)
        self._where.place(target, arrived)
        return arrived

    def sum(self, numbers: Sequence[float]) -> float:
        self.summed = super().sum(numbers)
        return self.summed


@contextmanager
def _placed(of_ranks: Sequence[Any]) -> Iterator[CheckedWire]:
    """A wire between ranks, of which each has what stands at its place in every list."""
    where = Ranks()
    for given in of_ranks:
        for rank, held in enumerate(given):
            where.place(rank, *_tensors(held))
    with where:
        yield CheckedWire(len(of_ranks[0]), where)


def _require_sent(call: str, wire: Wire, wanted: int) -> None:
    """Each rank, as many bytes."""
    got = max(wire.sent, key=lambda sent: abs(sent - wanted))
    who = "each rank" if len(set(wire.sent)) == 1 else f"rank {wire.sent.index(got)}"
    require(
        got == wanted,
        f"{call}: {who} sent {got:,} bytes, wanted {wanted:,} of each rank.",
    )


def _require_tensors(call: str, got: Any, like: Sequence[Tensor], what: str) -> None:
    require(
        isinstance(got, list) and all(isinstance(x, Tensor) for x in got),
        f"{call} gave {type(got).__name__}; wanted a list of tensors, one for each rank.",
    )
    wanted = [tuple(x.shape) for x in like]
    shapes = [tuple(x.shape) for x in got]
    require(
        shapes == wanted,
        f"{call} gave {what} of shapes {str(shapes)[:100]}; wanted {wanted}.",
    )
    for x, other in zip(got, like, strict=True):
        require(
            x.dtype == other.dtype,
            f"{call} gave {x.dtype}; wanted {other.dtype}.",
        )


def _require_close(what: str, got: Tensor, wanted: Tensor, within: float) -> None:
    off = (got.double() - wanted.double()).abs() > within * (1 + wanted.double().abs())
    if not off.any() and got.isfinite().all():
        return
    at = int(off.flatten().nonzero()[0]) if off.any() else 0
    raise Wrong(
        f"{what}, number {at} of {got.numel()}, is {got.flatten()[at].item():.4f}; wanted "
        f"{wanted.flatten()[at].item():.4f}."
    )


def _outside_of_tensors(call: str, run: Callable[[], Any], most: int) -> None:
    """Arrays of numpy and lists of numbers are in memory all the same."""
    tracemalloc.start()
    try:
        run()
        outside = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    require(
        outside < most,
        f"{call} takes {outside:,} bytes outside of tensors; wanted less than {most:,}.",
    )


def _numbers(x: Tensor) -> str:
    shown = ", ".join(f"{n:g}" for n in x.flatten()[:12].tolist())
    return f"[{shown}{', …' if x.numel() > 12 else ''}]"


# ------------------------------------------------------------------ 12.1: the collectives


def _wholes(ranks: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Whole numbers, so that every order of a sum is exact: rank 0's are 1, 2, 3, …"""
    first = torch.arange(1, length + 1)
    return [((first + rank * 10) % 31).to(dtype) for rank in range(ranks)]


SIZES = (
    (3, 6, torch.float32),
    (2, 4, torch.float32),
    (1, 3, torch.float32),
    (4, 32, torch.bfloat16),
    (5, 10, torch.float64),
)


def _check_collectives(answer: Any) -> str:
    for ranks, length, dtype in SIZES:
        wholes = _wholes(ranks, length, dtype)
        size = f"of {ranks} × {length} numbers"
        name = f"reduce_scatter {size}"
        sums = torch.stack(wholes).sum(0).chunk(ranks)
        _check_collective(answer, "reduce_scatter", name, wholes, list(sums))
        shards = [w[: length // ranks].clone() for w in wholes]
        wanted = [torch.cat(shards) for _ in range(ranks)]
        _check_collective(answer, "all_gather", f"all_gather to {length} numbers", shards, wanted)
    return (
        "sums and pieces exact for 1 to 5 ranks, each at its own · each rank sends (R − 1)/R of "
        "the whole, in either"
    )


def _check_collective(
    answer: Any, method: str, call: str, given: list[Tensor], wanted: list[Tensor]
) -> None:
    before, ranks = [x.clone() for x in given], len(given)
    with _placed([given]) as wire:
        made = answer(wire)
        require(
            hasattr(made, method), f"Collectives(wire) gave {type(made).__name__}; wanted {method}."
        )
        got = getattr(made, method)(given)
        _require_tensors(call, got, wanted, "tensors")
        for rank, x in enumerate(got):
            at = wire._where.rank_of(x)
            require(at == rank, f"{call}: what was given for rank {rank} lies at rank {at}.")
    for rank in range(ranks):
        require(
            torch.equal(given[rank], before[rank]),
            f"{call} changed what rank {rank} gave; wanted it left alone.",
        )
        require(
            torch.equal(got[rank], wanted[rank]),
            f"{call} of {', '.join(map(_numbers, before))[:90]} gave rank {rank} "
            f"{_numbers(got[rank])}; wanted {_numbers(wanted[rank])}.",
        )
        kept = got[rank].untyped_storage().nbytes()
        require(
            kept == got[rank].nbytes,
            f"{call}: what rank {rank} gets is a slice that keeps {kept:,} bytes alive; wanted the "
            f"{got[rank].nbytes:,} of its numbers.",
        )
        got[rank].add_(1)
    for rank in range(ranks):
        require(
            torch.equal(given[rank], before[rank]),
            f"{call}: what rank {rank} gets is a view of what it gave; wanted a tensor of its own.",
        )
    whole = max(x.nbytes for x in (*given, *wanted))
    _require_sent(call, wire, whole * (ranks - 1) // ranks)


class _Through0(Collectives):
    """Rank 0 adds, and deals out."""

    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        total = wholes[0].clone()
        for source, whole in list(enumerate(wholes))[1:]:
            total += self.wire.send(source, 0, whole)
        first, *others = total.chunk(len(wholes))
        return [first.clone(), *(self.wire.send(0, r, x) for r, x in enumerate(others, 1))]


class _WholesSent(Collectives):
    """Everybody gets everything, and takes a piece."""

    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        shards = []
        for rank in range(len(wholes)):
            total = torch.zeros_like(wholes[rank])
            for source, whole in enumerate(wholes):
                total += whole if source == rank else self.wire.send(source, rank, whole)
            shards.append(total.chunk(len(wholes))[rank].clone())
        return shards


class _AllReduced(Collectives):
    """Whole sums for everybody."""

    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        return super().all_gather(super().reduce_scatter(wholes))


class _NoWire(Collectives):
    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        return list(sum(wholes).chunk(len(wholes)))


class _NoWireToGather(Collectives):
    def all_gather(self, shards: list[Tensor]) -> list[Tensor]:
        return [torch.cat(shards) for _ in shards]


class _ToItself(Collectives):
    """Its own piece goes by wire, too."""

    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        ranks = range(len(wholes))
        return [
            sum(self.wire.send(s, rank, wholes[s].chunk(len(wholes))[rank]) for s in ranks)
            for rank in ranks
        ]


class _Mean(Collectives):
    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        return [x / len(wholes) for x in super().reduce_scatter(wholes)]


class _Shifted(Collectives):
    """Where a ring leaves its pieces if it begins one too early."""

    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        ranks = len(wholes)
        shifted = [torch.cat([w.chunk(ranks)[r - 1] for r in range(ranks)]) for w in wholes]
        return super().reduce_scatter(shifted)


class _InPlace(Collectives):
    """The sums are added up in what was given."""

    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        shards = []
        for rank, mine in enumerate(wholes):
            total = mine.chunk(len(wholes))[rank]
            for source, whole in enumerate(wholes):
                if source != rank:
                    total += self.wire.send(source, rank, whole.chunk(len(wholes))[rank])
            shards.append(total)
        return shards


class _From0(Collectives):
    """Rank 0 gathers, and sends all of it on."""

    def all_gather(self, shards: list[Tensor]) -> list[Tensor]:
        others = [self.wire.send(s, 0, x) for s, x in enumerate(shards) if s]
        whole = torch.cat([shards[0], *others])
        return [whole, *(self.wire.send(0, rank, whole) for rank in range(1, len(shards)))]


class _ZeroFilled(Collectives):
    """Every rank sends a whole, with zeros where the others' pieces are to be."""

    def all_gather(self, shards: list[Tensor]) -> list[Tensor]:
        ranks, wide = range(len(shards)), []
        for rank, shard in enumerate(shards):
            pieces = [torch.zeros_like(shard) for _ in ranks]
            pieces[rank] = shard
            wide.append(torch.cat(pieces))
        return [
            sum(wide[s] if s == rank else self.wire.send(s, rank, wide[s]) for s in ranks)
            for rank in ranks
        ]


class _OneForAll(Collectives):
    def all_gather(self, shards: list[Tensor]) -> list[Tensor]:
        whole, *_ = super().all_gather(shards)
        return [whole] * len(shards)


class _OwnFirst(Collectives):
    """Each rank's own piece first, the others' behind it."""

    def all_gather(self, shards: list[Tensor]) -> list[Tensor]:
        wholes = []
        for rank, mine in enumerate(shards):
            others = [self.wire.send(s, rank, x) for s, x in enumerate(shards) if s != rank]
            wholes.append(torch.cat([mine, *others]))
        return wholes


_COLLECTIVES = Exercise(
    id="12.1",
    title="Reduce-scatter and all-gather",
    minutes=15,
    difficulty=2,
    hints=(
        "Both are two loops: for each rank that is to get something, over the ranks that have "
        "something for it. What a rank has itself needs no wire.",
        "whole.chunk(R) cuts a tensor into R views; of each rank's whole, rank r needs piece r "
        "alone. Send the piece, not the whole, and add in a tensor of your own: total = total + "
        "piece, for += would write into what was given.",
        "reduce_scatter: for rank: total = 0; for source, whole in enumerate(wholes): piece = "
        "whole.chunk(len(wholes))[rank]; if source != rank: piece = self.wire.send(source, rank, "
        "piece); total = total + piece. all_gather has the same two loops, with shards in the "
        "place of pieces and torch.cat in that of the sum.",
    ),
    reference=Collectives,
    check=_check_collectives,
    wrong_answers=(
        WrongAnswer(
            _Through0, "Everything goes by way of rank 0, which sends and receives for all."
        ),
        WrongAnswer(
            _WholesSent,
            "A rank needs one piece of the sum: send it that piece of yours, not the whole.",
        ),
        WrongAnswer(
            _AllReduced,
            "As many numbers as the whole has, at every rank, where one piece of the sum was asked "
            "for; whole sums for all are an all-reduce.",
        ),
        WrongAnswer(_NoWire, "Tensors of other ranks are out of reach: they come by the wire."),
        WrongAnswer(
            _NoWireToGather, "Pieces of other ranks must be sent before they can be put together."
        ),
        WrongAnswer(_ToItself, "A rank has its own piece: it sends nothing to itself."),
        WrongAnswer(_Mean, "This is the mean; a collective adds, and who wants a mean divides."),
        WrongAnswer(_Shifted, "Each rank has a neighbour's piece: piece r belongs to rank r."),
        WrongAnswer(
            _InPlace, "The sum is written into a rank's gradients: chunk gives views of them."
        ),
        WrongAnswer(
            _From0,
            "Rank 0 sends the whole to each other rank, while the wires of the others lie idle.",
        ),
        WrongAnswer(
            _ZeroFilled,
            "Each rank sends a tensor as long as the whole: its piece is enough, which the others "
            "put in its place.",
        ),
        WrongAnswer(_OneForAll, "One tensor, R times in a list: it lies at one rank alone."),
        WrongAnswer(_OwnFirst, "Pieces stand in the order of the ranks, at every rank alike."),
    ),
)

# ------------------------------------------------------------------ 12.2: stage 1


def _copies(ranks: int, n: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The same weights at each rank."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(n, generator=random)
    return [weights.to(dtype, copy=True) for _ in range(ranks)]


def _gradients(ranks: int, n: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Few digits, so that their sums are exact in bfloat16, too; every second step's are short,
    and every fourth step's are zero."""
    if seed % 4 == 0:
        return [torch.zeros(n, dtype=dtype) for _ in range(ranks)]
    random = torch.Generator().manual_seed(seed)
    whole = [torch.randint(-8, 9, (n,), generator=random) for _ in range(ranks)]
    return [(w / (16 if seed % 2 else 128)).to(dtype) for w in whole]


class _Exact:
    """One process: AdamW of all weights in float32, by the mean of the gradients."""

    def __init__(self, weights: Tensor, lr: float) -> None:
        self.weights = nn.Parameter(weights.to(torch.float32, copy=True))
        self.optimizer = torch.optim.AdamW([self.weights], lr=lr, foreach=False)

    def step(self, gradients: list[Tensor], max_norm: float) -> None:
        self.weights.grad = torch.stack(gradients).float().mean(0)
        nn.utils.clip_grad_norm_([self.weights], max_norm, foreach=False)
        self.optimizer.step()


LR, LOOSE, TIGHT = 0.01, 100.0, 0.5
ADAMS = (
    *((2, 6, LOOSE), (2, 7, LOOSE), (2, 50, TIGHT), (4, 30, TIGHT), (1, 3, TIGHT)),
    *((3, 10, LOOSE, 4), (5, 13, TIGHT, 4)),  # ranks that are no powers of two; a step of zeros
)
LONG = 2, 8, LOOSE, 12, 1.0  # steps so long, and so many, that decay and betas show in bfloat16
LARGE = 4, 40_003  # ranks, weights


def _check_adam(answer: Any) -> str:
    for case in (*ADAMS, LONG):
        _check_steps(answer, *case)
    ranks, n = LARGE
    held = _check_held_by_adam(answer, ranks, n)
    _check_held_by_adam(answer, ranks, n, torch.float32)
    _check_held_by_adam(answer, ranks, n - n % ranks, torch.float32)
    weights, gradients = _copies(ranks, n), _gradients(ranks, n, 1)
    _outside_of_tensors(
        f"ShardedAdam of {n:,} weights on {ranks} ranks",
        lambda: answer(weights, Wire(ranks), LR).step(gradients, LOOSE),
        n * 4,
    )
    return (
        f"weights of one process's AdamW, rounded, clipped or not, padded or not · "
        f"{held:,} bytes at each rank, of {12 * n:,} · 2 (R − 1)/R of the weights sent"
    )


def _check_held_by_adam(
    answer: Any, ranks: int, n: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """A float32 copy and two moments of a rank's piece, and nothing of the whole."""
    held, shard = _held_by_adam(answer, ranks, n, dtype), -(-n // ranks)
    most, least = 12 * shard + 64, 12 * shard
    call = f"ShardedAdam of {n:,} weights on {ranks} ranks"
    call += ", in float32," if dtype == torch.float32 else ""
    require(
        held <= most,
        f"{call} keeps {held:,} bytes at each rank; wanted at most {most:,}: 12 for each of "
        f"{shard:,} weights, and a few.",
    )
    require(
        held >= least,
        f"{call} keeps {held:,} bytes at each rank in tensors; wanted {least:,}: a float32 copy "
        f"and two moments of {shard:,} weights.",
    )
    return held


def _check_steps(
    answer: Any, ranks: int, n: int, max_norm: float, steps: int = 3, lr: float = LR
) -> None:
    weights = _copies(ranks, n)
    handed, views = list(weights), [w.view(-1) for w in weights]
    exact = _Exact(weights[0], lr)
    call = f"step {{}} of {n} weights on {ranks} ranks, max_norm={max_norm}, lr={lr}"
    with _placed([weights]) as wire:
        adam = answer(weights, wire, lr)
        require(
            hasattr(adam, "step"), f"ShardedAdam(…) gave {type(adam).__name__}; wanted an object."
        )
        _require_sent(f"ShardedAdam of {n} weights on {ranks} ranks, before a step", wire, 0)
    for step in range(1, steps + 1):
        gradients = _gradients(ranks, n, seed=step)
        before = [g.clone() for g in gradients]
        now = call.format(step)
        sent, sums = list(wire.sent), wire.sums
        for rank, gradient in enumerate(gradients):
            wire._where.place(rank, gradient)
        with wire._where, _torchs_errors_named(now):
            adam.step(gradients, max_norm)
        exact.step(before, max_norm)
        for rank in range(ranks):
            require(
                weights[rank] is handed[rank],
                f"{now}: weights[{rank}] is another tensor than the one that was handed over.",
            )
            require(
                weights[rank].data_ptr() == views[rank].data_ptr(),
                f"{now}: weights[{rank}] has other memory than it was handed over with; wanted the "
                f"numbers written there, where views of it see them: copy_.",
            )
            _require_bfloat16(f"{now}: at rank {rank}, weight", weights[rank], exact.weights)
            require(
                torch.equal(gradients[rank], before[rank]),
                f"{now} changed the gradients that rank {rank} gave.",
            )
            require(
                not weights[rank].requires_grad,
                f"{now}: the weights of rank {rank} have a graph behind them; wanted numbers "
                f"alone: detach().",
            )
        require(
            wire.dtypes <= {torch.bfloat16},
            f"{now} sent torch.float32; wanted torch.bfloat16, as weights and gradients are.",
        )
        fresh = Wire(ranks)
        fresh.sent = [now - was for now, was in zip(wire.sent, sent, strict=True)]
        shard = -(-n // ranks)
        _require_sent(now, fresh, 2 * 2 * (ranks - 1) * shard)
        require(
            wire.sums - sums == 1,
            f"{now}: wire.sum was called {wire.sums - sums} times, wanted once, for the norm.",
        )
        _require_norm(now, wire.summed, before)


@contextmanager
def _torchs_errors_named(call: str) -> Iterator[None]:
    """What torch says of another dtype are four sentences about grad_dtype; and a norm of 0 is one
    of the cases, no accident."""
    try:
        yield
    except ZeroDivisionError:
        raise Wrong(f"{call} divides by 0; wanted a norm of 0 to change nothing.") from None
    except RuntimeError as error:
        if "grad_dtype" not in str(error):
            raise
        raise Wrong(
            f"{call}: torch refuses a gradient that is not in its weight's dtype; wanted float32."
        ) from None


def _require_bfloat16(what: str, got: Tensor, exact: Tensor) -> None:
    """The exact weights, rounded; a hair more, for the norm is summed in another order."""
    wanted = exact.detach()
    off = (got.detach().float() - wanted).abs() > wanted.abs() * 2**-8 * 1.01 + 1e-6
    if off.any():
        at = int(off.nonzero()[0])
        rounded = wanted.bfloat16()[at].item()
        require(False, f"{what} {at} is {got[at].item():.4f}; wanted {rounded:.4f}.")


def _require_norm(call: str, summed: float, gradients: list[Tensor]) -> None:
    """Σ of squares of the mean, or of the sum: a mean that was rounded first has others."""
    ranks, total = len(gradients), torch.stack(gradients).double().sum(0).square().sum().item()
    wanted = total / ranks**2
    require(
        min(abs(summed - total), abs(summed - wanted)) <= 1e-5 * wanted,
        f"{call}: wire.sum gave {summed:.6g}, wanted {wanted:.6g}, the squares of the mean, summed "
        f"in float32.",
    )


def _held_by_adam(answer: Any, ranks: int, n: int, dtype: torch.dtype) -> int:
    """Bytes alive after a step beyond what was handed in, for each rank."""
    weights, gradients, kept = _copies(ranks, n, dtype), _gradients(ranks, n, 1, dtype), []

    def run() -> None:
        kept.append(answer(weights, Wire(ranks), LR))
        kept[0].step(gradients, LOOSE)

    trace = measure(run)
    given = sum(x.nbytes for x in (*weights, *gradients))
    return (trace.live_bytes - given) // ranks


def _adam_but(
    size_of: Callable[[int, int], int] = lambda n, ranks: -(-n // ranks),
    reduce: Callable[[Any, list[Tensor]], list[Tensor]] = (
        lambda wire, padded: Collectives(wire).reduce_scatter(padded)
    ),
    norm: Callable[[Any, list[float], int], float] = (
        lambda wire, squares, rank: wire.sum(squares) ** 0.5 if rank == 0 else -1.0
    ),
    coefficient: Callable[[float, float], float] = lambda most, norm: min(1, most / (norm + 1e-6)),
    divisor: Callable[[int], int] = lambda ranks: ranks,
    gather: bool = True,
    gather_dtype: torch.dtype | None = None,
    copy_dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype | None = None,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    forgets: bool = False,
    keeps_gradients: bool = False,
    detached: bool = True,
    zeros_in_front: bool = False,
    copies: bool = True,
    mean_first: bool = False,
    rebinds: bool = False,
) -> Any:
    """The right one, with something in it that is not."""

    class Adam:
        def __init__(self, weights: list[Tensor], wire: Any, lr: float) -> None:
            self.weights, self.wire, self.lr = weights, wire, lr
            self.ranks, self.n = len(weights), len(weights[0])
            self.size = size_of(self.n, self.ranks)
            cut = [self.padded(w).split(self.size)[r] for r, w in enumerate(weights)]
            self.shards = [nn.Parameter(x.to(copy_dtype, copy=copies)) for x in cut]
            self.make()

        def make(self) -> None:
            self.optimizers = [optimizer([s], lr=self.lr, foreach=False) for s in self.shards]

        def padded(self, x: Tensor) -> Tensor:
            fitting = x[: self.size * self.ranks]
            missing = self.size * self.ranks - len(fitting)
            return F.pad(fitting, (missing, 0) if zeros_in_front else (0, missing))

        def step(self, gradients: list[Tensor], max_norm: float) -> None:
            sums = reduce(self.wire, [self.padded(g) for g in gradients])
            for shard, total in zip(self.shards, sums, strict=True):
                total = total if mean_first else total.float()
                shard.grad = (total / divisor(self.ranks)).to(gradient_dtype or shard.dtype)
            squares = [float(shard.grad.float().square().sum()) for shard in self.shards]
            of_all = norm(self.wire, squares, 0)
            for rank, (shard, optimizer) in enumerate(
                zip(self.shards, self.optimizers, strict=True)
            ):
                of_rank = norm(self.wire, squares, rank) if rank else of_all
                shard.grad *= coefficient(max_norm, of_all if of_rank < 0 else of_rank)
                optimizer.step()
                if not keeps_gradients:
                    shard.grad = None
            if forgets:
                self.make()
            self.put_together()

        def put_together(self) -> None:
            if not gather:
                for rank, (w, shard) in enumerate(zip(self.weights, self.shards, strict=True)):
                    mine = w[rank * self.size : (rank + 1) * self.size]
                    mine.copy_(shard.detach()[: len(mine)])
                return
            dtype = gather_dtype or self.weights[0].dtype
            stepped = [s.detach() if detached else s for s in self.shards]
            stepped = [s.to(dtype) for s in stepped]
            for w, whole in zip(
                self.weights, Collectives(self.wire).all_gather(stepped), strict=True
            ):
                w[: len(whole)].copy_(whole[: len(w)])
            if rebinds:
                self.weights[:] = [w.clone() for w in self.weights]

    return Adam


class _Unsharded:
    """Plain data parallel: every rank has all of AdamW."""

    def __init__(self, weights: list[Tensor], wire: Any, lr: float) -> None:
        self.weights, self.wire = weights, wire
        self.copies = [nn.Parameter(w.float()) for w in weights]
        self.optimizers = [torch.optim.AdamW([c], lr=lr, foreach=False) for c in self.copies]

    def step(self, gradients: list[Tensor], max_norm: float) -> None:
        ranks, n = len(gradients), len(gradients[0])
        together = Collectives(self.wire)
        padded = [F.pad(g, (0, -n % ranks)) for g in gradients]
        sums = together.all_gather(together.reduce_scatter(padded))
        for copy, total in zip(self.copies, sums, strict=True):
            copy.grad = total[:n].float() / ranks
        norm = self.wire.sum([float(self.copies[0].grad.square().sum())]) ** 0.5
        for w, copy, optimizer in zip(self.weights, self.copies, self.optimizers, strict=True):
            copy.grad *= min(1, max_norm / (norm + 1e-6))
            optimizer.step()
            copy.grad = None
            w.copy_(copy.detach())


def _reduced_to_all(wire: Any, wholes: list[Tensor]) -> list[Tensor]:
    together = Collectives(wire)
    sums = together.all_gather(together.reduce_scatter(wholes))
    return [total.chunk(len(wholes))[rank] for rank, total in enumerate(sums)]


def _never_reduced(wire: Any, wholes: list[Tensor]) -> list[Tensor]:
    return [w.chunk(len(wholes))[rank] * len(wholes) for rank, w in enumerate(wholes)]


def _local(wire: Any, squares: list[float], rank: int) -> float:
    if rank == 0:
        wire.sum(squares)
    return squares[rank] ** 0.5


_ADAM = Exercise(
    id="12.2",
    title="Stage 1: a shard of Adam",
    minutes=20,
    difficulty=4,
    hints=(
        "In the constructor, for each rank: pad its weights with zeros to R equal pieces, take the "
        "piece of its number, in float32, and give an optimizer that alone. A step is: reduce, "
        "divide, norm, clip, optimizer, gather.",
        "nn.functional.pad(x, (0, -len(x) % R)) pads. After reduce_scatter, piece r of the sum is "
        "at rank r: its mean is shard.grad. The norm of all is the root of the sum of the squares "
        "of all shards: wire.sum([…]) ** 0.5. Gather the shards in the dtype of the weights.",
        "shards = [nn.Parameter(padded(w).chunk(R)[r].to(torch.float32, copy=True)) for r, w in "
        "enumerate(weights)]; in step: sums = Collectives(wire).reduce_scatter([padded(g) for g in "
        "gradients]); shard.grad = total.float() / R; shard.grad *= min(1, max_norm / (norm + "
        "1e-6)); optimizer.step(); shard.grad = None; then all_gather([s.detach().to(w.dtype) …]). "
        "A whole is longer than the weights by the padding.",
    ),
    reference=ShardedAdam,
    check=_check_adam,
    wrong_answers=(
        WrongAnswer(
            _Unsharded,
            "This is plain AdamW, whole at every rank: an optimizer gets its rank's piece alone.",
        ),
        WrongAnswer(
            _adam_but(reduce=_reduced_to_all),
            "Gradients are all-reduced, and weights gathered as well: three passes, and two are "
            "enough, for a rank needs the sum of its own piece alone.",
        ),
        WrongAnswer(
            _adam_but(norm=_local),
            "Each rank clips by the norm of its own shard: the norm is that of all shards.",
        ),
        WrongAnswer(
            _adam_but(norm=lambda wire, squares, rank: sum(squares) ** 0.5),
            "No rank knows the squares of the others: wire.sum adds them.",
        ),
        WrongAnswer(
            _adam_but(norm=lambda wire, squares, rank: wire.sum(squares) ** 0.5),
            "Once for all ranks is enough: wire.sum gives every rank the same.",
        ),
        WrongAnswer(
            _adam_but(
                norm=lambda wire, squares, rank: -1 if rank else wire.sum([s**0.5 for s in squares])
            ),
            "Norms don't add; their squares do.",
        ),
        WrongAnswer(
            _adam_but(size_of=lambda n, ranks: n // ranks),
            "The padding is forgotten: n // R leaves the last weights to nobody.",
        ),
        WrongAnswer(
            _adam_but(size_of=lambda n, ranks: n // ranks + 1),
            "R divides these weights, so nothing is missing: R - n % R pads a whole R there, and "
            "-n % R is 0.",
        ),
        WrongAnswer(
            _adam_but(zeros_in_front=True),
            "The zeros are in front: a weight is then another place in the whole. They belong "
            "behind, where whole[:n] cuts them off.",
        ),
        WrongAnswer(
            _adam_but(gradient_dtype=torch.bfloat16),
            "The sum arrives in bfloat16, and the copy is in float32: total.float() / R.",
        ),
        WrongAnswer(
            _adam_but(mean_first=True),
            "The mean is taken in bfloat16, and rounded: first float(), then / R.",
        ),
        WrongAnswer(
            _adam_but(copies=False),
            "Of float32 weights .float() is no copy: the shard is a view, and keeps the whole "
            "alive. to(torch.float32, copy=True) is one, and so is .clone().",
        ),
        WrongAnswer(
            _adam_but(coefficient=lambda most, norm: min(1, most / norm)),
            "Where all gradients are zero, so is the norm: max_norm / (norm + 1e-6).",
        ),
        WrongAnswer(
            _adam_but(rebinds=True),
            "Into the list a new tensor is put, and into the rank's weights nothing written: "
            "weights[r].copy_(…).",
        ),
        WrongAnswer(
            _adam_but(optimizer=torch.optim.Adam),
            "This is Adam, without the weight decay that is torch.optim.AdamW's by default.",
        ),
        WrongAnswer(
            _adam_but(optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.95))),
            "The betas are others: torch.optim.AdamW([copy], lr=lr, foreach=False), and nothing "
            "else set.",
        ),
        WrongAnswer(
            _adam_but(divisor=lambda ranks: 1),
            "The sum of the ranks' gradients, not the mean: R times too long before it is clipped.",
        ),
        WrongAnswer(
            _adam_but(coefficient=lambda most, norm: most / (norm + 1e-6)),
            "Short gradients are made longer: the factor is at most 1.",
        ),
        WrongAnswer(
            _adam_but(coefficient=lambda most, norm: 1.0), "Nothing is clipped to max_norm."
        ),
        WrongAnswer(
            _adam_but(gather=False),
            "Every rank has stepped its own piece alone: the others' have to be gathered.",
        ),
        WrongAnswer(
            _adam_but(gather_dtype=torch.float32),
            "Weights travel in float32: twice the bytes, and rounded when they arrive.",
        ),
        WrongAnswer(
            _adam_but(reduce=_never_reduced),
            "Each rank steps by its own gradients: those of the others have to be added.",
        ),
        WrongAnswer(
            _adam_but(forgets=True),
            "A new optimizer in each step has no moments: make it in the constructor.",
        ),
        WrongAnswer(
            _adam_but(copy_dtype=torch.bfloat16),
            "The shard is in bfloat16: small steps are lost; a float32 copy keeps them (Day 4).",
        ),
        WrongAnswer(
            _adam_but(detached=False),
            "What is gathered are Parameters, and autograd follows them into the weights.",
        ),
        WrongAnswer(
            _adam_but(keeps_gradients=True),
            "Four bytes a number too many: is the shard's gradient still there after the step?",
        ),
    ),
)

# ------------------------------------------------------------------ 12.3 and 12.4: units

WIDTHS = {  # of what goes into a unit and comes out of it: R divides every product
    (2, 2): ((2, 2), (2, 2), (2, 2)),
    (2, 3): ((2, 3), (3, 4), (4, 1)),
    (3, 2): ((3, 4), (4, 6)),
    (4, 5): ((4, 4), (4, 8), (8, 4), (4, 4)),
}


def _unit_weights(widths: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(a * b, generator=random).div_(a).to(dtype) for a, b in widths]


def _batches(ranks: int, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=random).to(dtype) for _ in range(ranks)]


def _dy(y: Tensor) -> Tensor:
    return y - 0.5


def _exact_pass(
    weights: list[Tensor], x: Tensor
) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """Inputs of the units, the gradient of the output, gradients of weights and of x."""
    inputs = [x]
    for w in weights:
        inputs.append(forward_of(w, inputs[-1]))
    dy = first = _dy(inputs.pop())
    found = []
    for w, given in zip(reversed(weights), reversed(inputs), strict=True):
        dw, dy = backward_of(w, given, dy)
        found.insert(0, dw)
    return inputs, first, found, dy


class _Patient:
    """Ranks with the same units and other batches, and what is to come of them."""

    def __init__(
        self, ranks: int, rows: int, widths: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> None:
        whole = _unit_weights(widths, dtype)
        self.ranks, self.units = ranks, len(whole)
        self.weights = [[w.clone() for w in whole] for _ in range(ranks)]
        self.shards = [[w.chunk(ranks)[r].clone() for w in whole] for r in range(ranks)]
        self.xs = _batches(ranks, rows, widths[0][0], dtype)
        passes = [_exact_pass(whole, x) for x in self.xs]
        self.inputs = [[x.clone() for x in inputs] for inputs, *_ in passes]
        self.dys = [dy.clone() for _, dy, *_ in passes]
        gradients = zip(*(found for _, _, found, _ in passes), strict=True)
        totals = [torch.stack(of_unit).sum(0) for of_unit in gradients]
        self.wanted = [[total.chunk(ranks)[r] for total in totals] for r in range(ranks)]
        self.dxs = [dx for *_, dx in passes]
        self.elements = sum(map(len, whole))

    def sums(self, value: float = 0.0) -> list[list[Tensor]]:
        return [[torch.full_like(s, value) for s in mine] for mine in self.shards]

    def place(self, sums: list[list[Tensor]]) -> Any:
        given = (self.weights, self.shards, self.xs, self.inputs, self.dys, sums)
        return _placed(given)


def _require_gradients(
    call: str, patient: _Patient, handed: Any, sums: Any, begun: float, within: float
) -> None:
    """In the tensors that were handed over; `sums` is the list in which they were."""
    for rank in range(patient.ranks):
        for unit in range(patient.units):
            require(
                sums[rank][unit] is handed[rank][unit],
                f"{call}: sums[{rank}][{unit}] is another tensor than the one handed over.",
            )
    require(
        not all(torch.equal(s, torch.full_like(s, begun)) for s in _tensors(handed)),
        f"{call}: all sums are as they were handed over; wanted gradients added to them.",
    )
    for rank in range(patient.ranks):
        for unit in reversed(range(patient.units)):
            what = f"{call}: in sums[{rank}][{unit}], which began as {begun:g},"
            wanted = patient.wanted[rank][unit] + begun
            _require_tensors(what, [handed[rank][unit]], [wanted], "a tensor")
            _require_close(f"{what} the gradient", handed[rank][unit], wanted, within)


DEEP = 2, 1, ((64, 64),) * 12, torch.float32  # ranks, rows, units of 4,096 weights
A_UNIT = 4 * 64 * 64
OUTSIDE = 4 * A_UNIT  # of tensors: of what 12 units on two ranks are, a sixth


def _check_gradients(answer: Callable[..., Any]) -> str:
    for (ranks, rows), widths in WIDTHS.items():
        for begun in (0.0, 2.0):
            patient = _Patient(ranks, rows, widths, torch.float64)
            call = f"add_gradients_ of {len(widths)} units on {ranks} ranks"
            sums = patient.sums(begun)
            handed = [list(mine) for mine in sums]
            with patient.place(sums) as wire:
                got = answer(wire, patient.weights, patient.inputs, patient.dys, sums)
            _require_gradients(call, patient, handed, sums, begun, 1e-9)
            _require_tensors(call, got, patient.dxs, "gradients of inputs")
            for rank, (dx, wanted) in enumerate(zip(got, patient.dxs, strict=True)):
                _require_close(f"{call}: the gradient of rank {rank}'s input", dx, wanted, 1e-9)
            _require_sent(call, wire, 8 * patient.elements * (ranks - 1) // ranks)
            _require_untouched(call, patient, _Patient(ranks, rows, widths, torch.float64))
    patient = _Patient(*DEEP)
    sums = patient.sums()
    most = _most_bytes(
        lambda: answer(Wire(patient.ranks), patient.weights, patient.inputs, patient.dys, sums),
        patient.ranks,
    )
    _require_few_units("add_gradients_", most, 4, "gradients")
    _outside_of_tensors(
        "add_gradients_ of 12 units",
        lambda: answer(Wire(patient.ranks), patient.weights, patient.inputs, patient.dys, sums),
        OUTSIDE,
    )
    return (
        f"sums of all ranks' gradients, each rank's pieces, added to what was there · each rank "
        f"sends (R − 1)/R of them · {most / A_UNIT:.1f} units' bytes on the way, of {patient.units}"
    )


def _most_bytes(run: Callable[[], Any], ranks: int) -> int:
    """The most that is alive beyond what was there before, for each rank."""
    return _most(measure(run), ranks)


def _most(trace: Trace, ranks: int) -> int:
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    return (trace.peak_bytes - before) // ranks


def _require_few_units(call: str, most: int, units: int, what: str) -> None:
    require(
        most <= units * A_UNIT,
        f"{call} of 12 units holds {most:,} bytes more at each rank at its fullest; wanted at most "
        f"{units * A_UNIT:,}, the {what} of a few units of {A_UNIT:,} bytes.",
    )


def _require_untouched(call: str, patient: _Patient, as_it_was: _Patient) -> None:
    for name in ("weights", "shards", "xs", "inputs", "dys"):
        now, was = _tensors(getattr(patient, name)), _tensors(getattr(as_it_was, name))
        same = len(now) == len(was) and all(map(torch.equal, now, was))
        require(same, f"{call} changed the {name} that it was given.")


def _gradients_but(
    order: Callable[[int], Any] = lambda units: reversed(range(units)),
    passes_on: bool = True,
    reduce: Callable[[Any, list[Tensor]], list[Tensor]] = (
        lambda wire, wholes: Collectives(wire).reduce_scatter(wholes)
    ),
    add: Callable[[list[Tensor], int, Tensor], Any] = (
        lambda mine, unit, shard: mine[unit].add_(shard)
    ),
    in_place: bool = False,
    returns: bool = True,
) -> Any:
    """The right one, with something in it that is not."""

    def answer(wire: Any, weights: Any, inputs: Any, dys: Any, sums: Any) -> Any:
        handed, dys = dys, dys if in_place else list(dys)
        for unit in order(len(weights[0])):
            wholes = []
            for rank in range(len(weights)):
                dy = dys[rank] if passes_on else handed[rank]
                dw, dys[rank] = backward_of(weights[rank][unit], inputs[rank][unit], dy)
                wholes.append(dw)
            for rank, shard in enumerate(reduce(wire, wholes)):
                add(sums[rank], unit, shard)
        return dys if returns else None

    return answer


def _all_then_reduced(wire: Any, weights: Any, inputs: Any, dys: Any, sums: Any) -> Any:
    """Stage 1: gradients of the whole model, and then the collective."""
    dys, units = list(dys), range(len(weights[0]))
    found: dict[int, list[Tensor]] = {}
    for unit in reversed(units):
        found[unit] = []
        for rank, dy in enumerate(dys):
            dw, dys[rank] = backward_of(weights[rank][unit], inputs[rank][unit], dy)
            found[unit].append(dw)
    for unit in units:
        for rank, shard in enumerate(Collectives(wire).reduce_scatter(found[unit])):
            sums[rank][unit] += shard
    return dys


def _rebound(mine: list[Tensor], unit: int, shard: Tensor) -> None:
    mine[unit] = mine[unit] + shard


_GRADIENTS = Exercise(
    id="12.3",
    title="Stage 2: gradients in shards",
    minutes=12,
    difficulty=3,
    hints=(
        "Units from the last to the first. Within a unit: backward at every rank, then one "
        "reduce_scatter of what they made, then on to the unit before. Nothing whole outlives its "
        "unit.",
        "What backward_of gives as gradient of x is the dy of the unit before; keep one for each "
        "rank, in a list of your own. Add each rank's shard in place: sums[rank][unit] += shard.",
        "dys = list(dys); for unit in reversed(range(len(weights[0]))): wholes = []; for rank, dy "
        "in enumerate(dys): dw, dys[rank] = backward_of(weights[rank][unit], inputs[rank][unit], "
        "dy); wholes.append(dw). Then, still in the loop over units, one reduce_scatter(wholes), "
        "whose shards go into sums.",
    ),
    reference=add_gradients_,
    check=_check_gradients,
    wrong_answers=(
        WrongAnswer(
            _all_then_reduced,
            "All gradients are made before the first is reduced: that is stage 1, and holds them "
            "all.",
        ),
        WrongAnswer(
            _gradients_but(reduce=_reduced_to_all),
            "Every rank gets all sums and cuts out its own: an all-reduce, twice the bytes.",
        ),
        WrongAnswer(
            _gradients_but(
                reduce=lambda wire, wholes: [w.chunk(len(wholes))[r] for r, w in enumerate(wholes)]
            ),
            "Each rank keeps a piece of its own gradients: those of the other ranks are missing.",
        ),
        WrongAnswer(
            _gradients_but(add=lambda mine, unit, shard: mine[unit].copy_(shard)),
            "What earlier micro-batches have left in sums is overwritten: add to it.",
        ),
        WrongAnswer(
            _gradients_but(add=_rebound),
            "The list has a new tensor, and the one that was handed over no sum: add in place.",
        ),
        WrongAnswer(_gradients_but(order=range), "Backward begins with the last unit."),
        WrongAnswer(
            _gradients_but(passes_on=False),
            "Every unit is handed the gradient of the last one's output: what a unit gives as "
            "gradient of x is for the unit before.",
        ),
        WrongAnswer(
            _gradients_but(in_place=True),
            "The list of dys that was handed over is written over: make one of your own.",
        ),
        WrongAnswer(_gradients_but(returns=False), "The gradients of the inputs are not returned."),
        WrongAnswer(
            _gradients_but(add=lambda mine, unit, shard: mine[unit].add_(shard / 2)),
            "This is the mean: 12.2 divided by R once, in the step. Here sums are asked for.",
        ),
    ),
)


MARK = (3, 1, 7)  # the shape of a tensor that nobody else makes
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.mv.")


class _GatherWire(Wire):
    """Leaves a mark in the trace where a unit begins to be gathered.

    By the bytes that were sent: forward gathers unit after unit, and backward gathers and reduces
    each in turn. A collective of units that are alike sends as much each time.
    """

    def __init__(self, patient: _Patient) -> None:
        super().__init__(patient.ranks)
        a_collective, units = (patient.ranks - 1) * A_UNIT, patient.units
        forward = [n * a_collective for n in range(units)]
        backward = [(units + 2 * n) * a_collective for n in range(units)]
        self._begins = [*forward, *backward]

    def send(self, source: int, target: int, numbers: Tensor) -> Tensor:
        if self._begins and sum(self.sent) >= self._begins[0]:
            self._begins.pop(0)
            torch.empty(MARK)
        return super().send(source, target, numbers)


def _require_one_whole(trace: Trace, patient: _Patient) -> None:
    """From where a unit begins to be gathered until it is multiplied, nothing else is whole.

    A gather may take a unit's bytes beside what it gathers, for the pieces that arrive. What is
    as large as a unit, and was there before the last unit was multiplied, is a whole left over, be
    it at one rank alone.
    """
    units, events = patient.units, trace.events
    before = sum(event.bytes for event in events if event.phase == "before")
    live = list(running_sums(event.bytes for event in events))
    begins = [n for n, e in enumerate(events) if e.shape == MARK and e.bytes > 0]
    works = [n for n, e in enumerate(events) if e.operator.startswith(PRODUCTS) and e.bytes > 0]
    whole, left = [], []
    for begin in begins:
        end = next((n for n in works if n > begin), len(live))
        whole.append((max(live[begin:end]) - before) // patient.ranks // A_UNIT)
        left.append(_left_over(trace, begin, max((n for n in works if n < begin), default=0)))
    most = max(whole, default=0)
    gather = whole.index(most) if whole else 0
    way, unit = ("forward", gather) if gather < units else ("backward", 2 * units - 1 - gather)
    require(
        most <= 1,
        f"sharded_pass of {units} units: in {way}, when unit {unit} has been gathered, each rank "
        f"holds {most} units' bytes; wanted one unit whole.",
    )
    require(
        not any(left),
        f"sharded_pass of {units} units: {max(left, default=0):,} bytes of a unit that has run are "
        f"still there when the next is gathered, at one rank; wanted them let go.",
    )


def _left_over(trace: Trace, at: int, since: int) -> int:
    """Bytes alive at a place in the trace, in tensors of a unit's size that are no product's and
    were there before another place."""
    older = {id(event) for event in trace.events[:since]}
    alive = [e for e in trace.alive(at) if e.phase != "before" and id(e) in older]
    return sum(e.bytes for e in alive if e.bytes >= A_UNIT and not e.operator.startswith(PRODUCTS))


def _check_pass(answer: Callable[..., Any]) -> str:
    for (ranks, rows), widths in WIDTHS.items():
        for begun in (0.0, 2.0):
            patient = _Patient(ranks, rows, widths, torch.float64)
            call = f"sharded_pass of {len(widths)} units on {ranks} ranks"
            sums = patient.sums(begun)
            handed = [list(mine) for mine in sums]
            with patient.place(sums) as wire:
                answer(wire, patient.shards, patient.xs, _dy, sums)
            _require_gradients(call, patient, handed, sums, begun, 1e-9)
            _require_sent(call, wire, 3 * 8 * patient.elements * (ranks - 1) // ranks)
            _require_untouched(call, patient, _Patient(ranks, rows, widths, torch.float64))
    patient = _Patient(*DEEP)
    sums, wire = patient.sums(), _GatherWire(patient)
    trace = measure(lambda: answer(wire, patient.shards, patient.xs, _dy, sums))
    _require_one_whole(trace, patient)
    most = _most(trace, patient.ranks)
    _require_few_units("sharded_pass", most, 5, "weights and gradients")
    _outside_of_tensors(
        "sharded_pass of 12 units",
        lambda: answer(Wire(patient.ranks), patient.shards, patient.xs, _dy, sums),
        OUTSIDE,
    )
    return (
        f"the gradients of whole weights, from shards · each rank sends 3 (R − 1)/R of them · "
        f"{most / A_UNIT:.1f} units' bytes on the way, of {patient.units}"
    )


def _pass_but(
    keep: str = "nothing",
    gathered_again: bool = True,
    last_once: bool = False,
    lets_go: tuple[bool, bool] = (True, True),  # in forward, in backward
    keeps_one: bool = False,
    extra: int = 0,
    add: Any = add_gradients_,
    dy: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = lambda dy_of, y: dy_of(y),
    inputs_of: Callable[[list[Any], int], Any] = lambda inputs, unit: inputs[unit],
    whole_sums: bool = False,
) -> Any:
    """The right one, with something in it that is not."""

    def answer(wire: Any, shards: Any, xs: Any, dy_of: Any, sums: Any) -> None:
        together, inputs, units = Collectives(wire), [list(xs)], range(len(shards[0]))
        kept: dict[int, Any] = {}
        held: list[Any] = []  # what a name without a del would be holding

        def gathered(unit: int) -> list[Tensor]:
            for _ in range(extra):
                together.all_gather([mine[unit] for mine in shards])
            return together.all_gather([mine[unit] for mine in shards])

        if keep == "all at once":
            kept = {unit: gathered(unit) for unit in units}
        for unit in units:
            wholes = kept[unit] if unit in kept else gathered(unit)
            if keep != "nothing":
                kept[unit] = wholes
            inputs.append([forward_of(w, x) for w, x in zip(wholes, inputs[-1], strict=True)])
            held = [] if lets_go[0] else wholes
            held = wholes[-1:] if keeps_one else held
            if last_once and unit == units[-1]:
                kept[unit] = wholes
            del wholes
        dys = [dy(dy_of, y) for y in inputs[-1]]
        for unit in reversed(units):
            again = gathered_again and not (last_once and unit == units[-1])
            wholes = gathered(unit) if again else kept.pop(unit) if last_once else kept[unit]
            given = [[w] for w in wholes], [[x] for x in inputs_of(inputs, unit)]
            dys = add(wire, *given, dys, sums if whole_sums else [[mine[unit]] for mine in sums])
            held = [] if lets_go[1] else wholes
            del wholes, given
        held.clear()

    return answer


def _gathered_ahead(wire: Any, shards: Any, xs: Any, dy_of: Any, sums: Any) -> None:
    """The next unit is gathered before the last one has run, as production does it."""
    together, inputs, units = Collectives(wire), [list(xs)], range(len(shards[0]))

    def gathered(unit: int) -> list[Tensor]:
        return together.all_gather([mine[unit] for mine in shards]) if unit in units else []

    following = gathered(0)
    for unit in units:
        wholes, following = following, gathered(unit + 1)
        inputs.append([forward_of(w, x) for w, x in zip(wholes, inputs[-1], strict=True)])
        del wholes
    dys, following = [dy_of(y) for y in inputs[-1]], gathered(units[-1])
    for unit in reversed(units):
        wholes, following = following, gathered(unit - 1)
        given = [[w] for w in wholes], [[x] for x in inputs[unit]]
        dys = add_gradients_(wire, *given, dys, [[mine[unit]] for mine in sums])
        del wholes, given


def _window(wire: Any, shards: Any, xs: Any, dy_of: Any, sums: Any) -> None:
    """The last two units stay, in each direction."""
    together, inputs, units = Collectives(wire), [list(xs)], range(len(shards[0]))
    window: deque[list[Tensor]] = deque(maxlen=2)

    def gathered(unit: int) -> list[Tensor]:
        window.append(together.all_gather([mine[unit] for mine in shards]))
        return window[-1]

    for unit in units:
        inputs.append([forward_of(w, x) for w, x in zip(gathered(unit), inputs[-1], strict=True)])
    dys = [dy_of(y) for y in inputs[-1]]
    for unit in reversed(units):
        given = [[w] for w in gathered(unit)], [[x] for x in inputs[unit]]
        dys = add_gradients_(wire, *given, dys, [[mine[unit]] for mine in sums])
        del given


def _own_shard_alone(wire: Any, shards: Any, xs: Any, dy_of: Any, sums: Any) -> None:
    """Each rank takes its own piece for the whole, R times."""
    units, inputs = range(len(shards[0])), [list(xs)]
    wholes = [[s.repeat(len(shards)) for s in mine] for mine in shards]
    for unit in units:
        inputs.append([forward_of(w[unit], x) for w, x in zip(wholes, inputs[-1], strict=True)])
    dys = [dy_of(y) for y in inputs.pop()]
    add_gradients_(wire, wholes, [list(x) for x in zip(*inputs, strict=True)], dys, sums)


_PASS = Exercise(
    id="12.4",
    title="Stage 3: weights in shards",
    minutes=18,
    difficulty=4,
    hints=(
        "Forward, for each unit: gather its weights, note its inputs, run it at every rank, and "
        "let go of the weights. Backward, in reverse: gather them again, and let add_gradients_ "
        "do what it does, for one unit.",
        "add_gradients_ takes a list of units for each rank: hand it lists of one, [[w] for w in "
        "wholes]. It returns the dys of the unit before. A name holds what it names until it is "
        "given something else, and so does the variable of a loop when the loop is over: del "
        "wholes before the next gather.",
        "for unit in units: wholes = together.all_gather([mine[unit] for mine in shards]); "
        "inputs.append([forward_of(w, x) for w, x in zip(wholes, inputs[-1])]); del wholes. dys = "
        "[dy_of(y) for y in inputs[-1]]. for unit in reversed(units): gather again, call "
        "add_gradients_ with [[w] for w in wholes], [[x] for x in inputs[unit]] and this unit's "
        "sums, and let go of everything whole.",
    ),
    reference=sharded_pass,
    check=_check_pass,
    wrong_answers=(
        WrongAnswer(
            _pass_but(keep="in forward", gathered_again=False),
            "The weights are kept from forward to backward, so all of them are there at once: "
            "FSDP2's reshard_after_forward=False, two passes and no stage 3.",
        ),
        WrongAnswer(
            _pass_but(keep="in forward"),
            "Whole weights of all units are kept though they are gathered again: let go of each.",
        ),
        WrongAnswer(
            _pass_but(extra=1), "Weights are gathered more often than once in each direction."
        ),
        WrongAnswer(
            _own_shard_alone, "A rank has one piece of each unit: the others must be gathered."
        ),
        WrongAnswer(
            _pass_but(
                add=_gradients_but(
                    reduce=lambda wire, wholes: [
                        w.chunk(len(wholes))[r] for r, w in enumerate(wholes)
                    ]
                )
            ),
            "Gradients stay at the rank that made them: a rank's piece wants those of all ranks.",
        ),
        WrongAnswer(
            _pass_but(dy=lambda dy_of, y: y),
            "The outputs themselves are taken for their gradients: dy_of(y).",
        ),
        WrongAnswer(
            lambda wire, shards, xs, dy_of, sums: None,
            "Nothing has reached them: is there a backward pass, and does it add in place? What is "
            "put into a list of your own is not put into sums.",
        ),
        WrongAnswer(
            _pass_but(whole_sums=True),
            "add_gradients_ was handed sums of all units, and took the first for each: of lists "
            "of one unit, [[mine[unit]] for mine in sums].",
        ),
        WrongAnswer(
            _pass_but(inputs_of=lambda inputs, unit: inputs[unit + 1]),
            "Off by one: what a unit was given in forward is wanted, not what came out of it.",
        ),
        WrongAnswer(
            _pass_but(last_once=True),
            "The last unit is gathered once: a sound thought, for its backward follows at once. "
            "Here each is to be gathered twice, so that 3 passes can be counted.",
        ),
        WrongAnswer(
            _pass_but(lets_go=(False, False)),
            "The unit before is still whole while the next is gathered, for a name holds it: del "
            "it first, and every list that it is in.",
        ),
        WrongAnswer(
            _pass_but(keeps_one=True),
            "The variable of a loop, or another name, still has the last rank's whole when the "
            "next unit is gathered: del it, too.",
        ),
        WrongAnswer(
            _pass_but(lets_go=(True, False)),
            "Forward lets go of its units, and backward does not: del wholes, and every list that "
            "they were put into.",
        ),
        WrongAnswer(
            _gathered_ahead,
            "The next unit is gathered before this one has run, as production does it to hide the "
            "wire: it costs a second whole unit, and one was asked for.",
        ),
        WrongAnswer(
            _window, "Two units stay beside the one that is gathered: let go of each at once."
        ),
    ),
)

# ------------------------------------------------------------------ 12.5: held and sent


def _check_formula(answer: Callable[..., tuple[int, int]]) -> str:
    for stage in (3, 0, 1, 2):
        for parameters, ranks, K, k in ((80, 4, 12, 1), (80, 4, 8, 3), (10, 4, 12, 1)):
            _check_held(answer, parameters, ranks, stage, K, k)
    for stage in range(4):
        for parameters, ranks, K, k in ((7_000_000_000, 8, 4, 16), (12_345, 64, 12, 2)):
            _check_held(answer, parameters, ranks, stage, K, k)
        _check_held(answer, 1000, 1, stage, 12, 1)
    return "4 stages · ⌈Ψ/R⌉ to a rank, padding held and sent · k micro-batches"


@contextmanager
def _without_the_librarys(call: str) -> Iterator[None]:
    """Both formulas of memlab.zero round up by `ceil_div`, which refuses until then."""

    def refused(*_: Any) -> None:
        raise Wrong(f"{call} asked model_state_bytes or communication_bytes; wanted your own.")

    kept, formulas.ceil_div = formulas.ceil_div, refused
    try:
        yield
    finally:
        formulas.ceil_div = kept


def _check_held(
    answer: Callable[..., Any], parameters: int, ranks: int, stage: int, K: int, k: int
) -> None:
    call = f"held_and_sent({parameters}, ranks={ranks}, stage={stage}, K={K}, k={k})"
    with _without_the_librarys(call):
        got = answer(parameters, ranks, stage, K, k)
    require(
        isinstance(got, tuple) and len(got) == 2,
        f"{call} gave {type(got).__name__}; wanted two numbers, held and sent."
        f"{' Is there a return?' if got is None else ''}",
    )
    recipe = {"ranks": ranks, "stage": stage}
    held = model_state_bytes(parameters, optimizer_bytes=K, **recipe)
    equal(f"{call}, held,", got[0], held, "bytes")
    sent = communication_bytes(parameters, micro_batches=k, **recipe)
    equal(f"{call}, sent,", got[1], sent, "bytes")


def _formula_but(
    shard_of: Callable[[int, int], int] = lambda n, ranks: -(-n // ranks),
    passes: Callable[[int], tuple[int, ...]] = lambda k: (2, 2, k + 1, 3 * k),
    first: Sequence[int] = (1, 2, 3),
    ring: Callable[[int, int, int], int] = lambda n, ranks, shard: (ranks - 1) * shard,
    state: Callable[[int], int] = lambda K: K,
    element: int = 2,
) -> Any:
    """The right one, with something in it that is not."""

    def answer(parameters: int, ranks: int, stage: int, K: int, k: int) -> tuple[int, int]:
        shard = shard_of(parameters, ranks)
        sizes = zip((state(K), 2, 2), first, strict=True)
        held = sum(size * (shard if stage >= since else parameters) for size, since in sizes)
        return held, element * passes(k)[stage] * ring(parameters, ranks, shard)

    return answer


def _the_librarys(parameters: int, ranks: int, stage: int, K: int, k: int) -> tuple[int, int]:
    recipe = {"ranks": ranks, "stage": stage}
    return (
        model_state_bytes(parameters, optimizer_bytes=K, **recipe),
        communication_bytes(parameters, micro_batches=k, **recipe),
    )


_FORMULA = Exercise(
    id="12.5",
    title="What a rank holds, and sends",
    minutes=10,
    difficulty=2,
    hints=(
        "With s = ⌈Ψ/R⌉, each of the three (weights, gradients, state) is Ψ or s numbers: from its "
        "stage on it is s. A pass of a collective sends (R − 1) · s numbers of 2 bytes.",
        "Passes: stages 0 and 1 add up at home and reduce once, and gather once (2, whatever k "
        "is). Stage 2 reduces in every backward pass. Stage 3 gathers in every forward and every "
        "backward pass, and reduces.",
        "s = -(-parameters // ranks); held = 2 * (s if stage == 3 else parameters) + 2 * (s if "
        "stage >= 2 else parameters) + K * (s if stage >= 1 else parameters). sent has (2, 2, k + "
        "1, 3 * k)[stage] passes.",
    ),
    reference=held_and_sent,
    check=_check_formula,
    wrong_answers=(
        WrongAnswer(
            _formula_but(shard_of=lambda n, ranks: n // ranks),
            "The padding is forgotten: a shard has ⌈Ψ/R⌉ numbers, rounded up.",
        ),
        WrongAnswer(
            _formula_but(passes=lambda k: (2, 2, k + 1, 2 * k)),
            "Stage 3 in two passes: it gathers in forward, again in backward, and then reduces.",
        ),
        WrongAnswer(
            _formula_but(passes=lambda k: (1, 1, k, 3 * k)),
            "An all-reduce is two passes, a reduce-scatter and an all-gather.",
        ),
        WrongAnswer(
            _formula_but(passes=lambda k: (2, 3, k + 2, 3 * k)),
            "Stage 1 reduces to shards, not to all: reduce-scatter and all-gather, two passes.",
        ),
        WrongAnswer(
            _formula_but(passes=lambda k: (2, 2, 2, 3 * k)),
            "Stage 2 has nowhere to add up whole gradients: it reduces in every backward pass.",
        ),
        WrongAnswer(
            _formula_but(passes=lambda k: (2, 2, 2 * k, 3 * k)),
            "Stage 2 reduces k times, and gathers the stepped weights once: k + 1 passes.",
        ),
        WrongAnswer(
            _the_librarys, "They are what this exercise builds: two sums of products, by you."
        ),
        WrongAnswer(
            _formula_but(passes=lambda k: (2, 2, k + 1, 3)),
            "Stage 3 gathers and reduces for every one of the k micro-batches.",
        ),
        WrongAnswer(
            _formula_but(passes=lambda k: (2 * k, 2 * k, 2 * k, 3 * k)),
            "Micro-batches add up at home in stages 0 and 1; weights change once a step, and are "
            "gathered once in stage 2.",
        ),
        WrongAnswer(
            _formula_but(ring=lambda n, ranks, shard: ranks * shard),
            "A rank keeps its own piece: it sends R − 1 of R.",
        ),
        WrongAnswer(
            _formula_but(ring=lambda n, ranks, shard: n * (ranks - 1) // ranks),
            "The padding is sent, too: (R − 1) shards.",
        ),
        WrongAnswer(_formula_but(element=1), "These are numbers; each has 2 bytes."),
        WrongAnswer(
            _formula_but(state=lambda K: 12), "K is given: 12 bytes a weight is one case of it."
        ),
        WrongAnswer(
            _formula_but(first=(2, 2, 3)), "The optimizer's state is in shards from stage 1 on."
        ),
        WrongAnswer(
            _formula_but(first=(1, 1, 1)),
            "Every stage shards everything: that is stage 3; 1 and 2 keep weights whole.",
        ),
    ),
)


# The bill's machine has one GPU, and nobody to share with: the line is that of the day before.
DAY = Day(
    exercises=(_COLLECTIVES, _ADAM, _GRADIENTS, _PASS, _FORMULA),
    bill=Bill("day 12: one GPU, nobody to share with", in_chunks),
)
