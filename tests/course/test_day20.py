"""Day 20's checks accept right answers and refuse wrong ones, and the lesson's figures hold."""

import ast
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memlab
from memlab import optim
from memlab.course import bill
from memlab.course.checks.day20 import DAY
from memlab.course.exercises import OK, WRONG, judge
from memlab.course.solutions import given, solution
from memlab.model import GPT, PRESETS
from memlab.planner.formulas import training_bytes
from memlab.planner.recipes import Recipe

NEWTON_SCHULZ, MUON, GALORE, KEPT = DAY.exercises
SEVEN = PRESETS["llama-2-7b"]
elements_kept, sides_of = given(20, "elements_kept", "sides_of")


def after_the_exercises(*names: str) -> dict[str, Any]:
    """Definitions and constants of the lesson's last part, which does not run here as a whole."""
    source = next(Path(bill.__file__).parents[2].glob("solutions/day20_*.py")).read_text("utf-8")
    tree = ast.parse(source)
    named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    named |= {
        target.id: node
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {"elements_kept": elements_kept, "sides_of": sides_of, "m": 4_096, "n": 11_008}
    found |= {"GPT": GPT, "optim": optim, "torch": torch}
    kept = ast.Module([named[name] for name in names], [])
    exec(compile(kept, "day 20", "exec"), found)
    return found


LESSON = after_the_exercises("state_bytes", "TEMPORARIES", "galore_step", "RESERVED")
TEMPORARIES, RESERVED = LESSON["TEMPORARIES"], LESSON["RESERVED"]

# ------------------------------------------------------------------ right answers


def by_rows_and_columns(matrix: Tensor, steps: int = 5) -> Tensor:
    """One branch for each orientation, and the polynomial written out."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / max(matrix.norm().item(), 1e-7)
    for _ in range(steps):
        if len(x) <= x.shape[1]:
            s = x @ x.T
            x = a * x + b * (s @ x) + c * (s @ (s @ x))
        else:
            s = x.T @ x
            x = a * x + b * (x @ s) + c * (x @ s @ s)
    return x


def heavy_ball(weight, gradient, state, lr, momentum=0.95, weight_decay=0.1, dtype=torch.bfloat16):
    """Without the factor 1 − μ, which an orthogonal matrix does not have."""
    if "buffer" not in state:
        state["buffer"] = torch.zeros_like(gradient)
    state["buffer"].mul_(momentum).add_(gradient)
    ahead = gradient + momentum * state["buffer"]
    ratio = weight.shape[0] / weight.shape[1]
    update = by_rows_and_columns(ahead.to(dtype)).to(weight.dtype)
    weight.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * max(1, ratio) ** 0.5)


def by_eigenvectors(
    weight, gradient, state, lr, rank, gap=200, scale=0.25, betas=(0.9, 0.999), eps=1e-8
):
    """P from G Gᵀ, whose eigenvalues rise; moments in place. A clone: one column of a matrix stored
    by columns is contiguous, so .contiguous() would keep all of it."""
    if weight.shape[0] >= weight.shape[1]:
        weight, gradient = weight.T, gradient.T
    if not state:
        long = gradient.shape[1]
        state.update(t=0, m=gradient.new_zeros(rank, long), v=gradient.new_zeros(rank, long))
    if state["t"] % gap == 0:
        state["P"] = torch.linalg.eigh(gradient @ gradient.T)[1].flip(1)[:, :rank].clone()
    state["t"] += 1
    low = state["P"].T @ gradient
    state["m"].mul_(betas[0]).add_(low, alpha=1 - betas[0])
    state["v"].mul_(betas[1]).addcmul_(low, low, value=1 - betas[1])
    root = (state["v"] / (1 - betas[1] ** state["t"])).sqrt() + eps
    weight.sub_(scale * lr * state["P"] @ (state["m"] / (1 - betas[0] ** state["t"]) / root))


RIGHT = [(NEWTON_SCHULZ, by_rows_and_columns), (MUON, heavy_ball), (GALORE, by_eigenvectors)]


@pytest.mark.parametrize(("exercise", "answer"), RIGHT, ids=lambda one: getattr(one, "id", ""))
def test_another_right_answer_is_accepted(exercise, answer):
    assert judge(exercise, answer).status == OK


def svd_answer(matrix: Tensor, steps: int = 5) -> Tensor:
    u, _, v = torch.svd_lowrank(matrix, q=min(matrix.shape), niter=5)
    return u @ v.T


def test_the_exact_orthogonal_matrix_is_not_newton_schulz():
    assert judge(NEWTON_SCHULZ, svd_answer).status == WRONG


# ------------------------------------------------------------------ the lesson's figures


@pytest.mark.slow
def test_the_step_of_7b_with_galore_reserves_what_the_lesson_says():
    assert memlab.predict(partial(LESSON["galore_step"], SEVEN, 256)).reserved_bytes == RESERVED


@pytest.mark.parametrize(
    ("ours", "rank", "name"),
    [
        ("muon", 1024, "muon"),
        ("galore", 1024, "galore"),
        ("apollo", 1, "apollo-mini"),
        ("adamw", 1024, "adamw"),
    ],
)
def test_the_states_of_7b_are_the_planners(ours, rank, name):
    """APOLLO's norm, 4 bytes for each of the 224 matrices, is not in the lesson's formula."""
    recipe = Recipe("float32", optimizer=name)
    terms = training_bytes(SEVEN, recipe, 1, 256).moments["optimizer"]
    norms = 4 * 224 if name == "apollo-mini" else 0
    assert LESSON["state_bytes"](ours, SEVEN, rank) == terms["optimizer_state"] - norms


def test_the_transient_of_muon_is_the_planners():
    terms = training_bytes(SEVEN, Recipe(optimizer="muon"), 1, 256).moments["optimizer"]
    assert TEMPORARIES["muon"] == terms["optimizer_temporaries"]


def test_galores_transient_is_that_of_an_svds_results():
    m, n = 4_096, 11_008
    with memlab.dry_run():
        gradient = torch.zeros(m, n)
        trace = memlab.measure(lambda: torch.linalg.svd(gradient, full_matrices=False))
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    assert trace.peak_bytes - before == TEMPORARIES["galore"]


def test_elements_kept_needs_a_rank_below_the_short_side():
    kept = solution("20.4")
    assert kept(8, 5, 5)["galore"] == kept(8, 5, 5)["adamw"] == 80
    assert kept(8, 5, 4)["galore"] == 4 * (5 + 16)
