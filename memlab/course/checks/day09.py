"""Day 9: eight-bit Adam."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import log10
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.checkpointing import ATTENTION
from memlab.course.bill import SETTING
from memlab.course.checks.day06 import keep_of_each_block
from memlab.course.exercises import Bill, Day, Exercise, Wrong, require
from memlab.course.solutions import body, mistakes
from memlab.metering import measure
from memlab.optim import Lion8bit
from memlab.reference.adam8bit import Adam8bit, dynamic_code, encode, encode_positive
from memlab.trace import Trace
from memlab.train import combined, dry_trace, of_all_weights

BLOCK = 256
SMALLEST = 4096  # numbers of a weight whose moments are encoded

Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ByNearest(Adam8bit):
    """9.3's: small second moments become 0. The rule against it comes in 9.4."""

    encode_v = staticmethod(encode)


# ------------------------------------------------------------------ one's own work

# Modules that do what is to be built.
_BUILT_ELSEWHERE = ("memlab.quantize", "memlab.optim", "bitsandbytes", "torchao")


@contextmanager
def _own_work(call: str) -> Iterator[None]:
    """Wrong if what runs inside uses a library that has the answer."""
    asked: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        home = frame.f_globals.get("__name__", "")
        if event == "call" and not asked and home.startswith(_BUILT_ELSEWHERE):
            asked.extend(filter(home.startswith, _BUILT_ELSEWHERE))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
    require(not asked, f"{call} uses {''.join(asked)}; wanted your own lines.")


def _require_tensor(what: str, got: Any, dtype: torch.dtype, count: int) -> None:
    kind = type(got).__name__
    require(
        isinstance(got, Tensor),
        f"{what} is {kind}; wanted a Tensor.{' Is there a return?' if got is None else ''}",
    )
    require(
        got.shape == (count,),
        f"{what} is of shape {tuple(got.shape)}; wanted {count:,} numbers, ({count},).",
    )
    require(got.dtype == dtype, f"{what} is of {got.dtype}; wanted {dtype}.")


# ------------------------------------------------------------------ 9.1: the dynamic code


def _check_code(answer: Callable[[bool], Tensor]) -> str:
    for signed in (True, False):
        call = f"dynamic_code(signed={signed})"
        with _own_work(call):
            got = answer(signed)
        _require_tensor(f"what {call} gave", got, torch.float32, 256)
        _require_rising(call, got)
        _require_numbers(call, got, dynamic_code(signed))
    return "2 × 256 numbers, equal to the bit · zero is number 127 with signs, number 0 without"


def _require_rising(call: str, got: Tensor) -> None:
    falls = (got.diff() <= 0).nonzero().flatten().tolist()
    if falls:
        k = falls[0]
        raise Wrong(
            f"{call} is not in rising order: number {k} is {got[k]:.6g}, number {k + 1} is "
            f"{got[k + 1]:.6g}."
        )


def _require_numbers(call: str, got: Tensor, wanted: Tensor) -> None:
    off = ((got - wanted).abs() > 1e-6 * wanted.abs()).nonzero().flatten().tolist()
    if off:
        k = off[0]
        raise Wrong(
            f"{call}: number {k} is {got[k]:.6g}, wanted {wanted[k]:.6g}; {len(off)} of 256 are "
            f"off."
        )
    count = (got != wanted).sum().item()
    require(
        not count,
        f"{call}: {count} of 256 numbers differ in their last bits from those that all files of "
        f"8-bit states were written with.",
    )


_MIDDLES = "(edges[:-1] + edges[1:]) / 2"
_PARTS = "2**i if signed else 2 ** (i + 1)"
_EVEN_STEPS = "return torch.arange(-127, 129) / 128 if signed else torch.arange(256) / 255"
_EVEN_EXPONENTS = """
positive, zero = torch.logspace(-7, 0, 128 if signed else 255), torch.zeros(1)
return torch.cat([-positive[:-1].flip(0), zero, positive] if signed else [zero, positive])
"""

_CODE = Exercise(
    id="9.1",
    title="256 numbers for seven decades",
    minutes=12,
    difficulty=2,
    hints=(
        "Collect the middles of one decade after another in a list; torch.cat and sort come last. "
        "How many are there in all? 1 + 2 + 4 + … + 64, with both signs.",
        "For one decade: edges = torch.linspace(0.1, 1, parts + 1); the middles are the means of "
        "neighbours, (edges[:-1] + edges[1:]) / 2.",
        "for i in range(7): parts = 2**i if signed else 2 ** (i + 1); middles = … * 10.0 ** "
        "(i - 6). If signed, put middles and -middles into the list. After the loop, add 0 and 1, "
        "concatenate, and sort.",
    ),
    reference=dynamic_code,
    check=_check_code,
    wrong_answers=mistakes(
        "9.1",
        (
            "These are even steps. The code's are fine near zero, and coarse near 1.",
            body("dynamic_code", _EVEN_STEPS),
        ),
        (
            "Here each decade has as many numbers; the top one is to have half of them.",
            body("dynamic_code", _EVEN_EXPONENTS),
        ),
        ("Without signs there is room for twice as many parts: 2 ** (i + 1).", (_PARTS, "2**i")),
        (
            "The decades are the wrong way round: the lowest, 10⁻⁷ … 10⁻⁶, has the fewest parts.",
            (_PARTS, "2 ** (6 - i) if signed else 2 ** (7 - i)"),
        ),
        ("These are the parts' lower edges; wanted their middles.", (_MIDDLES, "edges[:-1]")),
        (
            "These are the parts' upper edges, not their middles.",
            (_MIDDLES, "edges[1:]"),
            ("[0.0, 1.0]", "[0.0, 1e-7]"),
        ),
        ("Two numbers are missing: 0 and 1.", ("[torch.tensor([0.0, 1.0])]", "[]")),
        (
            "There is no room for −1: the lowest is −0.993, and one number more makes 257.",
            ("[0.0, 1.0]", "[-1.0, 0.0, 1.0]"),
        ),
        (
            "The top decade is 0.1 … 1, and its power of ten 0: i − 6.",
            ("(i - 6)", "(i - 7)"),
        ),
        (
            "They come decade by decade: sort them, so that the nearest can be searched for.",
            (".sort().values", ""),
        ),
        (
            "Computed in float64 and rounded once: every step has to be taken in float32.",
            ("parts + 1)", "parts + 1, dtype=torch.float64)"),
            (".sort().values", ".float().sort().values"),
        ),
        (
            "The power of ten came before the means; means of two first, then the power of ten.",
            ("parts + 1)", "parts + 1) * 10.0 ** (i - 6)"),
            ("/ 2 * 10.0 ** (i - 6)", "/ 2"),
        ),
    ),
)

# ------------------------------------------------------------------ 9.2: a block quantizer

MOST_BYTES = 64  # that encode may take on its way, for each number


def _cases() -> dict[str, tuple[Tensor, Tensor]]:
    """Numbers and codes, the small ones first."""
    signed, unsigned = dynamic_code(True), dynamic_code(False)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    uneven = normal(3, BLOCK) * torch.tensor([[1.0], [1e-4], [300.0]])
    return {
        "[0.5, −2.0, 0.01, 0.0]": (torch.tensor([0.5, -2.0, 0.01, 0.0]), signed),
        "256 numbers": (normal(BLOCK), signed),
        "3 blocks of different size, (3, 256)": (uneven, signed),
        "a block of numbers and one of zeros": (torch.cat([normal(256), torch.zeros(256)]), signed),
        "256 squares, without signs": (normal(BLOCK) ** 2, unsigned),
        "256 squares, all below 10⁻¹⁹": (1e-20 * normal(BLOCK) ** 2, unsigned),
        "256 numbers below 10⁻³³, without signs": (
            1e-34 * torch.rand(BLOCK, generator=random).add(0.1),
            unsigned,
        ),
        "a block of squares and one of zeros, without signs": (
            torch.cat([normal(256) ** 2, torch.zeros(256)]),
            unsigned,
        ),
        "300 numbers": (normal(300), signed),
        "a matrix that is not contiguous, (5, 64)": (normal(64, 5).mT, signed),
        "3 ⋅ 700 numbers over many decades": ((3 * normal(3, 700)).exp(), unsigned),
    }


def _check_encode(answer: Encode) -> str:
    for name, (x, code) in _cases().items():
        codes, scales = _encoded("encode", answer, name, x, code)
        _require_scales(f"encode of {name}", x, scales)
        _require_nearest(f"encode of {name}", x, codes, scales, code)
        _require_zeros(f"encode of {name}", x, codes, code)
    on_the_way = _bytes_on_the_way(answer)
    require(
        on_the_way <= MOST_BYTES,
        f"encode takes {on_the_way:,.0f} bytes on its way for each number; wanted at most "
        f"{MOST_BYTES}.",
    )
    return (
        f"each number by the nearest of its code · 300 numbers in 308 bytes · zeros get its zero · "
        f"at most {MOST_BYTES} bytes a number on the way"
    )


def _encoded(
    name: str, answer: Encode, what: str, x: Tensor, code: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes and scales, of the right types and shapes; x is what it was."""
    call = f"{name} of {what}"
    mine, mine_code = x.clone(), code.clone()
    with _own_work(call):
        got = _called(call, answer, mine, mine_code)
    require(
        isinstance(got, tuple) and len(got) == 2,
        f"{call} gave {type(got).__name__}; wanted a tuple of codes and scales."
        f"{' Is there a return?' if got is None else ''}",
    )
    count = x.numel()
    _require_tensor(f"{call}: the first, the codes,", got[0], torch.uint8, count)
    _require_tensor(f"{call}: the second, the scales,", got[1], torch.float32, -(-count // BLOCK))
    require(
        torch.equal(mine, x) and torch.equal(mine_code, code),
        f"{call} changed the numbers that it was given.",
    )
    kept, wanted = _storage_bytes(got), count + 4 * len(got[1])
    require(
        kept <= wanted,
        f"{call} gave tensors that hold on to {kept:,} bytes; wanted {wanted:,}. A slice keeps all "
        f"that it was cut from; .clone() does not.",
    )
    return got


def _called(call: str, answer: Encode, x: Tensor, code: Tensor) -> Any:
    """Blocks that do not come out even are a case, not an accident."""
    if x.numel() % BLOCK == 0:
        return answer(x, code)
    try:
        return answer(x, code)
    except NotImplementedError:
        raise
    except (RuntimeError, ValueError) as error:
        first_line = str(error).splitlines()[0].rstrip(".")
        raise Wrong(f"{call} raised {type(error).__name__}: {first_line}.") from None


def _storage_bytes(tensors: tuple[Tensor, ...]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _require_scales(call: str, x: Tensor, scales: Tensor) -> None:
    for n, block in enumerate(x.flatten().split(BLOCK)):
        wanted, got = block.abs().max().item(), scales[n].item()
        if got != wanted:
            raise Wrong(f"{call}: the scale of block {n} is {got:.4g}, wanted {wanted:.4g}.")


def _require_nearest(call: str, x: Tensor, codes: Tensor, scales: Tensor, code: Tensor) -> None:
    """By distance, in float64: at a tie either neighbour is right."""
    flat, exact = x.flatten().double(), code.double()
    each = scales.double().repeat_interleave(BLOCK)[: len(flat)]
    got = exact[codes.long()] * each
    nan = (~got.isfinite()).sum().item()
    require(not nan, f"{call} comes back with {nan} numbers that are NaN or infinite.")
    nearest = exact[(flat.view(-1, 1) - exact * each.view(-1, 1)).abs().argmin(1)] * each
    further = (got - flat).abs() - (nearest - flat).abs()
    off = (further > 1e-5 * flat.abs()).nonzero().flatten().tolist()
    if off:
        k = off[0]
        raise Wrong(
            f"{call}: {flat[k]:.4g} comes back as {got[k]:.4g}, wanted {nearest[k]:.4g}; "
            f"{len(off)} of {len(flat)} numbers are off."
        )


def _require_zeros(call: str, x: Tensor, codes: Tensor, code: Tensor) -> None:
    """Where the scale is 0 any code comes back as 0, but not by who changes codes."""
    wanted = code.abs().argmin().item()
    off = codes[(x.flatten() == 0) & (codes != wanted)]
    require(
        not len(off),
        f"{call}: {len(off)} zeros get another code than {wanted}, that of zero, the first of them "
        f"{off[:1].sum()}.",
    )


def _bytes_on_the_way(answer: Encode) -> float:
    x, code = torch.linspace(-1, 1, 2**14), dynamic_code(True)
    trace = measure(lambda: answer(x, code))
    return trace.peak_bytes / x.numel()


_LARGEST = "blocks.abs().amax(1)"
_NEAREST = "torch.bucketize(fractions, thresholds, out_int32=True)"
_EVENLY = "((fractions * 127).round() + 127 if code[0] < 0 else (fractions * 255).round())"

_ENCODE = Exercise(
    id="9.2",
    title="The nearest number, block by block",
    minutes=15,
    difficulty=3,
    hints=(
        "F.pad(x, (0, missing)) appends zeros, so that .view(-1, 256) works whatever n is; "
        "-n % 256 is how many are missing. Zeros stretch no scale.",
        "What is nearest changes in the middle between two numbers of the code. "
        "torch.bucketize(fractions, middles) counts the middles below each fraction: that is the "
        "code's number. And what is 0 / 0?",
        "scales = blocks.abs().amax(1); fractions = blocks / scales.where(scales > 0, "
        "1).view(-1, 1); codes = torch.bucketize(fractions, (code[:-1] + code[1:]) / 2). What is "
        "left to do: the dtype, the padding (a slice alone keeps it in memory), and both results.",
    ),
    reference=encode,
    check=_check_encode,
    wrong_answers=mistakes(
        "9.2",
        (
            "One scale for the whole tensor: each block of 256 has its own.",
            (_LARGEST, "blocks.abs().amax().expand(len(blocks)).clone()"),
        ),
        (
            "The largest x is not the largest |x|: a scale is never negative.",
            (_LARGEST, "blocks.amax(1)"),
        ),
        (
            "The last block may be short: pad it, and drop what was padded.",
            ("F.pad(x.flatten(), (0, -n % 256))", "x.flatten()"),
        ),
        (
            "Where nothing is missing, BLOCK − n % BLOCK pads a whole block: −n % BLOCK pads none.",
            ("-n % 256", "256 - n % 256"),
        ),
        ("The padding is still there: as many codes as numbers, [:n].", ("[:n].clone()", "")),
        ("The padding is out of sight, and still in memory.", (".clone()", "")),
        (
            "A block of zeros is divided by its largest, and 0 / 0 is NaN: divide by 1 there.",
            (_LARGEST, f"{_LARGEST}; scales = scales * (scales / scales)"),
        ),
        (
            "In a block of zeros x / scale is 0 / 0, which is no number, and gets code 255.",
            ("scales.where(scales > 0, 1)", "scales"),
        ),
        (
            "Second moments are squares, and 10⁻¹² is not small for them: scales may be tiny.",
            (_LARGEST, f"{_LARGEST}.clamp(min=1e-12)"),
        ),
        (
            "Code 0 is zero only without signs; in the signed code zero is number 127.",
            ("return", "codes[blocks == 0] = 0\n    return"),
        ),
        (
            "These are even steps, not the nearest number of the code that was given.",
            (_NEAREST, _EVENLY),
        ),
        (
            "The number below is not the nearest: compare with the middles.",
            (_NEAREST, "(torch.bucketize(fractions, code, right=True) - 1)"),
        ),
        (
            "The number above is not the nearest: compare with the middles of neighbours.",
            (_NEAREST, "torch.bucketize(fractions, code).clamp(max=255)"),
        ),
        (
            "The code ends at 1: divide by the block's scale before you look for the nearest.",
            ("blocks / scales.where(scales > 0, 1).view(-1, 1)", "blocks"),
        ),
        (
            "Codes of int64 take 8 bytes each; eight bits are torch.uint8.",
            ("torch.uint8", "torch.int64"),
        ),
        (
            "All distances at once are a kilobyte for each number: more than is ever saved.",
            (_NEAREST, "(fractions.unsqueeze(-1) - code).abs().argmin(-1)"),
        ),
        (
            "The signs are lost: only the scale is made of |x|.",
            ("blocks / scales", "blocks.abs() / scales"),
        ),
    ),
)

# ------------------------------------------------------------------ 9.3: Adam

LR, STEPS = 0.01, 6
MOST_NUMBERS = 32  # in a state beside its tensors, names included
SETTINGS = {"lr": LR, "betas": (0.8, 0.9), "eps": 1e-3}
SHAPES = {"(64, 80)": (64, 80), "(37, 139)": (37, 139), "(4095,)": (4095,), "(4096,)": (4096,)}


def _check_adam(answer: type[torch.optim.Optimizer]) -> str:
    for name, shape in SHAPES.items():
        got, held, marks = _stepped(answer, name, shape)
        _require_first_step(name, got[0], _reference_steps(shape)[0])
        _require_state(name, shape, held)
        _require_steps(name, got, _reference_steps(shape))
        wanted_marks = STEPS if torch.Size(shape).numel() >= SMALLEST else 0
        require(
            marks == wanted_marks,
            f"Adam8bit on a weight {name}: in {STEPS} steps self.encode_v was called {marks} "
            f"times; wanted {wanted_marks}.",
        )
    _check_groups(answer)
    return (
        f"{STEPS} steps of {len(SHAPES)} weights as they should be, and of three in two groups · "
        f"state 2n + 8⌈n/256⌉ bytes from n = {SMALLEST:,}, 8n below · ragged ends, too"
    )


def _check_groups(answer: type[torch.optim.Optimizer]) -> None:
    """Several weights in one optimizer, one of them not contiguous; a group's settings are its own,
    and differ from the defaults."""
    got, wanted = _stepped_in_groups(answer), _stepped_in_groups(ByNearest)
    for (name, weight), right in zip(got.items(), wanted.values(), strict=True):
        share = ((weight - right).abs() / LR > 1e-3).float().mean().item()
        require(
            share < 0.01,
            f"Adam8bit of three weights in two groups: after {STEPS} steps {share:.0%} of the "
            f"numbers of {name} are off.",
        )


def _stepped_in_groups(answer: Any) -> dict[str, Tensor]:
    weights = {
        "weight 0, (40,) in group 0": torch.zeros(40),
        "weight 1, (80, 64) and not contiguous, in group 0": torch.zeros(64, 80).mT,
        "weight 2, (50,) in group 1, with an lr, betas and an eps of its own": torch.zeros(50),
    }
    a, b, c = (weight.requires_grad_() for weight in weights.values())
    own = {"params": [c], "lr": 3 * LR, "betas": (0.5, 0.7), "eps": 1e-2}
    optimizer = answer([{"params": [a, b], **SETTINGS}, own])  # the defaults are nobody's
    gradients = {weight: _gradients(tuple(weight.shape)) for weight in (a, b, c)}
    for n in range(STEPS):
        for weight, of_weight in gradients.items():
            weight.grad = of_weight[n]
        with _own_work("Adam8bit.step"):
            optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def _gradients(shape: tuple[int, ...]) -> list[Tensor]:
    """Of many sizes, eps among them, some of them always zero."""
    random = torch.Generator().manual_seed(0)
    size = torch.randn(shape, generator=random).exp() * 3e-3
    size.view(-1)[:8] = 0
    return [torch.randn(shape, generator=random) * size for _ in range(STEPS)]


def _stepped(answer: Any, name: str, shape: tuple[int, ...]) -> tuple[list[Tensor], int, int]:
    """The weight after each step; bytes of state that are left; how often encode_v was called."""
    weight, gradients = nn.Parameter(torch.zeros(shape)), _gradients(shape)
    place = weight.detach()  # while it is held, no other storage can begin where this one does
    optimizer = answer([weight], **SETTINGS)
    marks = _marked(optimizer)
    after: list[Tensor] = []

    def run() -> None:
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
            after.append(weight.detach().clone())

    with _own_work("Adam8bit.step"):
        trace = measure(run)
    require(
        all(map(torch.equal, gradients, _gradients(shape))),
        f"Adam8bit on a weight {name}: step changed the gradient.",
    )
    require(
        any(copy.any() for copy in after) and weight.data_ptr() == place.data_ptr(),
        f"Adam8bit on a weight {name}: the weight has not moved where it lies; step it in place, "
        f"weight -= ….",
    )
    in_state = _bytes_in_state(name, optimizer.state[weight])
    return after, max(_born(trace) - sum(copy.nbytes for copy in after), in_state), len(marks)


def _marked(optimizer: Any) -> list[int]:
    """A list that grows by one with each call of the optimizer's encode_v."""
    require(
        isinstance(optimizer, torch.optim.Optimizer),
        f"Adam8bit([weight], …) gave {type(optimizer).__name__}; wanted an optimizer.",
    )
    encode_v, marks = getattr(optimizer, "encode_v", None), []
    require(callable(encode_v), "Adam8bit has lost its encode_v; leave the lines around as given.")

    def marked(x: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        marks.append(1)
        return encode_v(x, code)

    optimizer.encode_v = marked
    return marks


def _bytes_in_state(name: str, state: Any) -> int:
    """Of the tensors; beside them there may be a few plain numbers, and nothing else."""
    leaves = list(_leaves(state))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    strange = [leaf for leaf in others if not _is_plain(leaf)]
    if strange:
        raise Wrong(
            f"Adam8bit on a weight {name} has a {type(strange[0]).__name__} in its state; wanted "
            f"tensors, and plain numbers such as the count of steps."
        )
    require(
        len(others) <= MOST_NUMBERS,
        f"Adam8bit on a weight {name} has {len(others):,} numbers in its state that are in no "
        f"tensor; wanted at most {MOST_NUMBERS}, such as the count of steps.",
    )
    return _storage_bytes(tensors)


def _leaves(held: Any) -> Iterator[Any]:
    """What is in dicts, lists, tuples and objects with attributes, and in those in them."""
    match held:
        case dict():
            parts = [*held, *held.values()]
        case list() | tuple() | set() | frozenset():
            parts = [*held]
        case _:
            parts = [] if callable(held) else [*getattr(held, "__dict__", {}).values()]
            if isinstance(held, Tensor) or not parts:
                yield held
    for part in parts:
        yield from _leaves(part)


def _is_plain(leaf: Any) -> bool:
    """A number of a machine word, or a short name; of bytes and long integers one holds much."""
    match leaf:
        case int():
            return leaf.bit_length() <= 64
        case str():
            return len(leaf) <= 64
    return leaf is None or isinstance(leaf, float)


def _born(trace: Trace) -> int:
    """Bytes alive at the end that were not there before."""
    return sum(event.bytes for event in trace.alive() if event.phase != "before")


@cache
def _reference_steps(shape: tuple[int, ...]) -> list[Tensor]:
    weight = nn.Parameter(torch.zeros(shape))
    optimizer, after = ByNearest([weight], **SETTINGS), []
    for gradient in _gradients(shape):
        weight.grad = gradient
        optimizer.step()
        after.append(weight.detach().clone())
    return after


def _require_first_step(name: str, got: Tensor, wanted: Tensor) -> None:
    nans = got.isnan().sum().item()
    require(
        not nans, f"Adam8bit on a weight {name}: {nans:,} numbers are NaN after the first step."
    )
    off = (got - wanted).abs().max().item() / LR
    require(
        off < 1e-3,
        f"Adam8bit on a weight {name}: the first step is up to {off:.3g} ⋅ lr off; from moments of "
        f"zero it is that of Adam in 32 bits.",
    )


def _require_state(name: str, shape: tuple[int, ...], held: int) -> None:
    n = torch.Size(shape).numel()
    wanted = 2 * n + 8 * -(-n // BLOCK) if n >= SMALLEST else 8 * n
    how = "2n + 8⌈n/256⌉" if n >= SMALLEST else "8n"
    slack = 64  # a count of steps that is a tensor
    require(
        wanted <= held <= wanted + slack,
        f"Adam8bit on a weight {name} of {n:,} numbers: {held:,} bytes are left behind {STEPS} "
        f"steps; wanted {wanted:,}, {how}.",
    )


def _require_steps(name: str, got: list[Tensor], wanted: list[Tensor]) -> None:
    """Of neighbours in the code either may be right, by the last bit: 1 of 100 may be off."""
    for n, (a, b) in enumerate(zip(got, wanted, strict=True), start=1):
        off = (a - b).abs() / LR
        share = (off > 1e-3).float().mean().item()
        require(
            share < 0.01,
            f"Adam8bit on a weight {name}: after step {n}, {share:.0%} of the numbers are more "
            f"than lr / 1000 off, the furthest by {off.max():.1g} ⋅ lr.",
        )


_IS_LARGE, _IS_SMALL = "len(gradient) >= 4096", "len(gradient) < 4096"
_ENCODING = f"        if {_IS_LARGE}:\n"  # what comes before it sees moments in float32
_IN_32_BITS = ((">= 4096", ">= 10**9"), ("< 4096", "< 10**9"))
_DECODED_FIRST = """if len(gradient) >= 4096:
            m, v = decode(*encode(m, signed), signed), decode(*encode(v, unsigned), unsigned)
        root ="""
_CORRECTED = "m, v = m / (1 - beta1**t), v / (1 - beta2**t)\n        root = v.sqrt()"
_CODES_OF_ZERO = """if not state and len(gradient) >= 4096:
            zeros = gradient.new_zeros(len(gradient)).byte(), torch.ones(-(-len(gradient) // 256))
            m, v = decode(*zeros, signed), decode(*zeros, unsigned)
        state["step"] ="""

_ADAM = Exercise(
    id="9.3",
    title="Adam on two bytes",
    minutes=20,
    difficulty=4,
    hints=(
        "Three parts. Get m and v as float32: zeros at the first step, then from the state. Adam's "
        "step, as ever. Put m and v back. Only the first and the last part know of codes.",
        "The weight is stepped by the m and v of float32 that you have just computed; encode comes "
        "last. What is kept are m and v without bias correction. len(gradient) >= 4096 decides.",
        "m = beta1 * m + (1 - beta1) * gradient; v = beta2 * v + (1 - beta2) * gradient**2; root = "
        "(v / (1 - beta2**t)).sqrt() + eps; weight -= lr * (m / (1 - beta1**t) / "
        'root).view_as(weight). A later step begins with decode(*state["m"], signed). Large '
        "moments go back into the state by encode and self.encode_v, small ones as they are.",
    ),
    reference=ByNearest,
    check=_check_adam,
    wrong_answers=mistakes(
        "9.3",
        (
            "The codes are there, and the float32 moments still are as well: nothing is saved.",
            (_ENCODING, f'        state["exact"] = m, v\n{_ENCODING}'),
            ('decode(*state["m"], signed), decode(*state["v"], unsigned)', 'state["exact"]'),
        ),
        ("Both moments are kept in float32: this is Adam, of 8 bytes.", *_IN_32_BITS),
        (
            "Moments of two bytes each (bfloat16, float16): wanted one byte, and a scale a block.",
            *_IN_32_BITS,
            ('["v"] = m, v', '["v"] = m.bfloat16(), v.bfloat16()'),
        ),
        (
            "Small weights are encoded, too; below 4,096 numbers moments stay in float32.",
            (">= 4096", ">= 0"),
            ("< 4096", "< 0"),
        ),
        (
            "A weight whose blocks do not come out even is left in 32 bits; encode can do it.",
            (_IS_LARGE, f"{_IS_LARGE} and len(gradient) % 256 == 0"),
            (_IS_SMALL, f"{_IS_SMALL} or len(gradient) % 256"),
        ),
        ("From 4,096 numbers on: >=, not >.", (">= 4096", "> 4096"), ("< 4096", "<= 4096")),
        (
            "The weight is stepped by moments that were rounded first: step, then encode.",
            ("root =", _DECODED_FIRST),
        ),
        (
            "The bias correction has got into the state: next time it is corrected once more.",
            ("root = (v / (1 - beta2**t)).sqrt()", _CORRECTED),
            ("(m / (1 - beta1**t) / root)", "(m / root)"),
        ),
        (
            "There is no bias correction: the first step is not lr long.",
            ("v / (1 - beta2**t)", "v"),
            ("m / (1 - beta1**t)", "m"),
        ),
        (
            "t has to count: it is 1 at the first step, 2 at the second.",
            ("beta2**t", "beta2"),
            ("beta1**t", "beta1"),
        ),
        (
            "weight = weight - … gives the name a new tensor, and leaves the model's as it was.",
            ("weight -= ", "weight = weight - "),
        ),
        (
            "An array of numpy takes the bytes that a tensor would.",
            (
                _ENCODING,
                f'        state["exact"] = m.numpy().copy(), v.numpy().copy()\n{_ENCODING}',
            ),
        ),
        ("eps is added to the root, not under it.", (").sqrt() + eps", " + eps).sqrt()")),
        (
            "Zeros as codes are no zero moment: code 0 of the signed code is −0.993, zero is 127.",
            ('state["step"] =', _CODES_OF_ZERO),
        ),
        (
            "v has no sign: by the signed code half of the 256 numbers are never used.",
            ('decode(*state["v"], unsigned)', 'decode(*state["v"], signed)'),
            ("self.encode_v(v, unsigned)", "(self.encode_v(v, unsigned), encode(v, signed))[1]"),
        ),
        (
            "v goes through self.encode_v: the rule that comes next is put there.",
            ("self.encode_v(v", "encode(v"),
        ),
    ),
)

# ------------------------------------------------------------------ 9.4: the rule

BOUND = 3.5  # the longest step that is right, over lr, within 100 steps


def _check_rule(answer: Encode) -> str:
    unsigned = dynamic_code(False)
    random = torch.Generator().manual_seed(0)
    many = (4 * torch.randn(3 * BLOCK, generator=random)).exp()
    for name, x in {
        "[10⁻²⁰, 10⁻³⁰, 0.0]": torch.tensor([1e-20, 1e-30, 0.0]),
        "[1.0, 10⁻⁹, 0.0]": torch.tensor([1.0, 1e-9, 0.0]),
        "[10¹⁵, 10⁻³⁵, 0.0]": torch.tensor([1e15, 1e-35, 0.0]),  # their quotient is no float32
        "256 zeros": torch.zeros(BLOCK),
        "3 ⋅ 256 numbers over many decades": many,
        "700 numbers, some of them 0": F.relu(many[:700] - 0.5),
        "10 ⋅ 70 numbers, some of them 0": F.relu(many[:700] - 0.5).view(10, 70),
    }.items():
        codes, scales = _encoded("encode_positive", answer, name, x, unsigned)
        _require_scales(f"encode_positive of {name}", x, scales)
        _require_rule(f"encode_positive of {name}", x, codes, unsigned)
    longest, without = longest_step(answer), longest_step(encode)
    require(
        longest <= BOUND,
        f"with encode_positive the longest of 60 steps is {longest:.3g} ⋅ lr; wanted at most "
        f"{BOUND} ⋅ lr.",
    )
    return (
        f"no positive number comes back as 0, no zero as more · the longest of 60 steps is below "
        f"{BOUND} ⋅ lr, without the rule beyond {10 ** int(log10(without)):,} ⋅ lr"
    )


def _require_rule(call: str, x: Tensor, codes: Tensor, code: Tensor) -> None:
    """Of neighbours in the code either may be right, by the last bit: 1 of 100 may be off."""
    flat = x.flatten()
    lost = ((flat > 0) & (codes == 0)).sum().item()
    require(
        not lost, f"{call}: {lost} of {len(flat)} numbers are positive and get code 0; wanted none."
    )
    lifted = ((flat == 0) & (codes != 0)).sum().item()
    require(
        not lifted,
        f"{call}: {lifted} of {len(flat)} numbers are zero and get another code than 0.",
    )
    off = (codes.int() - encode_positive(x, code)[0].int()).abs()
    count = off.count_nonzero().item()
    require(
        off.max().item() <= 1 and count < 0.01 * len(flat),
        f"{call}: {count} of {len(flat)} numbers have another code than the nearest, where the "
        f"nearest is not 0.",
    )


def longest_step(encode_v: Encode, n: int = 2 * SMALLEST, steps: int = 60) -> float:
    """Over lr: gradients whose sizes differ by decades from weight to weight, always the same."""
    random = torch.Generator().manual_seed(0)
    size = (2 * torch.randn(n, generator=random)).exp()
    weight, lr, longest = nn.Parameter(torch.zeros(n)), 1e-3, 0.0
    optimizer = Adam8bit([weight], lr=lr)
    optimizer.encode_v = encode_v
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = size * torch.randn(n, generator=random)
        optimizer.step()
        longest = max(longest, (weight.detach() - before).abs().max().item() / lr)
    return longest


_RULE_LINE = "codes[(x.flatten() > 0) & (codes == 0)] = 1"
_ONE_UP = "codes = (codes.int() + (x.flatten() > 0).int()).clamp(max=255).to(torch.uint8)"

_RULE = Exercise(
    id="9.4",
    title="The rule that stops it",
    minutes=6,
    difficulty=1,
    hints=(
        "encode does all but one thing. Which codes are to be changed, and to what?",
        "Where x is above zero and its code is 0, the code becomes 1. A zero keeps its 0.",
        "codes, scales = encode(x, code), and a mask of what was lost: (x.flatten() > 0) & "
        "(codes == 0). One assignment is missing.",
    ),
    reference=encode_positive,
    check=_check_rule,
    wrong_answers=mistakes(
        "9.4",
        (
            "The nearest number alone: small second moments become 0, and explode.",
            (_RULE_LINE, ""),
        ),
        (
            "Zeros are lifted, too: a weight that never had a gradient now has a second moment.",
            ("(x.flatten() > 0) & (codes == 0)", "codes == 0"),
        ),
        (
            "x has any shape, the codes are flat: compare x.flatten().",
            ("x.flatten() > 0", "x > 0"),
        ),
        (
            "Every code is one up: only those are to change that would be 0.",
            (_RULE_LINE, _ONE_UP),
        ),
        (
            "10⁻¹² is small beside one block and huge beside another: ask for the code, not for x.",
            ("encode(x,", "encode(x.where(x == 0, x.clamp(min=1e-12)),"),
            (_RULE_LINE, ""),
        ),
        (
            "The code's smallest number is a fraction of a scale; x is none, and zeros rise, too.",
            ("encode(x,", "encode(x.clamp(min=code[1].item()),"),
            (_RULE_LINE, ""),
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def momentum_in_8_bits() -> Trace:
    """Day 6's step, and Lion with a momentum of 8 bits on bfloat16 weights rounded at random."""
    technique = combined("accumulation+bfloat16")

    def change(model: nn.Module) -> None:
        technique.change_model(model)
        keep_of_each_block(model, ATTENTION)

    lion = of_all_weights(Lion8bit, rounding="stochastic")
    return dry_trace(SETTING, replace(technique, change_model=change, optimizer=lion))


DAY = Day(
    exercises=(_CODE, _ENCODE, _ADAM, _RULE),
    bill=Bill("day 9: and its momentum in 8 bits", momentum_in_8_bits),
)
