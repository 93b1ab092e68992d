"""Day 4: mixed precision."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.course.bill import SETTING
from memlab.course.exercises import Bill, Day, distinct, require
from memlab.course.properties import (
    dimensions,
    elements,
    is_tensor,
    parameters,
    same_byte_counts,
    unchanged,
)
from memlab.course.solutions import checked, given, solution
from memlab.metering import measure
from memlab.model import PRESETS, GPTConfig
from memlab.reference.loss_scaling import Scaler
from memlab.trace import Trace
from memlab.train import combined, dry_trace
from memlab.units import format_bytes

# ------------------------------------------------------------------ 4.1: bytes of each policy

HeldBytes = Callable[[GPTConfig, str], dict[str, int]]
held_bytes: HeldBytes = solution("4.1")
POLICIES: tuple[str, ...] = given(4, "POLICIES")
_SHAPES = (
    #         V  C  L  H KV hidden T
    GPTConfig(10, 8, 1, 2, 2, 5, 4),
    GPTConfig(10, 16, 3, 8, 2, 5, 4, tied=False),
    PRESETS["124m"],
)


def _check_held_bytes(answer: HeldBytes) -> str:
    for config in _SHAPES:
        for policy in POLICIES:
            tied = "tied" if config.tied else "untied"
            case = f"held_bytes of {dimensions(config)}, {tied}, {policy!r}"
            got, wanted = answer(config, policy), held_bytes(config, policy)
            same_byte_counts(case, got, wanted, _units(config))
    each = ", ".join(f"{_bytes_per_weight(policy)}" for policy in POLICIES)
    return f"{len(_SHAPES) * len(POLICIES)} cases to the byte · {each} bytes per weight"


def _units(config: GPTConfig) -> dict[str, dict[str, int]]:
    per_weight = {"bytes per weight": config.parameters}
    tensors = 9 * config.layers + (2 if config.tied else 3)
    return {
        "parameters": per_weight,
        "gradients": per_weight,
        "optimizer_state": per_weight | {"bytes per tensor": tensors},
        "casts": per_weight | {"· C cast weights": 2 * config.hidden_size},
    }


def _bytes_per_weight(policy: str) -> int:
    config = PRESETS["124m"]
    held = held_bytes(config, policy)
    return (sum(held.values()) - held["casts"]) // config.parameters


# ------------------------------------------------------------------ 4.2: the loss scaler

ScalerClass = Callable[[float, int], Any]  # scale and interval; has train, scale, fine_steps
NO_CLIP = 1e9  # above the norm of every gradient in these cases
MOST = 2.0**127  # the largest power of two in float32
INF, NAN = float("inf"), float("nan")
RATE = 0.25
SIZES = (2, 3)  # elements of the two tensors, each in its own parameter group
WIDE = 2**16  # elements of each tensor in the memory checks


class ScalerCase(NamedTuple):
    """A scaler's settings, and the losses of each step: each number is one element of the gradient
    of a micro-batch, in one of the two tensors; the other elements are 0.5."""

    scale: float
    interval: int
    steps: tuple[tuple[float, ...], ...]
    clip: float = NO_CLIP
    start: float = 1.0  # of every weight; from 0 the loss is 0 whatever the gradient
    tensor: int = 1

    def __str__(self) -> str:
        clipped = "" if self.clip == NO_CLIP else f", max_norm {self.clip:g}"
        return f"Scaler({self.scale:g}, {self.interval}){clipped}"


def _random_case(random: Random) -> ScalerCase:
    steps = [random.choices([0.5, 3.0, INF, -INF, NAN], (6, 3, 1, 1, 1)) for _ in range(10)]
    clip = random.choice([NO_CLIP, 1.0])
    scale, interval = 2.0 ** random.randint(0, 16), random.randint(1, 3)
    return ScalerCase(scale, interval, tuple(map(tuple, steps)), clip)


_FINE, _OVER = (1.0,), (INF,)
SCALER_CASES = (
    ScalerCase(8.0, 100, (_FINE,)),
    ScalerCase(8.0, 100, (_FINE, _FINE)),
    ScalerCase(8.0, 100, ((1.0, 2.0),)),
    ScalerCase(8.0, 100, ((4.0,),), clip=1.0),
    ScalerCase(8.0, 100, ((4.0,),), clip=1.0, tensor=0),
    ScalerCase(8.0, 100, ((40.0,),), clip=1.0),  # above max_norm times the scale, too
    ScalerCase(8.0, 100, (_OVER, _FINE), tensor=0),
    ScalerCase(8.0, 100, (_OVER, _FINE)),
    ScalerCase(8.0, 100, ((NAN,), _FINE)),
    ScalerCase(2.0**16, 100, ((1e36,), _FINE), start=0.0),
    ScalerCase(65536.0, 3, (_OVER, *[_FINE] * 2, _OVER, *[_FINE] * 7)),
    ScalerCase(8.0, 1, ((1.0, 1.0), _FINE)),
    ScalerCase(MOST, 1, ((1e-9,), (1e-9,))),
    ScalerCase(MOST, 100, ((1.5,),), start=0.0),  # finite, but the sum of the gradient is not
    *map(_random_case, [Random(0)] * 30),
)
_BETWEEN_POWERS = ScalerCase(0.75 * MOST, 1, ((1e-9,), (1e-9,)))


def _check_scaler(answer: ScalerClass) -> str:
    decisions = sum(_check_case(answer, case) for case in (*SCALER_CASES, _BETWEEN_POWERS))
    _check_two_scalers(answer)
    eight, one = (_step_bytes(answer, 1, n, _deep_loss) for n in (8, 1))
    require(
        eight <= one + 5 * WIDE,  # from the second on, a gradient is made beside the sum
        f"a step of 8 micro-batches has up to {format_bytes(eight)} alive besides weights and "
        f"gradients, a step of 1 has {format_bytes(one)}; wanted at most one gradient more: keep "
        f"the graph of one micro-batch at a time.",
    )
    many, one = (_step_bytes(answer, tensors, 1, torch.sum) for tensors in (8, 1))
    require(
        many <= one + 8 * WIDE,  # a boolean for each element is fine
        f"a step with 8 equal tensors has up to {many:,} bytes alive besides weights and "
        f"gradients, a step with 1 tensor has {one:,}; wanted the same: check and divide the "
        f"gradients one by one.",
    )
    return f"{decisions} steps right · one graph at a time, and no copy of the gradients"


class _After(NamedTuple):
    """What a step leaves."""

    scale: float
    fine_steps: int
    returned: Any
    weights: list[float]

    def beside(self, other: "_After") -> str:
        """In words, with as many digits as it takes to tell the weights from the other's."""
        weights, _ = distinct(self.weights, other.weights, 6)
        return (
            f"scale {self.scale:g}, fine_steps {self.fine_steps}, returned {self.returned!r}, "
            f"weights {weights}"
        )


def _check_case(answer: ScalerClass, case: ScalerCase) -> int:
    """The number of its decisions, one a step."""
    before = [case.start] * sum(SIZES)
    for number, (got, wanted) in enumerate(
        zip(scaler_steps(answer, case), _wanted(case), strict=True), start=1
    ):
        losses = ", ".join(f"{factor:g}" for factor in case.steps[number - 1])
        require(
            _alike(got, wanted, case.clip),
            f"{case}, step {number}, gradients {losses} (one element per micro-batch; the others "
            f"are 0.5): {got.beside(wanted)}; wanted {wanted.beside(got)}."
            f"{_explained(got, wanted, before)}",
        )
        before = wanted.weights
    return len(case.steps)


@cache
def _wanted(case: ScalerCase) -> tuple[_After, ...]:
    return tuple(scaler_steps(Scaler, case))


def scaler_steps(make: ScalerClass, case: ScalerCase) -> Iterator[_After]:
    """Two parameter groups, each with a tensor that learns; the first has a frozen one, too."""
    weights = [nn.Parameter(torch.full((n,), case.start)) for n in SIZES]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.25)  # left from an earlier backward
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    groups = [{"params": [weights[0], frozen]}, {"params": [weights[1]]}]
    optimizer = torch.optim.SGD(groups, lr=RATE)
    scaler = make(case.scale, case.interval)
    missing = [n for n in ("scale", "fine_steps", "train") if not hasattr(scaler, n)]
    require(not missing, f"{case} gave {scaler!r} without {', '.join(missing)}; wanted a Scaler.")
    for factors in case.steps:
        losses = (_loss(weights, factor, case.tensor) for factor in factors)
        stepped = scaler.train(optimizer, losses, case.clip)
        after = [element for weight in weights for element in weight.tolist()]
        yield _After(float(scaler.scale), int(scaler.fine_steps), stepped, after)


def _loss(weights: list[nn.Parameter], factor: float, tensor: int) -> Tensor:
    factors = [torch.full_like(weight, 0.5) for weight in weights]
    factors[tensor][-1] = factor
    terms: list[Any] = [(weight * by).sum() for weight, by in zip(weights, factors, strict=True)]
    return sum(terms)


def _alike(got: _After, wanted: _After, clip: float) -> bool:
    """A clip may or may not add torch's 1e-6 to the norm. It limits an update to RATE · clip."""
    if got[:3] != wanted[:3]:
        return False
    tolerance = 0.0 if clip == NO_CLIP else 1e-5 * RATE * clip
    pairs = zip(got.weights, wanted.weights, strict=True)
    return all(a == b or abs(a - b) <= tolerance for a, b in pairs)


def _explained(got: _After, wanted: _After, before: list[float]) -> str:
    """In words, how a step differs from the right one."""
    moves = [[b - a for a, b in zip(before, of.weights, strict=True)] for of in (got, wanted)]
    words = [_move_explained(*moves)] if moves[0] != moves[1] else []
    if got.returned != wanted.returned:
        words.append(f"it returned {got.returned!r}, not {wanted.returned}")
    if got.scale != wanted.scale:
        words.append(f"the scale is {got.scale / wanted.scale:.3g} times the right one")
    if got.fine_steps != wanted.fine_steps:
        words.append(f"the new fine_steps is {got.fine_steps}, not {wanted.fine_steps}")
    text = "; ".join(words)
    return f" {text[0].upper()}{text[1:]}." if text else ""


def _move_explained(got: list[float], wanted: list[float]) -> str:
    if not any(wanted):
        return "it stepped, though a gradient is inf or nan"
    if not any(got):
        return "it moved no weight, though all gradients are finite"
    times = [a / b for a, b in zip(got, wanted, strict=True) if b]
    if max(times) - min(times) <= 1e-3 * abs(times[0]):
        return f"its step has {distinct(times[0], 1.0, 3)[0]} times the right length"
    norms = [sum(move**2 for move in of) ** 0.5 / RATE for of in (got, wanted)]
    return "it stepped by a gradient of norm {}, not {}".format(*distinct(*norms))


def _check_two_scalers(answer: ScalerClass) -> None:
    """Two scalers that take turns decide as each does alone."""
    cases = (
        ScalerCase(8.0, 3, (_FINE,) * 7),
        ScalerCase(64.0, 2, (*[_FINE] * 2, _OVER, *[_FINE] * 4)),
    )
    turns = zip(*(scaler_steps(answer, case) for case in cases), strict=True)
    for place, in_turn in enumerate(turns):
        for case, got in zip(cases, in_turn, strict=True):
            wanted = _wanted(case)[place]
            require(
                _alike(got, wanted, NO_CLIP),
                f"{case}, with the steps of another Scaler in between, step {place + 1}: "
                f"{got.beside(wanted)}; wanted {wanted.beside(got)}, as if used alone: set "
                f"scale and fine_steps on self.",
                evidence=(str(case), place, "two scalers"),
            )


def _deep_loss(weight: Tensor) -> Tensor:
    """Its graph holds more than its backward pass adds: two graphs are the peak."""
    for _ in range(8):
        weight = weight.sin()
    return weight.sum()


def _step_bytes(
    answer: ScalerClass, tensors: int, micro_batches: int, loss: Callable[[Tensor], Tensor]
) -> int:
    """The peak of a step beyond the weights and gradients of these tensors."""
    model = nn.ParameterList([nn.Parameter(torch.ones(WIDE)) for _ in range(tensors)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = answer(8.0, 100)

    def step() -> None:
        losses = (sum(loss(weight) for weight in model) for _ in range(micro_batches))
        scaler.train(optimizer, losses, NO_CLIP)

    step()
    trace = measure(step, model=model, optimizer=optimizer)
    return trace.peak_bytes - 2 * 4 * WIDE * tensors


# ------------------------------------------------------------------ 4.3: stochastic rounding

Round = Callable[[Tensor, torch.Generator], Tensor]
LOW_BITS = 0xFFFF  # the bits of a float32 that a bfloat16 lacks
DRAWS = 2**18
ROUNDED_BYTES = 24  # per element, beside the input
SEEDS = 8
_VALUES = (
    (1.001, 1.00391, 1.006, 1.0078),
    (-1.001, 3.14159),
    (0.001, -270_000.123, 3.3e-39),
    (1 + 2**-7 / 512,),
)


def _check_round(answer: Round) -> str:
    for values in _VALUES:
        _check_means(answer, values)
    _check_rare_draws(answer)
    _check_seeds(answer)
    _check_own_draws(answer)
    _check_shapes(answer)
    _check_exact_values(answer)
    _check_not_finite(answer)
    bytes_ = _check_bytes(answer)
    count = sum(map(len, _VALUES))
    return f"means right for {count} values · {bytes_:.0f} bytes per element at the peak"


def _rounded(answer: Round, values: Tensor, seed: int = 0) -> Any:
    return answer(values, torch.Generator().manual_seed(seed))


def _check_shapes(answer: Round) -> None:
    """Including a scalar, no elements at all, and a transposed tensor."""
    for values in (torch.tensor(1.5), torch.ones(0, 3), torch.ones(5, 3).T):
        case = f"stochastic_round of shape {tuple(values.shape)}"
        got = _rounded(answer, values)
        is_tensor(case, got, dtype=torch.bfloat16, shape=tuple(values.shape))
        require(
            torch.equal(got.float(), values),
            f"{case} changes values already in bfloat16; wanted them unchanged.",
        )


def _check_means(answer: Round, values: Sequence[float]) -> None:
    shares = [_share_away(answer, value) for value in values]
    _require_chance(values, shares)
    # A share of DRAWS draws is within five standard errors of its probability.
    errors = [5 * (wanted * (1 - wanted) / DRAWS) ** 0.5 for _, wanted in shares]
    pairs = zip(shares, errors, strict=True)
    require(
        all(abs(share - wanted) <= error for (share, wanted), error in pairs),
        f"stochastic_round of {', '.join(f'{n:.7g}' for n in values)} rounded away from zero in "
        f"{', '.join(f'{share:.3%}' for share, _ in shares)} of {DRAWS:,} draws; wanted "
        f"{', '.join(f'{wanted:.3%}' for _, wanted in shares)}, so that the mean equals the input."
        f"{_which_way(values, shares, errors)}",
    )


def _share_away(answer: Round, value: float) -> tuple[float, float]:
    """The share of draws rounded away from zero, and its probability."""
    precise = torch.full((DRAWS // SEEDS,), value)
    below, above = _neighbors(precise[0])
    drawn = [_rounded(answer, precise.clone(), seed) for seed in range(SEEDS)]
    case = f"stochastic_round of {len(precise):,} elements of {value:g}"
    is_tensor(case, drawn[0], dtype=torch.bfloat16, shape=tuple(precise.shape))
    rounded = torch.cat(drawn).double()
    others = rounded[(rounded != below) & (rounded != above)]
    require(
        len(others) == 0,
        f"stochastic_round({value:g}) gave {others[:1].sum():.9g}; wanted one of its two "
        f"neighbors, {below:.9g} and {above:.9g}.",
    )
    exact = precise[0].item()
    return (rounded == above).double().mean().item(), (exact - below) / (above - below)


def _neighbors(precise: Tensor) -> tuple[float, float]:
    """The two nearest bfloat16 values of a float32, the one nearer to zero first."""
    bits = int(precise.view(torch.int32)) & ~LOW_BITS
    both = torch.tensor([bits, bits + LOW_BITS + 1], dtype=torch.int32).view(torch.float32)
    below, above = both.tolist()
    return below, above


def _which_way(
    values: Sequence[float], shares: list[tuple[float, float]], errors: list[float]
) -> str:
    """Which values round away from zero too often or too seldom, or with swapped chances."""
    told, swapped = [], []
    for value, (share, wanted), error in zip(values, shares, errors, strict=True):
        if abs(share - wanted) > error:
            told.append(f"{value:.7g} too {'often' if share > wanted else 'seldom'}")
            swapped.append(abs(share - (1 - wanted)) <= error)
    suffix = ": the chances of the two neighbors are swapped" if all(swapped) else ""
    return f" {' and '.join(told)}{suffix}."


def _require_chance(values: Sequence[float], shares: list[tuple[float, float]]) -> None:
    """If some values are rounded at random, all must be: narrow noise moves only the middle."""
    pairs = list(zip(values, shares, strict=True))
    always = [f"{value:.7g}" for value, (share, _) in pairs if share in (0, 1)]
    others = [f"{value:.7g}" for value, (share, _) in pairs if share not in (0, 1)]
    require(
        not (always and others),
        f"stochastic_round of {', '.join(always)} went the same way in all {DRAWS:,} draws; "
        f"{', '.join(others)} went both ways. Wanted both ways for every value between two "
        f"bfloat16 values.",
    )


def _check_rare_draws(answer: Round) -> None:
    """A value 1/65,536 of the way moves in 16 of 2**20 draws, and the one before the next stays."""
    for low, way in ((1, "up"), (LOW_BITS, "down")):
        precise = torch.tensor(0x3F800000 + low, dtype=torch.int32).view(torch.float32)
        nearest = precise.bfloat16()
        drawn = torch.cat([_rounded(answer, precise.repeat(2**17), seed) for seed in range(SEEDS)])
        require(
            bool((drawn != nearest).any()),
            f"stochastic_round of {precise.item():.9g} never went {way} in {len(drawn):,} draws; "
            f"wanted a chance of 1/65,536.",
            evidence=("rare", way),
        )


def _check_seeds(answer: Round) -> None:
    values = torch.full((3, 64), 1.003)
    with unchanged("stochastic_round", rng=True, numbers=values):
        first, again, other = (_rounded(answer, values, seed) for seed in (1, 1, 2))
    require(
        torch.equal(first, again),
        "stochastic_round gave other values for a generator with the same seed; wanted random "
        "numbers from the generator alone.",
    )
    require(
        not torch.equal(first, other),
        "stochastic_round gave the same values for two generators with different seeds.",
    )
    generator = torch.Generator().manual_seed(1)
    require(
        not torch.equal(answer(values, generator), answer(values, generator)),
        "stochastic_round gave the same values in two calls with one generator; wanted new random "
        "numbers in each call: draw from the generator itself, and set no seed.",
    )


def _check_own_draws(answer: Round) -> None:
    """Shared draws round equal rows alike."""
    rounded = _rounded(answer, torch.full((5, 3, 64), 1.003))
    for dim in range(3):
        parts = rounded.unbind(dim)
        require(
            not all(torch.equal(part, parts[0]) for part in parts),
            f"stochastic_round of 5 × 3 × 64 equal elements rounds alike along dimension {dim}; "
            f"wanted a random number for each element.",
        )


def _check_exact_values(answer: Round) -> None:
    exact = torch.tensor([0.0, 1.0, -1.5, 2.0**-120, 3.0e38]).bfloat16().float()
    many = exact.repeat(50_000)
    rounded = _rounded(answer, many).float()
    moved = many[rounded != many]
    require(
        len(moved) == 0,
        f"stochastic_round moved {', '.join(f'{n:g}' for n in moved[:1])}, which is a bfloat16 "
        f"already, in {len(moved):,} of {len(many):,} draws; wanted it as it is.",
    )


def _check_not_finite(answer: Round) -> None:
    # The low bits of these NaN make all the difference to inf, or carry into the sign.
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    special = torch.cat([torch.tensor([INF, -INF]), odd])
    for seed in range(20):
        got = _rounded(answer, special.clone(), seed).tolist()
        require(
            got[:2] == [INF, -INF] and all(value != value for value in got[2:]),
            f"stochastic_round of inf, -inf, nan, nan, nan gave "
            f"{', '.join(f'{value:g}' for value in got)}; wanted them as they are: return "
            f"inf and nan unchanged.",
        )


def _check_bytes(answer: Round) -> float:
    """Returns the peak in bytes per element, beside the input."""
    values, generator = torch.ones(WIDE), torch.Generator().manual_seed(0)
    trace = measure(lambda: answer(values, generator))
    wide = {e.dtype for e in trace.events if e.bytes >= 8 * WIDE and e.dtype[-2:] == "64"}
    require(
        not wide,
        f"stochastic_round makes a tensor of {', '.join(sorted(wide))}, 8 bytes per element; "
        f"wanted dtypes of 4 bytes at most.",
    )
    bytes_ = (trace.peak_bytes - values.nbytes) / WIDE
    require(
        bytes_ <= ROUNDED_BYTES,
        f"stochastic_round has up to {bytes_:.0f} bytes per element alive; wanted at most "
        f"{ROUNDED_BYTES}: free tensors that you no longer need, or work in place in your own.",
    )
    return bytes_


# ------------------------------------------------------------------ 4.4: master weights

MasterStep = Callable[[list[nn.Parameter], list[nn.Parameter], torch.optim.Optimizer, float], None]
LAYERS = 8


def _check_master_step(answer: MasterStep) -> str:
    _check_updates(answer)
    _check_scales(answer)
    for dtype in (torch.float16, torch.bfloat16):
        _check_mixed(answer, dtype)
    scratch, most = _master_bytes(answer), 3 * WIDE * 2
    require(
        scratch <= most + WIDE // 16,  # a scale may be a tensor
        f"master_step has up to {scratch:,} bytes alive besides weights, copies and float32 "
        f"gradients; wanted at most {most:,}, the bytes of one gradient in both dtypes.",
    )
    return "100 updates of 1/1024 add up · at most one gradient in both dtypes"


def _pair(dtype: torch.dtype, *values: float) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights of one element each, and their float32 copies."""
    weights = [nn.Parameter(torch.tensor([value], dtype=dtype)) for value in values]
    return weights, [nn.Parameter(weight.detach().float()) for weight in weights]


def _check_updates(answer: MasterStep) -> None:
    """Updates below the precision of bfloat16 add up; the second weight never has a gradient."""
    weights, copies = _pair(torch.bfloat16, 1.0, 2.0)
    groups = [{"params": copies[1:]}, {"params": copies[:1]}]  # in another order
    optimizer = torch.optim.SGD(groups, lr=2.0**-10)
    for number in range(1, 101):
        weights[0].grad = torch.tensor([-4.0], dtype=torch.bfloat16)
        answer(weights, copies, optimizer, 4.0)
        case = f"master_step in bfloat16, two parameter groups, update {number} of 1/1024, scale 4"
        _require_weight(case, weights[0], copies[0], 1 + number * 2.0**-10)
        left = [name for name, ps in (("model", weights), ("copies", copies)) if _any_grad(ps)]
        zeros = all(p.grad is None or not p.grad.any() for p in (*weights, *copies))
        require(
            not left,
            f"{case} leaves gradients{' of zeros' if zeros else ''} in the "
            f"{' and the '.join(left)}; wanted .grad to be None.",
        )
    require(weights[1].item() == 2.0, "master_step moved a weight that has no gradient.")


def _require_weight(case: str, weight: Tensor, copy: Tensor, exact: float) -> None:
    require(
        weight.dtype == torch.bfloat16,
        f"{case}: the model's weight is {weight.dtype}; wanted torch.bfloat16, as before.",
    )
    mine, right = distinct(copy.item(), exact, 7)
    require(copy.item() == exact, f"{case}: the copy is {mine}; wanted {right}.")
    rounded = copy.detach().bfloat16().item()
    mine, right = distinct(weight.item(), rounded, 7)
    require(
        weight.item() == rounded,
        f"{case}: the weight is {mine}; wanted {right}, the rounded copy.",
    )


def _any_grad(tensors: list[nn.Parameter]) -> bool:
    return any(tensor.grad is not None for tensor in tensors)


def _check_scales(answer: MasterStep) -> None:
    """Unscaled gradients below float16's range, a scale beyond it, and a scale below 1."""
    for power in (16, 25, -3):
        weights, copies = _pair(torch.float16, 0.0)
        weights[0].grad = torch.tensor([2.0**-10], dtype=torch.float16)
        answer(weights, copies, torch.optim.SGD(copies, lr=2.0**10), 2.0**power)
        got, wanted = copies[0].item(), -(2.0**-power)
        mine, right = distinct(got, wanted, 6)
        require(
            got == wanted,
            f"master_step in float16, gradient 2**-10 at scale 2**{power}, lr 2**10: the copy is "
            f"{mine}; wanted {right}.",
        )


def _check_mixed(answer: MasterStep, dtype: torch.dtype) -> None:
    """Weights of several shapes, one without a gradient, by an AdamW with weight decay."""
    shapes = ((5, 3), (7,), (2, 3))
    weights = parameters(dtype, shapes=shapes)
    with torch.no_grad():
        weights[0][0, 0] = 1 + 2**-9  # exact in float16, not in bfloat16
    copies = [nn.Parameter(weight.detach().float()) for weight in weights]
    wanted = [nn.Parameter(copy.detach().clone()) for copy in copies]
    for n in (0, 2):
        weights[n].grad = gradient = elements(*shapes[n], dtype=dtype, seed=9 + n)
        wanted[n].grad = gradient.float() / 4
    adamw = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.5, foreach=False)
    adamw(wanted).step()
    optimizer = adamw(copies)
    case = f"master_step with {dtype} weights of three shapes by AdamW"
    with unchanged(case, may_change=("values", "gradients"), weights=weights, copies=copies):
        answer(weights, copies, optimizer, 4.0)
    require(
        torch.equal(copies[1], wanted[1]),
        f"{case} moved the weight that has no gradient; wanted it as it was: leave the copy's "
        f"gradient None, because AdamW decays a weight whose gradient is zeros.",
        evidence=(case, "no gradient"),
    )
    require(
        all(torch.equal(a, b.to(dtype)) for a, b in zip(weights, copies, strict=True)),
        f"{case} gives weights that differ from the float32 copies rounded once, to {dtype}.",
        evidence=(case, "rounded"),
    )
    require(
        all(torch.equal(a, b.to(dtype)) for a, b in zip(weights, wanted, strict=True)),
        f"{case} gives other copies than AdamW does with weight.grad.float() / scale.",
        evidence=(case, "stepped"),
    )


def _master_bytes(answer: MasterStep) -> int:
    """The peak beyond the bytes at the start, less half of the float32 gradients: the model's own
    gradients free that much."""
    weights = [nn.Parameter(torch.zeros(WIDE, dtype=torch.bfloat16)) for _ in range(LAYERS)]
    copies = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.SGD(copies, lr=0.1, foreach=False)
    model = nn.ParameterList([*weights, *copies])
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    step = partial(answer, weights, copies, optimizer, 1.0)
    trace = measure(step, model=model, optimizer=optimizer)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    return trace.peak_bytes - before - 2 * WIDE * LAYERS


# ------------------------------------------------------------------ the bill


def rounded() -> Trace:
    """The bill's step in bfloat16, one sequence at a time."""
    return dry_trace(SETTING, combined("accumulation+bfloat16"))


DAY = Day(
    exercises=(
        checked(
            "4.1",
            _check_held_bytes,
            held_bytes,
            rebuilds=("memlab.measure", "memlab.meter", "memlab.train.dry_trace"),
        ),
        checked(
            "4.2",
            _check_scaler,
            Scaler,
            rebuilds=(
                "torch.amp.GradScaler",
                "memlab.precision.LossScaler",
                "torch._amp_*",
                "torch._foreach_*",
            ),
        ),
        checked("4.3", _check_round, rebuilds=("memlab.rounding.stochastic_round_",)),
        checked("4.4", _check_master_step, rebuilds=("memlab.precision.MasterWeights",)),
    ),
    bill=Bill("day 4: pure bfloat16, stochastic rounding", rounded),
)
