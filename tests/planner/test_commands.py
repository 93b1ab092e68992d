"""The command that trains with a plan's recipe, on one GPU or several."""

from types import SimpleNamespace

import pytest

from memlab.cli.plan_recipes import report
from memlab.cli.plan_report import show
from memlab.configs.torchrun import torchrun
from memlab.planner import search
from memlab.planner.formulas import training_bytes
from memlab.planner.measuring import Measured
from memlab.planner.options import command
from memlab.planner.recipes import Recipe, recipes
from memlab.train import TECHNIQUES


@pytest.mark.parametrize(
    ("ranks", "machines", "on_each"), [(2, 1, 2), (8, 1, 8), (16, 2, 8), (12, 2, 6), (11, 11, 1)]
)
def test_ranks_are_spread_evenly_over_machines_of_at_most_eight(ranks, machines, on_each):
    words = torchrun(ranks).split()
    assert int(words[words.index("--nproc-per-node") + 1]) == on_each
    assert ("--nnodes" in words) == (machines > 1)
    if machines > 1:
        assert int(words[words.index("--nnodes") + 1]) == machines
        assert words[words.index("--rdzv-endpoint") + 1] == "HOST:29500"
    assert words[-2:] == ["-m", "memlab"]


def test_the_command_for_several_gpus_has_the_stage_and_the_ranks():
    asked = SimpleNamespace(model="llama-3-8b", gpus=8, batch=1, seq_len=2048)
    recipe = Recipe("master-weights", checkpointing="checkpointing", zero_stage=3)
    assert command(asked, recipe) == (
        "torchrun --nproc-per-node 8 -m memlab train --model llama-3-8b --dtype bfloat16 --batch 1 "
        "--seq 2048 --technique checkpointing+master-weights --zero 3 --ranks 8"
    )


def test_several_ranks_only_get_recipes_that_they_can_run():
    """Also in stage 0, which shards nothing."""
    own_step = {name for name, row in TECHNIQUES.items() if "stepping" in row.plugs}
    assert {"step-in-backward", "streamed-layers"} <= own_step
    alone, on_ranks = (
        {name for recipe in recipes(Recipe(), sequences=1, gpus=gpus) for name in recipe.rows}
        for gpus in (1, 4)
    )
    assert alone & own_step
    assert not on_ranks & own_step
    assert {recipe.zero_stage for recipe in recipes(Recipe("float32"), sequences=1, gpus=4)} == {
        *range(4)
    }


@pytest.fixture
def by_formula(monkeypatch):
    """Replace predictions by one number: this tests the output."""

    def answer(setting, names, ranks=1, stage=0, adapters=None):
        peak = training_bytes(setting.config, Recipe(), setting.batch, setting.seq_len).peak_bytes
        return Measured(peak, peak, {"parameters": peak}, "backward", False, None)

    monkeypatch.setattr(search, "measured", answer)


def test_a_plan_for_several_machines_explains_the_host(by_formula, capsys):
    found = search.plan("25m", "24GB", gpus=16, count=1)
    show(report(found))
    printed = capsys.readouterr().out
    assert printed.count("torchrun --nnodes 2 ") == 2  # without techniques, and the recipe
    assert f" --zero {found.best.recipe.zero_stage} --ranks 16\n" in printed
    assert printed.endswith("\nRun it on each machine; replace HOST by the name of the first.\n")


@pytest.mark.parametrize(("model", "stops"), [("llama-3-70b", True), ("llama-3-8b", False)])
def test_a_model_that_is_too_large_to_be_made_whole_is_named(monkeypatch, capsys, model, stops):
    monkeypatch.setattr(
        search, "measured", lambda *given, **more: Measured(1, 1, {}, "backward", False, None)
    )
    found = search.plan(model, "a100-80", gpus=64, count=1, learned=(Recipe("master-weights"),))
    show(report(found))
    printed = " ".join(capsys.readouterr().out.split())
    assert ("its command stops, because memlab makes the whole model, 131.42 GiB" in printed) == (
        stops
    )
    assert ("its command stops" in printed) == stops
