"""Day 6: choosing what to keep."""

import gc
import math
import random
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from functools import cache, partial
from itertools import chain as chained
from itertools import combinations, count
from typing import Any

import torch
from torch import Tensor, nn

from memlab.checkpointing import (
    ATTENTION,
    MATMULS,
    Chain,
    CheckpointError,
    Costs,
    best_within,
    checkpoint,
    predicted_peak_bytes,
    recomputed,
    tradeoffs,
)
from memlab.checkpointing.optimal import Tradeoff
from memlab.checkpointing.recording import Operator
from memlab.checkpointing.schedules import Schedule, check_schedule
from memlab.course.bill_steps import attention_kept
from memlab.course.exercises import Bill, Day, Wrong, equal, require
from memlab.course.properties import furthest, new_bytes, rough, unchanged
from memlab.course.solutions import checked, solution
from memlab.internals.torch_internals import TorchDispatchMode
from memlab.metering import measure
from memlab.model import GPT, PRESETS
from memlab.reference.selective_checkpointing import Choosing

# ------------------------------------------------------------------ 6.1: the costs of a schedule

Stages = Sequence[Costs]
ScheduleCosts = Callable[[Schedule, Stages], tuple[int, int, int]]

_EQUAL = [Costs(forward=30, backward=60, output_bytes=8, saved_bytes=50, tail=10)] * 6
_UNEQUAL = [
    Costs(forward, 2 * forward, output_bytes=output, saved_bytes=saved, tail=tail)
    for forward, output, saved, tail in (
        (10, 9, 20, 1),
        (30, 14, 50, 3),
        (5, 6, 90, 2),
        (40, 8, 31, 7),
        (20, 11, 64, 4),
    )
]
_SCHEDULES: tuple[tuple[list[Costs], Schedule], ...] = (
    (_EQUAL[:1], (0,)),
    (_EQUAL[:4], (0, 1, 2, 3)),
    (_EQUAL[:4], ((0, 1), 2, 3)),
    (_EQUAL[:4], ((0,), (1,), (2,), (3,))),
    (_EQUAL[:4], ((0, 1), (2, 3))),
    (_EQUAL[:6], ((0,), 1, (2,), 3, (4,), 5)),
    (_UNEQUAL, (0, 1, 2, 3, 4)),
    (_UNEQUAL, ((0, 1, 2), 3, (4,))),
    (_UNEQUAL, (0, (1, 2, 3), 4)),
    (_UNEQUAL, (0, (1, 2), (3, 4))),
)
schedule_costs: ScheduleCosts = solution("6.1")


def _check_schedule_costs(answer: ScheduleCosts) -> str:
    for stages, schedule in _SCHEDULES:
        case = f"schedule_costs({schedule}, stages), with {_described(stages)},"
        with unchanged(case, stages=stages):
            got = answer(schedule, stages)
        wanted = schedule_costs(schedule, stages)
        equal(f"{case}{_wrong_parts(got, wanted)}", got, wanted)
    held, most, again = schedule_costs(_SCHEDULES[-1][1], _UNEQUAL)
    return (
        f"{len(_SCHEDULES)} schedules: held, most and again · for the last one, held {held} bytes, "
        f"most {most} bytes, again {again} operations"
    )


def _wrong_parts(got: Any, wanted: tuple[int, int, int]) -> str:
    """Names the wrong values if some of the three are right."""
    if not isinstance(got, tuple) or len(got) != len(wanted):
        return ""
    pairs = zip(("held", "most", "again"), got, wanted, strict=True)
    wrong = [name for name, mine, right in pairs if mine != right]
    return f" has a wrong {' and a wrong '.join(wrong)}:" if 0 < len(wrong) < len(wanted) else ""


def _described(stages: Stages) -> str:
    """All costs of the case, so that a learner can redo the calculation."""
    columns = {
        name: [getattr(stage, name) for stage in stages]
        for name in ("saved_bytes", "output_bytes", "forward", "tail")
    }
    alike = all(len(set(values)) == 1 for values in columns.values())
    words = (f"{name} {values[0] if alike else values}" for name, values in columns.items())
    each = "each of" if alike and len(stages) > 1 else "of"
    return f"{len(stages)} stage{'s' * (len(stages) > 1)} {each} {', '.join(words)}"


# ------------------------------------------------------------------ 6.2: the best schedule

BestSchedule = Callable[[Any, int], Schedule | None]  # takes a Chain, or a DocumentedChain
best_schedule: BestSchedule = solution("6.2")


def random_chain(stages: int, seed: int) -> Chain:
    """Unequal stages, with temporaries, gradients and tails."""
    rng = random.Random(seed)

    def costs(output: int) -> Costs:
        forward = rng.randint(5, 30)
        saved = output + rng.randint(10, 100)
        others = [rng.randint(0, 20) for _ in range(5)]
        return Costs(forward, 2 * forward, output, saved, *[*others, rng.randint(0, 5)])

    return Chain(
        tuple(costs(8) for _ in range(stages)),
        first=costs(8),
        last=costs(0),
        held_bytes=rng.randint(20, 50),
        call_bytes=rng.randint(0, 3),
    )


# Stages and seed of a chain, a choice on its Pareto front, and bytes to add to the choice's peak.
# The first five rows distinguish all named mistakes.
_BUDGETS = (
    *((4, 12, 11, 40), (4, 3, 0, -1), (4, 12, 10, 0), (4, 8, 4, 3), (4, 8, 1, 0)),
    *((1, 0, 0, 0), (1, 0, 1, 0), (2, 1, 0, -1), (2, 1, 1, 0), (3, 2, 2, 1), (3, 11, 0, 0)),
)


@cache
def _cases() -> tuple[tuple[str, Chain, int, Schedule | None], ...]:
    """The call, the chain, a budget and a best schedule."""
    cases = []
    for stages, seed, place, spare in _BUDGETS:
        chain = random_chain(stages, seed)
        cases.append((chain, tradeoffs(chain)[place].peak_bytes + spare))
    long_chain = random_chain(7, 5)
    cases += [(long_chain, peak) for peak, *_ in tradeoffs(long_chain)[::6]]
    return tuple(
        (
            f"best_schedule(chain of {_counted_stages(chain)}, {budget:,} bytes)",
            chain,
            budget,
            _best_of(tradeoffs(chain), budget),
        )
        for chain, budget in cases
    )


def _counted_stages(chain: Any) -> str:
    stages = len(chain.stages)
    return f"{stages} stage{'s' * (stages > 1)}"


def _best_of(front: list[Tradeoff], budget: int) -> Schedule | None:
    fitting = [choice.schedule for choice in front if choice.peak_bytes <= budget]
    return fitting[-1] if fitting else None


class DocumentedChain:
    """A chain with only the methods in the lesson's table, so no library search works."""

    NAMES = ("stages", "if_last", "if_plain", "if_segment", "rerun", "in_all")

    def __init__(self, chain: Chain, most_calls: float = math.inf) -> None:
        self._documented = {name: getattr(chain, name) for name in self.NAMES}
        self.used: set[str] = set()
        self.calls, self._most_calls = 0, most_calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.used.add(name)
        if name in ("if_segment", "rerun"):
            return partial(self._of_a_segment, name)
        if name not in self._documented:
            raise Wrong(
                f"best_schedule uses chain.{name}. The check's chain has only "
                f"{', '.join(self.NAMES)}: write the search with these."
            )
        return self._documented[name]

    def _of_a_segment(self, name: str, i: int, k: int, *rest: int) -> int:
        self.calls += 1
        if self.calls > self._most_calls:
            raise Wrong(
                f"best_schedule of a chain of {_counted_stages(self)} calls chain.if_segment and "
                f"chain.rerun more than {self._most_calls:,} times: it computes the same choices "
                f"again and again. Keep the results of choices(i, j).",
                "too many calls",
            )
        if i >= k:
            self.used.add(f"{name} for an empty segment")
        return int(self._documented[name](i, k, *rest))


def _check_best_schedule(answer: BestSchedule) -> str:
    cases = [(*case, DocumentedChain(case[1])) for case in _cases()]
    results = [_called(answer, case, chain, budget) for case, _, budget, _, chain in cases]
    _require_few_calls(answer)
    advice = _misused(set().union(*(chain.used for *_, chain in cases)))
    advice += " Is there a return?" if all(got is None for got in results) else ""
    for (case, chain, budget, wanted), got in zip(_cases(), results, strict=True):
        fault = _fault(case, chain, budget, wanted, got)
        require(not fault, f"{case} gave {got}{fault}{advice}")
    return f"{len(cases)} budgets: every schedule fits and reruns the fewest operations"


def _require_few_calls(answer: BestSchedule) -> None:
    """Without a memory of results, the number of calls grows exponentially."""
    chain = random_chain(7, 5)
    budget = tradeoffs(chain)[0].peak_bytes
    best_schedule(counted := DocumentedChain(chain), budget)
    answer(DocumentedChain(chain, most_calls=4 * counted.calls), budget)


def _misused(used: set[str]) -> str:
    """Name methods that were never called, or called for an empty segment. This distinguishes
    mistakes that give the same schedules."""
    missing = [name for name in DocumentedChain.NAMES if name not in used]
    if missing:
        return f" Your answer never used chain.{' or chain.'.join(missing)}."
    return "".join(
        f" Your answer called chain.{name}: segments are i … k-1, with k from i + 1."
        for name in sorted(used.difference(DocumentedChain.NAMES))
    )


def _called(answer: BestSchedule, case: str, chain: DocumentedChain, budget: int) -> Any:
    try:
        return answer(chain, budget)
    except RecursionError:
        raise Wrong(f"{case}: choices() calls itself forever.") from None


def _fault(case: str, chain: Chain, budget: int, wanted: Any, got: Any) -> str:
    """The fault of the schedule as the end of a sentence; empty if it has none."""
    if wanted is None:
        return "" if got is None else "; wanted None, since no schedule fits."
    least = recomputed(wanted, chain)
    wants = f"; wanted {least:,} operations rerun, as in {wanted}."
    if got is None:
        return wants
    try:
        check_schedule(got, len(chain.stages))
    except (TypeError, ValueError) as error:
        raise Wrong(f"{case} gave no valid schedule: {error}.") from None
    peak, again = predicted_peak_bytes(got, chain), recomputed(got, chain)
    if peak > budget:
        return f", which needs {peak:,} bytes, over the budget{wants} You computed too low a peak."
    if again > least:
        return (
            f", which reruns {again:,} operations{wants} Your search misses choices, computes too "
            f"high a peak, or counts the rerun operations wrong."
        )
    return ""


# ------------------------------------------------------------------ 6.3: selective, by operator

MakeMode = Callable[[Collection[Any]], TorchDispatchMode]
ROWS, WIDTH = 8, 16
TENSOR = 4 * ROWS * WIDTH  # bytes
aten = torch.ops.aten


class _RunCounter(TorchDispatchMode):
    """Counts the runs of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func] += 1
        return func(*args, **(kwargs or {}))


def _layers() -> list[nn.Module]:
    """Two blocks whose matmuls all have one shape, so a mix-up shows in the values alone."""
    torch.manual_seed(0)

    def linear() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    return [nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()) for _ in range(2)]


def _transformer_block() -> list[nn.Module]:
    torch.manual_seed(0)
    return [GPT(PRESETS["tiny"]).blocks[1]]


class _ScaledAttention(nn.Module):
    """Attention of x with itself; the unusual scale is a keyword argument."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, scale=2.0)


class _Powers(nn.Module):
    """Two overloads of one operator: tensor exponent and scalar exponent."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.square() + 1) ** x + x**3


class _Standardized(nn.Module):
    """One operator makes two tensors, and both need a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(x, dim=-1, keepdim=True)
        return (x - mean) / std


# A case has: its blocks, the shape of x, the chosen operators, and the bytes that may be held (the
# chosen outputs and each block's output).
_SELECTIONS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...], Any, int]] = {
    "1 block, with its 2 matmuls chosen": (
        lambda: _layers()[:1],
        (ROWS, WIDTH),
        MATMULS,
        3 * TENSOR,
    ),
    "2 blocks, with their 4 matmuls chosen": (_layers, (ROWS, WIDTH), MATMULS, 6 * TENSOR),
    "1 block, with its 2 tanh chosen": (
        lambda: _layers()[:1],
        (ROWS, WIDTH),
        frozenset({aten.tanh.default}),
        2 * TENSOR,
    ),
    # 2 × 16 tokens, C = 32, H = 4, KV · D = 16, intermediate size 96. Held are the outputs of q, k,
    # v, the projection, gate, up and down; attention's output and log-sum-exp; the block's output.
    "a transformer block, with matmuls and attention chosen": (
        _transformer_block,
        (2, 16, 32),
        MATMULS | ATTENTION,
        4 * 2 * 16 * (3 * 32 + 2 * 16 + 2 * 96 + (32 + 4) + 32),
    ),
    # Two heads of eight tokens: attention's output, which is the block's, and its log-sum-exp.
    "1 block of attention with scale=2.0, chosen": (
        lambda: [_ScaledAttention()],
        (1, 2, ROWS, WIDTH),
        ATTENTION,
        4 * 2 * ROWS * (WIDTH + 1),
    ),
    "1 block with pow(tensor, tensor) chosen, and pow(tensor, scalar) not": (
        lambda: [_Powers()],
        (ROWS, WIDTH),
        frozenset({aten.pow.Tensor_Tensor}),
        2 * TENSOR,
    ),
    "1 block with std_mean chosen, which makes two tensors": (
        lambda: [_Standardized()],
        (ROWS, WIDTH),
        frozenset({aten.std_mean.correction}),
        TENSOR + 2 * 4 * ROWS,
    ),
}


def _check_choosing(answer: MakeMode) -> str:
    _require_own_lists(answer)
    for name, (build, shape, chosen, allowed) in _SELECTIONS.items():
        _check_selection(f"Choosing around {name}", answer, build, shape, chosen, allowed)
    for name, (build, shape, chosen, _) in _SELECTIONS.items():
        left = _left_without_output(answer, build(), shape, chosen)
        require(
            left == 0,
            f"Choosing around {name}, leaves {left:,} bytes in memory after the output is deleted; "
            f"wanted none.",
        )
    _require_one_copy_in_backward(answer)
    left = _left_after_backward(answer)
    require(
        left == 0,
        f"Choosing around 2 blocks, with their 4 matmuls of {TENSOR} bytes chosen, leaves "
        f"{left:,} bytes in memory after backward, besides the output; wanted none.",
    )
    return (
        f"{len(_SELECTIONS)} selections · gradients match bit for bit · only the chosen outputs "
        f"held, none after backward · no chosen operator ran twice"
    )


def _check_selection(
    case: str, answer: MakeMode, build: Any, shape: tuple[int, ...], chosen: Any, allowed: int
) -> None:
    blocks, x = build(), torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    x = (x + 0.3 * x.square()).requires_grad_()  # so that rows differ in more than a constant
    outputs: list[Tensor] = []
    forward = partial(_forward, case, answer, chosen, blocks, x)
    held = new_bytes(measure(lambda: outputs.append(forward()), model=nn.ModuleList(blocks)))
    require(
        held <= allowed,
        f"{case}, holds {held:,} bytes between forward and backward; wanted at most {allowed:,}: "
        f"the chosen outputs, and the output of each block.",
    )
    gradients, runs = _backward(case, outputs.pop(), blocks, x)
    wanted, once = _plain_gradients(build, x)
    far = max(furthest(a, b) for a, b in zip(gradients, wanted, strict=True))
    again = sum((runs[func] - once[func]) for func in {*runs, *once} if func in chosen)
    require(far == 0, f"{case}, gives gradients up to {far:.2e} off the plain blocks' gradients.")
    require(
        again == 0,
        f"{case}, holds {held:,} bytes, and the chosen operators ran {again} times in backward; "
        f"wanted no rerun.",
    )


def _require_own_lists(answer: MakeMode) -> None:
    first, second = (getattr(answer(MATMULS), "kept", None) for _ in range(2))
    if first is second and isinstance(first, (MutableSequence, MutableMapping)):
        raise Wrong(
            "two Choosing objects share one self.kept; wanted one list for each: create it in "
            "__init__."
        )


def _forward(
    case: str, answer: MakeMode, chosen: Any, blocks: list[nn.Module], x: Tensor
) -> Tensor:
    for block in blocks:
        mode = answer(chosen)
        require(
            isinstance(mode, TorchDispatchMode),
            f"{case}: Choosing(chosen) gave {mode!r}; wanted a TorchDispatchMode.",
        )
        x = _keeping(mode, block, x)
    return x


def _keeping(mode: Any, block: nn.Module, x: Tensor) -> Tensor:
    """The lesson's `keeping`: a checkpoint with the mode around both runs."""

    def run(x: Tensor) -> Tensor:
        with mode:
            return block(x)

    y = checkpoint(run, x)
    mode.is_second = True
    return y


def _backward(
    case: str, y: Tensor, blocks: list[nn.Module], x: Tensor
) -> tuple[list[Tensor], Counter[Any]]:
    weights = [weight for block in blocks for weight in block.parameters()]
    with _RunCounter() as counter:
        try:
            gradients = torch.autograd.grad(y.square().sum(), [x, *weights])
        except IndexError:
            raise Wrong(
                f"{case}: in backward, the list of kept outputs is empty too early."
            ) from None
        except CheckpointError:
            raise Wrong(
                f"{case}: the second run saves other tensors than the first. Does an operator "
                f"return an output that it did not compute in the first run?"
            ) from None
    return list(gradients), counter.runs


def _plain_gradients(
    build: Callable[[], list[nn.Module]], x: Tensor
) -> tuple[list[Tensor], Counter[Any]]:
    """The gradients without checkpoints, and the operators that backward runs."""
    blocks = build()
    return _backward("", nn.Sequential(*blocks)(x), blocks, x)


def _left_without_output(
    answer: MakeMode, blocks: list[nn.Module], shape: tuple[int, ...], chosen: Any
) -> int:
    """Bytes in memory after the output is deleted and garbage is collected."""
    x = torch.ones(shape, requires_grad=True)

    def forward() -> None:
        _forward("", answer, chosen, blocks, x)
        gc.collect()

    return new_bytes(measure(forward, model=nn.ModuleList(blocks)))


def _left_after_backward(answer: MakeMode) -> int:
    """Bytes in memory after backward, besides the output."""
    blocks, x = _layers(), torch.ones(ROWS, WIDTH, requires_grad=True)
    outputs: list[Tensor] = []

    def forward_and_backward() -> None:
        outputs.append(_forward("", answer, MATMULS, blocks, x))
        torch.autograd.grad(outputs[0].sum(), x)

    return new_bytes(measure(forward_and_backward, model=nn.ModuleList(blocks))) - TENSOR


def _require_one_copy_in_backward(answer: MakeMode) -> None:
    def peak(make: MakeMode) -> int:
        blocks, x = _layers()[:1], torch.ones(ROWS, WIDTH, requires_grad=True)

        def step() -> None:
            torch.autograd.grad(_forward("", make, MATMULS, blocks, x).sum(), x)

        return measure(step, model=nn.ModuleList(blocks)).peak_bytes

    got, wanted = peak(answer), peak(Choosing)
    require(
        got < wanted + TENSOR,
        f"Choosing around 1 block, with its 2 matmuls of {TENSOR} bytes chosen, has a peak of "
        f"{got:,} bytes; wanted {wanted:,}: return the output that was kept, not a copy.",
        evidence=("peak", rough(got)),
    )


# ------------------------------------------------------------------ 6.4: a knapsack

BestOperators = Callable[[Sequence[Operator], int], Collection[int]]


def _operators(*pairs: tuple[int, int], first: int = 0) -> list[Operator]:
    """Operators of these (bytes, operations), numbered from `first` in steps of 3."""
    return [Operator(first + 3 * n, aten.mm.default, *pair) for n, pair in enumerate(pairs)]


def _many(count: int, seed: int) -> list[Operator]:
    rng = random.Random(seed)
    return _operators(*((rng.randint(5, 60), rng.randint(1, 90)) for _ in range(count)), first=7)


def _nearly_equal_value(count: int) -> list[Operator]:
    """Operations per byte are nearly equal, so a Pareto front has a thousand choices. A search that
    continues with only some of them misses the best choice."""
    rng = random.Random(0)
    sizes = [rng.randint(1_000, 9_999) for _ in range(count)]
    return _operators(*((size, size + 700) for size in sizes), first=5)


# Operators, and the budget in bytes.
_KNAPSACKS: tuple[tuple[list[Operator], int], ...] = (
    (_operators((10, 5)), 9),
    (_operators((10, 5)), 11),
    (_operators((10, 5)), 10),
    (_operators((4, 5), (6, 1), first=2), 10),
    (_operators((6, 1), (4, 5)), 6),
    (_operators((1, 1), (2, 1), (3, 100)), 3),
    (_operators((6, 70), (5, 60), (5, 60)), 10),
    (_operators((6, 90), (5, 60), (5, 60)), 10),
    (_operators(*[(10_004, 1)] * 10), 100_000),
    (_many(8, 0), 120),
    (_many(10, 1), 200),
    (_many(9, 0), 150),
    (_operators((0, 5), (7, 0), (4, 9), (3, 2), first=11), 5),
    (_operators((0, 5), (7, 1)), 0),
    (_operators(), 10),
)
MOST_ADDITIONS = (
    100_000  # all 2²⁰ sets need at least one each; without dominated sets, 2,000 suffice
)


def _check_best_operators(answer: BestOperators) -> str:
    for operators, budget in _KNAPSACKS:
        best = max(_every_sum_within(operators, budget))
        _check_a_knapsack(answer, operators, budget, best)
    many, similar = _many(20, 2), _nearly_equal_value(14)
    for operators, budget in ((_counted(many), 400), (similar, sum(o.bytes for o in similar) // 2)):
        best = _sums(operators, best_within(map(_plain_ints, operators), budget))[1]
        _check_a_knapsack(answer, operators, budget, best)
    return (
        f"{len(_KNAPSACKS) + 2} budgets: every choice fits and spares the most operations, without "
        f"trying all 2²⁰ sets of {len(many)} operators"
    )


def _check_a_knapsack(
    answer: BestOperators, operators: list[Operator], budget: int, best: int
) -> None:
    listed = "; ".join(
        f"{o.number}: {o.bytes:,} B, {o.operations} operations" for o in operators[:3]
    )
    more = f"; … {len(operators)} in all" if len(operators) > 3 else ""
    case = f"best_operators([{listed}{more}], {budget:,} bytes)"
    argument = list(operators)
    try:
        got = answer(argument, budget)
    except _TooManyAdditions:
        raise Wrong(
            f"{case} was stopped after {MOST_ADDITIONS:,} additions of bytes and operations; "
            f"fewer than 5,000 are enough."
        ) from None
    require(argument == operators, f"{case} changed its list of operators, or their order.")
    _require_numbers(case, got, {o.number for o in operators})
    taken, spared = _sums(operators, got)
    words = f"{case} gave {sorted(got)}, {taken:,} bytes that spare {spared:,} operations"
    require(taken <= budget, f"{words}: over the budget.")
    require(spared == best, f"{words}; the best choice spares {best:,}.")


class _TooManyAdditions(BaseException):
    """Not an Exception, because answers may catch those."""


class _CountedInt(int):
    """Counts its additions and subtractions, and stops an answer that would run for hours. No clock
    is needed."""

    additions: Iterator[int]

    def _counted(self, result: int) -> "_CountedInt":
        if next(self.additions) > MOST_ADDITIONS:
            raise _TooManyAdditions
        return type(self)(result)

    def __add__(self, other: int) -> "_CountedInt":
        return self._counted(int(self) + int(other))

    def __sub__(self, other: int) -> "_CountedInt":
        return self._counted(int(self) - int(other))

    def __rsub__(self, other: int) -> "_CountedInt":
        return self._counted(int(other) - int(self))

    __radd__ = __add__


def _counted(operators: list[Operator]) -> list[Operator]:
    of_one_answer = type("_CountedInt", (_CountedInt,), {"additions": count(1)})
    return [
        o._replace(bytes=of_one_answer(o.bytes), operations=of_one_answer(o.operations))
        for o in operators
    ]


def _plain_ints(o: Operator) -> Operator:
    return o._replace(bytes=int(o.bytes), operations=int(o.operations))


def _require_numbers(case: str, got: Any, numbers: set[int]) -> None:
    require(
        isinstance(got, Collection) and not isinstance(got, (str, dict)),
        f"{case} gave {got!r}; wanted the numbers of the operators to keep."
        f"{' Is there a return?' if got is None else ''}",
    )
    unknown = [number for number in got if number not in numbers]
    require(
        not unknown,
        f"{case} gave {list(got)}; no operator has the number{'s' * (len(unknown) > 1)} {unknown}.",
    )
    require(
        len(set(got)) == len(got),
        f"{case} gave {list(got)}; wanted each number once.",
    )


def _sums(operators: Sequence[Operator], numbers: Collection[int]) -> tuple[int, int]:
    kept = [_plain_ints(operator) for operator in operators if operator.number in numbers]
    return sum(o.bytes for o in kept), sum(o.operations for o in kept)


def _every_sum_within(operators: Sequence[Operator], budget: int) -> Iterator[int]:
    """The spared operations of every choice that fits, by brute force."""
    sizes = range(len(operators) + 1)
    for kept in chained.from_iterable(combinations(operators, size) for size in sizes):
        if sum(o.bytes for o in kept) <= budget:
            yield sum(o.operations for o in kept)


# ------------------------------------------------------------------ the bill


DAY = Day(
    exercises=(
        checked("6.1", _check_schedule_costs, schedule_costs),
        checked("6.2", _check_best_schedule, best_schedule),
        checked("6.3", _check_choosing, Choosing),
        checked("6.4", _check_best_operators, rebuilds=("memlab.checkpointing.best_within",)),
    ),
    bill=Bill("day 6: attention outputs kept, at no cost", attention_kept),
)
