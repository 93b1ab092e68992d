"""Day 16: does a model fit on a GPU?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from memlab.course.bill_steps import everything_elsewhere
from memlab.course.exercises import Bill, Day, Wrong, require
from memlab.course.properties import unchanged
from memlab.course.solutions import checked, given, solution
from memlab.planner.cards import CONTEXT_BYTES
from memlab.units import format_bytes

CONTEXT = CONTEXT_BYTES[1]
Optimizer, Block, Candidate, Predicted = given(16, "Optimizer", "Block", "Candidate", "Predicted")
peak, activations, lacks = solution("16.1"), solution("16.2"), solution("16.3")
fastest, of_a_rank = solution("16.4"), solution("16.5")


def _same_bytes(call: str, got: Any, wanted: float) -> None:
    """Require a number of bytes, an int or a float."""
    question = " Is there a return?" if got is None else ""
    require(
        isinstance(got, Real) and not isinstance(got, bool),
        f"{call} gave {_briefly(got)}; wanted {round(wanted):,} bytes.{question}",
    )
    require(
        abs(got - wanted) < 0.5,
        f"{call} gave {round(float(got)):,} bytes; wanted {round(wanted):,}.",
    )


def _briefly(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.60}"


# ------------------------------------------------------------------ 16.1: the largest moment

_SIZES = [64, 640, 256, 128]  # the largest is not the first
_ADAMW = Optimizer(state_elements=2, state_itemsize=4, scratch=2)
_ADAM_8_BIT = Optimizer(state_elements=2, state_itemsize=65 / 64, scratch=7.5, piece=128)
_STEPS: tuple[tuple[str, list[int], int, Any, int], ...] = (
    ("AdamW, no activations", _SIZES, 4, _ADAMW, 0),
    ("AdamW, many activations", _SIZES, 4, _ADAMW, 100_000),
    ("AdamW with float32 state, weights of 2 bytes", _SIZES, 2, _ADAMW, 0),
    ("state of 2 bytes an element", _SIZES, 2, replace(_ADAMW, state_itemsize=2), 0),
    ("8 bits, pieces of 128 elements", _SIZES, 2, _ADAM_8_BIT, 0),
    ("pieces larger than any weight", _SIZES, 2, replace(_ADAM_8_BIT, piece=10_000), 0),
    ("step in backward", _SIZES, 2, replace(_ADAM_8_BIT, in_backward=True), 0),
    ("step in backward, activations", _SIZES, 4, replace(_ADAMW, in_backward=True), 9_000),
    ("one weight", [4096], 4, Optimizer(1, 4, 3), 17_000),
    ("no scratch", [64, 640, 256, 128], 4, Optimizer(1, 4, 0), 400),
)


def _check_peak(answer: Any) -> str:
    for name, sizes, itemsize, optimizer, activations_ in _STEPS:
        case = f"{name}: peak({sizes}, {itemsize}, {optimizer}, {activations_})"
        wanted_moment, wanted = peak(sizes, itemsize, optimizer, activations_)
        copied = list(sizes)
        with unchanged(case, sizes=copied):
            got = answer(copied, itemsize, optimizer, activations_)
        require(
            isinstance(got, (tuple, list)) and len(got) == 2,
            f"{case} gave {_briefly(got)}; wanted a moment and its bytes, "
            f"({wanted_moment!r}, {round(wanted)}).",
        )
        moment, count = got
        _same_bytes(f"{case}, the bytes:", count, wanted)
        require(
            moment == wanted_moment,
            f"{case} says the peak is in {moment!r:.40}; wanted {wanted_moment!r}.",
        )
    return f"{len(_STEPS)} steps match to the byte: the moment and its bytes"


# ------------------------------------------------------------------ 16.2: activations

_BLOCK = Block(elements=100, input_elements=8, float32_elements=6, gradient_elements=40)
_LARGE_INPUT = replace(_BLOCK, input_elements=16)
_PASSES: tuple[tuple[str, Any, int, int, int, bool, int], ...] = (
    ("all kept, one block", _BLOCK, 1, 10, 4, False, 0),
    ("all kept, large ends", _BLOCK, 3, 10, 4, False, 50_000),
    ("all kept, 2 bytes an element", _BLOCK, 3, 10, 2, False, 0),
    ("checkpointed, large ends", _BLOCK, 3, 10, 4, True, 50_000),
    ("checkpointed, small ends", _BLOCK, 3, 10, 4, True, 100),
    ("checkpointed, one block", _BLOCK, 1, 10, 4, True, 100),
    ("checkpointed, 2 bytes an element", _BLOCK, 5, 7, 2, True, 0),
    ("checkpointed, 2 bytes, large ends", _LARGE_INPUT, 12, 64, 2, True, 99_000),
)


def _check_activations(answer: Any) -> str:
    for name, block, layers, tokens, itemsize, checkpointed, ends in _PASSES:
        case = (
            f"{name}: activations({block}, layers={layers}, tokens={tokens}, itemsize={itemsize}, "
            f"checkpointed={checkpointed}, ends={ends})"
        )
        arguments = (block, layers, tokens, itemsize, checkpointed, ends)
        _same_bytes(case, answer(*arguments), activations(*arguments))
    return f"{len(_PASSES)} passes match to the byte: with and without checkpointing, two dtypes"


# ------------------------------------------------------------------ 16.3: does it fit

_GIB = 2**30
_FITTINGS: tuple[tuple[str, int, int], ...] = (
    ("24GiB", 10 * _GIB, 11 * _GIB),
    ("24GiB", 30 * _GIB, 31 * _GIB),
    ("24GB", 21 * _GIB, 22 * _GIB),
    ("24 GiB", 23 * _GIB, 23 * _GIB + 2**29),
    ("1.5GiB", _GIB // 2, 3 * _GIB // 4),
    ("4.1 GB", 4 * _GIB, 4 * _GIB),  # 4.1 * 10**9 is 4099999999.9999995
    ("900MiB", 284 * 2**20, 284 * 2**20),
    ("900MB", 284 * 2**20, 284 * 2**20),
    ("rtx4090", 20 * _GIB, 23 * _GIB),
    ("rtx4090", 20 * _GIB, 21 * _GIB),
    ("h100", 70 * _GIB, 79 * _GIB),
    ("t4", 14 * _GIB, 15 * _GIB),
)


def _check_lacks(answer: Any) -> str:
    for memory, allocated, reserved in _FITTINGS:
        step = Predicted(allocated, reserved)
        case = (
            f"lacks({memory!r}, …), {format_bytes(allocated)} allocated and "
            f"{format_bytes(reserved)} reserved,"
        )
        _same_bytes(case, answer(memory, step), lacks(memory, step))
    return f"{len(_FITTINGS)} cases match to the byte: units, GPUs, the context, reserved bytes"


# ------------------------------------------------------------------ 16.4: the search

# Seconds, the formula's bytes, measured bytes.
_MANY = tuple(
    (1.0 + place, 3000 - 70 * place, 3001 - 70 * place)
    for place in ((7 * n) % 40 for n in range(40))
)
_SEARCHES: tuple[tuple[str, int, tuple[tuple[float, int, int], ...]], ...] = (
    ("it just fits", 100, ((2.0, 103, 99),)),
    ("the slower one is larger", 100, ((1.0, 60, 61), (3.0, 80, 82))),
    ("one that does not fit", 100, ((2.0, 150, 151),)),
    ("the slower one fits", 100, ((1.0, 106, 101), (3.0, 80, 79))),
    ("in no order", 100, ((3.0, 60, 61), (2.0, 90, 91), (2.0, 200, 199), (4.0, 50, 50))),
    ("equally fast", 100, ((2.0, 98, 102), (2.0, 97, 99), (3.0, 40, 41))),
    ("the formula is too low", 100, ((2.0, 98, 102), (1.0, 300, 300), (5.0, 60, 61))),
    ("the same candidates, measured anew", 100, ((2.0, 98, 99), (1.0, 300, 300), (5.0, 60, 61))),
    ("the formula is too high", 100, ((4.0, 70, 70), (2.0, 103, 99), (6.0, 20, 21))),
    ("measured at 0.95 of its formula", 190, ((2.0, 200, 190), (3.0, 90, 90))),
    ("exactly full", 100, ((2.0, 99, 100), (3.0, 50, 50))),
    ("nothing fits", 100, ((1.0, 300, 310), (2.0, 200, 195), (3.0, 101, 103))),
    ("many", 1000, _MANY),
)


@dataclass(frozen=True)
class UnorderedRecipe:
    """A recipe that cannot be compared with another by <."""

    number: int

    def __str__(self) -> str:
        return f"recipe {self.number}"


class CountedMeasurements:
    """The `measure` of a search. It records the candidates that it is called with."""

    def __init__(self, case: str, figures: Sequence[tuple[float, int, int]]) -> None:
        self.case = case
        self.asked: list[Any] = []
        self.bytes_of = {
            Candidate(UnorderedRecipe(n), seconds, formula): measured
            for n, (seconds, formula, measured) in enumerate(figures, 1)
        }

    def __call__(self, candidate: Any) -> int:
        if not self.knows(candidate):
            raise Wrong(f"{self.case} measure({_briefly(candidate)}): wanted a candidate.")
        self.asked.append(candidate)
        return self.bytes_of[candidate]

    def knows(self, candidate: Any) -> bool:
        return isinstance(candidate, Candidate) and candidate in self.bytes_of


def _check_fastest(answer: Any) -> str:
    number = needed = 0
    for name, room, figures in _SEARCHES:
        counted = f"{len(figures)} candidate{'s' * (len(figures) > 1)}"
        case = f"{name}, {counted}, room for {room:,} bytes:"
        measure = CountedMeasurements(case, figures)
        candidates = list(measure.bytes_of)
        with unchanged(f"{case} your answer", candidates=candidates):
            got = answer(candidates, room, measure)
        wanted = fastest(list(measure.bytes_of), room, measure.bytes_of.get)
        _require_candidate(got, wanted, room, measure)
        in_doubt = _in_doubt(measure.bytes_of, room, wanted)
        made = len(measure.asked)
        require(
            made <= in_doubt,
            f"{case} {made} measurement{'s' * (made > 1)}; wanted at most {in_doubt}.",
        )
        number, needed = number + len(figures), needed + in_doubt
    return f"{number} candidates searched, at most {needed} of them measured"


def _in_doubt(candidates: Any, room: int, found: Any) -> int:
    """The number of candidates that may fit and are no slower than the answer."""
    seconds = float("inf") if found is None else found.seconds
    return sum(c.seconds <= seconds and 0.95 * c.formula_bytes <= room for c in candidates)


def _require_candidate(got: Any, wanted: Any, room: int, measure: CountedMeasurements) -> None:
    case = measure.case
    require(
        got is None or measure.knows(got),
        f"{case} gave {_briefly(got)}; wanted one of the candidates, or None.",
    )
    if got is not None:
        require(
            got in measure.asked or 1.05 * got.formula_bytes <= room,
            f"{case} gave {got.recipe} without measuring it, but it may not fit.",
        )
        require(
            measure.bytes_of[got] <= room,
            f"{case} gave {got.recipe}, which is measured at {measure.bytes_of[got]:,} bytes.",
        )
    shown, meant = ("None" if c is None else f"{c.recipe}, {c.seconds:g} s" for c in (got, wanted))
    require(got == wanted, f"{case} gave {shown}; wanted {meant}.")


# ------------------------------------------------------------------ 16.5: one GPU of 128

_RANKS: tuple[tuple[Any, ...], ...] = (
    # block, end, layers, (tensor, pipeline, data), ZeRO stage, (weights, gradients, state), input
    (480, 0, 4, (1, 1, 1), 0, (2, 2, 12), 0),
    (480, 96, 4, (1, 1, 1), 0, (2, 2, 12), 64),
    (480, 96, 4, (1, 1, 4), 1, (2, 2, 12), 64),
    (480, 96, 4, (1, 1, 4), 2, (2, 2, 12), 64),
    (480, 96, 4, (1, 1, 4), 3, (2, 2, 12), 64),
    (480, 96, 4, (4, 1, 1), 1, (2, 2, 12), 64),
    (480, 96, 4, (1, 2, 1), 1, (2, 2, 12), 64),
    (480, 96, 6, (2, 4, 3), 1, (1, 2, 12), 64),
    (483, 97, 9, (4, 4, 3), 0, (1, 2, 12), 64),
    (1008, 336, 126, (8, 4, 4), 1, (1, 2, 12), 512),
    (1008, 336, 126, (8, 4, 4), 1, (1, 2, 65 / 32), 512),
)  # fmt: skip


def _check_rank(answer: Any) -> str:
    names = ("block", "end", "layers", "degrees", "zero_stage", "bytes_each", "input_bytes")
    for arguments in _RANKS:
        case = ", ".join(f"{name}={x}" for name, x in zip(names, arguments, strict=True))
        _same_bytes(f"of_a_rank({case})", answer(*arguments), of_a_rank(*arguments))
    return f"{len(_RANKS)} layouts match to the byte: blocks, ends, shards, inputs in flight"


# ------------------------------------------------------------------ the bill


DAY = Day(
    exercises=(
        checked("16.1", _check_peak, peak),
        checked("16.2", _check_activations, activations),
        checked(
            "16.3",
            _check_lacks,
            lacks,
            rebuilds=("memlab.units.parse_bytes", "memlab.planner.cards.memory_named"),
        ),
        checked("16.4", _check_fastest, fastest),
        checked("16.5", _check_rank, of_a_rank),
    ),
    bill=Bill("day 16: weights loaded one block at a time", everything_elsewhere),
)
