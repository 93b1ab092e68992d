"""Day 7: activation compression."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memlab.course.bill_steps import attention_kept
from memlab.course.exercises import Bill, Day, Wrong, distinct, equal, first_line, require
from memlab.course.properties import (
    Peaks,
    elements,
    furthest,
    is_tensor,
    limited,
    limited_outside_of_tensors,
    peaks,
    rough,
    survives_a_reused_address,
    unchanged,
)
from memlab.course.solutions import checked, given, solution
from memlab.metering import measure
from memlab.reference.activation_compression import as_bfloat16, hooks, quantize

dequantize, unpack, compress, decompress = given(
    7, "dequantize", "unpack", "compress", "decompress"
)

GROUP = 256
Round = Callable[[Tensor], Tensor]
_LIBRARY = ("memlab.quantize", "memlab.compression")  # the modules that this day rebuilds

# ------------------------------------------------------------------ 7.1: quantize

Kept = tuple[Tensor, Tensor, Tensor]  # codes, smallest, step
Quantize = Callable[..., Kept]  # (groups, levels, round)


def _groups(*ranges: tuple[float, float], size: int = GROUP) -> Tensor:
    """Random groups, one per range, (len(ranges), size). Each contains both ends of its range, and
    0 if the range does."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for low, high in ranges:
        row = low + (high - low) * torch.rand(size, generator=generator)
        row[53 % size] = min(max(low, 0.0), high)
        row[17 % size], row[101 % size] = low, high
        rows.append(row)
    return torch.stack(rows)


def _with_outlier() -> Tensor:
    groups = _groups(*[(-1.0, 1.0)] * 4)
    groups[2, 40] = 50.0
    return groups


_QUANTIZED: dict[str, tuple[Tensor, int]] = {  # groups and levels
    "2 groups, one of 0, 1, … 255 and one of 0, 0.1, … 25.5": (
        torch.stack([torch.arange(256.0), torch.arange(256.0) / 10]),
        255,
    ),
    "a group from 100.3 to 100.4": (_groups((100.3, 100.4)), 255),
    "a group from -1.3 to 2.9": (_groups((-1.3, 2.9)), 255),
    "a group from -0.1 to 2.9": (_groups((-0.1, 2.9)), 255),
    "a group from -2.9 to 0": (_groups((-2.9, 0)), 255),
    "a group from -70,000 to 80,000": (_groups((-7e4, 8e4)), 255),
    "a group of zeros": (torch.zeros(1, GROUP), 255),
    "a group of 256 ones": (torch.ones(1, GROUP), 255),
    "a group of 256 elements of 0.1": (torch.full((1, GROUP), 0.1), 255),
    "3 groups, from -5.3 to -2.9, all 0, and all 0.1": (
        _groups((-5.3, -2.9), (0, 0), (0.1, 0.1)),
        3,
    ),
    "4 groups from -1 to 1, one with an outlier of 50": (_with_outlier(), 255),
    "2 groups, from -1 to 1 and from 0 to 0.001": (_groups((-1, 1), (0, 1e-3)), 255),
    "a group from 0 to 1e-7": (_groups((0, 1e-7)), 255),
    "a group from -1.3 to 2.9, at 15 levels": (_groups((-1.3, 2.9)), 15),
    "32 groups of 16": (_groups(*[(-1.0, 1.0 + n) for n in range(32)], size=16), 255),
}


def _check_quantize(answer: Quantize) -> str:
    for name, (groups, levels) in _QUANTIZED.items():
        _require_quantized(f"quantize of {name}", answer, groups.clone(), levels)
    _require_round_is_called(answer)
    _require_codes_within_levels(answer)
    held = _require_bytes_of_kept(answer)
    return (
        f"{len(_QUANTIZED)} tensors: no element more than half a step off, an outlier affects "
        f"only its own group · {held:,} bytes for 4 × 256 elements"
    )


def _require_quantized(case: str, answer: Quantize, groups: Tensor, levels: int) -> None:
    rounded: list[Tensor] = []

    def round(steps: Tensor) -> Tensor:
        rounded.append(steps.clone())
        return torch.round(steps)

    with unchanged(case, groups=groups):
        kept = _as_kept(case, answer(groups, levels, round), groups)
    require(
        all(bool(steps.isfinite().all()) for steps in rounded),
        f"{case} passes infinite values or NaN to round.",
    )
    _require_range(case, kept, groups, levels)
    _require_half_a_step(case, kept, groups, levels)
    largest = int(kept[0].max())
    require(largest <= levels, f"{case} gave codes up to {largest}; wanted at most {levels}.")


def _as_kept(case: str, kept: Any, groups: Tensor) -> Kept:
    require(
        isinstance(kept, (tuple, list)) and len(kept) == 3,
        f"{case} gave {_briefly(kept)}; wanted three tensors: codes, smallest, step."
        f"{' Is there a return?' if kept is None else ''}",
    )
    codes, smallest, step = kept
    is_tensor(f"{case}: codes", codes, dtype=torch.uint8, shape=tuple(groups.shape))
    for name, part in (("smallest", smallest), ("step", step)):
        is_tensor(f"{case}: {name}", part, dtype=torch.bfloat16, shape=(len(groups), 1))
    return codes, smallest, step


def _briefly(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {_kind(value)}"
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else repr(value)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _require_range(case: str, kept: Kept, groups: Tensor, levels: int) -> None:
    """In each group, `smallest` is at most the minimum, and `levels` steps reach the maximum."""
    smallest, step = kept[1].float(), kept[2].float()
    columns = torch.cat([*groups.aminmax(dim=1, keepdim=True), smallest, step], 1).tolist()
    for low, high, start, width in columns:
        end = start + levels * width
        mine, right = distinct(start, low, 6)
        require(
            start <= low,
            f"{case}: smallest is {mine}, above the minimum of the group, {right}.",
        )
        mine, right = distinct(end, high, 6)
        require(
            end >= high - 1e-6 * abs(high),
            f"{case}: {levels} steps of {width:.4g} from smallest, {start:.6g}, reach {mine}; "
            f"wanted at least the maximum of the group, {right}.",
        )


def _require_half_a_step(case: str, kept: Kept, groups: Tensor, levels: int) -> None:
    low, high = groups.aminmax(dim=1, keepdim=True)
    step = as_bfloat16((high - as_bfloat16(low, -math.inf).float()) / levels, math.inf).float()
    back = dequantize(*kept)
    error = (back - groups).abs()  # (groups, 256)
    bad = ~(error <= step / 2 * (1 + 1e-5) + 1e-6 * groups.abs())  # NaN is bad, too
    if bad.any():
        group, place = (int(n) for n in bad.nonzero()[0])
        was, came = distinct(groups[group, place].item(), back[group, place].item(), 6)
        require(
            False,
            f"{case}: {int(bad.sum())} of {groups.numel()} elements come back more than half a "
            f"step off, the first {was} as {came}; a step of its group is "
            f"{step[group].item():.2g}.{_pattern((back - groups)[group], step[group].item())}",
        )


def _pattern(error: Tensor, step: float) -> str:
    """What the errors of a group have in common: a shift, or a sign."""
    error = error.double()
    low, high = error.aminmax()
    if high - low <= 1.01 * step and error.abs().min() > step / 2:
        side = "above" if low > 0 else "below"
        return f" The whole group comes back about {error.mean().abs():.1g} {side} its values."
    if high <= 0.01 * step and low >= -1.01 * step and (error < -step / 2).sum() > 2:
        return " No element comes back too large: fractions are cut off, not rounded."
    return ""


def _require_round_is_called(answer: Quantize) -> None:
    groups = _groups((-1.3, 2.9))
    down, nearest = (answer(groups, 255, round)[0] for round in (torch.floor, torch.round))
    require(
        not torch.equal(down, nearest),
        "quantize with round=torch.floor gives the same codes as with torch.round: call the "
        "function `round` that you are given.",
    )
    require(
        torch.equal(answer(groups, 255)[0], nearest),
        "quantize called without `round` must round with torch.round, its default; your codes "
        "differ.",
    )


def _require_codes_within_levels(answer: Quantize) -> None:
    """floor(steps + draw) can round the largest element, 255 steps, up to 256, which is 0 in
    uint8."""
    groups = _groups((0.0, 255.0))
    for levels in (255, 15):
        largest = int(answer(groups, levels, lambda steps: steps.floor() + 1)[0][0, 101])
        require(
            largest == levels,
            f"quantize with a round that gives {levels + 1} for the largest element of a group, "
            f"at {levels} levels, gave code {largest}; wanted {levels}.",
        )


def _require_bytes_of_kept(answer: Quantize) -> int:
    kept = answer(_with_outlier(), 255, torch.round)
    held = sum({t.untyped_storage(): t.untyped_storage().nbytes() for t in kept}.values())
    wanted = 4 * GROUP + 4 * 4
    require(
        held == wanted,
        f"quantize of 4 groups holds {held:,} bytes; wanted {wanted:,}: one per element, and 4 per "
        f"group.",
    )
    return held


# ------------------------------------------------------------------ 7.2: stochastic rounding

StochasticRound = Callable[[Tensor, torch.Generator], Tensor]
DRAWS = 16_384
_SEED_WITH_A_ZERO = 1233  # among DRAWS draws, one is exactly 0
CLOSE = 0.02  # five standard deviations of the mean of DRAWS draws, at a fraction of a half
_CASE = "stochastic_round"


def _check_stochastic_round(answer: StochasticRound) -> str:
    means = {value: _mean(answer, value) for value in (2.25, 2.5, 2.9, 0.1, 1000.25)}
    _require_draws_differ_within_a_call(answer)
    off = {value: mean for value, mean in means.items() if abs(mean - value) >= CLOSE}
    require(
        not off,
        f"{_CASE} of {DRAWS:,} elements of {_listed(off)} has a mean of about "
        f"{_listed(f'{mean:.1f}' for mean in off.values())}; wanted the value itself.",
    )
    _mean(answer, 3.0)
    _mean(answer, 4.0, seed=_SEED_WITH_A_ZERO)  # of 3.0, ActNN's round(x + draw − 0.5) is 2 then
    _mean(answer, 3e9)
    _require_fine_draws(answer)
    _require_generator_is_used(answer)
    _require_independent_draws(answer)
    return (
        f"means of {DRAWS:,} draws are right to {CLOSE} · integers stay unchanged · draws "
        f"only from `generator`"
    )


def _mean(answer: StochasticRound, value: float, *, seed: int = 1) -> float:
    """The mean of DRAWS roundings of a value, each to the integer below or above it."""
    steps = torch.full((DRAWS,), value)
    with unchanged(_CASE, rng=True, steps=steps):
        rounded = answer(steps, _seeded(seed))
    is_tensor(_CASE, rounded, dtype=torch.float32, shape=(DRAWS,))
    found, neighbours = rounded.unique().tolist(), sorted({math.floor(value), math.ceil(value)})
    gave = _listed(f"{n:g}" for n in found) if len(found) < 4 else f"{len(found):,} values"
    require(
        set(found) <= set(neighbours),
        f"{_CASE} of {value} gave {gave}; wanted only {' or '.join(map(str, neighbours))}.",
    )
    return rounded.mean().item()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _require_draws_differ_within_a_call(answer: StochasticRound) -> None:
    calls = [answer(torch.full((DRAWS,), 2.5), _seeded(seed)).unique() for seed in range(8)]
    found = sorted({value for values in calls for value in values.tolist()})
    require(
        len(found) == 1 or max(map(len, calls)) > 1,
        f"{_CASE} of {DRAWS:,} elements of 2.5 rounds all of them the same way: {found[0]:g} "
        f"in one call, {found[-1]:g} in another.",
    )


def _require_generator_is_used(answer: StochasticRound) -> None:
    steps = torch.linspace(0, 255, 1021).view(1, -1)
    generator = _seeded(2)
    first, second = answer(steps, generator), answer(steps, generator)
    require(
        first.shape == steps.shape,
        f"{_CASE} of a tensor (1, 1021) gives another shape, {tuple(first.shape)}.",
    )
    require(
        not torch.equal(first, second),
        f"{_CASE} called twice with one generator rounds the same way both times; wanted new draws "
        f"in each call.",
    )
    require(
        torch.equal(first, answer(steps, _seeded(2))),
        f"{_CASE} with the same seed of `generator` rounds differently the second time.",
    )


def _require_fine_draws(answer: StochasticRound) -> None:
    """Fractions near 0 and near 1 round the unlikely way with the right frequency."""
    for value, likely, words in ((2.0**-14, 0.0, "up"), (1 - 2.0**-14, 1.0, "down")):
        found = int((answer(torch.full((2**22,), value), _seeded(5)) != likely).sum())
        require(
            abs(found - 256) < 128,  # 8 standard deviations
            f"{_CASE} of 4,194,304 elements of {value:.6f} rounds {found:,} of them {words}; "
            f"wanted about 256. Draw float32 numbers with torch.rand.",
            evidence=("coarse draws", value),
        )


def _require_independent_draws(answer: StochasticRound) -> None:
    """Round 2.5 in many calls: any two elements go the same way in about half of them."""
    generator, shape, calls = _seeded(3), (4, 16), 1024
    rows = [answer(torch.full(shape, 2.5), generator).flatten() for _ in range(calls)]
    signs = (torch.stack(rows) - 2.5).sign()  # (calls, elements), -1 and 1
    agreement = (signs.mT @ signs).fill_diagonal_(0)  # (elements, elements)
    first, second = divmod(int(agreement.abs().argmax()), signs.shape[1])
    alike = (calls + int(agreement[first, second])) // 2
    require(
        abs(2 * alike - calls) < 0.2 * calls,  # 6 standard deviations
        f"{_CASE} of {shape} elements rounds elements {first} and {second} the same way in "
        f"{alike:,} of {calls:,} calls; wanted about half.",
    )


# ------------------------------------------------------------------ 7.3: pack codes into bytes

Pack = Callable[[Tensor, int], Tensor]


def _pack_cases() -> list[tuple[list[int], int]]:
    """Codes and bits."""
    cases = [([3, 0, 2, 1], 2), ([1, 2], 4), ([15, 15, 15, 15], 4), ([1, 2, 3], 4)]
    cases += [([3, 3, 3, 3, 3], 2), ([200, 7, 255], 8)]
    for bits in (8, 4, 2):
        for count in (512, 1001):
            drawn = torch.randint(2**bits, (count,), generator=_seeded(count + bits))
            cases.append((drawn.tolist(), bits))
    return cases


def _check_pack(answer: Pack) -> str:
    cases = _pack_cases()
    for codes, bits in cases:
        shown = codes if len(codes) < 8 else f"{len(codes):,} codes"
        _require_packed(f"pack({shown}, {bits})", answer, codes, bits)
    _require_narrow_temporaries(answer)
    return f"{len(cases)} lists of codes come back · ⌈n·bits/8⌉ bytes and no more"


def _require_narrow_temporaries(answer: Pack) -> None:
    codes = torch.zeros(4096, dtype=torch.uint8)
    for bits in (8, 4, 2):
        peak = measure(lambda bits=bits: answer(codes, bits)).peak_bytes - codes.nbytes
        require(
            peak <= 4 * len(codes),
            f"pack of {len(codes):,} codes at {bits} bits allocates {peak:,} bytes; wanted at most "
            f"{4 * len(codes):,}: stay in uint8.",
            evidence=("pack", bits, rough(peak)),
        )
    call = f"pack of {len(codes):,} codes"
    limited_outside_of_tensors(call, lambda: answer(codes, 4), 4 * len(codes))


def _require_packed(case: str, answer: Pack, numbers: list[int], bits: int) -> None:
    count = len(numbers)
    longer = torch.tensor([*numbers, *[0] * (-count % GROUP)], dtype=torch.uint8)
    with unchanged(case, codes=longer):
        packed = answer(longer[:count], bits)
    is_tensor(case, packed, dtype=torch.uint8, shape=(-(-count * bits // 8),))
    back = unpack(packed, bits, count).tolist()
    off = [n for n, (a, b) in enumerate(zip(back, numbers, strict=True)) if a != b]
    require(
        not off,
        f"{case} comes back with {len(off):,} of {count:,} codes changed, the first at index "
        f"{off[0] if off else 0}; its bytes begin {[f'{b:08b}' for b in packed[:2].tolist()]}.",
    )
    held = packed.untyped_storage().nbytes()
    require(
        held == len(packed),
        f"{case} gave {len(packed):,} bytes, but its storage has {held:,} bytes, which all stay "
        f"alive.",
    )


# ------------------------------------------------------------------ 7.4: bytes saved for backward

BytesKept = Callable[[Sequence[Tensor], Iterable[Tensor], int], tuple[int, int]]
bytes_kept = solution("7.4")


class _SavedCase(NamedTuple):
    """Tensors that autograd saves, and the weights."""

    tensors: list[Tensor]
    weights: list[Tensor]


def _made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The result of an operator: it requires a gradient and is not a leaf."""
    return torch.zeros(shape, dtype=dtype, requires_grad=True) + 0


def _saved_cases() -> dict[str, _SavedCase]:
    h, weight = _made(40, 64), torch.zeros(64, 64, requires_grad=True)
    first, second = h.chunk(2, dim=-1)
    int64, float32 = torch.zeros(512, dtype=torch.int64), torch.zeros(512)
    saved = {
        "a tensor (40, 64)": [h],
        "a tensor (7, 41)": [_made(7, 41)],
        "tensors of 256 and of 255 elements": [_made(16, 16), _made(5, 51)],
        "an input (40, 64) that requires a gradient": [h.detach().requires_grad_()],
        "an empty slice of a tensor (40, 64), and the tensor": [h[:0], h],
        "a tensor (40, 64) twice": [h, h],
        "a tensor (40, 64) and its transpose": [h, h.T],
        "the two halves of a tensor (40, 64), with no other view of it,": [first, second],
        "the first 100 elements of a tensor (10000,)": [_made(10_000)[:100]],
        "a tensor in bfloat16": [_made(40, 64, dtype=torch.bfloat16)],
        "a tensor, and a weight's transpose": [h, weight.T],
        "a tensor, and a weight's last 8 rows": [h, weight[-8:]],
        "tensors (40, 64) and (40, 1), and int64 (512,)": [h, _made(40, 1), int64],
        "a tensor (40, 64), and a float32 (512,) without a gradient": [h, float32],
    }
    return {name: _SavedCase(tensors, [weight]) for name, tensors in saved.items()}


class _OnePass:
    """Weights as from `model.parameters()`: a second loop over them is empty."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._rest, self._starts = iter(weights), 0

    def __iter__(self) -> Iterator[Tensor]:
        self._starts += 1
        return self._rest

    def require_one_pass(self, case: str) -> None:
        require(
            self._starts <= 1,
            f"{case} iterates over weights {self._starts} times; wanted once: model.parameters() "
            f"is empty the second time.",
            evidence=(case, "weights read again"),
        )


def _check_bytes_kept(answer: BytesKept) -> str:
    cases = _saved_cases()
    for name, (tensors, weights) in cases.items():
        for bits in (8, 2):
            case = f"bytes_kept of {name} at {bits} bits"
            with unchanged(case, tensors=tensors):
                got = answer(tensors, once := _OnePass(weights), bits)
            once.require_one_pass(case)
            equal(case, got, bytes_kept(tensors, weights, bits))
    seen = _saved_by(layer := _GatedLayer())
    before, after = bytes_kept(seen, layer.parameters(), 8)
    case = (
        f"bytes_kept of {len(seen)} tensors of a layer with an index, a mask and views, at 8 bits"
    )
    equal(case, answer(seen, layer.parameters(), 8), (before, after))
    return f"{2 * len(cases) + 1} cases · in the last, {before:,} bytes become {after:,}"


def _noted(seen: list[Tensor], tensor: Tensor) -> Tensor:
    seen.append(tensor)
    return tensor


def _saved_by(layer: nn.Module) -> list[Tensor]:
    seen: list[Tensor] = []
    with saved_tensors_hooks(partial(_noted, seen), lambda t: t):
        layer(_input())
    return seen


# ------------------------------------------------------------------ 7.5: the hooks

Compress = Callable[[Tensor], Any]
Decompress = Callable[[Any], Tensor]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
MakeHooks = Callable[[Iterable[Tensor], Compress, Decompress], Hooks]
ROWS, WIDTH = 600, 16
_LAYER = "hooks around a layer with an index, a mask and views"


class _GatedLayer(nn.Module):
    """Saves two halves of one tensor, an index, a mask, a small tensor, and a small view of a large
    one in bfloat16."""

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
    return torch.randn(ROWS, WIDTH, generator=_seeded(5))


class _HooksRun(NamedTuple):
    """One forward pass and two backward passes under an answer's hooks."""

    gradients: list[Tensor]
    compressed: Counter[str]  # dtypes and shapes
    held: int  # bytes, between forward and backward


def _hooks_of(answer: MakeHooks, weights: Iterable[Tensor], *both: Any) -> Hooks:
    made = answer(weights, *both)
    require(
        isinstance(made, (tuple, list)) and len(made) == 2 and all(map(callable, made)),
        f"hooks(weights, compress, decompress) gave {_briefly(made)}; wanted two functions, pack "
        f"and unpack.{' Is there a return?' if made is None else ''}",
    )
    return made[0], made[1]


def _run_with(answer: MakeHooks, compress: Compress, decompress: Decompress) -> _HooksRun:
    layer, x, compressed = _GatedLayer(), _input(), Counter[str]()
    weights, kept = _OnePass(layer.parameters()), list[Tensor]()

    def compress_and_count(values: Tensor) -> Any:
        compressed[_kind(values)] += 1
        return compress(values)

    def forward() -> None:
        with saved_tensors_hooks(*_hooks_of(answer, weights, compress_and_count, decompress)):
            kept.append(layer(x))

    trace = measure(forward, model=layer)
    weights.require_one_pass("hooks around a layer")
    held = sum(e.bytes for e in trace.events if e.phase != "before") - kept[0].nbytes
    first = _backward(layer, kept[0])
    try:
        return _HooksRun([*first, *_backward(layer, kept[0])], compressed, held)
    except (RuntimeError, TypeError, AttributeError, LookupError) as error:
        raise Wrong(
            f"hooks around a layer: a second backward through a retained graph raised "
            f"{type(error).__name__} ({first_line(error)}); wanted the same "
            f"gradients again.",
            ("second backward", type(error).__name__),
        ) from None


def _backward(layer: nn.Module, output: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the weights; the graph is retained."""
    trained = [weight for weight in layer.parameters() if weight.requires_grad]
    return torch.autograd.grad(output.square().sum(), trained, retain_graph=True)


def _pass_through(weights: Any, compress: Any, decompress: Any) -> Hooks:
    """Hooks that change nothing, so the layer behaves as without hooks."""
    return (lambda tensor: tensor), (lambda kept: kept)


_EXACT = (Tensor.clone, lambda kept: kept)  # lossless compress and decompress
_DOUBLED = (Tensor.clone, lambda kept: 2 * kept)  # reveals whether backward gets these values
_EIGHT_BITS = (compress, decompress)


def _check_hooks(answer: MakeHooks) -> str:
    _require_storages_told_apart(answer)
    _require_views_come_back(answer)
    _require_calls_independent(answer)
    plain = _run_with(_pass_through, *_EXACT)
    _require_exact(answer, plain)
    _require_elements_counted(answer)
    held, allowed = _run_with(answer, *_EIGHT_BITS).held, _allowed()
    _require_held(answer, plain, held, allowed)
    retained = _alive_after(answer, retained=True)
    require(
        retained <= allowed,
        f"{_LAYER} hold {retained:,} bytes after a backward that retains the graph; wanted "
        f"{allowed:,}, as before it: unpack must not keep what it returns.",
    )
    limit = _peaks_of(hooks).backward + 4 * ROWS * 2 * WIDTH  # and the largest tensor once more
    limited(_LAYER, _peaks_of(answer), backward=limit)
    return (
        f"exact with a lossless compress · {plain.held:,} bytes held without hooks, {held:,} with "
        f"8 bits · each storage compressed once"
    )


def _require_exact(answer: MakeHooks, plain: _HooksRun) -> None:
    """The eligible tensors are compressed; a lossless compress changes no gradient."""
    exact = _run_with(answer, *_EXACT)
    got, wanted = exact.compressed, _run_with(hooks, *_EXACT).compressed
    require(
        bool(got) and got == wanted,
        f"{_LAYER} compressed {_in_words(got)}; wanted {_in_words(wanted)}. Too much: "
        f"{_in_words(got - wanted)}; missing: {_in_words(wanted - got)}.",
    )
    far = max(furthest(a, b) for a, b in zip(exact[0], plain[0], strict=True))
    require(
        far == 0,
        f"{_LAYER}, with a lossless compress: gradients are up to {far:.1e} off from the plain "
        f"layer's.",
    )


def _in_words(compressed: Counter[str]) -> str:
    each = [f"{kind}{f' {n} times' if n > 1 else ''}" for kind, n in sorted(compressed.items())]
    return ", ".join(each) or "nothing"


def _require_held(answer: MakeHooks, plain: _HooksRun, held: int, allowed: int) -> None:
    """Bytes between the passes, backward's use of decompress, and bytes left without the output."""
    left = _alive_after(answer, retained=False)
    require(
        held == allowed,
        f"{_LAYER} hold {held:,} bytes between forward and backward ({plain.held:,} without "
        f"hooks); wanted {allowed:,}: codes, smallest and step of each eligible storage, and the "
        f"other tensors. After the output is deleted, {left:,} bytes stay.",
    )
    for name, both in (("doubled values", _DOUBLED), ("8 bits", _EIGHT_BITS)):
        got, wanted = (_run_with(each, *both).gradients for each in (answer, hooks))
        off = _relative_error(got, wanted)
        require(
            off < 1e-5,
            f"{_LAYER}, with a decompress that returns {name}: gradients are {off:.1%} off from "
            f"gradients computed with these values.",
        )
    require(
        left == 0, f"{_LAYER} leave {left:,} bytes alive after the output is deleted; wanted none."
    )


def _allowed() -> int:
    """Bytes by the formula, without the input and `rows`, which the caller holds anyway."""
    layer = _GatedLayer()
    weights = {weight.untyped_storage() for weight in layer.parameters()}
    seen = [t for t in _saved_by(layer) if t.untyped_storage() not in weights]
    return bytes_kept(seen, [], 8)[1] - _input().nbytes - 512 * 8


def _relative_error(got: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = list(zip(got, wanted, strict=True))
    error = sum((a - b).square().sum().item() for a, b in pairs)
    return (error / sum(b.square().sum().item() for _, b in pairs)) ** 0.5


def _require_storages_told_apart(answer: MakeHooks) -> None:
    """Two live tensors, then two tensors at one address, one after the other. The second failure
    ends the check, because the outcome of later checks would depend on addresses."""
    pack, unpack = _hooks_of(answer, [], *_EXACT)
    alive = [torch.full((512,), float(n), requires_grad=True) for n in range(2)]
    back = [unpack(kept) for kept in [pack(tensor) for tensor in alive]]
    require(
        all(map(torch.equal, back, alive)),
        "hooks: two tensors (512,) are alive, and one comes back with the other's values.",
    )
    if not survives_a_reused_address(pack, unpack):
        raise Wrong(
            "hooks: a tensor was freed and a new tensor got its address. The new tensor comes back "
            "with the values of the freed tensor."
        )


def _require_calls_independent(answer: MakeHooks) -> None:
    """Two pairs of hooks, each with its own compress, around one tensor."""
    h = elements(40, 64).requires_grad_() * 1
    seen: list[Tensor] = []
    pack, _ = _hooks_of(answer, [], *_EXACT)
    kept = pack(h)  # keeps the codes of the first pair alive
    other, _ = _hooks_of(answer, [], partial(_noted, seen), _EXACT[1])
    other(h)
    require(
        len(seen) == 1,
        "hooks: a second pair of hooks, with another compress, does not compress a tensor of the "
        "first pair: each call of hooks(…) needs its own dict of codes.",
    )
    del kept


def _require_views_come_back(answer: MakeHooks) -> None:
    """Views of one storage, and ineligible tensors."""
    pack, unpack = _hooks_of(answer, [], *_EXACT)
    h = elements(40, 64).requires_grad_() * 1
    for name, tensor in (
        ("a tensor (40, 64)", h),
        ("its transpose", h.T),
        ("the second half of its columns", h[:, 32:]),
        ("every third row from the fifth on", h[5::3]),
        ("its first row, expanded to all rows,", h[:1].expand(40, 64)),
        ("a copy in bfloat16", h.bfloat16()),
        ("a bool (40, 64)", h > 0),
    ):
        try:
            back = unpack(pack(tensor))
        except RuntimeError as error:
            raise Wrong(
                f"hooks: {name} does not come back: {type(error).__name__}, {first_line(error)}."
            ) from None
        require(
            isinstance(back, Tensor) and back.dtype == tensor.dtype and torch.equal(back, tensor),
            f"hooks: {name} comes back as {_briefly(back)} with other values, although compress is "
            f"lossless.",
        )


def _require_elements_counted(answer: MakeHooks) -> None:
    """A storage is eligible from 256 elements on, of any dtype; 255 elements are too few."""
    cases = (
        ("an activation", 255, torch.float32, 0),
        ("an activation", 256, torch.bfloat16, 1),
        ("a leaf other than the weights,", 256, torch.float32, 1),
    )
    for name, count, dtype, wanted in cases:
        seen: list[Tensor] = []
        pack, _ = _hooks_of(answer, [], lambda x, seen=seen: seen.append(x) or x, _EXACT[1])
        tensor = elements(count, dtype=dtype).requires_grad_()
        pack(tensor * 1 if name == "an activation" else tensor)
        require(
            len(seen) == wanted,
            f"hooks: {name} {_kind(tensor)} was {'compressed' if seen else 'not compressed'}; "
            f"a tensor that requires a gradient is eligible from 256 elements on.",
        )


def _peaks_of(answer: MakeHooks) -> Peaks:
    layer, x = _GatedLayer(), _input()
    both = _hooks_of(answer, layer.parameters(), *_EIGHT_BITS)

    def forward() -> Tensor:
        with saved_tensors_hooks(*both):
            return layer(x)

    return peaks(forward, model=layer)


def _alive_after(answer: MakeHooks, *, retained: bool) -> int:
    """Bytes still alive while the hooks exist, without output and gradients. `retained`: after a
    backward that retains the graph. Otherwise: after two forward passes, one with a backward, whose
    outputs are deleted."""
    layer, x = _GatedLayer(), _input()
    both: list[Hooks] = []
    outputs: list[Tensor] = []

    def passes() -> None:
        both.append(_hooks_of(answer, layer.parameters(), *_EIGHT_BITS))
        with saved_tensors_hooks(*both[0]):
            if not retained:
                layer(x)
            output = layer(x)
        torch.autograd.backward(output, torch.ones_like(output), retain_graph=True)
        if retained:
            outputs.append(output)

    trace = measure(passes, model=layer)
    made = [e.bytes for e in trace.events if e.phase != "before" and e.category != "gradients"]
    return sum(made) - sum(output.nbytes for output in outputs)


DAY = Day(
    exercises=(
        checked("7.1", _check_quantize, quantize, rebuilds=_LIBRARY),
        checked("7.2", _check_stochastic_round, rebuilds=_LIBRARY),
        checked("7.3", _check_pack, rebuilds=_LIBRARY),
        checked("7.4", _check_bytes_kept, bytes_kept),
        checked("7.5", _check_hooks, hooks, rebuilds=("memlab.compression",)),
    ),
    bill=Bill("day 7: 8-bit activations tried, not used", attention_kept),
)
