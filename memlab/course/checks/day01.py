"""Day 1: where memory goes."""

from collections.abc import Callable
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import nn

from memlab.course import ledger
from memlab.course.bill import plain
from memlab.course.exercises import Bill, Day, Wrong, equal, require
from memlab.course.properties import dimensions, same_bytes, unchanged
from memlab.course.solutions import checked
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


def _recorded(answer: Callable[[GPTConfig], int], shape: GPTConfig) -> tuple[int, int]:
    """The count, and the peak bytes of counting."""
    got: list[int] = []
    peak_bytes = record(lambda: got.append(answer(shape))).peak_bytes
    return got.pop(), peak_bytes


def _check_parameter_count(answer: Callable[[GPTConfig], int]) -> str:
    for shape in _SHAPES:
        call = f"parameter_count of {_in_words(shape)}"
        got, allocated = _recorded(answer, shape)
        equal(call, got, _count(shape), "weights")
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


def _trained(model: nn.Module, steps: int = 1, **settings: Any) -> Training:
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


DAY = Day(
    exercises=(
        checked("1.1", _check_parameter_count),
        checked(
            "1.2",
            _check_state_bytes,
            ledger.state_bytes,
            rebuilds=("memlab.course.ledger.state_bytes", "memlab.measure", "memlab.meter"),
        ),
        checked(
            "1.3",
            _check_activation_bytes,
            ledger.activation_bytes,
            rebuilds=("memlab.course.ledger.activation_bytes",),
        ),
        checked(
            "1.4",
            _check_peak_bytes,
            ledger.start_of_backward_bytes,
            rebuilds=("memlab.course.ledger.start_of_backward_bytes",),
        ),
        checked(
            "1.5",
            _check_largest_batch,
            ledger.largest_batch,
            rebuilds=("memlab.course.ledger.largest_batch",),
        ),
    ),
    bill=Bill("day 1: plain", plain),
)
