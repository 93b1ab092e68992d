"""Day 1: where memory goes."""

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import nn

from memlab.course import ledger
from memlab.course.bill import plain
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, equal, require
from memlab.course.ledger import FLOAT32
from memlab.course.properties import unchanged
from memlab.model import PRESETS, GPTConfig
from memlab.units import format_bytes

# ------------------------------------------------------------------ 1.1: weights


class _Shape(GPTConfig):
    """A config that does not give the answer away."""

    @property
    def parameters(self) -> int:
        raise Wrong("config.parameters is the number you are to find: count the matrices.")


_Shape.__name__ = GPTConfig.__name__  # what a learner reads in an error


def _shape(*numbers: int, tied: bool = True) -> GPTConfig:
    return _Shape(*numbers, tied=tied)


_SHAPES = (
    #      V  C  L  H KV hidden T
    _shape(10, 8, 1, 2, 2, 5, 4),
    _shape(10, 8, 3, 2, 2, 5, 4),
    _shape(10, 16, 3, 8, 2, 5, 4),
    _shape(10, 16, 3, 8, 2, 5, 4, tied=False),
)
_REAL_SHAPES = ("124m", "llama-2-7b", "llama-3-405b")


def _check_parameter_count(answer: Callable[[GPTConfig], int]) -> str:
    for shape in _SHAPES:
        equal(f"parameter_count of {_in_words(shape)}", answer(shape), _count(shape), "weights")
    for name in _REAL_SHAPES:
        shape = _Shape(**vars(PRESETS[name]))
        with torch.device("meta"):  # an answer may build the model: without memory
            got = answer(shape)
        equal(f"parameter_count of {name}", got, _count(shape), "weights")
    return f"{len(_SHAPES)} small shapes, {' · '.join(_REAL_SHAPES)}"


def _in_words(config: GPTConfig) -> str:
    """A shape in the letters of the course."""
    return (
        f"V={config.vocab_size} C={config.width} L={config.layers} H={config.heads} "
        f"KV={config.kv_heads} hidden={config.hidden}, {'tied' if config.tied else 'untied'},"
    )


def _count(config: GPTConfig) -> int:
    return GPTConfig(**vars(config)).parameters


def _without_groups(config: GPTConfig) -> int:
    return _count(replace(config, kv_heads=config.heads))


def _without_norms(config: GPTConfig) -> int:
    return _count(config) - (2 * config.layers + 1) * config.width


def _without_last_norm(config: GPTConfig) -> int:
    return _count(config) - config.width


def _one_norm_a_block(config: GPTConfig) -> int:
    return _count(config) - config.layers * config.width


def _always_tied(config: GPTConfig) -> int:
    return _count(replace(config, tied=True))


def _never_tied(config: GPTConfig) -> int:
    return _count(replace(config, tied=False))


def _two_mlp_matrices(config: GPTConfig) -> int:
    return _count(config) - config.layers * config.width * config.hidden


_PARAMETER_COUNT = Exercise(
    id="1.1",
    title="Count the weights",
    minutes=8,
    difficulty=1,
    hints=(
        "A matrix from width a to width b has a·b weights, a norm has one weight for each of the "
        "C features. Count the embedding, one block, and what comes after the blocks.",
        "Count apart what is there once (the embedding; a second one unless tied; the last norm) "
        "and what is there L times. Key and value together are 2·C·KV·D, a block's norms 2·C.",
        "embeddings = V·C if config.tied else 2·V·C. "
        "block = 2·C·C + 2·C·KV·D + 3·C·hidden + 2·C. How often does each count, and what comes "
        "after the last block?",
    ),
    reference=lambda config: _count(config),
    check=_check_parameter_count,
    wrong_answers=(
        WrongAnswer(
            _without_groups,
            "Key and value have config.kv_heads heads, not config.heads: queries share them.",
        ),
        WrongAnswer(_without_norms, "Each norm has C weights too: two in a block, one at the end."),
        WrongAnswer(_without_last_norm, "After the last block there is one more norm."),
        WrongAnswer(_one_norm_a_block, "A block has two norms: before attention and the MLP."),
        WrongAnswer(
            _always_tied, "Where config.tied is False, a second V × C matrix scores the tokens."
        ),
        WrongAnswer(
            _never_tied, "Where config.tied is True, one V × C matrix does both: it counts once."
        ),
        WrongAnswer(_two_mlp_matrices, "This MLP has three matrices: gate, up and down."),
    ),
)

# ------------------------------------------------------------------ 1.2: what stays

State = dict[str, int]
_STATE = ("parameters", "gradients", "optimizer_state")


class _Tied(nn.Module):
    """Two layers, one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _trained(
    model: nn.Module, steps: int = 1, **named: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **named)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


def _with_momentum() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    groups = [{"params": [parameter]} for parameter in model[0].parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def _half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    return model


def _cleared() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = _trained(nn.Linear(6, 2))
    optimizer.zero_grad()
    return model, optimizer


_TRAININGS: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "a model that was never trained": lambda: _trained(nn.Linear(6, 2), steps=0),
    "a model after one step": lambda: _trained(nn.Linear(6, 2)),
    "a model after zero_grad": _cleared,
    "a model with a frozen layer": lambda: _trained(_half_frozen()),
    "a bfloat16 model": lambda: _trained(nn.Linear(6, 2, dtype=torch.bfloat16)),
    "two layers that share their matrix": lambda: _trained(_Tied()),
    "AdamW with amsgrad": lambda: _trained(nn.Linear(6, 2), amsgrad=True),
    "SGD with momentum on half of a model with BatchNorm": _with_momentum,
}


def _check_state_bytes(answer: Callable[[nn.Module, torch.optim.Optimizer], State]) -> str:
    for name, make in _TRAININGS.items():
        model, optimizer = make()
        wanted = ledger.state_bytes(model, optimizer)
        with unchanged(f"state_bytes of {name}", model=model, optimizer=optimizer):
            got = answer(model, optimizer)
        require(
            isinstance(got, dict) and set(got) == set(_STATE),
            f"state_bytes gave {got!r}; wanted a dictionary of {', '.join(_STATE)}."
            f"{' Is there a return?' if got is None else ''}",
        )
        equal(f"state_bytes of {name}", {key: got[key] for key in _STATE}, wanted, "bytes")
    return f"{len(_TRAININGS)} trainings, every byte"


def _counted(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    size: Callable[[torch.Tensor], int] = lambda tensor: tensor.nbytes,
    counters: bool = True,
) -> State:
    """What a right answer does, with room for what a wrong one does otherwise."""
    parameters = list(model.parameters())
    state = [t for of_one in optimizer.state.values() for t in of_one.values()]
    return {
        "parameters": sum(size(p) for p in parameters),
        "gradients": sum(size(p.grad) for p in parameters if p.grad is not None),
        "optimizer_state": sum(size(t) for t in state if counters or t.ndim),
    }


def _elements(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return _counted(model, optimizer, size=torch.numel)


def _always_four(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return _counted(model, optimizer, size=lambda tensor: FLOAT32 * tensor.numel())


def _no_counters(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return _counted(model, optimizer, counters=False)


def _only_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    right = _counted(model, optimizer)
    names = ("exp_avg", "exp_avg_sq", "step")
    state = (of_one[n] for of_one in optimizer.state.values() for n in names if n in of_one)
    return right | {"optimizer_state": sum(tensor.nbytes for tensor in state)}


def _by_formula(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    bytes_ = sum(p.nbytes for p in model.parameters())
    return {"parameters": bytes_, "gradients": bytes_, "optimizer_state": 2 * bytes_}


def _gradients_of_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    right = _counted(model, optimizer)
    return right | {"gradients": right["parameters"] if optimizer.state else 0}


def _after_zero_grad(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    optimizer.zero_grad()
    return _counted(model, optimizer)


def _of_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = sum(p.grad.nbytes for p in trained if p.grad is not None)
    bytes_ = {"parameters": sum(p.nbytes for p in trained), "gradients": gradients}
    return _counted(model, optimizer) | bytes_


def _what_trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return _counted(model, optimizer) | {"parameters": trained}


def _buffers_too(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    right = _counted(model, optimizer)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return right | {"parameters": right["parameters"] + buffers}


def _by_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    right = _counted(model, optimizer)
    return right | {"parameters": sum(t.nbytes for t in model.state_dict().values())}


_STATE_BYTES = Exercise(
    id="1.2",
    title="Count what stays between steps",
    minutes=8,
    difficulty=2,
    hints=(
        "Three sums, each over tensors that you can lay your hands on now: which loop gives you "
        "the parameters, which the gradients, which the state?",
        "optimizer.state is a dictionary: for each parameter a dictionary of tensors. AdamW keeps "
        "exp_avg, exp_avg_sq and a counter called step; other settings keep more.",
        "parameters = sum(p.nbytes for p in model.parameters()); gradients the same over p.grad "
        "where it is not None. For the state two loops: over optimizer.state.values(), and over "
        "the values of each dictionary in it.",
    ),
    reference=ledger.state_bytes,
    check=_check_state_bytes,
    rebuilds=("memlab.course.ledger.state_bytes", "memlab.measure", "memlab.meter"),
    wrong_answers=(
        WrongAnswer(_elements, "These are numbers, not bytes: a float32 has four."),
        WrongAnswer(
            _always_four, "Not every number has four bytes: ask the tensor (.nbytes) for its own."
        ),
        WrongAnswer(
            _only_moments, "There may be more than the two moments: count whatever is in the state."
        ),
        WrongAnswer(_no_counters, "AdamW also keeps a counter of 4 bytes beside each tensor."),
        WrongAnswer(
            _by_formula, "Before the first step there is neither a gradient nor any Adam state."
        ),
        WrongAnswer(
            _gradients_of_all,
            "zero_grad throws gradients away, and a frozen layer has none: look at p.grad.",
        ),
        WrongAnswer(
            _after_zero_grad, "Only look: after a zero_grad there is nothing left to count."
        ),
        WrongAnswer(
            _of_the_optimizer,
            "An optimizer may have a part of the model only: parameters are the model's.",
        ),
        WrongAnswer(_what_trains, "A frozen layer's weights take memory, too."),
        WrongAnswer(_buffers_too, "Buffers are not parameters: nothing trains them."),
        WrongAnswer(
            _by_state_dict,
            "state_dict lists a shared matrix twice; model.parameters() gives it once.",
        ),
    ),
)

# ------------------------------------------------------------------ 1.3: what forward keeps

_ACTIVATION_CASES = (
    #         V  C  L  H KV hidden T      B  T
    (GPTConfig(10, 8, 1, 2, 2, 5, 4), 1, 1),
    (GPTConfig(10, 8, 1, 2, 2, 5, 4), 3, 4),
    (GPTConfig(10, 16, 1, 8, 2, 5, 4), 3, 4),
    (GPTConfig(10, 16, 3, 8, 2, 5, 4), 3, 4),
    (PRESETS["124m"], 8, 640),
)
BytesOf = Callable[[GPTConfig, int, int], int]


def _check_activation_bytes(answer: BytesOf) -> str:
    for config, batch, seq_len in _ACTIVATION_CASES:
        case = f"{_in_words(config)} {batch} × {seq_len} tokens,"
        got, wanted = (
            answer(config, batch, seq_len),
            ledger.activation_bytes(config, batch, seq_len),
        )
        equal(f"activation_bytes of {case}", got, wanted, f"bytes{_off(got, wanted)}")
    return f"{len(_ACTIVATION_CASES)} cases to the byte, the last {format_bytes(wanted)}"


def _off(got: Any, wanted: int) -> str:
    """How far off, in the numbers that a learner counts in."""
    if type(got) is not int or got == wanted:
        return ""
    return f": {abs(got - wanted) / FLOAT32:,g} numbers too {'few' if got < wanted else 'many'}"


def _activations_but(**changed: float) -> BytesOf:
    """The right sum with some of its factors changed."""

    def answer(config: GPTConfig, batch: int, seq_len: int) -> int:
        factor = {"bytes": 4, "norms": 2, "last_norm": 1, "mlp": 4, "logits": 1, "heads": 1}
        factor |= {"kv_width": config.head_width, "losses": 1} | changed
        C, norm = config.width, 2 * config.width + 1
        attention = (
            2 * C + 2 * config.kv_heads * factor["kv_width"] + factor["heads"] * config.heads
        )
        block = factor["norms"] * norm + attention + 2 * C + factor["mlp"] * config.hidden
        ends = C + factor["last_norm"] * norm + factor["logits"] * config.vocab_size
        numbers = batch * seq_len * (config.layers * block + ends) + factor["losses"]
        return int(factor["bytes"] * numbers)

    return answer


def _loss_per_token(config: GPTConfig, batch: int, seq_len: int) -> int:
    return _activations_but(losses=batch * seq_len)(config, batch, seq_len)


def _last_norm_in_blocks(config: GPTConfig, batch: int, seq_len: int) -> int:
    times = config.layers  # of the last norm, in place of one
    return _activations_but(last_norm=times)(config, batch, seq_len)


def _one_block_only(config: GPTConfig, batch: int, seq_len: int) -> int:
    return ledger.activation_bytes(replace(config, layers=1), batch, seq_len)


def _all_heads_alike(config: GPTConfig, batch: int, seq_len: int) -> int:
    return ledger.activation_bytes(replace(config, kv_heads=config.heads), batch, seq_len)


def _one_sequence(config: GPTConfig, batch: int, seq_len: int) -> int:
    return ledger.activation_bytes(config, 1, seq_len)


def _with_scores(config: GPTConfig, batch: int, seq_len: int) -> int:
    scores = FLOAT32 * batch * config.heads * seq_len**2 * config.layers
    return ledger.activation_bytes(config, batch, seq_len) + scores


_ACTIVATION_BYTES = Exercise(
    id="1.3",
    title="Count what forward keeps",
    minutes=15,
    difficulty=3,
    hints=(
        "Begin with one token and one block and add up the rows of the table above; every number "
        "in it is a float32. Then multiply by tokens, and the block's part by L.",
        "A block keeps, for each token: 2·C sums, 4·C + 2 for the two norms, 2·C + 2·KV·D + H in "
        "attention, 4·hidden in the MLP. Outside: C for the embedding, 2·C + 1 for the last norm, "
        "V for the log-probabilities, and the loss, one number in all.",
        "block = 8·C + 2·KV·D + 4·hidden + H + 2; ends = 3·C + 1 + V. The block counts L times, "
        "both count for every token; then the loss, and four bytes each.",
    ),
    reference=ledger.activation_bytes,
    check=_check_activation_bytes,
    rebuilds=("memlab.course.ledger.activation_bytes",),
    wrong_answers=(
        WrongAnswer(_activations_but(bytes=1), "These are numbers: a float32 has four bytes."),
        WrongAnswer(_activations_but(losses=0), "The loss itself is kept too: 4 bytes in all."),
        WrongAnswer(_loss_per_token, "The loss is one number in all, not one for each token."),
        WrongAnswer(
            _activations_but(norms=1),
            "A norm is missing: there are two in a block, one at the end.",
        ),
        WrongAnswer(
            _last_norm_in_blocks, "The last norm is outside of the blocks: it counts once."
        ),
        WrongAnswer(
            _activations_but(heads=0), "Attention keeps its log-sum-exp, too: H numbers a token."
        ),
        WrongAnswer(
            _activations_but(kv_width=1), "A key is D numbers wide, and so is a value: KV · D each."
        ),
        WrongAnswer(
            _activations_but(logits=2), "Of the logits, one tensor is kept until backward."
        ),
        WrongAnswer(_one_sequence, "Every sequence of the batch keeps its own activations."),
        WrongAnswer(
            _all_heads_alike, "Keys and values have kv_heads heads, however many ask them."
        ),
        WrongAnswer(_one_block_only, "Every one of the L blocks keeps its activations."),
        WrongAnswer(
            _activations_but(logits=0), "The logits (as log-probabilities, V a token) are missing."
        ),
        WrongAnswer(
            _activations_but(mlp=3),
            "The MLP keeps four tensors of width hidden: gate, silu(gate), up and their product.",
        ),
        WrongAnswer(
            _with_scores, "Fused attention never stores the T × T scores, only H numbers a token."
        ),
    ),
)

# ------------------------------------------------------------------ 1.4: the peak

_PEAK_CASES = (
    ("tiny, 8 × 64 tokens", PRESETS["tiny"], 8, 64),
    ("25m, 4 × 256 tokens", PRESETS["25m"], 4, 256),
    ("124m, 8 × 640 tokens", PRESETS["124m"], 8, 640),
    ("llama-2-7b, 1 × 4096 tokens", PRESETS["llama-2-7b"], 1, 4096),
)
TOLERANCE = 0.005  # of the peak: inputs, tables of angles and counters may be left out


def _check_peak_bytes(answer: BytesOf) -> str:
    gaps = []
    for name, config, batch, seq_len in _PEAK_CASES:
        got = answer(config, batch, seq_len)
        require(
            isinstance(got, Real) and not isinstance(got, bool) and isfinite(got),
            f"peak_bytes of {name} gave {got!r}; wanted a number of bytes.",
        )
        wanted = ledger.start_of_backward_bytes(config, batch, seq_len)
        gaps.append(abs(got - wanted) / wanted)
        require(
            gaps[-1] <= TOLERANCE,
            # Rounded: with or without what is small, one mistake has one message.
            f"peak_bytes of {name} gave {got / wanted:.2f} × the {format_bytes(wanted)} that are "
            f"alive.",
        )
    return f"{len(_PEAK_CASES)} steps, at most {max(gaps):.3%} off"


def _peak_of(state: int, temporaries: int, activations: int = 1) -> BytesOf:
    """`state` bytes a weight, `temporaries` tensors as large as the logits."""

    def answer(config: GPTConfig, batch: int, seq_len: int) -> int:
        logits = FLOAT32 * batch * seq_len * config.vocab_size
        kept = activations * ledger.activation_bytes(config, batch, seq_len)
        return state * config.parameters + kept + temporaries * logits

    return answer


_PEAK_BYTES = Exercise(
    id="1.4",
    title="Say the peak before it happens",
    minutes=8,
    difficulty=2,
    hints=(
        "Stop the step at the moment when backward begins, and list what is alive: of the four "
        "things that the ledger has so far, one is not there yet.",
        "Weights and both moments of Adam (12 bytes a weight), all activations, and no gradients. "
        "Then backward's first two tensors, each as large as the logits: B·T·V numbers.",
        "logits = 4 * batch * seq_len * config.vocab_size, of which backward makes two. The other "
        "two terms are 12 * parameter_count(config) and what 1.3 counts.",
    ),
    reference=ledger.start_of_backward_bytes,
    check=_check_peak_bytes,
    rebuilds=("memlab.course.ledger.start_of_backward_bytes",),
    wrong_answers=(
        WrongAnswer(
            _peak_of(state=16, temporaries=0),
            "Not all of it is alive at once: gradients come while activations go, and backward "
            "makes tensors of its own.",
        ),
        WrongAnswer(
            _peak_of(state=12, temporaries=0),
            "Backward begins by making two tensors as large as the logits.",
        ),
        WrongAnswer(
            _peak_of(state=12, temporaries=1),
            "Backward makes two tensors as large as the logits, not one.",
        ),
        WrongAnswer(
            _peak_of(state=16, temporaries=2),
            "When backward begins, there is no gradient of a weight yet.",
        ),
        WrongAnswer(
            _peak_of(state=4, temporaries=2),
            "From the second step on Adam's two moments are there.",
        ),
        WrongAnswer(
            _peak_of(state=8, temporaries=2), "Adam has two moments, of four bytes a weight each."
        ),
        WrongAnswer(
            _peak_of(state=12, temporaries=2, activations=0), "What forward keeps is missing."
        ),
        WrongAnswer(
            _peak_of(state=16, temporaries=0, activations=0), "The activations are missing."
        ),
    ),
)

# ------------------------------------------------------------------ 1.5: the largest batch


class _Counting:
    """`bytes_at`, which counts how often it is asked, and notes the largest batch."""

    def __init__(self, bytes_at: Callable[[int], int], most: int) -> None:
        self.asked = self.largest = 0
        self._bytes_at = bytes_at
        self._most = most

    def __call__(self, batch: int) -> int:
        self.asked += 1
        if self.asked > self._most:
            raise _TooOften
        require(
            isinstance(batch, int) and batch >= 1,
            f"bytes_at was asked for a batch of {batch!r}; it takes integers from 1.",
        )
        self.largest = max(self.largest, batch)
        return self._bytes_at(batch)


class _TooOften(Exception):  # noqa: N818 - caught where the case is known
    pass


_BATCH_CASES: dict[str, tuple[Callable[[int], int], int, int]] = {
    # bytes_at, budget, and the most sequences that fit
    "10 bytes a sequence, in 55": (lambda batch: 10 * batch, 55, 5),
    "10 bytes a sequence, in 50": (lambda batch: 10 * batch, 50, 5),
    "100 bytes and 10 a sequence, in 134": (lambda batch: 100 + 10 * batch, 134, 3),
    "100 bytes and 10 a sequence, in 90": (lambda batch: 100 + 10 * batch, 90, 0),
    "100 bytes and 10 a sequence, but at least 150, in 200": (
        lambda batch: max(150, 100 + 10 * batch),
        200,
        10,
    ),
    "64 bytes for every 8 sequences or less, in 200": (lambda batch: 64 * -(-batch // 8), 200, 24),
    "100 bytes and the square of the batch, in 1000": (lambda batch: 100 + batch**2, 1000, 30),
    "1 byte a sequence, in 64": (lambda batch: batch, 64, 64),
    "1 byte for every 3 sequences, in 7": (lambda batch: -(-batch // 3), 7, 21),
    "1 byte a sequence, in 10000000": (lambda batch: batch, 10_000_000, 10_000_000),
    "5 bytes a sequence, in 200000004": (lambda batch: 5 * batch, 200_000_004, 40_000_000),
}
MOST_CALLS = 60


def _check_largest_batch(answer: Callable[[Callable[[int], int], int], int]) -> str:
    calls = 0
    for name, (bytes_at, budget, wanted) in _BATCH_CASES.items():
        counting = _Counting(bytes_at, MOST_CALLS)
        try:
            got = answer(counting, budget)
        except _TooOften:
            raise Wrong(
                f"largest_batch with {name} bytes measured more than {MOST_CALLS} times."
            ) from None
        equal(f"largest_batch with {name} bytes", got, wanted, "sequences")
        require(
            counting.largest <= max(1, 2 * wanted),
            f"largest_batch with {name} bytes measured a batch of {counting.largest:,}, where "
            f"{wanted:,} fit; wanted at most twice what fits: a measurement far beyond takes "
            f"the machine down.",
            evidence=(name, "too large"),
        )
        calls = max(calls, counting.asked)
    return f"{len(_BATCH_CASES)} budgets, at most {calls} measurements"


def _by_share(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    return budget_bytes // bytes_at(1)


def _by_line(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    slope = bytes_at(2) - bytes_at(1)
    fixed = bytes_at(1) - slope
    return max(0, (budget_bytes - fixed) // slope) if slope else 1


def _by_counting(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    batch = 0
    while bytes_at(batch + 1) <= budget_bytes:
        batch += 1
    return batch


def _strictly_below(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    return ledger.largest_batch(bytes_at, budget_bytes - 1)


def _first_that_fails(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    return ledger.largest_batch(bytes_at, budget_bytes) + 1


def _at_least_one(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    return max(1, ledger.largest_batch(bytes_at, budget_bytes))


def _below_a_bound(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    return min(1000, ledger.largest_batch(bytes_at, budget_bytes))


def _powers_of_two(bytes_at: Callable[[int], int], budget_bytes: int) -> int:
    batch = 0
    while bytes_at(max(1, 2 * batch)) <= budget_bytes:
        batch = max(1, 2 * batch)
    return batch


_LARGEST_BATCH = Exercise(
    id="1.5",
    title="Find the largest batch that fits",
    minutes=10,
    difficulty=2,
    hints=(
        "A measurement is dear: double the batch until it no longer fits.",
        "Then you know one batch that fits and one that does not. Ask for the middle, and keep "
        "the half in which the answer must lie, until the two are neighbours.",
        "fits, too_many = 0, 1; while bytes_at(too_many) <= budget_bytes: fits, too_many = "
        "too_many, 2 * too_many. Then, while too_many - fits > 1, which of the two does "
        "middle = (fits + too_many) // 2 replace?",
    ),
    reference=ledger.largest_batch,
    check=_check_largest_batch,
    rebuilds=("memlab.course.ledger.largest_batch",),
    wrong_answers=(
        WrongAnswer(
            _by_share, "A step has bytes that no batch changes: twice the batch is not twice them."
        ),
        WrongAnswer(
            _by_line,
            "With few tokens the peak lies elsewhere and does not grow yet: a straight line "
            "through the first two batches misses that.",
        ),
        WrongAnswer(_by_counting, "Counting up one by one would take all day: halve instead."),
        WrongAnswer(_strictly_below, "A step that takes the budget to the last byte fits."),
        WrongAnswer(_first_that_fails, "This is the first batch that does not fit."),
        WrongAnswer(_at_least_one, "If not even one sequence fits, the answer is 0."),
        WrongAnswer(_below_a_bound, "There is no upper bound to begin with: find one by doubling."),
        WrongAnswer(_powers_of_two, "Between the last power of two and the next there is more."),
    ),
)

DAY = Day(
    exercises=(_PARAMETER_COUNT, _STATE_BYTES, _ACTIVATION_BYTES, _PEAK_BYTES, _LARGEST_BATCH),
    bill=Bill("day 1: plain", plain),
)
