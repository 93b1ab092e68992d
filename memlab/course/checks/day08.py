"""Day 8: what an optimizer keeps."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from numbers import Number
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from memlab.checkpointing import ATTENTION
from memlab.course.bill import SETTING
from memlab.course.checks.day06 import keep_of_each_block
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, equal, require
from memlab.course.properties import ADAM_SETTINGS, elements, parameters
from memlab.course.solutions import body, mistakes
from memlab.metering import measure
from memlab.optim import Lion
from memlab.reference.adam_mini import adam_mini_, block_size
from memlab.reference.adamw import adamw_
from memlab.reference.lion import lion_
from memlab.reference.step_in_backward import in_backward
from memlab.trace import Trace
from memlab.train import combined, dry_trace, of_all_weights

State = dict[str, Any]
Step = Callable[..., None]  # (weight, gradient, state, …), in place

# ------------------------------------------------------------------ one's own work

# Modules that do what is to be built, and torch's kernels that do.
_BUILT_ELSEWHERE = ("memlab.optim", "torch.optim", "torch.distributed", "lion_pytorch", "adam_mini")


@contextmanager
def _own_work(call: str) -> Iterator[None]:
    """Wrong if what runs inside calls a library that has the answer."""
    asked: list[str] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        home = frame.f_globals.get("__name__", "")
        if event == "call" and home.startswith(_BUILT_ELSEWHERE):
            asked.append(f"{frame.f_code.co_name} of {home}")
        elif event == "c_call" and "_fused_" in getattr(called, "__name__", ""):
            asked.append(f"{called.__name__} of torch")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:  # also where something else was wrong: this is to be told first
        sys.setprofile(before)
        require(not asked, f"{call} calls {''.join(asked[:1])}; wanted your own lines.")


# ------------------------------------------------------------------ a step of one weight

_VECTORS_DECAY = "Weights of one dimension decay, too: the text has no exception."


def _numbers(tensor: Tensor) -> str:
    """[1, -0.25], to four digits: a mistake gives the same however it is written."""
    return f"[{', '.join(f'{number:.4g}' for number in tensor.flatten().tolist())}]"


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _require_steps(
    answer: Step, wanted: Step, start: Tensor, gradients: Iterable[Tensor], **settings: Any
) -> int:
    """Require the weights after each step, from `start`; gives the number of steps."""
    named = ", ".join(f"{name}={value}" for name, value in settings.items())
    mine, theirs = start.clone(), start.clone()
    mine_state: State = {}
    their_state: State = {}
    step = 0
    for step, gradient in enumerate(gradients, 1):
        call = f"weights {_numbers(start)}, {named}: step {step}, gradient {_numbers(gradient)},"
        handed = gradient.clone()
        with torch.no_grad(), _own_work("your step"):
            answer(mine, handed, mine_state, **settings)
        require(torch.equal(handed, gradient), f"{call} changed the gradient; leave it as it is.")
        handed.zero_()  # as zero_grad(set_to_none=False) does: who kept it has kept nothing
        wanted(theirs, gradient, their_state, **settings)
        require(
            torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6),
            f"{call} gave {_numbers(mine)}, wanted {_numbers(theirs)}.",
        )
    return step


def _require_in_place(answer: Step, **settings: Any) -> None:
    """Require that a weight changes at all, if not in the first step: Lion's m is 0 in that."""
    weight, state = torch.ones(1), {}
    with torch.no_grad(), _own_work("your step"):
        for _ in range(2):
            answer(weight, torch.full((1,), 0.5), state, lr=0.1, weight_decay=0.0, **settings)
    require(
        not torch.equal(weight, torch.ones(1)),
        "weights [1]: two steps, gradient [0.5], left them as they were.",
    )


def _require_two_states(answer: Step, wanted: Step, **settings: Any) -> None:
    """Two weights stepped in turn, each with a state of its own."""
    weights = [[torch.ones(4), {}] for _ in range(4)]
    for seed in range(3):
        for n, (weight, state) in enumerate(weights):
            gradient = _random(4, seed=2 * seed + n % 2)
            with torch.no_grad():
                (answer if n < 2 else wanted)(weight, gradient, state, **settings)
    for n in range(2):
        got, right = weights[n][0], weights[n + 2][0]
        require(
            torch.allclose(got, right, rtol=1e-5, atol=1e-6),
            f"two weights stepped in turn, each with its own state: weight {n + 1} is "
            f"{_numbers(got)}, wanted {_numbers(right)}; keep what you keep in `state` alone.",
        )


# No two settings have a number in common, and in the last β₁ is the larger.
_UNEQUAL = (*ADAM_SETTINGS, {"lr": 0.05, "betas": (0.8, 0.5), "eps": 0.01, "weight_decay": 0.3})
_SIZES = (3, 1, 33, 1, 1)  # of the blocks in weights of each shape that `parameters` makes


def _require_unequal(
    answer: Step, wanted: Step, *, names: Sequence[str], sizes: Sequence[int] = ()
) -> None:
    """Weights of several shapes, stepped in turn by a learning rate that changes, along gradients
    some of which are 0; each group has settings of its own."""
    for seed, group in enumerate(_UNEQUAL):
        settings = {name: group[name] for name in names}
        for n, start in enumerate(parameters(seed=seed)):
            more = {"size": sizes[n]} if sizes else {}
            mine, theirs = start.detach().clone(), start.detach().clone()
            states: tuple[State, State] = {}, {}
            for step in range(4):
                now = settings | {"lr": group["lr"] * (1 + step)} | more
                gradient = elements(*start.shape, seed=10 * step + n) * (step != 2)
                with torch.no_grad():
                    answer(mine, gradient.clone(), states[0], **now)
                    wanted(theirs, gradient, states[1], **now)
                named = ", ".join(f"{name}={value}" for name, value in now.items())
                require(
                    torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6),
                    f"a weight {tuple(start.shape)} stepped with lr={group['lr']:g}, twice that, "
                    f"… and in the third step by zeros: step {step + 1}, {named}, gave "
                    f"{_numbers(mine.flatten()[:4])} …, wanted {_numbers(theirs.flatten()[:4])} ….",
                    evidence=("unequal", seed, n, step),
                )


_SHAPE = (100, 60)  # of the weight whose bytes are metered
_COUNT = prod(_SHAPE)
_SLACK = 64  # bytes: a step counter may be a tensor


def _require_kept(
    answer: Step, wanted_bytes: int, names: str, shaped: str = "", **settings: Any
) -> None:
    """Require the bytes that two steps leave alive, the names in the state, and of some of them
    the weight's shape."""
    weight, state = torch.ones(_SHAPE), {}

    def steps() -> None:
        for each in (0.1, 0.2):
            answer(weight, torch.full(_SHAPE, each), state, **settings)

    with torch.no_grad():
        trace = measure(steps)
    for name, value in state.items():  # of anything else the bytes are not seen
        require(
            isinstance(value, Tensor | Number),
            f"state[{name!r}] is {_kind(value)}; wanted tensors, and numbers, in `state`.",
        )
    kept = sum(event.bytes for event in trace.events if event.phase != "before")
    require(
        wanted_bytes <= kept <= wanted_bytes + _SLACK,
        f"{_COUNT:,} weights: {kept:,} bytes are kept between steps, wanted {wanted_bytes:,}."
        f"{_in_words(state)}",
        evidence=("kept", kept),
    )
    require(
        state.keys() == set(names),
        f"state has the keys {sorted(map(str, state))}, wanted {sorted(names)}: what comes later "
        f"looks for these.",
    )
    for name in shaped:
        shape = tuple(getattr(state[name], "shape", ()))
        require(
            shape == _SHAPE, f"state[{name!r}] is of shape {shape}, wanted the weight's, {_SHAPE}."
        )


def _in_words(state: State) -> str:
    """What of a state takes memory, by name."""
    sizes = {name: value.nbytes for name, value in state.items() if isinstance(value, Tensor)}
    parts = ", ".join(f"{name} of {size:,}" for name, size in sizes.items())
    return f" In the state are: {parts}." if parts else ""


# Steps after which t might be set back, or held: round numbers, and one past all of them.
_LATE = (100, 128, 200, 256, 500, 512, 1_000, 1_024, 2_000, 5_000, 10_000, 100_000, 1_000_000)


def _require_t_goes_on(answer: Step, wanted: Step, **settings: Any) -> None:
    """Require t to count every step, from states as a long training has them, too."""
    mine, theirs = torch.ones(3), torch.ones(3)
    states: tuple[State, State] = {}, {}
    ahead = 0  # 1 where the number of the next step is kept
    for late in (1, *_LATE):
        if late > 1:  # two steps: to this number, and beyond it
            states[0]["t"], states[1]["t"] = states[0]["t"] * 0 + late - 1 + ahead, late - 1
        for t in (late, late + 1):
            with torch.no_grad():
                answer(mine, _random(3, seed=t), states[0], **settings)
                wanted(theirs, _random(3, seed=t), states[1], **settings)
            ahead = int(states[0]["t"]) - 1 if t == 1 else ahead
            _require_t(states[0], t, ahead)
            require(
                torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6),
                f"step {t:,} gave {_numbers(mine)}, wanted {_numbers(theirs)}.",
            )


def _require_t(state: State, step: int, ahead: int) -> None:
    got = int(state["t"])
    require(
        got == step + ahead,
        f"after step {step:,} state['t'] is {got:,}, wanted {step + ahead:,}: t counts every step.",
        evidence=("t", step),
    )


# ------------------------------------------------------------------ 8.1: AdamW


_BETAS = "beta1, beta2 = betas"
_DECAY = "    weight *= 1 - lr * weight_decay\n"
_COUPLED = ((_BETAS, f"{_BETAS}; gradient = gradient + weight_decay * weight"), (_DECAY, ""))
_OF_MATRICES = ("    weight *=", "    if weight.ndim > 1: weight *=")
_WITHOUT_LR = ("1 - lr * weight_decay", "1 - weight_decay")
_NEW_WEIGHT = (
    "The weight itself has to change: weight -= …, not weight = weight − ….",
    (_BETAS, f"{_BETAS}; weight = weight.clone()"),
)
_EPS_IN_THE_ROOT = (").sqrt() + eps", " + eps).sqrt()")
_V_AS_IT_IS, _M_AS_IT_IS = ('state["v"] / (1 - beta2**t)', 'state["v"]'), (" / (1 - beta1**t)", "")
_CORRECTED_KEPT = """state.update(m=state["m"] / (1 - beta1**t), v=state["v"] / (1 - beta2**t))
    root = state["v"].sqrt()"""

_OURS: State = {}


def _in_a_global(weight: Tensor, gradient: Tensor, state: State, **settings: Any) -> None:
    """One state for all weights of a shape: it begins anew where the shape is another."""
    if not state:
        state["seen"] = True
        if _OURS.get("shape") != gradient.shape or gradient.numel() != 4:
            _OURS.clear()
            _OURS["shape"] = gradient.shape
            _OURS["state"] = {}
    adamw_(weight, gradient, _OURS["state"], **settings)


def _check_adamw(answer: Step) -> str:
    plain = {"lr": 0.1, "weight_decay": 0.0}
    three = [torch.tensor(g) for g in ([0.5, -3.0, -0.2], [0.1, 3.5, -0.2], [-1.0, -3.0, -0.2])]
    start = torch.tensor([1.0, -2.0, 0.5])
    right = partial(_require_steps, answer, adamw_)
    _require_in_place(answer)
    steps = [
        right(torch.tensor([1.0]), [torch.tensor([0.5])], **plain),
        right(start, three, **plain),
        right(start, three, **plain, betas=(0.5, 0.8), eps=0.3),
        right(start, three, lr=0.1, weight_decay=0.5),
        right(_random(2, 2), [_random(2, 2, seed=seed) for seed in (1, 2, 3)], lr=0.1),
    ]
    _require_two_states(answer, adamw_, lr=0.1)
    _require_unequal(answer, adamw_, names=("betas", "eps", "weight_decay"))
    _require_kept(answer, 8 * _COUNT, "mvt", shaped="mv", lr=0.1)
    _require_t_goes_on(answer, adamw_, lr=0.1)
    return f"weights as wanted after each of {sum(steps)} steps · 8 bytes a weight"


_ADAMW = Exercise(
    id="8.1",
    title="AdamW, step by step",
    minutes=12,
    difficulty=2,
    hints=(
        "Six lines, in the order of the formulas. What must be kept until the next step, and what "
        "is made anew each time? And which of them changes `weight` itself?",
        "If state is empty, put t = 0, m and v of zeros (torch.zeros_like(gradient)) into it. "
        "Then state['t'] += 1, and bring m and v up to date. Correct copies of them, not what you "
        "keep.",
        "state['m'] = beta1 * state['m'] + (1 - beta1) * gradient; state['v'] likewise with "
        "gradient**2; root = (state['v'] / (1 - beta2**t)).sqrt() + eps; weight *= 1 - lr * "
        "weight_decay. The last line is the step itself: m, corrected, divided by root.",
    ),
    reference=adamw_,
    check=_check_adamw,
    wrong_answers=(
        WrongAnswer(_in_a_global, "Every weight has moments of its own."),
        *mistakes(
            "8.1",
            (
                "Coupled decay: it passed through m and √v, which is Adam with L2. AdamW takes it "
                "from the weight itself.",
                *_COUPLED,
            ),
            (
                "The decay is a share of the weight as it was before the step.",
                (_DECAY, ""),
                ("/ root", f"/ root\n{_DECAY}"),
            ),
            ("The decay has lr in it, too: a share of lr · weight_decay goes.", _WITHOUT_LR),
            ("There is no decay of the weight.", (_DECAY, "")),
            (_VECTORS_DECAY, _OF_MATRICES),
            (
                "t is the number of all steps so far, and never begins again.",
                ('state["t"] += 1', 'state["t"] = state["t"] % 100 + 1'),
            ),
            (
                "m and v began as zeros, and are too small at first: divide by 1 − βᵗ.",
                _V_AS_IT_IS,
                _M_AS_IT_IS,
            ),
            ("v began as zeros as well: divide by 1 − β₂ᵗ.", _V_AS_IT_IS),
            (
                "The corrected moments are for this step alone: keep m and v as they are.",
                ('root = (state["v"] / (1 - beta2**t)).sqrt()', _CORRECTED_KEPT),
                ('state["m"] / (1 - beta1**t) / root', 'state["m"] / root'),
            ),
            ("eps stands outside of the root.", _EPS_IN_THE_ROOT),
            ("m is divided by the root of v.", (".sqrt() + eps", " + eps")),
            (
                "v is a mean of the gradient's squares, not of m's.",
                ("gradient**2", 'state["m"] ** 2'),
            ),
            (
                "The weight is stepped by m, not by today's gradient.",
                ('lr * state["m"] / (1 - beta1**t)', "lr * gradient"),
            ),
            ("β₁ is m's and β₂ is v's.", (_BETAS, "beta2, beta1 = betas")),
            (
                "The betas are 0.9 and 0.999, whatever is handed in: take them from `betas`.",
                (_BETAS, "beta1, beta2 = 0.9, 0.999"),
            ),
            ("The first step has t = 1.", ("t=0", "t=1")),
            (
                "t is 1 in the first step, not 0: 1 − β⁰ is 0. Count up before you divide.",
                ("t=0", "t=-1"),
            ),
            (
                "The moments are kept in float64: 16 bytes a weight.",
                ("torch.zeros_like(gradient)", "gradient.double() * 0"),
            ),
            _NEW_WEIGHT,
        ),
    ),
)

# ------------------------------------------------------------------ 8.2: Lion


_STEP_MIX = "beta1 * m + (1 - beta1) * gradient"
_KEPT_MIX = "beta2 * m + (1 - beta2) * gradient"


def _check_lion(answer: Step) -> str:
    right = partial(_require_steps, answer, lion_)
    start = torch.tensor([1.0, -2.0, 0.5])
    back = ([1.0, -1, 3, 1, -2, 1], [-0.37, 0.25, -2, -0.92, 2.4, 1])
    to_and_fro = [torch.tensor(g) for g in back]
    many = [_random(6, seed=seed) for seed in range(6)]
    _require_in_place(answer)
    turned = [torch.tensor([1.0]), torch.tensor([-5.0])]  # too much for any m but the first's g
    steps = [
        right(torch.zeros(3), [torch.tensor([0.5, -2.0, 0.0])], lr=1.0),
        right(torch.zeros(1), turned, lr=1.0, betas=(0.9, 0.95)),
        right(torch.zeros(6), to_and_fro, lr=1.0, betas=(0.9, 0.95)),
        right(torch.zeros(6), many, lr=1.0, betas=(0.6, 0.9)),
        right(start, [_random(3, seed=seed) for seed in (1, 2, 3)], lr=0.1, weight_decay=0.5),
        right(_random(2, 2), [_random(2, 2, seed=seed) for seed in (1, 2, 3)], lr=0.1),
    ]
    _require_two_states(answer, lion_, lr=0.1)
    _require_unequal(answer, lion_, names=("betas", "weight_decay"))
    _require_kept(answer, 4 * _COUNT, "m", lr=0.1)
    return f"weights as wanted after each of {sum(steps)} steps · sign(0) is 0 · 4 bytes a weight"


_LION = Exercise(
    id="8.2",
    title="Lion",
    minutes=8,
    difficulty=2,
    hints=(
        "Three lines after the state's beginning: decay, step, momentum. In this order: what the "
        "step looks at is made of the momentum as it was.",
        "Two mixes of m and g: one with β₁ inside torch.sign, made of m as it was; one with β₂, "
        "which is kept at the end. Write into the weight itself: weight *= …, weight -= ….",
        "m = state.get('m', torch.zeros_like(gradient)); weight *= 1 - lr * weight_decay; weight "
        "-= lr * torch.sign(beta1 * m + (1 - beta1) * gradient). What is kept is the other mix.",
    ),
    reference=lion_,
    check=_check_lion,
    wrong_answers=mistakes(
        "8.2",
        (
            "The momentum was brought up to date before its use: today's gradient counts twice.",
            ("beta1 * m +", f"beta1 * ({_KEPT_MIX}) +"),
        ),
        (
            "This is the sign of the new momentum; wanted that of the mix with β₁.",
            (_STEP_MIX, _KEPT_MIX),
        ),
        (
            "This is the sign of the gradient alone: the momentum takes no part in the step.",
            (_STEP_MIX, "gradient"),
        ),
        (
            "This is the sign of the old momentum alone: today's gradient is to be in the mix.",
            (_STEP_MIX, "m"),
        ),
        ("The mix is for the step; what is kept has β₂.", (_KEPT_MIX, _STEP_MIX)),
        (
            "The betas have changed places: β₁ is for the step, β₂ for what is kept.",
            (_BETAS, "beta2, beta1 = betas"),
        ),
        (
            "sign(0) is 0: a weight without a gradient stays where it is.",
            (f"torch.sign({_STEP_MIX})", f"torch.where({_STEP_MIX} >= 0, 1.0, -1.0)"),
        ),
        ("There is no sign: every step has one size, lr.", ("torch.sign", "")),
        (
            "Coupled decay: in the mix only its sign counts. Take it from the weight itself.",
            *_COUPLED,
        ),
        ("There is no decay.", (_DECAY, "")),
        (_VECTORS_DECAY, _OF_MATRICES),
        (
            "The mix for the step was kept, and mixed once more: both are made of m as it was.",
            ("beta2 * m +", f"beta2 * ({_STEP_MIX}) +"),
        ),
        ("The share that decays is lr · weight_decay.", _WITHOUT_LR),
        (
            "The decay is of the weight as it was: before the step.",
            (_DECAY, ""),
            ("lr * u\n", f"lr * u\n{_DECAY}"),
        ),
        (
            "There is a second moment again: Lion keeps m and nothing else.",
            ('    state["m"] =', '    state["v"] = gradient**2\n    state["m"] ='),
        ),
        (
            "The betas are 0.9 and 0.99, whatever is handed in: take them from `betas`.",
            (_BETAS, "beta1, beta2 = 0.9, 0.99"),
        ),
        (
            "m began as the gradient; it begins as zeros.",
            ("torch.zeros_like(gradient)", "gradient.clone()"),
        ),
        _NEW_WEIGHT,
    ),
)

# ------------------------------------------------------------------ 8.3: the partition

BlockSize = Callable[[str, Sequence[int], int], int]
# Name and shape; the head width is 8.
_WEIGHTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("norm.weight", (32,)),
    ("blocks.3.mlp_norm.weight", (32,)),
    ("embedding.weight", (256, 32)),
    ("blocks.0.mlp.down.weight", (32, 96)),
    ("blocks.0.mlp.gate.weight", (96, 32)),
    ("blocks.0.attention.value.weight", (16, 32)),
    ("blocks.0.attention.query.weight", (32, 32)),
    ("blocks.0.attention.key.weight", (16, 32)),
    ("blocks.0.attention.key.bias", (16,)),
    ("blocks.0.mlp.up.bias", (96,)),
    ("blocks.0.mlp_norm.bias", (32,)),
    ("blocks.0.mixer.bias", (24,)),
    ("decoder.blocks.1.attention.output.weight", (32, 48)),
    ("debiased.blocks.0.attention.query.weight", (48, 32)),
    ("blocks.0.parallel.mlp.gate.weight", (96, 48)),
    ("unembedding.weight", (256, 32)),
)
_REFUSED: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("blocks.0.attention.qkv.weight", (96, 32)),
    ("blocks.0.attention.key_value.weight", (32, 32)),
    ("blocks.0.mixer.weight", (32, 32)),
    ("blocks.0.bias.weight", (32, 32)),
    ("decoder.blocks.1.attention.query_key.weight", (64, 32)),
    ("blocks.0.attention.q_norm.weight", (8,)),
    ("blocks.0.attention.query.weight", (20, 32)),
)


_OF_A_HEAD = "head_width * shape[1]"
_UNKNOWN = 'raise ValueError(f"got {name}, of which no rule knows; add one")'


def _check_block_size(answer: BlockSize) -> str:
    D = 8
    for name, shape in _WEIGHTS:
        call, wanted = f"block_size({name!r}, {shape}, {D})", block_size(name, shape, D)
        try:
            got = answer(name, torch.Size(shape), D)
        except (LookupError, ValueError) as error:
            raise Wrong(f"{call} raised {type(error).__name__}, wanted {wanted:,}.") from None
        equal(call, got, wanted)
    for name, shape in _REFUSED:
        call = f"block_size({name!r}, {shape}, {D})"
        try:
            got = answer(name, torch.Size(shape), D)
        except ValueError:
            continue
        except (LookupError, TypeError, AttributeError, UnboundLocalError) as error:
            name = type(error).__name__
            raise Wrong(f"{call} raised {name} ({error}), wanted a ValueError.") from None
        raise Wrong(f"{call} gave {got!r}, wanted a ValueError.")
    equal(
        "block_size('attention.query.weight', (256, 96), 128)",
        answer("attention.query.weight", torch.Size((256, 96)), 128),
        128 * 96,
    )
    return (
        f"{len(_WEIGHTS) + 1} weights as wanted · {len(_REFUSED)} refused, a fused one among them"
    )


_BLOCK_SIZE = Exercise(
    id="8.3",
    title="Which weights share a v",
    minutes=12,
    difficulty=2,
    hints=(
        "First the layer's word: of 'blocks.0.mlp.up.weight' it is 'up'. name.split('.') has it "
        "in the last place but one. Then one if for each line of the table, biases first.",
        "A row of (out, in) has shape[1] numbers, and a head head_width rows. Where nothing fits, "
        "raise ValueError; so also if shape[0] % head_width is not 0.",
        "layer, kind = name.split('.')[-2:]; if kind == 'bias': return 1; if layer in ('query', "
        "'key'): refuse rows that make no whole heads, return head_width * shape[1]. Two lines of "
        "the table are left, and then what is in none of them.",
    ),
    reference=block_size,
    check=_check_block_size,
    wrong_answers=mistakes(
        "8.3",
        (
            "Here queries and keys go by rows: asked is a head, head_width rows together.",
            (_OF_A_HEAD, "shape[1]"),
        ),
        (
            "One v for a whole matrix, whose rows have gradients of very different size.",
            (_OF_A_HEAD, "shape.numel()"),
            ("return shape[1]", "return shape.numel()"),
            (_UNKNOWN, "return shape.numel()"),
        ),
        (
            "A fused matrix of queries, keys and values became one block, without a word. What no "
            "rule knows is to be refused.",
            (_UNKNOWN, "return shape.numel()"),
        ),
        (
            "An unknown layer was guessed, by rows. A wrong guess trains, and worse: refuse it.",
            (_UNKNOWN, "return shape[-1]"),
        ),
        (
            "Four heads for every matrix: keys have fewer heads than queries here. A head is "
            "head_width rows, however many there are.",
            (_OF_A_HEAD, "shape.numel() // 4"),
        ),
        ("A head is head_width rows, not numbers.", (_OF_A_HEAD, "head_width")),
        (
            "This is the number of heads; asked is how many numbers are in one.",
            (_OF_A_HEAD, "shape[0] // head_width"),
        ),
        (
            "These are columns: of (out, in) a row is what makes one output, shape[1] numbers.",
            ("return shape[1]", "return shape[0]"),
        ),
        ("A norm's weights share one v, all of them.", ("return shape[0]", "return 1")),
        ("Biases have a v each, as in plain AdamW.", ("return 1", "return shape[0]")),
        (
            "A name is looked at by its letters: 'key' is in 'key_value', too. Compare the whole "
            "word between two dots.",
            ("layer in (", "any(word in name for word in ("),
            ('"):\n', '")):\n'),
        ),
        (
            "It ends in 'norm' and is none of the three: it was guessed. Compare the whole word.",
            ('layer in ("attention_norm", "mlp_norm", "norm")', 'layer.endswith("norm")'),
        ),
        (
            "A bias is a vector and has no shape[1]: look for .bias before the layer's word.",
            ('kind == "bias"', "False"),
        ),
        (
            "20 rows are no whole heads of 8: blocks would begin in the middle of one.",
            ("if shape[0] % head_width", "if False"),
        ),
    ),
)

# ------------------------------------------------------------------ 8.4: Adam-mini


_MEAN = "squares.mean(1, keepdim=True)"
_BLOCKS, _BLOCKS_OF_M = "gradient.reshape(-1, size)", 'state["m"].reshape(-1, size)'


def _squares_of_each(
    weight: Tensor, gradient: Tensor, state: State, size: int, **rest: Any
) -> None:
    """The same weights, from a v for each number, averaged when it is used."""
    own = {name: state[name] for name in ("t", "m", "v") if name in state}
    adam_mini_(weight, gradient, own, size, **rest)
    beta2 = rest.get("betas", (0.9, 0.999))[1]
    each = beta2 * state.get("each", 0 * gradient) + (1 - beta2) * gradient**2
    state.update(own, each=each)
    state["v"] = each.reshape(-1, size).mean(1, keepdim=True)


def _check_adam_mini(answer: Step) -> str:
    right = partial(_require_steps, answer, adam_mini_)
    plain = {"lr": 0.1, "weight_decay": 0.0}
    two_rows = torch.tensor([[0.01, -0.02, 0.02], [0.0, 0.0, 6.0]])
    of_four = [_random(4, 2, seed=seed) for seed in (1, 2, 3)]
    two = [_random(2, 3, seed=seed) for seed in (4, 5)]
    vectors = [_random(3, seed=seed) for seed in (6, 7, 8)]
    _require_in_place(answer, size=1)
    steps = [
        right(torch.zeros(2, 3), [two_rows], size=3, **plain),
        right(torch.zeros(4, 2), of_four, size=4, **plain),
        right(_random(2, 3), two, size=3, **plain, eps=0.3),
        right(_random(2, 3), two, size=3, **plain, betas=(0.6, 0.8)),
        right(_random(2, 3), two, size=3, lr=0.1, weight_decay=0.5),
        right(torch.zeros(3), vectors, size=1, **plain),
        right(torch.zeros(3), vectors, size=3, **plain),
    ]
    _require_two_states(answer, adam_mini_, size=2, lr=0.1)
    _require_unequal(answer, adam_mini_, names=("betas", "eps", "weight_decay"), sizes=_SIZES)
    blocks = _COUNT // 60
    _require_kept(answer, 4 * _COUNT + 4 * blocks, "mvt", size=60, lr=0.1)
    _require_t_goes_on(answer, adam_mini_, size=1, lr=0.1)
    return (
        f"weights as wanted after each of {sum(steps)} steps · 4 bytes a weight, 4 a block: "
        f"{4 * _COUNT + 4 * blocks:,} of {8 * _COUNT:,}"
    )


_ADAM_MINI = Exercise(
    id="8.4",
    title="Adam-mini's step",
    minutes=10,
    difficulty=2,
    hints=(
        "It is 8.1 with one line more: what is squared and averaged has a row for each block. "
        "Which of the two moments has that many numbers?",
        "gradient.view(-1, size) has a row for each block; (…**2).mean(1, keepdim=True) is its "
        "share of v, (blocks, 1). m keeps the weight's shape; view it as blocks to divide it.",
        "blocks = gradient.reshape(-1, size); v = beta2 * v + (1 - beta2) * "
        "(blocks**2).mean(1, keepdim=True); step = m.view(-1, size) / (1 - beta1**t) / "
        "((v / (1 - beta2**t)).sqrt() + eps). In which shape is step taken from the weight, and "
        "what comes before it?",
    ),
    reference=adam_mini_,
    check=_check_adam_mini,
    wrong_answers=(
        WrongAnswer(
            _squares_of_each,
            "Right weights, but a v for each of them is kept, and averaged afterwards: average g² "
            "before.",
        ),
        *mistakes(
            "8.4",
            (
                "This is the mean of g, squared: gradients of both signs cancel. Wanted the mean "
                "of the squares.",
                (_MEAN, f"{_BLOCKS}.mean(1, keepdim=True) ** 2"),
            ),
            (
                "One v for the whole matrix: each block has its own.",
                (_MEAN, "squares.mean().expand(len(squares), 1).contiguous()"),
            ),
            (
                'm is shared, too, as a guide has it ("share m, v"): all weights of a block take '
                "one step, and which of them should go up is lost. Only v is shared.",
                (
                    "    if not state",
                    f"    gradient = {_BLOCKS}.mean(1, keepdim=True)\n    if not state",
                ),
                (_BLOCKS_OF_M, 'state["m"].expand_as(squares)'),
            ),
            (
                "These blocks are taken across: a block's numbers are neighbours, view(-1, size).",
                ("reshape(-1, size)", "reshape(size, -1).T"),
                (".view_as(weight)", ".T.reshape(weight.shape)"),
            ),
            (
                "reshape(size, -1) makes `size` blocks; asked are blocks of `size`: reshape(-1, "
                "size).",
                ("reshape(-1, size)", "reshape(size, -1)"),
            ),
            (
                "This is the sum of g²; the mean makes steps that do not depend on the block's "
                "size.",
                ("squares.mean(1", "squares.sum(1"),
            ),
            (
                "This is the largest g² of the block; wanted the mean.",
                ("squares.mean(1", "squares.amax(1"),
            ),
            (
                "This is the mean of |g|, squared: large ones count too little. Square first.",
                (_MEAN, f"{_BLOCKS}.abs().mean(1, keepdim=True) ** 2"),
            ),
            ("v began as zeros: divide by 1 − β₂ᵗ, as before.", _V_AS_IT_IS),
            (
                "m and v are not freed of the zeros they began with: divide each by its 1 − βᵗ.",
                _V_AS_IT_IS,
                _M_AS_IT_IS,
            ),
            _NEW_WEIGHT,
            ("As in AdamW, eps is outside the root.", _EPS_IN_THE_ROOT),
            (
                "The betas are 0.9 and 0.999, whatever is handed in: take them from `betas`.",
                (_BETAS, "beta1, beta2 = 0.9, 0.999"),
            ),
            ("The decay is coupled: it went into m and v.", *_COUPLED),
            ("The weight does not decay.", (_DECAY, "")),
            (_VECTORS_DECAY, _OF_MATRICES),
            (
                "v is written out for each weight: nothing is saved. Keep (blocks, 1), and let it "
                "broadcast.",
                (_MEAN, f"{_MEAN}.expand_as(squares).clone()"),
            ),
        ),
    ),
)

# ------------------------------------------------------------------ 8.5: the step inside backward

Update = Callable[[Tensor], None]
InBackward = Callable[[Sequence[Tensor], Update], Callable[[], None]]
_LAYERS, _WIDTH, _VOCABULARY = 12, 32, 64


class _Tied(nn.Module):
    """A table that is used at both ends, and layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * _random(_VOCABULARY, _WIDTH))
        self.layers = nn.ParameterList(
            nn.Parameter(0.2 * _random(_WIDTH, _WIDTH, seed=n)) for n in range(_LAYERS)
        )

    def forward(self, tokens: Tensor, layers: int = _LAYERS) -> Tensor:
        x = self.table[tokens]
        for layer in list(self.layers)[:layers]:
            x = x + (x @ layer).tanh()
        return (x @ self.table.T).logsumexp(1).mean()


class _Watched:
    """A model whose weights `update` steps; it notes what it finds, and may keep the gradients."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.model = _Tied()
        self.weights = list(self.model.parameters())
        self.calls: Counter[int] = Counter()
        self.seen: dict[int, Tensor] = {}

    def update(self, weight: Tensor) -> None:
        number = next((n for n, w in enumerate(self.weights, 1) if w is weight), None)
        done = self.calls.total()
        require(
            number is not None,
            f"update was handed {_kind(weight)}, not one of the weights.",
        )
        assert number is not None
        require(
            weight.grad is not None,
            f"after {done} updates update(weight) was called for weight {number} of "
            f"{len(self.weights)}, whose .grad is None then.",
        )
        self.calls[number] += 1
        if self.keeps:
            self.seen[number] = weight.grad
        with torch.no_grad():
            weight -= 0.1 * weight.grad

    def backward(self, seed: int = 0, layers: int = _LAYERS) -> None:
        tokens = torch.randint(_VOCABULARY, (16,), generator=torch.Generator().manual_seed(seed))
        self.model(tokens, layers).backward()

    def stepped(self) -> list[int]:
        """How often each weight was."""
        return [self.calls[n] for n in range(1, len(self.weights) + 1)]

    def values(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.weights]


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _hooked(answer: InBackward, keeps: bool = True) -> tuple[_Watched, Callable[[], None]]:
    watched = _Watched(keeps)
    end_step = answer(watched.weights, watched.update)
    missing = " Is there a return?" if end_step is None else ""
    require(
        callable(end_step),
        f"in_backward(weights, update) gave {_kind(end_step)}; wanted a function, "
        f"end_step.{missing}",
    )
    return watched, end_step


def _check_in_backward(answer: InBackward) -> str:
    with _own_work("in_backward"):
        watched, end_step = _hooked(answer)
        watched.backward()
        _require_stepped_once(watched)
    _require_as_ordinary(watched)
    _require_no_gradient_left(watched)
    end_step()
    try:
        watched.backward(seed=1)
    except RuntimeError:
        raise Wrong("after end_step() a second backward raised; wanted it to step.") from None
    require(
        watched.stepped() == [2] * len(watched.weights),
        f"after end_step() came a second backward; updates of each weight in both: "
        f"{watched.stepped()}, wanted 2 of each.",
    )
    most, largest = _most_gradients(answer)
    require(
        most <= 2 * largest,
        f"during backward {most:,} bytes of gradients were there at once; wanted at most "
        f"{2 * largest:,}, twice the largest weight's, which comes in two parts.",
    )
    _require_refused(watched, "a further backward before end_step()")
    _require_refused(watched, "one more, after a refusal and before end_step()")
    _require_refused_where_one_is_unused(answer)
    _require_two_apart(answer)
    everything = sum(weight.nbytes for weight in watched.weights)
    return (
        f"each stepped once, the tied one by its whole gradient · at most {most:,} of "
        f"{everything:,} bytes at once · a second gradient refused"
    )


def _require_stepped_once(watched: _Watched) -> None:
    require(
        watched.stepped() == [1] * len(watched.weights),
        f"one backward; updates of each weight: {watched.stepped()}, wanted 1 of each.",
    )


def _require_as_ordinary(watched: _Watched) -> None:
    ordinary = _Watched()
    ordinary.backward()
    for weight in ordinary.weights:
        ordinary.update(weight)
    pairs = zip(watched.weights, ordinary.weights, strict=True)
    off = [n for n, (a, b) in enumerate(pairs, 1) if not torch.equal(a, b)]
    require(not off, f"weights {off} are not those of an ordinary step after backward.")


def _require_no_gradient_left(watched: _Watched) -> None:
    left = {n: w.grad for n, w in enumerate(watched.weights, 1) if w.grad is not None}
    if left:
        stepped_by = all(watched.seen[n] is gradient for n, gradient in left.items())
        which = "those it was stepped by" if stepped_by else "which came after their update"
        raise Wrong(
            f"{len(left)} of {len(watched.weights)} gradients are there when backward is over, "
            f"{which}; wanted none."
        )


def _require_refused(watched: _Watched, case: str, layers: int = _LAYERS) -> None:
    """A backward before end_step()."""
    before, calls = watched.values(), watched.calls.total()
    try:
        watched.backward(seed=2, layers=layers)
    except RuntimeError:
        pass
    except Exception as error:
        raise Wrong(f"{case} raised {type(error).__name__}, wanted RuntimeError.") from None
    else:
        again = watched.calls.total() - calls
        raise Wrong(f"{case} raised nothing, and made {again} updates; wanted RuntimeError.")
    changed = sum(not torch.equal(a, b) for a, b in zip(before, watched.weights, strict=True))
    of_all = f"{changed} of {len(before)} weights"
    require(not changed, f"{case} was refused, but had changed {of_all} by then.")
    left = [n for n, weight in enumerate(watched.weights, 1) if weight.grad is not None]
    require(not left, f"{case} was refused, but weights {left} have a gradient after it.")


def _require_refused_where_one_is_unused(answer: InBackward) -> None:
    """The last layer takes no part: one gradient fewer than there are weights."""
    watched, end_step = _hooked(answer)
    watched.backward(layers=_LAYERS - 1)
    wanted = [1] * _LAYERS + [0]
    require(
        watched.stepped() == wanted,
        f"one backward of a loss without the last weight; updates of each: {watched.stepped()}, "
        f"wanted {wanted}.",
    )
    case = "where the loss does without one weight, a further backward before end_step()"
    _require_refused(watched, case, layers=_LAYERS - 1)
    case = "after a backward of a loss without the last weight"
    try:
        end_step()
        watched.backward(seed=3)
    except RuntimeError as error:
        raise Wrong(f"{case}, end_step() and a whole backward raised: {error}.") from None
    require(
        watched.stepped() == [2] * _LAYERS + [1],
        f"{case}, end_step() and a whole backward; updates of each: {watched.stepped()}, wanted 2 "
        f"of all but the last.",
    )


def _require_two_apart(answer: InBackward) -> None:
    """Two models, each with an end_step of its own."""
    first, _ = _hooked(answer)
    second, end_second = _hooked(answer)
    first.backward()
    second.backward()
    end_second()
    _require_refused(first, "a further backward of a model when the step of another has ended")


def _most_gradients(answer: InBackward) -> tuple[int, int]:
    """The most bytes of gradients at once, and those of the largest weight."""
    watched, _ = _hooked(answer, keeps=False)
    trace = measure(watched.backward, model=watched.model)
    return most_of(trace, "gradients"), max(weight.nbytes for weight in watched.weights)


def most_of(trace: Trace, category: str) -> int:
    """The most bytes of one category at one moment."""
    running = most = 0
    for event in trace.events:
        running += event.bytes if event.category == category else 0
        most = max(most, running)
    return most


_DROPPED = "update(weight)\n        weight.grad = None\n"
_BEFORE_IT_IS_THERE = """
def hook(weight):
    update(weight)
    weight.grad = None

for weight in weights:
    weight.register_hook(lambda gradient, weight=weight: hook(weight))
return lambda: None
"""
# With .grad set by hand; torch sets it once more afterwards.
_HANDED_OVER = _BEFORE_IT_IS_THERE.replace("hook(weight)", "hook(weight, gradient)").replace(
    "    update", "    weight.grad = gradient\n    update"
)
_WHEN_ALL_ARE_THERE = """
weights, there, ended = list(weights), [], [True]

def hook(weight):
    if not ended[0]:
        raise RuntimeError("a second gradient")
    there.append(weight)
    if len(there) == len(weights):
        for each in there:
            update(each)
            each.grad = None
        there.clear()
        ended[0] = False

for weight in weights:
    weight.register_post_accumulate_grad_hook(hook)
return lambda: ended.__setitem__(0, True)
"""
# By number: it does not know which weight comes twice.
_COUNTED = (
    ("stepped = set()", "stepped = []"),
    ("if weight in stepped", "if len(stepped) == len(weights)"),
    ("stepped.add(weight)", "stepped.append(1)"),
)
_IN_END_STEP = """
def end_step():
    for weight in weights:
        update(weight)
        weight.grad = None

return end_step
"""

_IN_BACKWARD = Exercise(
    id="8.5",
    title="The step inside backward",
    minutes=15,
    difficulty=3,
    hints=(
        "Which of the two hooks still finds a gradient that it can drop, and finds it complete? "
        "And to refuse a second one, you have to know of each weight whether it was stepped: what "
        "do you note, and who clears it?",
        "weight.register_post_accumulate_grad_hook(hook) calls hook(weight). In it: update, drop "
        "weight.grad, and note the weight in a set, which end_step empties: return stepped.clear.",
        "stepped = set(); def hook(weight): if weight in stepped: weight.grad = None, and raise "
        "RuntimeError(…); stepped.add(weight); update(weight); weight.grad = None. Register hook "
        "with each weight; and what does end_step do?",
    ),
    reference=in_backward,
    check=_check_in_backward,
    wrong_answers=mistakes(
        "8.5",
        (
            "The gradient was not dropped: after the update, weight.grad = None. Else they pile up "
            "as ever, and the next backward adds to them.",
            (_DROPPED, "update(weight)\n"),
            ("if weight in stepped", "if False"),
        ),
        (
            "register_hook is called before the gradient is in .grad: use "
            "register_post_accumulate_grad_hook.",
            body("in_backward", _BEFORE_IT_IS_THERE),
        ),
        (
            "register_hook is too early: when it has returned, torch puts the gradient into .grad, "
            "and there it stays.",
            body("in_backward", _HANDED_OVER),
        ),
        (
            "A second gradient was stepped by, without a word: who accumulates gets several small "
            "steps where one was meant.",
            ("if weight in stepped", "if False"),
        ),
        (
            "The gradient that was refused is there still, and the next backward adds to it: "
            "weight.grad = None before the raise.",
            ("weight.grad = None\n            raise", "raise"),
        ),
        (
            "Counting tells how many gradients came, not which weight's came twice, and a weight "
            "without a gradient leaves room for one: keep the weights that were stepped.",
            *_COUNTED,
        ),
        ("end_step() is to let the next backward come.", ("stepped.clear", "lambda: None")),
        (
            "The refusal is to be a RuntimeError: the text says so.",
            ("RuntimeError", "ValueError"),
        ),
        (
            "The hook looks at the loop's variable, which is the last weight by the time it is "
            "called: use the weight that the hook is handed.",
            ("def hook(weight)", "def hook(_)"),
            ("if weight in stepped", "if False"),
        ),
        (
            "The updates wait for the last gradient: by then all of them are there at once.",
            body("in_backward", _WHEN_ALL_ARE_THERE),
        ),
        (
            "This is an ordinary step: nothing is stepped while backward runs.",
            body("in_backward", _IN_END_STEP),
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def lion_in_bfloat16() -> Trace:
    """The bill's step as it was, stepped by Lion with a momentum of two bytes."""
    technique = combined("accumulation+bfloat16")

    def change(model: nn.Module) -> None:
        technique.change_model(model)
        keep_of_each_block(model, ATTENTION)

    lion = of_all_weights(Lion, rounding="stochastic", moment_dtype=torch.bfloat16)
    return dry_trace(SETTING, replace(technique, change_model=change, optimizer=lion))


DAY = Day(
    exercises=(_ADAMW, _LION, _BLOCK_SIZE, _ADAM_MINI, _IN_BACKWARD),
    bill=Bill("day 8: Lion, one momentum in bfloat16", lion_in_bfloat16),
)
