"""Day 16: what its checks tell a learner, and what the lesson claims."""

import random
import re
from dataclasses import replace

import pytest
from quick import together

from memlab import train
from memlab.course import bill, bill_steps, days
from memlab.course.checks import day16
from memlab.course.checks.day16 import (
    Candidate,
    Optimizer,
    Predicted,
    activations,
    fastest,
    lacks,
    of_a_rank,
    peak,
)
from memlab.course.solutions import given
from memlab.model import PRESETS
from memlab.planner import CARDS, Recipe, measured, memory_named, training_bytes
from memlab.planner.cards import CONTEXT_BYTES
from memlab.train import plugs

SEVEN = PRESETS["llama-2-7b"]
FOUND = Recipe(optimizer="lion8bit", checkpointing="checkpointing", step_in_backward=True)
sizes_of, block_of, ends_of = given(16, "sizes_of", "block_of", "ends_of")
LION_8_BIT = Optimizer(state_elements=1, state_itemsize=65 / 64, scratch=6.5, piece=2**22)


# ------------------------------------------------------------------ formulas against the meter


@pytest.mark.few(1)
@pytest.mark.parametrize(("batch", "length", "moment"), [(1, 4, "optimizer"), (4, 64, "backward")])
def test_the_peak_of_a_plain_step_matches_the_meter_to_the_byte(batch, length, moment):
    config = replace(PRESETS["tiny"], tied=False)
    tokens = batch * length
    ends = ends_of(config, tokens, 4, fused=False)
    block = block_of(config, fused=False)
    kept = activations(block, config.layers, tokens, 4, False, ends)
    counters, tables = 4 * len(sizes_of(config)), 4 * config.seq_len * config.head_dim
    # The loss and its gradient; in the optimizer, a temporary of the last norm.
    others = 2 * 4 if moment == "backward" else 4 * config.hidden_size
    trace = train.dry_trace(train.Setting(config, batch, length), train.combined("plain"))
    found = peak(sizes_of(config), 4, Optimizer(2, 4, scratch=2), kept)
    assert found[0] == trace.peak_phase == moment
    assert trace.peak_bytes == found[1] + counters + tables + 16 * tokens + others


def test_a_checkpointed_backward_matches_the_library():
    moments = training_bytes(SEVEN, FOUND, 1, 2048).moments["backward"]
    wanted = moments["blocks_kept"] + moments["block_temporaries"]
    assert activations(block_of(SEVEN), SEVEN.layers, 2048, 2, True, 0) == wanted


def test_the_optimizer_moment_matches_the_library():
    stepped = training_bytes(SEVEN, replace(FOUND, step_in_backward=False), 1, 2048)
    terms = stepped.moments["optimizer"]
    others = sum(terms[name] for name in ("inputs", "rotary_tables", "workspace"))
    wanted = sum(terms.values()) - others
    assert peak(sizes_of(SEVEN), 2, LION_8_BIT, 0) == ("optimizer", wanted)


def test_a_rank_matches_the_library_except_for_the_last_norm():
    config = PRESETS["llama-3-405b"]
    recipe = Recipe(checkpointing="checkpointing", zero_stage=1, tensor_parallel=8)
    terms = training_bytes(config, recipe, 1, 8192, gpus=32).moments["optimizer"]
    end = config.vocab_size * config.hidden_size
    block = (config.parameters - 2 * end - config.hidden_size) // config.layers
    found = of_a_rank(block, end, config.layers, (8, 1, 4), 1, (2, 2, 4), 0)
    wanted = terms["weights"] + terms["gradients"] + terms["optimizer_state"]
    assert 0 <= wanted - found <= 5 * config.hidden_size


@together("memory", ["24GB", "24GiB", "900 MiB", *CARDS])
def test_lacks_is_0_at_the_planners_budget_and_1_a_byte_above_it(memory):
    budget = memory_named(memory).budget_bytes
    assert lacks(memory, Predicted(0, budget)) == 0
    assert lacks(memory, Predicted(0, budget + 1)) == 1


def test_the_search_agrees_with_measuring_all_and_measures_as_few_as_possible():
    random_ = random.Random(0)
    for _ in range(200):
        candidates = [
            Candidate(str(n), random_.random(), random_.randrange(50, 200)) for n in range(12)
        ]
        taken = {c: c.formula_bytes * random_.uniform(0.951, 1.049) for c in candidates}
        room, asked = random_.randrange(40, 220), []

        def measure(candidate, taken=taken, asked=asked):
            asked.append(candidate)
            return taken[candidate]

        found = fastest(candidates, room, measure)
        fitting = [c for c in candidates if taken[c] <= room]
        assert found == min(fitting, key=lambda c: c.seconds, default=None)
        limit = float("inf") if found is None else found.seconds
        in_doubt = {c for c in candidates if c.seconds <= limit and 0.95 * c.formula_bytes <= room}
        assert set(asked) == in_doubt
        assert len(asked) == len(in_doubt)


# ------------------------------------------------------------------ figures of the lesson


def notebook():
    return days.notebook(16, "solutions").with_suffix(".py").read_text(encoding="utf-8")


def in_the_lesson():
    """Allocated and reserved bytes in the lesson's table, by batch."""
    rows = re.findall(r"(\d): Predicted\(([\d_]+), ([\d_]+)\)", notebook())
    return {int(batch): (int(allocated), int(reserved)) for batch, allocated, reserved in rows}


def test_the_lessons_context_matches_the_planner():
    mib = re.search(r"^CONTEXT = (\d+) \* 2\*\*20\b", notebook(), re.M)
    assert int(mib[1]) * 2**20 == CONTEXT_BYTES[1] == day16.CONTEXT


def test_the_lessons_table_has_three_batches():
    assert sorted(in_the_lesson()) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_lessons_table_matches_the_prediction(batch):
    recipe = replace(FOUND, chunked_loss=True)
    found = measured(train.Setting(SEVEN, batch, 2048, recipe.dtype, "cuda"), recipe.techniques)
    assert in_the_lesson()[batch] == (found.allocated_bytes, found.reserved_bytes)


@pytest.mark.slow
def test_with_one_sequence_chunked_logits_allocate_and_reserve_more():
    def of(recipe):
        setting = train.Setting(SEVEN, 1, 2048, recipe.dtype, "cuda")
        return measured(setting, recipe.techniques)

    whole, chunked = of(FOUND), of(replace(FOUND, chunked_loss=True))
    assert f"{(chunked.allocated_bytes - whole.allocated_bytes) / 2**30:.2f}" == "0.33"
    assert f"{(chunked.reserved_bytes - whole.reserved_bytes) / 2**30:.2f}" == "0.14"


@pytest.mark.slow
def test_the_guides_recipe_needs_six_bytes_a_weight_before_it_accumulates():
    recipe = Recipe(optimizer="adam8bit", checkpointing="checkpointing")
    found = measured(train.Setting(SEVEN, 1, 2048, recipe.dtype, "cuda"), recipe.techniques)
    assert (found.allocated_bytes, found.reserved_bytes) == (40_990_962_688, 42_867_884_032)
    assert found.peak_phase == "optimizer"
    assert 6 < found.allocated_bytes / SEVEN.parameters < 6.1


def test_the_bill_is_below_the_day_befores():
    before, now = (bill.stored(days.day(n).bill).peak_bytes for n in (15, 16))
    assert now < before


@pytest.mark.slow
def test_the_bill_includes_the_averages(monkeypatch):
    """The peak would be the same without their updates, so count the updates."""
    updates = []
    update = plugs.PostHocEMA.update

    def noted(self, step):
        updates.append(step)
        return update(self, step)

    monkeypatch.setattr(plugs.PostHocEMA, "update", noted)
    bill_steps.everything_elsewhere()
    assert updates == [1, 2]
