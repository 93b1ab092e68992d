"""Quantization by blocks: the codes to the bit, bytes to the byte, errors within half a step."""

import gc
import hashlib
import math

import pytest
import torch
from quick import quick

import memlab
from memlab import quantize
from memlab.internals.chunks import CHUNK_SIZE
from memlab.quantize import (
    dequantize_blockwise,
    dynamic_code,
    nearest_code,
    quantize_blockwise,
)

MIB = 2**20
SIGNED, UNSIGNED = True, False
INF = torch.tensor(math.inf)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def there_and_back(x: torch.Tensor, **settings) -> torch.Tensor:
    return dequantize_blockwise(quantize_blockwise(x, **settings))


def linear_code(bits: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 2**bits)


# ------------------------------------------------------------------ the dynamic code


@pytest.mark.parametrize(
    ("signed", "zero", "least"), [(SIGNED, 127, 5.5e-7), (UNSIGNED, 0, 3.25e-7)]
)
def test_the_dynamic_code_has_256_numbers_in_rising_order(signed, zero, least):
    code = dynamic_code(signed)
    assert code.dtype == torch.float32
    assert code.shape == (256,)
    assert (code.diff() > 0).all()
    assert code[zero] == 0
    assert code[code > 0].min().item() == pytest.approx(least, rel=1e-6)
    assert code[-1] == 1


def test_the_signed_code_has_no_minus_one():
    code = dynamic_code(SIGNED)
    assert code[0].item() == pytest.approx(-0.99296875, abs=1e-7)
    assert torch.equal(code[:127], -code[128:-1].flip(0))


@pytest.mark.parametrize(
    ("signed", "digest"),
    [
        (SIGNED, "a84b2ead7a7c7dcf828693ec522927d7b7c866aba83db71edc770b2ce0c2fded"),
        (UNSIGNED, "a4248a621f3f573c41c7464eaf067c32328d4ce82c3388f75c02068e8d21e013"),
    ],
)
def test_the_512_numbers_are_those_of_bitsandbytes_0_50_2(signed, digest):
    """By their fourth roots, to four digits: the last bit of torch.linspace is another on another
    CPU. No root is as near to where rounding turns."""
    roots = dynamic_code(signed).double().abs().pow(0.25) * 1e4
    assert (roots % 1 - 0.5).abs().min() > 2e-4
    digits = (roots.round() * dynamic_code(signed).sign()).to(torch.int16).numpy()
    assert hashlib.sha256(digits.astype("<i2").tobytes()).hexdigest() == digest


@pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
def test_the_code_equals_that_of_the_installed_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(dynamic_code(signed), functional.create_dynamic_map(signed=signed))


# ------------------------------------------------------------------ the nearest


def distances(numbers: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    return (numbers.double()[:, None] - code.double()).abs()


def mismatches(numbers: torch.Tensor, code: torch.Tensor) -> int:
    """How many get a code farther away than argmin over all of them does; float64 is exact here."""
    wrong = 0
    for part in numbers.split(2**15):
        gap = distances(part, code)
        chosen = gap.gather(1, nearest_code(part, code).long()[:, None])[:, 0]
        wrong += (chosen != gap.amin(1)).sum().item()
    return wrong


def around(numbers: torch.Tensor, reach: int = 3) -> torch.Tensor:
    """The float32 next to each float64, and `reach` neighbours on each side."""
    found = [numbers.float()]
    for end in (INF, -INF):
        beside = numbers.float()
        for _ in range(reach):
            beside = torch.nextafter(beside, end)
            found.append(beside)
    return torch.cat(found)


@pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
def test_nearest_is_the_argmin_at_every_threshold_and_around_it(signed):
    code = dynamic_code(signed)
    exact = code.double()
    thresholds = (exact[:-1] + exact[1:]) / 2
    assert mismatches(around(torch.cat([thresholds, exact])), code) == 0


@pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
def test_nearest_is_the_argmin_at_both_ends_of_each_interval_of_the_table(signed):
    ends = quantize._interval_ends(torch.device("cpu")).view(-1)
    assert len(ends.unique()) >= 2**17 - 2**10  # NaN apart
    assert mismatches(ends[ends.abs() <= 1], dynamic_code(signed)) == 0


@pytest.mark.parametrize("numbers", quick([2**16], [2**16, 2**20]))
@pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
def test_nearest_is_the_argmin_for_as_many_numbers_again_over_nine_decades(signed, numbers):
    draws = torch.rand(numbers, generator=seeded(1)) * 2 - 1
    decades = 10 ** (torch.rand(numbers, generator=seeded(2)) * -9) * draws.sign()
    assert mismatches(torch.cat([draws, decades]), dynamic_code(signed)) == 0


def test_at_a_tie_the_lower_is_taken():
    code = torch.tensor([-1.0, 0.0, 0.5, 1.0])
    assert nearest_code(torch.tensor([-0.5, 0.25, 0.75, -2, 2]), code).tolist() == [0, 1, 2, 0, 3]


def test_a_codes_table_lives_as_long_as_the_code():
    gc.collect()  # of codes that other tests left in cycles
    before = len(quantize._ThresholdTables._cache)
    code = linear_code(4)
    nearest_code(torch.zeros(1), code)
    nearest_code(torch.zeros(1), code)
    assert len(quantize._ThresholdTables._cache) == before + 1
    del code
    gc.collect()
    assert len(quantize._ThresholdTables._cache) == before


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("n", [0, 1, 3, 255, 256, 257, 4097, CHUNK_SIZE + 5])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("by_code", [True, False])
def test_the_bytes_are_n_times_bits_over_8_and_4_a_block(n, bits, by_code):
    code = linear_code(bits) if by_code else None
    kept = quantize_blockwise(torch.randn(n), bits=bits, codebook=code)
    tensors = [t for t in (kept.codes, kept.scales, kept.offsets) if t is not None]
    assert kept.nbytes == math.ceil(n * bits / 8) + 4 * math.ceil(n / 256)
    assert kept.nbytes == sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("by_code", [True, False])
def test_what_is_taken_meanwhile_does_not_grow_with_the_tensor(by_code):
    code = dynamic_code(SIGNED) if by_code else None
    x = torch.randn(16 * CHUNK_SIZE)
    kept = quantize_blockwise(x, codebook=code)  # and the table of the code
    encode = memlab.measure(lambda: quantize_blockwise(x, codebook=code))
    decode = memlab.measure(lambda: dequantize_blockwise(kept))
    assert encode.peak_bytes - x.nbytes - kept.nbytes < 5 * MIB
    assert decode.peak_bytes - x.nbytes - kept.nbytes < 5 * MIB


def test_codes_lie_side_by_side_from_the_lowest_bits():
    kept = quantize_blockwise(torch.tensor([0.0, 1, 2, 3, 3]), bits=2, block=4)
    assert kept.codes.tolist() == [0b11_10_01_00, 0b00]
    kept = quantize_blockwise(torch.tensor([0.0, 15, 7]), bits=4, block=4)
    assert kept.codes.tolist() == [0xF0, 0x07]


# ------------------------------------------------------------------ errors


def blocks_of(x: torch.Tensor, block: int) -> torch.Tensor:
    """float64 (blocks, block), NaN beyond the end."""
    flat = x.double().flatten()
    return torch.cat([flat, flat.new_full((-len(flat) % block,), math.nan)]).view(-1, block)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 7), (256,), (33, 257), (CHUNK_SIZE + 300,)])
@pytest.mark.parametrize("block", [4, 64, 256])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_affine_errs_by_half_a_step_at_most(shape, block, bits):
    x = torch.randn(shape, generator=seeded()) * 3 + 1
    kept = quantize_blockwise(x, bits=bits, block=block)
    back = dequantize_blockwise(kept)
    assert back.shape == x.shape
    error = (blocks_of(back, block) - blocks_of(x, block)).abs().nan_to_num(0).amax(1)
    rounding = 2**-22 * x.abs().max().item()
    assert (error <= kept.scales.double() / 2 + rounding).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_an_affine_step_is_the_range_over_its_steps_but_for_bfloat16(bits):
    x = torch.rand(100, 256, generator=seeded())
    kept = quantize_blockwise(x, bits=bits)
    low, high = x.aminmax(dim=1)
    step = (high - low) / (2**bits - 1)
    assert (kept.offsets.float() <= low).all()
    assert (kept.scales.float() >= step).all()
    assert (kept.scales.float() <= step * 1.016).all()  # the range 2⁻⁷ wider, the step 2⁻⁷ up


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_by_code_each_number_gets_a_neighbour_and_the_nearest_the_nearer(mode):
    code = dynamic_code(SIGNED)
    x = torch.randn(50, 256, generator=seeded(3)) * torch.logspace(-8, 8, 50)[:, None]
    kept = quantize_blockwise(x, codebook=code, mode=mode, generator=seeded())
    assert torch.equal(kept.scales, x.abs().amax(1))
    fractions = (x / kept.scales[:, None]).view(-1)
    above = torch.searchsorted(code, fractions)
    candidates = torch.stack([above, (above - 1).clamp(min=0)], 1)
    if mode == "nearest":
        candidates = distances(fractions, code).argmin(1, keepdim=True)
    assert (kept.codes.long()[:, None] == candidates).any(1).all()
    assert torch.equal(
        dequantize_blockwise(kept), code[kept.codes.long()].view_as(x) * kept.scales[:, None]
    )


def test_a_block_of_one_number_repeated_comes_back_within_a_step_of_its_bfloat16():
    x = torch.full((512,), 3.14159)
    assert (there_and_back(x) - x).abs().max() < 2**-6 / 255


def test_an_outlier_spoils_its_own_block_only():
    x = torch.randn(4, 256, generator=seeded())
    spoilt = x.clone()
    spoilt[1, 7] = 1e6
    before, after = there_and_back(x), there_and_back(spoilt)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert (after[1] - spoilt[1]).abs().max() > 100 * (before[1] - x[1]).abs().max()


def test_more_bits_and_smaller_blocks_err_less():
    x = torch.randn(2**16, generator=seeded())
    errors = [(there_and_back(x, bits=bits) - x).norm() / x.norm() for bits in (8, 4, 2)]
    assert errors[0] < errors[1] / 12 < errors[2] / 36
    assert (there_and_back(x, block=32) - x).norm() < (there_and_back(x, block=1024) - x).norm()


# ------------------------------------------------------------------ stochastic


@pytest.mark.parametrize("bits", quick([4], [8, 4, 2]))
@pytest.mark.parametrize("by_code", quick([True], [True, False]))
def test_the_mean_of_many_stochastic_draws_is_the_number(bits, by_code):
    code = linear_code(bits) if by_code else None
    x = torch.randn(3, 256, generator=seeded(4))
    generator, draws = seeded(5), 2000
    settings = {"bits": bits, "code": code, "mode": "stochastic", "generator": generator}
    mean = torch.stack([there_and_back(x, **settings).double() for _ in range(draws)]).mean(0)
    kept = quantize_blockwise(x, **settings)
    step = kept.scales.double()[:, None] * (1 if code is None else 2 / (2**bits - 1))
    # The standard error of one mean is at most step/2/√draws.
    assert ((mean - x).abs() <= 5 * step / 2 / draws**0.5 + 1e-6).all()
    assert ((mean - x) / step).mean().abs() < 4 * 0.5 / (draws * x.numel()) ** 0.5


def test_the_dynamic_code_is_unbiased_within_its_reach():
    code = dynamic_code(UNSIGNED)
    x = torch.rand(256, generator=seeded(6)) ** 4
    settings = {"code": code, "mode": "stochastic", "generator": seeded(7)}
    mean = torch.stack([there_and_back(x, **settings).double() for _ in range(2000)]).mean(0)
    place = torch.searchsorted(code, x / x.max()).clamp(1, 255)
    step = (code[place] - code[place - 1]) * x.max()
    assert ((mean - x).abs() <= 5 * step / 2 / 2000**0.5 + 1e-6).all()


def test_nearest_has_the_less_error_and_a_bias():
    x = torch.randn(64 * 256, generator=seeded(8))
    nearest = there_and_back(x, bits=2)
    draws = [there_and_back(x, bits=2, mode="stochastic", generator=seeded(i)) for i in range(64)]
    assert (nearest - x).norm() < (draws[0] - x).norm()
    assert (torch.stack(draws).mean(0) - x).norm() < (nearest - x).norm() / 3


def test_the_same_generator_gives_the_same_and_the_users_stream_is_untouched():
    x = torch.randn(1000)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    settings = {"bits": 4, "mode": "stochastic"}
    first, again = (there_and_back(x, generator=seeded(3), **settings) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, there_and_back(x, generator=seeded(4), **settings))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ what is special


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("code", "zero"), [(None, 0), (dynamic_code(SIGNED), 127), (dynamic_code(UNSIGNED), 0)]
)
def test_a_block_of_zeros_is_kept_as_zeros(code, zero, mode):
    kept = quantize_blockwise(
        torch.cat([torch.zeros(256), torch.ones(256)]), codebook=code, mode=mode
    )
    assert kept.codes[:256].eq(zero).all()
    assert kept.scales[0] == 0
    assert dequantize_blockwise(kept)[:256].eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("code", [None, dynamic_code(SIGNED)])
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_a_non_finite_number_makes_its_block_nan_and_no_other(bad, code, mode):
    x = torch.randn(3, 256, generator=seeded())
    settings = {"code": code, "mode": mode}
    good = there_and_back(x, generator=seeded(), **settings)
    x[1, 100] = bad
    back = there_and_back(x, generator=seeded(), **settings)
    assert back[1].isnan().all()
    assert torch.equal(back[[0, 2]], good[[0, 2]])


def test_a_range_beyond_float32_is_nan_affine_and_no_trouble_by_code():
    x = torch.tensor([3e38, -3e38, 1.0, 2.0])
    assert there_and_back(x).isnan().all()
    assert (there_and_back(x, codebook=dynamic_code(SIGNED)) - x).abs().max() < 0.01 * 3e38


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_shape_come_back(dtype):
    x = torch.randn(6, 50).to(dtype).T
    back = there_and_back(x)
    assert (back.dtype, back.shape) == (dtype, x.shape)
    assert (back.float() - x.float()).abs().max() < 0.04


def test_the_code_is_shared_and_the_graph_is_not_kept():
    x = torch.randn(300, requires_grad=True)
    code = dynamic_code(SIGNED)
    kept = quantize_blockwise(x, codebook=code)
    assert kept.codebook is code
    assert not dequantize_blockwise(kept).requires_grad


def test_on_fake_tensors_bytes_and_shapes_are_the_same():
    with memlab.dry_run():
        kept = quantize_blockwise(torch.rand(10, 101), codebook=dynamic_code(UNSIGNED))
        assert kept.nbytes == 1010 + 4 * 4
        assert dequantize_blockwise(kept).shape == (10, 101)
        assert quantize_blockwise(torch.rand(1001), bits=2).nbytes == 251 + 4 * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "got 3 bits; give 8, 4 or 2"),
        ({"block": 0}, "got blocks of 0 at 8 bits"),
        ({"block": 6, "bits": 2}, "got blocks of 6 at 2 bits; give a multiple of 4"),
        ({"mode": "random"}, "got mode 'random'; give 'nearest' or 'stochastic'"),
        ({"code": linear_code(4)}, r"shape \(16,\); give 256 float32 numbers for 8 bits"),
        ({"code": dynamic_code(SIGNED).flip(0)}, "got a code out of order"),
        ({"code": dynamic_code(SIGNED) * 2}, "beyond −1 … 1"),
        ({"code": torch.linspace(0.9, 1, 256)}, "closer than 1/128 of their size"),
    ],
)
def test_what_cannot_be_done_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        quantize_blockwise(torch.ones(8), **settings)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"got torch.int64 to quantize; give float32"):
        quantize_blockwise(torch.arange(8))
