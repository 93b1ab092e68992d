"""Day 20: optimizers since Adam."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.course.checks.day16 import everything_elsewhere
from memlab.course.exercises import Bill, Day, Exercise, distinct, equal, require
from memlab.course.properties import (
    as_little_memory,
    differences,
    is_tensor,
    no_tensor_above,
    require_none_wrong,
    unchanged,
)
from memlab.course.solutions import body, mistakes, solution
from memlab.reference.galore import galore_
from memlab.reference.muon import muon_, newton_schulz

_LIBRARIES = ("memlab.optim", "memlab.reference", "torch.optim", "galore_torch", "apollo_torch")

elements_kept = solution("20.4")


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


_X = "x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # (short, long)"
_SCALED = "x = x / x.norm().clamp(min=1e-7)"
_BACK = "return x.T if matrix.shape[0] > matrix.shape[1] else x"
_STEP = "x = a * x + (b * gram + c * gram @ gram) @ x"

_NEWTON_SCHULZ = Exercise(
    id="20.1",
    title="Newton–Schulz",
    minutes=12,
    difficulty=2,
    hints=(
        "Before the loop: transpose if there are more rows than columns, and divide by the norm. "
        "In the loop, X Xᵀ occurs twice: compute it once. At the end, transpose back.",
        "gram = x @ x.T. Then aX + b(XXᵀ)X + c(XXᵀ)²X is a * x plus one product of a square matrix "
        "with x.",
        "x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix; x = x / "
        "x.norm().clamp(min=1e-7). In the loop: gram = x @ x.T, and the new x is a * x plus a "
        "square matrix times x. The square matrix is b * gram plus one more term. Which one?",
    ),
    reference=newton_schulz,
    check=_check_newton_schulz,
    rebuilds=(*_LIBRARIES, "torch.linalg.svd", "torch.linalg.eigh", "torch.svd"),
    wrong_answers=mistakes(
        "20.1",
        (
            "Divide by the norm first. Singular values far above 1 diverge.",
            (_SCALED, "x = x * 1.0"),
        ),
        (
            "A matrix of zeros has a norm of 0: divide by at least 1e-7.",
            (".clamp(min=1e-7)", ""),
        ),
        (
            "You divided by the largest element. Use the Frobenius norm, √Σx².",
            ("x.norm().clamp(min=1e-7)", "x.abs().max().clamp(min=1e-7)"),
        ),
        (
            "Gradients are small. Divide by at least 1e-7, not by at least 1.",
            ("clamp(min=1e-7)", "clamp(min=1)"),
        ),
        (
            "Your lower limit of the norm is above 1e-7. Gradients may be smaller.",
            ("clamp(min=1e-7)", "clamp(min=1e-3)"),
        ),
        ("You always applied five steps. Apply `steps`.", ("range(steps)", "range(5)")),
        ("You applied one step. Repeat it `steps` times.", ("range(steps)", "range(1)")),
        (
            "c belongs to (X Xᵀ)², so square the product.",
            ("c * gram @ gram", "c * gram"),
        ),
        (
            "You squared each element. (X Xᵀ)² is a matrix product.",
            ("c * gram @ gram", "c * gram**2"),
        ),
        ("You forgot the term aX.", ("a * x + ", "")),
        (
            "You swapped b and c: b is for σ³, with one X Xᵀ.",
            ("a, b, c = COEFFICIENTS", "a, c, b = COEFFICIENTS"),
        ),
        (
            "With the coefficients 3/2 and −1/2, values converge to exactly 1, but small values "
            "rise slowly. Use COEFFICIENTS.",
            ("a, b, c = COEFFICIENTS", "a, b, c = 1.5, -0.5, 0.0"),
        ),
        (
            "For a tall matrix, X Xᵀ is the larger square. Transpose it first.",
            (_X, "x = matrix"),
            (_BACK, "return x"),
        ),
        (
            "You transposed wide matrices, so X Xᵀ is the larger square. Transpose tall ones.",
            (_X, _X.replace(">", "<")),
            (_BACK, _BACK.replace(">", "<")),
        ),
        (
            "The X of every step stays in memory. Keep the last one.",
            ("for _ in range(steps):", "before = []\n    for _ in range(steps):"),
            (_STEP, f"before.append(x)\n        {_STEP}"),
        ),
        (
            "The result for a tall matrix is still transposed. Transpose it back.",
            (_BACK, "return x"),
        ),
        (
            "You scaled the argument in place. Divide into a new tensor.",
            (_SCALED, "x.div_(x.norm().clamp(min=1e-7))"),
        ),
        (
            "You divided by the norm in each step, which undoes the previous step. Divide once.",
            (_STEP, f"{_STEP}\n        x = x / x.norm().clamp(min=1e-7)"),
        ),
    ),
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
    weight, state = _random(*case.shape, dtype=dtype), {}
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


_AHEAD = "ahead = (1 - momentum) * gradient + momentum * m"
_NEW_M = "m = momentum * m + (1 - momentum) * gradient"
_DECAY = "weight *= 1 - lr * weight_decay"
_SHAPE = "max(1, rows / columns) ** 0.5"

_MUON = Exercise(
    id="20.2",
    title="Muon's step",
    minutes=10,
    difficulty=2,
    hints=(
        'state.get("m", torch.zeros_like(gradient)) is the momentum before the step. Do you keep M '
        "or X? Which of the two do you orthogonalize?",
        "Keep the new M. X is a temporary: cast it with .to(dtype), pass it to newton_schulz, and "
        "cast the result with .to(weight.dtype). `weight *=` works in place.",
        'state["m"] = m = momentum * m + (1 - momentum) * gradient. X is the same mix once more, '
        "of the gradient and the new m. After weight *= 1 - lr * weight_decay, subtract "
        "newton_schulz(…) in the dtype of the weight. Which two factors does it get?",
    ),
    reference=muon_,
    check=_check_muon,
    rebuilds=_LIBRARIES,
    wrong_answers=mistakes(
        "20.2",
        ("Orthogonalize X (Nesterov momentum), not M.", ("ahead.to(dtype)", "m.to(dtype)")),
        ("You did not orthogonalize X.", ("newton_schulz(ahead.to(dtype))", "ahead.to(dtype)")),
        (
            "You kept X in the state. Keep M.",
            (_AHEAD, f'{_AHEAD}\n    state["m"] = ahead'),
        ),
        (
            "Earlier gradients have no effect on your step. X also needs the M of the state.",
            ('state.get("m", torch.zeros_like(gradient))', "torch.zeros_like(gradient)"),
        ),
        ("You forgot the weight decay.", (_DECAY, "")),
        (
            "Multiply the decay by the learning rate.",
            (_DECAY, "weight *= 1 - weight_decay"),
        ),
        (
            "You added the decay to the gradient and orthogonalized it. Decay the weight itself.",
            (_DECAY, ""),
            (
                "rows, columns = weight.shape",
                "rows, columns = weight.shape\n    gradient = gradient + weight_decay * weight",
            ),
        ),
        ("Your factor is 1. Wanted √max(1, rows / columns).", (f"{_SHAPE} * ", "")),
        ("You inverted the ratio. Divide rows by columns.", ("rows / columns", "columns / rows")),
        ("You forgot the square root of the ratio.", (_SHAPE, "max(1, rows / columns)")),
        (
            "Use the ratio only where it is above 1: √max(1, rows / columns).",
            (_SHAPE, "(rows / columns) ** 0.5"),
        ),
        (
            "Cast X to `dtype` before you orthogonalize it.",
            ("ahead.to(dtype)", "ahead"),
        ),
        (
            "You ignored `dtype`. Cast X to it, also if it is not bfloat16.",
            ("ahead.to(dtype)", "ahead.bfloat16().to(dtype)"),
        ),
        (
            "You kept M in `dtype`. Only X is cast; M has the gradient's dtype.",
            (_NEW_M, f"{_NEW_M.replace('m = ', 'm = (')}).to(dtype)"),
        ),
        (
            "This makes a new weight. Update the given weight in place.",
            (_DECAY, "weight = weight * (1 - lr * weight_decay)"),
        ),
        (
            "You kept two tensors. X is a temporary.",
            (_AHEAD, f'{_AHEAD}\n    state["ahead"] = ahead'),
        ),
        ("You added the step. Subtract it.", ("weight -= lr", "weight += lr")),
    ),
)

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


_IS_TALL = "weight.shape[0] >= weight.shape[1]"
_RENEWED = "(t - 1) % gap == 0"
_P = "u[:, :rank].clone()"
_ROOT = "((v / (1 - beta2**t)).sqrt() + eps)"

_GALORE = Exercise(
    id="20.3",
    title="GaLore's step",
    minutes=18,
    difficulty=3,
    hints=(
        "Start like Day 8's AdamW: count t in the state. Compute the moments of P.T @ gradient. "
        "Only the update itself has the full size of the weight.",
        "weight.T is a view, so `weight -= …` on it writes into the weight itself. (t - 1) % gap "
        "== 0 is true at steps 1, 1 + gap, … What does u[:, :rank] keep alive?",
        'At a renewal, state["P"] = u[:, :rank].clone(). In all other lines of Adam, low = '
        "state[\"P\"].T @ gradient takes the gradient's place. Adam's step then has the shape of "
        "low. What brings it back to the size of the weight?",
    ),
    reference=galore_,
    check=_check_galore,
    rebuilds=_LIBRARIES,
    wrong_answers=mistakes(
        "20.3",
        (
            "The slice keeps all of U in memory. Clone it.",
            (_P, "u[:, :rank]"),
        ),
        (
            "With full_matrices=True, the SVD also returns n × n. Pass full_matrices=False.",
            ("full_matrices=False", "full_matrices=True"),
        ),
        ("You computed P at every step. Keep it for `gap` steps.", (_RENEWED, "True")),
        (
            "You computed P once. Renew it every `gap` steps.",
            (_RENEWED, "t == 1"),
        ),
        (
            "You renewed P one step early. Steps count from 1.",
            (_RENEWED, 't % gap == 0 or "P" not in state'),
        ),
        (
            "You took the smallest directions. Singular values are sorted, the largest first.",
            (_P, "u[:, -rank:].clone()"),
        ),
        (
            "For a square matrix, also work on the transpose: rows ≥ columns.",
            (_IS_TALL, "weight.shape[0] > weight.shape[1]"),
        ),
        (
            "Project the short side. Transpose tall matrices, not wide ones.",
            (_IS_TALL, "weight.shape[0] < weight.shape[1]"),
        ),
        (
            "A tall matrix has its short side in the columns: work on its transpose.",
            (_IS_TALL, "False"),
        ),
        (
            "Keep the moments when P changes.",
            (
                "zeros = torch.zeros_like(low)",
                "zeros = torch.zeros_like(low)\n    if (t - 1) % gap == 0:\n"
                '        state.pop("m", None), state.pop("v", None)',
            ),
        ),
        ("Multiply the update by `scale` too.", ("lr * scale *", "lr *")),
        ("v starts at zero: divide it by 1 − β₂ᵗ.", (_ROOT, "(v.sqrt() + eps)")),
        ("m starts at zero: divide it by 1 − β₁ᵗ.", ("m / (1 - beta1**t)", "m")),
        (
            "Add eps outside the root, as in AdamW.",
            (_ROOT, "(v / (1 - beta2**t) + eps).sqrt()"),
        ),
        ("v averages the squares of R.", ("low**2", "low.abs()")),
        (
            "Your moments have the full size of the gradient. Project the gradient first.",
            ('low = state["P"].T @ gradient  # (r, n)', "low = gradient"),
            ('state["P"] @ step', 'state["P"] @ (state["P"].T @ step)'),
        ),
        (
            "The given weight does not change. If you made a new one, update the given one.",
            ("weight -= lr * scale", "weight = weight - lr * scale"),
        ),
        (
            "You multiplied P by the singular values. Its columns have length 1.",
            (
                "u, _, _ = torch.linalg.svd(gradient, full_matrices=False)",
                "u, s, _ = torch.linalg.svd(gradient, full_matrices=False)\n        u = u * s",
            ),
        ),
        (
            "You fixed the betas at 0.9 and 0.999. Use `betas`.",
            ("beta1, beta2 = betas", "beta1, beta2 = 0.9, 0.999"),
        ),
    ),
)

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
        require(
            isinstance(got, dict) and set(got) == set(wanted),
            f"{call} gave {got!r}; wanted a dictionary with the keys {', '.join(wanted)}."
            f"{' Is there a return?' if got is None else ''}",
        )
        for name, elements in wanted.items():
            equal(f"{call}: {name}", got[name], elements, "elements")
    return f"{len(_SHAPES)} shapes match"


_KEPT = Exercise(
    id="20.4",
    title="The state of a matrix",
    minutes=10,
    difficulty=2,
    hints=(
        "Sort the two sides first. GaLore has one tensor along the short side and two along the "
        "long one.",
        "P is (short, rank), and R's moments are (rank, long). APOLLO draws P from a seed. SOAP "
        "has two square matrices per side, and both moments.",
        'short, long = sorted((rows, columns)); "galore": rank * (short + 2 * long), "apollo": 2 * '
        'rank * long, "soap": 2 * short**2 + 2 * long**2 + 2 * short * long.',
    ),
    reference=elements_kept,
    check=_check_kept,
    wrong_answers=mistakes(
        "20.4",
        (
            "GaLore's moments lie along the long side, and P along the short one.",
            ("rank * (short + 2 * long)", "rank * (long + 2 * short)"),
        ),
        ("GaLore also keeps P.", ("rank * (short + 2 * long)", "2 * rank * long")),
        ("GaLore keeps two moments.", ("(short + 2 * long)", "(short + long)")),
        (
            "APOLLO keeps no P: it draws P again from a seed.",
            ('"apollo": 2 * rank * long', '"apollo": rank * (short + 2 * long)'),
        ),
        ("APOLLO's moments lie along the long side.", ("2 * rank * long", "2 * rank * short")),
        (
            "If the rank is not below the short side, there is no projection: count both moments.",
            ("projected = rank < short", "projected = True"),
        ),
        (
            "If the rank equals the short side, there is no projection either.",
            ("rank < short", "rank <= short"),
        ),
        (
            "Rows can be the long side. Sort the two.",
            ("sorted((rows, columns))", "(rows, columns)"),
        ),
        ("Muon keeps only a momentum.", ('"muon": short * long', '"muon": whole')),
        (
            "SOAP also keeps eigenvectors: two square matrices per side.",
            ("2 * short**2 + 2 * long**2 + whole", "short**2 + long**2 + whole"),
        ),
        (
            "SOAP runs Adam in another basis, so it also keeps both moments.",
            ("2 * long**2 + whole", "2 * long**2"),
        ),
        (
            "Shampoo keeps a square matrix per side, m² + n².",
            ('"shampoo": short**2 + long**2', '"shampoo": short**2'),
        ),
        (
            "You counted bytes. Count elements.",
            body(
                "elements_kept",
                """
                short, long = sorted((rows, columns))
                whole, projected = 8 * short * long, rank < short
                return {
                    "adamw": whole,
                    "muon": 4 * short * long,
                    "galore": 4 * rank * (short + 2 * long) if projected else whole,
                    "apollo": 8 * rank * long if projected else whole,
                    "shampoo": 4 * (short**2 + long**2),
                    "soap": 8 * short**2 + 8 * long**2 + whole,
                }
                """,
            ),
        ),
    ),
)

# ------------------------------------------------------------------ the bill

DAY = Day(
    exercises=(_NEWTON_SCHULZ, _MUON, _GALORE, _KEPT),
    bill=Bill("day 20: smaller state, already offloaded", everything_elsewhere),
)
