"""Day 11: the logits."""

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import log, prod
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.checkpointing.operations import Operations
from memlab.course.bill import SETTING
from memlab.course.checks.day06 import keep_of_each_block
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, equal, require
from memlab.course.solutions import mistakes, solution
from memlab.internals.torch_internals import tree_leaves
from memlab.metering import measure
from memlab.metering.profiler_recording import record
from memlab.optim import Lion8bit
from memlab.reference.chunked_loss import chunked_loss, loss_and_gradient_
from memlab.trace import Trace
from memlab.train import combined, dry_trace, of_all_weights

IGNORED = -100  # the target of a row that counts for nothing

Gradient = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]

all_logits_bytes = solution("11.1")


def chunked_bytes(rows: int, width: int, vocab: int, chunk: int) -> int:
    """At its peak, in float32: both gradients, and a chunk's logits and gradient of hidden."""
    return 4 * (rows + vocab) * width + 4 * chunk * (vocab + width)


# ------------------------------------------------------------------ one's own work

_FUNCTIONS = {"linear_cross_entropy", "chunked_cross_entropy", "cross_entropy_reference"}


@contextmanager
def _own_work(call: str) -> Iterator[None]:
    """Wrong if what runs inside calls a function that is the answer."""
    asked: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        name, home = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        is_library = home.startswith(("torch.", "memlab.losses"))
        if event == "call" and not asked and is_library and name in _FUNCTIONS:
            asked.append(name)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
    require(not asked, f"{call} calls {''.join(asked)}; wanted your own lines.")


LARGEST_IN_PYTHON = 100_000  # bytes: less than the logits, and more than a call makes


def _require_tensors_only(call: str, step: Callable[[], object]) -> None:
    """Arrays of numpy and lists of numbers are no tensors, and are in memory all the same."""
    tracemalloc.start()
    try:
        step()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    require(
        most < LARGEST_IN_PYTHON,
        f"{call} takes more than {LARGEST_IN_PYTHON:,} bytes outside of tensors; wanted "
        f"tensors alone.",
    )


# ------------------------------------------------------------------ 11.1: what the loss holds


def _by_all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def _held_at_peak(rows: int, width: int, vocab: int) -> int:
    """Measured, beyond what is handed in; the loss and the number of rows, a few bytes, aside."""
    hidden, weight = (torch.zeros(n, width, requires_grad=True) for n in (rows, vocab))
    targets = torch.zeros(rows, dtype=torch.long)
    trace = measure(lambda: _by_all_logits(hidden, weight, targets).backward())
    return (trace.peak_bytes - sum(x.nbytes for x in (hidden, weight, targets))) // 16 * 16


# rows, width, vocab: multiples of 4, so that a few bytes more are a remainder.
SHAPES = ((4, 4, 100), (4, 20, 100), (100, 4, 52), (64, 128, 1024), (256, 16, 2048))


def _check_all_logits(answer: Callable[..., int]) -> str:
    for shape in SHAPES:
        call = "all_logits_bytes(rows={}, width={}, vocab={})".format(*shape)
        equal(call, answer(*shape), _held_at_peak(*shape), "bytes")
    large = (8192, 4096, 128_256)
    call = "all_logits_bytes(rows={}, width={}, vocab={})".format(*large)
    equal(call, answer(*large), all_logits_bytes(*large), "bytes")
    return f"{len(SHAPES)} heads, measured: as many bytes as you say · of both moments the larger"


_LARGER = "max(3 * logits, logits + gradients)"

_ALL_LOGITS = Exercise(
    id="11.1",
    title="What the loss holds",
    minutes=5,
    difficulty=1,
    hints=(
        "How many numbers has a tensor of the logits' size, how many hidden, how many weight? Each "
        "of the two moments is a sum of these.",
        "When backward begins: three tensors of rows · vocab. When the products' gradients are "
        "there: one of rows · vocab, and the gradients of hidden (rows · width) and of weight "
        "(vocab · width).",
        "The first moment has 3 * rows * vocab numbers, the second rows * vocab + (rows + vocab) * "
        "width. The answer is in bytes, and of the fuller one.",
    ),
    reference=all_logits_bytes,
    check=_check_all_logits,
    wrong_answers=mistakes(
        "11.1",
        (
            "These are the logits alone: the loss makes more tensors of their size.",
            (_LARGER, "logits"),
        ),
        (
            "Two tensors of logits: at backward's beginning there is a third.",
            (_LARGER, "2 * logits"),
        ),
        (
            "With few rows the other moment is the fuller: weight's gradient is larger than them.",
            (_LARGER, "3 * logits"),
        ),
        (
            "The two moments are added; they never meet, so take the larger of them.",
            (_LARGER, "(3 * logits + gradients)"),
        ),
        ("These are numbers; a float32 takes 4 bytes.", ("4 * max", "max")),
        (
            "The gradient of hidden is missing at the second moment: rows · width.",
            ("(rows + vocab) * width", "vocab * width"),
        ),
        (
            "At the second moment the logits' gradient is still alive: both products are made of "
            "it.",
            ("logits + gradients", "gradients"),
        ),
    ),
)

# ------------------------------------------------------------------ 11.2: a chunk's gradient

MOST_BYTES_A_ROW = 128
CHUNK_SHAPE = 64, 1024


def _chunks() -> dict[str, tuple[Tensor, Tensor]]:
    """Logits and targets, the small ones first."""
    random = torch.Generator().manual_seed(0)
    many, targets = torch.randn(6, 9, generator=random), torch.tensor([8, 0, 3, 5, 5, 1])
    some = targets.clone()
    some[[1, 4]] = IGNORED
    return {
        "[[0.0, 1.0, 2.0]] and target 2": (torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2])),
        "6 rows of 9 logits": (many, targets),
        "6 rows, 2 of them ignored": (many, some),
        "[[−40.0, 80.0]] and target 0": (torch.tensor([[-40.0, 80.0]]), torch.tensor([0])),
        "[[1.0, 0.0], [900.0, 1000.0]] and targets 0, 0": (
            torch.tensor([[1.0, 0.0], [900.0, 1000.0]]),
            torch.tensor([0, 0]),
        ),
        "[[10000.25, 9999.5, 9998.75]] and target 1": (  # whose last bit is worth a thousandth
            torch.tensor([[10000.25, 9999.5, 9998.75]]),
            torch.tensor([1]),
        ),
        "[[−900.0, −1000.0]] and target 0": (torch.tensor([[-900.0, -1000.0]]), torch.tensor([0])),
        "2 rows, both ignored": (many[:2], torch.tensor([IGNORED, IGNORED])),
    }


def _check_gradient(answer: Gradient) -> str:
    for name, (x, targets) in _chunks().items():
        call = f"loss_and_gradient_ of {name}"
        mine, mine_targets = x.clone(), targets.clone()
        with _own_work(call), _no_column(call, targets):
            losses = answer(mine, mine_targets)
        _require_right(call, losses, mine, x, targets)
        require(
            torch.equal(mine_targets, targets), f"{call} changed the targets that it was given."
        )
    _check_bytes_a_row(answer)
    return (
        f"losses and gradients within 1e-5 of float64's · ignored rows 0 · no overflow at 1,000 · "
        f"in place, with at most {MOST_BYTES_A_ROW} bytes a row beside x"
    )


@contextmanager
def _no_column(call: str, targets: Tensor) -> Iterator[None]:
    """An index out of bounds is a mistake to be named, where −100 is one that could be it."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error) or IGNORED not in targets:
            raise
        raise Wrong(f"{call} looks for a column {IGNORED}; wanted loss 0 of such a row.") from error


def _require_right(call: str, losses: Any, x: Tensor, before: Tensor, targets: Tensor) -> None:
    """The losses, and their gradients in x, as float64 has them of x before."""
    _require_tensor(call, losses, (len(before),))
    exact = before.double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORED)
    wanted.sum().backward()
    _require_numbers(f"{call}: the losses are", losses, wanted.detach())
    require(
        not (torch.equal(x, before) and exact.grad.any()),
        f"{call} left x as it was; wanted the gradients in it, in place.",
    )
    _require_rows(f"{call}: x, row", x, exact.grad)


def _require_tensor(call: str, got: Any, shape: tuple[int, ...]) -> None:
    require(
        isinstance(got, Tensor),
        f"{call} gave {type(got).__name__}; wanted a Tensor."
        f"{' Is there a return?' if got is None else ''}",
    )
    require(
        got.shape == shape,
        f"{call} gave a tensor of shape {tuple(got.shape)}; wanted {shape}.",
    )
    require(
        got.dtype in (torch.float32, torch.float64),
        f"{call} gave a loss in {got.dtype}; wanted torch.float32, whatever the inputs have.",
    )


def _require_numbers(what: str, got: Tensor, wanted: Tensor) -> None:
    off = (got.double() - wanted).abs() > 1e-5 * (1 + wanted.abs())
    require(
        got.isfinite().all() and not off.any(),
        f"{what} {_in_words(got)}; wanted {_in_words(wanted)}.",
    )


def _require_rows(what: str, got: Tensor, wanted: Tensor) -> None:
    for n, (a, b) in enumerate(zip(got, wanted, strict=True)):
        _require_numbers(f"{what} {n}, is", a, b)


def _in_words(x: Tensor) -> str:
    shown = ", ".join(f"{number:z.3f}" for number in x.flatten()[:9].tolist())
    return f"[{shown}{', …' if x.numel() > 9 else ''}]"


def _check_bytes_a_row(answer: Gradient) -> None:
    """By what the allocator handed out: a kernel's own memory is no tensor that a meter sees."""
    n, vocab = CHUNK_SHAPE
    call = f"loss_and_gradient_ of {n} rows of {vocab:,} logits"
    before, targets = torch.linspace(-1, 1, n * vocab).view(n, vocab), torch.arange(n)
    x, given = before.clone(), []
    recording = record(lambda: given.append(answer(x, targets)))
    _require_right(call, given.pop(), x, before, targets)
    second = [event for event in recording.events if event.bytes >= x.nbytes]
    if second:
        name, taken = second[0].operator.removeprefix("aten::"), second[0].bytes
        raise Wrong(
            f"{call}: {name or 'something'} takes {taken:,} bytes at once, beside the {x.nbytes:,} "
            f"of x; wanted no second (n, V), at most {MOST_BYTES_A_ROW} bytes a row."
        )
    taken = recording.peak_bytes / n
    require(
        taken <= MOST_BYTES_A_ROW,
        f"{call} takes {taken:,.0f} bytes more for each row; wanted at most {MOST_BYTES_A_ROW}.",
    )
    _require_tensors_only(call, lambda: answer(before, targets))


_BEGIN, _END = "    ignored = targets == -100", "    return losses"
_LARGEST = "x.amax(1, keepdim=True)"
_AT_LABEL = f"at_label = x.sub_({_LARGEST}).gather(1, labels)"
_ONE_LESS = "-torch.ones_like(z)"
_MASKED_X = "    x.masked_fill_(ignored.unsqueeze(1), 0)\n"
_MASKED = "losses.masked_fill(ignored, 0)"
# What is read at the label, when, and what is added to log z.
_READ_BEFORE = (_AT_LABEL, f"row_max, at_label = {_LARGEST}, x.gather(1, labels); x.sub_(row_max)")
_READ_AFTER_EXP = (
    (_AT_LABEL, f"row_max = {_LARGEST}; x.sub_(row_max)"),
    ("    losses =", "    at_label = x.gather(1, labels)\n    losses ="),
)
_LARGEST_ADDED = ("z.log() - at_label", "z.log() + row_max - at_label")


_GRADIENT = Exercise(
    id="11.2",
    title="A chunk's gradient, in its own logits",
    minutes=15,
    difficulty=3,
    hints=(
        "Functions whose names end in _ write into their tensor: sub_, exp_, div_, masked_fill_. "
        "What you need on the way (the largest of each row, then x[y] of what is left), take "
        "before you write over it.",
        "−100 is no column. Give ignored rows label 0 for a while, and set their loss and their "
        "row of x to 0 at the end. gather(1, labels.unsqueeze(1)) picks a number of each row, "
        "scatter_add_ adds to it.",
        "at_label = x.sub_(x.amax(1, keepdim=True)).gather(1, labels); z = x.exp_().sum(1, "
        "keepdim=True); losses = z.log() - at_label; x.div_(z).scatter_add_(1, labels, "
        "-torch.ones_like(z)). Two things are left to do, one in x and one to the losses: the "
        "ignored rows.",
    ),
    reference=loss_and_gradient_,
    check=_check_gradient,
    wrong_answers=mistakes(
        "11.2",
        (
            "Without the row's largest subtracted, e to the 1000 is infinite.",
            (_LARGEST, "x.new_zeros(len(x), 1)"),
        ),
        ("One largest for all rows: each row has its own.", (_LARGEST, "x.amax()")),
        (
            "−log of a probability that has become 0 is infinite: log z − x[y] is not.",
            (
                "x.div_(z).scatter",
                "losses = -x.div_(z).gather(1, labels).log()[:, 0]\n    x.scatter",
            ),
        ),
        ("An ignored row has lost its loss, but not its gradient.", (_MASKED_X, "")),
        ("An ignored row still has a loss: it is to be 0.", (_MASKED, "losses")),
        (
            "This is softmax alone: 1 less at each row's target is missing.",
            (f".scatter_add_(1, labels, {_ONE_LESS})", ""),
        ),
        (
            "1 is added at the target; it is softmax minus one-hot.",
            (_ONE_LESS, "torch.ones_like(z)"),
        ),
        (
            "The sign is the other way round: softmax minus one-hot, not one-hot minus softmax.",
            (f"{_ONE_LESS})", f"{_ONE_LESS}).neg_()"),
        ),
        (
            "The exponentials are not divided by their sum: each row's gradient sums to 0.",
            ("x.div_(z).", "x."),
        ),
        (
            "These are the gradients of the mean; wanted those of the sum. A chunk does not know "
            "how many rows count in all.",
            (_MASKED_X, f"    x.div_((~ignored).sum().clamp(min=1))\n{_MASKED_X}"),
        ),
        ("The losses are averaged; wanted one for each row.", (_MASKED, f"{_MASKED}.mean()")),
        (
            "The gradients are in a tensor of their own, and x is still there beside it.",
            (_BEGIN, f"    x = x.clone()\n{_BEGIN}"),
        ),
        (
            "The right numbers, by way of a second tensor as large as x: write into x all along.",
            (_BEGIN, f"    given, x = x, x.clone()\n{_BEGIN}"),
            (_END, f"    given.copy_(x)\n{_END}"),
        ),
        (
            "A one-hot matrix is of int64, 8 bytes a logit: scatter_add_ touches one a row.",
            (
                f".scatter_add_(1, labels, {_ONE_LESS})",
                ".sub_(F.one_hot(labels[:, 0], x.shape[1]))",
            ),
        ),
        (
            "logsumexp exponentiates into a tensor of its own, inside its kernel, where the meter "
            "does not look: exp_ and sum do without.",
            (_BEGIN, f"    log_z = x.logsumexp(1)\n{_BEGIN}"),
            (_END, "    return 0 * log_z + losses"),
        ),
        (
            "An array of numpy as large as x is a second (n, V), whoever made it.",
            (_BEGIN, f"    given, x = x, torch.from_numpy(x.numpy().copy())\n{_BEGIN}"),
            (_END, f"    given.copy_(x)\n{_END}"),
        ),
        (
            "Give ignored rows another label for a while: targets.masked_fill(ignored, 0).",
            ("targets.masked_fill(ignored, 0)", "targets"),
        ),
        (
            "x[y] was taken before the row's largest was subtracted: of two numbers of ten "
            "thousand the difference has lost its digits.",
            _READ_BEFORE,
            _LARGEST_ADDED,
        ),
        (
            "The row's largest was subtracted before the sum was made: subtract it from x[y], too.",
            _READ_BEFORE,
        ),
        (
            "The target's logit is read after exp_ has written over it, and top is missing: gather "
            "first.",
            *_READ_AFTER_EXP,
        ),
        (
            "What is read at the target is its exponential: gather its logit before exp_.",
            *_READ_AFTER_EXP,
            _LARGEST_ADDED,
        ),
        (
            "What is read at the target has lost top already, and top is added once more.",
            (_AT_LABEL, f"row_max = {_LARGEST}; at_label = x.sub_(row_max).gather(1, labels)"),
            _LARGEST_ADDED,
        ),
        (
            "The losses are rounded to 8 bits: hundreds of them are to be summed.",
            (_MASKED, f"{_MASKED}.bfloat16()"),
        ),
    ),
)

# ------------------------------------------------------------------ 11.3: the Function


@dataclass(frozen=True)
class _Case:
    """What is asked; the gradient that comes from above is `upstream`."""

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
        hidden, weight, targets = _inputs(self.rows, self.width, self.vocab, self.dtype)
        targets[list(self.ignored)] = IGNORED
        return hidden, weight, targets


CASES = (
    _Case("2 rows at once", 2, 2),
    _Case("6 rows, 2 at a time", 6, 2),
    _Case("7 rows, 3 at a time", 7, 3),
    _Case("2 rows, 5 at a time", 2, 5),
    _Case("7 rows, 3 at a time, 3 of them ignored", 7, 3, ignored=(0, 3, 4)),
    _Case("4 rows, 2 at a time, all ignored", 4, 2, ignored=(0, 1, 2, 3)),
    _Case("7 rows, 3 at a time, times 0.25", 7, 3, upstream=0.25),
    _Case("7 rows in bfloat16, 3 at a time", 7, 3, dtype=torch.bfloat16),
)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
# Where bytes are counted: weight is larger than two chunks' logits.
LARGE = (
    _Case("200 rows, 8 at a time", 200, 8, width=24, vocab=500),
    _Case("50 rows, 3 at a time", 50, 3, width=16, vocab=200),
    _Case("90 rows in bfloat16, 8 at a time", 90, 8, dtype=torch.bfloat16, width=24, vocab=500),
)


def _inputs(
    rows: int, width: int = 4, vocab: int = 11, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, width, generator=random) for n in (rows, vocab))
    targets = torch.randint(vocab, (rows,), generator=random)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _check_chunked(answer: Loss) -> str:
    for case in CASES:
        _check_case(answer, case)
    _check_second_pass(answer)
    first, *others = LARGE
    peak, held = _check_bytes(answer, first)
    for case in others:
        _check_bytes(answer, case)
    _require_tensors_only(first.call, lambda: answer(*first.inputs, first.chunk).backward())
    _check_sum(answer)
    one = chunked_bytes(first.rows, first.width, first.vocab, first.chunk)
    is_two = peak > one + 2 * first.chunk * first.vocab
    return (
        f"loss and gradients within 1e-5 of float64's, in chunks that divide and that do not · "
        f"{first.name}: {peak:,} bytes at the peak, {held:,} wait for backward, "
        f"the logits would be {4 * first.rows * first.vocab:,} · three products"
        f"{' · two chunks are alive at once: del x before the next halves that' if is_two else ''}"
    )


def _loss_of(answer: Loss, call: str, *given: Any) -> Tensor:
    with _own_work(call):
        loss = answer(*given)
    _require_tensor(call, loss, ())
    require(
        loss.requires_grad,
        f"{call} gave a loss without a graph (requires_grad is False); no gradient can pass.",
    )
    return loss


def _check_case(answer: Loss, case: _Case) -> None:
    hidden, weight, targets = case.inputs
    before = [x.detach().clone() for x in (hidden, weight, targets)]
    with _Watch(weight) as watch:
        loss = _loss_of(answer, case.call, hidden, weight, targets, case.chunk)
        (loss * case.upstream).backward()
    _require_value(case, loss.item(), (hidden, weight), before)
    after = [x.detach() for x in (hidden, weight, targets)]
    require(
        all(map(torch.equal, before, after)), f"{case.call} changed what it was given, in place."
    )
    _require_no_logits(case, watch)
    _require_chunks(case, watch)


def _require_value(
    case: _Case, got: float, inputs: tuple[Tensor, Tensor], given: list[Tensor]
) -> None:
    """The loss, and the gradients that the inputs have now, as float64 has them of what was
    given."""
    *factors, targets = given
    exact = [x.detach().double().requires_grad_() for x in factors]
    sum_of_all = F.cross_entropy(exact[0] @ exact[1].mT, targets, reduction="sum")
    wanted = sum_of_all / max(1, case.rows - len(case.ignored))
    tolerance = TOLERANCES[case.dtype]
    right = wanted.item()
    require(
        abs(got - right) <= tolerance * (1 + abs(right)),
        f"{case.call}: the loss is {got:.6f}, wanted {right:.6f}.",
    )
    (wanted * case.upstream).backward()
    for name, x, y in zip(("hidden", "weight"), inputs, exact, strict=True):
        _require_gradient(f"{case.call}: the gradient of {name}", x.grad, y.grad, tolerance)


class _Watch(Operations):
    """Counts what is multiplied, how many rows of hidden meet the weight at once, at most, and
    the numbers of the largest tensor that is made."""

    PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv"})

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.rows, self.largest, self.width = 0, 0, weight.shape[1]
        self.place = weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        numbers = [x.untyped_storage().nbytes() // x.element_size() for x in made]
        self.largest = max(self.largest, *numbers, 0)
        if func.overloadpacket.__name__.removesuffix("_") in self.PRODUCTS:
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            if self._is_weight(a) and a.shape[-1] == self.width:
                self.rows = max(self.rows, b.numel() // self.width)
            elif self._is_weight(b) and b.shape[-2:][0] == self.width:
                self.rows = max(self.rows, a.numel() // self.width)
        return result

    def _is_weight(self, x: Tensor) -> bool:
        """Or a part of it. (A copy of the weight, bytes give away.)"""
        return x.untyped_storage().data_ptr() == self.place


def _require_no_logits(case: _Case, watch: _Watch) -> None:
    """Not even for a moment, where there are chunks, and more logits than weights."""
    if case.chunk >= case.rows or case.rows <= case.width:
        return
    require(
        watch.largest < case.rows * case.vocab,
        f"{case.call} makes a tensor of {watch.largest:,} numbers, as large as all the logits; "
        f"wanted none of more than {case.chunk} · {case.vocab}, gradients aside.",
    )


def _require_chunks(case: _Case, watch: _Watch) -> None:
    """Three products, by `chunk` rows: one each for the logits and the two gradients."""
    products = watch.total / (2 * case.rows * case.vocab * case.width)
    require(
        products < 3.1,
        f"{case.call} multiplies as much as {products:.1f} products of ({case.rows}, {case.width}) "
        f"and ({case.width}, {case.vocab}); wanted 3.",
    )
    rows = min(case.chunk, case.rows)
    require(
        watch.rows in (0, rows),
        f"{case.call} multiplies the weight with at most {watch.rows} row{'s' * (watch.rows > 1)} "
        f"of hidden at once; wanted {rows}.",
    )


def _require_gradient(what: str, got: Tensor | None, wanted: Tensor, tolerance: float) -> None:
    if got is None:
        raise Wrong(f"{what} is missing after backward.")
    size, length = wanted.norm().item(), got.double().norm().item()
    off = (got.double() - wanted).norm().item()
    require(
        off <= tolerance * (size + 1e-9),
        f"{what} is {off:.3g} off, in length; it is {length:.3g} long, wanted {size:.3g}.",
    )


def _check_sum(answer: Loss) -> None:
    """In bfloat16, where each row's share of the sum is less than the last bit of it."""
    rows = 400
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)
    call = f"chunked_loss of {rows} rows in bfloat16, all alike, one at a time"
    loss = _loss_of(answer, call, hidden, weight, targets, 1)
    loss.backward()
    got = weight.grad.flatten().tolist()
    require(
        got == [-0.5, 0.5],
        f"{call}: the gradient of weight is [{got[0]:.3f}, {got[1]:.3f}], wanted [−0.500, 0.500].",
    )
    require(
        abs(loss.item() - log(2)) < 1e-4,
        f"{call}: the loss is {loss.item():.4f}, wanted {log(2):.4f}.",
    )


def _check_second_pass(answer: Loss) -> None:
    """It may be refused, but not be another."""
    hidden, weight, targets = _inputs(7)
    call = "chunked_loss of 7 rows, 3 at a time"
    loss = _loss_of(answer, call, hidden, weight, targets, 3)
    first = torch.autograd.grad(loss, weight, torch.tensor(0.5), retain_graph=True)[0].clone()
    try:
        second = torch.autograd.grad(loss, weight, torch.tensor(0.5))[0]
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return
    require(
        torch.allclose(second, first),
        f"{call}: a second backward pass gives weight a gradient of {second.norm():.3g} in length, "
        f"the first gave {first.norm():.3g}; wanted the same, or an error.",
    )


def _check_bytes(answer: Loss, case: _Case) -> tuple[int, int]:
    """At the peak, and waiting for backward."""
    call, (rows, width, vocab, chunk) = case.call, (case.rows, case.width, case.vocab, case.chunk)
    hidden, weight, targets = case.inputs
    kept: list[Tensor] = []
    forward = measure(lambda: kept.append(answer(hidden, weight, targets, chunk)))
    kept.clear()
    found = []

    def step() -> None:
        loss = answer(hidden, weight, targets, chunk)
        found.append(loss.detach())
        loss.backward()

    with _Watch(weight) as watch:
        trace = measure(step)
    _require_value(case, found.pop().item(), (hidden, weight), [hidden, weight, targets])
    _require_no_logits(case, watch)
    given = hidden.nbytes + weight.nbytes + targets.nbytes
    held, gradients = forward.live_bytes - given, 4 * (rows + vocab) * width
    require(
        held <= gradients + 64,
        f"{call}: {held:,} bytes wait for backward; wanted {gradients:,}, both gradients.",
    )
    is_rounded = weight.dtype != torch.float32
    copied = _require_one_sum(case, forward, trace, weight)
    a_logit = 4 + is_rounded * weight.itemsize
    summing = gradients + copied + chunk * (2 * a_logit * vocab + 4 * width)
    rounding = gradients + is_rounded * (hidden.nbytes + weight.nbytes)
    most, peak = max(summing, rounding) + 64 * rows, trace.peak_bytes - given
    require(
        peak <= most,
        f"{call} takes {peak:,} bytes at its fullest, in {trace.peak_phase}; wanted at most "
        f"{most:,}: both gradients, {gradients:,}, two chunks of logits, and a few for each row. "
        f"Alive then: {_alive_then(trace)}.",
        evidence=(call, trace.peak_phase, "bytes"),
    )
    _require_chunks(case, watch)
    return peak, held


def _require_one_sum(case: _Case, forward: Trace, whole: Trace, weight: Tensor) -> int:
    """No tensor as large as weight or hidden beside the sum of its gradient, whatever else is
    alive. Returns the bytes of a float32 copy of a weight in fewer bits, which may pass."""
    is_rounded = weight.dtype != torch.float32
    of_weight, of_hidden = case.vocab * case.width, case.rows * case.width
    for phase, trace in (("forward", forward), ("backward", whole)):
        for name, numbers, spare in (
            ("weight", of_weight, 4 * is_rounded),
            ("hidden", of_hidden, weight.itemsize * is_rounded),
        ):
            most = (4 + spare) * numbers
            require(
                _most_alive(trace, numbers) <= most,
                f"{case.call} holds more than {most:,} bytes at once in tensors as large as "
                f"{name}, in {phase}; wanted the sum of its gradient alone.",
            )
    return is_rounded * max(0, _most_alive(forward, of_weight) - 4 * of_weight)


def _most_alive(trace: Trace, numbers: int) -> int:
    """Bytes alive at once in tensors of so many numbers, beyond what was there before."""
    alive: dict[int, int] = {}
    most = 0
    for event in trace.events:
        if event.bytes < 0:
            alive.pop(event.storage, None)
        elif event.phase != "before" and prod(event.shape) == numbers:
            alive[event.storage] = event.bytes
            most = max(most, sum(alive.values()))
    return most


def _alive_then(trace: Trace) -> str:
    """The shapes that take the most at the peak."""
    taken: Counter[tuple[int, ...]] = Counter()
    count: Counter[tuple[int, ...]] = Counter()
    for event in trace.alive(trace.peak_position):
        if event.phase != "before":
            taken[event.shape] += event.bytes
            count[event.shape] += 1
    return ", ".join(f"{count[shape]} × {shape}" for shape, _ in taken.most_common(4))


def _by_loop(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Chunks, and autograd keeps each of them."""
    total = 0
    for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = (h @ weight.mT).float()
        total = total + F.cross_entropy(logits, t, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def _checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Each chunk forgotten, and made again."""

    def loss_of(h: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy((h @ weight.mT).float(), t, reduction="sum")

    run = torch_checkpoint
    pairs = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    total = sum(run(loss_of, h, t, use_reentrant=False) for h, t in pairs)
    return total / (targets != IGNORED).sum().clamp(min=1)


def _at_once(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    logits = (hidden @ weight.mT).float()
    total = F.cross_entropy(logits, targets, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


_ROWS_OF, _SPAN = "range(0, len(hidden), chunk)", "start + chunk)"
_COUNT = "(targets != -100).sum().clamp(min=1)"
_SUMMED = "total += loss_and_gradient_(x, targets[rows]).sum()"
_MEANS = f"""kept = {_COUNT.replace("targets", "targets[rows]")} * -(-len(hidden) // chunk)
            {_SUMMED} / kept
            x /= kept"""
_ADDED = "of_weight.addmm_(x.mT, hidden[rows].float())"
_FACTOR = "upstream / ctx.count"
_SAVED = "ctx.save_for_backward(of_hidden, of_weight)"
_LOGITS = "(hidden[rows] @ weight.mT).float()"

_CHUNKED = Exercise(
    id="11.3",
    title="Chunked cross-entropy",
    minutes=25,
    difficulty=4,
    hints=(
        "forward does all the work: for each slice of rows make its logits, let "
        "loss_and_gradient_ turn them into losses and gradients, and add these to three sums: of "
        "the losses, of hidden's gradient (each row once), of weight's. backward only multiplies.",
        "The gradient of hidden's rows is x @ weight, that of weight is x.mT @ hidden[rows], "
        "summed over chunks; total.addmm_(a, b) adds a product to a sum without another tensor. "
        "Divide by the number of rows that count in all of targets, once, at the end.",
        "x = (hidden[rows] @ weight.mT).float(); total += loss_and_gradient_(x, "
        "targets[rows]).sum(); dh[rows] = x.to(weight.dtype) @ weight; dw.addmm_(x.mT, "
        "hidden[rows].float()); del x (or it lives on while the next is made). Then ctx.count = "
        "(targets != -100).sum().clamp(min=1) and ctx.save_for_backward(dh, dw). backward "
        "multiplies both by the same number; which two numbers is that made of?",
    ),
    reference=chunked_loss,
    check=_check_chunked,
    wrong_answers=(
        WrongAnswer(
            _by_loop,
            "A loop without a Function: autograd keeps every chunk's log-softmax for backward.",
        ),
        WrongAnswer(
            _checkpointed,
            "Each chunk is forgotten and made again: it fits, but costs a fourth product, and the "
            "gradients could be made at once.",
        ),
        WrongAnswer(_at_once, "All the logits at once: this is F.cross_entropy as ever."),
        WrongAnswer(
            lambda *given: _by_loop(*given).detach(),
            "The loss is cut off: return what ChunkedLoss.apply gives.",
        ),
        *mistakes(
            "11.3",
            (
                "A mean for each chunk, and the mean of those: a short chunk's rows count for "
                "more.",
                (f"ctx.count = {_COUNT}", "ctx.count = 1"),
                (_SUMMED, _MEANS),
            ),
            (
                "The rows behind the last whole chunk are left out: the last chunk may be short.",
                (_ROWS_OF, "range(0, len(hidden) // chunk * chunk, chunk)"),
            ),
            (
                "The last chunk reaches back over rows that were counted already.",
                ("slice(start,", "slice(max(0, min(start, len(hidden) - chunk)),"),
            ),
            (
                "The ignored rows are in the denominator, too: a mean over those that count.",
                (_COUNT, "max(1, len(targets))"),
            ),
            (
                "0 / 0: where no row counts, the loss and all gradients are 0.",
                (".clamp(min=1)", ""),
            ),
            (
                "What backward is handed is not used: the gradient is that of the loss itself, "
                "times whatever comes after it.",
                (_FACTOR, "1 / ctx.count"),
            ),
            (
                "The gradients are those of the sum: divide them by the number of rows, as the "
                "loss.",
                (_FACTOR, "upstream"),
            ),
            (
                "The sum of weight's gradient is in bfloat16: shares below its last bit are lost.",
                (", dtype=torch.float32", ""),
                (_ADDED, "of_weight.addmm_(x.to(weight.dtype).mT, hidden[rows])"),
            ),
            (
                "dw += x.mT @ h makes the product first, as large as dw; dw.addmm_(x.mT, h) does "
                "not.",
                (_ADDED, "of_weight += x.mT @ hidden[rows].float()"),
            ),
            (
                "weight's gradient is that of the last chunk alone: add them up.",
                (_ADDED, "of_weight.copy_(x.mT @ hidden[rows].float())"),
            ),
            (
                "A second backward pass finds gradients that the first has scaled already; what is "
                "saved by ctx.save_for_backward, autograd watches over.",
                (_SAVED, "ctx.gradients = of_hidden, of_weight"),
                ("ctx.saved_tensors", "ctx.gradients"),
            ),
            (
                "g * factor makes another gradient beside the one that is kept: g.mul_(factor).",
                (f"g.mul_({_FACTOR})", f"g * ({_FACTOR})"),
            ),
            (
                "Every chunk's logits stay on ctx: all of them, in pieces.",
                ("del x ", "ctx.kept = [*getattr(ctx, 'kept', ()), x]; del x "),
            ),
            (
                "The sum of losses is in bfloat16: hundreds of them outgrow 8 bits.",
                ("torch.zeros(()", "torch.zeros((), dtype=hidden.dtype"),
                ("return total /", "return total.float() /"),
            ),
            (
                "x has stayed in bfloat16, and its losses are rounded to 8 bits: .float().",
                (_LOGITS, "hidden[rows] @ weight.mT"),
                ("addmm_(x.mT,", "addmm_(x.mT.float(),"),
            ),
            (
                "hidden.float() is a copy of all rows: make a chunk of them float32, or x.",
                ("of_hidden = torch", "hidden = hidden.float(); of_hidden = torch"),
                (_LOGITS, "(hidden[rows].to(weight.dtype) @ weight.mT).float()"),
            ),
            (
                "A row at a time, whatever chunk says: small products are slow.",
                (_ROWS_OF, "range(len(hidden))"),
                (_SPAN, "start + 1)"),
            ),
            (
                "These are twice as many rows as chunk says.",
                (_ROWS_OF, "range(0, len(hidden), 2 * chunk)"),
                (_SPAN, "start + 2 * chunk)"),
            ),
        ),
    ),
)

# ------------------------------------------------------------------ 11.4: how many rows

ROOM = 4 * (100 + 10)  # bytes for each row of a chunk, at a width of 10 and 100 tokens


def _check_rows(answer: Callable[..., int]) -> str:
    rows, width, vocab = 12, 10, 100
    floor = chunked_bytes(rows, width, vocab, 0)
    _check_call(answer, rows, width, vocab, floor + 20 * ROOM)
    _check_call(
        answer, 97, 10, 20, chunked_bytes(97, 10, 20, 15)
    )  # no two mistakes give one number
    for count in (12, 5, 11, 6, 7, 1):
        _check_call(answer, rows, width, vocab, floor + count * ROOM)
    _check_call(answer, rows, width, vocab, floor + 12 * ROOM - 1)
    _check_call(answer, rows, width, vocab, floor + ROOM - 1)
    _check_call(answer, rows, width, vocab, 1000)
    for large in ((1000, 64, 5000, 4_000_000), (2048, 512, 32_000, 100 * 2**20)):
        _check_call(answer, *large)
    return "the fewest chunks that fit, as even as they can be · 0 below the floor"


def _check_call(
    answer: Callable[..., int], rows: int, width: int, vocab: int, budget_bytes: int
) -> None:
    call = f"chunk_rows({rows}, {width}, {vocab}, budget_bytes={budget_bytes})"
    sizes = (-(-rows // chunks) for chunks in range(1, rows + 1))
    fitting = (n for n in sizes if chunked_bytes(rows, width, vocab, n) <= budget_bytes)
    equal(call, answer(rows, width, vocab, budget_bytes), next(fitting, 0), "rows")


_A_ROW, _EVENLY = "4 * (vocab + width)", "return -(-rows // chunks)"
_DIVISOR = "return max(n for n in range(1, rows + 1) if rows % n == 0 and n <= most)"

_ROWS = Exercise(
    id="11.4",
    title="How many rows",
    minutes=10,
    difficulty=2,
    hints=(
        "Solve the formula for chunk: what is left of the budget above the two gradients, over the "
        "bytes of a row. Rounded down: that is how many rows fit.",
        "So many rows at once make ⌈rows / most⌉ chunks. Spread the rows evenly over those: the "
        "longest has ⌈rows / chunks⌉. In Python -(-a // b) rounds up.",
        "most = (budget_bytes - 4 * (rows + vocab) * width) // (4 * (vocab + width)); if most < 1: "
        "return 0; chunks = -(-rows // most). The rows of the longest chunk are one line more.",
    ),
    reference=solution("11.4"),
    check=_check_rows,
    wrong_answers=mistakes(
        "11.4",
        (
            "As many as fit leave a short last chunk: as many chunks, but even, need less.",
            (_EVENLY, "return min(most, rows)"),
        ),
        (
            "More rows than there are: a chunk has at most all of them.",
            (_EVENLY, "return most"),
        ),
        (
            "rows // most are too few chunks where most does not divide the rows: round up.",
            ("-(-rows // most)", "max(1, rows // most)"),
        ),
        (
            "The two gradients are there in any case: take them off the budget first.",
            (" - 4 * (rows + vocab) * width", ""),
        ),
        ("hidden has a gradient, too: rows · width.", ("(rows + vocab)", "vocab")),
        (
            "A chunk's rows have a gradient of hidden on the way: vocab + width numbers a row.",
            (_A_ROW, "4 * vocab"),
        ),
        (
            "This makes room for two chunks at once: with del x there is never more than one.",
            (_A_ROW, "8 * (vocab + width)"),
        ),
        (
            "Where not even the gradients fit, the room is below 0: ask for most < 1.",
            ("most < 1", "most == 0"),
        ),
        (
            "Rounded up, one row more than fits: rows that fit, //.",
            (f"room // ({_A_ROW})", f"-(-room // ({_A_ROW}))"),
        ),
        (
            "The last byte of the budget may be used: <=, and not <.",
            ("vocab) * width", "vocab) * width - 1"),
        ),
        (
            "Below the floor not even one row fits: 0 says so, and 1 would not fit.",
            (f"room // ({_A_ROW})", f"max(1, room // ({_A_ROW}))"),
        ),
        (
            "A chunk need not divide the rows: the last one may be shorter.",
            (_EVENLY, _DIVISOR),
        ),
        (
            "No power of two is asked for; more chunks than are needed take time.",
            (_EVENLY, "return 1 << ((-(-rows // chunks)).bit_length() - 1)"),
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def in_chunks(keep: Collection[Any] = (), **plugs: Any) -> Trace:
    """Day 9's step with the logits in chunks, and all eight sequences at once: what stood against
    that were the logits. Every block is computed again, but for what is to be kept of it."""
    technique = combined("bfloat16+chunked-loss")

    def change(model: nn.Module) -> None:
        technique.change_model(model)
        keep_of_each_block(model, keep)

    lion = of_all_weights(Lion8bit, rounding="stochastic")
    changes = {"change_model": change, "optimizer": lion, **plugs}
    return dry_trace(SETTING, replace(technique, **changes))


DAY = Day(
    exercises=(_ALL_LOGITS, _GRADIENT, _CHUNKED, _ROWS),
    bill=Bill("day 11: logits in chunks, all eight at once", in_chunks),
)
