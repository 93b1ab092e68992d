"""SGD with a bfloat16 momentum: torch's steps in float32, unbiased in bfloat16, 2N bytes."""

import pytest
import torch
from torch import nn

import memlab
from memlab.optim import MomentumSGD

SETTINGS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def start(numel: int = 5000) -> nn.Parameter:
    return nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(0)))


def run(optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    """Return the weights after steps with Gaussian gradients, the same for every optimizer."""
    ((weight,),) = (group["params"] for group in optimizer.param_groups)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach()


def test_float32_momentum_is_bitwise_equal_to_torch():
    ours = MomentumSGD([start()], moment_dtype=None, **SETTINGS)
    theirs = torch.optim.SGD([start()], **SETTINGS)
    assert torch.equal(run(ours, 20), run(theirs, 20))


def test_bfloat16_momentum_is_unbiased():
    """Use gradients that round to nearest would ignore, and average 20,000 elements."""
    weight = nn.Parameter(torch.zeros(20_000))
    optimizer = MomentumSGD([weight], lr=0.0, momentum=0.99)
    for gradient in (1.0, *[0.0001] * 20):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    m = 1.0
    for _ in range(20):
        m = 0.99 * m + 0.0001
    (state,) = optimizer.state.values()
    assert state["momentum_buffer"].dtype == torch.bfloat16
    assert state["momentum_buffer"].float().mean().item() == pytest.approx(m, rel=1e-3)


def test_the_state_is_two_bytes_per_weight():
    weight = start()
    optimizer = MomentumSGD([weight])

    def step():
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    trace = memlab.measure(step, optimizer=optimizer)
    assert trace.at_end["optimizer_state"] == 2 * 5000


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_an_invalid_momentum_is_refused(momentum):
    with pytest.raises(ValueError, match="give a number from 0 to below 1"):
        MomentumSGD([start()], momentum=momentum)
