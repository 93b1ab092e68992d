"""Late logits: the loss and the gradients of all logits, from views, slices and casts of them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from torch import nn

import memlab
from memlab.scripts.late_logits import LateLogits, OtherUseError, late_logits

B, T, C, V = 2, 6, 8, 50

USES = {
    "view": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1)),
    "size": lambda x, y: F.cross_entropy(x.view(-1, x.size(-1)), y.view(-1), ignore_index=3),
    "shifted": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, x.shape[-1]), y[:, 1:].reshape(-1)
    ),
    "slice": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "whole slices": lambda x, y: F.cross_entropy(x[:, 1:, :].reshape(-1, V), y[:, 1:].reshape(-1)),
    "float": lambda x, y: F.cross_entropy(
        x.float().view(-1, V), y.view(-1), reduction="sum", label_smoothing=0.1
    ),
    "module": lambda x, y: nn.CrossEntropyLoss()(
        x.flatten(end_dim=1).to(torch.float64), y.view(-1)
    ),
}


@pytest.fixture
def layers():
    torch.manual_seed(0)
    plain = nn.Linear(C, V).double()
    late = copy.deepcopy(plain)
    late_logits(late)
    return plain, late


@pytest.mark.parametrize("use", USES)
def test_the_loss_and_gradients_are_those_of_all_logits(layers, use):
    y = torch.randint(0, V, (B, T))
    found = []
    for layer in layers:
        x = torch.arange(B * T * C).reshape(B, T, C).double().cos().requires_grad_()
        loss = USES[use](layer(x), y)
        loss.backward()
        found.append((loss.double(), x.grad, layer.weight.grad, layer.bias.grad))
    for plain, late in zip(*found, strict=True):
        assert_close(late, plain, dtype=torch.float32)


def test_no_logits_are_made():
    wide = nn.Linear(C, 5_000)
    late_logits(wide)
    x, y = torch.randn(2_000, C, requires_grad=True), torch.randint(0, 5_000, (2_000,))
    trace = memlab.measure(lambda: F.cross_entropy(wide(x), y).backward())
    logits = 4 * 2_000 * 5_000
    assert max(event.bytes for event in trace.events) < logits
    assert isinstance(wide(x), LateLogits)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda x: x.softmax(-1).sum(), "softmax"),
        (lambda x: x[..., :10].sum(), "__getitem__"),
        (lambda x: (x * 2).sum(), "mul"),
        (lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(B, T).long()), "transpose"),
        (lambda x: F.cross_entropy(x.view(-1, V), torch.zeros(B * T, V).double()), "cross_entropy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_use_that_needs_a_gradient_is_refused(layers, use, name):
    with pytest.raises(OtherUseError, match=f"uses its logits in {name}, not only in torch's"):
        use(layers[1](torch.randn(B, T, C).double()))


def test_a_use_without_a_gradient_gets_the_logits(layers):
    plain, late = layers
    x = torch.randn(B, T, C).double()
    assert torch.equal(late(x).argmax(-1), plain(x).argmax(-1))
    with torch.no_grad():
        assert torch.equal(late(x), plain(x))
        assert not isinstance(late(x), LateLogits)


def test_logits_that_no_loss_took_are_refused(layers):
    x = torch.randn(B, T, C).double()
    layers[1](x)
    with pytest.raises(OtherUseError, match="loss is not torch's cross_entropy"):
        layers[1](x)


def test_autocast_of_the_layer_holds_for_the_loss():
    layer = nn.Linear(C, V)
    late_logits(layer)
    with torch.autocast("cpu", torch.bfloat16):
        logits = layer(torch.randn(B, T, C, requires_grad=True))
    assert logits.dtype == torch.bfloat16
    loss = F.cross_entropy(logits.view(-1, V), torch.zeros(B * T).long())
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
