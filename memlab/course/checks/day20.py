"""Day 20: optimizers since Adam."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.course.bill_steps import everything_elsewhere
from memlab.course.exercises import Bill, Day, distinct, equal, require
from memlab.course.properties import (
    as_little_memory,
    differences,
    has_keys,
    is_tensor,
    no_tensor_above,
    normal,
    require_none_wrong,
    unchanged,
)
from memlab.course.solutions import checked, solution
from memlab.reference.galore import galore_
from memlab.reference.muon import muon_, newton_schulz

_LIBRARIES = ("memlab.optim", "memlab.reference", "torch.optim", "galore_torch", "apollo_torch")

elements_kept = solution("20.4")


_random = partial(normal, dtype=torch.float64)


def _of_norm_1(*shape: int) -> Tensor:
    drawn = _random(*shape, seed=7)
    return drawn / drawn.norm()


def _require_near(call: str, got: Tensor, wanted: Tensor, tolerance: float) -> None:
    most = tolerance * wanted.abs().max().item() + 1e-12
    require_none_wrong(call, got, wanted, differences(got, wanted) > most)


# ------------------------------------------------------------------ 20.1: Newton–Schulz

NewtonSchulz = Callable[..., Tensor]

_MATRICES: dict[str, tuple[Tensor, int]] = {
    "a wide matrix (2, 3), 1 step": (_random(2, 3), 1),
    "a wide matrix (4, 6), 5 steps": (_random(4, 6, seed=1), 5),
    "a tall matrix (6, 4), 5 steps": (_random(6, 4, seed=2), 5),
    "a square matrix (5, 5), 3 steps": (_random(5, 5, seed=3), 3),
    "a row (1, 7), 5 steps": (_random(1, 7, seed=4), 5),
    "a matrix (4, 6) of elements near 1e-3, 5 steps": (1e-3 * _random(4, 6, seed=5), 5),
    "a matrix (4, 6) with a norm of 2e-7, 5 steps": (2e-7 * _of_norm_1(4, 6), 5),
    "a matrix (4, 6) with a norm of 5e-8, 5 steps": (5e-8 * _of_norm_1(4, 6), 5),
    "a matrix (4, 6) of zeros, 5 steps": (torch.zeros(4, 6).double(), 5),
    "a float32 matrix (8, 5), 2 steps": (_random(8, 5, seed=6, dtype=torch.float32), 2),
}
_LARGE = _random(192, 24, dtype=torch.float32)


def _check_newton_schulz(answer: NewtonSchulz) -> str:
    for name, (matrix, steps) in _MATRICES.items():
        call = f"newton_schulz of {name}"
        mine = matrix.clone()
        with unchanged(call, matrix=mine):
            got = answer(mine, steps)
        wanted = newton_schulz(matrix, steps)
        is_tensor(call, got, dtype=matrix.dtype, shape=tuple(matrix.shape))
        if isinstance(got, Tensor) and got.shape == wanted.shape:
            _require_near(call, got, wanted, 1e-4 if matrix.dtype == torch.float32 else 1e-9)
    for matrix in (_LARGE, _LARGE.T):
        call = f"newton_schulz of a matrix {tuple(matrix.shape)}, {matrix.nbytes:,} bytes,"
        no_tensor_above(call, partial(answer, matrix, 5), matrix.nbytes)
        runs = (partial(step, matrix, 5) for step in (answer, newton_schulz))
        as_little_memory(call, *runs, room=2 * matrix.nbytes)
    return (
        f"{len(_MATRICES)} matrices, wide, tall and square · arguments unchanged · no square "
        f"larger than short × short"
    )


# ------------------------------------------------------------------ 20.2: Muon's step

Step = Callable[..., None]


class Case(NamedTuple):
    """A matrix, its settings, and the number of steps."""

    shape: tuple[int, int]
    settings: dict[str, Any]
    steps: int = 3

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"weight {self.shape}, {named}"


_MUON_CASES = (
    Case((2, 3), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}, 1),
    Case((2, 3), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}),
    Case((4, 6), {"lr": 0.5, "momentum": 0.6, "weight_decay": 0.3}),
    Case((7, 3), {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.2}),
    Case((5, 5), {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.1}),
)


def _run(
    step_: Step, case: Case, call: str | None = None, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return the weight and a copy of the state after each step. With `call`, require that the step
    is in place and does not change the gradient."""
    weight = _random(*case.shape, dtype=dtype)
    state: dict[str, Any] = {}
    address, weights, states = weight.data_ptr(), [], []
    for seed in range(1, case.steps + 1):
        gradient = seed * _random(*case.shape, seed=seed, dtype=dtype)
        passed = gradient.clone()
        with torch.no_grad():
            step_(weight, passed, state, **case.settings)
        if call is not None:
            require(torch.equal(passed, gradient), f"{call} changed the gradient.")
            require(weight.data_ptr() == address, f"{call} moved the weight to other memory.")
        passed.zero_()  # as zero_grad(set_to_none=False) does: the state must not be a view of it
        weights.append(weight.clone())
        states.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()})
    return weights, [*states, state]


def _stored_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of the storages of the state's tensors, without scalars."""
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def _require_weights(
    call: str, got: Iterable[Tensor], wanted: Iterable[Tensor], tol: float
) -> None:
    for step, (mine, right) in enumerate(zip(got, wanted, strict=True), 1):
        _require_near(f"{call}: after step {step} the weight", mine, right, tol)


def _require_bytes(call: str, state: dict[str, Any], wanted: int) -> None:
    held = _stored_bytes(state)
    require(
        held == wanted,
        f"{call}: the state keeps {held:,} bytes alive; wanted {wanted:,}.",
    )


def _check_memory(call: str, answer: Step, reference: Step, case: Case) -> None:
    """Compare a step in float32 with the reference's: what it keeps, its peak, and that no tensor
    is larger than the weight."""
    weight, gradient = (_random(*case.shape, seed=seed, dtype=torch.float32) for seed in (0, 1))
    states: list[dict[str, Any]] = []

    def run(step_: Step) -> None:
        states.append({})
        with torch.no_grad():
            step_(weight, gradient, states[-1], **case.settings)

    no_tensor_above(call, partial(run, answer), weight.nbytes)
    as_little_memory(call, partial(run, answer), partial(run, reference), room=4 * weight.nbytes)
    dtypes = {v.dtype for v in states[0].values() if isinstance(v, Tensor) and v.numel() > 1}
    require(
        dtypes == {torch.float32},
        f"{call} keeps {', '.join(sorted(map(str, dtypes))) or 'no tensor'} in the state; wanted "
        f"torch.float32, the dtype of the gradient.",
    )


def _check_muon(answer: Step) -> str:
    for case in _MUON_CASES:
        call = f"muon_, {case}"
        in_float64 = partial(answer, dtype=torch.float64)
        got, states = _run(in_float64, case, call)
        wanted, _ = _run(partial(muon_, dtype=torch.float64), case)
        _require_weights(call, got, wanted, 1e-9)
        _require_bytes(call, states[-1], 8 * got[0].numel())
    case = Case((24, 40), {"lr": 1.0, "weight_decay": 0.0}, 1)
    call = "muon_, weight (24, 40) in float32, default dtype"
    ((mine,), _), ((exact,), _) = (
        _run(step, case, dtype=torch.float32)
        for step in (answer, partial(muon_, dtype=torch.float32))
    )
    apart = ((mine - exact).norm() / exact.norm()).item()
    require(mine.dtype == torch.float32, f"{call} changed the weight's dtype.")
    require(
        1e-5 < apart < 0.05,
        f"{call}: the step differs by {apart:.1e} of its length from the float32 step; wanted the "
        f"difference that bfloat16's rounding makes, 1e-5 to 0.05.",
    )
    asked = partial(answer, dtype=torch.float32)
    ((mine,), _) = _run(asked, case, dtype=torch.float32)
    _require_near(f"{call[:-15]}, dtype=torch.float32: the weight", mine, exact, 1e-4)
    _check_memory(call, answer, muon_, case)
    return f"{sum(case.steps for case in _MUON_CASES)} steps match · one tensor in the state"


# ------------------------------------------------------------------ 20.3: GaLore's step

_GALORE_CASES = (
    Case((3, 5), {"lr": 0.1, "rank": 2}, 1),
    Case((3, 5), {"lr": 0.1, "rank": 2, "gap": 100}),
    Case((6, 4), {"lr": 0.3, "rank": 1, "gap": 2, "scale": 0.5, "eps": 0.1}, 5),
    Case((5, 5), {"lr": 0.1, "rank": 3, "gap": 3, "betas": (0.6, 0.8)}, 5),
    Case((8, 30), {"lr": 0.1, "rank": 4, "gap": 1, "scale": 1.0}, 3),
)


def _check_galore(answer: Step) -> str:
    for case in _GALORE_CASES:
        call = f"galore_, {case}"
        got, states = _run(answer, case, call)
        _require_state(call, case, states[0])
        wanted = _with_projectors(case, [state["P"] for state in states[:-1]])
        for step, state in enumerate(states[:-1]):
            _require_projector(call, case, step, state["P"], states[step - 1]["P"])
        _require_weights(call, got, wanted, 1e-7)
        short, long = sorted(case.shape)
        _require_bytes(call, states[-1], 8 * case.settings["rank"] * (short + 2 * long))
        _check_memory(f"{call}, in float32", answer, galore_, case)
    return (
        f"{sum(case.steps for case in _GALORE_CASES)} steps, wide, tall and square · P renewed "
        f"after `gap` steps · r(m + 2n) elements kept"
    )


def _require_state(call: str, case: Case, state: dict[str, Any]) -> None:
    short, long = sorted(case.shape)
    rank = case.settings["rank"]
    for name, shape in {"P": (short, rank), "m": (rank, long), "v": (rank, long)}.items():
        is_tensor(f'{call}: state["{name}"]', state.get(name), shape=shape)


def _gradient_of(case: Case, step: int) -> Tensor:
    """Return the gradient of a step, counted from 0, with the short side first."""
    gradient = (step + 1) * _random(*case.shape, seed=step + 1)
    return gradient.T if case.shape[0] >= case.shape[1] else gradient


def _require_projector(call: str, case: Case, step: int, got: Tensor, before: Tensor) -> None:
    """Compare the spaces that they span, because the sign of a singular vector is arbitrary."""
    if step % case.settings.get("gap", 200):
        require(
            torch.equal(got, before),
            f"{call}: P changed at step {step + 1}; wanted a new P every `gap` steps.",
        )
        return
    lengths = got.double().norm(dim=0)
    off = differences(lengths, torch.ones_like(lengths)) > 1e-5
    for column in off.nonzero().flatten().tolist()[:1]:
        mine, one = distinct(lengths[column].item(), 1.0)
        require(
            False,
            f"{call}: column {column} of P of step {step + 1} has length {mine}; wanted {one}.",
        )
        return
    u = torch.linalg.svd(_gradient_of(case, step))[0][:, : case.settings["rank"]]
    apart = (got.double() @ got.double().T - u @ u.T).abs().max().item()
    require(
        apart < 1e-6,
        f"{call}: P of step {step + 1} does not span the {u.shape[1]} largest directions of the "
        f"gradient.",
        evidence=(call, step, f"{apart:.3g}"),
    )


def _with_projectors(case: Case, projectors: list[Tensor]) -> list[Tensor]:
    """Return the weights after each step with these projectors."""
    settings = {"gap": 200, "scale": 0.25, "betas": (0.9, 0.999), "eps": 1e-8, **case.settings}
    (beta1, beta2), weight, found = settings["betas"], _random(*case.shape), []
    m = v = torch.zeros(()).double()
    for t, projector in enumerate(projectors, 1):
        low = projector.T @ _gradient_of(case, t - 1)
        m, v = beta1 * m + (1 - beta1) * low, beta2 * v + (1 - beta2) * low**2
        step = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + settings["eps"])
        back = settings["lr"] * settings["scale"] * projector @ step
        weight = weight - (back.T if case.shape[0] >= case.shape[1] else back)
        found.append(weight.clone())
    return found


# ------------------------------------------------------------------ 20.4: the state of a matrix

Kept = Callable[[int, int, int], dict[str, int]]

_SHAPES = (
    (2, 3, 1),
    (3, 2, 1),
    (4, 4, 2),
    (6, 40, 5),
    (6, 40, 6),
    (40, 6, 9),
    (4096, 11_008, 1024),
)


def _check_kept(answer: Kept) -> str:
    for rows, columns, rank in _SHAPES:
        call = f"elements_kept({rows}, {columns}, {rank})"
        got, wanted = answer(rows, columns, rank), elements_kept(rows, columns, rank)
        has_keys(call, got, wanted)
        for name, elements in wanted.items():
            equal(f"{call}: {name}", got[name], elements, "elements")
    return f"{len(_SHAPES)} shapes match"


# ------------------------------------------------------------------ the bill

DAY = Day(
    exercises=(
        checked(
            "20.1",
            _check_newton_schulz,
            newton_schulz,
            rebuilds=(*_LIBRARIES, "torch.linalg.svd", "torch.linalg.eigh", "torch.svd"),
        ),
        checked("20.2", _check_muon, muon_, rebuilds=_LIBRARIES),
        checked("20.3", _check_galore, galore_, rebuilds=_LIBRARIES),
        checked("20.4", _check_kept, elements_kept),
    ),
    bill=Bill("day 20: smaller state, already offloaded", everything_elsewhere),
)
