"""Day 12: sharding with ZeRO."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate as running_sums
from typing import Any

import torch
from torch import Tensor, nn

from memlab.course.bill_steps import in_chunks
from memlab.course.exercises import Bill, Day, Wrong, distinct, equal, require
from memlab.course.properties import (
    differences,
    distinct_elements,
    is_tuple,
    limited_outside_of_tensors,
    most_alive,
    require_none_wrong,
    rough,
)
from memlab.course.solutions import checked
from memlab.internals.torch_internals import TorchDispatchMode, disable_current_modes, tree_leaves
from memlab.metering import measure
from memlab.reference.collectives import Collectives, Communicator
from memlab.reference.sharded_optimizer import ShardedAdam
from memlab.reference.sharded_weights import add_gradients_, backward_of, forward_of, sharded_pass
from memlab.trace import Trace
from memlab.zero import communication_bytes, model_state_bytes

# ------------------------------------------------------------------ simulated ranks


class RankTracker(TorchDispatchMode):
    """Tracks the rank of each tensor. The result of an operator is on the rank of its arguments.

    An operator on tensors of two ranks is Wrong, as on two GPUs. Storages are kept alive, so that
    no address is reused.
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
        ranks = sorted({rank for x in given if (rank := self.rank_of(x)) is not None})
        if len(ranks) > 1:
            raise Wrong(
                f"{func.__name__.split('.')[0]} was called on tensors of rank {ranks[0]} and of "
                f"rank {ranks[1]}. Send one of them first: comm.send(source, target, tensor)."
            )
        made = func(*args, **kwargs or {})
        if ranks:
            self.place(ranks[0], *given, *_tensors(made))
        return made


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class CheckedCommunicator(Communicator):
    """A communicator that sends only tensors of the source rank."""

    def __init__(self, ranks: int, tracker: RankTracker) -> None:
        super().__init__(ranks)
        self.dtypes: set[torch.dtype] = set()
        self.last_sum = 0.0
        self.tracker = tracker

    def send(self, source: int, target: int, tensor: Tensor) -> Tensor:
        call = f"comm.send(source={source}, target={target}, tensor)"
        ranks = range(len(self.sent))
        require(
            source in ranks and target in ranks and isinstance(tensor, Tensor),
            f"{call}: wanted two ranks from 0 to {len(ranks) - 1}, and a tensor.",
        )
        rank = self.tracker.rank_of(tensor)
        require(rank in (None, source), f"{call}: this tensor is on rank {rank}.")
        self.dtypes.add(tensor.dtype)
        with disable_current_modes():
            arrived = super().send(source, target, tensor)
        self.tracker.place(target, arrived)
        return arrived

    def sum(self, values: Iterable[float]) -> float:
        self.last_sum = super().sum(values)
        return self.last_sum


@contextmanager
def _placed(lists: Sequence[Any]) -> Iterator[CheckedCommunicator]:
    """A communicator between ranks. Entry r of each list is on rank r."""
    tracker = RankTracker()
    for of_ranks in lists:
        for rank, held in enumerate(of_ranks):
            tracker.place(rank, *_tensors(held))
    with tracker:
        yield CheckedCommunicator(len(lists[0]), tracker)


def _require_sent(call: str, sent: Sequence[int], wanted: int) -> None:
    """Require that each rank sent the same number of bytes."""
    got = max(sent, key=lambda n: abs(n - wanted))
    who = "each rank" if len(set(sent)) == 1 else f"rank {sent.index(got)}"
    require(got == wanted, f"{call}: {who} sent {got:,} bytes; each rank should send {wanted:,}.")


def _require_tensors(call: str, got: Any, like: Sequence[Tensor]) -> None:
    require(
        isinstance(got, list) and all(isinstance(x, Tensor) for x in got),
        f"{call} gave {type(got).__name__}; wanted a list with one tensor per rank."
        f"{' Is there a return?' if got is None else ''}",
    )
    wanted = [tuple(x.shape) for x in like]
    shapes = [tuple(x.shape) for x in got]
    require(
        shapes == wanted, f"{call} gave tensors of shapes {str(shapes)[:100]}; wanted {wanted}."
    )
    for x, other in zip(got, like, strict=True):
        require(x.dtype == other.dtype, f"{call} gave {x.dtype}; wanted {other.dtype}.")


def _require_close(what: str, got: Tensor, wanted: Tensor) -> None:
    off = differences(got, wanted) > 1e-9 * wanted.abs().max()
    require_none_wrong(what.rstrip(","), got, wanted, off)


# ------------------------------------------------------------------ 12.1: the collectives

COLLECTIVE_SIZES = (  # ranks, length of the whole, dtype
    (3, 6, torch.float32),
    (2, 4, torch.float32),
    (1, 3, torch.float32),
    (4, 32, torch.bfloat16),
    (5, 10, torch.float64),
)


def _wholes(ranks: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Integers, so that a sum is exact in any order. Rank 0 has 1, 2, 3, …"""
    first = torch.arange(1, length + 1)
    return [((first + rank * 10) % 31).to(dtype) for rank in range(ranks)]


def _check_collectives(answer: Any) -> str:
    for ranks, length, dtype in COLLECTIVE_SIZES:
        wholes = _wholes(ranks, length, dtype)
        call = f"reduce_scatter of {ranks} × {length} elements"
        sums = torch.stack(wholes).sum(0).chunk(ranks)
        _check_collective(answer, "reduce_scatter", call, wholes, list(sums))
        shards = [w[: length // ranks].clone() for w in wholes]
        wanted = [torch.cat(shards) for _ in range(ranks)]
        _check_collective(answer, "all_gather", f"all_gather to {length} elements", shards, wanted)
    _check_own_communicators(answer)
    return (
        "results are exact on 1 to 5 ranks, each on its own rank · in both collectives each rank "
        "sends (R − 1)/R of the whole"
    )


def _check_own_communicators(answer: Any) -> None:
    comms = Communicator(2), Communicator(2)
    first, _ = [answer(comm) for comm in comms]
    first.all_gather([torch.zeros(1), torch.ones(1)])
    require(
        sum(comms[0].sent) > 0 and comms[1].sent == [0, 0],
        "Collectives(a) sends on communicator b after Collectives(b) exists. Keep comm on self.",
    )


def _check_collective(
    answer: Any, method: str, call: str, given: list[Tensor], wanted: list[Tensor]
) -> None:
    before, ranks = [x.clone() for x in given], len(given)
    with _placed([given]) as comm:
        made = answer(comm)
        kind = type(made).__name__
        require(hasattr(made, method), f"Collectives(comm) gave {kind}; it has no {method}.")
        got = getattr(made, method)(given)
        _require_tensors(call, got, wanted)
        for rank, x in enumerate(got):
            at = comm.tracker.rank_of(x)
            require(at == rank, f"{call}: entry {rank} of the result is on rank {at}.")
    for rank in range(ranks):
        require(
            torch.equal(given[rank], before[rank]),
            f"{call} changed the tensor that it was given from rank {rank}.",
        )
        _require_result(call, rank, before, got[rank], wanted[rank])
        got[rank].add_(1)
    for rank in range(ranks):
        require(
            torch.equal(given[rank], before[rank]),
            f"{call}: the result of rank {rank} is a view of its argument; wanted a new tensor.",
        )
    whole = max(x.nbytes for x in (*given, *wanted))
    _require_sent(call, comm.sent, whole * (ranks - 1) // ranks)


def _require_result(call: str, rank: int, given: list[Tensor], got: Tensor, wanted: Tensor) -> None:
    mine, right = distinct_elements(got, wanted, most=12)
    require(
        torch.equal(got, wanted),
        f"{call}: {', '.join(map(_elements, given))[:90]} gave rank {rank} {mine}; wanted {right}.",
    )
    kept = got.untyped_storage().nbytes()
    require(
        kept == got.nbytes,
        f"{call}: the result of rank {rank} is a slice that keeps {kept:,} bytes alive; wanted "
        f"{got.nbytes:,}, its own elements only.",
    )


def _elements(x: Tensor) -> str:
    shown = ", ".join(f"{n:g}" for n in x.flatten()[:12].tolist())
    return f"[{shown}{', …' if x.numel() > 12 else ''}]"


# ------------------------------------------------------------------ 12.2: stage 1

LR, LOOSE, TIGHT = 0.01, 100.0, 0.5
ADAM_CASES = (  # ranks, weights, max_norm; then steps, lr, and what gradients are divided by
    *((2, 6, LOOSE), (2, 7, LOOSE), (2, 50, TIGHT), (4, 30, TIGHT), (1, 3, TIGHT)),
    *((3, 10, LOOSE, 4), (5, 13, TIGHT, 4)),  # not powers of 2; gradients of step 4 are zero
    (2, 8, LOOSE, 12, 1.0),  # wrong weight decay or betas differ in bfloat16 after large steps
    (2, 8, 1e-3, 5, 0.3, 16),  # an epsilon of 0.01 differs when norms are 0.01
)
LARGE = 4, 40_003  # ranks, weights


def _copies(ranks: int, n: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The same weights on each rank."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(n, generator=random)
    return [weights.to(dtype, copy=True) for _ in range(ranks)]


def _gradients(
    ranks: int, n: int, step: int, divisor: int = 1, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Gradients whose sums are exact in bfloat16. They are small in even steps, and zero in every
    fourth step."""
    if step % 4 == 0:
        return [torch.zeros(n, dtype=dtype) for _ in range(ranks)]
    random = torch.Generator().manual_seed(step)
    whole = [torch.randint(-8, 9, (n,), generator=random) for _ in range(ranks)]
    return [(w / (divisor * (16 if step % 2 else 128))).to(dtype) for w in whole]


class UnshardedAdamW:
    """AdamW of all weights in float32 in one process, on the mean of the gradients."""

    def __init__(self, weights: Tensor, lr: float) -> None:
        self.weights = nn.Parameter(weights.to(torch.float32, copy=True))
        self.optimizer = torch.optim.AdamW([self.weights], lr=lr, foreach=False)

    def step(self, gradients: list[Tensor], max_norm: float) -> None:
        self.weights.grad = torch.stack(gradients).float().mean(0)
        nn.utils.clip_grad_norm_([self.weights], max_norm, foreach=False)
        self.optimizer.step()


def _check_adam(answer: Any) -> str:
    for case in ADAM_CASES:
        _check_steps(answer, *case)
    _check_two_optimizers(answer)
    ranks, n = LARGE
    held = _check_state_bytes(answer, ranks, n)
    _check_state_bytes(answer, ranks, n, torch.float32)
    _check_state_bytes(answer, ranks, n - n % ranks, torch.float32)
    weights, gradients = _copies(ranks, n), _gradients(ranks, n, 1)
    limited_outside_of_tensors(
        f"ShardedAdam of {n:,} weights on {ranks} ranks",
        lambda: answer(weights, Communicator(ranks), LR).step(gradients, LOOSE),
        n * 4,
    )
    return (
        f"the weights match AdamW in one process, rounded to bfloat16, with and without clipping "
        f"and padding · {held:,} bytes of state per rank, unsharded {12 * n:,} · each rank sends "
        f"2 (R − 1)/R of the weights"
    )


def _check_state_bytes(answer: Any, ranks: int, n: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Require that a rank keeps only a float32 copy and two moments of its piece."""
    weights, gradients, kept = _copies(ranks, n, dtype), _gradients(ranks, n, 1, dtype=dtype), []

    def run() -> None:
        kept.append(answer(weights, Communicator(ranks), LR))
        kept[0].step(gradients, LOOSE)

    given = sum(x.nbytes for x in (*weights, *gradients))
    held = (measure(run).live_bytes - given) // ranks
    shard = -(-n // ranks)
    kind = " in float32" if dtype == torch.float32 else ""
    call = f"ShardedAdam of {n:,} weights{kind} on {ranks} ranks"
    most = 12 * shard + 64
    require(
        held <= most,
        f"{call} keeps {held:,} bytes per rank; wanted at most {most:,}: 12 for each of "
        f"{shard:,} weights, and a few more.",
    )
    require(
        held >= 12 * shard,
        f"{call} keeps {held:,} bytes per rank in tensors; wanted {12 * shard:,}: a float32 copy "
        f"and two moments of {shard:,} weights.",
    )
    return held


def _check_steps(
    answer: Any,
    ranks: int,
    n: int,
    max_norm: float,
    steps: int = 3,
    lr: float = LR,
    divisor: int = 1,
) -> None:
    weights = _copies(ranks, n)
    handed, views = list(weights), [w.view(-1) for w in weights]
    exact = UnshardedAdamW(weights[0], lr)
    with _placed([weights]) as comm:
        adam = answer(weights, comm, lr)
        kind = type(adam).__name__
        require(hasattr(adam, "step"), f"ShardedAdam(…) gave {kind}; it has no step.")
        _require_sent(f"ShardedAdam of {n} weights on {ranks} ranks, before a step", comm.sent, 0)
    for step in range(1, steps + 1):
        gradients = _gradients(ranks, n, step, divisor)
        before = [g.clone() for g in gradients]
        call = f"step {step} of {n} weights on {ranks} ranks, max_norm={max_norm:g}, lr={lr:g}"
        sent, sums = list(comm.sent), comm.sums
        for rank, gradient in enumerate(gradients):
            comm.tracker.place(rank, gradient)
        with comm.tracker:
            adam.step(gradients, max_norm)
        exact.step(before, max_norm)
        for rank in range(ranks):
            _require_written(call, rank, weights[rank], handed[rank], views[rank])
            _require_rounded(f"{call}: on rank {rank}, weight", weights[rank], exact.weights)
            require(
                torch.equal(gradients[rank], before[rank]),
                f"{call} changed the gradients of rank {rank}.",
            )
        _require_traffic(call, comm, sent, comm.sums - sums, 4 * (ranks - 1) * -(-n // ranks))
        _require_norm(call, comm.last_sum, before)


def _check_two_optimizers(answer: Any) -> None:
    n, weights = 6, [_copies(2, 6), _copies(2, 6)]
    exact = [UnshardedAdamW(copies[0], LR) for copies in weights]
    adams = [answer(copies, Communicator(2), LR) for copies in weights]
    for step in (1, 2):
        for shift, (adam, right) in enumerate(zip(adams, exact, strict=True)):
            gradients = _gradients(2, n, step + shift)
            right.step(gradients, LOOSE)
            adam.step(gradients, LOOSE)
    for place, (copies, right) in enumerate(zip(weights, exact, strict=True)):
        call = f"two ShardedAdams of {n} weights, stepped in turn: on optimizer {place}, weight"
        _require_rounded(call, copies[1], right.weights)


def _require_written(call: str, rank: int, now: Tensor, handed: Tensor, view: Tensor) -> None:
    """Require that the weights were written in place, and have no graph."""
    require(
        now is handed,
        f"{call}: weights[{rank}] is a new tensor. Write into the one that you were given.",
    )
    require(
        now.data_ptr() == view.data_ptr(),
        f"{call}: weights[{rank}] has new memory, so its views keep the old values. Write in "
        f"place, with copy_.",
    )
    require(
        not now.requires_grad,
        f"{call}: the weights of rank {rank} are part of a graph. Call detach() before you gather.",
    )


def _require_traffic(
    call: str, comm: CheckedCommunicator, before: list[int], sums: int, wanted: int
) -> None:
    require(
        comm.dtypes <= {torch.bfloat16},
        f"{call} sent torch.float32; wanted torch.bfloat16, the dtype of weights and gradients.",
    )
    sent = [now - was for now, was in zip(comm.sent, before, strict=True)]
    _require_sent(call, sent, wanted)
    require(sums == 1, f"{call}: comm.sum was called {sums} times; call it once, for the norm.")


def _require_rounded(what: str, got: Tensor, exact: Tensor) -> None:
    """Compare with the exact weights, rounded to bfloat16. The norm's order of summation may
    differ."""
    wanted = exact.detach()
    off = (got.detach().float() - wanted).abs() > wanted.abs() * 2**-8 * 1.01 + 1e-6
    if off.any():
        at = int(off.nonzero()[0])
        mine, right = distinct(got[at].item(), wanted.bfloat16()[at].item())
        require(False, f"{what} {at} is {mine}; wanted {right}.")


def _require_norm(call: str, got: float, gradients: list[Tensor]) -> None:
    """Require the sum of squares of the mean or of the sum. Rounding the mean first changes it."""
    total = torch.stack(gradients).double().sum(0).square().sum().item()
    wanted = total / len(gradients) ** 2
    mine, right = distinct(got, wanted, 6)
    require(
        min(abs(got - total), abs(got - wanted)) <= 1e-5 * wanted,
        f"{call}: comm.sum gave {mine}; wanted {right}, the sum of squares of the mean, in "
        f"float32.",
    )


# ------------------------------------------------------------------ 12.3 and 12.4: units

UNIT_WIDTHS = {  # (ranks, rows): (in, out) of each unit. R divides each product.
    (2, 2): ((2, 2), (2, 2), (2, 2)),
    (2, 3): ((2, 3), (3, 4), (4, 1)),
    (3, 2): ((3, 4), (4, 6)),
    (4, 5): ((4, 4), (4, 8), (8, 4), (4, 4)),
}
DEEP = 2, 1, ((64, 64),) * 12, torch.float32  # ranks, rows, 12 units of 4,096 weights, dtype
UNIT_BYTES = 4 * 64 * 64
OUTSIDE = 4 * UNIT_BYTES  # a sixth of 12 units on two ranks


def _dy(y: Tensor) -> Tensor:
    return y - 0.5


def _exact_pass(
    weights: list[Tensor], x: Tensor
) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """The units' inputs, the gradient of the output, the gradients of the weights and of x."""
    inputs = [x]
    for w in weights:
        inputs.append(forward_of(w, inputs[-1]))
    dy = first = _dy(inputs.pop())
    found: list[Any] = []
    for w, given in zip(reversed(weights), reversed(inputs), strict=True):
        dw, dy = backward_of(w, given, dy)
        found.insert(0, dw)
    return inputs, first, found, dy


class ShardedCase:
    """Ranks with the same units and different batches, and the correct gradients."""

    def __init__(
        self,
        ranks: int,
        rows: int,
        widths: Sequence[tuple[int, int]],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        random = torch.Generator().manual_seed(0)
        whole = [torch.randn(a * b, generator=random).div_(a).to(dtype) for a, b in widths]
        self.ranks, self.units, self.settings = ranks, len(whole), (ranks, rows, widths, dtype)
        self.weights = [[w.clone() for w in whole] for _ in range(ranks)]
        self.shards = [[w.chunk(ranks)[r].clone() for w in whole] for r in range(ranks)]
        self.xs = [
            torch.randn(rows, widths[0][0], generator=random).to(dtype) for _ in range(ranks)
        ]
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

    def for_stage_2(self, sums: Any) -> tuple[Any, ...]:
        return self.weights, self.inputs, self.dys, sums

    def for_stage_3(self, sums: Any) -> tuple[Any, ...]:
        return self.shards, self.xs, _dy, sums


def _check_units(
    call: str, answer: Callable[..., Any], arguments: Callable[..., tuple[Any, ...]], passes: int
) -> None:
    """Check gradients added to sums of 0 and of 2, the bytes sent, and unchanged arguments."""
    for (ranks, rows), widths in UNIT_WIDTHS.items():
        for begin in (0.0, 2.0):
            case = ShardedCase(ranks, rows, widths)
            what = f"{call} of {case.units} units on {ranks} ranks"
            sums = case.sums(begin)
            handed = [list(mine) for mine in sums]
            given = case.weights, case.shards, case.xs, case.inputs, case.dys, sums
            with _placed(given) as comm:
                got = answer(comm, *arguments(case, sums))
            _require_gradients(what, case, handed, sums, begin)
            if passes == 1:
                _require_tensors(what, got, case.dxs)
                for rank, (dx, wanted) in enumerate(zip(got, case.dxs, strict=True)):
                    _require_close(f"{what}: the gradient of rank {rank}'s input", dx, wanted)
            _require_sent(what, comm.sent, passes * 8 * case.elements * (ranks - 1) // ranks)
            _require_arguments_unchanged(what, case)


def _require_gradients(call: str, case: ShardedCase, handed: Any, sums: Any, begin: float) -> None:
    """Require gradients added in place. `handed` has the tensors of `sums` before the call."""
    for rank in range(case.ranks):
        for unit in range(case.units):
            require(
                sums[rank][unit] is handed[rank][unit],
                f"{call}: sums[{rank}][{unit}] is a new tensor. Add to the one that you were "
                f"given, in place: sums[rank][unit] += ….",
            )
    require(
        not all(torch.equal(s, torch.full_like(s, begin)) for s in _tensors(handed)),
        f"{call} left all sums as they were. Add the gradients to them, in place.",
    )
    for rank in range(case.ranks):
        for unit in reversed(range(case.units)):
            what = f"{call}: sums[{rank}][{unit}], which began as {begin:g},"
            wanted = case.wanted[rank][unit] + begin
            _require_tensors(what, [handed[rank][unit]], [wanted])
            _require_close(what, handed[rank][unit], wanted)


def _require_arguments_unchanged(call: str, case: ShardedCase) -> None:
    fresh = ShardedCase(*case.settings)
    for name in ("weights", "shards", "xs", "inputs", "dys"):
        now, was = _tensors(getattr(case, name)), _tensors(getattr(fresh, name))
        same = len(now) == len(was) and all(map(torch.equal, now, was))
        require(same, f"{call} changed the {name} that it was given.")


def _peak_per_rank(trace: Trace, ranks: int) -> int:
    """The most bytes alive beside what was alive before."""
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    return (trace.peak_bytes - before) // ranks


def _require_few_units(call: str, peak: int, units: int, what: str) -> None:
    require(
        peak <= units * UNIT_BYTES,
        f"{call} of 12 units allocates {peak:,} bytes per rank at its peak, besides its arguments; "
        f"wanted at most {units * UNIT_BYTES:,}, {units} times the {what} of one unit.",
    )


# ------------------------------------------------------------------ 12.3: stage 2


def _check_gradients(answer: Callable[..., Any]) -> str:
    _check_units("add_gradients_", answer, ShardedCase.for_stage_2, passes=1)
    case = ShardedCase(*DEEP)
    sums = case.sums()

    def run() -> None:
        answer(Communicator(case.ranks), *case.for_stage_2(sums))

    peak = _peak_per_rank(measure(run), case.ranks)
    _require_few_units("add_gradients_", peak, 4, "gradients")
    limited_outside_of_tensors("add_gradients_ of 12 units", run, OUTSIDE)
    return (
        f"each rank adds its shard of the summed gradients · each rank sends (R − 1)/R of the "
        f"gradients · at its peak a rank allocates {peak / UNIT_BYTES:.1f} times one unit's "
        f"gradients, not {case.units} times"
    )


# ------------------------------------------------------------------ 12.4: stage 3

MARK = (3, 1, 7)  # a shape that no answer allocates
MATMULS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.mv.")


class GatherMarkingCommunicator(Communicator):
    """Allocates a mark in the trace where the all-gather of a unit begins.

    It finds these places by the bytes sent. Forward gathers one unit after another; backward
    gathers and reduces each in turn. All units have one size, so every collective sends the same
    number of bytes.
    """

    def __init__(self, case: ShardedCase) -> None:
        super().__init__(case.ranks)
        per_collective, units = (case.ranks - 1) * UNIT_BYTES, range(case.units)
        forward = [n * per_collective for n in units]
        self._starts = forward + [(case.units + 2 * n) * per_collective for n in units]

    def send(self, source: int, target: int, tensor: Tensor) -> Tensor:
        if self._starts and sum(self.sent) >= self._starts[0]:
            self._starts.pop(0)
            torch.empty(MARK)
        return super().send(source, target, tensor)


def _require_one_whole(trace: Trace, case: ShardedCase) -> None:
    """Require that no other unit is whole from the start of a unit's all-gather to its matmul.

    A gather may allocate one unit's bytes beside its result, for the received pieces. A tensor of
    a unit's size older than the last matmul is a leftover, even on a single rank.
    """
    units, events = case.units, trace.events
    before = sum(event.bytes for event in events if event.phase == "before")
    alive = list(running_sums(event.bytes for event in events))
    starts = [n for n, e in enumerate(events) if e.shape == MARK and e.bytes > 0]
    matmuls = [n for n, e in enumerate(events) if e.operator.startswith(MATMULS) and e.bytes > 0]
    whole, leftovers = [], []
    for start in starts:
        end = next((n for n in matmuls if n > start), len(alive))
        whole.append((max(alive[start:end]) - before) // case.ranks // UNIT_BYTES)
        last = max((n for n in matmuls if n < start), default=0)
        leftovers.append(_leftover_bytes(trace, start, last))
    most = max(whole, default=0)
    gather = whole.index(most) if whole else 0
    way, unit = ("forward", gather) if gather < units else ("backward", 2 * units - 1 - gather)
    require(
        most <= 1,
        f"sharded_pass of {units} units: in {way}, after gathering unit {unit}, each rank holds "
        f"the bytes of {most} whole units; wanted one.",
    )
    require(
        not any(leftovers),
        f"sharded_pass of {units} units: {max(leftovers, default=0):,} bytes of the previous unit "
        f"are still alive on a rank when the next is gathered. Free them first.",
    )


def _leftover_bytes(trace: Trace, at: int, since: int) -> int:
    """Count the bytes of tensors alive at event `at`, of a unit's size, allocated before event
    `since`, and not the result of a matmul."""
    older = {id(event) for event in trace.events[:since]}
    alive = [e for e in trace.alive(at) if e.phase != "before" and id(e) in older]
    return sum(
        e.bytes for e in alive if e.bytes >= UNIT_BYTES and not e.operator.startswith(MATMULS)
    )


MANY_ROWS = 2, 24, ((64, 64),) * 12, torch.float32  # an activation is as large as no piece


def _require_one_set_of_activations(answer: Callable[..., Any]) -> None:
    """Require a unit's inputs once. Copies of them would double the activations."""
    needed = {}
    for who, sharded in (("got", answer), ("wanted", sharded_pass)):
        case = ShardedCase(*MANY_ROWS)
        run = partial(sharded, Communicator(case.ranks), *case.for_stage_3(case.sums()))
        needed[who] = most_alive(measure(run), {case.xs[0].numel()}) // case.ranks
    limit = needed["wanted"] + 3 * case.xs[0].nbytes
    require(
        needed["got"] <= limit,
        f"sharded_pass of {case.units} units: each rank has {needed['got']:,} bytes of inputs and "
        f"outputs of units alive at once; wanted at most {limit:,}. Keep each unit's input once.",
        evidence=("activations", rough(needed["got"])),
    )


def _check_pass(answer: Callable[..., Any]) -> str:
    _check_units("sharded_pass", answer, ShardedCase.for_stage_3, passes=3)
    case = ShardedCase(*DEEP)
    sums, marking = case.sums(), GatherMarkingCommunicator(case)
    trace = measure(lambda: answer(marking, *case.for_stage_3(sums)))
    _require_one_whole(trace, case)
    peak = _peak_per_rank(trace, case.ranks)
    _require_few_units("sharded_pass", peak, 5, "weights")
    _require_one_set_of_activations(answer)
    limited_outside_of_tensors(
        "sharded_pass of 12 units",
        lambda: answer(Communicator(case.ranks), *case.for_stage_3(sums)),
        OUTSIDE,
    )
    return (
        f"the gradients equal those with whole weights · each rank sends 3 (R − 1)/R of the "
        f"weights · at its peak a rank allocates {peak / UNIT_BYTES:.1f} times one unit's weights "
        f"(weights, gradients and pieces), not {case.units} times"
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
    return "4 stages · ⌈Ψ/R⌉ weights per rank, padding held and sent · k micro-batches"


def _check_held(
    answer: Callable[..., Any], parameters: int, ranks: int, stage: int, K: int, k: int
) -> None:
    call = f"held_and_sent({parameters}, ranks={ranks}, stage={stage}, K={K}, k={k})"
    got = answer(parameters, ranks, stage, K, k)
    is_tuple(call, got, 2, "two integers, held and sent")
    settings = {"ranks": ranks, "stage": stage}
    held = model_state_bytes(parameters, optimizer_bytes=K, **settings)
    equal(f"{call}, held,", got[0], held, "bytes")
    sent = communication_bytes(parameters, micro_batches=k, **settings)
    equal(f"{call}, sent,", got[1], sent, "bytes")


# The running bill is for one GPU, so nothing is sharded and the previous day's line stays.
DAY = Day(
    exercises=(
        checked("12.1", _check_collectives, Collectives),
        checked("12.2", _check_adam, ShardedAdam),
        checked("12.3", _check_gradients, add_gradients_),
        checked("12.4", _check_pass, sharded_pass),
        checked(
            "12.5",
            _check_formula,
            rebuilds=("memlab.zero.model_state_bytes", "memlab.zero.communication_bytes"),
        ),
    ),
    bill=Bill("day 12: ZeRO needs more GPUs, unchanged", in_chunks),
)
