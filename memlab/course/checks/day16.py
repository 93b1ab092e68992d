"""Day 16: does a model fit on a GPU?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from torch import nn

from memlab.course.exercises import Bill, Day, Exercise, Wrong, require
from memlab.course.properties import unchanged
from memlab.course.solutions import body, given, mistakes, solution
from memlab.offload import DiskStore, OffloadedOptimizer, offloaded_activations
from memlab.offload.layers import stream_layers
from memlab.planner.cards import CONTEXT_BYTES
from memlab.trace import Trace
from memlab.train import combined, dry_trace
from memlab.train.plugs import averaged
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


_AT_ONCE = "min(largest, optimizer.piece or largest)"

_PEAK = Exercise(
    id="16.1",
    title="The largest moment",
    minutes=12,
    difficulty=3,
    hints=(
        "First compute three values: the elements of all weights, the elements of the largest, and "
        "the bytes of the state. Which terms depend on the largest weight only?",
        "The state has elements · state_elements · state_itemsize bytes. Gradients have the "
        "weights' itemsize: for all weights, or for the largest one if in_backward. Scratch is "
        "float32, for the largest weight, or for a piece of it, whichever is smaller.",
        "With o for optimizer: n, largest = sum(sizes), max(sizes). held = n * itemsize + n * "
        "o.state_elements * o.state_itemsize. "
        '"backward": held + activations; "optimizer": held + itemsize * (largest if o.in_backward '
        "else n) + scratch: 4 bytes · o.scratch · the elements it works on at once.",
    ),
    reference=peak,
    check=_check_peak,
    wrong_answers=mistakes(
        "16.1",
        (
            "The optimizer allocates temporary tensors while it steps. Add its scratch.",
            ("+ gradients + scratch", "+ gradients"),
        ),
        (
            "You added up everything. Activations are freed before the optimizer steps: the peak "
            "is the larger moment.",
            ("moments[moment]", "moments['optimizer'] + activations"),
        ),
        (
            "The state has its own dtype: use state_itemsize, not the weights' itemsize.",
            ("optimizer.state_itemsize", "itemsize"),
        ),
        (
            "An optimizer keeps `state_elements` elements for each weight element: Adam keeps 2.",
            ("optimizer.state_elements * ", ""),
        ),
        (
            "When backward begins, there are no gradients yet.",
            ("held + activations", "held + gradients + activations"),
        ),
        (
            "With the step in backward, each gradient is freed before the next one exists. Count "
            "the largest.",
            ("largest if optimizer.in_backward else elements", "elements"),
        ),
        (
            "With the step in backward, one gradient still exists. Count the largest.",
            ("largest if optimizer.in_backward", "0 if optimizer.in_backward"),
        ),
        (
            "Scratch is allocated for one weight at a time. Count the largest.",
            (_AT_ONCE, "elements"),
        ),
        (
            "An optimizer that works in pieces needs scratch for one piece, not for the weight.",
            (_AT_ONCE, "largest"),
        ),
        (
            "A piece is never larger than the weight. Take the min of the two.",
            (_AT_ONCE, "(optimizer.piece or largest)"),
        ),
        (
            "Scratch is float32: 4 bytes an element, whatever the weights' dtype.",
            ("4 * optimizer.scratch", "itemsize * optimizer.scratch"),
        ),
    ),
)

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


_ACTIVATIONS = Exercise(
    id="16.2",
    title="Activations, saved or recomputed",
    minutes=12,
    difficulty=3,
    hints=(
        "When backward begins, everything that forward saved of each block is in memory. Add the "
        "larger of two terms that never exist together: the ends, and one block at work.",
        "A block saves tokens · (itemsize · elements + 4 · float32_elements) bytes. Checkpointed, "
        "it keeps only its input, tokens · itemsize · input_elements, and recomputes the rest "
        "once. Either way the block at work has tokens · itemsize · gradient_elements bytes of "
        "gradients.",
        "made = tokens * (itemsize * block.elements + 4 * block.float32_elements); x = tokens * "
        "itemsize * block.input_elements; kept, recomputed = (x, made - x) if checkpointed else "
        "(made, 0). Return layers * kept plus max(ends, recomputed + the block's bytes of "
        "gradients).",
    ),
    reference=activations,
    check=_check_activations,
    wrong_answers=mistakes(
        "16.2",
        (
            "You counted activations in 16 bits. Each element has `itemsize` bytes.",
            ("itemsize *", "2 *"),
        ),
        (
            "`float32_elements` are float32 whatever the activations' dtype: 4 bytes each.",
            ("4 * block.float32_elements", "itemsize * block.float32_elements"),
        ),
        (
            "Backward recomputes a checkpointed block. Add one block's activations.",
            ("made - x", "0"),
        ),
        (
            "Backward recomputes one block after the other. Count only one of them.",
            ("made - x", "layers * (made - x)"),
        ),
        (
            "Each checkpointed block keeps its input, so that backward can recompute it. Count "
            "the inputs of all blocks.",
            ("layers * kept", "(0 if checkpointed else layers * kept)"),
        ),
        (
            "You counted the block's input twice: it is part of `elements`, and forward already "
            "saved it.",
            ("made - x", "made"),
        ),
        (
            "The block at work also has gradients. Add them.",
            (" + tokens * itemsize * block.gradient_elements", ""),
        ),
        (
            "The ends are freed before a block is at work. Take the larger of the two.",
            ("max(ends, recomputed +", "(ends + recomputed +"),
        ),
        (
            "You ignored `checkpointed`: a checkpointed block keeps only its input.",
            ("if checkpointed", "if False"),
        ),
    ),
)

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


_LACKS = Exercise(
    id="16.3",
    title="Does it fit?",
    minutes=10,
    difficulty=2,
    hints=(
        "Answer three questions. How many bytes does the GPU have? How many of them can torch "
        "use? How many does torch reserve for the step?",
        "GB is 10⁹ bytes and GiB 2³⁰. A GPU has CARDS[name].total_bytes, and CUDA's context uses "
        "CONTEXT of them. The step uses reserved_bytes, never less than allocated_bytes.",
        "if memory in CARDS: total = CARDS[memory].total_bytes; else: unit = "
        'memory.lstrip("0123456789. "); total = round(float(memory.removesuffix(unit)) * '
        "UNITS[unit]). The step needs its reserved bytes and the context.",
    ),
    reference=lacks,
    check=_check_lacks,
    rebuilds=("memlab.units.parse_bytes", "memlab.planner.cards.memory_named"),
    wrong_answers=mistakes(
        "16.3",
        (
            "You read GB as GiB. 24 GB are 24·10⁹ bytes, 7 % fewer than 24 GiB.",
            ("UNITS[unit]", "UNITS[unit[0] + 'iB']"),
        ),
        (
            "You read GiB as GB. The i stands for powers of 2: 1 GiB is 2³⁰ bytes.",
            ("UNITS[unit]", "UNITS[unit[0] + 'B']"),
        ),
        (
            "Allocated bytes count tensors only. The GPU must hold the reserved bytes.",
            ("step.reserved_bytes", "step.allocated_bytes"),
        ),
        (
            "Reserved bytes include the allocated ones. Don't add the two.",
            ("step.reserved_bytes", "step.reserved_bytes + step.allocated_bytes"),
        ),
        (
            "CUDA's context uses a part of every GPU before the first tensor. Add CONTEXT.",
            (" + CONTEXT", ""),
        ),
        (
            "A GPU has less memory than it is sold with. Use CARDS[memory].total_bytes.",
            ("CARDS[memory].total_bytes", "{'h100': 80, 't4': 16}.get(memory, 24) * 2**30"),
        ),
        (
            "If the step fits, return 0, not a negative number.",
            (
                "max(0, step.reserved_bytes + CONTEXT - total)",
                "step.reserved_bytes + CONTEXT - total",
            ),
        ),
    ),
)

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


_SORTED = "sorted(candidates, key=lambda c: c.seconds)"
_MEASURED = "measure(candidate) <= room"
_ALL_MEASURED = """
found = {candidate: measure(candidate) for candidate in candidates}
fitting = [candidate for candidate in candidates if found[candidate] <= room]
return min(fitting, key=lambda candidate: candidate.seconds, default=None)
"""

_FASTEST = Exercise(
    id="16.4",
    title="The fastest that fits",
    minutes=10,
    difficulty=2,
    hints=(
        "Measuring is slow, sorting is not. Choose an order to measure in, so that the first "
        "candidate that fits is the answer. And which candidates need no measurement?",
        "Go by seconds, the fastest first. If 0.95 · formula_bytes exceeds the room, the candidate "
        "cannot fit. Measure the others in this order until one fits.",
        "for candidate in sorted(candidates, key=lambda c: c.seconds): skip it if 0.95 * "
        "candidate.formula_bytes > room. Return the first remaining one whose measure(candidate) "
        "is within room.",
    ),
    reference=fastest,
    check=_check_fastest,
    wrong_answers=mistakes(
        "16.4",
        (
            "You trusted the formula, which can be 5 % off. If 1.05 times the formula exceeds the "
            "room, measure.",
            (f" and {_MEASURED}", ""),
        ),
        (
            "You did not measure a candidate whose formula fits, but the formula can be too low.",
            (_MEASURED, f"(candidate.formula_bytes <= room or {_MEASURED})"),
        ),
        (
            "You measured every candidate. Go by seconds and stop at the first that fits.",
            body("fastest", _ALL_MEASURED),
        ),
        (
            "You measured a candidate that cannot fit. Skip it if 0.95 times the formula exceeds "
            "the room.",
            ("0.95 * candidate.formula_bytes <= room and ", ""),
        ),
        (
            "The formula can also be too high. Measure a candidate if 0.95 times "
            "its formula is within the room.",
            ("0.95 * ", ""),
        ),
        (
            "You tried the smallest first, which is usually the slowest. Order by seconds.",
            ("c.seconds", "c.formula_bytes"),
        ),
        (
            "The candidates come in no order, so the first that fits may not be the fastest. Sort "
            "by seconds.",
            (_SORTED, "candidates"),
        ),
        (
            "If nothing fits, return None, not the closest candidate.",
            ("return None", "return min(candidates, key=lambda c: c.formula_bytes)"),
        ),
        (
            "list.sort changes the caller's list. Use sorted.",
            (f"    for candidate in {_SORTED}:", "    for candidate in candidates:"),
            (
                "    for candidate",
                "    candidates.sort(key=lambda c: c.seconds)\n    for candidate",
            ),
        ),
        (
            "You measured the answer twice. Keep the result of measure.",
            ("return candidate", f"return candidate if {_MEASURED} else None"),
        ),
    ),
)

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


_ENDS, _CUT = "2 * end if pipeline == 1 else end", "-(-(blocks * block + ends) // tensor)"

_OF_A_RANK = Exercise(
    id="16.5",
    title="One GPU of 128",
    minutes=15,
    difficulty=3,
    hints=(
        "Apply pipeline, tensor parallelism and ZeRO in this order: count the weights of the first "
        "pipeline stage, divide them by t, and shard the result among the d data-parallel ranks. "
        "Then add the block inputs.",
        "The first pipeline stage has ⌈layers/p⌉ · block + end weights (2 · end if p is 1). Divide "
        "them by t and round up. ZeRO divides the result by d: for the state from stage 1, for "
        "gradients from 2, for weights from 3. Add the inputs of the ⌈layers/p⌉ blocks for p "
        "micro-batches, divided by t.",
        "t, p, d = degrees; blocks = -(-layers // p); W = -(-(blocks * block + (1 + (p == 1)) * "
        "end) // t); shard = -(-W // d). For (first, count) in zip((3, 2, 1), bytes_each) add "
        "count * (shard if zero_stage >= first else W). Then add the inputs of p micro-batches.",
    ),
    reference=of_a_rank,
    check=_check_rank,
    wrong_answers=mistakes(
        "16.5",
        (
            "A rank has only the blocks of its pipeline stage. Divide the layers by p.",
            ("-(-layers // pipeline)", "layers"),
        ),
        (
            "The first pipeline stage has ⌈layers/p⌉ blocks. Round up.",
            ("-(-layers // pipeline)", "layers // pipeline"),
        ),
        (
            "The first pipeline stage also has the embedding, and with p = 1 the head too.",
            (_ENDS, "0"),
        ),
        (
            "The head is in the last pipeline stage. With p above 1, count `end` once.",
            (_ENDS, "2 * end"),
        ),
        (
            "Tensor parallelism cuts every matrix, the embedding and the head too. Divide by t.",
            (_CUT, "blocks * block + ends"),
        ),
        (
            "ZeRO shards among the d data-parallel ranks, which hold the same weights, not among "
            "all GPUs.",
            ("weights // data", "weights // (tensor * pipeline * data)"),
        ),
        (
            "You ignored `zero_stage`, so nothing is sharded.",
            ("(shard if zero_stage >= first_stage else weights)", "weights"),
        ),
        (
            "ZeRO shards gradients from stage 2. In ZeRO-1, each rank has all of them.",
            ("(3, 2, 1)", "(3, 1, 1)"),
        ),
        (
            "You sharded everything, as in ZeRO-3. ZeRO-1 shards the state alone.",
            ("(3, 2, 1)", "(1, 1, 1)"),
        ),
        (
            "The first pipeline stage starts p micro-batches before the gradient of the first one "
            "returns. Count the inputs of p micro-batches.",
            ("pipeline * blocks * input_bytes", "blocks * input_bytes"),
        ),
        (
            "With sequence parallelism a rank keeps 1/t of each input. Divide by t.",
            ("input_bytes // tensor", "input_bytes"),
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def everything_elsewhere() -> Trace:
    """Day 15's step with the weights on disk too, except for one block at a time."""
    from memlab.course.bill import SETTING

    store, streams = DiskStore(), []
    technique = combined("bfloat16+checkpointing+chunked-loss")

    def change(model: nn.Module) -> None:
        technique.change_model(model)
        streams.append(stream_layers(model, store))

    def after_step(model: nn.Module) -> Callable[[], object]:
        """Load the weights to update the averages, and offload them again."""
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
    bill=Bill("day 16: weights loaded one block at a time", everything_elsewhere),
)
