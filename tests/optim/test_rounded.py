"""AdamW in bfloat16: torch's own AdamW, up to a rounding at random; its bytes."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import memlab
from memlab.internals.chunks import CHUNK_SIZE
from memlab.optim import RoundedAdamW

SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def start(numbers: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and a gradient, both bfloat16."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(numbers, generator=generator).bfloat16() for _ in range(2))


def stepped(seed: int, steps: int = 1) -> tuple[nn.Parameter, RoundedAdamW]:
    numbers, gradient = start()
    weight = nn.Parameter(numbers.clone())
    generator = torch.Generator().manual_seed(seed)
    optimizer = RoundedAdamW([weight], **SETTINGS, generator=generator)
    for _ in range(steps):
        weight.grad = gradient.clone()
        optimizer.step()
    return weight, optimizer


def torchs_step() -> dict[str, torch.Tensor]:
    numbers, gradient = start()
    weight = nn.Parameter(numbers.float())
    weight.grad = gradient.float()
    optimizer = torch.optim.AdamW([weight], **SETTINGS, foreach=False)
    optimizer.step()
    return {"weight": weight.detach(), **optimizer.state[weight]}


def neighbours(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 towards zero, and the one away from it."""
    towards = numbers.view(torch.int32) & ~0xFFFF
    return towards.view(torch.float32), (towards + 0x10000).view(torch.float32)


def test_a_step_is_torchs_rounded_to_a_neighbour():
    exact = torchs_step()
    for seed in range(20):
        weight, optimizer = stepped(seed)
        kept = {"weight": weight.detach(), **optimizer.state[weight]}
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            assert kept[name].dtype == torch.bfloat16
            low, high = neighbours(exact[name] * (1 + 1e-6))
            lower, higher = neighbours(exact[name] * (1 - 1e-6))
            found = kept[name].float()
            assert ((found == low) | (found == high) | (found == lower) | (found == higher)).all()


def test_the_mean_of_many_steps_is_torchs():
    exact = torchs_step()["weight"].double()
    mean = torch.stack([stepped(seed)[0].detach().double() for seed in range(400)]).mean(0)
    steps = exact.abs() * 2**-7  # at most a step of bfloat16
    assert ((mean - exact).abs() <= 5 * steps / 2 / 400**0.5).all()


def test_a_second_moment_falls_when_gradients_do():
    """To the nearest it would stay: 0.999 of a bfloat16 is that bfloat16."""
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
        optimizer.step()  # Adam moves by lr where gradients agree
    assert abs(weight.mean(dtype=torch.float32).item() - 0.8) < 0.01


def test_the_same_generator_gives_the_same_and_the_users_stream_is_untouched():
    before = torch.get_rng_state()
    assert torch.equal(stepped(1, steps=3)[0], stepped(1, steps=3)[0])
    assert not torch.equal(stepped(1, steps=3)[0], stepped(2, steps=3)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_the_closure_returns_is_handed_on_and_a_frozen_weight_stays():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = RoundedAdamW([weight])
    assert optimizer.step(lambda: 7) == 7
    assert torch.equal(weight, torch.ones(3, dtype=torch.bfloat16))


def test_every_piece_of_a_large_weight_is_stepped():
    weight = nn.Parameter(torch.ones(CHUNK_SIZE + 5, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    RoundedAdamW([weight], lr=0.5, weight_decay=0).step()
    assert weight.eq(0.5).float().mean() > 0.99  # 0.5 and a millionth


def test_it_goes_on_from_a_state():
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


def test_eight_bytes_a_weight_and_scratch_for_a_piece():
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
    # Weight and two moments in float32; to round one of them, random bits, a size and a flag each.
    assert trace.peak_bytes - trace.live_bytes == (3 * 4 + 4 + 4 + 1) * CHUNK_SIZE


# ------------------------------------------------------------------ bad input


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"got weights of torch.float32; give bfloat16"):
        RoundedAdamW([nn.Parameter(torch.ones(3))])
