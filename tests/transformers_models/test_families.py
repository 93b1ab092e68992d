"""A dry run counts the bytes of a real step, for a tiny model of each family."""

import pytest
import torch

import memlab
from memlab.transformers_models.recipes import Recipe
from tests.quick import slow
from tests.transformers_models.configs import TINY

FAMILIES = sorted(TINY)
# One of each kind of architecture; the others are as alike as their code.
QUICK = {
    *("gemma2", "mixtral", "deepseek_v3", "gpt2", "mamba2"),
    *("bert", "t5", "whisper", "vit", "convnext", "wav2vec2", "qwen2_vl"),
}


def peak(training, recipe) -> int:
    torch.manual_seed(0)
    step, model, optimizer = training.build(recipe, "cpu")
    step()
    return memlab.measure(step, model=model, optimizer=optimizer).peak_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", [name if name in QUICK else slow((name,)) for name in FAMILIES], ids=str
)
def test_a_dry_step_has_the_bytes_of_a_real_one(family, training_of):
    training = training_of(family)
    with memlab.dry_run():
        dry = peak(training, Recipe())
    assert dry == peak(training, Recipe())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(precision="autocast", checkpointing=True),
        Recipe(precision="bfloat16", optimizer="sgd"),
        Recipe("lora", attention="eager"),
        Recipe("qlora", checkpointing=True),
    ],
    ids=str,
)
def test_so_it_has_with_each_recipe(recipe, training_of):
    training = training_of("mistral")
    with memlab.dry_run():
        dry = peak(training, recipe)
    assert dry == peak(training, recipe)


@pytest.mark.slow
def test_how_the_published_weights_are_quantized_makes_no_difference(training_of):
    recipe = Recipe("qlora", checkpointing=True)
    published = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    with memlab.dry_run():
        as_published = peak(training_of("gpt_oss", quantization_config=published), recipe)
        plain = peak(training_of("gpt_oss"), recipe)
    assert as_published == plain
