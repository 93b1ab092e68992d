"""Shapes of mixtures against transformers' models."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from memlab.configs.config_json import NoShapeHere
from memlab.configs.mixtures import MIXTURES, MixtureConfig, mixture_from

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
MIXTRAL = MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=8)
QWEN = Qwen3MoeConfig(
    **SIZES, intermediate_size=96, moe_intermediate_size=32, num_experts=16, head_dim=32
)


def parameters(model_class, config):
    with torch.device("meta"):
        return sum(weight.numel() for weight in model_class(config).parameters())


@pytest.mark.parametrize(
    ("model_class", "config", "experts"),
    [(MixtralForCausalLM, MIXTRAL, 8), (Qwen3MoeForCausalLM, QWEN, 16)],
)
def test_a_file_has_the_weights_of_transformers_model(model_class, config, experts):
    found = mixture_from(config.to_dict())
    assert (found.experts, found.chosen) == (experts, 2)
    assert found.parameters == parameters(model_class, config)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_the_experts_are_read(name):
    fields = QWEN.to_dict()
    del fields["num_local_experts"]
    assert mixture_from({**fields, name: 16}) == mixture_from(QWEN.to_dict())


def test_without_a_head_dim_heads_divide_the_hidden_size():
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=4)
    assert mixture_from(config.to_dict()).parameters == parameters(Qwen3MoeForCausalLM, config)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_630_071_296),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_presets_have_the_published_number_of_weights(name, parameters):
    assert MIXTURES[name].parameters == parameters


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "deepseek_v3"}, NoShapeHere, "planned for mixtral and qwen3_moe"),
        ({"mlp_only_layers": [0]}, NoShapeHere, "has layers without experts"),
        ({"decoder_sparse_step": 2}, NoShapeHere, "has layers without experts"),
        ({"num_local_experts": "8"}, ValueError, "has num_local_experts '8', wanted an integer"),
        ({"num_experts_per_tok": 0}, ValueError, "has num_experts_per_tok 0, wanted an integer"),
        ({"num_experts_per_tok": 9}, ValueError, "got 9 chosen of 8 experts"),
        ({"hidden_size": None}, ValueError, "has hidden_size None, wanted an integer"),
    ],
)
def test_other_files_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        mixture_from({**MIXTRAL.to_dict(), **change})


def test_more_experts_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match="choose 1 to all of them"):
        MixtureConfig(MIXTURES["mixtral-8x7b"].dense, 4, 5)
