"""Day 4: mixed precision."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from memlab.course.bill import SETTING
from memlab.course.exercises import Bill, Day, Exercise, WrongAnswer, require
from memlab.course.properties import elements, parameters, same_bytes, unchanged
from memlab.metering import measure
from memlab.model import PRESETS, GPTConfig
from memlab.rounding import stochastic_round_
from memlab.trace import Event, Trace
from memlab.train import combined, dry_trace
from memlab.units import format_bytes

# ------------------------------------------------------------------ 4.1: bytes of each policy

Bytes = dict[str, int]
HeldBytes = Callable[[GPTConfig, str], Bytes]
FLOAT32, BFLOAT16 = 4, 2  # bytes

# Of a number of each: weights (with a float32 copy where there is one), gradients, moments, casts.
POLICIES: dict[str, tuple[int, int, int, int]] = {
    "float32": (FLOAT32, FLOAT32, FLOAT32, 0),
    "autocast": (FLOAT32, FLOAT32, FLOAT32, BFLOAT16),
    "bfloat16": (BFLOAT16, BFLOAT16, BFLOAT16, 0),
    "master": (BFLOAT16 + FLOAT32, BFLOAT16, FLOAT32, 0),
    "master32": (BFLOAT16 + FLOAT32, FLOAT32, FLOAT32, 0),
}
_SHAPES = (
    #         V  C  L  H KV hidden T
    GPTConfig(10, 8, 1, 2, 2, 5, 4),
    GPTConfig(10, 16, 3, 8, 2, 5, 4, tied=False),
    PRESETS["124m"],
)


def _check_held_bytes(answer: HeldBytes) -> str:
    for config in _SHAPES:
        for policy in POLICIES:
            case = (
                f"held_bytes of V={config.vocab_size} C={config.width} L={config.layers} "
                f"H={config.heads} KV={config.kv_heads} hidden={config.hidden}, "
                f"{'tied' if config.tied else 'untied'}, {policy!r}"
            )
            got, wanted = answer(config, policy), held_bytes(config, policy)
            require(
                isinstance(got, dict) and set(got) == set(wanted),
                f"{case} gave {got!r}; wanted a dictionary of {', '.join(wanted)}."
                f"{' Is there a return?' if got is None else ''}",
            )
            for what, bytes_ in wanted.items():
                same_bytes(f"{case}: {what}", got[what], bytes_, _units(config)[what])
    a_weight = [f"{sum(numbers[:2]) + 2 * numbers[2]}" for numbers in POLICIES.values()]
    return f"{len(_SHAPES) * len(POLICIES)} cases to the byte · {', '.join(a_weight)} a weight"


def _units(config: GPTConfig) -> dict[str, dict[str, int]]:
    """What a wrong number of bytes of each kind is told in."""
    each = {"bytes a weight": config.parameters}
    return {
        "parameters": each,
        "gradients": each,
        "optimizer_state": each | {"bytes a tensor": _tensors(config)},
        "casts": {"casts a weight": BFLOAT16 * config.parameters, "· C casts": 2 * config.width},
    }


def held_bytes(config: GPTConfig, policy: str) -> Bytes:
    """What is there when backward ends, and the casts that autocast has made until it begins."""
    return _held_bytes_but()(config, policy)


def _tensors(config: GPTConfig) -> int:
    return 9 * config.layers + (2 if config.tied else 3)


def _norm_weights(config: GPTConfig) -> int:
    return (2 * config.layers + 1) * config.width


def _looked_up(config: GPTConfig) -> int:
    return config.vocab_size * config.width


def _multiplied(config: GPTConfig) -> int:
    """Weights of the matrices that something is multiplied by."""
    only_looked_up = 0 if config.tied else _looked_up(config)
    return config.parameters - _norm_weights(config) - only_looked_up


def _held_bytes_but(
    *,
    cast: Callable[[GPTConfig], int] = _multiplied,
    counter: int | None = FLOAT32,
    **policies: tuple[int, int, int, int],
) -> HeldBytes:
    def answer(config: GPTConfig, policy: str) -> Bytes:
        weight, gradient, moment, cast_bytes = (POLICIES | policies)[policy]
        N, tensors = config.parameters, _tensors(config)
        of_a_counter = (moment if counter is None else counter) * tensors
        return {
            "parameters": weight * N,
            "gradients": gradient * N,
            "optimizer_state": 2 * moment * N + of_a_counter,
            "casts": cast_bytes * cast(config),
        }

    return answer


_HELD_BYTES = Exercise(
    id="4.1",
    title="Bytes of each policy",
    minutes=15,
    difficulty=3,
    hints=(
        "Two of the four are simple products with N. Read the table for the dtype of each, and "
        "remember who makes what: a gradient has the dtype of its weight (unless gathered in "
        "float32), a moment that of the weight that the optimizer steps.",
        "Adam's counters are float32 whatever the weights are, one for each tensor: 9 a block and "
        "2 (tied) or 3 (untied) outside. Autocast lowers what is multiplied: every matrix, but no "
        "norm, and an embedding only if it scores the tokens too.",
        "With a master copy, parameters = (2 + 4) · N; optimizer_state = 2 · moment · N + 4 · "
        "tensors. For the casts begin with N: how many weights have all the norms, and what else "
        "is multiplied by nothing if the model is untied? What is left has 2 bytes each.",
    ),
    reference=_held_bytes_but(),
    check=_check_held_bytes,
    rebuilds=("memlab.measure", "memlab.meter", "memlab.train.dry_trace"),
    wrong_answers=(
        WrongAnswer(
            _held_bytes_but(autocast=(BFLOAT16, FLOAT32, FLOAT32, BFLOAT16)),
            "Under autocast the weights stay float32: only what they are multiplied with is cast.",
        ),
        WrongAnswer(
            _held_bytes_but(autocast=(FLOAT32, BFLOAT16, FLOAT32, BFLOAT16)),
            "A gradient has the dtype of its weight, and autocast leaves that in float32.",
        ),
        WrongAnswer(
            _held_bytes_but(autocast=(FLOAT32, FLOAT32, FLOAT32, 0)),
            "Autocast has to keep what it cast: backward multiplies by the same matrix.",
        ),
        WrongAnswer(
            _held_bytes_but(bfloat16=(BFLOAT16, BFLOAT16, FLOAT32, 0)),
            "torch's AdamW makes its moments in the dtype of the weight, here bfloat16.",
        ),
        WrongAnswer(
            _held_bytes_but(bfloat16=(BFLOAT16, FLOAT32, BFLOAT16, 0)),
            "A bfloat16 weight has a bfloat16 gradient.",
        ),
        WrongAnswer(
            _held_bytes_but(master=(BFLOAT16, BFLOAT16, FLOAT32, 0)),
            "The float32 copy is a parameter beside the model's own: 2 and 4 bytes.",
        ),
        WrongAnswer(
            _held_bytes_but(master=(FLOAT32, BFLOAT16, FLOAT32, 0)),
            "The copy does not replace the model's own weight: both are there.",
        ),
        WrongAnswer(
            _held_bytes_but(master=(BFLOAT16 + FLOAT32, BFLOAT16, BFLOAT16, 0)),
            "The optimizer steps the float32 copies, so its moments are float32.",
        ),
        WrongAnswer(_held_bytes_but(counter=0), "Adam's counters are missing: one a tensor."),
        WrongAnswer(
            _held_bytes_but(counter=None),
            "Adam counts in float32 whatever its moments are: 4 bytes a tensor.",
        ),
        WrongAnswer(
            _held_bytes_but(cast=lambda config: config.parameters),
            "Norms are not cast: autocast lowers products of matrices.",
        ),
        WrongAnswer(
            _held_bytes_but(cast=lambda config: config.parameters - _norm_weights(config)),
            "To look rows up is no product: an untied embedding is not cast.",
        ),
        WrongAnswer(
            _held_bytes_but(
                cast=lambda config: config.parameters - _norm_weights(config) - _looked_up(config)
            ),
            "A tied embedding scores the tokens, so it is cast.",
        ),
        WrongAnswer(
            _held_bytes_but(cast=lambda config: _multiplied(config) + config.width),
            "The last norm is one, too: 2 in each block, and 1 at the end.",
        ),
    ),
)

# ------------------------------------------------------------------ 4.2: the loss scaler

ScalerClass = Callable[[float, int], Any]  # scale and interval; has train, scale, fine_steps
NO_CLIP = 1e9  # a norm that no gradient here reaches
MOST = 2.0**127  # float32 ends just below twice that
INF, NAN = float("inf"), float("nan")
RATE = 0.25
NUMBERS = (2, 3)  # in the two tensors, each of a group of its own
WIDE = 2**16  # weights in each of the tensors whose bytes are looked at


class _Case:
    """A scaler's settings and, for each step, the factor of each micro-batch: the gradient of one
    of the two tensors. Where they start from 0, the loss is 0 whatever the factor."""

    def __init__(
        self,
        scale: float,
        interval: int,
        *steps: Sequence[float],
        clip: float = NO_CLIP,
        start: float = 1.0,
        tensor: int = 1,
    ) -> None:
        self.scale, self.interval, self.steps = scale, interval, steps
        self.clip, self.start, self.tensor = clip, start, tensor

    def __str__(self) -> str:
        clipped = "" if self.clip == NO_CLIP else f", the norm at most {self.clip:g}"
        return f"Scaler({self.scale:g}, {self.interval}){clipped}"


_FINE, _OVER = (1.0,), (INF,)
_SCALER_CASES = (
    _Case(8.0, 100, (1.0,)),
    _Case(8.0, 100, (1.0,), (1.0,)),
    _Case(8.0, 100, (1.0, 2.0)),
    _Case(8.0, 100, (4.0,), clip=1.0),
    _Case(8.0, 100, (4.0,), clip=1.0, tensor=0),
    _Case(8.0, 100, (INF,), (1.0,), tensor=0),
    _Case(8.0, 100, (INF,), (1.0,)),
    _Case(8.0, 100, (NAN,), (1.0,)),
    _Case(2.0**16, 100, (1e36,), (1.0,), start=0.0),
    _Case(65536.0, 3, _OVER, *[_FINE] * 2, _OVER, *[_FINE] * 7),
    _Case(8.0, 1, (1.0, 1.0), (1.0,)),
    _Case(MOST, 1, (1e-9,), (1e-9,)),
    _Case(MOST, 100, (1.5,), start=0.0),  # finite, and its sum with the other number is not
)


def _random_case(numbers: Random) -> _Case:
    factors = [numbers.choices([0.5, 3.0, INF, -INF, NAN], (6, 3, 1, 1, 1)) for _ in range(10)]
    clip = numbers.choice([NO_CLIP, 1.0])
    return _Case(2.0 ** numbers.randint(0, 16), numbers.randint(1, 3), *factors, clip=clip)


_RANDOM_CASES = tuple(map(_random_case, [Random(0)] * 30))


def _check_scaler(answer: ScalerClass) -> str:
    decisions = 0
    for case in (*_SCALER_CASES, *_RANDOM_CASES):
        mine, theirs = _run(answer, case), _as_torch(case)
        for number, (got, wanted) in enumerate(zip(mine, theirs, strict=True), start=1):
            factors = ", ".join(f"{factor:g}" for factor in case.steps[number - 1])
            before = theirs[number - 2][3] if number > 1 else [case.start] * sum(NUMBERS)
            require(
                _as_good(got, wanted, case.clip),
                f"{case}, step {number}, gradients {factors}: {_told(got)}; "
                f"torch's has {_told(wanted)}.{_said(got, wanted, before)}",
            )
            decisions += 1
    _check_two_scalers(answer)
    # Of two, not of one: with the second, a gradient is made beside the sum.
    eight, two = _micro_batch_bytes(answer, 8), _micro_batch_bytes(answer, 2)
    require(
        eight <= two + WIDE,
        f"a step of 8 micro-batches takes {format_bytes(eight)} at its fullest, of 2 "
        f"{format_bytes(two)}; wanted as much: never more than one micro-batch's graph alive.",
    )
    many, one = _scratch_bytes(answer, 8), _scratch_bytes(answer, 1)
    require(
        many <= one + 8 * WIDE,  # whether each number is finite may be noted, a byte each
        f"a step of 8 equal tensors takes {many:,} bytes beside their gradients, of one {one:,}; "
        f"wanted as much: look at them and divide them one by one.",
    )
    return f"{decisions} decisions as torch's GradScaler · {one:,} bytes beside the gradients"


# After a step: the scale, the fine steps in a row, whether it stepped, the weights.
_After = tuple[float, int, Any, list[float]]


def _run(make: ScalerClass, case: _Case) -> list[_After]:
    return list(_steps(make, case))


def _check_two_scalers(answer: ScalerClass) -> None:
    """Two that take turns decide as each does alone."""
    cases = _Case(8.0, 3, *[_FINE] * 7), _Case(64.0, 2, *[_FINE] * 2, _OVER, *[_FINE] * 4)
    turns = zip(*(_steps(answer, case) for case in cases), strict=True)
    for place, in_turn in enumerate(turns):
        for case, got in zip(cases, in_turn, strict=True):
            wanted = _as_torch(case)[place]
            require(
                _as_good(got, wanted, NO_CLIP),
                f"{case} beside another Scaler that takes a step in between, step {place + 1}: "
                f"{_told(got)}; wanted {_told(wanted)}, as alone: scale and fine_steps are each "
                f"one's own, set on self.",
                evidence=(str(case), place, "two scalers"),
            )


def _steps(make: ScalerClass, case: _Case) -> Iterator[_After]:
    """Two groups, each with a tensor that learns, and a frozen one, which has no gradient."""
    weights = [nn.Parameter(torch.full((n,), case.start)) for n in NUMBERS]
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    groups = [{"params": [weights[0], frozen]}, {"params": [weights[1]]}]
    optimizer = torch.optim.SGD(groups, lr=RATE)
    scaler = make(case.scale, case.interval)
    missing = [n for n in ("scale", "fine_steps", "train") if not hasattr(scaler, n)]
    require(not missing, f"{case} gave {scaler!r} without {', '.join(missing)}; wanted a Scaler.")
    for factors in case.steps:
        losses = (_loss(weights, factor, case.tensor) for factor in factors)
        stepped = scaler.train(optimizer, losses, case.clip)
        numbers = [number for weight in weights for number in weight.tolist()]
        yield float(scaler.scale), int(scaler.fine_steps), stepped, numbers


def _as_good(got: _After, wanted: _After, clip: float) -> bool:
    """Where the gradient is clipped, with or without the 1e-6 that torch adds to the norm."""
    if got[:3] != wanted[:3]:
        return False
    tolerance = 0.0 if clip == NO_CLIP else 1e-5
    pairs = zip(got[3], wanted[3], strict=True)
    return all(a == b or abs(a - b) <= tolerance for a, b in pairs)


@cache
def _as_torch(case: _Case) -> list[_After]:
    return _run(_Torch, case)


def _loss(weights: list[nn.Parameter], factor: float, tensor: int) -> Tensor:
    """Its gradient is `factor` somewhere in that one of the two tensors, else a half."""
    factors = [torch.full_like(weight, 0.5) for weight in weights]
    factors[tensor][-1] = factor
    return sum((weight * by).sum() for weight, by in zip(weights, factors, strict=True))


def _told(after: _After) -> str:
    scale, fine, stepped, weights = after
    numbers = ", ".join(f"{number:.6g}" for number in weights)
    return f"scale {scale:g}, fine_steps {fine}, returned {stepped!r}, weights {numbers}"


def _said(got: _After, wanted: _After, before: list[float]) -> str:
    """In words, what of a step is another than torch's."""
    moves = [[b - a for a, b in zip(before, after[3], strict=True)] for after in (got, wanted)]
    words = []
    if any(moves[0]) and not any(moves[1]):
        words.append("It stepped, though a gradient is inf or nan")
    elif any(moves[1]) and not any(moves[0]):
        words.append("It moved no weight, though the gradients of its losses are finite")
    elif times := _times(*moves):
        words.append(f"Its step is {times:.3g} times as long")
    elif any(moves[0]) and moves[0] != moves[1]:
        norms = [sum(move**2 for move in of_one) ** 0.5 / RATE for of_one in moves]
        words.append(f"It stepped by a gradient of norm {norms[0]:.4g}, not {norms[1]:.4g}")
    if got[2] != wanted[2]:
        words.append(f"it returned {got[2]!r}, not {wanted[2]}")
    if got[0] != wanted[0]:
        words.append(f"the scale is {got[0] / wanted[0]:.3g} times as large")
    if got[1] != wanted[1]:
        words.append(f"the count of fine_steps is {got[1]}, not {wanted[1]}")
    said = "; ".join(words)
    return f" {said[0].upper()}{said[1:]}." if said else ""


def _times(got: list[float], wanted: list[float]) -> float | None:
    """By what all of it is multiplied, if by one number that is not 1."""
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if b]
    times = [a / b for a, b in pairs]
    alike = bool(times) and max(times) - min(times) <= 1e-3 * abs(times[0])
    return times[0] if alike and abs(times[0] - 1) > 1e-3 else None


def _micro_batch_bytes(answer: ScalerClass, micro_batches: int) -> int:
    """What a step takes at its fullest, where each graph keeps a tensor as large as the weights."""
    model = nn.ParameterList([nn.Parameter(torch.ones(WIDE))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = answer(8.0, 100)

    def step() -> None:
        losses = ((2 * model[0]).square().sum() for _ in range(micro_batches))
        scaler.train(optimizer, losses, NO_CLIP)

    return measure(step, model=model, optimizer=optimizer).peak_bytes


def _scratch_bytes(answer: ScalerClass, tensors: int) -> int:
    """What a step takes at its fullest, beyond weights and gradients of so many tensors."""
    model = nn.ParameterList([nn.Parameter(torch.ones(WIDE)) for _ in range(tensors)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = answer(8.0, 100)

    def step() -> None:
        scaler.train(optimizer, (sum(w.sum() for w in model) for _ in range(1)), NO_CLIP)

    step()
    trace = measure(step, model=model, optimizer=optimizer)
    return trace.peak_bytes - 2 * 4 * WIDE * tensors


class _Torch:
    """torch's own scaler, behind the same method."""

    def __init__(self, scale: float, interval: int) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        self._scaler.scale(torch.ones(()))  # it makes its state when it is first used

    @property
    def scale(self) -> float:
        return self._scaler.get_scale()

    @property
    def fine_steps(self) -> int:
        return self._scaler.state_dict()["_growth_tracker"]

    def train(
        self, optimizer: torch.optim.Optimizer, losses: Iterable[Tensor], max_norm: float
    ) -> bool:
        optimizer.zero_grad()
        for loss in losses:
            self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        gradients = _gradients(optimizer)
        stepped = all(bool(gradient.isfinite().all()) for gradient in gradients)
        nn.utils.clip_grad_norm_(_weights(optimizer), max_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        return stepped


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight.grad for weight in _weights(optimizer) if weight.grad is not None]


def _all_finite(gradients: list[Tensor], losses: list[Tensor]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def _joined_finite(gradients: list[Tensor], losses: list[Tensor]) -> bool:
    return bool(torch.cat([gradient.flatten() for gradient in gradients]).isfinite().all())


def _no_nan(gradients: list[Tensor], losses: list[Tensor]) -> bool:
    return not any(bool(gradient.isnan().any()) for gradient in gradients)


def _no_inf(gradients: list[Tensor], losses: list[Tensor]) -> bool:
    return not any(bool(gradient.isinf().any()) for gradient in gradients)


def _losses_finite(gradients: list[Tensor], losses: list[Tensor]) -> bool:
    return all(bool(loss.isfinite()) for loss in losses)


def _first_group(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight.grad for weight in optimizer.param_groups[0]["params"] if weight.requires_grad]


def _first_group_finite(gradients: list[Tensor], losses: list[Tensor]) -> bool:
    return bool(gradients[0].isfinite().all())


def _scaler_but(
    *,
    fine: Callable[[list[Tensor], list[Tensor]], bool] = _all_finite,
    zero: str = "always",
    clip: str = "unscaled",
    unscale: str = "once",
    skip: bool = True,
    back_off: bool = True,
    reset_after: tuple[str, ...] = ("overflow", "growth"),
    grow_after: int = 0,
    most: float = MOST,
    per: str = "step",
    send_back: str = "each",
    divided: Callable[[torch.optim.Optimizer], list[Tensor]] = _gradients,
    returns: Callable[[bool], bool | None] = bool,
) -> ScalerClass:
    class Scaler:
        def __init__(self, scale: float, interval: int) -> None:
            self.scale, self.interval, self.fine_steps = scale, interval, 0

        def train(
            self, optimizer: torch.optim.Optimizer, losses: Iterable[Tensor], max_norm: float
        ) -> bool:
            if zero == "always":
                optimizer.zero_grad()
            noted: list[Tensor] = []
            for loss in [sum(losses)] if send_back == "sum" else losses:
                (loss * self.scale).backward()
                noted.append(loss.detach())
                if unscale == "each":
                    self.divide(optimizer)
                if per == "micro-batch":
                    self.update(fine(_gradients(optimizer), noted))
            is_fine = fine(_gradients(optimizer), noted)
            if clip == "scaled":
                nn.utils.clip_grad_norm_(_weights(optimizer), max_norm)
            if is_fine or not skip:
                if unscale == "once":
                    self.divide(optimizer)
                if clip == "unscaled":
                    nn.utils.clip_grad_norm_(_weights(optimizer), max_norm)
                optimizer.step()
                if zero == "stepped":
                    optimizer.zero_grad()
            if per == "step":
                self.update(is_fine)
            return returns(is_fine)

        def divide(self, optimizer: torch.optim.Optimizer) -> None:
            for gradient in divided(optimizer):
                gradient /= self.scale

        def update(self, is_fine: bool) -> None:
            if not is_fine:
                self.scale *= 0.5 if back_off else 1.0
                self.fine_steps = 0 if "overflow" in reset_after else self.fine_steps
                return
            self.fine_steps += 1
            if self.fine_steps == self.interval + grow_after:
                self.scale = min(2 * self.scale, most)
                self.fine_steps = 0 if "growth" in reset_after else self.fine_steps

    return Scaler


_SCALER = Exercise(
    id="4.2",
    title="A loss scaler",
    minutes=20,
    difficulty=4,
    hints=(
        "Four things in order: backward of scaled losses, a look at the gradients, the step or "
        "none, the scale. Only the first is done for each micro-batch.",
        "The gradients are weight.grad of each weight in group['params'], for each group in "
        "optimizer.param_groups; some are None. One is fine if isfinite().all(): neither inf nor "
        "nan. Divide and clip only if all are, in this order. The scale halves after an overflow, "
        "doubles when `interval` steps in a row were fine, and either begins a new row.",
        "zero_grad(); for loss in losses: (loss * self.scale).backward(). If all gradients are "
        "finite: grad /= self.scale, clip, step, fine_steps += 1. What happens to the scale and to "
        "fine_steps when fine_steps == interval, and what after an overflow?",
    ),
    reference=_scaler_but(),
    check=_check_scaler,
    rebuilds=(
        "torch.amp.GradScaler",
        "memlab.precision.LossScaler",
        "torch._amp_*",
        "torch._foreach_*",
    ),
    wrong_answers=(
        WrongAnswer(
            _scaler_but(unscale="never"),
            "The gradients are never divided: the optimizer steps by the scale times too much.",
        ),
        WrongAnswer(
            _scaler_but(unscale="each"),
            "Divided after each micro-batch, the first ones are divided again and again.",
        ),
        WrongAnswer(
            _scaler_but(clip="scaled"),
            "Clipped before the division: it is the true gradient's norm that counts.",
        ),
        WrongAnswer(_scaler_but(clip="never"), "The gradient is never clipped to max_norm."),
        WrongAnswer(
            _scaler_but(skip=False),
            "A step with inf in its gradients ruins the weights for good: skip it.",
        ),
        WrongAnswer(_scaler_but(fine=_no_nan), "An overflow is inf before it is ever nan."),
        WrongAnswer(_scaler_but(fine=_no_inf), "inf − inf is nan: that is an overflow too."),
        WrongAnswer(
            _scaler_but(fine=_losses_finite),
            "The loss can be finite where its gradients are not: look at those.",
        ),
        WrongAnswer(
            _scaler_but(fine=_first_group_finite),
            "Look at all gradients, of all groups: one inf anywhere is an overflow.",
        ),
        WrongAnswer(
            _scaler_but(zero="stepped"),
            "The gradients of a step that was skipped are still there in the next: drop the old "
            "ones before backward, not after the step.",
        ),
        WrongAnswer(
            _scaler_but(zero="never"), "Without zero_grad the last step's gradients are added in."
        ),
        WrongAnswer(_scaler_but(back_off=False), "After an overflow the scale has to be halved."),
        WrongAnswer(
            _scaler_but(reset_after=("growth",)),
            "Fine steps count only in a row: an overflow ends it.",
        ),
        WrongAnswer(
            _scaler_but(reset_after=("overflow",)),
            "When the scale has grown, a new row of fine steps begins.",
        ),
        WrongAnswer(
            _scaler_but(grow_after=1), "It grows when the row is `interval` long, not one later."
        ),
        WrongAnswer(
            _scaler_but(per="micro-batch"),
            "The scale moves once a step: within one, all losses must have the same.",
        ),
        WrongAnswer(
            _scaler_but(most=INF),
            "The scale has to fit a float32: 2**128 does not, and inf · 0 is nan.",
        ),
        WrongAnswer(
            _scaler_but(fine=_joined_finite),
            "All gradients in one tensor are a second copy of them, just to be looked at.",
        ),
        WrongAnswer(
            _scaler_but(divided=_first_group),
            "The gradients of all groups are looked at and divided, not the first group's alone.",
        ),
        WrongAnswer(
            _scaler_but(returns=lambda is_fine: None),
            "Return True when it stepped, and False when not.",
        ),
        WrongAnswer(
            _scaler_but(send_back="sum"),
            "All micro-batches' graphs are alive at once: send each back before you take the next.",
        ),
    ),
)

# ------------------------------------------------------------------ 4.3: stochastic rounding

Round = Callable[[Tensor, torch.Generator], Tensor]
LOW_BITS = 0xFFFF  # of a float32, that a bfloat16 does not have
DRAWS = 2**18
ROUNDED_BYTES = 24  # for each number, beside what is given
SEEDS = 8
_NUMBERS = (
    (1.001, 1.00391, 1.006, 1.0078),
    (-1.001, 3.14159),
    (0.001, -270_000.123),
    (1 + 2**-7 / 512,),
)


def _check_round(answer: Round) -> str:
    first = _rounded(answer, torch.tensor([1.001, 1.001, 1.001]))
    case = "stochastic_round of 3 times 1.001"
    require(
        isinstance(first, Tensor) and first.dtype == torch.bfloat16,
        f"{case} gave {_kind(first)}; wanted a bfloat16 tensor."
        f"{' Is there a return?' if first is None else ''}",
    )
    require(first.shape == (3,), f"{case} gave shape {tuple(first.shape)}, wanted (3,).")
    for numbers in _NUMBERS:
        _check_means(answer, numbers)
    _check_seeds(answer)
    _check_shapes(answer)
    _check_kept(answer)
    trace, bytes_ = _rounding(answer)
    wide = {event.dtype for event in trace.events if _is_wide(event)}
    require(
        not wide,
        f"stochastic_round makes a tensor of {', '.join(sorted(wide))}, 8 bytes a number; wanted "
        f"dtypes of 4 at most.",
    )
    require(
        bytes_ <= ROUNDED_BYTES,
        f"stochastic_round takes {bytes_:.0f} bytes for each number at its fullest; wanted at "
        f"most {ROUNDED_BYTES}: let tensors go that you are through with, or work in place in "
        f"those that you made.",
    )
    return (
        f"means right for {sum(map(len, _NUMBERS))} numbers · {bytes_:.0f} bytes a number meanwhile"
    )


def _kind(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _rounded(answer: Round, numbers: Tensor, seed: int = 0) -> Any:
    return answer(numbers, torch.Generator().manual_seed(seed))


def _check_means(answer: Round, numbers: Sequence[float]) -> None:
    shares = [_share_away(answer, number) for number in numbers]
    _require_chance(numbers, shares)
    # The share of DRAWS coins is within five standard errors of what it should be.
    errors = [5 * (wanted * (1 - wanted) / DRAWS) ** 0.5 for _, wanted in shares]
    pairs = zip(shares, errors, strict=True)
    require(
        all(abs(share - wanted) <= error for (share, wanted), error in pairs),
        f"stochastic_round of {', '.join(f'{n:.7g}' for n in numbers)} went away from zero in "
        f"{', '.join(f'{share:.3%}' for share, _ in shares)} of {DRAWS:,} draws; wanted "
        f"{', '.join(f'{wanted:.3%}' for _, wanted in shares)}, so that the mean is the number."
        f"{_which_way(numbers, shares, errors)}",
    )


def _which_way(
    numbers: Sequence[float], shares: list[tuple[float, float]], errors: list[float]
) -> str:
    """Which numbers go away from zero too often or too seldom, and whether the two ways are
    exchanged."""
    told, exchanged = [], []
    for number, (share, wanted), error in zip(numbers, shares, errors, strict=True):
        if abs(share - wanted) > error:
            told.append(f"{number:.7g} too {'often' if share > wanted else 'seldom'}")
            exchanged.append(abs(share - (1 - wanted)) <= error)
    swapped = ", with the chance of the way to the other neighbour" if all(exchanged) else ""
    return f" {' and '.join(told)}{swapped}."


def _require_chance(numbers: Sequence[float], shares: list[tuple[float, float]]) -> None:
    """For some numbers, so for all: a noise that is too narrow moves only those halfway."""
    pairs = list(zip(numbers, shares, strict=True))
    always = [f"{number:.7g}" for number, (share, _) in pairs if share in (0, 1)]
    others = [f"{number:.7g}" for number, (share, _) in pairs if share not in (0, 1)]
    require(
        not (always and others),
        f"stochastic_round went one way in all of {DRAWS:,} draws of {', '.join(always)}, and at "
        f"random with {', '.join(others)}; wanted chance for each, over the whole step from one "
        f"bfloat16 to the next.",
    )


def _share_away(answer: Round, number: float) -> tuple[float, float]:
    """In which share of draws it goes to the neighbour further from zero, and should."""
    precise = torch.full((DRAWS // SEEDS,), number)
    bits = precise[0].view(torch.int32).item() & ~LOW_BITS
    both = torch.tensor([bits, bits + LOW_BITS + 1], dtype=torch.int32).view(torch.float32)
    (below, above), exact = both.tolist(), precise[0].item()
    drawn = [_rounded(answer, precise.clone(), seed) for seed in range(SEEDS)]
    rounded = torch.cat(drawn).double()
    strangers = rounded[(rounded != below) & (rounded != above)]
    require(
        len(strangers) == 0,
        f"stochastic_round({number:g}) gave {strangers[:1].tolist()}; wanted one of its two "
        f"neighbours, {below:.9g} and {above:.9g}.",
    )
    return (rounded == above).double().mean().item(), (exact - below) / (above - below)


def _check_kept(answer: Round) -> None:
    exact = torch.tensor([0.0, 1.0, -1.5, 2.0**-120, 3.0e38]).bfloat16().float()
    many = exact.repeat(50_000)
    rounded = _rounded(answer, many).float()
    moved = many[rounded != many]
    require(
        len(moved) == 0,
        f"stochastic_round moved {', '.join(f'{n:g}' for n in moved[:1])}, which is a bfloat16 "
        f"already, in {len(moved):,} of {len(many):,} draws; wanted it as it is.",
    )
    # Two NaN that only the low bits tell from inf, or that carry over into the sign.
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    special = torch.cat([torch.tensor([INF, -INF]), odd])
    for seed in range(20):
        got = _rounded(answer, special.clone(), seed).tolist()
        require(
            got[:2] == [INF, -INF] and all(number != number for number in got[2:]),
            f"stochastic_round of inf, -inf, nan, nan, nan gave "
            f"{', '.join(f'{number:g}' for number in got)}; wanted them as they are: give back "
            f"the number itself where it is not finite.",
        )


def _check_seeds(answer: Round) -> None:
    numbers = torch.full((3, 64), 1.003)
    before = numbers.clone()
    state = torch.get_rng_state()
    same = [_rounded(answer, numbers, seed) for seed in (1, 1, 2)]
    _require_draws_of_their_own(answer)
    require(
        torch.equal(numbers, before),
        "stochastic_round changed the numbers that it was given; wanted a new tensor.",
    )
    require(
        same[0].shape == (3, 64),
        f"stochastic_round of (3, 64) gave {tuple(same[0].shape)}; wanted the same shape.",
    )
    require(
        torch.equal(torch.get_rng_state(), state),
        "stochastic_round drew from torch's own random numbers; wanted those of the generator "
        "alone.",
    )
    require(
        torch.equal(same[0], same[1]),
        "stochastic_round gave other numbers with a generator of the same seed; wanted its random "
        "numbers from the generator alone.",
    )
    generator = torch.Generator().manual_seed(1)
    require(
        not torch.equal(answer(numbers, generator), answer(numbers, generator)),
        "stochastic_round gave the same twice in a row with one generator; wanted new random "
        "numbers in each call: draw from the generator itself, and set no seed.",
    )
    require(
        not torch.equal(same[0], same[2]),
        "stochastic_round gave the same with two generators of different seeds.",
    )


def _check_shapes(answer: Round) -> None:
    """Of any shape: a scalar, one without numbers, and one that lies in memory by columns."""
    for numbers in (torch.tensor(1.5), torch.ones(0, 3), torch.ones(5, 3).T):
        got = _rounded(answer, numbers)
        require(
            got.shape == numbers.shape and torch.equal(got.float(), numbers),
            f"stochastic_round of shape {tuple(numbers.shape)} gave shape {tuple(got.shape)}, or "
            f"other numbers than the bfloat16 that it was given; wanted them as they are.",
        )


def _require_draws_of_their_own(answer: Round) -> None:
    """In each dimension: equal numbers have equal rows where draws are shared."""
    rounded = _rounded(answer, torch.full((5, 3, 64), 1.003))
    for dim in range(3):
        parts = rounded.unbind(dim)
        require(
            not all(torch.equal(part, parts[0]) for part in parts),
            f"stochastic_round of 5 × 3 × 64 equal numbers rounds alike along dimension {dim}; "
            f"wanted a random number for each.",
        )


def _rounding(answer: Round) -> tuple[Trace, float]:
    """Its trace, and its bytes for each number at its fullest."""
    numbers, generator = torch.ones(WIDE), torch.Generator().manual_seed(0)
    trace = measure(lambda: answer(numbers, generator))
    return trace, (trace.peak_bytes - numbers.nbytes) / WIDE


def _is_wide(event: Event) -> bool:
    return event.bytes >= 8 * WIDE and event.dtype in ("int64", "float64")


def _low_bits(numbers: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2**16, numbers.shape, generator=generator, dtype=torch.int32)


def _one_for_all(numbers: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2**16, (1,), generator=generator, dtype=torch.int32)


def _bits_up_to(
    high: int, low: int = 0, shift: int = 0
) -> Callable[[Tensor, torch.Generator], Tensor]:
    def bits(numbers: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.randint(low, high, numbers.shape, generator=generator, dtype=torch.int32)
        return drawn << shift

    return bits


def _wide_bits(numbers: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2**16, numbers.shape, generator=generator)


def _torchs_own_bits(numbers: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2**16, numbers.shape, dtype=torch.int32)


def _round_but(
    bits: Callable[[Tensor, torch.Generator], Tensor] = _low_bits,
    *,
    guard: bool = True,
    in_place: bool = False,
) -> Round:
    def stochastic_round(numbers: Tensor, generator: torch.Generator) -> Tensor:
        noise = bits(numbers, generator)
        if in_place:
            raised = numbers.view(torch.int32).add_(noise)
        elif noise.dtype == torch.int64:
            raised = (numbers.view(torch.int32) + noise).int()
        else:
            raised = numbers.view(torch.int32) + noise
        rounded = raised.bitwise_and_(~LOW_BITS).view(torch.float32)
        if guard:
            rounded = torch.where(numbers.isfinite(), rounded, numbers)
        return rounded.bfloat16()

    return stochastic_round


def _nearest(numbers: Tensor, generator: torch.Generator) -> Tensor:
    return numbers.bfloat16()


def _up(numbers: Tensor, generator: torch.Generator) -> Tensor:
    return _round_but(lambda numbers, _: torch.tensor(LOW_BITS, dtype=torch.int32))(
        numbers, generator
    )


def _cut(numbers: Tensor, generator: torch.Generator) -> Tensor:
    return _round_but(lambda numbers, _: torch.tensor(0, dtype=torch.int32))(numbers, generator)


def _a_fixed_noise(numbers: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.rand(numbers.shape, generator=generator) - 0.5
    return (numbers + noise * 2**-7).bfloat16()


def _a_narrow_noise(numbers: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.rand(numbers.shape, generator=generator) - 0.5
    return (numbers * (1 + noise * 2**-9)).bfloat16()


def _by_fractions(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Of a NaN the fraction is NaN, so it goes down, to where one with low bits only is inf."""
    down = numbers.view(torch.int32) & ~LOW_BITS
    below, above = down.view(torch.float32), (down + LOW_BITS + 1).view(torch.float32)
    up = torch.rand(numbers.shape, generator=generator) < (numbers - below) / (above - below)
    return torch.where(up, above, below).bfloat16()


def _by_the_library(numbers: Tensor, generator: torch.Generator) -> Tensor:
    out = torch.empty_like(numbers, dtype=torch.bfloat16)
    return stochastic_round_(out, numbers, generator=generator)


_ROUND = Exercise(
    id="4.3",
    title="Round at random",
    minutes=12,
    difficulty=3,
    hints=(
        "Whole numbers carry. What would you have to add to the 32 bits of a float32, so that a 1 "
        "is carried into the upper 16 the more often the larger the lower 16 are?",
        "Add a random integer of 16 bits to the bits: the chance that it carries into the upper "
        "half is just that fraction. Then cut the lower half off. .view(torch.int32) shows the "
        "bits, and torch.randint takes shape, generator and dtype.",
        "bits = numbers.view(torch.int32) + torch.randint(2**16, numbers.shape, "
        "generator=generator, dtype=torch.int32); rounded = (bits & ~0xFFFF).view(torch.float32). "
        "What do you return where numbers.isfinite() is False?",
    ),
    reference=_by_the_library,
    check=_check_round,
    rebuilds=("memlab.rounding.stochastic_round_",),
    wrong_answers=(
        WrongAnswer(_nearest, "To the nearest: the same way every time, so small parts vanish."),
        WrongAnswer(_up, "Always up (away from zero): the mean is too large."),
        WrongAnswer(_cut, "Cut off: always towards zero, so the mean is too small."),
        WrongAnswer(
            _round_but(_bits_up_to(2**8)),
            "Eight random bits at the low end hardly ever carry: it takes all 16.",
        ),
        WrongAnswer(
            _round_but(_bits_up_to(2**8, shift=8)),
            "Eight random bits at the high end: a way shorter than 1/256 is never gone.",
        ),
        WrongAnswer(
            _round_but(_bits_up_to(2**15)), "Random numbers of 15 bits: half of the ups are lost."
        ),
        WrongAnswer(
            _round_but(_bits_up_to(2**16 + 1, low=1)),
            "From 1 to 2**16: now and then that moves a number that is exact already.",
        ),
        WrongAnswer(
            _round_but(_one_for_all), "One random number for all: they go up or down together."
        ),
        WrongAnswer(
            _a_fixed_noise,
            "The step of a bfloat16 grows with the number: the same noise fits one size only.",
        ),
        WrongAnswer(
            _a_narrow_noise,
            "The noise is narrower than a step of bfloat16: a number near a neighbour never leaves "
            "it.",
        ),
        WrongAnswer(_round_but(guard=False), "NaN carries over into what looks like a number."),
        WrongAnswer(
            _by_fractions, "A NaN that only its low bits tell from inf is cut down to inf."
        ),
        WrongAnswer(
            _round_but(_torchs_own_bits),
            "Give the generator to torch.randint: generator=generator.",
        ),
        WrongAnswer(
            _round_but(in_place=True), "A view has the memory of its tensor: add_ writes into it."
        ),
        WrongAnswer(
            _round_but(_wide_bits),
            "torch.randint gives int64 unless told: 8 bytes for 2 of chance.",
        ),
    ),
)

# ------------------------------------------------------------------ 4.4: master weights

MasterStep = Callable[[list[nn.Parameter], list[nn.Parameter], torch.optim.Optimizer, float], None]
LAYERS = 8


def _check_master_step(answer: MasterStep) -> str:
    _check_updates(answer)
    _check_small_gradients(answer)
    _check_mixed(answer)
    scratch = _master_bytes(answer)
    require(
        scratch <= 3 * WIDE * 2 + WIDE // 16,  # a scale may be a tensor
        f"master_step takes {scratch:,} bytes more than it began with, beside the float32 "
        f"gradients that have to be; wanted at most a layer's, {3 * WIDE * 2:,}.",
    )
    return f"100 updates of 1/1024 add up · {scratch:,} bytes beside the float32 gradients"


def _pair(dtype: torch.dtype, *numbers: float) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights of one number each, and their copies; the last has no gradient, ever."""
    weights = [nn.Parameter(torch.tensor([number], dtype=dtype)) for number in numbers]
    return weights, [nn.Parameter(weight.detach().float()) for weight in weights]


def _check_updates(answer: MasterStep) -> None:
    weights, copies = _pair(torch.bfloat16, 1.0, 2.0)
    optimizer = torch.optim.SGD(copies, lr=2.0**-10)
    for number in range(1, 101):
        weights[0].grad = torch.tensor([-4.0], dtype=torch.bfloat16)
        answer(weights, copies, optimizer, 4.0)
        case = f"master_step in bfloat16, update {number} of 1/1024, scale 4"
        exact = 1 + number * 2.0**-10
        kinds = [weight.dtype for weight in weights]
        require(
            kinds == [torch.bfloat16] * 2,
            f"{case}: the model's weights are {kinds[0]}; wanted bfloat16, as they were.",
        )
        require(
            copies[0].item() == exact,
            f"{case}: the copy is {copies[0].item():.6f}; wanted {exact:.6f}.",
        )
        rounded = copies[0].detach().bfloat16().item()
        require(
            weights[0].item() == rounded,
            f"{case}: the weight is {weights[0].item():.6f}; wanted {rounded:.6f}, the copy "
            f"rounded.",
        )
        left = [name for name, ps in (("model", weights), ("copies", copies)) if _any_grad(ps)]
        require(not left, f"{case}: gradients of the {' and the '.join(left)} are left.")
    require(weights[1].item() == 2.0, "master_step moved a weight that has no gradient.")


def _any_grad(parameters: list[nn.Parameter]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


def _check_small_gradients(answer: MasterStep) -> None:
    """Gradients below float16's range, that came through because they were scaled; the larger of
    the scales is beyond that range, too."""
    for power in (16, 25):
        weights, copies = _pair(torch.float16, 0.0)
        weights[0].grad = torch.tensor([2.0**-10], dtype=torch.float16)
        answer(weights, copies, torch.optim.SGD(copies, lr=2.0**10), 2.0**power)
        require(
            copies[0].item() == -(2.0**-power),
            f"master_step in float16, gradient 2**-10 at scale 2**{power}, rate 2**10: the copy is "
            f"{copies[0].item():g}; wanted {-(2.0**-power):g}.",
        )


def _check_mixed(answer: MasterStep) -> None:
    """float16 and bfloat16 weights of several shapes, one without a gradient, by an AdamW that
    decays: what has no gradient is not decayed either."""
    shapes, dtypes = ((5, 3), (7,), (2, 3)), (torch.float16, torch.bfloat16)
    for dtype in dtypes:
        weights = parameters(dtype, shapes=shapes)
        with torch.no_grad():
            weights[0][0, 0] = 1 + 2**-9  # float16 has it, bfloat16 rounds it
        copies = [nn.Parameter(weight.detach().float()) for weight in weights]
        wanted = [nn.Parameter(copy.detach().clone()) for copy in copies]
        for n in (0, 2):
            weights[n].grad = elements(*shapes[n], dtype=dtype, seed=9 + n)
            wanted[n].grad = weights[n].grad.float() / 4
        settings = {"lr": 2.0**-9, "weight_decay": 0.5, "foreach": False}
        torch.optim.AdamW(wanted, **settings).step()
        optimizer = torch.optim.AdamW(copies, **settings)
        case = f"master_step with {dtype} weights of three shapes by AdamW"
        lists = {"weights": weights, "copies": copies}
        with unchanged(case, may_change=("values", "gradients"), **lists):
            answer(weights, copies, optimizer, 4.0)
        require(
            torch.equal(copies[1], wanted[1]),
            f"{case} moved the weight that has no gradient; wanted it as it was: zeros for a "
            f"gradient are one, and AdamW then decays the weight.",
            evidence=(case, "no gradient"),
        )
        require(
            all(torch.equal(a, b.to(dtype)) for a, b in zip(weights, wanted, strict=True)),
            f"{case} leaves other weights than its float32 copies rounded once, to {dtype}.",
            evidence=(case, "rounded"),
        )


def _master_bytes(answer: MasterStep) -> int:
    """At its fullest beyond what was there before, less half of what float32 gradients take: so
    much goes when the model's own are dropped."""
    weights = [nn.Parameter(torch.zeros(WIDE, dtype=torch.bfloat16)) for _ in range(LAYERS)]
    copies = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.SGD(copies, lr=0.1, foreach=False)
    model = nn.ParameterList([*weights, *copies])

    def give() -> None:
        for weight in weights:
            weight.grad = torch.zeros_like(weight)

    give()
    step = partial(answer, weights, copies, optimizer, 1.0)
    trace = measure(step, model=model, optimizer=optimizer)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    return trace.peak_bytes - before - 2 * WIDE * LAYERS


def _in_float32(low: nn.Parameter, scale: float) -> Tensor:
    return low.grad.float() / scale


def _unscaled_low(low: nn.Parameter, scale: float) -> Tensor:
    return (low.grad / scale).float()


def _still_scaled(low: nn.Parameter, scale: float) -> Tensor:
    return low.grad.float()


@torch.no_grad()
def _write(weight: nn.Parameter, copy: nn.Parameter) -> None:
    weight.copy_(copy)


def _write_nothing(weight: nn.Parameter, copy: nn.Parameter) -> None: ...


def _replace_data(weight: nn.Parameter, copy: nn.Parameter) -> None:
    weight.data = copy.data


@torch.no_grad()
def _write_and_back(weight: nn.Parameter, copy: nn.Parameter) -> None:
    weight.copy_(copy)
    copy.copy_(weight)


def _master_step_but(
    gradient: Callable[[nn.Parameter, float], Tensor] = _in_float32,
    write: Callable[[nn.Parameter, nn.Parameter], None] = _write,
    *,
    drop: str = "each",
    drop_copies: bool = True,
) -> MasterStep:
    def master_step(
        weights: list[nn.Parameter],
        copies: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scale: float,
    ) -> None:
        for weight, copy in zip(weights, copies, strict=True):
            if weight.grad is not None:
                copy.grad = gradient(weight, scale)
                if drop == "each":
                    weight.grad = None
        optimizer.step()
        for weight, copy in zip(weights, copies, strict=True):
            write(weight, copy)
            if drop == "end":
                weight.grad = None
            if drop_copies:
                copy.grad = None

    return master_step


def _step_in_low(
    weights: list[nn.Parameter],
    copies: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scale: float,
) -> None:
    """The copies are made of the weights each time, so what rounding took is gone."""
    with torch.no_grad():
        for weight, copy in zip(weights, copies, strict=True):
            copy.copy_(weight)
    _master_step_but()(weights, copies, optimizer, scale)


_MASTER_STEP = Exercise(
    id="4.4",
    title="A step of master weights",
    minutes=12,
    difficulty=2,
    hints=(
        "Three things: the gradients go up to the copies, the optimizer steps those, the weights "
        "come down. Which of them is done in which dtype?",
        "Make a gradient float32 first and divide it then, and drop the model's own before the "
        "next. The copies are the truth: nothing is ever written into them but by the optimizer.",
        "For each pair with a gradient: copy.grad = weight.grad.float() / scale; weight.grad = "
        "None. Then optimizer.step(). What is left to do for each pair, under no_grad?",
    ),
    reference=_master_step_but(),
    check=_check_master_step,
    rebuilds=("memlab.precision.MasterWeights",),
    wrong_answers=(
        WrongAnswer(
            _step_in_low,
            "Copies made anew of the rounded weights forget what rounding took: make them once.",
        ),
        WrongAnswer(
            _master_step_but(write=_write_and_back),
            "The copies must not be rounded: they are what small updates add up in.",
        ),
        WrongAnswer(
            _master_step_but(_unscaled_low),
            "Divided in float16 the gradient is zero again: first float32, then divide.",
        ),
        WrongAnswer(_master_step_but(_still_scaled), "The gradient is still times the scale."),
        WrongAnswer(
            _master_step_but(write=_write_nothing), "The model's own weights have not moved at all."
        ),
        WrongAnswer(
            _master_step_but(write=_replace_data),
            "With .data = the weight becomes the float32 copy itself: copy_ writes and rounds.",
        ),
        WrongAnswer(
            _master_step_but(drop="never"),
            "The model's gradients are still there, and backward would add to them.",
        ),
        WrongAnswer(
            _master_step_but(drop_copies=False),
            "The copies' gradients are 4 bytes a weight that nobody needs after the step.",
        ),
        WrongAnswer(
            _master_step_but(drop="end"),
            "All gradients are there in both dtypes at one moment: drop the model's own of a "
            "weight before you make the next.",
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def rounded() -> Trace:
    """The bill's step in bfloat16, one sequence at a time."""
    return dry_trace(SETTING, combined("accumulation+bfloat16"))


DAY = Day(
    exercises=(_HELD_BYTES, _SCALER, _ROUND, _MASTER_STEP),
    bill=Bill("day 4: bfloat16, rounded at random", rounded),
)
