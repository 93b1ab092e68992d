"""Day 11: the logits."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memlab.checkpointing.operations import Operations
from memlab.course.bill_steps import in_chunks
from memlab.course.exercises import (
    Bill,
    Day,
    Wrong,
    distinct,
    equal,
    require,
)
from memlab.course.properties import (
    SLACK,
    distinct_elements,
    limited,
    limited_outside_of_tensors,
    most_alive,
    peaks,
)
from memlab.course.solutions import checked, solution
from memlab.internals.torch_internals import tree_leaves
from memlab.metering import measure
from memlab.metering.profiler_recording import record
from memlab.reference.chunked_loss import chunked_loss, loss_and_gradient_
from memlab.trace import Trace

IGNORED = -100  # the target of an ignored row
OUTSIDE = 100_000  # bytes outside of tensors: fewer than the logits, more than a call needs
_TORCHS = [name for name in ("linear_cross_entropy",) if hasattr(F, name)]  # torch 2.13 has it
_LIBRARIES = ("memlab.losses", *(f"torch.nn.functional.{name}" for name in _TORCHS))

Gradient = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]

all_logits_bytes = solution("11.1")


def chunked_bytes(rows: int, width: int, vocab: int, chunk: int) -> int:
    """The peak in float32: both gradients, a chunk's logits and its gradient of hidden."""
    return 4 * (rows + vocab) * width + 4 * chunk * (vocab + width)


# ------------------------------------------------------------------ 11.1: what the loss holds

HEADS = ((4, 4, 100), (4, 20, 100), (100, 4, 52), (80, 128, 1024), (256, 16, 2048))


def _peak_of_all_logits(rows: int, width: int, vocab: int) -> int:
    """Measured, beside the arguments, and without the loss and the number of rows. Rows, width and
    vocab are multiples of 4, so those few bytes are the remainder of 16."""
    hidden, weight = (torch.zeros(n, width, requires_grad=True) for n in (rows, vocab))
    targets = torch.zeros(rows, dtype=torch.long)
    trace = measure(lambda: F.cross_entropy(F.linear(hidden, weight), targets).backward())
    return (trace.peak_bytes - sum(x.nbytes for x in (hidden, weight, targets))) // 16 * 16


def _check_all_logits(answer: Callable[..., int]) -> str:
    for shape in HEADS:
        call = "all_logits_bytes(rows={}, width={}, vocab={})".format(*shape)
        equal(call, answer(*shape), _peak_of_all_logits(*shape), "bytes")
    large = (8192, 4096, 128_256)
    call = "all_logits_bytes(rows={}, width={}, vocab={})".format(*large)
    equal(call, answer(*large), all_logits_bytes(*large), "bytes")
    return f"{len(HEADS)} shapes: your bytes match the measured peak, at either moment"


# ------------------------------------------------------------------ 11.2: a chunk's gradient

MOST_BYTES_PER_ROW = 128
CHUNK_SHAPE = 64, 1024


def _chunks() -> dict[str, tuple[Tensor, Tensor]]:
    """Logits and targets, small ones first."""
    random = torch.Generator().manual_seed(0)
    many, targets = torch.randn(6, 9, generator=random), torch.tensor([8, 0, 3, 5, 5, 1])
    some = targets.clone()
    some[[1, 4]] = IGNORED
    first, second, both = torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 0])
    return {
        "[[0.0, 1.0, 2.0]] and target 2": (torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2])),
        "6 rows of 9 logits": (many, targets),
        "6 rows, 2 of them ignored": (many, some),
        "[[−40.0, 80.0]] and target 0": (torch.tensor([[-40.0, 80.0]]), first),
        "[[1.0, 0.0], [900.0, 1000.0]] and targets 0, 0": (
            torch.tensor([[1.0, 0.0], [900.0, 1000.0]]),
            both,
        ),
        "[[10000.25, 9999.5, 9998.75]] and target 1": (  # the last bit is worth a thousandth
            torch.tensor([[10000.25, 9999.5, 9998.75]]),
            second,
        ),
        "[[0.0, 0.0, 0.0, 500.0]] and target 0": (torch.tensor([[0.0, 0.0, 0.0, 500.0]]), first),
        "[[−900.0, −1000.0]] and target 0": (torch.tensor([[-900.0, -1000.0]]), first),
        "2 rows, both ignored": (many[:2], torch.tensor([IGNORED, IGNORED])),
    }


def _check_gradient(answer: Gradient) -> str:
    for name, (x, targets) in _chunks().items():
        call = f"loss_and_gradient_ of {name}"
        mine, mine_targets = x.clone(), targets.clone()
        with _ignored_column_named(call, targets):
            losses = answer(mine, mine_targets)
        _require_right(call, losses, mine, x, targets)
        require(torch.equal(mine_targets, targets), f"{call} changed the targets.")
    _check_bytes_per_row(answer)
    return (
        f"losses and gradients within 1e-5 of float64 · ignored rows are 0 · no overflow at 1,000 "
        f"· in place, with at most {MOST_BYTES_PER_ROW} bytes per row beside x"
    )


@contextmanager
def _ignored_column_named(call: str, targets: Tensor) -> Iterator[None]:
    """Where a target is −100, an index out of bounds has a known cause."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error) or IGNORED not in targets:
            raise
        raise Wrong(
            f"{call} reads column {IGNORED}. Replace the targets of ignored rows by 0, and set "
            f"their losses and gradients to 0 at the end."
        ) from error


def _require_right(call: str, losses: Any, x: Tensor, before: Tensor, targets: Tensor) -> None:
    """The losses, and their gradients in x, match float64."""
    _require_loss_tensor(call, losses, (len(before),))
    exact: Any = before.double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORED)
    wanted.sum().backward()
    _require_elements(f"{call}: the losses are", losses, wanted.detach())
    require(
        not (torch.equal(x, before) and exact.grad.any()),
        f"{call} did not change x. Write the gradients into it, in place.",
    )
    for n, (row, right) in enumerate(zip(x, exact.grad, strict=True)):
        _require_elements(f"{call}: row {n} of x is", row, right)


def _require_loss_tensor(call: str, got: Any, shape: tuple[int, ...]) -> None:
    require(
        isinstance(got, Tensor),
        f"{call} gave {type(got).__name__}; wanted a tensor."
        f"{' Is there a return?' if got is None else ''}",
    )
    require(
        got.shape == shape, f"{call} gave a tensor of shape {tuple(got.shape)}; wanted {shape}."
    )
    require(
        got.dtype in (torch.float32, torch.float64),
        f"{call} gave a loss in {got.dtype}; wanted torch.float32, for inputs of any dtype.",
    )


def _require_elements(what: str, got: Tensor, wanted: Tensor) -> None:
    off = (got.double() - wanted).abs() > 1e-5 * (1 + wanted.abs())
    mine, right = distinct_elements(got, wanted)
    require(bool(got.isfinite().all() and not off.any()), f"{what} {mine}; wanted {right}.")


def _check_bytes_per_row(answer: Gradient) -> None:
    """Counts what the allocator hands out: a kernel's own memory is in no tensor."""
    n, vocab = CHUNK_SHAPE
    call = f"loss_and_gradient_ of {n} rows of {vocab:,} logits"
    before, targets = torch.linspace(-1, 1, n * vocab).view(n, vocab), torch.arange(n)
    targets[[3, 5]] = IGNORED
    x, given = before.clone(), []
    recording = record(lambda: given.append(answer(x, targets)))
    _require_right(call, given.pop(), x, before, targets)
    second = [event for event in recording.events if event.bytes >= x.nbytes]
    if second:
        name, taken = second[0].operator.removeprefix("aten::"), second[0].bytes
        raise Wrong(
            f"{call}: {name or 'an operator'} allocates {taken:,} bytes at once, beside the "
            f"{x.nbytes:,} of x; wanted no second (n, V), at most {MOST_BYTES_PER_ROW} bytes per "
            f"row."
        )
    per_row = recording.peak_bytes / n
    require(
        per_row <= MOST_BYTES_PER_ROW,
        f"{call} needs {per_row:,.0f} more bytes per row; wanted at most {MOST_BYTES_PER_ROW}.",
    )
    limited_outside_of_tensors(call, lambda: answer(before, targets), OUTSIDE)


# ------------------------------------------------------------------ 11.3: the Function


@dataclass(frozen=True)
class LossCase:
    """One call of chunked_loss; `upstream` is the gradient of its result."""

    name: str
    rows: int
    chunk: int
    ignored: tuple[int, ...] = ()
    upstream: float = 1.0
    dtype: torch.dtype = torch.float32
    width: int = 4
    vocab: int = 11

    @property
    def call(self) -> str:
        return f"chunked_loss of {self.name}"

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.rows)
        lengths = (self.rows, self.vocab)
        hidden, weight = (torch.randn(n, self.width, generator=random) for n in lengths)
        targets = torch.randint(self.vocab, (self.rows,), generator=random)
        targets[list(self.ignored)] = IGNORED
        hidden, weight = hidden.to(self.dtype), weight.to(self.dtype)
        return hidden.requires_grad_(), weight.requires_grad_(), targets


LOSS_CASES = (
    LossCase("2 rows at once", 2, 2),
    LossCase("6 rows, 2 at a time", 6, 2),
    LossCase("7 rows, 3 at a time", 7, 3),
    LossCase("2 rows, 5 at a time", 2, 5),
    LossCase("7 rows, 3 at a time, 3 of them ignored", 7, 3, ignored=(0, 3, 4)),
    LossCase("4 rows, 2 at a time, all ignored", 4, 2, ignored=(0, 1, 2, 3)),
    LossCase("4 rows, 2 at a time, all but one ignored", 4, 2, ignored=(0, 1, 3)),
    LossCase("7 rows, 3 at a time, times −0.25", 7, 3, upstream=-0.25),
    LossCase("7 rows, 3 at a time, times 1,024", 7, 3, upstream=1024.0),
    LossCase("7 rows in bfloat16, 3 at a time", 7, 3, dtype=torch.bfloat16),
)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
LARGE_CASES = (  # for bytes: weight is larger than the logits of two chunks
    LossCase("200 rows, 8 at a time", 200, 8, width=24, vocab=500),
    LossCase("50 rows, 3 at a time", 50, 3, width=16, vocab=200),
    LossCase("90 rows in bfloat16, 8 at a time", 90, 8, (), 1.0, torch.bfloat16, 24, 500),
)


def _check_chunked(answer: Loss) -> str:
    for case in LOSS_CASES:
        _check_case(answer, case)
    _check_second_pass(answer)
    _check_two_graphs(answer)
    first, *others = LARGE_CASES
    peak, held = _check_bytes(answer, first)
    for case in others:
        _check_bytes(answer, case)
    for case in (first, others[-1]):  # in bfloat16, the gradients are copies of the sums
        _check_nothing_else_kept(answer, case)
    limited_outside_of_tensors(
        first.call, lambda: answer(*first.inputs, first.chunk).backward(), OUTSIDE
    )
    _check_sum(answer)
    one = chunked_bytes(first.rows, first.width, first.vocab, first.chunk)
    has_two = peak > one + 2 * first.chunk * first.vocab
    return (
        f"loss and gradients within 1e-5 of float64, whether chunks divide the rows or not · "
        f"{first.name}: {peak:,} bytes at the peak, {held:,} held for backward, "
        f"{4 * first.rows * first.vocab:,} for all the logits · three matmuls"
        f"{' · two tensors of chunk × V are alive at once; one is enough' if has_two else ''}"
    )


def _check_nothing_else_kept(answer: Loss, case: LossCase) -> None:
    """hidden is another operator's result here, so only the loss's graph could keep it alive."""
    leaf, weight, targets = case.inputs
    inputs: list[StorageWeakRef] = []

    def loss() -> Tensor:
        hidden = leaf * 1
        inputs.append(StorageWeakRef(hidden.untyped_storage()))
        return answer(hidden, weight, targets, case.chunk)

    kept = loss()
    require(
        inputs[0].expired(),
        f"{case.call} keeps hidden alive until backward. Keep both gradients and nothing else.",
    )
    del kept
    limited(case.call, peaks(loss), left=SLACK)


def _loss_of(answer: Loss, call: str, *given: Any) -> Tensor:
    loss = answer(*given)
    _require_loss_tensor(call, loss, ())
    require(
        loss.requires_grad,
        f"{call} gave a loss without a graph (requires_grad is False). Return what "
        f"ChunkedLoss.apply gives.",
    )
    return loss


def _check_case(answer: Loss, case: LossCase) -> None:
    hidden, weight, targets = case.inputs
    before = [x.detach().clone() for x in (hidden, weight, targets)]
    with LossWatch(weight) as watch:
        loss = _loss_of(answer, case.call, hidden, weight, targets, case.chunk)
        (loss * case.upstream).backward()
    _require_value(case, loss.item(), (hidden, weight), before)
    after = [x.detach() for x in (hidden, weight, targets)]
    require(all(map(torch.equal, before, after)), f"{case.call} changed its arguments in place.")
    _require_no_logits(case, watch)
    _require_chunks(case, watch)


def _require_value(
    case: LossCase, got: float, inputs: tuple[Tensor, Tensor], given: list[Tensor]
) -> None:
    """The loss, and the gradients of the inputs, match float64."""
    *factors, targets = given
    exact = [x.detach().double().requires_grad_() for x in factors]
    total = F.cross_entropy(exact[0] @ exact[1].mT, targets, reduction="sum")
    wanted = total / max(1, case.rows - len(case.ignored))
    tolerance, right = TOLERANCES[case.dtype], wanted.item()
    shown, meant = distinct(got, right, 6)
    require(
        abs(got - right) <= tolerance * (1 + abs(right)),
        f"{case.call}: the loss is {shown}; wanted {meant}.",
    )
    (wanted * case.upstream).backward()
    for name, x, y in zip(("hidden", "weight"), inputs, exact, strict=True):
        _require_gradient(f"{case.call}: the gradient of {name}", x.grad, y.grad, tolerance)


def _require_gradient(what: str, got: Tensor | None, wanted: Any, tolerance: float) -> None:
    if got is None:
        raise Wrong(f"{what} is missing after backward.")
    size, length = wanted.norm().item(), got.double().norm().item()
    off = (got.double() - wanted).norm().item()
    require(
        off <= tolerance * (size + 1e-9),
        f"{what} has an error with a norm of {off:.3g}. Its own norm is {length:.3g}, the norm of "
        f"the right one {size:.3g}.",
    )


class LossWatch(Operations):
    """Counts operations, the most rows of hidden in one matmul with the weight, and the elements
    of the largest tensor."""

    MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv"})

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.rows, self.largest, self.width = 0, 0, weight.shape[1]
        self.place = weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in made]
        self.largest = max(self.largest, *sizes, 0)
        if func.overloadpacket.__name__.removesuffix("_") in self.MATMULS:
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            if self._is_weight(a) and a.shape[-1] == self.width:
                self.rows = max(self.rows, b.numel() // self.width)
            elif self._is_weight(b) and b.shape[-2:][0] == self.width:
                self.rows = max(self.rows, a.numel() // self.width)
        return result

    def _is_weight(self, x: Tensor) -> bool:
        """Or a part of it. A copy of the weight shows in the bytes."""
        return x.untyped_storage().data_ptr() == self.place


def _require_no_logits(case: LossCase, watch: LossWatch) -> None:
    """Not even for a moment, where there are several chunks, and more logits than weights."""
    if case.chunk >= case.rows or case.rows <= case.width:
        return
    require(
        watch.largest < case.rows * case.vocab,
        f"{case.call} allocates a tensor of {watch.largest:,} elements, as large as all the "
        f"logits; wanted none larger than {case.chunk} · {case.vocab}, except for gradients.",
    )


def _require_chunks(case: LossCase, watch: LossWatch) -> None:
    """Three matmuls of `chunk` rows: for the logits and the two gradients."""
    matmuls = watch.total / (2 * case.rows * case.vocab * case.width)
    require(
        matmuls < 3.1,
        f"{case.call} takes as many operations as {matmuls:.1f} matmuls of ({case.rows}, "
        f"{case.width}) and ({case.width}, {case.vocab}); wanted 3.",
    )
    rows = min(case.chunk, case.rows)
    require(
        watch.rows in (0, rows),
        f"{case.call} multiplies the weight with at most {watch.rows} row{'s' * (watch.rows > 1)} "
        f"of hidden at once; wanted {rows}.",
    )


def _check_sum(answer: Loss) -> None:
    """In bfloat16, where each row's share is less than the last bit of the sum."""
    rows = 400
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16, requires_grad=True)
    weight: Any = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)
    call = f"chunked_loss of {rows} equal rows in bfloat16, one at a time"
    loss = _loss_of(answer, call, hidden, weight, targets, 1)
    loss.backward()
    got = weight.grad.flatten().tolist()
    mine, right = distinct(got, [-0.5, 0.5])
    require(got == [-0.5, 0.5], f"{call}: the gradient of weight is {mine}; wanted {right}.")
    mine, right = distinct(loss.item(), log(2))
    require(abs(loss.item() - log(2)) < 1e-4, f"{call}: the loss is {mine}; wanted {right}.")


def _check_second_pass(answer: Loss) -> None:
    """A second backward pass may raise, but not give another gradient."""
    case = LossCase("7 rows, 3 at a time", 7, 3)
    hidden, weight, targets = case.inputs
    loss = _loss_of(answer, case.call, hidden, weight, targets, 3)
    first = torch.autograd.grad(loss, weight, torch.tensor(0.5), retain_graph=True)[0].clone()
    try:
        second = torch.autograd.grad(loss, weight, torch.tensor(0.5))[0]
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return
    require(
        torch.allclose(second, first),
        f"{case.call}: the gradient of weight differs by a norm of {(second - first).norm():.3g} "
        f"in a second backward pass; wanted the same gradient, or an error.",
    )


def _check_two_graphs(answer: Loss) -> None:
    """A second loss before backward must not change the gradients of the first."""
    cases = [replace(case, name=f"{case.name}, beside another") for case in LOSS_CASES[3:5]]
    inputs = [case.inputs for case in cases]
    pairs = zip(cases, inputs, strict=True)
    losses = [_loss_of(answer, case.call, *given, case.chunk) for case, given in pairs]
    for case, given, loss in zip(cases, inputs, losses, strict=True):
        loss.backward()
        _require_value(case, loss.item(), given[:2], list(given))


def _check_bytes(answer: Loss, case: LossCase) -> tuple[int, int]:
    """At the peak, and held for backward."""
    hidden, weight, targets = case.inputs
    kept: list[Tensor] = []
    forward = measure(lambda: kept.append(answer(hidden, weight, targets, case.chunk)))
    kept.clear()
    found = []

    def step() -> None:
        loss = answer(hidden, weight, targets, case.chunk)
        found.append(loss.detach())
        loss.backward()

    with LossWatch(weight) as watch:
        trace = measure(step)
    _require_value(case, found.pop().item(), (hidden, weight), [hidden, weight, targets])
    _require_no_logits(case, watch)
    given = hidden.nbytes + weight.nbytes + targets.nbytes
    held, gradients = forward.live_bytes - given, 4 * (case.rows + case.vocab) * case.width
    require(
        held <= gradients + 64,
        f"{case.call}: {held:,} bytes are held for backward; wanted {gradients:,}, both gradients.",
    )
    copied = _require_one_sum(case, forward, trace, weight)
    _require_peak(case, trace, trace.peak_bytes - given, gradients, copied)
    _require_chunks(case, watch)
    return trace.peak_bytes - given, held


def _require_peak(case: LossCase, trace: Trace, peak: int, gradients: int, copied: int) -> None:
    """Both gradients and two chunks of logits. In bfloat16 the logits exist in float32 too, a
    float32 copy of weight is allowed, and backward rounds both gradients."""
    itemsize = case.dtype.itemsize
    is_rounded = case.dtype != torch.float32
    per_logit = 4 + is_rounded * itemsize
    summing = gradients + copied + case.chunk * (2 * per_logit * case.vocab + 4 * case.width)
    rounding = gradients + is_rounded * itemsize * (case.rows + case.vocab) * case.width
    most = max(summing, rounding) + 64 * case.rows
    require(
        peak <= most,
        f"{case.call} needs {peak:,} bytes at its peak, in {trace.peak_phase}; wanted at most "
        f"{most:,}: both gradients, {gradients:,}, two chunks of logits, and a few bytes per row. "
        f"Alive at the peak: {_shapes_at_peak(trace)}.",
        evidence=(case.call, trace.peak_phase, "bytes"),
    )


def _require_one_sum(case: LossCase, forward: Trace, whole: Trace, weight: Tensor) -> int:
    """No tensor as large as weight or hidden beside the sum of its gradient. Returns the bytes of a
    float32 copy of a bfloat16 weight, which is allowed."""
    is_rounded = weight.dtype != torch.float32
    of_weight, of_hidden = case.vocab * case.width, case.rows * case.width
    for phase, trace in (("forward", forward), ("backward", whole)):
        for name, elements, spare in (
            ("weight", of_weight, 4 * is_rounded),
            ("hidden", of_hidden, weight.itemsize * is_rounded),
        ):
            most = (4 + spare) * elements
            require(
                most_alive(trace, [elements]) <= most,
                f"{case.call} has more than {most:,} bytes alive at once in tensors as large as "
                f"{name}, in {phase}; wanted only the sum of its gradient.",
            )
    return is_rounded * max(0, most_alive(forward, [of_weight]) - 4 * of_weight)


def _shapes_at_peak(trace: Trace) -> str:
    """The shapes that take the most bytes."""
    taken: Counter[tuple[int, ...]] = Counter()
    count: Counter[tuple[int, ...]] = Counter()
    for event in trace.alive(trace.peak_position):
        if event.phase != "before":
            taken[event.shape] += event.bytes
            count[event.shape] += 1
    return ", ".join(f"{count[shape]} × {shape}" for shape, _ in taken.most_common(4))


# ------------------------------------------------------------------ 11.4: how many rows

ROW_BYTES = 4 * (100 + 10)  # per row of a chunk, with a width of 10 and a vocab of 100


def _check_rows(answer: Callable[..., int]) -> str:
    rows, width, vocab = 12, 10, 100
    floor = chunked_bytes(rows, width, vocab, 0)
    _check_call(answer, rows, width, vocab, floor + 20 * ROW_BYTES)
    # Here no two mistakes give the same number.
    _check_call(answer, 97, 10, 20, chunked_bytes(97, 10, 20, 15))
    for count in (12, 5, 11, 6, 7, 1):
        _check_call(answer, rows, width, vocab, floor + count * ROW_BYTES)
    _check_call(answer, rows, width, vocab, floor + 12 * ROW_BYTES - 1)
    _check_call(answer, rows, width, vocab, floor + ROW_BYTES - 1)
    _check_call(answer, rows, width, vocab, 1000)
    for large in ((1000, 64, 5000, 4_000_000), (2048, 512, 32_000, 100 * 2**20)):
        _check_call(answer, *large)
    return "the fewest chunks that fit, as even as possible · 0 below the floor"


def _check_call(
    answer: Callable[..., int], rows: int, width: int, vocab: int, budget_bytes: int
) -> None:
    call = f"chunk_rows({rows}, {width}, {vocab}, budget_bytes={budget_bytes})"
    sizes = (-(-rows // chunks) for chunks in range(1, rows + 1))
    fitting = (n for n in sizes if chunked_bytes(rows, width, vocab, n) <= budget_bytes)
    equal(call, answer(rows, width, vocab, budget_bytes), next(fitting, 0), "rows")


# ------------------------------------------------------------------ the bill


DAY = Day(
    exercises=(
        checked("11.1", _check_all_logits, all_logits_bytes),
        checked("11.2", _check_gradient, loss_and_gradient_, rebuilds=_LIBRARIES),
        checked("11.3", _check_chunked, chunked_loss, rebuilds=_LIBRARIES),
        checked("11.4", _check_rows),
    ),
    bill=Bill("day 11: chunked loss, all 8 sequences at once", in_chunks),
)
