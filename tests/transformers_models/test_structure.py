"""Which layers of a model are alike."""

import pytest
from torch import nn

from memlab.transformers_models.structure import (
    Stack,
    adapted_layers,
    linear_share,
    shorten,
    stacks,
)


def layer(width=4, **settings):
    made = nn.Sequential(nn.Linear(width, width))
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def model_of(*layers):
    model = nn.Module()
    model.body = nn.Module()
    model.body.layers = nn.ModuleList(layers)
    model.head = nn.Linear(4, 4)
    return model


@pytest.mark.parametrize(
    ("layers", "head", "unit"),
    [
        ([layer() for _ in range(4)], 0, 1),
        ([layer(layer_idx=n) for n in range(4)], 0, 1),  # the position makes no difference
        ([layer(window=8 * (n % 2)) for n in range(6)], 0, 2),
        ([layer(8), *[layer() for _ in range(4)]], 1, 1),
        ([layer(8), layer(8), *[layer(window=n % 3) for n in range(7)]], 2, 3),
        ([layer(n + 1) for n in range(4)], 4, 1),
        ([*[layer() for _ in range(4)], layer(8)], 5, 1),  # another last layer: nothing repeats
    ],
)
def test_repetition(layers, head, unit):
    assert stacks(model_of(*layers)) == (Stack("body.layers", len(layers), head, unit),)


def test_lists_within_layers_are_no_stacks():
    layers = [nn.ModuleList([layer(), layer()]) for _ in range(3)]
    assert [stack.path for stack in stacks(model_of(*layers))] == ["body.layers"]


def test_a_list_without_weights_is_no_stack():
    assert stacks(model_of(nn.ReLU(), nn.ReLU())) == ()


def test_a_shortened_stack_keeps_its_first_layers():
    layers = [layer() for _ in range(4)]
    model = model_of(*layers)
    shorten(model, {"body.layers": 2})
    assert list(model.body.layers) == layers[:2]


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("all", "all-linear"),
        ("attention", "k_proj,o_proj,q_proj,v_proj"),
        ("mlp", "c_fc,c_proj"),
        ("q_proj,c_fc", "c_fc,q_proj"),
    ],
)
def test_adapted_layers(targets, layers, training_of):
    assert adapted_layers(training_of("starcoder2").skeleton, targets) == layers


def test_an_unknown_layer_is_one_sentence(training_of):
    with pytest.raises(ValueError, match="got 'wq' as a layer with adapters; give all, attention"):
        adapted_layers(training_of("starcoder2").skeleton, "wq")


def test_the_share_of_linear_layers():
    model = model_of(layer(), layer())  # two of 4 × 4 weights and 4 biases, and such a head
    assert linear_share(model) == 32 / 60
