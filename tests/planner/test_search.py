"""The search: recipes tried, their order, and the result. test_measuring tests measuring."""

import math
from dataclasses import replace
from functools import partial

import pytest

from memlab.configs.evidence import margin_share
from memlab.model import PRESETS
from memlab.planner import measuring, search
from memlab.planner.cards import CARDS
from memlab.planner.costs import step_seconds
from memlab.planner.formulas import training_bytes
from memlab.planner.limits import MOST_PREDICTIONS
from memlab.planner.measuring import Measured
from memlab.planner.options import AS_IT_IS
from memlab.planner.recipes import GROUPS, Recipe, recipes, usual_kinds
from memlab.train import Adapters, Setting, build, combined, rank_step
from memlab.train import measured as metered

SEVEN_BILLION = PRESETS["llama-2-7b"]
FULL = (Recipe(optimizer="lion8bit"),)
GIB = 2**30


@pytest.fixture
def by_formula(monkeypatch):
    """Replace predictions by formulas, with 5 % more reserved; record the measurements."""
    asked = []

    def answer(setting, names, ranks=1, stage=0, adapters=None):
        recipe = next(
            r
            for r in (*everything(setting.batch), AS_IT_IS)
            if (r.techniques, r.dtype) == (names, setting.dtype)
        )
        asked.append(names)
        peak = training_bytes(setting.config, recipe, setting.batch, setting.seq_len).peak_bytes
        return Measured(peak, round(1.05 * peak), {"parameters": peak}, "backward", False, None)

    monkeypatch.setattr(search, "measured", answer)
    return asked


def everything(sequences):
    return [recipe for learned in usual_kinds() for recipe in recipes(learned, sequences=sequences)]


# ------------------------------------------------------------------ recipes


def test_every_recipe_can_be_built():
    for recipe in everything(4):
        combined(recipe.techniques)


def test_recipes_of_one_kind_train_the_same():
    for learned in usual_kinds():
        assert {recipe.learned for recipe in recipes(learned, sequences=4)} == {learned}


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adam8bit", "adam-mini", "lion8bit"])
def test_several_ranks_only_get_optimizers_that_zero_can_shard(optimizer):
    learned, tiny = Recipe(optimizer=optimizer), PRESETS["tiny"]
    is_searched = any(recipes(learned, sequences=1, gpus=4))
    setting = Setting(tiny, 1, 8, learned.dtype)
    try:
        rank_step(setting, combined(learned.techniques), 4, 1)
    except (TypeError, ValueError):
        assert not is_searched
    else:
        assert is_searched


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"precision": "half"}, "got precision='half' in a recipe; choose one of 'float32'"),
        ({"optimizer": "adam"}, "got optimizer='adam' in a recipe"),
        (
            {"step_in_backward": True, "accumulation": True},
            "before the other sequences' gradients can be added",
        ),
        (
            {"precision": "master-weights", "optimizer": "lion"},
            "master-weights and lion each bring their own optimizer",
        ),
        (
            {"precision": "master-weights", "step_in_backward": True},
            "the float32 copies are stepped after backward",
        ),
        (
            {"accumulation": True, "offload": "streamed-layers"},
            "gradients move to the disk during backward",
        ),
        ({"zero_stage": 2, "offload": "streamed-layers"}, "before they can be sent to other ranks"),
    ],
)
def test_unknown_or_conflicting_choices_are_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        Recipe(**words)


# ------------------------------------------------------------------ costs


seconds_of = partial(
    step_seconds, SEVEN_BILLION, batch=1, seq_len=2_048, gpus=1, card=CARDS["rtx4090"]
)


def test_matmuls_take_six_operations_per_weight_and_token():
    weights = SEVEN_BILLION.parameters - 32_000 * 4_096 - 65 * 4_096  # no embedding, no norms
    wanted = 6 * weights * 2_048 / (0.5 * 165.2e12)
    assert seconds_of(recipe=Recipe())["matmuls"] == pytest.approx(wanted)


def test_checkpointing_recomputes_the_forward_pass_of_the_blocks():
    plain, checkpointed = (
        seconds_of(recipe=Recipe(checkpointing=how)) for how in (None, "checkpointing")
    )
    assert "recomputed" not in plain
    head = 32_000 * 4_096 / (SEVEN_BILLION.parameters - 32_000 * 4_096 - 65 * 4_096)
    forward = plain["matmuls"] * (1 - head) / 3 + plain["attention"] / 3
    assert checkpointed["recomputed"] == pytest.approx(forward)


def test_each_technique_costs_only_its_own_traffic():
    plain = seconds_of(recipe=Recipe())
    assert set(plain) == {"matmuls", "attention", "optimizer"}
    assert set(seconds_of(recipe=Recipe(activation_bits=8))) - set(plain) == {"compression"}
    assert set(seconds_of(recipe=Recipe(offload="streamed-layers"))) - set(plain) == {"disk"}
    lora = seconds_of(recipe=Recipe(lora=True))
    assert lora["matmuls"] == pytest.approx(plain["matmuls"] * 4 / 6)
    ranks = step_seconds(SEVEN_BILLION, Recipe(zero_stage=3), 1, 2_048, gpus=8, card=CARDS["h100"])
    assert ranks["network"] == pytest.approx(
        3 * 7 / 8 * 2 * SEVEN_BILLION.parameters / 450e9, rel=1e-6
    )


# ------------------------------------------------------------------ the search


def test_the_fastest_fitting_recipe_is_found(by_formula):
    found = search.plan("llama-2-7b", "24GB", learned=FULL, count=1)
    assert found.best.fits
    assert found.miss.step_seconds < found.best.step_seconds
    assert found.miss.missing_bytes > 0
    faster = [
        c
        for c in search._Search(_query(found), print).kinds(FULL)[0]
        if c.step_seconds < found.best.step_seconds
    ]
    budget = found.budget_bytes
    assert all(1.05 * c.needed_bytes > 0.95 * budget for c in faster)


def _query(found):
    return search.Query(
        *(found.model, found.config, found.memory, found.gpus, found.batch, found.seq_len),
        found.target,
    )


def test_reserved_bytes_decide_instead_of_allocated_bytes(by_formula):
    found = search.plan("llama-2-7b", "24GB", learned=FULL, count=1)
    allocated = found.best.measured.allocated_bytes
    context = found.memory.total_bytes - found.budget_bytes
    between = allocated + context + 2**20  # enough for the allocated bytes
    less = search.plan("llama-2-7b", between, learned=FULL, count=1)
    assert less.best is None or less.best.recipe != found.best.recipe


def test_gb_are_not_gib(by_formula):
    gb, gib = (search.plan("llama-2-7b", text, learned=FULL, count=1) for text in ("24GB", "24GiB"))
    difference = (24 * GIB - 24 * 10**9) * (1 - margin_share())
    assert gib.budget_bytes - gb.budget_bytes == pytest.approx(difference, abs=2)


def test_few_recipes_are_measured(by_formula):
    search.plan("llama-2-7b", "24GB", count=2)
    assert len(by_formula) <= 2 * search.TRIES + 2  # the next faster one, and without techniques


def test_limits_are_predicted_to_fit_and_nearly_fill_the_memory(by_formula, monkeypatch):
    """Reserved bytes beyond the allocated ones don't grow with the length, so no scaling of the
    formula would find the limit."""
    plain, sizes = search.measured, []

    def answer(setting, *given, **of):
        found = plain(setting, *given, **of)
        sizes.append((setting.batch, setting.seq_len))
        return replace(found, reserved_bytes=found.allocated_bytes + 3 * GIB)

    monkeypatch.setattr(search, "measured", answer)
    longer = replace(SEVEN_BILLION, seq_len=2**20)
    found = search.plan(longer, "24GB", learned=(Recipe(qlora=True),), count=1)
    option, budget = found.best, found.budget_bytes

    def needed(batch, seq_len):
        return training_bytes(longer, option.recipe, batch, seq_len).peak_bytes + 3 * GIB

    batch, longest = option.largest_batch, option.longest
    assert {(batch, 2_048), (1, longest)} <= set(sizes)
    assert needed(batch, 2_048) <= budget < needed(batch + 1, 2_048)
    assert 0.98 * budget < needed(1, longest) <= budget
    assert len(sizes) <= 2 * MOST_PREDICTIONS


def test_the_training_without_techniques_is_predicted_too(by_formula):
    found = search.plan("llama-2-7b", "24GB", count=1)
    peak = training_bytes(SEVEN_BILLION, AS_IT_IS, 1, 2048).peak_bytes
    assert found.as_it_is.needed_bytes == round(1.05 * peak)
    assert found.to_dict()["verdict"] == "fits with another recipe"


def test_a_recipe_that_the_formula_calls_too_large_is_predicted_before_it_is_refused(monkeypatch):
    """Here everything needs a tenth of the formula's bytes: so the fastest recipe of all fits."""

    def answer(setting, names, **of):
        recipe = next(
            r
            for r in (*everything(setting.batch), AS_IT_IS)
            if (r.techniques, r.dtype) == (names, setting.dtype)
        )
        peak = training_bytes(setting.config, recipe, setting.batch, setting.seq_len).peak_bytes
        return Measured(peak // 10, peak // 10, {}, "backward", False, None)

    monkeypatch.setattr(search, "measured", answer)
    found = search.plan("llama-2-7b", "24GB", learned=FULL, count=1)
    slower = search.plan("llama-2-7b", "24GB", learned=FULL, count=1, margin="20GB")
    assert found.best.step_seconds < slower.best.step_seconds
    by_formula = training_bytes(SEVEN_BILLION, found.best.recipe, 1, 2048).peak_bytes
    assert by_formula > found.budget_bytes
    assert found.best.largest_batch >= 1
    assert found.miss is None


def test_groups_are_measured_in_turn_and_not_ranked_by_time(by_formula):
    """LoRA is faster than what fits of full fine-tuning, and comes after it."""
    found = search.plan("llama-2-7b", "24GB")
    groups = [option.recipe.group for option in found.options]
    assert groups == list(GROUPS)
    full, lora, _ = (option.step_seconds for option in found.options)
    assert lora < full
    more = search.plan("llama-2-7b", "24GB", count=4)
    assert [o.recipe.group for o in more.options] == [GROUPS[0], *GROUPS]
    assert found.best.recipe.group == GROUPS[0]


def test_qlora_decodes_its_weights_in_each_pass():
    lora, qlora = seconds_of(recipe=Recipe(lora=True)), seconds_of(recipe=Recipe(qlora=True))
    assert lora.keys() == qlora.keys() - {"decoding"}
    recomputed = seconds_of(recipe=Recipe(qlora=True, checkpointing="checkpointing"))
    assert recomputed["decoding"] == pytest.approx(1.5 * qlora["decoding"])
    twice = seconds_of(recipe=Recipe(qlora=True, accumulation=True), batch=2)
    assert twice["decoding"] == pytest.approx(2 * qlora["decoding"])


def test_the_command_has_the_adapters(by_formula):
    adapters = Adapters(32, "query,value")
    [option] = search.plan(
        "llama-2-7b", "24GB", learned=(Recipe(qlora=True, adapters=adapters),), count=1
    ).options
    assert option.recipe.words.split(", ")[1] == "QLoRA rank 32 on query,value"
    found = search.plan("llama-2-7b", "24GB", learned=(option.recipe.learned,), count=1)
    assert found.command().endswith(" --lora-rank 32 --lora-targets query,value")


def test_if_nothing_fits_the_smallest_is_named(by_formula):
    found = search.plan("llama-3-405b", "24GB")
    assert found.best is None
    assert found.options == ()
    assert found.miss.missing_bytes > 0
    assert "lacks" in str(found)
    with pytest.raises(ValueError, match="nothing fits 24GB"):
        found.command()


def test_a_failing_recipe_is_reported_and_the_next_is_tried(monkeypatch):
    def broken(setting, names, **of):
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr(search, "measured", broken)
    found = search.plan("25m", "2GiB", count=1)
    assert found.best is None
    assert any("no such operator" in line for line in found.failures)


def test_the_command_names_the_recipe(by_formula):
    found = search.plan("llama-2-7b", "24GB", learned=FULL, count=1)
    recipe = found.best.recipe
    assert found.command() == (
        f"memlab train --model llama-2-7b --dtype bfloat16 --batch 1 --seq 2048 "
        f"--technique {recipe.techniques}"
    )


def test_a_plan_is_plain_data(by_formula):
    found = search.plan("llama-2-7b", "24GB", count=1).to_dict()
    margin = math.ceil(margin_share() * 24 * 10**9)
    assert found["budget_bytes"] == 24 * 10**9 - 616 * 2**20 - margin
    assert found["options"][0]["command"].startswith("memlab train")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "llama-2"}, "llama-2"),
        ({"memory": "plenty"}, "got 'plenty' as a memory"),
        ({"memory": "24"}, "24"),
        ({"gpus": 0}, "got gpus=0; give an integer from 1"),
        ({"batch": 0}, "got batch=0; give an integer from 1"),
        ({"seq_len": 100_000}, "got sequences of 100000 tokens; 25m takes 1 to 512"),
        ({"count": 0}, "got count=0"),
    ],
)
def test_bad_input_is_one_sentence(given, sentence):
    asked = {"model": "25m", "memory": "2GiB"} | given
    with pytest.raises(ValueError, match=sentence) as error:
        search.plan(asked.pop("model"), asked.pop("memory"), **asked)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------ real measurements


def test_a_plan_for_the_cpu_gives_the_real_steps_bytes():
    """Compare it with the measured peak of a real step with the recipe."""
    tiny = replace(PRESETS["tiny"], layers=6)
    found = search.plan(tiny, 640 * 2**20, learned=FULL, count=1, seq_len=64, batch=2, target="cpu")
    recipe = found.best.recipe
    training = build(Setting(tiny, 2, 64, recipe.dtype), combined(recipe.techniques))
    training.step()
    assert found.best.measured.allocated_bytes == metered(training).peak_bytes
    assert found.best.measured.reserved_bytes is None


@pytest.mark.slow
def test_several_workers_find_the_same_plan():
    tiny = replace(PRESETS["tiny"], layers=6)
    asked = partial(search.plan, tiny, 2**30, learned=usual_kinds()[2:4], seq_len=32, target="cpu")
    assert asked(workers=2) == asked(workers=1)


def test_repeated_measurements_are_cached():
    measuring.clear_cache()
    tiny = replace(PRESETS["tiny"], layers=5)
    for _ in range(2):
        search.plan(tiny, 2**30, learned=FULL, count=1, seq_len=32, target="cpu")
    cache = measuring._answer.cache_info()
    assert cache.hits == cache.misses > 0
