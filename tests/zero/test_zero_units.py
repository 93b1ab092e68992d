"""Which weights are gathered together."""

from dataclasses import replace

import pytest
import torch
from ranked import TIED, model_of
from torch import nn

from memlab.zero import describe, units_of
from memlab.zero.units import ROOT, block_names


def test_the_blocks_of_a_transformer_are_units_and_the_rest_is_the_root():
    units = units_of(model_of(replace(TIED, tied=False)))
    rest = {name for name, unit in units.items() if unit == ROOT}
    assert rest == {"embedding.weight", "norm.weight", "unembedding.weight"}
    assert {units[f"blocks.{n}.mlp.up.weight"] for n in range(3)} == {
        "blocks.0",
        "blocks.1",
        "blocks.2",
    }


def test_the_outermost_list_makes_the_units():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    assert block_names(model) == ["0", "1"]
    assert block_names(nn.ModuleDict({"a": nn.Linear(1, 1), "b": model})) == ["b.0", "b.1"]


def test_a_unit_is_not_confused_with_another_whose_name_starts_the_same():
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(11)))
    assert units_of(model) == {f"{n}.weight": str(n) for n in range(11)}


def test_a_weight_that_two_units_share_belongs_to_the_root_and_counts_once():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    assert units_of(model) == {"0.weight": ROOT, "1.weight": "1"}
    weights = describe(model, torch.optim.SGD(model.parameters()))
    assert [weight.name for weight in weights] == ["0.weight", "1.weight"]


def test_a_weight_that_one_unit_uses_twice_belongs_to_it():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[0][1].weight = model[0][0].weight
    assert set(units_of(model).values()) == {"0"}


def test_units_can_be_chosen():
    units = units_of(model_of(), ["embedding", "blocks.1"])
    assert units["embedding.weight"] == "embedding"
    assert units["blocks.1.mlp.up.weight"] == "blocks.1"
    assert units["blocks.0.mlp.up.weight"] == ROOT


@pytest.mark.parametrize("name", ["block.1", "", "embedding.weight"])
def test_an_unknown_module_is_refused(name):
    with pytest.raises(ValueError, match="which is not a module of the GPT; pass names of modules"):
        units_of(model_of(), [name])


def test_a_unit_inside_another_is_refused():
    with pytest.raises(ValueError, match=r"unit blocks\.0\.mlp is inside unit blocks\.0"):
        units_of(model_of(), ["blocks.0", "blocks.0.mlp"])


def test_weights_are_described_by_shape_group_dtype_and_trained():
    model = nn.Linear(2, 3, dtype=torch.float64)
    model.bias.requires_grad_(False)
    [weight, bias] = describe(model, torch.optim.SGD([{"params": []}, {"params": [model.weight]}]))
    assert (weight.shape, weight.group, weight.dtype) == ((3, 2), 1, torch.float64)
    assert (weight.trained, bias.trained) == (True, False)
