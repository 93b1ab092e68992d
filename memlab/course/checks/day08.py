"""Day 8: what an optimizer keeps."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from memlab.course.bill_steps import attention_kept
from memlab.course.exercises import Bill, Day, Wrong, equal, first_line, require
from memlab.course.properties import ADAM_SETTINGS, distinct_elements, elements, normal, parameters
from memlab.course.solutions import checked
from memlab.metering import measure
from memlab.optim import Lion
from memlab.reference.adam_mini import adam_mini_, block_size
from memlab.reference.adamw import adamw_
from memlab.reference.lion import lion_
from memlab.reference.step_in_backward import in_backward
from memlab.trace import Trace
from memlab.train import of_all_weights

State = dict[str, Any]
Step = Callable[..., None]  # (weight, gradient, state, …), in place
_LIBRARY = ("memlab.optim", "torch.optim", "torch._fused_*", "lion_pytorch", "adam_mini")

# ------------------------------------------------------------------ a step of one weight


def _values(tensor: Tensor) -> str:
    """[1, -0.25], to four digits: the same mistake gives the same text, however it is coded."""
    return f"[{', '.join(f'{value:.4g}' for value in tensor.flatten().tolist())}]"


_TINY = torch.tensor([1e-7, -3e-8, 1e-8])  # a gradient that the default eps shrinks


def _close(got: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)


def _require_steps(
    answer: Step, reference: Step, start: Tensor, gradients: Iterable[Tensor], **settings: Any
) -> int:
    """Require the weight after each step, from `start`; returns the number of steps."""
    named = ", ".join(f"{name}={value}" for name, value in settings.items())
    got, wanted = start.clone(), start.clone()
    address = got.data_ptr()
    states: tuple[State, State] = {}, {}
    step = 0
    for step, gradient in enumerate(gradients, 1):
        call = f"weights {_values(start)}, {named}: step {step}, gradient {_values(gradient)},"
        passed = gradient.clone()
        with torch.no_grad():
            answer(got, passed, states[0], **settings)
        require(torch.equal(passed, gradient), f"{call} changed the gradient. Do not modify it.")
        require(
            got.data_ptr() == address,
            f"{call} moved the weight to new memory. Update it in place.",
        )
        passed.zero_()  # as zero_grad(set_to_none=False) does: the state must not be a view of it
        reference(wanted, gradient, states[1], **settings)
        mine, right = distinct_elements(got, wanted)
        require(_close(got, wanted), f"{call} gave {mine}, wanted {right}.")
    return step


def _require_in_place(answer: Step, **settings: Any) -> None:
    """Require that two steps change a weight at all."""
    weight = torch.ones(1)
    state: dict[str, Any] = {}
    with torch.no_grad():
        for _ in range(2):
            answer(weight, torch.full((1,), 0.5), state, lr=0.1, weight_decay=0.0, **settings)
    require(
        not torch.equal(weight, torch.ones(1)),
        "weights [1], gradient [0.5]: two steps do not change the weight. Update it in place.",
    )


def _require_own_state(answer: Step, **settings: Any) -> None:
    """Require that stepping another weight, with its own state, has no effect on a weight."""
    alone, in_turn = (_three_steps(answer, weights, **settings) for weights in (1, 2))
    first, second = distinct_elements(alone, in_turn)
    require(
        torch.allclose(alone, in_turn, rtol=0, atol=0, equal_nan=True),
        f"after 3 steps a weight is {first}, but {second} if another weight with its "
        f"own state is updated in between. Keep everything in `state`.",
        evidence="shared state",
    )


def _three_steps(answer: Step, weights: int, **settings: Any) -> Tensor:
    """Return the first of several weights, each updated three times, in turn."""
    started: list[tuple[Tensor, State]] = [(torch.ones(4), {}) for _ in range(weights)]
    for seed in range(3):
        for n, (weight, state) in enumerate(started):
            with torch.no_grad():
                answer(weight, normal(4, seed=2 * seed + n), state, **settings)
    return started[0][0]


# No two settings share a value, and in the last β₁ is larger than β₂.
_UNEQUAL = (*ADAM_SETTINGS, {"lr": 0.05, "betas": (0.8, 0.5), "eps": 0.01, "weight_decay": 0.3})
_SIZES = (3, 1, 33, 1, 1)  # block sizes for the shapes that `parameters` makes


def _require_unequal(
    answer: Step, reference: Step, *, names: Sequence[str], sizes: Sequence[int] = ()
) -> None:
    """Step weights of several shapes, with an lr that changes, a gradient of 0 in the third step,
    and other settings for each group."""
    for seed, group in enumerate(_UNEQUAL):
        settings = {name: group[name] for name in names}
        for n, start in enumerate(parameters(seed=seed)):
            more = {"size": sizes[n]} if sizes else {}
            got, wanted = start.detach().clone(), start.detach().clone()
            states: tuple[State, State] = {}, {}
            for step in range(4):
                now = settings | {"lr": group["lr"] * (1 + step)} | more
                gradient = elements(*start.shape, seed=10 * step + n) * (step != 2)
                with torch.no_grad():
                    answer(got, gradient.clone(), states[0], **now)
                    reference(wanted, gradient, states[1], **now)
                named = ", ".join(f"{name}={value}" for name, value in now.items())
                mine, right = distinct_elements(got, wanted, 4)
                require(
                    _close(got, wanted),
                    f"a weight of shape {tuple(start.shape)}, with an lr that grows by "
                    f"{group['lr']:g} in each step and a third gradient of 0: step {step + 1}, "
                    f"{named}, gave {mine}, wanted {right}.",
                    evidence=("unequal", seed, n, step),
                )


_SHAPE = (100, 60)  # of the weight whose bytes are measured
_COUNT = prod(_SHAPE)
_SLACK = 64  # bytes: a step counter may be a tensor


def _require_kept(
    answer: Step, wanted_bytes: int, names: str, shaped: str, **settings: Any
) -> None:
    """Require the bytes that two steps leave alive, the keys of the state, and which of its tensors
    have the weight's shape."""
    weight = torch.ones(_SHAPE)
    state: dict[str, Any] = {}

    def steps() -> None:
        for value in (0.1, 0.2):
            answer(weight, torch.full(_SHAPE, value), state, **settings)

    with torch.no_grad():
        trace = measure(steps)
    for name, value in state.items():  # the meter sees no other bytes
        require(
            isinstance(value, Tensor | Number),
            f"state[{name!r}] is {_kind(value)}; keep tensors and numbers in `state`.",
        )
    kept = sum(event.bytes for event in trace.events if event.phase != "before")
    _require_no_views(state, kept)
    require(
        wanted_bytes <= kept <= wanted_bytes + _SLACK,
        f"{_COUNT:,} weights: {kept:,} bytes are kept between steps, wanted {wanted_bytes:,}."
        f"{_state_in_words(state)}",
        evidence=("kept", kept),
    )
    require(
        state.keys() == set(names),
        f"state has the keys {sorted(map(str, state))}, wanted {sorted(names)}: later cells use "
        f"these.",
    )
    for name in shaped:
        shape = tuple(getattr(state[name], "shape", ()))
        require(
            shape == _SHAPE,
            f"state[{name!r}] has the shape {shape}, wanted the weight's, {_SHAPE}.",
        )
        require(
            bool(state[name].any()),
            f"state[{name!r}] is still 0 after two steps: store the new value in `state`.",
        )


def _require_no_views(state: State, kept: int) -> None:
    """An expanded tensor has few bytes, but a saved or moved copy of it has all."""
    whole = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    require(
        whole <= kept + _SLACK,
        f"{_COUNT:,} weights: the state's tensors have {whole:,} bytes in {kept:,} bytes of "
        f"memory, so a copy of the state needs more. Keep no expanded tensor and no second view."
        f"{_state_in_words(state)}",
        evidence=("whole", whole),
    )


def _state_in_words(state: State) -> str:
    """The tensors of a state, with their bytes."""
    sizes = {name: value.nbytes for name, value in state.items() if isinstance(value, Tensor)}
    listed = ", ".join(f"{name} of {size:,}" for name, size in sizes.items() if size > _SLACK)
    return f" The state has: {listed}." if listed else ""


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


# Steps at which t could be reset or capped: round numbers, and one beyond them.
_LATE = (100, 128, 200, 256, 500, 512, 1_000, 1_024, 2_000, 5_000, 10_000, 100_000, 1_000_000)


def _require_t_counts_on(answer: Step, reference: Step, **settings: Any) -> None:
    """Require t to count every step, also from the states of a long training."""
    got, wanted = torch.ones(3), torch.ones(3)
    states: tuple[State, State] = {}, {}
    ahead = 0  # 1 if state["t"] is the number of the next step
    for late in (1, *_LATE):
        if late > 1:
            states[0]["t"], states[1]["t"] = states[0]["t"] * 0 + late - 1 + ahead, late - 1
        for t in (late, late + 1):
            with torch.no_grad():
                answer(got, normal(3, seed=t), states[0], **settings)
                reference(wanted, normal(3, seed=t), states[1], **settings)
            ahead = int(states[0]["t"]) - 1 if t == 1 else ahead
            _require_t(states[0], t, ahead)
            mine, right = distinct_elements(got, wanted)
            require(_close(got, wanted), f"step {t:,} gave {mine}, wanted {right}.")


def _require_t(state: State, step: int, ahead: int) -> None:
    got = int(state["t"])
    require(
        got == step + ahead,
        f"after step {step:,} state['t'] is {got:,}, wanted {step + ahead:,}: t counts every step.",
        evidence=("t", step),
    )


# ------------------------------------------------------------------ 8.1: AdamW


def _check_adamw(answer: Step) -> str:
    plain = {"lr": 0.1, "weight_decay": 0.0}
    three = [torch.tensor(g) for g in ([0.5, -3.0, -0.2], [0.1, 3.5, -0.2], [-1.0, -3.0, -0.2])]
    start = torch.tensor([1.0, -2.0, 0.5])
    steps_of = partial(_require_steps, answer, adamw_)
    _require_in_place(answer)
    _require_own_state(answer, lr=0.1)
    steps = [
        steps_of(torch.tensor([1.0]), [torch.tensor([0.5])], **plain),
        steps_of(start, three, **plain),
        steps_of(start, three, **plain, betas=(0.5, 0.8), eps=0.3),
        steps_of(start, three, lr=0.1, weight_decay=0.5),
        steps_of(normal(2, 2), [normal(2, 2, seed=seed) for seed in (1, 2, 3)], lr=0.1),
        steps_of(torch.zeros(3), [_TINY], **plain),
    ]
    _require_unequal(answer, adamw_, names=("betas", "eps", "weight_decay"))
    _require_kept(answer, 8 * _COUNT, "mvt", shaped="mv", lr=0.1)
    _require_t_counts_on(answer, adamw_, lr=0.1)
    return f"correct weights after each of {sum(steps)} steps · 8 bytes per weight"


# ------------------------------------------------------------------ 8.2: Lion


def _check_lion(answer: Step) -> str:
    steps_of = partial(_require_steps, answer, lion_)
    start = torch.tensor([1.0, -2.0, 0.5])
    signs = ([1.0, -1, 3, 1, -2, 1], [-0.37, 0.25, -2, -0.92, 2.4, 1])
    turned = [torch.tensor([1.0]), torch.tensor([-5.0])]  # only m = the first g outweighs the -5
    three = [normal(3, seed=seed) for seed in (1, 2, 3)]
    _require_in_place(answer)
    _require_own_state(answer, lr=0.1)
    steps = [
        steps_of(torch.zeros(3), [torch.tensor([0.5, -2.0, 0.0])], lr=1.0),
        steps_of(torch.zeros(1), turned, lr=1.0, betas=(0.9, 0.95)),
        steps_of(torch.zeros(6), map(torch.tensor, signs), lr=1.0, betas=(0.9, 0.95)),
        steps_of(torch.zeros(6), [normal(6, seed=n) for n in range(6)], lr=1.0, betas=(0.6, 0.9)),
        steps_of(start, three, lr=0.1, weight_decay=0.5),
        steps_of(normal(2, 2), [normal(2, 2, seed=seed) for seed in (1, 2, 3)], lr=0.1),
    ]
    _require_unequal(answer, lion_, names=("betas", "weight_decay"))
    _require_kept(answer, 4 * _COUNT, "m", shaped="m", lr=0.1)
    return f"correct weights after each of {sum(steps)} steps · sign(0) is 0 · 4 bytes per weight"


# ------------------------------------------------------------------ 8.3: the partition

BlockSize = Callable[[str, Sequence[int], int], int]
_HEAD = 8
_ACCEPTED: tuple[tuple[str, tuple[int, ...]], ...] = (  # names and shapes
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
    ("blocks.0.mixer.rel_bias", (32, 32)),
    ("blocks.0.mlp.router.weight", (8, 32)),
    ("blocks.0.bias.weight", (32, 32)),
    ("decoder.blocks.1.attention.query_key.weight", (64, 32)),
    ("blocks.0.attention.q_norm.weight", (8,)),
    ("blocks.0.post_norm.weight", (32,)),
    ("blocks.0.attention.output_gate.weight", (32, 32)),
    ("blocks.0.attention.query.weight", (20, 32)),
    ("blocks.0.attention.key.weight", (4, 32)),
)


def _check_block_size(answer: BlockSize) -> str:
    wider = ("attention.query.weight", (256, 96), 128)
    for name, shape, head in (*((*weight, _HEAD) for weight in _ACCEPTED), wider):
        call, size = f"block_size({name!r}, {shape}, {head})", torch.Size(shape)
        wanted = block_size(name, size, head)
        try:
            got = answer(name, size, head)
        except (LookupError, ValueError) as error:
            raise Wrong(f"{call} raised {type(error).__name__}, wanted {wanted:,}.") from None
        equal(call, got, wanted)
    for name, shape in _REFUSED:
        _require_refused_name(answer, name, shape)
    return (
        f"{len(_ACCEPTED) + 1} block sizes correct · {len(_REFUSED)} names refused, fused ones too"
    )


def _require_refused_name(answer: BlockSize, name: str, shape: tuple[int, ...]) -> None:
    call = f"block_size({name!r}, {shape}, {_HEAD})"
    try:
        got = answer(name, torch.Size(shape), _HEAD)
    except ValueError:
        return
    except (LookupError, TypeError, AttributeError, UnboundLocalError) as error:
        kind = type(error).__name__
        raise Wrong(f"{call} raised {kind} ({error}), wanted a ValueError.") from None
    raise Wrong(f"{call} gave {got!r}, wanted a ValueError.")


# ------------------------------------------------------------------ 8.4: Adam-mini


def _check_adam_mini(answer: Step) -> str:
    steps_of = partial(_require_steps, answer, adam_mini_)
    plain = {"lr": 0.1, "weight_decay": 0.0}
    two_rows = torch.tensor([[0.01, -0.02, 0.02], [0.0, 0.0, 6.0]])
    of_four = [normal(4, 2, seed=seed) for seed in (1, 2, 3)]
    two = [normal(2, 3, seed=seed) for seed in (4, 5)]
    vectors = [normal(3, seed=seed) for seed in (6, 7, 8)]
    _require_in_place(answer, size=1)
    _require_own_state(answer, size=2, lr=0.1)
    steps = [
        steps_of(torch.zeros(2, 3), [two_rows], size=3, **plain),
        steps_of(torch.zeros(4, 2), of_four, size=4, **plain),
        steps_of(normal(2, 3), two, size=3, **plain, eps=0.3),
        steps_of(normal(2, 3), two, size=3, **plain, betas=(0.6, 0.8)),
        steps_of(normal(2, 3), two, size=3, lr=0.1, weight_decay=0.5),
        steps_of(torch.zeros(3), vectors, size=1, **plain),
        steps_of(torch.zeros(3), vectors, size=3, **plain),
        steps_of(torch.zeros(3), [_TINY], size=1, **plain),
    ]
    _require_unequal(answer, adam_mini_, names=("betas", "eps", "weight_decay"), sizes=_SIZES)
    wanted = 4 * _COUNT + 4 * _COUNT // 30  # two blocks a row
    _require_kept(answer, wanted, "mvt", shaped="m", size=30, lr=0.1)
    _require_t_counts_on(answer, adam_mini_, size=1, lr=0.1)
    return (
        f"correct weights after each of {sum(steps)} steps · 4 bytes per weight and 4 per block: "
        f"{wanted:,} bytes, not AdamW's {8 * _COUNT:,}"
    )


# ------------------------------------------------------------------ 8.5: the step inside backward

Update = Callable[[Tensor], None]
InBackward = Callable[[Sequence[Tensor], Update], Callable[[], None]]
_LAYERS, _WIDTH, _VOCABULARY = 12, 32, 64


class _TiedTable(nn.Module):
    """A table used as both embedding and unembedding, with layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * normal(_VOCABULARY, _WIDTH))
        self.layers = nn.ParameterList(
            nn.Parameter(0.2 * normal(_WIDTH, _WIDTH, seed=n)) for n in range(_LAYERS)
        )

    def forward(self, tokens: Tensor, layers: int = _LAYERS) -> Tensor:
        x = self.table[tokens]
        for layer in list(self.layers)[:layers]:
            x = x + (x @ layer).tanh()
        return (x @ self.table.T).logsumexp(1).mean()


class _UpdateRecorder:
    """A model, with an `update` that counts its calls and, if asked to, keeps the gradients."""

    def __init__(self, keeps_gradients: bool = True, rate: float = 0.1) -> None:
        self.keeps_gradients, self.rate = keeps_gradients, rate
        self.model = _TiedTable()
        self.weights = list(self.model.parameters())
        self.calls: Counter[int] = Counter()
        self.gradients: dict[int, Tensor] = {}
        self.complete: set[Tensor] = set()  # weights whose gradient was in .grad
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self.complete.add)

    def update(self, weight: Tensor) -> None:
        number = next((n for n, w in enumerate(self.weights, 1) if w is weight), None)
        require(
            number is not None,
            f"update was called with {_kind(weight)}, which is not one of the weights.",
        )
        assert number is not None
        require(
            weight.grad is not None,
            f"after {self.calls.total()} updates, update(weight) was called for weight {number} of "
            f"{len(self.weights)} when its .grad was None: it was "
            f"{'freed before' if weight in self.complete else 'not stored yet'}.",
        )
        self.calls[number] += 1
        gradient: Any = weight.grad
        if self.keeps_gradients:
            self.gradients[number] = gradient
        with torch.no_grad():
            weight -= self.rate * gradient

    def backward(self, seed: int = 0, layers: int = _LAYERS) -> None:
        tokens = torch.randint(_VOCABULARY, (16,), generator=torch.Generator().manual_seed(seed))
        self.model(tokens, layers).backward()

    def update_counts(self) -> list[int]:
        return [self.calls[n] for n in range(1, len(self.weights) + 1)]

    def require_updates(self, case: str, wanted: list[int]) -> None:
        got = self.update_counts()
        require(got == wanted, f"{case}: the weights were updated {got} times, wanted {wanted}.")


def _hooked(
    answer: InBackward, keeps_gradients: bool = True
) -> tuple[_UpdateRecorder, Callable[[], None]]:
    recorder = _UpdateRecorder(keeps_gradients)
    end_step = answer(recorder.weights, recorder.update)
    missing = " Is there a return?" if end_step is None else ""
    require(
        callable(end_step),
        f"in_backward(weights, update) gave {_kind(end_step)}; wanted a function, "
        f"end_step.{missing}",
    )
    return recorder, end_step


def _check_in_backward(answer: InBackward) -> str:
    recorder, end_step = _hooked(answer)
    recorder.backward()
    recorder.require_updates("one backward", [1] * (_LAYERS + 1))
    _require_weights_of_an_ordinary_step(recorder)
    _require_no_gradient_left(recorder)
    end_step()
    try:
        recorder.backward(seed=1)
    except RuntimeError:
        raise Wrong("a second backward after end_step() raised; wanted updates.") from None
    recorder.require_updates("a second backward after end_step()", [2] * (_LAYERS + 1))
    most, largest = _most_gradients(answer)
    require(
        most <= 2 * largest,
        f"up to {most:,} bytes of gradients are alive in backward; wanted at most {2 * largest:,}, "
        f"the two parts of the tied table's gradient.",
    )
    _require_refused(recorder, "a further backward before end_step()")
    _require_refused(recorder, "another backward after a refusal and before end_step()")
    _require_refused_where_one_is_unused(answer)
    _require_the_same_gradient_refused(answer)
    _require_models_independent(answer)
    everything = sum(weight.nbytes for weight in recorder.weights)
    return (
        f"one update per weight, with the complete gradient · at most {most:,} of {everything:,} "
        f"bytes of gradients alive at once · a second gradient is refused"
    )


def _require_weights_of_an_ordinary_step(recorder: _UpdateRecorder) -> None:
    ordinary = _UpdateRecorder()
    ordinary.backward()
    for weight in ordinary.weights:
        ordinary.update(weight)
    pairs = zip(recorder.weights, ordinary.weights, strict=True)
    off = [n for n, (a, b) in enumerate(pairs, 1) if not torch.equal(a, b)]
    require(not off, f"weights {off} differ from an ordinary step after backward.")


def _require_no_gradient_left(recorder: _UpdateRecorder) -> None:
    left = {n: w.grad for n, w in enumerate(recorder.weights, 1) if w.grad is not None}
    if left:
        same = all(recorder.gradients[n] is gradient for n, gradient in left.items())
        which = "not freed after their update" if same else "set after their update"
        raise Wrong(
            f"{len(left)} of {len(recorder.weights)} gradients are alive after backward, {which}; "
            f"wanted none."
        )


def _require_refused(recorder: _UpdateRecorder, case: str, layers: int = _LAYERS) -> None:
    """Require a RuntimeError from a backward before end_step(), and no other effect."""
    before = [weight.detach().clone() for weight in recorder.weights]
    calls = recorder.calls.total()
    try:
        recorder.backward(seed=2, layers=layers)
    except RuntimeError:
        pass
    except Exception as error:
        raise Wrong(f"{case} raised {type(error).__name__}, wanted RuntimeError.") from None
    else:
        again = recorder.calls.total() - calls
        raise Wrong(f"{case} raised nothing, and made {again} updates; wanted RuntimeError.")
    changed = sum(not torch.equal(a, b) for a, b in zip(before, recorder.weights, strict=True))
    require(
        not changed,
        f"{case} changed {changed} of {len(before)} weights before it raised RuntimeError.",
    )
    left = [n for n, weight in enumerate(recorder.weights, 1) if weight.grad is not None]
    require(not left, f"{case} was refused, but weights {left} have a gradient after it.")


def _require_refused_where_one_is_unused(answer: InBackward) -> None:
    """The loss does not use the last layer: one gradient fewer than weights."""
    recorder, end_step = _hooked(answer)
    recorder.backward(layers=_LAYERS - 1)
    case = "a backward whose loss does not use the last weight"
    recorder.require_updates(case, [1] * _LAYERS + [0])
    _require_refused(recorder, f"{case}, and another before end_step(),", layers=_LAYERS - 1)
    try:
        end_step()
        recorder.backward(seed=3)
    except RuntimeError as error:
        raise Wrong(
            f"{case}, end_step() and a whole backward raised: {first_line(error)}."
        ) from None
    recorder.require_updates(f"{case}, end_step() and a whole backward", [2] * _LAYERS + [1])


def _require_the_same_gradient_refused(answer: InBackward) -> None:
    """Updates that change nothing: the second gradient has the values of the first."""
    recorder = _UpdateRecorder(rate=0.0)
    answer(recorder.weights, recorder.update)
    recorder.backward(seed=2)
    _require_refused(recorder, "a second backward with the same gradients before end_step()")


def _require_models_independent(answer: InBackward) -> None:
    """Two models, each with its own end_step."""
    first, _ = _hooked(answer)
    second, end_second = _hooked(answer)
    first.backward()
    second.backward()
    end_second()
    _require_refused(first, "another backward of a model after end_step() of a second model")


def _most_gradients(answer: InBackward) -> tuple[int, int]:
    """Return the most gradient bytes alive at once, and the bytes of the largest weight."""
    recorder, _ = _hooked(answer, keeps_gradients=False)
    trace = measure(recorder.backward, model=recorder.model)
    return most_of(trace, "gradients"), max(weight.nbytes for weight in recorder.weights)


def most_of(trace: Trace, category: str) -> int:
    """Return the most bytes of one category alive at once."""
    running = most = 0
    for event in trace.events:
        running += event.bytes if event.category == category else 0
        most = max(most, running)
    return most


# ------------------------------------------------------------------ the bill


def lion_in_bfloat16() -> Trace:
    """Day 7's step, with Lion and a bfloat16 momentum."""
    lion = of_all_weights(Lion, rounding="stochastic", moment_dtype=torch.bfloat16)
    return attention_kept(optimizer=lion)


DAY = Day(
    exercises=(
        checked("8.1", _check_adamw, adamw_, rebuilds=_LIBRARY),
        checked("8.2", _check_lion, lion_, rebuilds=_LIBRARY),
        checked("8.3", _check_block_size, block_size),
        checked("8.4", _check_adam_mini, adam_mini_, rebuilds=_LIBRARY),
        checked("8.5", _check_in_backward, in_backward, rebuilds=_LIBRARY),
    ),
    bill=Bill("day 8: Lion, momentum in bfloat16", lion_in_bfloat16),
)
