"""Day 19: what its checks tell a learner, and what the lesson claims."""

from dataclasses import replace
from functools import partial

import pytest
from lesson_parts import lesson_part

import memlab
from memlab.course.checks.day19 import DAY, saved_bytes
from memlab.course.solutions import given
from memlab.model import PRESETS
from memlab.planner.repetition import extrapolate
from memlab.precision import FP8Recipe
from memlab.precision.fp8 import quantize_fp8

CAST, CAST_TILES, MATMUL, KEPT = DAY.exercises
training_step = given(19, "training_step")
SEVEN = PRESETS["llama-2-7b"]


# ------------------------------------------------------------------ answers


def by_library(x, dtype, tile=None):
    return tuple(quantize_fp8(x, dtype, tile)[:2])


def test_the_librarys_casts_pass_the_checks():
    CAST.check(lambda x, dtype: by_library(x, dtype))
    CAST_TILES.check(lambda x, dtype, rows, columns: by_library(x, dtype, (rows, columns)))


# ------------------------------------------------------------------ figures of the lesson


COPIES, CHECKPOINTED = lesson_part(19, "COPIES", "CHECKPOINTED", FP8Recipe=FP8Recipe)
ROWS = {
    (checkpointed, name): row
    for checkpointed, rows in ((False, COPIES), (True, CHECKPOINTED))
    for name, row in rows.items()
}
ROW_PARAMETERS = [  # in one argument
    pytest.param(row, marks=() if row == (False, "FP8, shared copies") else pytest.mark.slow)
    for row in ROWS
]


def deep(layers, recipe, checkpointed):
    return memlab.predict(
        partial(training_step, replace(SEVEN, layers=layers), recipe, 2, 4096, checkpointed)
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", ROW_PARAMETERS)
def test_the_lessons_table_is_predicted(row):
    """With four and with five blocks; the others are added event by event."""
    checkpointed, _ = row
    recipe, stated = ROWS[row]
    trace = extrapolate(*(deep(n, recipe, checkpointed) for n in (4, 5)), 5, SEVEN.layers)
    assert (trace.allocated_bytes, trace.reserved_bytes) == stated


@pytest.mark.slow
def test_all_blocks_give_the_tables_peak():
    recipe, stated = ROWS[False, "FP8, shared copies"]
    whole = deep(SEVEN.layers, recipe, False)
    assert (whole.allocated_bytes, whole.reserved_bytes) == stated


def test_the_table_says_what_the_text_says():
    bf16, own, shared, kept_too = (row[1] for row in COPIES.values())
    assert shared[0] < own[0] < bf16[0] < kept_too[0]
    assert own[1] > bf16[1] > shared[1]
    assert [round(100 * (1 - way[0] / bf16[0])) for way in (own, shared)] == [1, 5]
    assert round(100 * (1 - shared[1] / bf16[1])) == 2
    plain, fp8 = (row[1][0] for row in CHECKPOINTED.values())
    assert abs(fp8 / plain - 1) < 1e-4


def test_with_checkpointing_the_peak_is_adamws_step():
    trace = deep(2, FP8Recipe(), True)
    assert trace.peak_phase == "optimizer"
    assert "activations" not in trace.at_peak


def test_the_shares_of_the_text_are_the_formulas():
    sizes = SEVEN.hidden_size, SEVEN.heads * SEVEN.head_dim, SEVEN.intermediate_size
    bf16, own, shared = (saved_bytes(8192, *sizes, way) for way in ("bf16", "own", "shared"))
    assert [round(100 * (1 - way / bf16)) for way in (own, shared)] == [7, 39]
    activations = [deep(n, None, False).at_peak["activations"] for n in (4, 5)]
    of_a_block = activations[1] - activations[0]
    assert 0.24 < bf16 / of_a_block < 0.26  # "a quarter"
    eight_bits_a_token = saved_bytes(8192, *sizes, "shared", 128) - 8192 * sum(
        (2 * sizes[0], *sizes[1:])
    )
    assert eight_bits_a_token / 8192 == 4 * (2 * 32 + 32 + 86)
