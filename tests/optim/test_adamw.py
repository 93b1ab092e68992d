"""AdamW: torch's results to the last digits, its longest step, and its bytes."""

from functools import partial

import pytest
import torch
from close import assert_close
from torch import nn

import memlab
from memlab.internals.chunks import CHUNK_SIZE
from memlab.optim import AdamW
from memlab.optim.adamw import adamw_

torchs = partial(torch.optim.AdamW, foreach=False)

SETTINGS = [
    {},
    {"lr": 3e-3, "weight_decay": 0.3},
    {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    {"betas": (0.0, 0.0), "weight_decay": 0.1},
    {"lr": 0.0},
]


def pair_of(numel: int, **settings) -> tuple[nn.Parameter, nn.Parameter, list]:
    start = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    weights = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    return *weights, [cls([w], **settings) for cls, w in zip((AdamW, torchs), weights, strict=True)]


def step_all(weights, optimizers, gradient) -> None:
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS)
def test_two_hundred_steps_match_torch(settings):
    """Use gradients over six decades and weights around 1."""
    *weights, optimizers = pair_of(500, **settings)
    generator = torch.Generator().manual_seed(1)
    scales = 10 ** (torch.rand(500, generator=generator) * 6 - 4)
    for _ in range(200):
        step_all(weights, optimizers, torch.randn(500, generator=generator) * scales)
    ours, theirs = weights
    assert_close(ours, theirs, terms=200)
    states = [optimizer.state[w] for w, optimizer in zip(weights, optimizers, strict=True)]
    assert states[0]["step"] == states[1]["step"] == 200
    for name in ("exp_avg", "exp_avg_sq"):
        summed = (3 * scales) ** (2 if name.endswith("sq") else 1)
        assert_close(states[0][name], states[1][name], terms=16, summed=summed)


def test_adamw_matches_algorithm_2_line_by_line():
    """Compare float64 with Python floats."""
    lr, beta1, beta2, eps, decay = 0.01, 0.8, 0.9, 1e-3, 0.1
    weight, m, v = 0.7, 0.0, 0.0
    tensors = [torch.tensor([number], dtype=torch.float64) for number in (weight, 0.0, 0.0)]
    for step, gradient in enumerate([0.3, -0.2, 5.0, 0.0, 1e-4], start=1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        weight -= lr * (m_hat / (v_hat**0.5 + eps) + decay * weight)
        given = torch.tensor([gradient], dtype=torch.float64)
        settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
        adamw_(tensors[0], given, *tensors[1:], step=step, **settings)
        assert tensors[0].item() == pytest.approx(weight, rel=1e-13)


def test_the_longest_step_is_7_27_learning_rates():
    """The Cauchy-Schwarz bound is reached by gradients that grow by β2/β1 per step.

    The steps are late, so that the bias corrections are 1.
    """
    beta1, beta2 = 0.9, 0.999
    bound = (1 - beta1) / (1 - beta2) ** 0.5 / (1 - beta1**2 / beta2) ** 0.5
    assert round(bound, 2) == 7.27
    weight = torch.zeros(1, dtype=torch.float64)
    moments = torch.zeros(2, 1, dtype=torch.float64)
    settings = {"lr": 1.0, "betas": (beta1, beta2), "eps": 0.0, "weight_decay": 0.0}
    steps = []
    for n in range(300):
        before = weight.clone()
        gradient = torch.tensor([(beta2 / beta1) ** (n - 300)], dtype=torch.float64)
        adamw_(weight, gradient, *moments, step=20_000 + n, **settings)
        steps.append((weight - before).abs().item())
    assert max(steps) == pytest.approx(bound, rel=1e-6)


def test_state_is_8_bytes_per_weight_and_temporaries_are_one_chunk():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3 * CHUNK_SIZE))
    optimizer = AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    trace = memlab.measure(optimizer.step, model=model, optimizer=optimizer)
    assert trace.at_end["optimizer_state"] == 8 * 3 * CHUNK_SIZE
    assert trace.peak_bytes - trace.live_bytes == 4 * CHUNK_SIZE
