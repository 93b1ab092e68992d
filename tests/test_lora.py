"""LoRA: unchanged outputs at first and after merging, and the bytes of training."""

import copy

import pytest
import torch
from close import assert_close
from torch import nn

import memlab
from memlab.lora import LoRALinear, adapters, add_lora, added_weights, merge_lora
from memlab.model import GPT, PRESETS
from memlab.train import Setting, build, combined

IN, OUT, RANK = 24, 40, 4


def two_layers(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN)).to(dtype)


def inputs(dtype=torch.float64) -> torch.Tensor:
    return torch.randn(8, IN, dtype=dtype, generator=torch.Generator().manual_seed(1))


def with_random_changes(model: nn.Module) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            nn.init.normal_(layer.up)
    return model


# ------------------------------------------------------------------ values


def test_adding_lora_does_not_change_the_outputs():
    model, x = two_layers(), inputs()
    before = model(x)
    assert add_lora(model, RANK) == ["0", "2"]
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (1.0, 0.25), (32, 8.0)])
def test_a_layer_is_the_frozen_layer_plus_its_scaled_change(alpha, scale):
    model, x = two_layers(), inputs()
    W, bias = model[0].weight.clone(), model[0].bias.clone()
    add_lora(model, RANK, alpha=alpha)
    layer = with_random_changes(model)[0]
    expected = x @ (W + scale * layer.up @ layer.down).T + bias
    assert_close(layer(x), expected)
    assert layer.down.shape == (RANK, IN)
    assert layer.up.shape == (OUT, RANK)


def test_the_gradient_equals_that_for_a_weight_w_plus_ba():
    model, x = two_layers(), inputs()
    plain = copy.deepcopy(model)
    add_lora(model, RANK)
    with_random_changes(model)
    down, up = (t.detach().clone().requires_grad_() for t in (model[0].down, model[0].up))
    model(x).square().sum().backward()
    first = x @ (plain[0].weight.detach() + 2 * up @ down).T + plain[0].bias.detach()
    second = plain[2].weight.detach() + 2 * (model[2].up @ model[2].down).detach()
    (first.tanh() @ second.T + plain[2].bias.detach()).square().sum().backward()
    assert_close(model[0].down.grad, down.grad)
    assert_close(model[0].up.grad, up.grad)


@pytest.mark.parametrize(
    ("dtype", "terms"), [(torch.float64, 256), (torch.float32, 256), (torch.bfloat16, 8)]
)
def test_merging_keeps_the_function(dtype, terms):
    model, x = two_layers(dtype), inputs(dtype)
    add_lora(model, RANK)
    before = with_random_changes(model)(x)
    assert merge_lora(model) == ["0", "2"]
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert_close(model(x), before, terms=terms)


def test_merging_rounds_once():
    model = two_layers(torch.bfloat16)
    add_lora(model, RANK)
    layer = with_random_changes(model)[0]
    weight, up, down = (t.double() for t in (layer.frozen.weight, layer.up, layer.down))
    expected = (weight + 2 * up @ down).bfloat16()
    merge_lora(model)
    differing = (model[0].weight != expected).float().mean()
    assert differing < 0.01  # the sum is computed in float32, not in float64


def test_training_learns_a_low_rank_change():
    """The target differs from the frozen layer by a change of the same rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    change = torch.randn(OUT, RANK) @ torch.randn(RANK, IN) / IN
    target = (model[0].weight + change).detach()
    add_lora(model, RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0)
    x = torch.randn(256, IN)
    for _ in range(400):
        optimizer.zero_grad()
        (model(x) - x @ target.T).square().mean().backward()
        optimizer.step()
    merge_lora(model)
    assert (model[0].weight - target).abs().max() < 0.02 * change.abs().max()


# ------------------------------------------------------------------ selecting layers


def test_only_the_chosen_layers_are_replaced_and_everything_else_is_frozen():
    model = GPT(PRESETS["tiny"])
    names = add_lora(model, 2, where=lambda name: name.endswith(("query", "value")))
    assert len(names) == 2 * PRESETS["tiny"].layers
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == [f"{name}.{part}" for name in names for part in ("down", "up")]


def test_a_shared_layer_has_one_change():
    layer = nn.Linear(IN, IN)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    assert add_lora(model, RANK) == ["0", "2"]
    assert model[0] is model[2]
    weight = layer.weight.clone()
    with_random_changes(model)
    change = 2 * model[0].up @ model[0].down
    assert merge_lora(model) == ["0", "2"]
    assert model[0] is model[2] is layer
    assert_close(layer.weight, weight + change)


def test_the_adapters_alone_restore_the_model():
    model, x = two_layers(), inputs()
    fresh = copy.deepcopy(model)
    add_lora(model, RANK)
    saved = adapters(with_random_changes(model))
    assert list(saved) == ["0.down", "0.up", "2.down", "2.up"]
    add_lora(fresh, RANK)
    missing, unexpected = fresh.load_state_dict(saved, strict=False)
    assert unexpected == []
    assert not any("down" in name or "up" in name for name in missing)
    assert torch.equal(fresh(x), model(x))


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("name", ["tiny", "llama-3-8b"])
def test_the_added_weights_follow_the_formula(name):
    with torch.device("meta"):
        model = GPT(PRESETS[name])
    sizes = [m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)]
    add_lora(model, 8)
    added = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert added == sum(added_weights(columns, rows, 8) for rows, columns in sizes)


def test_frozen_weights_have_no_gradient_and_no_state():
    training = build(Setting("tiny", 2, 32), combined("plain"))
    frozen = sum(p.nbytes for p in training.model.parameters())
    add_lora(training.model, 2)
    trained = [p for p in training.model.parameters() if p.requires_grad]
    n = sum(p.numel() for p in trained)
    optimizer = torch.optim.AdamW(trained, foreach=False)
    tokens = torch.zeros(2, 32, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        training.model(tokens, tokens).backward()
        optimizer.step()

    step()
    at_end = memlab.measure(step, model=training.model, optimizer=optimizer).at_end
    assert at_end["parameters"] == frozen + 4 * n
    assert at_end["gradients"] == 4 * n
    assert at_end["optimizer_state"] == 8 * n + 4 * len(trained)


# ------------------------------------------------------------------ errors


def test_invalid_calls_are_errors():
    model = two_layers()
    with pytest.raises(ValueError, match="got rank 0; give at least 1"):
        add_lora(model, 0)
    with pytest.raises(ValueError, match=r"selected no nn\.Linear; the model has 0, 2, …; sel"):
        add_lora(model, 2, where=lambda name: "query" in name)
    with pytest.raises(ValueError, match="the model has none"):
        add_lora(nn.Linear(2, 2), 2)  # the root module has no parent to replace it in
    assert all(parameter.requires_grad for parameter in model.parameters())  # unchanged
    add_lora(model, 2)
    with pytest.raises(ValueError, match=r"call merge_lora\(model\) first"):
        add_lora(model, 2)
