"""Stochastic rounding: mean, outcomes and bytes. Kahan summation."""

import pytest
import torch

import memlab
from memlab.rounding import CHUNK_SIZE, kahan_add_, stochastic_round_

MIB = 2**20


def rounded(precise: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    out = torch.empty_like(precise, dtype=torch.bfloat16)
    return stochastic_round_(out, precise, generator=generator)


def neighbors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bfloat16 towards zero and the one away from zero, computed from the bits."""
    towards_zero = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    away = ((x.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    return towards_zero, away


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, 1e-3, -2.7e5, 1e-39, 255.9])
def test_stochastic_rounding_is_unbiased(value):
    precise = torch.full((100_000,), value)
    mean = rounded(precise).double().mean().item()
    step = (neighbors(precise[:1])[1] - neighbors(precise[:1])[0]).abs().item()
    # The standard error of the mean is at most step/2/√100,000; allow four.
    assert abs(mean - precise[0].double().item()) <= 4 * step / 2 / 100_000**0.5
    assert abs(mean - value) <= 3e-5 * max(1, abs(value))


def test_each_neighbor_has_the_right_probability():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    towards_zero, away = neighbors(x)
    draws = torch.stack([rounded(x, seed).float() for seed in range(200)])
    assert ((draws == towards_zero) | (draws == away)).all()
    fraction = (draws == away).double().mean(0)
    expected = (x.view(torch.int32) & 0xFFFF).double() / 2**16
    assert (fraction - expected).abs().max() < 5 * 0.5 / 200**0.5
    assert (fraction - expected).mean().abs() < 3 * 0.5 / (200 * 4096) ** 0.5


def test_bfloat16_values_are_unchanged():
    x = torch.randn(10_000).bfloat16().float()
    assert torch.equal(rounded(x).float(), x)


def test_infinities_and_nan_are_kept_and_zero_keeps_its_sign():
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0])
    quiet_in_low_bits = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    for _ in range(20):
        out = rounded(torch.cat([special, quiet_in_low_bits]))
        assert out[:2].tolist() == [torch.inf, -torch.inf]
        assert out[[2, 5, 6]].isnan().all()
        assert out[3:5].signbit().tolist() == [True, False]


def test_a_generator_repeats_its_draws_and_the_default_one_is_untouched():
    x = torch.randn(1000)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(rounded(x, 3), rounded(x, 3))
    assert not torch.equal(rounded(x, 3), rounded(x, 4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (CHUNK_SIZE + 1,)])
def test_every_element_of_any_shape_is_rounded(shape):
    x = torch.full(shape, 1.5)
    assert torch.equal(rounded(x), x.bfloat16())


def test_a_view_of_a_matrix_is_rounded_in_place():
    out = torch.zeros(6, 8, dtype=torch.bfloat16)
    x = torch.full((8, 3), 2.0)
    assert stochastic_round_(out.T[:, 1:4], x).data_ptr() == out.T[:, 1:4].data_ptr()
    assert out.sum() == 2 * 24
    assert (out[1:4] == 2).all()
    results = [torch.zeros(3, 8, dtype=torch.bfloat16).T for _ in range(2)]
    for result in results:
        generator = torch.Generator().manual_seed(0)
        stochastic_round_(result, x + 0.003, generator=generator)
    assert torch.equal(*results)
    assert set(results[0].flatten().tolist()) == {2, 2 + 2**-6}


def test_temporaries_take_at_most_12_mib_for_any_size():
    x = torch.ones(8 * CHUNK_SIZE)
    out = torch.empty(8 * CHUNK_SIZE, dtype=torch.bfloat16)
    trace = memlab.measure(lambda: stochastic_round_(out, x))
    assert 8 * MIB <= trace.peak_bytes - (4 + 2) * 8 * CHUNK_SIZE <= 12 * MIB


@pytest.mark.parametrize(
    ("out", "precise", "error", "message"),
    [
        (torch.float16, torch.float32, TypeError, r"\(float16 is not the upper half"),
        (torch.bfloat16, torch.float64, TypeError, "got torch.float64 to round into torch.bfloat"),
    ],
)
def test_other_dtypes_are_refused(out, precise, error, message):
    with pytest.raises(error, match=message):
        stochastic_round_(torch.ones(2, dtype=out), torch.ones(2, dtype=precise))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"got shape \(2,\) to round into \(3,\)"):
        stochastic_round_(torch.ones(3, dtype=torch.bfloat16), torch.ones(2))


# ------------------------------------------------------------------ small updates


def weights_after(add, times: int = 1000, update: float = 1e-3) -> torch.Tensor:
    weight = torch.ones(256, dtype=torch.bfloat16)
    for _ in range(times):
        add(weight, update)
    return weight.float()


def test_small_updates_vanish_in_bfloat16():
    assert weights_after(lambda w, u: w.add_(u)).eq(1).all()


def test_small_updates_survive_stochastic_rounding_on_average():
    generator = torch.Generator().manual_seed(0)
    weights = weights_after(lambda w, u: stochastic_round_(w, w.float() + u, generator=generator))
    assert abs(weights.mean().item() - 2) < 0.02


def test_every_small_update_survives_kahan_summation():
    compensation = torch.zeros(256, dtype=torch.bfloat16)
    weights = weights_after(lambda w, u: kahan_add_(w, compensation, torch.full_like(w, u)))
    exact = 1 + 1000 * torch.tensor(1e-3).bfloat16().double().item()
    assert (weights.double() - exact).abs().max() <= 2**-7  # bfloat16's spacing near 2
    assert (weights.double() + compensation.double() - exact).abs().max() < 2**-8


def test_kahan_needs_one_temporary_tensor():
    weight, compensation, update = (torch.zeros(MIB, dtype=torch.bfloat16) for _ in range(3))
    trace = memlab.measure(lambda: kahan_add_(weight, compensation, update))
    assert trace.peak_bytes == 4 * 2 * MIB
