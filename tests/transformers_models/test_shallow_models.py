"""Shallow runs give the bytes of the whole model, with every stack of layers."""

import pytest

import memlab
from memlab.configs.gpus import GPUS
from memlab.transformers_models.measuring import predicted
from memlab.transformers_models.recipes import Recipe
from tests.quick import slow

# Tiny weights are too narrow for the fast kernel of bitsandbytes, which says so.
pytestmark = pytest.mark.filterwarnings("ignore:inner dimension")

CARD = GPUS["rtx4090"]
DEEP = {"num_hidden_layers": 9}


def whole(training, recipe):
    return memlab.predict(lambda: training.build(recipe), device="cuda:rtx4090")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "recipe"),
    [
        slow(("llama", DEEP, Recipe(precision="autocast"))),
        slow(("llama", DEEP, Recipe("lora", checkpointing=True))),
        ("llama", DEEP, Recipe("qlora", checkpointing=True)),  # the loader's buffer grows
        slow(("gpt_oss", {"num_hidden_layers": 12}, Recipe())),  # two kinds of layers in turn
        slow(("deepseek_v3", DEEP, Recipe())),  # another first layer
        slow(("t5", {"num_layers": 9}, Recipe())),  # two equal stacks
        slow(("whisper", {"encoder_layers": 8, "decoder_layers": 7}, Recipe())),  # two others
        slow(("jamba", {"num_hidden_layers": 12}, Recipe())),
        slow(("vit", DEEP, Recipe(optimizer="adam8bit"))),
        slow(("mamba2", DEEP, Recipe())),
    ],
    ids=str,
)
def test_shallow_runs_give_the_bytes_of_the_whole_model(family, changes, recipe, training_of):
    training = training_of(family, **changes)
    found = predicted(training, recipe, "cuda:rtx4090", CARD)
    exact = whole(training, recipe)
    assert found.measured.extrapolated
    assert found.measured.allocated_bytes == exact.allocated_bytes
    assert found.measured.reserved_bytes == exact.reserved_bytes
    assert found.measured.at_peak == exact.at_peak


def seconds(training) -> float:
    return sum(predicted(training, Recipe(), "cuda", CARD).seconds.values())


@pytest.mark.slow
def test_seconds_grow_with_the_layers(training_of):
    two, four, nine = (seconds(training_of("llama", num_hidden_layers=n)) for n in (2, 4, 9))
    assert nine == pytest.approx(four + 5 * (four - two) / 2)


def test_a_model_of_unlike_layers_runs_whole(training_of):
    training = training_of("swin")
    found = predicted(training, Recipe(), "cuda", CARD)
    assert not found.measured.extrapolated
    assert (
        found.measured.allocated_bytes
        == memlab.predict(lambda: training.build(Recipe())).allocated_bytes
    )
