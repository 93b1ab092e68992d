"""Lion: its authors' weights to the bit, bitsandbytes' in 8 bits but for some signs, its bytes."""

import pytest
import torch
from torch import nn

import memlab
from memlab.optim import Lion, Lion8bit
from memlab.optim.lion import lion_
from memlab.optim.moments import MIN_NUMEL
from memlab.quantize import _ThresholdTables, dynamic_code

MIB = 2**20
SETTINGS = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "weight_decay": 0.3,
}  # decay: a test without sees none


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(optimizer, steps: int) -> torch.Tensor:
    """The weights after so many steps with Gaussian gradients, the same for every optimizer."""
    ((weight,),) = (group["params"] for group in optimizer.param_groups)
    generator = seeded(1)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach()


def start(numbers: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(numbers, generator=seeded()))


@pytest.mark.parametrize("settings", [SETTINGS, {"lr": 1e-3, "weight_decay": 0.0}])
def test_twenty_steps_are_those_of_lion_pytorch_to_the_bit(settings):
    package = pytest.importorskip("lion_pytorch")
    ours = Lion([start(5000)], **settings)
    theirs = package.Lion([start(5000)], decoupled_weight_decay=False, **settings)
    assert torch.equal(run(ours, 20), run(theirs, 20))
    (kept,), (wanted,) = ours.state.values(), theirs.state.values()
    assert torch.equal(kept["exp_avg"], wanted["exp_avg"])


def test_it_is_algorithm_2_line_by_line():
    lr, beta1, beta2, decay = 0.01, 0.9, 0.99, 0.1
    weight, m = 0.7, 0.0
    tensors = [torch.tensor([number], dtype=torch.float64) for number in (weight, m)]
    for gradient in (0.3, -0.001, -5.0, 0.0, 0.2):
        mix = beta1 * m + (1 - beta1) * gradient
        weight -= lr * ((mix > 0) - (mix < 0) + decay * weight)
        m = beta2 * m + (1 - beta2) * gradient
        given = torch.tensor([gradient], dtype=torch.float64)
        lion_(tensors[0], given, tensors[1], lr=lr, betas=(beta1, beta2), weight_decay=decay)
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


def test_weights_that_never_have_a_gradient_stay_in_8_bits_too():
    weight = start(5000)
    before, quiet = weight.detach().clone(), torch.arange(5000) % 3 == 0
    optimizer = Lion8bit([weight], lr=0.1)
    for seed in range(50):
        weight.grad = torch.randn(5000, generator=seeded(seed)).masked_fill(quiet, 0)
        optimizer.step()
    assert torch.equal(weight[quiet], before[quiet])


def test_below_4096_numbers_8_bits_are_lion_to_the_bit():
    small = MIN_NUMEL - 1
    ours, exact = Lion8bit([start(small)], **SETTINGS), Lion([start(small)], **SETTINGS)
    assert torch.equal(run(ours, 20), run(exact, 20))


@pytest.mark.parametrize(("cls", "stands"), [(Lion, [300]), (Lion8bit, list(range(256, 512)))])
def test_a_weight_whose_momentum_is_nan_stands_still(cls, stands):
    """NaN has no sign. In 8 bits its whole block stands, from the next step on."""
    weight = start(5000)
    optimizer = cls([weight], lr=0.1)
    weight.grad = torch.ones(5000)
    weight.grad[300] = torch.nan
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.ones(5000)
    optimizer.step()
    assert (weight == before).nonzero().view(-1).tolist() == stands


# ------------------------------------------------------------------ bitsandbytes'


def momentum_of(state: dict) -> torch.Tensor:
    """bitsandbytes' 8-bit momentum as numbers."""
    numbers = state["qmap1"][state["state1"].long()].view(-1)
    return numbers * state["absmax1"].repeat_interleave(256)[: len(numbers)]


def test_fifty_steps_from_the_same_state_have_at_most_15_signs_other_than_bitsandbytes():
    """Each step begins with bitsandbytes' weights and momentum: one sign that differs would differ
    at every step from then on. Where the mix is about zero, the last bit decides."""
    package = pytest.importorskip("bitsandbytes")
    numbers = 10_000
    ours, theirs = start(numbers), start(numbers)
    optimizer, reference = (
        Lion8bit([ours], **SETTINGS),
        package.optim.Lion8bit([theirs], **SETTINGS),
    )
    generator = seeded(1)
    flips = []
    for _ in range(50):
        ours.grad = torch.randn(numbers, generator=generator) * 0.01
        theirs.grad = ours.grad.clone()
        optimizer.step(), reference.step()
        is_other = (ours - theirs).abs() > 1e-6
        assert (ours - theirs).abs().max() < 2.1 * SETTINGS["lr"]
        flips.append(is_other.sum().item())
        state, wanted = optimizer.state[ours], reference.state[theirs]
        decoded = state["exp_avg_codebook"][state["exp_avg_codes"].int()]
        mine = decoded * state["exp_avg_scales"].repeat_interleave(256)[:numbers]
        assert ((mine - momentum_of(wanted)).abs() > 1e-3).sum() < 20
        with torch.no_grad():
            ours.copy_(theirs)
            state["exp_avg_codes"].copy_(wanted["state1"].view(-1))
            state["exp_avg_scales"].copy_(wanted["absmax1"])
    assert max(flips) <= 15


# ------------------------------------------------------------------ bytes


def traced_of(cls, numbers: int) -> memlab.Trace:
    model = nn.Module()
    model.weight = start(numbers)
    optimizer = cls(model.parameters())
    model.weight.grad = torch.ones(numbers)
    optimizer.step()
    return memlab.measure(optimizer.step, model=model, optimizer=optimizer)


def table_bytes() -> int:
    tables = vars(_ThresholdTables.of(dynamic_code(signed=True), "nearest")).values()
    return sum(table.nbytes for table in tables if torch.is_tensor(table))


@pytest.mark.parametrize("numbers", [1, 4095, 4096, 4097, 10_000, MIB])
def test_state_bytes_are_those_of_the_formula(numbers):
    """4n; in 8 bits n + 4⌈n/256⌉, and once the code, with the tables by which it is found."""
    once = 1024 + table_bytes()
    is_worth_quantizing = numbers + 4 * -(-numbers // 256) + once
    wanted = is_worth_quantizing if numbers >= 4096 else 4 * numbers
    assert traced_of(Lion, numbers).at_end["optimizer_state"] == 4 * numbers
    assert traced_of(Lion8bit, numbers).at_end["optimizer_state"] == wanted


def test_a_step_in_8_bits_takes_no_more_of_a_larger_weight():
    small, large = (traced_of(Lion8bit, numbers) for numbers in (MIB, 4 * MIB))
    on_the_way = large.peak_bytes - large.live_bytes
    assert on_the_way == small.peak_bytes - small.live_bytes <= 8 * MIB
