"""Day 7: activation compression."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memlab.course.checks.day06 import attention_kept
from memlab.course.exercises import Bill, Day, Exercise, Wrong, equal, require
from memlab.course.properties import Peaks, elements, limited, peaks
from memlab.course.solutions import Edit, body, given, mistakes, solution
from memlab.metering import measure
from memlab.reference.activation_compression import as_bfloat16, hooks, quantize

dequantize, unpack, compress, decompress = given(
    7, "dequantize", "unpack", "compress", "decompress"
)

GROUP = 256
Round = Callable[[Tensor], Tensor]
_ELSEWHERE = ("memlab.quantize", "memlab.compression")  # what the day rebuilds

# ------------------------------------------------------------------ 7.1: groups on even steps

Quantize = Callable[[Tensor, int, Round], tuple[Tensor, Tensor, Tensor]]


_RNG_SEED = 7


def _groups(*spans: tuple[float, float], size: int = GROUP) -> Tensor:
    """(len(spans), size): random numbers between each two ends, which are among them."""
    generator = torch.Generator().manual_seed(_RNG_SEED)
    rows = []
    for low, high in spans:
        row = low + (high - low) * torch.rand(size, generator=generator)
        row[17 % size], row[101 % size] = low, high
        rows.append(row)
    return torch.stack(rows)


def _outlier() -> Tensor:
    groups = _groups(*[(-1.0, 1.0)] * 4)
    groups[2, 40] = 50.0
    return groups


_QUANTIZED: dict[str, tuple[Callable[[], Tensor], int]] = {
    "2 groups, 0, 1, … 255 and its tenths": (
        lambda: torch.stack([torch.arange(256.0), torch.arange(256.0) / 10]),
        255,
    ),
    "a group of numbers from 100.3 to 100.4": (lambda: _groups((100.3, 100.4)), 255),
    "a group of numbers from -1.3 to 2.9": (lambda: _groups((-1.3, 2.9)), 255),
    "a group of numbers from -0.1 to 2.9": (lambda: _groups((-0.1, 2.9)), 255),
    "a group of zeros": (lambda: torch.zeros(1, GROUP), 255),
    "a group of 256 times 0.1": (lambda: torch.full((1, GROUP), 0.1), 255),
    "3 groups, from -5.3 to -2.9, of zeros, and of 0.1 alone": (
        lambda: _groups((-5.3, -2.9), (0, 0), (0.1, 0.1)),
        3,
    ),
    "4 groups from -1 to 1, one with an outlier of 50": (_outlier, 255),
    "2 groups, from -1 to 1 and from 0 to 0.001": (lambda: _groups((-1, 1), (0, 1e-3)), 255),
    "a group of numbers from 0 to 1e-7": (lambda: _groups((0, 1e-7)), 255),
    "a group of numbers from -1.3 to 2.9, at 15 levels": (lambda: _groups((-1.3, 2.9)), 15),
    "32 groups of 16": (lambda: _groups(*[(-1.0, 1.0 + n) for n in range(32)], size=16), 255),
}


def _check_quantize(answer: Quantize) -> str:
    found = {}
    for name, (make, levels) in _QUANTIZED.items():
        case = f"quantize of {name}"
        groups = make()
        given = groups.clone()
        handed: list[Tensor] = []
        found[name] = _as_kept(case, answer(groups, levels, _noting(handed)), groups.shape)
        require(torch.equal(groups, given), f"{case} has changed the numbers that it was given.")
        require(
            all(bool(steps.isfinite().all()) for steps in handed),
            f"{case} hands round numbers that are not finite.",
        )
        _require_both_ends(case, found[name], given, levels)
        _require_half_a_step(case, found[name], given, levels)
        largest = int(found[name][0].max())
        require(
            largest <= levels,
            f"{case} gave codes up to {largest}; wanted {levels} at most.",
        )
    groups = _groups((-1.3, 2.9))
    down, _, _ = answer(groups, 255, torch.floor)
    nearest, _, _ = found["a group of numbers from -1.3 to 2.9"]
    same = int((down == nearest).sum())
    require(
        same < GROUP,
        "quantize with round=torch.floor gives the same codes as with torch.round: it does not "
        "use the round that it is handed.",
    )
    kept = found["4 groups from -1 to 1, one with an outlier of 50"]
    held = sum({t.untyped_storage(): t.untyped_storage().nbytes() for t in kept}.values())
    wanted = 4 * GROUP + 4 * 4
    require(
        held == wanted,
        f"quantize of 4 groups holds {held:,} bytes; wanted {wanted:,}: a byte a number, and 4 a "
        f"group.",
    )
    return (
        f"{len(_QUANTIZED)} tensors: no number more than half a step off, an outlier costs its own "
        f"group alone · {held:,} bytes for 4 × 256 numbers"
    )


def _noting(handed: list[Tensor]) -> Round:
    """torch.round, and what it was handed."""

    def round(steps: Tensor) -> Tensor:
        handed.append(steps.clone())
        return torch.round(steps)

    return round


def _as_kept(case: str, kept: Any, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    wanted = {
        "codes": (torch.uint8, tuple(shape)),
        "smallest": (torch.bfloat16, (shape[0], 1)),
        "step": (torch.bfloat16, (shape[0], 1)),
    }
    is_three = isinstance(kept, (tuple, list)) and len(kept) == 3
    require(
        is_three and all(isinstance(part, Tensor) for part in kept),
        f"{case} gave {_briefly(kept)}; wanted three tensors: codes, smallest, step."
        f"{' Is there a return?' if kept is None else ''}",
    )
    for (name, (dtype, shape)), part in zip(wanted.items(), kept, strict=True):
        require(
            part.dtype == dtype and tuple(part.shape) == shape,
            f"{case} gave {name} of {_kind(part)}; wanted {_dtype(dtype)} {shape}.",
        )
    return tuple(kept)


def _require_both_ends(
    case: str, kept: tuple[Tensor, Tensor, Tensor], numbers: Tensor, levels: int
) -> None:
    """The smallest lies above no number, and so many steps from it reach the largest."""
    low, high = numbers.aminmax(dim=1, keepdim=True)
    smallest, step = kept[1].float(), kept[2].float()
    reached = smallest + levels * step  # all (groups, 1)
    for group in range(len(numbers)):
        start, end = smallest[group].item(), reached[group].item()
        first, last = low[group].item(), high[group].item()
        require(
            start <= first,
            f"{case}: smallest is {start:.6g}, and lies above the smallest number, {first:.6g}.",
        )
        require(
            end >= last - 1e-6 * abs(last),
            f"{case}: {levels} steps of {step[group].item():.4g} from the smallest, {start:.6g}, "
            f"reach {end:.6g}, and not the largest number, {last:.6g}.",
        )


def _require_half_a_step(
    case: str, kept: tuple[Tensor, Tensor, Tensor], numbers: Tensor, levels: int
) -> None:
    low, high = numbers.aminmax(dim=1, keepdim=True)
    step = as_bfloat16((high - as_bfloat16(low, -math.inf).float()) / levels, math.inf).float()
    off = (dequantize(*kept) - numbers).abs()  # (groups, 256)
    bad = ~(off <= step / 2 * (1 + 1e-5) + 1e-6 * numbers.abs())  # NaN is bad, too
    if not bad.any():
        return
    group, place = (int(n) for n in bad.nonzero()[0])
    back = dequantize(*kept)[group, place].item()
    raise Wrong(
        f"{case}: {int(bad.sum())} of {numbers.numel()} numbers come back more than half a step "
        f"off, the first {numbers[group, place].item():.6g} as {back:.6g}; a step of its group is "
        f"{step[group].item():.2g}.{_how_off(kept, numbers, group, step[group].item())}"
    )


def _how_off(kept: tuple[Tensor, Tensor, Tensor], numbers: Tensor, group: int, step: float) -> str:
    """What the errors of a group have in common, if anything: all alike, all to one side, or
    growing with the code."""
    off = (dequantize(*kept) - numbers)[group].double()
    low, high = off.aminmax()
    if high - low <= 1.01 * step and off.abs().min() > step / 2:
        side = "above" if low > 0 else "below"
        return f" All of the group come back about {off.mean().abs():.1g} {side} what they were."
    if high <= 0.01 * step and low >= -1.01 * step:
        return " Not one comes back above what it was: fractions are cut off, not rounded."
    if _grows(off, kept[0][group].double(), step):
        return " The larger the code, the farther off: they are counted in steps of another size."
    return ""


def _grows(off: Tensor, codes: Tensor, step: float) -> bool:
    """Whether errors lie on a slope over the codes, the first and the last, which are clamped,
    left aside."""
    inside = (codes > codes.min()) & (codes < codes.max())
    if inside.sum() < 3:
        return False
    over, up = (each[inside] - each[inside].mean() for each in (codes, off))
    slope = over.dot(up) / over.dot(over).clamp(min=1)
    return bool((up - slope * over).abs().max() <= 0.6 * step < (slope * over).abs().max())


def _briefly(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {_kind(value)}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    return repr(value)


def _kind(tensor: Tensor) -> str:
    return f"{_dtype(tensor.dtype)} {tuple(tensor.shape)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ENDS = "groups.aminmax(dim=1, keepdim=True)"
_OF_THE_TENSOR = (_ENDS, "(x.expand(len(groups), 1) for x in groups.aminmax())")
_SYMMETRIC = ("    smallest =", "    high = torch.maximum(high, -low); low = -high\n    smallest =")
_SMALLEST = "as_bfloat16(low, -inf)"
_STEP = "as_bfloat16((high - smallest.float()) / levels, inf)"
_EXACT_STEP = "(high - smallest.float()) / levels"
_STEPS = "(groups - smallest.float()) / torch.where(step == 0, 1, step.float())"
_EXACT_STEPS = "(groups - low) / torch.where(high == low, 1, (high - low) / levels)"

_QUANTIZE = Exercise(
    id="7.1",
    title="Numbers on even steps, group by group",
    minutes=15,
    difficulty=3,
    hints=(
        "A group's smallest and largest number: groups.aminmax(dim=1, keepdim=True). How large is "
        "a step if `levels` of them lead from one to the other? And how many steps above the "
        "smallest does a number lie?",
        "Round the smallest down and the step up, as_bfloat16(…, -inf) and as_bfloat16(…, inf), "
        "and reckon with what came out, in float32: the step from high - smallest.float(), the "
        "codes from (groups - smallest.float()) / step.float(). A group of equal numbers can have "
        "a step of 0: divide by 1 there.",
        "low, high = groups.aminmax(dim=1, keepdim=True); smallest = as_bfloat16(low, -inf); "
        "step = as_bfloat16((high - smallest.float()) / levels, inf); steps = (groups - "
        "smallest.float()) / torch.where(step == 0, 1, step.float()). What is left: whole numbers "
        "by round, none beyond 0 and levels, in the dtype asked for.",
    ),
    reference=quantize,
    check=_check_quantize,
    rebuilds=_ELSEWHERE,
    wrong_answers=mistakes(
        "7.1",
        (
            "One scale for all: an outlier makes the steps of every group coarse, not only of its "
            "own.",
            _OF_THE_TENSOR,
        ),
        (
            "This is the guide's `tensor / scale`: one scale for all, and from -largest to "
            "largest.",
            _OF_THE_TENSOR,
            _SYMMETRIC,
        ),
        (
            "Steps from -largest to largest: where a group is not centred on zero, codes are "
            "wasted. Begin at its smallest number.",
            _SYMMETRIC,
        ),
        (
            ".to(torch.uint8) alone cuts the fraction off: an error of up to a whole step, always "
            "downwards. Round first.",
            ("round(steps)", "steps"),
        ),
        (
            "Use `round` where you round: 7.2 hands in another.",
            ("round(steps)", "torch.round(steps)"),
        ),
        (
            "To the nearest bfloat16, the smallest can lie above its numbers: as_bfloat16(low, "
            "-inf) rounds it down.",
            (_SMALLEST, "low.bfloat16()"),
            (_STEP, f"({_EXACT_STEP}).bfloat16()"),
        ),
        (
            "To the nearest bfloat16, a step can be too short: as_bfloat16(…, inf) rounds it up.",
            (_STEP, f"({_EXACT_STEP}).bfloat16()"),
        ),
        (
            "The step was not reckoned from the rounded smallest, which lies lower: high - "
            "smallest.float(), not high - low.",
            ("high - smallest.float()", "high - low"),
        ),
        (
            "Groups are the rows that are handed in, whatever their length: there is no 256 in "
            "here.",
            ("    low, high", "    groups = groups.reshape(-1, 256)\n    low, high"),
        ),
        (
            "The codes are reckoned from a smallest and a step that are not the ones kept: take "
            "the rounded ones, dequantize has no others.",
            (_STEPS, _EXACT_STEPS),
        ),
        (
            "256 codes have 255 steps between them: divide the range by levels.",
            ("/ levels,", "/ (levels + 1),"),
            (".clamp(0, levels)", ".int()"),
        ),
        (
            "A group of equal numbers: 0 / 0. Where the step is 0, divide by 1.",
            ("torch.where(step == 0, 1, step.float())", "step.float()"),
        ),
        (
            "255 is not always the number of steps: use `levels`.",
            ("/ levels,", "/ 255,"),
            ("(0, levels)", "(0, 255)"),
        ),
        (
            "Two float32 a group are 8 bytes; in bfloat16 they are 4.",
            (_SMALLEST, "low"),
            (_STEP, _EXACT_STEP),
        ),
        ("Codes in float32 save nothing: .to(torch.uint8).", (".to(torch.uint8)", "")),
        (
            "The forward pass still needs its numbers: sub_ and div_ write into them.",
            ("(groups - smallest.float())", "groups.sub_(smallest.float())"),
        ),
    ),
)

# ------------------------------------------------------------------ 7.2: rounding at random

RoundAtRandom = Callable[[Tensor, torch.Generator], Tensor]
DRAWS = 16_384
_DRAWS_A_ZERO = 1233  # a seed that has an exact 0 among so many draws
CLOSE = 0.02  # five standard deviations of the mean of so many draws, at a fraction of a half


def _check_round_at_random(answer: RoundAtRandom) -> str:
    case = "round_at_random"
    means = {number: _mean(case, answer, number) for number in (2.25, 2.5, 2.9, 0.1)}
    calls = [answer(torch.full((DRAWS,), 2.5), _seeded(seed)) for seed in range(8)]
    found = sorted({n for rounded in calls for n in rounded.tolist()})
    require(
        len(found) == 1 or max(len(set(rounded.tolist())) for rounded in calls) > 1,
        f"{case} of {DRAWS:,} times 2.5 gave one number for all of them, in one call {found[0]:g} "
        f"and in the next {found[-1]:g}.",
    )
    off = {number: mean for number, mean in means.items() if abs(mean - number) >= CLOSE}
    require(
        not off,
        f"{case} of {DRAWS:,} times {_listed(off)} has a mean of about "
        f"{_listed(f'{mean:.1f}' for mean in off.values())}; wanted the number itself.",
    )
    _mean(case, answer, 4.0, seed=_DRAWS_A_ZERO)  # is 4
    steps = torch.linspace(0, 255, 1021).view(1, -1)
    generator = _seeded(2)
    first, second = answer(steps, generator), answer(steps, generator)
    require(
        first.shape == steps.shape,
        f"{case} of a tensor (1, 1021) gives another shape, {tuple(first.shape)}.",
    )
    require(
        not torch.equal(first, second),
        f"{case} called twice rounds alike both times; wanted `generator` to go on.",
    )
    require(
        torch.equal(first, answer(steps, _seeded(2))),
        f"{case} with the same seed of `generator` rounds otherwise the second time.",
    )
    _require_draws_of_their_own(case, answer)
    return (
        f"means of {DRAWS:,} draws are right to {CLOSE} · whole numbers stay · nobody else's "
        f"random numbers drawn"
    )


def _require_draws_of_their_own(case: str, answer: RoundAtRandom) -> None:
    """Of 2.5 in many calls, no two places are rounded alike much oftener than otherwise."""
    generator, shape, calls = _seeded(3), (4, 16), 1024
    rows = [answer(torch.full(shape, 2.5), generator).flatten() for _ in range(calls)]
    ups = (torch.stack(rows) - 2.5).sign()  # (calls, places), of -1 and 1
    places = ups.shape[1]
    together = (ups.mT @ ups).fill_diagonal_(0)  # (places, places): alike less otherwise
    found = int(together.abs().argmax())
    first, second = found // places, found % places
    alike = (calls + int(together[first, second])) // 2
    require(
        abs(2 * alike - calls) < 0.2 * calls,  # 6 standard deviations
        f"{case} of {shape} numbers rounds numbers {first} and {second} the same way in {alike:,} "
        f"of {calls:,} calls; wanted about half.",
    )


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _mean(case: str, answer: RoundAtRandom, number: float, *, seed: int = 1) -> float:
    """Of many roundings of a number, all of them to one of its two neighbours."""
    steps = torch.full((DRAWS,), number)
    before = torch.get_rng_state()
    rounded = answer(steps, _seeded(seed))
    require(
        isinstance(rounded, Tensor) and rounded.shape == steps.shape,
        f"{case} gave {_briefly(rounded)}; wanted a tensor {tuple(steps.shape)}."
        f"{' Is there a return?' if rounded is None else ''}",
    )
    require(
        bool((steps == number).all()),
        f"{case} has changed the numbers that it was given.",
    )
    require(
        rounded.dtype == torch.float32,
        f"{case} gave {_dtype(rounded.dtype)}; wanted float32, as `steps` is.",
    )
    require(
        torch.equal(torch.get_rng_state(), before),
        f"{case} has drawn from torch's own random numbers; wanted it to draw from `generator` "
        f"alone.",
    )
    found, neighbours = rounded.unique().tolist(), sorted({math.floor(number), math.ceil(number)})
    gave = _listed(f"{n:g}" for n in found) if len(found) < 4 else "numbers between"
    require(
        set(found) <= set(neighbours),
        f"{case} of {number} gave {gave}; wanted {' or '.join(map(str, neighbours))} alone.",
    )
    return rounded.mean().item()


_DRAWN = "torch.rand(steps.shape, generator=generator)"
_IS_UP = "< steps - down)"
_ONE_DRAW_MOVED_ON = """
down = steps.floor()
places = 0.618 * torch.arange(steps.numel()).view(steps.shape)
return down + ((places + torch.rand((), generator=generator)) % 1 < steps - down)
"""


def _returned(value: str) -> Edit:
    return body("round_at_random", f"return {value}")


_ROUND_AT_RANDOM = Exercise(
    id="7.2",
    title="Round at random, right in the mean",
    minutes=8,
    difficulty=2,
    hints=(
        "Between floor and ceil, 2.25 has gone a quarter of the way. In how many of all cases must "
        "it come out as 3, so that the mean is 2.25?",
        "torch.rand(steps.shape, generator=generator) gives a number from 0 to 1 for each: below a "
        "fraction f it is with probability f. steps - steps.floor() is the fraction.",
        "down = steps.floor(); is_up = torch.rand(steps.shape, generator=generator) < steps - "
        "down. True counts as 1.",
    ),
    reference=solution("7.2"),
    check=_check_round_at_random,
    rebuilds=_ELSEWHERE,
    wrong_answers=mistakes(
        "7.2",
        (
            "This is the nearest: 2.25 becomes 2 every time, and its mean is not 2.25.",
            _returned("steps.round()"),
        ),
        (
            "Always down: the fraction is lost, and all means are too small.",
            _returned("steps.floor()"),
        ),
        (
            "The odds are the wrong way round: the larger the fraction, the oftener up.",
            (_IS_UP, "> steps - down) * (steps > down)"),
        ),
        (
            "Rounded up with a probability of its own, one half, and not with its fraction.",
            (_IS_UP, "< 0.5)"),
        ),
        (
            "All rows share their draws: torch.rand(steps.shape, …) has one for each number.",
            ("steps.shape,", "steps.shape[-1:],"),
        ),
        (
            "A fixed sequence, moved on by one draw: the errors of two numbers always stand in the "
            "same relation, and do not cancel as independent ones do.",
            body("round_at_random", _ONE_DRAW_MOVED_ON),
        ),
        (
            "Codes become bytes in quantize, after its clamp: here they are whole numbers still.",
            ("return down", "return (down"),
            (_IS_UP, f"{_IS_UP}).to(torch.uint8)"),
        ),
        (
            "One draw for all: each number needs its own, or all errors go the same way and none "
            "cancel.",
            ("steps.shape,", "(),"),
        ),
        (
            "torch.rand without generator= draws from the user's stream: dropout after it would "
            "draw others.",
            (", generator=generator", ""),
        ),
        (
            "A generator seeded anew in each call errs the same way in each call, and over many "
            "steps nothing cancels.",
            ("=generator", "=torch.Generator().manual_seed(0)"),
        ),
        (
            "Noise of -½ to ½ belongs before round(); before floor() it is 0 to 1.",
            _returned(f"(steps + {_DRAWN} - 0.5).floor()"),
        ),
        (
            "Noise of 0 to 1 belongs before floor(); before round() it is -½ to ½.",
            _returned(f"(steps + {_DRAWN}).round()"),
        ),
        (
            "Noise alone rounds nothing: codes are whole numbers.",
            _returned(f"steps + {_DRAWN} - 0.5"),
        ),
        (
            "It writes into the steps of whoever called it: make a new tensor.",
            ("return down", "return steps.copy_(down"),
            (_IS_UP, f"{_IS_UP})"),
        ),
    ),
)

# ------------------------------------------------------------------ 7.3: bits in bytes

Pack = Callable[[Tensor, int], Tensor]


def _check_pack(answer: Pack) -> str:
    generator = torch.Generator().manual_seed(3)

    def random(count: int, bits: int) -> list[int]:
        return torch.randint(2**bits, (count,), generator=generator).tolist()

    cases = [([3, 0, 2, 1], 2), ([1, 2], 4), ([15, 15, 15, 15], 4), ([1, 2, 3], 4)]
    cases += [([3, 3, 3, 3, 3], 2), ([200, 7, 255], 8)]
    cases += [(random(count, bits), bits) for bits in (8, 4, 2) for count in (512, 1001)]
    for numbers, bits in cases:
        shown = numbers if len(numbers) < 8 else f"{len(numbers):,} codes"
        case = f"pack({shown}, {bits})"
        longer = torch.tensor([*numbers, *[0] * (-len(numbers) % GROUP)], dtype=torch.uint8)
        codes = longer[: len(numbers)]
        packed = answer(codes, bits)
        _require_packed(case, packed, bits, len(numbers))
        require(codes.tolist() == numbers, f"{case} has changed the codes that it was given.")
        got = unpack(packed, bits, len(numbers)).tolist()
        off = [n for n, (a, b) in enumerate(zip(got, numbers, strict=True)) if a != b]
        require(
            not off,
            f"{case} comes back with {len(off):,} of {len(numbers):,} codes changed, the first at "
            f"place {off[:1]}; its bytes begin {[f'{b:08b}' for b in packed[:2].tolist()]}.",
        )
        held = packed.untyped_storage().nbytes()
        require(
            held == len(packed),
            f"{case} gave {len(packed):,} bytes of a storage of {held:,}, which stays with them.",
        )
    return f"{len(cases)} rows of codes come back · ⌈n·bits/8⌉ bytes, none beside them"


def _require_packed(case: str, packed: Any, bits: int, count: int) -> None:
    wanted = -(-count * bits // 8)
    require(
        isinstance(packed, Tensor),
        f"{case} gave {_briefly(packed)}; wanted a tensor uint8 ({wanted},)."
        f"{' Is there a return?' if packed is None else ''}",
    )
    require(
        packed.dtype == torch.uint8 and tuple(packed.shape) == (wanted,),
        f"{case} gave {_kind(packed)}; wanted uint8 ({wanted},).",
    )


_BYTES, _PART = "-(-len(codes) // per_byte)", "codes[place::per_byte]"
_PACK_IN_PLACE = """
per_byte = 8 // bits
for place in range(1, per_byte):
    part = codes[place::per_byte]
    codes[::per_byte][: len(part)] |= part << place * bits
return codes[::per_byte].clone()
"""

_PACK = Exercise(
    id="7.3",
    title="Two codes a byte, or four",
    minutes=8,
    difficulty=2,
    hints=(
        "codes[0::2] are the first codes of all bytes, codes[1::2] the second ones. Which of them "
        "must move, and by how many bits?",
        "part << k moves a byte's bits up by k, a |= b puts both together. Begin with zeros of "
        "⌈n / per_byte⌉ bytes. The last byte may have fewer codes: codes[place::per_byte] is then "
        "one shorter than the zeros.",
        "per_byte = 8 // bits; packed = torch.zeros(-(-len(codes) // per_byte), "
        "dtype=torch.uint8); for place in range(per_byte): part = codes[place::per_byte]. In the "
        "loop, part goes into the first len(part) bytes of packed, moved up: by how many bits?",
    ),
    reference=solution("7.3"),
    check=_check_pack,
    rebuilds=_ELSEWHERE,
    wrong_answers=mistakes(
        "7.3",
        (
            "A byte for each code: nothing is packed, and nothing saved.",
            body("pack", "return codes.clone()"),
        ),
        (
            "The first code belongs into the lowest bits; here it is in the highest.",
            ("place * bits", "(per_byte - 1 - place) * bits"),
        ),
        (
            "All codes of a byte lie on top of each other: shift them by place * bits.",
            (" << place * bits", ""),
        ),
        (
            "The last codes are lost where they do not fill a byte: round the number of bytes up.",
            (_BYTES, "len(codes) // per_byte"),
            (_PART, f"{_PART}[: len(packed)]"),
        ),
        (
            "A byte too many where the codes fill the last one: ⌈n · bits / 8⌉ is a division "
            "rounded up.",
            (_BYTES, "len(codes) // per_byte + 1"),
        ),
        (
            "Neighbours share a byte: codes[place::per_byte], not one part of the row after the "
            "other.",
            (_PART, "codes[place * len(packed) : (place + 1) * len(packed)]"),
        ),
        (
            "Four bytes for what fits into one: torch.uint8.",
            ("torch.uint8", "torch.int32"),
            ("part <<", "part.int() <<"),
        ),
        (
            "At 8 bits the codes are a view of a longer tensor, and a view keeps all of it alive: "
            "make a new one.",
            ("    per_byte =", "    if bits == 8: return codes\n    per_byte ="),
        ),
        (
            "The codes are the caller's: |= writes into them.",
            body("pack", _PACK_IN_PLACE),
        ),
    ),
)

# ------------------------------------------------------------------ 7.4: what is there to gain

BytesKept = Callable[[Sequence[Tensor], Iterable[Tensor], int], tuple[int, int]]


bytes_kept = solution("7.4")


class _Saved(NamedTuple):
    """What a case has: tensors that autograd handed over, and the weights."""

    tensors: list[Tensor]
    weights: list[Tensor]


def _made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As an operator makes it: it has a gradient, and is no leaf."""
    return torch.zeros(shape, dtype=dtype, requires_grad=True) + 0


def _saved_cases() -> dict[str, _Saved]:
    h, weight = _made(40, 64), torch.zeros(64, 64, requires_grad=True)
    first, second = h.chunk(2, dim=-1)
    return {
        "a tensor (40, 64)": _Saved([h], []),
        "a tensor (7, 41)": _Saved([_made(7, 41)], []),
        "tensors of 256 and of 255 numbers": _Saved([_made(16, 16), _made(5, 51)], []),
        "an input (40, 64) that wants a gradient": _Saved([h.detach().requires_grad_()], []),
        "none of a tensor's rows, and the tensor (40, 64)": _Saved([h[:0], h], []),
        "a tensor (40, 64) twice": _Saved([h, h], []),
        "a tensor (40, 64) and its transpose": _Saved([h, h.T], []),
        "the two halves of a tensor (40, 64), with no other view of it,": _Saved(
            [first, second], []
        ),
        "the first 100 numbers of a tensor (10000,)": _Saved([_made(10_000)[:100]], []),
        "a tensor in bfloat16": _Saved([_made(40, 64, dtype=torch.bfloat16)], []),
        "a tensor, and a weight's transpose": _Saved([h, weight.T], [weight]),
        "tensors (40, 64) and (40, 1), and int64 (512,)": _Saved(
            [h, _made(40, 1), torch.zeros(512, dtype=torch.int64)], []
        ),
        "a tensor (40, 64), and a float32 (512,) without a gradient": _Saved(
            [h, torch.zeros(512)], []
        ),
    }


class _Once:
    """Weights as `model.parameters()` gives them: whoever begins again finds none."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._rest, self._starts = iter(weights), 0

    def __iter__(self) -> "_Once":
        self._starts += 1
        return self

    def __next__(self) -> Tensor:
        return next(self._rest)

    def require_one_pass(self, case: str) -> None:
        require(
            self._starts <= 1,
            f"{case} goes through weights {self._starts} times; wanted once: of model.parameters() "
            f"nothing is left for a second time.",
            evidence=(case, "weights read again"),
        )


def _check_bytes_kept(answer: BytesKept) -> str:
    cases = _saved_cases()
    for name, (tensors, weights) in cases.items():
        for bits in (8, 2):
            case = f"bytes_kept of {name} at {bits} bits"
            got = answer(tensors, once := _Once(weights), bits)
            once.require_one_pass(case)
            equal(case, got, bytes_kept(tensors, weights, bits))
    block, x = _Gated(), _input()
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        seen: list[Tensor] = []
        block(x)
    weights = list(block.parameters())
    before, after = bytes_kept(seen, weights, 8)
    case = f"bytes_kept of {len(seen)} tensors of a layer with index, mask and halves, at 8 bits"
    equal(case, answer(seen, block.parameters(), 8), (before, after))
    return f"{2 * len(cases) + 1} cases · of the last {before:,} bytes {after:,} are left"


_OF_WEIGHTS = "{weight.untyped_storage() for weight in weights}"
_IN_BITS = "-(-count * bits // 8) + 4 * -(-count // 256)"
_ELIGIBLE = "tensor.requires_grad and count >= 256"
_AS_LONG_AS_THE_VIEW = (
    ("storage.nbytes() // tensor.itemsize", "tensor.numel()"),
    ("storage.nbytes()", "tensor.nbytes"),
)


def _by_key(key: str) -> tuple[Edit, ...]:
    """Tensors are told apart by something else than their storages."""
    return (
        (_OF_WEIGHTS, f"{{{key.format('weight')} for weight in weights}}"),
        ("if storage in", f"if {key.format('tensor')} in"),
        ("seen.add(storage)", f"seen.add({key.format('tensor')})"),
    )


_BYTES_KEPT = Exercise(
    id="7.4",
    title="What waits for backward, and what of it can shrink",
    minutes=10,
    difficulty=2,
    hints=(
        "Two tensors that share a storage are one piece of memory. Which have you seen already, "
        "and which belong to the weights?",
        "Keep a set of storages, and begin it with those of the weights: tensor.untyped_storage(). "
        "A storage has storage.nbytes() // tensor.itemsize numbers. One that is eligible takes "
        "⌈n·bits/8⌉ + 4·⌈n/256⌉ bytes, any other what it took before.",
        "seen = {w.untyped_storage() for w in weights}; for tensor in saved: storage = "
        "tensor.untyped_storage(); if it is in seen: continue; add it; n = storage.nbytes() // "
        "tensor.itemsize; before += storage.nbytes(); in_bits = -(-n * bits // 8) + 4 * -(-n // "
        "256). When is it in_bits that after grows by, and when storage.nbytes()?",
    ),
    reference=bytes_kept,
    check=_check_bytes_kept,
    wrong_answers=mistakes(
        "7.4",
        (
            "A sum over tensors: one storage is saved by several operators, and is one piece of "
            "memory.",
            *_by_key("id({})"),
        ),
        (
            "data_ptr() is where a view begins: two views of one storage begin at two places, and "
            "a view can be smaller than what it keeps.",
            *_by_key("{}.data_ptr()"),
            *_AS_LONG_AS_THE_VIEW,
        ),
        (
            "A view keeps its whole storage alive, however few of its numbers it shows.",
            *_AS_LONG_AS_THE_VIEW,
        ),
        (
            "The whole storage is held, and all of it shrinks: n is how many numbers it has, not "
            "the view.",
            (_IN_BITS, _IN_BITS.replace("count", "tensor.numel()")),
        ),
        (
            "A small view keeps a large storage: ask how many numbers the storage has.",
            ("count >= 256", "tensor.numel() >= 256"),
        ),
        (
            "Weights are there anyway: that autograd keeps them, too, takes nothing.",
            (_OF_WEIGHTS, "set()"),
        ),
        (
            "Not everything can shrink: what has no gradient and what is small stays as it is.",
            (_ELIGIBLE, "True"),
        ),
        (
            "Small storages stay as they are: fewer than 256 numbers.",
            (_ELIGIBLE, "tensor.requires_grad"),
        ),
        (
            "What has no gradient stays as it is: indices, masks, tables.",
            (_ELIGIBLE, "count >= 256"),
        ),
        (
            "Not every float has a gradient: requires_grad says it.",
            (_ELIGIBLE, "tensor.is_floating_point() and count >= 256"),
        ),
        (
            "Each group has a smallest and a step besides: 4 bytes.",
            (_IN_BITS, "-(-count * bits // 8)"),
        ),
        (
            "The last group may be short, and the last byte not full: round both up.",
            (_IN_BITS, "count * bits // 8 + 4 * (count // 256)"),
        ),
        (
            "A byte a number is right at 8 bits alone: ⌈n · bits / 8⌉.",
            ("-(-count * bits // 8)", "count"),
        ),
        (
            "What is left alone waits for backward as well: it counts in both sums.",
            ("before += storage.nbytes()", "before += storage.nbytes() if is_eligible else 0"),
            ("in_bits if is_eligible else storage.nbytes()", "in_bits if is_eligible else 0"),
        ),
    ),
)

# ------------------------------------------------------------------ 7.5: the hooks

Compress = Callable[[Tensor], Any]
Decompress = Callable[[Any], Tensor]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
MakeHooks = Callable[[Iterable[Tensor], Compress, Decompress], Hooks]
ROWS, WIDTH = 600, 16


class _Gated(nn.Module):
    """Halves of one tensor, a table of rows, a mask, one number a row, and four numbers of many, in
    bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.frozen = nn.Linear(WIDTH, 2 * WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("rows", torch.arange(512).flip(0) * 599 // 511)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, dim=-1)  # two views of one storage
        picked = (first.sigmoid() * second)[self.rows] * self.scale
        wide = self.frozen(picked).tanh()
        gate = wide[:8, :1].exp().repeat(64, 1)
        out = self.down(torch.where(wide > 0.01, wide * gate, wide))
        return out + out.bfloat16()[:4, :1].sin().float().mean()


def _input() -> Tensor:
    """Data, without a gradient."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))


class _Run(NamedTuple):
    gradients: list[Tensor]
    asked: Counter[str]  # what was compressed, in words
    held: int  # bytes, between forward and backward


def _hooks_of(answer: MakeHooks, weights: Iterable[Tensor], *both: Any) -> Hooks:
    made = answer(weights, *both)
    require(
        isinstance(made, (tuple, list)) and len(made) == 2 and all(map(callable, made)),
        f"hooks(weights, compress, decompress) gave {_briefly(made)}; wanted two functions, pack "
        f"and unpack.{' Is there a return?' if made is None else ''}",
    )
    return made[0], made[1]


def _run_with(answer: MakeHooks | None, compress: Compress, decompress: Decompress) -> _Run:
    """Forward once, backward twice."""
    layer, x, asked = _Gated(), _input(), Counter[str]()
    weights, kept = _Once(layer.parameters()), list[Tensor]()

    def compress_and_note(numbers: Tensor) -> Any:
        asked[_kind(numbers)] += 1
        return compress(numbers)

    def forward() -> None:
        if answer is None:
            kept.append(layer(x))
            return
        hooks = _hooks_of(answer, weights, compress_and_note, decompress)
        with saved_tensors_hooks(*hooks):
            kept.append(layer(x))

    trace = measure(forward, model=layer)
    weights.require_one_pass("hooks around a layer")
    held = sum(e.bytes for e in trace.events if e.phase != "before") - kept[0].nbytes
    first = _walked(layer, kept[0])
    try:
        return _Run([*first, *_walked(layer, kept[0])], asked, held)
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:
        raise Wrong(
            f"hooks around a layer: a second backward through a retained graph raised "
            f"{type(error).__name__} ({str(error).splitlines()[0].rstrip('.')}); wanted the "
            f"gradients of the first once more.",
            ("second backward", type(error).__name__),
        ) from None


def _walked(layer: nn.Module, output: Tensor) -> tuple[Tensor, ...]:
    """Gradients by a backward that retains the graph."""
    learnt = [weight for weight in layer.parameters() if weight.requires_grad]
    return torch.autograd.grad(output.square().sum(), learnt, retain_graph=True)


def _exactly(numbers: Tensor) -> Tensor:
    return numbers.clone()


def _itself(kept: Tensor) -> Tensor:
    return kept


def _doubled(kept: Tensor) -> Tensor:
    """Told from what was kept, whoever kept it besides."""
    return 2 * kept


def _saved_by_plain() -> list[Tensor]:
    seen: list[Tensor] = []
    layer = _Gated()
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        layer(_input())
    weights = {weight.untyped_storage() for weight in layer.parameters()}
    return [t for t in seen if t.untyped_storage() not in weights]


def _check_hooks(answer: MakeHooks) -> str:
    case = "hooks around a layer with index, mask and halves"
    _require_nobody_elses(answer)
    _require_views_back(answer)
    _require_pairs_apart(answer)
    plain = _run_with(None, _exactly, _itself)
    _require_exact(case, answer, plain)
    _require_numbers_counted(answer)
    coarse, allowed = _run_with(answer, compress, decompress), _allowed()
    _require_held(case, answer, plain, coarse, allowed)
    retained = _held_when_retained(answer)
    require(
        retained <= allowed,
        f"{case} holds {retained:,} bytes after a backward that retains the graph; wanted "
        f"{allowed:,}, as before it: unpack keeps nothing of what it hands out.",
    )
    limit = _peaks_of(hooks).backward + 4 * ROWS * 2 * WIDTH  # and the largest tensor once more
    limited(case, _peaks_of(answer), backward=limit)
    return (
        f"exact where compress is exact · {plain.held:,} bytes held without, {coarse.held:,} with "
        f"8 bits · each storage compressed once"
    )


def _require_exact(case: str, answer: MakeHooks, plain: _Run) -> None:
    """What was to be compressed was, and nothing is lost where compressing loses nothing."""
    exact, wanted = _run_with(answer, _exactly, _itself), _run_with(hooks, _exactly, _itself)
    require(
        bool(exact.asked) and exact.asked == wanted.asked,
        f"{case} compressed {_in_words(exact.asked)}; wanted {_in_words(wanted.asked)}. Too much: "
        f"{_in_words(exact.asked - wanted.asked)}; missing: "
        f"{_in_words(wanted.asked - exact.asked)}.",
    )
    far = max((a - b).abs().max().item() for a, b in zip(exact[0], plain[0], strict=True))
    require(
        far == 0,
        f"{case}, with a compress that keeps every digit: gradients are up to {far:.1e} off those "
        f"of the plain layer.",
    )


def _require_held(case: str, answer: MakeHooks, plain: _Run, coarse: _Run, allowed: int) -> None:
    """What waits for backward, what backward makes of it, and that nothing stays."""
    left = _left(answer)
    require(
        coarse.held == allowed,
        f"{case} holds {coarse.held:,} bytes between forward and backward; wanted {allowed:,}, of "
        f"the {plain.held:,} without them: codes, smallest and step of what is eligible, and the "
        f"rest as it was. When the output is dropped, {left:,} bytes stay.",
    )
    for name, both, run in (
        ("numbers doubled", (_exactly, _doubled), None),
        ("8 bits", (compress, decompress), coarse),
    ):
        found = (run or _run_with(answer, *both)).gradients
        off = _relative(found, _run_with(hooks, *both).gradients)
        require(
            off < 1e-5,
            f"{case}, with a decompress that gives {name}: gradients are {off:.1%} off those of "
            f"hooks that hand on what it gives.",
        )
    require(
        left == 0,
        f"{case} leave {left:,} bytes behind when the output is dropped; wanted none.",
    )


def _allowed() -> int:
    """Bytes of each storage once, but for x, rows, which are there anyway: by the formula."""
    x, rows = _input().nbytes, 512 * 8
    before, after = bytes_kept(_saved_by_plain(), [], 8)
    assert before > x + rows
    return after - x - rows


def _relative(gradients: list[Tensor], exact: list[Tensor]) -> float:
    """The error's length by the gradient's."""
    pairs = list(zip(gradients, exact, strict=True))
    error = sum((a - b).square().sum().item() for a, b in pairs)
    return (error / sum(b.square().sum().item() for _, b in pairs)) ** 0.5


def _in_words(asked: Counter[str]) -> str:
    each = [f"{kind}{f' {n} times' if n > 1 else ''}" for kind, n in sorted(asked.items())]
    return ", ".join(each) or "nothing"


def _require_nobody_elses(answer: MakeHooks) -> None:
    """Two tensors, the second at the address of the first, which has died. Wrong ends the check:
    what else an answer that goes by addresses gets wrong is chance."""
    pack, unpack = _hooks_of(answer, [], _exactly, _itself)
    alive = [torch.full((512,), float(n), requires_grad=True) for n in range(2)]
    back = [unpack(kept) for kept in [pack(tensor) for tensor in alive]]
    require(
        all(map(torch.equal, back, alive)),
        "hooks: of two tensors (512,) that are alive one comes back with the other's numbers.",
    )
    place = torch.zeros(512).numpy()
    first = torch.from_numpy(place).requires_grad_()
    kept = pack(first)
    del first
    place += 1
    second = torch.from_numpy(place).requires_grad_()
    got = unpack(pack(second))
    if not torch.equal(got, second):
        raise Wrong(
            "hooks: a tensor died, another took its address, and comes back with the first one's "
            "numbers."
        )
    del kept


def _require_pairs_apart(answer: MakeHooks) -> None:
    """Two pairs of hooks, each with a compress of its own, around one tensor."""
    h = elements(40, 64).requires_grad_() * 1
    asked: list[Tensor] = []
    pack, _ = _hooks_of(answer, [], _exactly, _itself)
    kept = pack(h)  # alive, and so is what was noted of it
    other, _ = _hooks_of(answer, [], lambda numbers: asked.append(numbers) or numbers, _itself)
    other(h)
    require(
        len(asked) == 1,
        "hooks: a tensor that one pair of hooks has kept is handed to a second pair, with another "
        "compress, which is not asked: each call of hooks(…) needs notes of its own.",
    )
    del kept


def _require_views_back(answer: MakeHooks) -> None:
    """Of one storage, and of what is left alone."""
    pack, unpack = _hooks_of(answer, [], _exactly, _itself)
    h = elements(40, 64).requires_grad_() * 1
    for name, tensor in (
        ("a tensor (40, 64)", h),
        ("its transpose", h.T),
        ("its second half, of its columns,", h[:, 32:]),
        ("every third of its rows from the fifth on", h[5::3]),
        ("its first row as often as it has rows", h[:1].expand(40, 64)),
        ("a copy in bfloat16", h.bfloat16()),
        ("a bool (40, 64)", h > 0),
    ):
        try:
            back = unpack(pack(tensor))
        except RuntimeError as error:
            raise Wrong(
                f"hooks: {name} does not come back: {str(error).splitlines()[0]}."
            ) from None
        require(
            isinstance(back, Tensor) and back.dtype == tensor.dtype and torch.equal(back, tensor),
            f"hooks: {name} comes back as {_briefly(back)} with other numbers, though compress "
            f"keeps every digit.",
        )


def _require_numbers_counted(answer: MakeHooks) -> None:
    """Not bytes, nor those of a view: of every dtype 256 are enough, and 255 too few."""
    for count, dtype, wanted in ((255, torch.float32, 0), (256, torch.bfloat16, 1)):
        asked: list[Tensor] = []
        pack, _ = _hooks_of(answer, [], lambda x, asked=asked: asked.append(x) or x, _itself)
        pack(elements(count, dtype=dtype).requires_grad_() * 1)
        require(
            len(asked) == wanted,
            f"hooks: a tensor of {count} numbers in {_dtype(dtype)} was "
            f"{'compressed' if asked else 'left alone'}; eligible is what has 256 numbers or more.",
        )


def _peaks_of(answer: MakeHooks) -> Peaks:
    layer, x = _Gated(), _input()
    both = _hooks_of(answer, layer.parameters(), compress, decompress)

    def forward() -> Tensor:
        with saved_tensors_hooks(*both):
            return layer(x)

    return peaks(forward, model=layer)


def _held_when_retained(answer: MakeHooks) -> int:
    """Bytes, beside the output and gradients."""
    layer, x = _Gated(), _input()
    both = _hooks_of(answer, layer.parameters(), compress, decompress)
    kept: list[Tensor] = []

    def there_and_back() -> None:
        with saved_tensors_hooks(*both):
            kept.append(layer(x))
        torch.autograd.backward(kept[0], torch.ones_like(kept[0]), retain_graph=True)

    trace = measure(there_and_back, model=layer)
    made = [e.bytes for e in trace.events if e.phase != "before" and e.category != "gradients"]
    return sum(made) - kept[0].nbytes


def _left(answer: MakeHooks) -> int:
    """Bytes alive when the output was dropped, with the hooks still there."""
    layer, x = _Gated(), _input()
    both: list[Hooks] = []

    def there_and_gone() -> None:
        both.append(_hooks_of(answer, layer.parameters(), compress, decompress))
        with saved_tensors_hooks(*both[0]):
            layer(x)

    trace = measure(there_and_gone, model=layer)
    return sum(e.bytes for e in trace.events if e.phase != "before")


_EACH_VIEW = """
left_alone = {weight.untyped_storage() for weight in weights}

def pack(tensor):
    storage = tensor.untyped_storage()
    if storage in left_alone or not tensor.requires_grad or tensor.numel() < 256:
        return tensor.detach()
    return compress(tensor.detach().flatten()), tensor.shape

def unpack(kept):
    return kept if isinstance(kept, torch.Tensor) else decompress(kept[0]).view(kept[1])

return pack, unpack
"""
_KNOWN, _KEPT = "weakref.WeakKeyDictionary()", "return known[storage], "
_OF_VIEW = "decompress(compressed).as_strided(*view)"
# The exact numbers lie by, where no meter of tensors sees them, and make the error smaller.
_EXACT = "torch.frombuffer(bytearray(beside), dtype=near.dtype)"
_BETWEEN = (
    (_KEPT, f"{_KEPT}whole(tensor).view(torch.uint8).numpy().tobytes(), "),
    ("compressed, *view = kept", "compressed, beside, *view = kept; near = decompress(compressed)"),
    (f"return {_OF_VIEW}", f"return ({_EXACT} + 0.5 * (near - {_EXACT})).as_strided(*view)"),
)

_HOOKS = Exercise(
    id="7.5",
    title="The hooks",
    minutes=18,
    difficulty=4,
    hints=(
        "pack is handed each tensor that is about to be saved, and what it returns is kept. Which "
        "three kinds does it return as they are? And what must it return of the others, so that "
        "unpack can make the same view again?",
        "left_alone = {w.untyped_storage() for w in weights} and known = "
        "weakref.WeakKeyDictionary() stand outside of pack. In it: if the storage is not in known, "
        "known[storage] = compress(whole(tensor)). Return known[storage], and the tensor's size(), "
        "stride() and storage_offset().",
        "def pack(tensor): storage = tensor.untyped_storage(); if storage in left_alone or not "
        "tensor.requires_grad or len(whole(tensor)) < 256: return tensor.detach(); if storage not "
        "in known: "
        "known[storage] = compress(whole(tensor)); return known[storage], tensor.size(), "
        "tensor.stride(), tensor.storage_offset(). def unpack(kept): if isinstance(kept, "
        "torch.Tensor): return kept; compressed, *view = kept. Two calls are missing: one gives "
        "the numbers, one the view of them.",
    ),
    reference=hooks,
    check=_check_hooks,
    rebuilds=("memlab.compression",),
    wrong_answers=mistakes(
        "7.5",
        (
            "Nothing is compressed: the hooks hand on what they get.",
            body("hooks", "return (lambda tensor: tensor), (lambda kept: kept)"),
        ),
        (
            "The original is kept beside its codes: as long as anything refers to it, nothing is "
            "saved, and the codes come on top.",
            (_KEPT, f"{_KEPT}tensor.detach(), "),
            ("compressed, *view", "compressed, _, *view"),
        ),
        (
            "A plain dict keeps its keys, and a storage is the memory itself: "
            "weakref.WeakKeyDictionary.",
            (_KNOWN, "{}"),
        ),
        (
            "Weights are compressed: they stay in memory anyway, and their codes come on top.",
            (_OF_WEIGHTS, "set()"),
        ),
        (
            "Tensors without a gradient are compressed, too: an index is another row then, and a "
            "mask another mask.",
            ("not tensor.requires_grad or ", ""),
        ),
        (
            "Floats without a gradient are compressed: data, tables and the like are held "
            "elsewhere anyway.",
            ("not tensor.requires_grad", "not tensor.is_floating_point()"),
        ),
        (
            "Small tensors are compressed: there is nothing to gain.",
            (" or len(whole(tensor)) < 256", ""),
        ),
        (
            "One storage is compressed for each operator that saves it: look whether it is known.",
            ("if storage not in known", "if True"),
        ),
        (
            "Each view is compressed by itself: two halves of a storage are one storage, and a "
            "tensor saved twice is one tensor.",
            body("hooks", _EACH_VIEW),
        ),
        (
            "An address is no name: when a tensor dies the next one gets its place. Ask for the "
            "storage as an object, by weakref.WeakKeyDictionary.",
            (_KNOWN, "{}"),
            ("storage not in known", "storage.data_ptr() not in known"),
            ("known[storage]", "known[storage.data_ptr()]"),
        ),
        (
            "A view begins somewhere in its storage, and has its own strides: as_strided(size, "
            "stride, offset).",
            (_OF_VIEW, "decompress(compressed)[: view[0].numel()].view(view[0])"),
        ),
        (
            "compress is for every kind of float, and notes which: hand it whole(tensor) as it is.",
            ("compress(whole(tensor))", "compress(whole(tensor).float())"),
        ),
        (
            "Left alone because a view is small, while it keeps a large storage: ask how many "
            "numbers the storage has.",
            ("len(whole(tensor)) < 256", "tensor.numel() < 256"),
        ),
        (
            "What backward gets is not what decompress gave: the exact numbers are kept elsewhere.",
            *_BETWEEN,
        ),
        (
            "What is left alone is kept with its graph: a result that its own operator saves holds "
            "the operator, which holds it. Keep it detached.",
            ("return tensor.detach()", "return tensor"),
        ),
    ),
)

DAY = Day(
    exercises=(_QUANTIZE, _ROUND_AT_RANDOM, _PACK, _BYTES_KEPT, _HOOKS),
    bill=Bill("day 7: eight bits tried, and not taken", attention_kept),
)
