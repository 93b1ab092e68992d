"""Day 16: fit it."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from torch import nn

from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, require
from memlab.offload import DiskStore, OffloadedOptimizer, offloaded_activations
from memlab.offload.layers import stream_layers
from memlab.planner.cards import CARDS, CONTEXT_BYTES
from memlab.trace import Trace
from memlab.train import averaged, combined, dry_trace
from memlab.units import format_bytes

CONTEXT = CONTEXT_BYTES[1]


def _whole(call: str, got: Any, wanted: float) -> None:
    """Require a number of bytes; a float may stand for a whole one."""
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


@dataclass(frozen=True)
class Optimizer:
    """The lesson's: what one keeps of each weight, and what it makes while it steps."""

    moments: int
    moment_bytes: float
    scratch: float
    piece: int | None = None
    in_backward: bool = False


ADAMW = Optimizer(moments=2, moment_bytes=4, scratch=2)
LION_8_BIT = Optimizer(moments=1, moment_bytes=65 / 64, scratch=6.5, piece=2**22)

Peak = Callable[[Sequence[int], int, Optimizer, int], Any]


def peak(
    sizes: Sequence[int], itemsize: int, optimizer: Optimizer, activations: int
) -> tuple[str, float]:
    """When a step holds most, and how many bytes."""
    return _peak_but()(sizes, itemsize, optimizer, activations)


def _numbers_at_once(sizes: Sequence[int], optimizer: Optimizer) -> int:
    largest = max(sizes)
    return largest if optimizer.piece is None else min(largest, optimizer.piece)


def _gradient_numbers(sizes: Sequence[int], optimizer: Optimizer) -> int:
    return max(sizes) if optimizer.in_backward else sum(sizes)


def _peak_but(
    *,
    moment_bytes: Callable[[Optimizer, int], float] = lambda optimizer, itemsize: (
        optimizer.moment_bytes
    ),
    moments: Callable[[Optimizer], int] = lambda optimizer: optimizer.moments,
    at_once: Callable[[Sequence[int], Optimizer], int] = _numbers_at_once,
    scratch_bytes: Callable[[int], int] = lambda itemsize: 4,
    gradients: Callable[[Sequence[int], Optimizer], int] = _gradient_numbers,
    of_moments: Callable[[dict[str, float], float], tuple[str, float]] | None = None,
    with_gradients_from_the_first: bool = False,
) -> Peak:
    """The right one, with something in it that is not."""

    def answer(
        sizes: Sequence[int], itemsize: int, optimizer: Optimizer, activations: int
    ) -> tuple[str, float]:
        numbers = sum(sizes)
        state = numbers * moments(optimizer) * moment_bytes(optimizer, itemsize)
        held = numbers * itemsize + state
        left = itemsize * gradients(sizes, optimizer)
        scratch = scratch_bytes(itemsize) * optimizer.scratch * at_once(sizes, optimizer)
        found = {"backward": held + activations, "optimizer": held + left + scratch}
        if with_gradients_from_the_first:
            found["backward"] += left
        if of_moments is not None:
            return of_moments(found, held + activations + left + scratch)
        moment = max(found, key=lambda name: found[name])
        return moment, found[moment]

    return answer


def _sum_of_all(found: dict[str, float], everything: float) -> tuple[str, float]:
    return max(found, key=lambda name: found[name]), everything


def _smallest(found: dict[str, float], everything: float) -> tuple[str, float]:
    moment = min(found, key=lambda name: found[name])
    return moment, found[moment]


_SIZES = [64, 640, 256, 128]  # the largest is not the first
_ADAM_8_BIT = Optimizer(moments=2, moment_bytes=65 / 64, scratch=7.5, piece=128)
_STEPS: tuple[tuple[str, list[int], int, Optimizer, int], ...] = (
    ("AdamW, no activations", _SIZES, 4, ADAMW, 0),
    ("AdamW, many activations", _SIZES, 4, ADAMW, 100_000),
    ("AdamW in float32 beside weights of 2 bytes", _SIZES, 2, ADAMW, 0),
    ("moments of 2 bytes", _SIZES, 2, replace(ADAMW, moment_bytes=2), 0),
    ("8 bits, pieces of 128 numbers", _SIZES, 2, _ADAM_8_BIT, 0),
    ("pieces larger than any weight", _SIZES, 2, replace(_ADAM_8_BIT, piece=10_000), 0),
    ("stepped in backward", _SIZES, 2, replace(_ADAM_8_BIT, in_backward=True), 0),
    ("stepped in backward, activations", _SIZES, 4, replace(ADAMW, in_backward=True), 9_000),
    ("one weight", [4096], 4, Optimizer(1, 4, 3), 17_000),
)


def _check_peak(answer: Any) -> str:
    for name, sizes, itemsize, optimizer, activations in _STEPS:
        given = list(sizes)
        got = answer(given, itemsize, optimizer, activations)
        case = f"{name}: peak({sizes}, {itemsize}, …, {activations:,})"
        wanted_moment, wanted = peak(sizes, itemsize, optimizer, activations)
        require(given == sizes, f"{case} changed the list of sizes it was given.")
        require(
            isinstance(got, (tuple, list)) and len(got) == 2,
            f"{case} gave {_briefly(got)}; wanted a moment and bytes, "
            f"({wanted_moment!r}, {round(wanted):,}).",
        )
        moment, count = got
        _whole(f"{case}, the bytes:", count, wanted)
        require(
            moment == wanted_moment,
            f"{case} says the peak is in {moment!r:.40}; wanted {wanted_moment!r}.",
        )
    return f"{len(_STEPS)} steps to the byte, at either moment"


_PEAK = Exercise(
    id="16.1",
    title="The largest moment",
    minutes=12,
    difficulty=3,
    hints=(
        "Three numbers first: all weights, the largest tensor, the state's bytes. Which of the two "
        "moments needs the second, and in which two places?",
        "State is numbers · moments · moment_bytes. Gradients have the weights' itemsize: of all "
        "numbers, or of the largest tensor if in_backward. Scratch is float32, of the largest "
        "tensor, or of a piece of it if that is shorter.",
        "n, most = sum(sizes), max(sizes). held = n * itemsize + n * o.moments * o.moment_bytes. "
        '"backward": held + activations; "optimizer": held + itemsize * (most if o.in_backward '
        "else n), and scratch: 4 bytes for each of o.scratch times what it works on at once.",
    ),
    reference=peak,
    check=_check_peak,
    wrong_answers=(
        WrongAnswer(
            _peak_but(at_once=lambda sizes, optimizer: 0),
            "While it steps, an optimizer makes tensors of its own: its scratch is missing.",
        ),
        WrongAnswer(
            _peak_but(of_moments=_sum_of_all),
            "This is the sum of everything. Activations are gone when the optimizer steps, and a "
            "peak is the largest moment.",
        ),
        WrongAnswer(
            _peak_but(moment_bytes=lambda optimizer, itemsize: itemsize),
            "State has a dtype of its own, moment_bytes, whatever the weights have.",
        ),
        WrongAnswer(
            _peak_but(moments=lambda optimizer: 1),
            "An optimizer keeps `moments` numbers of each weight: Adam two.",
        ),
        WrongAnswer(
            _peak_but(with_gradients_from_the_first=True),
            "When backward begins, no gradient is there yet.",
        ),
        WrongAnswer(
            _peak_but(gradients=lambda sizes, optimizer: sum(sizes)),
            "Stepped in backward, a gradient is gone before the next is made: count the largest "
            "one.",
        ),
        WrongAnswer(
            _peak_but(
                gradients=lambda sizes, optimizer: 0 if optimizer.in_backward else sum(sizes)
            ),
            "Stepped in backward, one gradient is there all the same: the largest.",
        ),
        WrongAnswer(
            _peak_but(at_once=lambda sizes, optimizer: sum(sizes)),
            "Scratch is made for one weight at a time: the largest counts, not all.",
        ),
        WrongAnswer(
            _peak_but(at_once=lambda sizes, optimizer: max(sizes)),
            "An optimizer that works in pieces has scratch for a piece, not for a whole weight.",
        ),
        WrongAnswer(
            _peak_but(
                at_once=lambda sizes, optimizer: (
                    max(sizes) if optimizer.piece is None else optimizer.piece
                )
            ),
            "A piece is never longer than the weight: min of the two.",
        ),
        WrongAnswer(
            _peak_but(scratch_bytes=lambda itemsize: itemsize),
            "Scratch is in float32, 4 bytes, whatever the weights have.",
        ),
        WrongAnswer(_peak_but(of_moments=_smallest), "That is the smaller of the two moments."),
    ),
)

# ------------------------------------------------------------------ 16.2: activations


@dataclass(frozen=True)
class Block:
    """The lesson's: what a block keeps of each token."""

    width: int
    numbers: int
    floats: int
    gradients: int


Activations = Callable[[Block, int, int, int, bool, int], Any]


def activations(
    block: Block, layers: int, tokens: int, itemsize: int, checkpointed: bool, ends: int
) -> int:
    """Bytes of activations, and of what backward makes, at their fullest moment."""
    return _activations_but()(block, layers, tokens, itemsize, checkpointed, ends)


def _activations_but(
    *,
    item: Callable[[int], int] = lambda itemsize: itemsize,
    float_bytes: Callable[[int], int] = lambda itemsize: 4,
    inputs: Callable[[int], int] = lambda layers: layers,
    again: Callable[[int, int], int] = lambda made, layers: made,
    less_input: bool = True,
    gradients: bool = True,
    fullest: Callable[[int, int], int] = max,
    ignores: bool = False,
) -> Activations:
    def answer(
        block: Block, layers: int, tokens: int, itemsize: int, checkpointed: bool, ends: int
    ) -> int:
        size = item(itemsize)
        made = tokens * (size * block.numbers + float_bytes(itemsize) * block.floats)
        at_work = tokens * size * block.gradients if gradients else 0
        if ignores or not checkpointed:
            return layers * made + fullest(ends, at_work)
        x = tokens * size * block.width
        of_one = made - x if less_input else made
        return inputs(layers) * x + fullest(ends, again(of_one, layers) + at_work)

    return answer


_BLOCK = Block(width=8, numbers=100, floats=6, gradients=40)
_PASSES: tuple[tuple[str, Block, int, int, int, bool, int], ...] = (
    ("all kept, one block", _BLOCK, 1, 10, 4, False, 0),
    ("all kept, large ends", _BLOCK, 3, 10, 4, False, 50_000),
    ("all kept, 2 bytes a number", _BLOCK, 3, 10, 2, False, 0),
    ("checkpointed, large ends", _BLOCK, 3, 10, 4, True, 50_000),
    ("checkpointed, small ends", _BLOCK, 3, 10, 4, True, 100),
    ("checkpointed, one block", _BLOCK, 1, 10, 4, True, 100),
    ("checkpointed, 2 bytes a number", _BLOCK, 5, 7, 2, True, 0),
    ("checkpointed, 2 bytes, large ends", replace(_BLOCK, width=16), 12, 64, 2, True, 99_000),
)


def _check_activations(answer: Any) -> str:
    for name, block, layers, tokens, itemsize, checkpointed, ends in _PASSES:
        case = (
            f"{name}: activations(…, layers={layers}, tokens={tokens}, itemsize={itemsize}, "
            f"checkpointed={checkpointed}, ends={ends:,})"
        )
        given = (block, layers, tokens, itemsize, checkpointed, ends)
        _whole(case, answer(*given), activations(*given))
    return f"{len(_PASSES)} passes to the byte, kept and checkpointed, in 4 bytes and in 2"


_ACTIVATIONS = Exercise(
    id="16.2",
    title="Activations, kept or made again",
    minutes=12,
    difficulty=3,
    hints=(
        "What forward leaves of each block is there when backward begins. Then either the ends' "
        "bytes are there, too, or a block is at work: not both. So it is all that is left, and "
        "the larger of two.",
        "A block makes tokens · (itemsize · numbers + 4 · floats). Checkpointed, it leaves only "
        "its input, tokens · itemsize · width; and at work it makes all the rest again, once. "
        "Either way a block at work has gradients, tokens · itemsize · gradients.",
        "made = tokens * (itemsize * block.numbers + 4 * block.floats); x = tokens * itemsize * "
        "block.width; kept, again = (x, made - x) if checkpointed else (made, 0). What is left of "
        "all blocks, and the larger of two: ends, and again with the block's gradients.",
    ),
    reference=activations,
    check=_check_activations,
    wrong_answers=(
        WrongAnswer(
            _activations_but(item=lambda itemsize: 4),
            "Activations are counted in float32: they have `itemsize` bytes each.",
        ),
        WrongAnswer(
            _activations_but(item=lambda itemsize: 2),
            "Activations are counted in 16 bits: they have `itemsize` bytes each.",
        ),
        WrongAnswer(
            _activations_but(float_bytes=lambda itemsize: itemsize),
            "`floats` are float32 whatever the activations are: 4 bytes each.",
        ),
        WrongAnswer(
            _activations_but(again=lambda made, layers: 0),
            "A checkpointed block is made again in backward, and then it is there: one block's "
            "activations are missing.",
        ),
        WrongAnswer(
            _activations_but(again=lambda made, layers: layers * made),
            "Blocks are made again one after the other: only one of them is there.",
        ),
        WrongAnswer(
            _activations_but(inputs=lambda layers: 0),
            "The inputs of all blocks are kept: of nothing, nothing can be made again.",
        ),
        WrongAnswer(
            _activations_but(inputs=lambda layers: 1),
            "Each block's input is kept, not one.",
        ),
        WrongAnswer(
            _activations_but(less_input=False),
            "The block's input is counted twice: it is among its numbers, and it was kept.",
        ),
        WrongAnswer(
            _activations_but(gradients=False),
            "The block at work has gradients of its own, beside what it keeps.",
        ),
        WrongAnswer(
            _activations_but(fullest=lambda ends, at_work: ends + at_work),
            "The ends' bytes are gone when a block is at work: the larger of the two.",
        ),
        WrongAnswer(
            _activations_but(ignores=True),
            "Nothing is forgotten: with `checkpointed` a block leaves its input alone.",
        ),
    ),
)

# ------------------------------------------------------------------ 16.3: does it fit


class Step(NamedTuple):
    """What is known of a step: the bytes of its tensors, and those that torch takes for them."""

    allocated_bytes: int
    reserved_bytes: int


UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20}

Lacks = Callable[[str, Any], Any]


def lacks(memory: str, step: Any) -> int:
    """How many bytes a memory has too few for the step; 0 if it fits."""
    return _lacks_but()(memory, step)


def _lacks_but(
    *,
    units: dict[str, int] = UNITS,
    needed: Callable[[Any], int] = lambda step: step.reserved_bytes,
    context: int = CONTEXT,
    of_card: Callable[[str], int] = lambda name: CARDS[name].total_bytes,
    at_least_nothing: bool = True,
) -> Lacks:
    def answer(memory: str, step: Any) -> int:
        if memory in CARDS:
            total = of_card(memory)
        else:
            number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", memory).groups()
            total = round(float(number) * units[unit])
        missing = needed(step) + context - total
        return max(0, missing) if at_least_nothing else missing

    return answer


_SOLD_AS = {"rtx4090": 24, "l4": 24, "a10g": 24, "a100-80": 80, "h100": 80, "t4": 16}


_GIB = 2**30
_FITTINGS: tuple[tuple[str, int, int], ...] = (
    ("24GiB", 10 * _GIB, 11 * _GIB),
    ("24GiB", 30 * _GIB, 31 * _GIB),
    ("24GB", 21 * _GIB, 22 * _GIB),
    ("24 GiB", 23 * _GIB, 23 * _GIB + 2**29),
    ("1.5GiB", _GIB // 2, 3 * _GIB // 4),
    ("1.5 GB", _GIB, _GIB),
    ("900MiB", 284 * 2**20, 284 * 2**20),
    ("900MB", 284 * 2**20, 284 * 2**20),
    ("rtx4090", 20 * _GIB, 23 * _GIB),
    ("rtx4090", 20 * _GIB, 21 * _GIB),
    ("h100", 70 * _GIB, 79 * _GIB),
    ("t4", 14 * _GIB, 15 * _GIB),
)


def _check_lacks(answer: Any) -> str:
    for memory, allocated, reserved in _FITTINGS:
        step = Step(allocated, reserved)
        case = (
            f"lacks({memory!r}, …), {format_bytes(allocated)} allocated and "
            f"{format_bytes(reserved)} reserved,"
        )
        _whole(case, answer(memory, step), lacks(memory, step))
    return f"{len(_FITTINGS)} verdicts to the byte: units, cards, the context, reserved bytes"


_LACKS = Exercise(
    id="16.3",
    title="Does it fit?",
    minutes=10,
    difficulty=2,
    hints=(
        "Three questions: how many bytes does that memory have, how many of them are torch's, and "
        "how many does torch take for the step?",
        "GB is 10⁹ and GiB 2³⁰; a card has CARDS[name].total_bytes. Of that CUDA's context takes "
        "CONTEXT. What the step takes of the card is reserved_bytes, which is never less than "
        "allocated_bytes.",
        "if memory in CARDS: total = CARDS[memory].total_bytes; else: unit = "
        'memory.lstrip("0123456789. "); total = round(float(memory.removesuffix(unit)) * '
        "UNITS[unit]). What is needed is the step's reserved bytes and the context.",
    ),
    reference=lacks,
    check=_check_lacks,
    rebuilds=("memlab.units.parse_bytes", "memlab.planner.cards.memory_named"),
    wrong_answers=(
        WrongAnswer(
            _lacks_but(units={**UNITS, "GB": 2**30, "MB": 2**20}),
            "GB was taken for GiB: 24 GB are 24·10⁹ bytes, 7 % fewer than 24 GiB.",
        ),
        WrongAnswer(
            _lacks_but(units={**UNITS, "GiB": 10**9, "MiB": 10**6}),
            "GiB was taken for GB: the i stands for 2³⁰.",
        ),
        WrongAnswer(
            _lacks_but(needed=lambda step: step.allocated_bytes),
            "Allocated bytes are those of tensors; the card has to give what is reserved.",
        ),
        WrongAnswer(
            _lacks_but(needed=lambda step: step.allocated_bytes + step.reserved_bytes),
            "What is allocated lies in what is reserved: don't add them.",
        ),
        WrongAnswer(
            _lacks_but(context=0),
            "CUDA's own context takes a part of every card before the first tensor.",
        ),
        WrongAnswer(
            _lacks_but(of_card=lambda name: _SOLD_AS[name] * _GIB),
            "A card has less than it is sold with: what torch.cuda reports is in CARDS.",
        ),
        WrongAnswer(
            _lacks_but(at_least_nothing=False),
            "Where it fits nothing is lacking: 0, and no number below.",
        ),
    ),
)

# ------------------------------------------------------------------ 16.4: the search


class Candidate(NamedTuple):
    """The lesson's: what formulas say of a recipe."""

    recipe: Any
    seconds: float
    formula_bytes: int


Fastest = Callable[[Sequence[Candidate], int, Callable[[Candidate], int]], Any]


def fastest(
    candidates: Sequence[Candidate], room: int, measure: Callable[[Candidate], int]
) -> Candidate | None:
    """The fastest that is measured to fit; None if none does."""
    return _fastest_but()(candidates, room, measure)


def _fastest_but(
    *,
    key: Callable[[Candidate], float] = lambda candidate: candidate.seconds,
    at_least: float = 0.95,
    measured: Callable[[Candidate, int], bool] = lambda candidate, room: True,
    ordered: Callable[..., Iterable[Candidate]] = sorted,
    any_way: bool = False,
) -> Fastest:
    def answer(
        candidates: Sequence[Candidate], room: int, measure: Callable[[Candidate], int]
    ) -> Candidate | None:
        for candidate in ordered(candidates, key=key):
            if at_least * candidate.formula_bytes > room:
                continue
            if not measured(candidate, room) or measure(candidate) <= room:
                return candidate
        return min(candidates, key=lambda c: c.formula_bytes) if any_way and candidates else None

    return answer


def _in_place(candidates: Any, key: Callable[[Candidate], float]) -> Iterable[Candidate]:
    candidates.sort(key=key)
    return candidates


def _all_measured(
    candidates: Sequence[Candidate], room: int, measure: Callable[[Candidate], int]
) -> Candidate | None:
    found = {candidate: measure(candidate) for candidate in candidates}
    fitting = [candidate for candidate in candidates if found[candidate] <= room]
    return min(fitting, key=lambda candidate: candidate.seconds, default=None)


def _measured_twice(
    candidates: Sequence[Candidate], room: int, measure: Callable[[Candidate], int]
) -> Candidate | None:
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        if candidate.formula_bytes * 0.95 <= room and measure(candidate) <= room:
            return candidate if measure(candidate) <= room else None
    return None


# Seconds, by formula, measured.
_MANY = tuple(
    (1.0 + place, 3000 - 70 * place, 3001 - 70 * place)
    for place in ((7 * n) % 40 for n in range(40))
)
_SEARCHES: tuple[tuple[str, int, tuple[tuple[float, int, int], ...]], ...] = (
    ("it just fits", 100, ((2.0, 103, 99),)),
    ("the slower one is larger", 100, ((1.0, 60, 61), (3.0, 80, 82))),
    ("one that does not fit", 100, ((2.0, 150, 151),)),
    ("the slower one fits", 100, ((1.0, 150, 148), (3.0, 80, 79))),
    ("in no order", 100, ((3.0, 60, 61), (2.0, 200, 199), (2.0, 90, 91), (4.0, 50, 50))),
    ("the formula is too low", 100, ((2.0, 98, 102), (1.0, 300, 300), (5.0, 60, 61))),
    ("the formula is too high", 100, ((4.0, 70, 70), (2.0, 103, 99), (6.0, 20, 21))),
    ("measured at 0.95 of its formula", 190, ((2.0, 200, 190), (3.0, 90, 90))),
    ("exactly full", 100, ((2.0, 99, 100), (3.0, 50, 50))),
    ("nothing fits", 100, ((1.0, 300, 310), (2.0, 200, 195), (3.0, 101, 103))),
    ("many", 1000, _MANY),
)


@dataclass(frozen=True)
class _Recipe:
    """One that has no order among others."""

    number: int

    def __str__(self) -> str:
        return f"recipe {self.number}"


def _check_fastest(answer: Any) -> str:
    measurements = 0
    for name, room, figures in _SEARCHES:
        bytes_of = {
            Candidate(_Recipe(n), seconds, formula): measured
            for n, (seconds, formula, measured) in enumerate(figures, 1)
        }
        counted = _Measurements(name, bytes_of)
        given = list(bytes_of)
        got = answer(given, room, counted)
        wanted_count = _Measurements(name, bytes_of)
        wanted = fastest(list(bytes_of), room, wanted_count)
        case = f"{name}, {len(given)} candidates, room for {room:,}:"
        require(given == list(bytes_of), f"{case} the list of candidates was changed.")
        _require_candidate(case, got, wanted, counted.asked, room, bytes_of)
        require(
            len(counted.asked) <= len(wanted_count.asked),
            f"{case} {len(counted.asked)} measurements; wanted {len(wanted_count.asked)}.",
        )
        measurements += len(wanted_count.asked)
    number = sum(len(figures) for *_, figures in _SEARCHES)
    return (
        f"{measurements} measurements of {number} candidates, and no promise without one where it "
        f"may not fit"
    )


def _require_candidate(
    case: str,
    got: Any,
    wanted: Candidate | None,
    asked: Sequence[Candidate],
    room: int,
    bytes_of: dict[Candidate, int],
) -> None:
    require(
        got is None or (isinstance(got, Candidate) and got in bytes_of),
        f"{case} gave {_briefly(got)}; wanted one of the candidates, or None.",
    )
    if got is not None:
        require(
            got in asked or 1.05 * got.formula_bytes <= room,
            f"{case} gave {got.recipe}, which was not measured; wanted a measurement of what may "
            f"not fit.",
        )
        require(
            bytes_of[got] <= room,
            f"{case} gave {got.recipe}, which takes {bytes_of[got]:,} when it is measured.",
        )
    shown = "None" if got is None else f"{got.recipe}, {got.seconds:g} s"
    meant = "None" if wanted is None else f"{wanted.recipe}, {wanted.seconds:g} s"
    require(got == wanted, f"{case} gave {shown}; wanted {meant}.")


class _Measurements:
    """Measures, and keeps who was asked for."""

    def __init__(self, case: str, bytes_of: dict[Candidate, int]) -> None:
        self.case, self.bytes_of = case, bytes_of
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Any) -> int:
        if not (isinstance(candidate, Candidate) and candidate in self.bytes_of):
            raise Wrong(
                f"{self.case}: measure({_briefly(candidate)}) was asked for; wanted a candidate."
            )
        self.asked.append(candidate)
        return self.bytes_of[candidate]


_FASTEST = Exercise(
    id="16.4",
    title="The fastest that fits",
    minutes=10,
    difficulty=2,
    hints=(
        "Measuring is dear, sorting is not. In which order do you have to ask, so that the first "
        "that fits is the answer? And for which is asking in vain?",
        "By seconds, the fastest first. One whose 0.95 · formula_bytes is more than there is room "
        "for cannot fit, whatever the measurement says. All others may: measure them until one "
        "does.",
        "for candidate in sorted(candidates, key=lambda c: c.seconds): pass over it if 0.95 * "
        "candidate.formula_bytes > room; the first of the others whose measure(candidate) is "
        "within room is the answer.",
    ),
    reference=fastest,
    check=_check_fastest,
    wrong_answers=(
        WrongAnswer(
            _fastest_but(measured=lambda candidate, room: False),
            "The formula was believed. It may be 5 % off: where 1.05 of it is too much, say that "
            "something fits when it was measured to.",
        ),
        WrongAnswer(
            _fastest_but(measured=lambda candidate, room: candidate.formula_bytes > room),
            "What fits by formula was not measured, and the formula can be too low.",
        ),
        WrongAnswer(
            _all_measured,
            "All were measured. In the order of time, the first that fits is the one.",
        ),
        WrongAnswer(
            _fastest_but(at_least=0),
            "What cannot fit was measured: if even 0.95 of its formula is too much, pass on.",
        ),
        WrongAnswer(
            _fastest_but(at_least=1),
            "The formula can be too high, too: what is within 5 % above the room may fit.",
        ),
        WrongAnswer(
            _fastest_but(key=lambda candidate: candidate.formula_bytes),
            "The smallest comes first here. Smallest is slowest, as a rule: order by seconds.",
        ),
        WrongAnswer(
            _fastest_but(ordered=lambda candidates, key: candidates),
            "They come in no order: the first that fits is not the fastest.",
        ),
        WrongAnswer(
            _fastest_but(ordered=lambda candidates, key: sorted(candidates, key=key, reverse=True)),
            "The slowest was tried first.",
        ),
        WrongAnswer(
            _fastest_but(any_way=True),
            "Where nothing fits the answer is None, not what comes nearest.",
        ),
        WrongAnswer(
            _fastest_but(ordered=_in_place), "list.sort changes the caller's list: sorted doesn't."
        ),
        WrongAnswer(_measured_twice, "The answer was measured twice: keep what measure gave."),
    ),
)

# ------------------------------------------------------------------ 16.5: one of 128

OfARank = Callable[[int, int, int, tuple[int, int, int], int, tuple[float, float, float], int], Any]


def of_a_rank(
    block: int,
    end: int,
    layers: int,
    cut: tuple[int, int, int],
    stage: int,
    each: tuple[float, float, float],
    kept: int,
) -> float:
    """Bytes of the fullest rank, in the first stage of the line."""
    return _rank_but()(block, end, layers, cut, stage, each, kept)


def _rank_but(
    *,
    blocks_of: Callable[[int, int], int] = lambda layers, pipeline: -(-layers // pipeline),
    ends_of: Callable[[int], int] = lambda pipeline: 2 if pipeline == 1 else 1,
    cut_by: Callable[[int], int] = lambda tensor: tensor,
    among: Callable[[tuple[int, int, int]], int] = lambda cut: cut[2],
    first_stages: tuple[int, int, int] = (3, 2, 1),
    in_flight: Callable[[int], int] = lambda pipeline: pipeline,
    kept_by: Callable[[int], int] = lambda tensor: tensor,
) -> OfARank:
    def answer(
        block: int,
        end: int,
        layers: int,
        cut: tuple[int, int, int],
        stage: int,
        each: tuple[float, float, float],
        kept: int,
    ) -> float:
        tensor, pipeline, _ = cut
        blocks = blocks_of(layers, pipeline)
        weights = -(-(blocks * block + ends_of(pipeline) * end) // cut_by(tensor))
        shard = -(-weights // among(cut))
        held = sum(
            bytes_ * (shard if stage >= first else weights)
            for first, bytes_ in zip(first_stages, each, strict=True)
        )
        return held + in_flight(pipeline) * blocks * kept // kept_by(tensor)

    return answer


_RANKS: tuple[tuple[Any, ...], ...] = (
    # block, end, layers, (tensor, pipeline, data), stage, (weights, gradients, state), kept
    (480, 0, 4, (1, 1, 1), 0, (2, 2, 12), 0),
    (480, 96, 4, (1, 1, 1), 0, (2, 2, 12), 64),
    (480, 96, 4, (1, 1, 4), 1, (2, 2, 12), 64),
    (480, 96, 4, (1, 1, 4), 2, (2, 2, 12), 64),
    (480, 96, 4, (1, 1, 4), 3, (2, 2, 12), 64),
    (480, 96, 4, (4, 1, 1), 1, (2, 2, 12), 64),
    (480, 96, 4, (1, 2, 1), 1, (2, 2, 12), 64),
    (480, 96, 6, (2, 4, 3), 1, (1, 2, 12), 64),
    (481, 97, 6, (2, 4, 3), 0, (1, 2, 12), 64),
    (1008, 336, 126, (8, 4, 4), 1, (1, 2, 12), 512),
)  # fmt: skip


def _check_rank(answer: Any) -> str:
    names = ("block", "end", "layers", "cut", "stage", "each", "kept")
    for given in _RANKS:
        case = ", ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
        _whole(f"of_a_rank({case})", answer(*given), of_a_rank(*given))
    return "blocks, ends, shards and micro-batches on their way: ten ways to cut, to the byte"


_OF_A_RANK = Exercise(
    id="16.5",
    title="One GPU of 128",
    minutes=15,
    difficulty=3,
    hints=(
        "Go in this order: the pipeline says which blocks are there, tensor parallelism cuts all "
        "of that, and ZeRO shards what is left among the data ranks. Then activations.",
        "⌈layers/p⌉ blocks and one end (both, if p is 1), over t, rounded up: W. Sharded among d: "
        "state from stage 1 on, gradients from 2, weights from 3. And p micro-batches' inputs of "
        "its blocks, over t.",
        "t, p, d = cut; blocks = -(-layers // p); W = -(-(blocks * block + (1 + (p == 1)) * end) "
        "// t); shard = -(-W // d). For (first, bytes) of zip((3, 2, 1), each) count bytes * "
        "(shard if stage >= first else W). The inputs of p micro-batches are left to add.",
    ),
    reference=of_a_rank,
    check=_check_rank,
    wrong_answers=(
        WrongAnswer(
            _rank_but(blocks_of=lambda layers, pipeline: layers),
            "A rank has the blocks of its stage of the line, not all.",
        ),
        WrongAnswer(
            _rank_but(blocks_of=lambda layers, pipeline: layers // pipeline),
            "The fullest stage counts: layers over pipeline, rounded up.",
        ),
        WrongAnswer(
            _rank_but(ends_of=lambda pipeline: 0),
            "The first stage has the embedding, too; alone, it has both ends.",
        ),
        WrongAnswer(
            _rank_but(ends_of=lambda pipeline: 2),
            "The head is at the other end of the line: a first stage has one end.",
        ),
        WrongAnswer(
            _rank_but(cut_by=lambda tensor: 1),
            "Every matrix is cut among the tensor ranks, the ends', too.",
        ),
        WrongAnswer(
            _rank_but(among=lambda cut: cut[0] * cut[1] * cut[2]),
            "ZeRO shards among the ranks that have the same weights: the data ranks, not all GPUs.",
        ),
        WrongAnswer(
            _rank_but(among=lambda cut: 1), "The stage of ZeRO has no effect: nothing is sharded."
        ),
        WrongAnswer(
            _rank_but(first_stages=(3, 1, 1)),
            "Gradients are sharded from stage 2 on: in stage 1 they are whole.",
        ),
        WrongAnswer(
            _rank_but(first_stages=(1, 1, 1)),
            "This is stage 3 whatever was asked for: stage 1 shards state alone.",
        ),
        WrongAnswer(
            _rank_but(in_flight=lambda pipeline: 1),
            "A first stage begins p micro-batches before the first comes back: it keeps the inputs "
            "of p.",
        ),
        WrongAnswer(
            _rank_but(kept_by=lambda tensor: 1),
            "With sequence parallelism a rank keeps one t-th of each input.",
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def everything_elsewhere() -> Trace:
    """Day 15's step, and the weights on the disk, too, but for a block at a time."""
    from memlab.course.bill import SETTING

    store, streams = DiskStore(), []
    technique = combined("bfloat16+checkpointing+chunked-loss")

    def change(model: nn.Module) -> None:
        technique.change_model(model)
        streams.append(stream_layers(model, store))

    def after_step(model: nn.Module) -> Callable[[], object]:
        """Averages are of weights that are there: they come back for that, and go again."""
        with streams[0].present():
            update = averaged(model, store=DiskStore())

        def present_and_averaged() -> None:
            with streams[0].present():
                update()

        return present_and_averaged

    step = replace(
        technique,
        change_model=change,
        around_forward=lambda device: offloaded_activations(store),
        optimizer=combined("lion8bit").optimizer,
        stepping=partial(
            OffloadedOptimizer, store=store, sub_group=2**20, weights=True, gradients=True
        ),
        after_step=after_step,
    )
    return dry_trace(SETTING, step)


DAY = Day(
    exercises=(_PEAK, _ACTIVATIONS, _LACKS, _FASTEST, _OF_A_RANK),
    bill=Bill("day 16: and the weights, a block at a time", everything_elsewhere),
)
