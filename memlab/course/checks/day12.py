"""Day 12: sharding with ZeRO."""

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate as running_sums
from typing import Any

import torch
from torch import Tensor, nn

from memlab.course.checks.day11 import in_chunks
from memlab.course.exercises import Bill, Day, Exercise, Wrong, equal, require
from memlab.course.solutions import body, mistakes, solution
from memlab.internals.torch_internals import TorchDispatchMode, disable_current_modes, tree_leaves
from memlab.metering import measure
from memlab.reference.collectives import Collectives, Wire
from memlab.reference.sharded_optimizer import ShardedAdam
from memlab.reference.sharded_weights import (
    add_gradients_,
    backward_of,
    forward_of,
    sharded_pass,
)
from memlab.trace import Trace
from memlab.zero import communication_bytes, formulas, model_state_bytes

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


_THROUGH_0 = """
total = wholes[0].clone()
for source, whole in list(enumerate(wholes))[1:]:
    total += self.wire.send(source, 0, whole)
first, *others = total.chunk(len(wholes))
return [first.clone(), *(self.wire.send(0, r, x) for r, x in enumerate(others, 1))]
"""
_FROM_0 = """
others = [self.wire.send(s, 0, x) for s, x in enumerate(shards) if s]
whole = torch.cat([shards[0], *others])
return [whole, *(self.wire.send(0, rank, whole) for rank in range(1, len(shards)))]
"""
_ZERO_FILLED = """
ranks, wide = range(len(shards)), []
for rank, shard in enumerate(shards):
    pieces = [torch.zeros_like(shard) for _ in ranks]
    pieces[rank] = shard
    wide.append(torch.cat(pieces))
return [
    sum(wide[s] if s == rank else self.wire.send(s, rank, wide[s]) for s in ranks)
    for rank in ranks
]
"""

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
    wrong_answers=mistakes(
        "12.1",
        (
            "Everything goes by way of rank 0, which sends and receives for all.",
            body("Collectives.reduce_scatter", _THROUGH_0),
        ),
        (
            "A rank needs one piece of the sum: send it that piece of yours, not the whole.",
            ("whole.chunk(len(wholes))[rank]", "whole"),
            ("append(total)", "append(total.chunk(len(wholes))[rank].clone())"),
        ),
        (
            "As many numbers as the whole has, at every rank, where one piece of the sum was asked "
            "for; whole sums for all are an all-reduce.",
            ("return shards", "return self.all_gather(shards)"),
        ),
        (
            "Tensors of other ranks are out of reach: they come by the wire.",
            body("Collectives.reduce_scatter", "return list(sum(wholes).chunk(len(wholes)))"),
        ),
        (
            "Pieces of other ranks must be sent before they can be put together.",
            body("Collectives.all_gather", "return [torch.cat(shards) for _ in shards]"),
        ),
        (
            "A rank has its own piece: it sends nothing to itself.",
            ("if source != rank:\n                    piece", "piece"),
        ),
        (
            "This is the mean; a collective adds, and who wants a mean divides.",
            ("append(total)", "append(total / len(wholes))"),
        ),
        (
            "Each rank has a neighbour's piece: piece r belongs to rank r.",
            ("[rank]\n", "[rank - 1]\n"),
        ),
        (
            "The sum is written into a rank's gradients: chunk gives views of them.",
            ("total = 0", "total = wholes[rank].chunk(len(wholes))[rank]"),
            ("total = total + piece", "total += 0 if source == rank else piece"),
        ),
        (
            "Rank 0 sends the whole to each other rank, while the wires of the others lie idle.",
            body("Collectives.all_gather", _FROM_0),
        ),
        (
            "Each rank sends a tensor as long as the whole: its piece is enough, which the others "
            "put in its place.",
            body("Collectives.all_gather", _ZERO_FILLED),
        ),
        (
            "One tensor, R times in a list: it lies at one rank alone.",
            ("return wholes", "return wholes[:1] * len(shards)"),
        ),
        (
            "Pieces stand in the order of the ranks, at every rank alike.",
            ("torch.cat(pieces)", "torch.cat([pieces.pop(rank), *pieces])"),
        ),
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


_REDUCED = "together.reduce_scatter([self.padded(g) for g in gradients])"
_TO_ALL = f"together.all_gather({_REDUCED})"
_SUMMED = "self.wire.sum(s.grad.square().sum() for s in self.shards)"
_MEAN = "total.float() / self.ranks"
_FACTOR = "min(1, max_norm / (norm + 1e-6))"
_CLIPPED = f"shard.grad *= {_FACTOR}"
_WRITTEN = "w.copy_(whole[: len(w)])"
_OPTIMIZERS = (
    "self.optimizers = [torch.optim.AdamW([s], lr=lr, foreach=False) for s in self.shards]"
)
_OWN_ALONE = """for rank, (w, mine) in enumerate(zip(self.weights, stepped)):
            own = w[rank * len(mine) : (rank + 1) * len(mine)]
            own.copy_(mine[: len(own)])"""

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
    wrong_answers=mistakes(
        "12.2",
        (
            "This is plain AdamW, whole at every rank: an optimizer gets its rank's piece alone.",
            ("self.padded(w).chunk(self.ranks)[rank]", "w"),
            (_REDUCED, f"[s[: len(w)] for w, s in zip(self.weights, {_TO_ALL}, strict=True)]"),
            (_SUMMED, "self.wire.sum([self.shards[0].grad.square().sum()])"),
            ("together.all_gather(stepped)", "stepped"),
        ),
        (
            "Gradients are all-reduced, and weights gathered as well: three passes, and two are "
            "enough, for a rank needs the sum of its own piece alone.",
            (_REDUCED, f"[s.chunk(self.ranks)[r] for r, s in enumerate({_TO_ALL})]"),
        ),
        (
            "Each rank clips by the norm of its own shard: the norm is that of all shards.",
            (_CLIPPED, f"norm = shard.grad.norm()\n            {_CLIPPED}"),
        ),
        (
            "No rank knows the squares of the others: wire.sum adds them.",
            (_SUMMED, "sum(s.grad.square().sum().item() for s in self.shards)"),
        ),
        (
            "Once for all ranks is enough: wire.sum gives every rank the same.",
            (f"norm = {_SUMMED} ** 0.5", "squares = [s.grad.square().sum() for s in self.shards]"),
            (_CLIPPED, f"norm = self.wire.sum(squares) ** 0.5\n            {_CLIPPED}"),
        ),
        (
            "Norms don't add; their squares do.",
            (f"{_SUMMED} ** 0.5", "self.wire.sum(s.grad.norm() for s in self.shards)"),
        ),
        (
            "The padding is forgotten: n // R leaves the last weights to nobody.",
            (
                "nn.functional.pad(x, (0, -len(x) % self.ranks))",
                "x[: len(x) // self.ranks * self.ranks]",
            ),
            (_WRITTEN, "w[: len(whole)].copy_(whole)"),
        ),
        (
            "R divides these weights, so nothing is missing: R - n % R pads a whole R there, and "
            "-n % R is 0.",
            ("-len(x) % self.ranks", "self.ranks - len(x) % self.ranks"),
        ),
        (
            "The zeros are in front: a weight is then another place in the whole. They belong "
            "behind, where whole[:n] cuts them off.",
            ("(0, -len(x) % self.ranks)", "(-len(x) % self.ranks, 0)"),
        ),
        (
            "The sum arrives in bfloat16, and the copy is in float32: total.float() / R.",
            (_MEAN, "total / self.ranks"),
        ),
        (
            "The mean is taken in bfloat16, and rounded: first float(), then / R.",
            (_MEAN, "(total / self.ranks).float()"),
        ),
        (
            "Of float32 weights .float() is no copy: the shard is a view, and keeps the whole "
            "alive. to(torch.float32, copy=True) is one, and so is .clone().",
            (", copy=True", ""),
        ),
        (
            "Where all gradients are zero, so is the norm: max_norm / (norm + 1e-6).",
            ("(norm + 1e-6)", "norm"),
        ),
        (
            "Into the list a new tensor is put, and into the rank's weights nothing written: "
            "weights[r].copy_(…).",
            (_WRITTEN, f"{_WRITTEN}\n        self.weights[:] = [w.clone() for w in self.weights]"),
        ),
        (
            "This is Adam, without the weight decay that is torch.optim.AdamW's by default.",
            ("optim.AdamW", "optim.Adam"),
        ),
        (
            "The betas are others: torch.optim.AdamW([copy], lr=lr, foreach=False), and nothing "
            "else set.",
            ("lr=lr,", "lr=lr, betas=(0.9, 0.95),"),
        ),
        (
            "The sum of the ranks' gradients, not the mean: R times too long before it is clipped.",
            (_MEAN, "total.float()"),
        ),
        (
            "Short gradients are made longer: the factor is at most 1.",
            (_FACTOR, "max_norm / (norm + 1e-6)"),
        ),
        ("Nothing is clipped to max_norm.", (_CLIPPED, "pass")),
        (
            "Every rank has stepped its own piece alone: the others' have to be gathered.",
            (
                "for w, whole in zip(self.weights, together.all_gather(stepped), strict=True):"
                f"\n            {_WRITTEN}",
                _OWN_ALONE,
            ),
        ),
        (
            "Weights travel in float32: twice the bytes, and rounded when they arrive.",
            (".to(self.weights[0].dtype)", ""),
        ),
        (
            "Each rank steps by its own gradients: those of the others have to be added.",
            (
                _REDUCED,
                "[self.padded(g).chunk(self.ranks)[r] * self.ranks for r, g in "
                "enumerate(gradients)]",
            ),
        ),
        (
            "A new optimizer in each step has no moments: make it in the constructor.",
            (_OPTIMIZERS, f"self.lr = lr\n        {_OPTIMIZERS}"),
            (
                "        stepped =",
                f"        {_OPTIMIZERS.replace('=lr', '=self.lr')}\n        stepped =",
            ),
        ),
        (
            "The shard is in bfloat16: small steps are lost; a float32 copy keeps them (Day 4).",
            ("torch.float32", "torch.bfloat16"),
            (_MEAN, f"({_MEAN}).bfloat16()"),
        ),
        (
            "What is gathered are Parameters, and autograd follows them into the weights.",
            ("s.detach()", "s"),
        ),
        (
            "Four bytes a number too many: is the shard's gradient still there after the step?",
            ("            shard.grad = None\n", ""),
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


_ALL_THEN_REDUCED = """
dys, together, units = list(dys), Collectives(wire), range(len(weights[0]))
found = {}
for unit in reversed(units):
    found[unit] = []
    for rank, dy in enumerate(dys):
        dw, dys[rank] = backward_of(weights[rank][unit], inputs[rank][unit], dy)
        found[unit].append(dw)
for unit in units:
    for rank, shard in enumerate(together.reduce_scatter(found[unit])):
        sums[rank][unit] += shard
return dys
"""
_OF_WHOLES = "together.reduce_scatter(wholes)"
_NEVER_SENT = (
    f"enumerate({_OF_WHOLES}):",
    "enumerate([w.chunk(len(wholes))[r] for r, w in enumerate(wholes)]):",
)
_ADDED = "sums[rank][unit] += shard"

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
    wrong_answers=mistakes(
        "12.3",
        (
            "All gradients are made before the first is reduced: that is stage 1, and holds them "
            "all.",
            body("add_gradients_", _ALL_THEN_REDUCED),
        ),
        (
            "Every rank gets all sums and cuts out its own: an all-reduce, twice the bytes.",
            (
                _OF_WHOLES,
                f"[s.chunk(len(sums))[r] for r, s in enumerate(together.all_gather({_OF_WHOLES}))]",
            ),
        ),
        (
            "Each rank keeps a piece of its own gradients: those of the other ranks are missing.",
            _NEVER_SENT,
        ),
        (
            "What earlier micro-batches have left in sums is overwritten: add to it.",
            (_ADDED, "sums[rank][unit].copy_(shard)"),
        ),
        (
            "The list has a new tensor, and the one that was handed over no sum: add in place.",
            (_ADDED, "sums[rank][unit] = sums[rank][unit] + shard"),
        ),
        (
            "Backward begins with the last unit.",
            ("reversed(range(len(weights[0])))", "range(len(weights[0]))"),
        ),
        (
            "Every unit is handed the gradient of the last one's output: what a unit gives as "
            "gradient of x is for the unit before.",
            ("dys, together = list(dys)", "handed, dys, together = dys, list(dys)"),
            ("inputs[rank][unit], dy)", "inputs[rank][unit], handed[rank])"),
        ),
        (
            "The list of dys that was handed over is written over: make one of your own.",
            ("list(dys)", "dys"),
        ),
        ("The gradients of the inputs are not returned.", ("return dys", "return None")),
        (
            "This is the mean: 12.2 divided by R once, in the step. Here sums are asked for.",
            (_ADDED, f"{_ADDED} / 2"),
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


_GATHERED = "together.all_gather([mine[unit] for mine in shards])"
_AGAIN = f"wholes = {_GATHERED}\n        given"  # as backward has it
_BEGUN = "together, inputs, units ="
_LET_GO, _LET_GO_IN_BACKWARD = "        del wholes\n", "        del wholes, given"
# As production does it.
_GATHERED_AHEAD = """
together, inputs, units = Collectives(wire), [list(xs)], range(len(shards[0]))

def gathered(unit):
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
"""
_WINDOW = """
together, inputs, units, window = Collectives(wire), [list(xs)], range(len(shards[0])), []

def gathered(unit):
    window.append(together.all_gather([mine[unit] for mine in shards]))
    del window[:-2]
    return window[-1]

for unit in units:
    inputs.append([forward_of(w, x) for w, x in zip(gathered(unit), inputs[-1], strict=True)])
dys = [dy_of(y) for y in inputs[-1]]
for unit in reversed(units):
    given = [[w] for w in gathered(unit)], [[x] for x in inputs[unit]]
    dys = add_gradients_(wire, *given, dys, [[mine[unit]] for mine in sums])
    del given
"""
_OWN_SHARD_ALONE = """
units, inputs = range(len(shards[0])), [list(xs)]
wholes = [[s.repeat(len(shards)) for s in mine] for mine in shards]
for unit in units:
    inputs.append([forward_of(w[unit], x) for w, x in zip(wholes, inputs[-1], strict=True)])
dys = [dy_of(y) for y in inputs.pop()]
add_gradients_(wire, wholes, [list(x) for x in zip(*inputs, strict=True)], dys, sums)
"""

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
    wrong_answers=mistakes(
        "12.4",
        (
            "The weights are kept from forward to backward, so all of them are there at once: "
            "FSDP2's reshard_after_forward=False, two passes and no stage 3.",
            (_BEGUN, f"kept = {{}}\n    {_BEGUN}"),
            (_LET_GO, "        kept[unit] = wholes\n"),
            (_AGAIN, "wholes = kept[unit]\n        given"),
        ),
        (
            "Whole weights of all units are kept though they are gathered again: let go of each.",
            (_BEGUN, f"kept = {{}}\n    {_BEGUN}"),
            (_LET_GO, "        kept[unit] = wholes\n"),
        ),
        (
            "Weights are gathered more often than once in each direction.",
            ("wholes = together", f"{_GATHERED}\n        wholes = together"),
        ),
        (
            "A rank has one piece of each unit: the others must be gathered.",
            body("sharded_pass", _OWN_SHARD_ALONE),
        ),
        (
            "Gradients stay at the rank that made them: a rank's piece wants those of all ranks.",
            _NEVER_SENT,
        ),
        (
            "The outputs themselves are taken for their gradients: dy_of(y).",
            ("dy_of(y) for", "y for"),
        ),
        (
            "Nothing has reached them: is there a backward pass, and does it add in place? What is "
            "put into a list of your own is not put into sums.",
            body("sharded_pass", "return None"),
        ),
        (
            "add_gradients_ was handed sums of all units, and took the first for each: of lists "
            "of one unit, [[mine[unit]] for mine in sums].",
            ("[[mine[unit]] for mine in sums]", "sums"),
        ),
        (
            "Off by one: what a unit was given in forward is wanted, not what came out of it.",
            ("in inputs[unit]]", "in inputs[unit + 1]]"),
        ),
        (
            "The last unit is gathered once: a sound thought, for its backward follows at once. "
            "Here each is to be gathered twice, so that 3 passes can be counted.",
            (_LET_GO, f"        last = [wholes] if unit == units[-1] else []\n{_LET_GO}"),
            (_AGAIN, f"wholes = last.pop() if last else {_GATHERED}\n        given"),
        ),
        (
            "The unit before is still whole while the next is gathered, for a name holds it: del "
            "it first, and every list that it is in.",
            (_LET_GO_IN_BACKWARD, ""),
            (_LET_GO, ""),
        ),
        (
            "The variable of a loop, or another name, still has the last rank's whole when the "
            "next unit is gathered: del it, too.",
            (_LET_GO, f"        w = wholes[-1]\n{_LET_GO}"),
        ),
        (
            "Forward lets go of its units, and backward does not: del wholes, and every list that "
            "they were put into.",
            (_LET_GO_IN_BACKWARD, ""),
        ),
        (
            "The next unit is gathered before this one has run, as production does it to hide the "
            "wire: it costs a second whole unit, and one was asked for.",
            body("sharded_pass", _GATHERED_AHEAD),
        ),
        (
            "Two units stay beside the one that is gathered: let go of each at once.",
            body("sharded_pass", _WINDOW),
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


_PASSES = "(2, 2, k + 1, 3 * k)"
_SHARD = "-(-parameters // ranks)"
_OF_STATE = "K * (shard if stage >= 1"
_BY_THE_LIBRARY = """
from memlab.zero import communication_bytes, model_state_bytes
recipe = {"ranks": ranks, "stage": stage}
return (
    model_state_bytes(parameters, optimizer_bytes=K, **recipe),
    communication_bytes(parameters, micro_batches=k, **recipe),
)
"""

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
    reference=solution("12.5"),
    check=_check_formula,
    wrong_answers=mistakes(
        "12.5",
        (
            "The padding is forgotten: a shard has ⌈Ψ/R⌉ numbers, rounded up.",
            (_SHARD, "parameters // ranks"),
        ),
        (
            "Stage 3 in two passes: it gathers in forward, again in backward, and then reduces.",
            (_PASSES, "(2, 2, k + 1, 2 * k)"),
        ),
        (
            "An all-reduce is two passes, a reduce-scatter and an all-gather.",
            (_PASSES, "(1, 1, k, 3 * k)"),
        ),
        (
            "Stage 1 reduces to shards, not to all: reduce-scatter and all-gather, two passes.",
            (_PASSES, "(2, 3, k + 2, 3 * k)"),
        ),
        (
            "Stage 2 has nowhere to add up whole gradients: it reduces in every backward pass.",
            (_PASSES, "(2, 2, 2, 3 * k)"),
        ),
        (
            "Stage 2 reduces k times, and gathers the stepped weights once: k + 1 passes.",
            (_PASSES, "(2, 2, 2 * k, 3 * k)"),
        ),
        (
            "They are what this exercise builds: two sums of products, by you.",
            body("held_and_sent", _BY_THE_LIBRARY),
        ),
        (
            "Stage 3 gathers and reduces for every one of the k micro-batches.",
            (_PASSES, "(2, 2, k + 1, 3)"),
        ),
        (
            "Micro-batches add up at home in stages 0 and 1; weights change once a step, and are "
            "gathered once in stage 2.",
            (_PASSES, "(2 * k, 2 * k, 2 * k, 3 * k)"),
        ),
        (
            "A rank keeps its own piece: it sends R − 1 of R.",
            ("(ranks - 1) * shard", "ranks * shard"),
        ),
        (
            "The padding is sent, too: (R − 1) shards.",
            ("(ranks - 1) * shard", "(parameters * (ranks - 1) // ranks)"),
        ),
        ("These are numbers; each has 2 bytes.", ("held, 2 * passes", "held, passes")),
        (
            "K is given: 12 bytes a weight is one case of it.",
            (_OF_STATE, "12 * (shard if stage >= 1"),
        ),
        (
            "The optimizer's state is in shards from stage 1 on.",
            (_OF_STATE, "K * (shard if stage >= 2"),
        ),
        (
            "Every stage shards everything: that is stage 3; 1 and 2 keep weights whole.",
            ("stage == 3", "stage >= 1"),
            ("stage >= 2", "stage >= 1"),
        ),
    ),
)


# The bill's machine has one GPU, and nobody to share with: the line is that of the day before.
DAY = Day(
    exercises=(_COLLECTIVES, _ADAM, _GRADIENTS, _PASS, _FORMULA),
    bill=Bill("day 12: one GPU, nobody to share with", in_chunks),
)
