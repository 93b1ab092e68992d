"""The choice of kernels on a GPU, and the effect of each choice."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memlab
from memlab import Kernels


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"got Kernels\(norms='fast'\); use one of 'fused', 'composite'"
    ):
        Kernels(norms="fast")


def test_a_policy_is_immutable():
    with pytest.raises(FrozenInstanceError):
        Kernels().norms = "composite"


def test_a_policy_prints_all_its_choices():
    assert str(Kernels(attention="math")) == (
        "attention math, norms fused, dropout fused, optimizer auto, autocast cuda"
    )


def build():
    """Run a step where every choice matters."""
    model = nn.Sequential(nn.RMSNorm(32), nn.Dropout(0.1), nn.Linear(32, 32)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 4, 16, 32, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
            y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
            loss = y.exp().mean()
        loss.backward()
        optimizer.step()

    return step, model, optimizer


def operators(kernels: Kernels) -> dict[str, str]:
    """Return each allocating operator with the dtype of its last result."""
    events = memlab.predict(build, kernels=kernels).events
    return {event.operator: event.dtype for event in events if event.phase != "before"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("choice", "gone", "come"),
    [
        (
            {"attention": "math"},
            "aten._scaled_dot_product_flash_attention.default",
            "aten._safe_softmax.default",
        ),
        (
            {"attention": "efficient"},
            "aten._scaled_dot_product_flash_attention.default",
            "aten._scaled_dot_product_efficient_attention.default",
        ),
        (
            {"attention": "cudnn"},
            "aten._scaled_dot_product_flash_attention.default",
            "aten._scaled_dot_product_cudnn_attention.default",
        ),
        ({"norms": "composite"}, "aten._fused_rms_norm.default", "aten.rsqrt.default"),
        ({"dropout": "composite"}, "aten.native_dropout.default", None),
        ({"optimizer": "loop"}, "aten._foreach_sqrt.default", "aten.sqrt.default"),
        ({"optimizer": "fused"}, "aten._foreach_sqrt.default", None),
    ],
)
def test_each_choice_changes_its_own_operators(choice, gone, come):
    default, other = operators(Kernels()), operators(Kernels(**choice))
    assert gone in default
    assert gone not in other
    if come is not None:
        assert come in other
        assert come not in default


def test_the_autocast_list_decides_the_dtype():
    assert operators(Kernels())["aten.exp.default"] == "float32"
    assert operators(Kernels(autocast="cpu"))["aten.exp.default"] == "bfloat16"
