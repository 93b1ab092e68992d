"""AdamW in bfloat16: torch's AdamW up to stochastic rounding, and its bytes."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import memlab
from memlab.internals.chunks import CHUNK_SIZE
from memlab.optim import RoundedAdamW

SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def start(numel: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bfloat16 weights with a gradient."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(numel, generator=generator).bfloat16() for _ in range(2))


def stepped(seed: int, steps: int = 1) -> tuple[nn.Parameter, RoundedAdamW]:
    values, gradient = start()
    weight = nn.Parameter(values.clone())
    generator = torch.Generator().manual_seed(seed)
    optimizer = RoundedAdamW([weight], **SETTINGS, generator=generator)
    for _ in range(steps):
        weight.grad = gradient.clone()
        optimizer.step()
    return weight, optimizer


def torchs_step() -> dict[str, torch.Tensor]:
    values, gradient = start()
    weight = nn.Parameter(values.float())
    weight.grad = gradient.float()
    optimizer = torch.optim.AdamW([weight], **SETTINGS, foreach=False)
    optimizer.step()
    return {"weight": weight.detach(), **optimizer.state[weight]}


def neighbors(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bfloat16 towards zero and the one away from zero."""
    towards_zero = values.view(torch.int32) & ~0xFFFF
    return towards_zero.view(torch.float32), (towards_zero + 0x10000).view(torch.float32)


def test_a_step_is_torchs_rounded_to_a_neighbor():
    exact = torchs_step()
    for seed in range(20):
        weight, optimizer = stepped(seed)
        kept = {"weight": weight.detach(), **optimizer.state[weight]}
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            assert kept[name].dtype == torch.bfloat16
            low, high = neighbors(exact[name] * (1 + 1e-6))
            lower, higher = neighbors(exact[name] * (1 - 1e-6))
            found = kept[name].float()
            assert ((found == low) | (found == high) | (found == lower) | (found == higher)).all()


def test_the_mean_of_many_steps_matches_torch():
    exact = torchs_step()["weight"].double()
    mean = torch.stack([stepped(seed)[0].detach().double() for seed in range(400)]).mean(0)
    steps = exact.abs() * 2**-7  # at most bfloat16's spacing
    assert ((mean - exact).abs() <= 5 * steps / 2 / 400**0.5).all()


def test_a_second_moment_decreases_with_the_gradients():
    """With round to nearest it would stay: 0.999 of a bfloat16 rounds to the same bfloat16."""
    weight = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = RoundedAdamW([weight], generator=torch.Generator().manual_seed(0))
    for gradient in [1.0, *[0.0] * 700]:
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    mean = optimizer.state[weight]["exp_avg_sq"].double().mean().item()
    assert abs(mean / (1e-3 * 0.999**700) - 1) < 0.05


def test_updates_that_nearest_rounding_loses_add_up():
    weight = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = RoundedAdamW(
        [weight], lr=1e-3, weight_decay=0, generator=torch.Generator().manual_seed(0)
    )
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()  # Adam moves by lr if all gradients agree
    assert abs(weight.mean(dtype=torch.float32).item() - 0.8) < 0.01


def test_a_generator_repeats_its_draws_and_the_default_one_is_untouched():
    before = torch.get_rng_state()
    assert torch.equal(stepped(1, steps=3)[0], stepped(1, steps=3)[0])
    assert not torch.equal(stepped(1, steps=3)[0], stepped(2, steps=3)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_closures_result_is_returned_and_a_frozen_weight_stays():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = RoundedAdamW([weight])
    assert optimizer.step(lambda: 7) == 7
    assert torch.equal(weight, torch.ones(3, dtype=torch.bfloat16))


def test_every_chunk_of_a_large_weight_is_stepped():
    weight = nn.Parameter(torch.ones(CHUNK_SIZE + 5, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    RoundedAdamW([weight], lr=0.5, weight_decay=0).step()
    assert weight.eq(0.5).float().mean() > 0.99  # exactly 0.5 plus one millionth


def test_training_resumes_from_a_state():
    weight, optimizer = stepped(0, steps=2)
    twin = nn.Parameter(weight.detach().clone())
    resumed = RoundedAdamW([twin], **SETTINGS, generator=torch.Generator().manual_seed(9))
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))  # torch shares its tensors
    optimizer.generator.manual_seed(9)
    weight.grad, twin.grad = start()[1], start()[1]
    optimizer.step()
    resumed.step()
    assert torch.equal(weight, twin)
    assert resumed.state[twin]["exp_avg"].dtype == torch.bfloat16


# ------------------------------------------------------------------ bytes


def test_eight_bytes_per_weight_and_temporaries_for_one_chunk():
    weight = nn.Parameter(torch.ones(2 * CHUNK_SIZE, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = RoundedAdamW([weight])
    optimizer.step()
    model = nn.Module()
    model.weight = weight
    trace = memlab.measure(optimizer.step, model=model, optimizer=optimizer)
    assert trace.at_end == {
        "parameters": 2 * 2 * CHUNK_SIZE,
        "gradients": 2 * 2 * CHUNK_SIZE,
        "optimizer_state": 4 * 2 * CHUNK_SIZE,
    }
    # float32 weight and two moments; rounding one adds random bits, a magnitude and a flag.
    assert trace.peak_bytes - trace.live_bytes == (3 * 4 + 4 + 4 + 1) * CHUNK_SIZE


# ------------------------------------------------------------------ bad input


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"got weights of torch.float32; give bfloat16"):
        RoundedAdamW([nn.Parameter(torch.ones(3))])
