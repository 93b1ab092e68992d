"""Day 1: where memory goes."""

from collections.abc import Callable
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import nn

from memlab.course import ledger
from memlab.course.bill import plain
from memlab.course.exercises import Bill, Day, Exercise, Wrong, equal, require
from memlab.course.properties import dimensions, same_bytes, unchanged
from memlab.course.solutions import body, mistakes, solution
from memlab.metering.profiler_recording import record
from memlab.model import PRESETS, GPTConfig
from memlab.units import format_bytes

# ------------------------------------------------------------------ 1.1: weights


class _Shape(GPTConfig):
    """A config without the number of parameters."""

    @property
    def parameters(self) -> int:
        raise Wrong("config.parameters is the answer to this exercise: count the matrices.")


_Shape.__name__ = GPTConfig.__name__  # an error message shows it to the learner

_SHAPES = (
    #      V  C  L  H KV hidden T
    _Shape(10, 8, 1, 2, 2, 5, 4, tied=True),
    _Shape(10, 8, 3, 2, 2, 5, 4, tied=True),
    _Shape(10, 16, 3, 8, 2, 5, 4, tied=True),
    _Shape(10, 16, 3, 8, 2, 5, 4, tied=False),
)
_REAL_SHAPES = ("124m", "llama-2-7b", "llama-3-405b")


def _check_parameter_count(answer: Callable[[GPTConfig], int]) -> str:
    for shape in _SHAPES:
        call, got = f"parameter_count of {_in_words(shape)}", []
        allocated = record(lambda shape=shape, got=got: got.append(answer(shape))).peak_bytes
        equal(call, got.pop(), _count(shape), "weights")
        require(
            allocated < 4 * _count(shape),
            f"{call} allocates {allocated:,} bytes, as the model does; wanted the count without "
            f"the model's memory.",
            evidence=(call, "builds the model"),
        )
    for name in _REAL_SHAPES:
        shape = _Shape(**vars(PRESETS[name]))
        with torch.device("meta"):  # an answer may build the model
            got = answer(shape)
        equal(f"parameter_count of {name}", got, _count(shape), "weights")
    return f"{len(_SHAPES)} small models · {' · '.join(_REAL_SHAPES)}"


def _in_words(config: GPTConfig) -> str:
    """A shape in the course's letters."""
    return f"{dimensions(config)}, {'tied' if config.tied else 'untied'},"


def _count(config: GPTConfig) -> int:
    return GPTConfig(**vars(config)).parameters


_PARAMETER_COUNT = Exercise(
    id="1.1",
    title="Count the weights",
    minutes=8,
    difficulty=1,
    hints=(
        "A matrix from width a to width b has a·b weights, a norm has one weight for each of the "
        "C features. Count the embedding, one block, and the parts after the blocks.",
        "Some parts exist once: the embedding, a second one unless tied, the last norm. A block "
        "exists L times. Key and value together have 2·C·KV·D weights, the norms of a block 2·C.",
        "embeddings = V·C if config.tied else 2·V·C. "
        "block = 2·C·C + 2·C·KV·D + 3·C·intermediate_size + 2·C. How often does each count, and "
        "which part comes after the last block?",
    ),
    reference=solution("1.1"),
    check=_check_parameter_count,
    wrong_answers=mistakes(
        "1.1",
        (
            "Key and value have config.kv_heads heads, not config.heads: query heads share them.",
            ("config.kv_heads", "config.heads"),
        ),
        (
            "Each norm has C weights, too: two norms in a block, one at the end.",
            ("norms = 2 * C", "norms = 0"),
            ("norms) + C", "norms)"),
        ),
        ("After the last block there is one more norm.", ("norms) + C", "norms)")),
        (
            "A block has two norms: one before attention, one before the MLP.",
            ("norms = 2 * C", "norms = C"),
        ),
        (
            "If config.tied is False, there is a second V × C matrix for the logits.",
            ("(1 if config.tied else 2)", "1"),
        ),
        (
            "If config.tied is True, the embedding also computes the logits: count one matrix.",
            ("(1 if config.tied else 2)", "2"),
        ),
        ("This MLP has three matrices: gate, up and down.", ("mlp = 3", "mlp = 2")),
        (
            "You built the model. Count its weights with the formula, or on the meta device.",
            body("parameter_count", "return sum(p.numel() for p in GPT(config).parameters())"),
        ),
    ),
)

# ------------------------------------------------------------------ 1.2: what stays

State = dict[str, int]
Training = tuple[nn.Module, torch.optim.Optimizer]
_STATE = ("parameters", "gradients", "optimizer_state")


class _SharedMatrix(nn.Module):
    """Two layers, one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _trained(model: nn.Module, steps: int = 1, **settings: bool) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


def _with_momentum() -> Training:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    groups = [{"params": [parameter]} for parameter in model[0].parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def _half_frozen() -> Training:
    """One layer is frozen before the step, and one bias after it, which keeps its gradient."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    trained = _trained(model)
    model[1].bias.requires_grad_(False)
    return trained


def _of_two_dtypes() -> Training:
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 2, dtype=torch.bfloat16)])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, torch.optim.SGD(model.parameters())


def _after_zero_grad() -> Training:
    model, optimizer = _trained(nn.Linear(6, 2))
    optimizer.zero_grad()
    return model, optimizer


def _with_master_weights() -> Training:
    """The optimizer steps float32 copies, so none of its state is of a parameter of the model."""
    model = nn.Linear(6, 2, dtype=torch.bfloat16)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer = torch.optim.AdamW(masters, foreach=False)
    optimizer.step()
    return model, optimizer


_TRAININGS: dict[str, Callable[[], Training]] = {
    "a model that was never trained": lambda: _trained(nn.Linear(6, 2), steps=0),
    "a model after one step": lambda: _trained(nn.Linear(6, 2)),
    "a model after zero_grad": _after_zero_grad,
    "a model with a frozen layer": _half_frozen,
    "a bfloat16 model": lambda: _trained(nn.Linear(6, 2, dtype=torch.bfloat16)),
    "a float32 layer and a bfloat16 layer": _of_two_dtypes,
    "a bfloat16 model with float32 master weights": _with_master_weights,
    "two layers that share their matrix": lambda: _trained(_SharedMatrix()),
    "AdamW with amsgrad": lambda: _trained(nn.Linear(6, 2), amsgrad=True),
    "SGD with momentum for half of a model with BatchNorm": _with_momentum,
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
    return f"the bytes of {len(_TRAININGS)} models and optimizers"


_PARAMETERS = "list(model.parameters())"
_PARAMETER_BYTES = "sum(p.nbytes for p in parameters)"
_GRADIENTS = "[p.grad for p in parameters if p.grad is not None]"
_MOMENTS = "('exp_avg', 'exp_avg_sq', 'step')"

_STATE_BYTES = Exercise(
    id="1.2",
    title="Count what stays between steps",
    minutes=8,
    difficulty=2,
    hints=(
        "Write three sums. Which loop gives you the parameters, which the gradients, and which the "
        "optimizer state?",
        "optimizer.state is a dictionary with a dictionary of tensors for each parameter. AdamW "
        "keeps exp_avg, exp_avg_sq and a counter called step; other settings keep more.",
        "parameters = sum(p.nbytes for p in model.parameters()). For the gradients, sum "
        "p.grad.nbytes where p.grad is not None. The state needs two loops: over "
        "optimizer.state.values(), and over the values of each dictionary in it.",
    ),
    reference=ledger.state_bytes,
    check=_check_state_bytes,
    rebuilds=("memlab.course.ledger.state_bytes", "memlab.measure", "memlab.meter"),
    wrong_answers=mistakes(
        "1.2",
        (
            "You counted elements, not bytes: a float32 element has four bytes.",
            (".nbytes", ".numel()"),
        ),
        (
            "Not every element has four bytes: use the tensor's own .nbytes.",
            (".nbytes", ".numel() * 4"),
        ),
        (
            "There may be more than the two moments: count every tensor in the state.",
            ("tensor in entry.values()", f"name, tensor in entry.items() if name in {_MOMENTS}"),
        ),
        (
            "AdamW also keeps a 4-byte step counter for each parameter tensor.",
            ("entry.values()]", "entry.values() if tensor.ndim]"),
        ),
        (
            "Before the first step there are neither gradients nor Adam's state.",
            (_GRADIENTS, "parameters"),
            ("state = [", "state = 2 * parameters or ["),
        ),
        (
            "zero_grad frees gradients, and a frozen layer has none: check p.grad.",
            (_GRADIENTS, "parameters if optimizer.state else []"),
        ),
        (
            "Do not change the model: after zero_grad there is no gradient left to count.",
            ("    parameters =", "    optimizer.zero_grad()\n    parameters ="),
        ),
        (
            "An optimizer may update only part of the model: count all of the model's parameters.",
            (_PARAMETERS, '[p for group in optimizer.param_groups for p in group["params"]]'),
        ),
        (
            "The weights of a frozen layer use memory, too.",
            (_PARAMETERS, "[p for p in model.parameters() if p.requires_grad]"),
        ),
        (
            "Buffers are not parameters: they are not trained.",
            (_PARAMETER_BYTES, "sum(p.nbytes for p in [*parameters, *model.buffers()])"),
        ),
        (
            "state_dict lists a shared matrix twice; model.parameters() lists it once.",
            (_PARAMETER_BYTES, "sum(p.nbytes for p in model.state_dict().values())"),
        ),
    ),
)

# ------------------------------------------------------------------ 1.3: activations

_ACTIVATION_CASES = (
    #         V  C  L  H KV hidden T      B  T
    (GPTConfig(10, 8, 1, 2, 2, 5, 4), 1, 1),
    (GPTConfig(10, 8, 1, 2, 2, 5, 4), 3, 4),
    (GPTConfig(10, 16, 1, 8, 2, 5, 4), 3, 4),
    (GPTConfig(10, 16, 3, 8, 2, 5, 4), 3, 4),
    (GPTConfig(10, 16, 3, 8, 2, 5, 4, tied=False), 3, 4),
    (PRESETS["124m"], 8, 640),
)
BytesOf = Callable[[GPTConfig, int, int], int]


def _check_activation_bytes(answer: BytesOf) -> str:
    for config, batch, seq_len in _ACTIVATION_CASES:
        case = f"activation_bytes of {_in_words(config)} {batch} × {seq_len} tokens,"
        got = answer(config, batch, seq_len)
        wanted = ledger.activation_bytes(config, batch, seq_len)
        same_bytes(case, got, wanted, {"elements": 4})
    return f"the bytes of {len(_ACTIVATION_CASES)} cases, the last with {format_bytes(wanted)}"


_ACTIVATION_BYTES = Exercise(
    id="1.3",
    title="Count the activations",
    minutes=15,
    difficulty=3,
    hints=(
        "Start with one token and one block: add up the rows of the table above. Every element is "
        "a float32. Then multiply by the number of tokens, and the block's part by L.",
        "Per token, a block saves 2·C elements of residual sums, 4·C + 2 for the two norms, "
        "2·C + 2·KV·D + H in attention, and 4·intermediate_size in the MLP. Outside the blocks: C "
        "for the embedding, 2·C + 1 for the last norm, V for the log-probabilities, and one "
        "element for the loss.",
        "Per token: block = 8·C + 2·KV·D + 4·intermediate_size + H + 2, and ends = 3·C + 1 + V. "
        "Multiply block by L, add ends, and multiply by the number of tokens. Then add the loss, "
        "and multiply by four bytes.",
    ),
    reference=ledger.activation_bytes,
    check=_check_activation_bytes,
    rebuilds=("memlab.course.ledger.activation_bytes",),
    wrong_answers=mistakes(
        "1.3",
        ("You counted elements: a float32 element has four bytes.", ("return 4 * (", "return (")),
        ("The loss is saved, too: 4 bytes in all.", ("ends) + 1)", "ends))")),
        ("The loss is one element in all, not one per token.", ("+ ends) + 1)", "+ ends + 1))")),
        ("A norm is missing: there are two in a block, one at the end.", ("2 * norm", "norm")),
        (
            "The last norm is outside the blocks: count it once.",
            ("2 * norm", "3 * norm"),
            ("C + norm + config", "C + config"),
        ),
        (
            "Attention saves its log-sum-exp, too: H elements per token.",
            (" + config.heads\n", "\n"),
        ),
        (
            "A key and a value have D elements per head: KV · D each.",
            ("config.kv_heads * config.head_dim", "config.kv_heads"),
        ),
        (
            "Only one tensor as large as the logits is saved for backward.",
            ("+ config.vocab_size", "+ 2 * config.vocab_size"),
        ),
        ("Every sequence of the batch has its own activations.", ("batch * seq_len", "seq_len")),
        (
            "Keys and values have kv_heads heads; only the queries have config.heads.",
            ("config.kv_heads", "config.heads"),
        ),
        ("Each of the L blocks saves its activations.", ("config.layers * block", "block")),
        (
            "The logits (as log-probabilities, V elements per token) are missing.",
            (" + config.vocab_size", ""),
        ),
        (
            "The MLP saves four tensors: gate, silu(gate), up and the product of the last two.",
            ("4 * config.intermediate_size", "3 * config.intermediate_size"),
        ),
        (
            "Fused attention never stores the T × T scores, only H elements per token.",
            ("+ config.heads\n", "+ config.heads * (1 + seq_len)\n"),
        ),
    ),
)

# ------------------------------------------------------------------ 1.4: the peak

_PEAK_CASES = (
    ("tiny, 8 × 64 tokens", PRESETS["tiny"], 8, 64),
    ("25m, 4 × 256 tokens", PRESETS["25m"], 4, 256),
    ("25m, 1 × 16 tokens", PRESETS["25m"], 1, 16),
    ("124m, 8 × 640 tokens", PRESETS["124m"], 8, 640),
    ("llama-2-7b, 1 × 4096 tokens", PRESETS["llama-2-7b"], 1, 4096),
)
TOLERANCE = 0.005  # of the peak: an answer may leave out inputs, tables of angles and counters


def _check_peak_bytes(answer: BytesOf) -> str:
    gaps = []
    for name, config, batch, seq_len in _PEAK_CASES:
        got: Any = answer(config, batch, seq_len)
        require(
            isinstance(got, Real) and not isinstance(got, bool) and isfinite(got),
            f"peak_bytes of {name} gave {got!r}; wanted a number of bytes.",
        )
        wanted = ledger.start_of_backward_bytes(config, batch, seq_len)
        gaps.append(abs(got - wanted) / wanted)
        require(
            gaps[-1] <= TOLERANCE,
            # Rounded: a mistake has one message, with or without the small parts.
            f"peak_bytes of {name} gave {got / wanted:.2f} × the wanted {format_bytes(wanted)}.",
        )
    return f"the peaks of {len(_PEAK_CASES)} steps, at most {max(gaps):.3%} off"


_ADAMS, _TEMPORARIES = "+ 8 * parameter_count(config)", " + 2 * logits"
_KEPT = "activation_bytes(config, batch, seq_len)"

_PEAK_BYTES = Exercise(
    id="1.4",
    title="Predict the peak",
    minutes=8,
    difficulty=2,
    hints=(
        "List the tensors alive when backward begins. Which of weights, gradients, optimizer state "
        "and activations does not exist yet?",
        "Weights, Adam's two moments (12 bytes per weight) and all activations are alive, but no "
        "gradients. Add backward's first two tensors, each as large as the logits: B·T·V "
        "elements.",
        "logits = 4 * batch * seq_len * config.vocab_size; backward allocates two such tensors. "
        "The other two terms are 12 * parameter_count(config) and the activation bytes of 1.3.",
    ),
    reference=ledger.start_of_backward_bytes,
    check=_check_peak_bytes,
    rebuilds=("memlab.course.ledger.start_of_backward_bytes",),
    wrong_answers=mistakes(
        "1.4",
        (
            "Gradients and activations are not all alive at once: backward allocates gradients "
            "while it frees activations. It also allocates temporaries.",
            (_ADAMS, "+ 12 * parameter_count(config)"),
            (_TEMPORARIES, ""),
        ),
        ("Backward begins with two temporaries as large as the logits.", (_TEMPORARIES, "")),
        (
            "Backward allocates two tensors as large as the logits, not one.",
            (_TEMPORARIES, " + logits"),
        ),
        (
            "When backward begins, no weight has a gradient yet.",
            (_ADAMS, "+ 12 * parameter_count(config)"),
        ),
        ("From the second step on, Adam's two moments are alive.", (_ADAMS, "")),
        (
            "Four bytes per weight are missing. The weights have four, and Adam's two moments four "
            "each.",
            (_ADAMS, "+ 4 * parameter_count(config)"),
        ),
        ("Add the activations that forward saves.", (f"{_KEPT} + ", "")),
    ),
)

# ------------------------------------------------------------------ 1.5: the largest batch


class _BytesAt:
    """`bytes_at`, with a count of its calls and the largest batch."""

    def __init__(self, bytes_at: Callable[[int], int]) -> None:
        self.calls = self.largest = 0
        self._bytes_at = bytes_at

    def __call__(self, batch: int) -> int:
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise _TooManyCalls
        require(
            isinstance(batch, int) and batch >= 1,
            f"bytes_at was called with a batch of {batch!r}; wanted an integer of at least 1.",
        )
        self.largest = max(self.largest, batch)
        return self._bytes_at(batch)


class _TooManyCalls(Exception):  # noqa: N818 - the check, which knows the case, catches it
    pass


MOST_CALLS = 60
_BATCH_CASES: dict[str, tuple[Callable[[int], int], int, int]] = {
    # bytes_at, budget, and the largest batch that fits
    "10 bytes per sequence, budget 55": (lambda batch: 10 * batch, 55, 5),
    "10 bytes per sequence, budget 50": (lambda batch: 10 * batch, 50, 5),
    "100 bytes plus 10 per sequence, budget 134": (lambda batch: 100 + 10 * batch, 134, 3),
    "100 bytes plus 10 per sequence, budget 90": (lambda batch: 100 + 10 * batch, 90, 0),
    "100 bytes plus 10 per sequence but at least 150 in all, budget 200": (
        lambda batch: max(150, 100 + 10 * batch),
        200,
        10,
    ),
    "64 bytes per 8 sequences, rounded up, budget 200": (
        lambda batch: 64 * -(-batch // 8),
        200,
        24,
    ),
    "100 bytes plus the square of the batch, budget 1,000": (
        lambda batch: 100 + batch**2,
        1000,
        30,
    ),
    "1 byte per sequence, budget 64": (lambda batch: batch, 64, 64),
    "1 byte per 3 sequences, rounded up, budget 7": (lambda batch: -(-batch // 3), 7, 21),
    "1 byte per sequence, budget 10,000,000": (lambda batch: batch, 10_000_000, 10_000_000),
    "5 bytes per sequence, budget 200,000,004": (lambda batch: 5 * batch, 200_000_004, 40_000_000),
}


def _check_largest_batch(answer: Callable[[Callable[[int], int], int], int]) -> str:
    calls = 0
    for name, (bytes_at, budget, wanted) in _BATCH_CASES.items():
        case, counted = f"largest_batch with {name} bytes,", _BytesAt(bytes_at)
        try:
            got = answer(counted, budget)
        except _TooManyCalls:
            raise Wrong(f"{case} called bytes_at more than {MOST_CALLS} times.") from None
        equal(case, got, wanted, "sequences")
        require(
            counted.largest <= max(1, 2 * wanted),
            f"{case} called bytes_at({counted.largest:,}), but only {wanted:,} fit; wanted at most "
            f"twice the largest batch that fits. A much larger one can crash the machine.",
            evidence=(name, "too large"),
        )
        calls = max(calls, counted.calls)
    return f"{len(_BATCH_CASES)} budgets, at most {calls} calls for each"


_BY_A_LINE = """
slope = bytes_at(2) - bytes_at(1)
fixed = bytes_at(1) - slope
return max(0, (budget_bytes - fixed) // slope) if slope else 1
"""
_BY_COUNTING = """
batch = 0
while bytes_at(batch + 1) <= budget_bytes:
    batch += 1
return batch
"""

_LARGEST_BATCH = Exercise(
    id="1.5",
    title="Find the largest batch that fits",
    minutes=10,
    difficulty=2,
    hints=(
        "A measurement is expensive: double the batch until it no longer fits.",
        "Then you know one batch that fits and one that does not. Measure the middle, and keep "
        "the half with the answer, until the two differ by 1.",
        "fits, too_many = 0, 1; while bytes_at(too_many) <= budget_bytes: fits, too_many = "
        "too_many, 2 * too_many. Then, while too_many - fits > 1, which of the two does "
        "middle = (fits + too_many) // 2 replace?",
    ),
    reference=ledger.largest_batch,
    check=_check_largest_batch,
    rebuilds=("memlab.course.ledger.largest_batch",),
    wrong_answers=mistakes(
        "1.5",
        (
            "Some bytes of a step do not depend on the batch: twice the batch is not twice the "
            "bytes.",
            body("largest_batch", "return budget_bytes // bytes_at(1)"),
        ),
        (
            "For small batches the peak may not grow yet, so do not extrapolate from the first two "
            "batches.",
            body("largest_batch", _BY_A_LINE),
        ),
        (
            "Trying every batch needs too many calls: double, then use binary search.",
            body("largest_batch", _BY_COUNTING),
        ),
        ("A step that needs exactly the budget fits.", ("<= budget_bytes", "< budget_bytes")),
        ("You returned the smallest batch that does not fit.", ("return fits", "return too_many")),
        ("If not even one sequence fits, return 0.", ("return fits", "return max(1, fits)")),
        (
            "There is no upper bound at first: find one by doubling.",
            ("return fits", "return min(1000, fits)"),
        ),
        (
            "The answer may lie between two powers of two: search there.",
            ("while too_many - fits > 1:", "while False:"),
        ),
    ),
)

DAY = Day(
    exercises=(_PARAMETER_COUNT, _STATE_BYTES, _ACTIVATION_BYTES, _PEAK_BYTES, _LARGEST_BATCH),
    bill=Bill("day 1: plain", plain),
)
