"""Lion: bitwise equal to lion_pytorch, 8-bit steps close to bitsandbytes, and its bytes."""

import pytest
import torch
from torch import nn

import memlab
from memlab.optim import Lion, Lion8bit
from memlab.optim.lion import lion_
from memlab.optim.moments import MIN_NUMEL
from memlab.quantize import dynamic_code
from memlab.quantize.codebooks import ThresholdTables

MIB = 2**20
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.3}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(optimizer, steps: int) -> torch.Tensor:
    """Return the weights after steps with Gaussian gradients, the same for every optimizer."""
    ((weight,),) = (group["params"] for group in optimizer.param_groups)
    generator = seeded(1)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach()


def start(numel: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(numel, generator=seeded()))


@pytest.mark.parametrize("settings", [SETTINGS, {"lr": 1e-3, "weight_decay": 0.0}])
def test_twenty_steps_are_bitwise_equal_to_lion_pytorch(settings):
    package = pytest.importorskip("lion_pytorch")
    ours = Lion([start(5000)], **settings)
    theirs = package.Lion([start(5000)], decoupled_weight_decay=False, **settings)
    assert torch.equal(run(ours, 20), run(theirs, 20))
    (state,), (expected,) = ours.state.values(), theirs.state.values()
    assert torch.equal(state["exp_avg"], expected["exp_avg"])


def test_lion_matches_algorithm_2_line_by_line():
    lr, beta1, beta2, decay = 0.01, 0.9, 0.99, 0.1
    weight, m = 0.7, 0.0
    tensors = [torch.tensor([number], dtype=torch.float64) for number in (weight, m)]
    for gradient in (0.3, -0.001, -5.0, 0.0, 0.2):
        average = beta1 * m + (1 - beta1) * gradient
        weight -= lr * ((average > 0) - (average < 0) + decay * weight)
        m = beta2 * m + (1 - beta2) * gradient
        gradient_tensor = torch.tensor([gradient], dtype=torch.float64)
        lion_(
            tensors[0], gradient_tensor, tensors[1], lr=lr, betas=(beta1, beta2), weight_decay=decay
        )
        assert tensors[0].item() == pytest.approx(weight, rel=1e-13)
        assert tensors[1].item() == pytest.approx(m, rel=1e-13)


@pytest.mark.parametrize("cls", [Lion, Lion8bit])
def test_every_weight_moves_by_lr_or_not_at_all(cls):
    weight = nn.Parameter(torch.zeros(5000))
    optimizer = cls([weight], lr=0.25)
    weight.grad = torch.randn(5000, generator=seeded())
    weight.grad[::3] = 0
    before = weight.grad.sign()
    optimizer.step()
    assert torch.equal(weight, -0.25 * before)


def test_weights_without_gradients_do_not_move_in_8_bits():
    weight = start(5000)
    before, is_idle = weight.detach().clone(), torch.arange(5000) % 3 == 0
    optimizer = Lion8bit([weight], lr=0.1)
    for seed in range(50):
        weight.grad = torch.randn(5000, generator=seeded(seed)).masked_fill(is_idle, 0)
        optimizer.step()
    assert torch.equal(weight[is_idle], before[is_idle])


def test_weights_below_4096_elements_are_bitwise_equal_to_lion():
    small = MIN_NUMEL - 1
    ours, exact = Lion8bit([start(small)], **SETTINGS), Lion([start(small)], **SETTINGS)
    assert torch.equal(run(ours, 20), run(exact, 20))


@pytest.mark.parametrize(("cls", "unmoved"), [(Lion, [300]), (Lion8bit, list(range(256, 512)))])
def test_a_weight_with_nan_momentum_does_not_move(cls, unmoved):
    """The sign of NaN is zero. In 8 bits the whole block stops, from the next step on."""
    weight = start(5000)
    optimizer = cls([weight], lr=0.1)
    weight.grad = torch.ones(5000)
    weight.grad[300] = torch.nan
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.ones(5000)
    optimizer.step()
    assert (weight == before).nonzero().view(-1).tolist() == unmoved


# ------------------------------------------------------------------ bitsandbytes


def momentum_of(state: dict) -> torch.Tensor:
    """Decode bitsandbytes' 8-bit momentum."""
    numel = state["qmap1"][state["state1"].long()].view(-1)
    return numel * state["absmax1"].repeat_interleave(256)[: len(numel)]


def test_steps_differ_from_bitsandbytes_in_at_most_15_signs():
    """Each step starts from bitsandbytes' state, so that differences do not accumulate.

    Signs differ where the average is close to zero and the last bit decides.
    """
    package = pytest.importorskip("bitsandbytes")
    numel = 10_000
    ours, theirs = start(numel), start(numel)
    optimizer, reference = (
        Lion8bit([ours], **SETTINGS),
        package.optim.Lion8bit([theirs], **SETTINGS),
    )
    generator = seeded(1)
    flips = []
    for _ in range(50):
        ours.grad = torch.randn(numel, generator=generator) * 0.01
        theirs.grad = ours.grad.clone()
        optimizer.step(), reference.step()
        differs = (ours - theirs).abs() > 1e-6
        assert (ours - theirs).abs().max() < 2.1 * SETTINGS["lr"]
        flips.append(differs.sum().item())
        state, expected = optimizer.state[ours], reference.state[theirs]
        decoded = state["exp_avg_code"][state["exp_avg_codes"].int()]
        momentum = decoded * state["exp_avg_scales"].repeat_interleave(256)[:numel]
        assert ((momentum - momentum_of(expected)).abs() > 1e-3).sum() < 20
        with torch.no_grad():
            ours.copy_(theirs)
            state["exp_avg_codes"].copy_(expected["state1"].view(-1))
            state["exp_avg_scales"].copy_(expected["absmax1"])
    assert max(flips) <= 15


# ------------------------------------------------------------------ bytes


def traced_of(cls, numel: int) -> memlab.Trace:
    model = nn.Module()
    model.weight = start(numel)
    optimizer = cls(model.parameters())
    model.weight.grad = torch.ones(numel)
    optimizer.step()
    return memlab.measure(optimizer.step, model=model, optimizer=optimizer)


def table_bytes() -> int:
    tables = vars(ThresholdTables.of(dynamic_code(signed=True), "nearest")).values()
    return sum(table.nbytes for table in tables if torch.is_tensor(table))


@pytest.mark.parametrize("numel", [1, 4095, 4096, 4097, 10_000, MIB])
def test_state_bytes_match_the_formula(numel):
    """4n bytes, or n + 4⌈n/256⌉ in 8 bits plus the shared codebook and its lookup table."""
    shared_bytes = 1024 + table_bytes()
    quantized_bytes = numel + 4 * -(-numel // 256) + shared_bytes
    expected = quantized_bytes if numel >= 4096 else 4 * numel
    assert traced_of(Lion, numel).at_end["optimizer_state"] == 4 * numel
    assert traced_of(Lion8bit, numel).at_end["optimizer_state"] == expected


def test_temporaries_of_an_8_bit_step_do_not_grow_with_the_weight():
    small, large = (traced_of(Lion8bit, numel) for numel in (MIB, 4 * MIB))
    temporary_bytes = large.peak_bytes - large.live_bytes
    assert temporary_bytes == small.peak_bytes - small.live_bytes <= 8 * MIB
