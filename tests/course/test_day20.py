"""Day 20: what its checks tell a learner, and what the lesson claims."""

from functools import partial

import pytest
import torch
from lesson_parts import lesson_part

import memlab
from memlab import optim
from memlab.course.solutions import given, solution
from memlab.model import GPT, PRESETS
from memlab.planner.formulas import training_bytes
from memlab.planner.recipes import Recipe

SEVEN = PRESETS["llama-2-7b"]
elements_kept, sides_of = given(20, "elements_kept", "sides_of")
state_bytes, TEMPORARIES, galore_step, RESERVED = lesson_part(
    20,
    *("state_bytes", "TEMPORARIES", "galore_step", "RESERVED"),
    **{"elements_kept": elements_kept, "sides_of": sides_of, "m": 4_096, "n": 11_008},
    **{"GPT": GPT, "optim": optim, "torch": torch},
)

# ------------------------------------------------------------------ the lesson's figures


@pytest.mark.slow
def test_the_step_of_7b_with_galore_reserves_what_the_lesson_says():
    assert memlab.predict(partial(galore_step, SEVEN, 256)).reserved_bytes == RESERVED


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
    assert state_bytes(ours, SEVEN, rank) == terms["optimizer_state"] - norms


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
