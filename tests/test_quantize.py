"""Block-wise quantization: exact codes, exact bytes, errors of at most half a step."""

import gc
import hashlib
import math

import pytest
import torch
from quick import quick, together

import memlab
from memlab.internals.chunks import CHUNK_SIZE
from memlab.quantize import (
    codebooks,
    dequantize_blockwise,
    dynamic_code,
    nearest_code,
    quantize_blockwise,
)
from memlab.quantize.codebooks import ThresholdTables

MIB = 2**20
SIGNED, UNSIGNED = True, False
INF = torch.tensor(math.inf)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def round_trip(x: torch.Tensor, **settings) -> torch.Tensor:
    return dequantize_blockwise(quantize_blockwise(x, **settings))


def linear_codebook(bits: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 2**bits)


# ------------------------------------------------------------------ the dynamic codebook


@pytest.mark.parametrize(
    ("signed", "zero", "least"), [(SIGNED, 127, 5.5e-7), (UNSIGNED, 0, 3.25e-7)]
)
def test_the_dynamic_codebook_has_256_sorted_entries(signed, zero, least):
    codebook = dynamic_code(signed)
    assert codebook.dtype == torch.float32
    assert codebook.shape == (256,)
    assert (codebook.diff() > 0).all()
    assert codebook[zero] == 0
    assert codebook[codebook > 0].min().item() == pytest.approx(least, rel=1e-6)
    assert codebook[-1] == 1


def test_the_signed_codebook_has_no_minus_one():
    codebook = dynamic_code(SIGNED)
    assert codebook[0].item() == pytest.approx(-0.99296875, abs=1e-7)
    assert torch.equal(codebook[:127], -codebook[128:-1].flip(0))


@pytest.mark.parametrize(
    ("signed", "digest"),
    [
        (SIGNED, "a84b2ead7a7c7dcf828693ec522927d7b7c866aba83db71edc770b2ce0c2fded"),
        (UNSIGNED, "a4248a621f3f573c41c7464eaf067c32328d4ce82c3388f75c02068e8d21e013"),
    ],
)
def test_the_512_entries_equal_bitsandbytes_0_50_2(signed, digest):
    """Compare fourth roots to four digits: the last bit of torch.linspace depends on the CPU.

    No root is close to a rounding boundary.
    """
    roots = dynamic_code(signed).double().abs().pow(0.25) * 1e4
    assert (roots % 1 - 0.5).abs().min() > 2e-4
    digits = (roots.round() * dynamic_code(signed).sign()).to(torch.int16).numpy()
    assert hashlib.sha256(digits.astype("<i2").tobytes()).hexdigest() == digest


@pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
def test_the_codebook_equals_the_installed_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(dynamic_code(signed), functional.create_dynamic_map(signed=signed))


# ------------------------------------------------------------------ nearest entries


def distances(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    return (x.double()[:, None] - codebook.double()).abs()


def mismatch_count(x: torch.Tensor, codebook: torch.Tensor) -> int:
    """Count elements whose entry is farther away than argmin over all entries; float64 is exact."""
    wrong = 0
    for part in x.split(2**15):
        gap = distances(part, codebook)
        chosen = gap.gather(1, nearest_code(part, codebook).long()[:, None])[:, 0]
        wrong += (chosen != gap.amin(1)).sum().item()
    return wrong


def with_neighbors(x: torch.Tensor, reach: int = 3) -> torch.Tensor:
    """Return the float32 nearest to each float64, and `reach` neighbors on each side."""
    values = [x.float()]
    for end in (INF, -INF):
        neighbor = x.float()
        for _ in range(reach):
            neighbor = torch.nextafter(neighbor, end)
            values.append(neighbor)
    return torch.cat(values)


@pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
def test_nearest_is_the_argmin_at_and_around_every_threshold(signed):
    codebook = dynamic_code(signed)
    exact = codebook.double()
    thresholds = (exact[:-1] + exact[1:]) / 2
    assert mismatch_count(with_neighbors(torch.cat([thresholds, exact])), codebook) == 0


@pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
def test_nearest_is_the_argmin_at_the_ends_of_each_table_interval(signed):
    ends = codebooks._interval_ends(torch.device("cpu")).view(-1)
    assert len(ends.unique()) >= 2**17 - 2**10  # without NaN
    assert mismatch_count(ends[ends.abs() <= 1], dynamic_code(signed)) == 0


@pytest.mark.parametrize("count", quick([2**16], [2**16, 2**20]))
@pytest.mark.parametrize("signed", [SIGNED, UNSIGNED])
def test_nearest_is_the_argmin_for_random_values_over_nine_decades(signed, count):
    draws = torch.rand(count, generator=seeded(1)) * 2 - 1
    decades = 10 ** (torch.rand(count, generator=seeded(2)) * -9) * draws.sign()
    assert mismatch_count(torch.cat([draws, decades]), dynamic_code(signed)) == 0


def test_ties_go_to_the_lower_entry():
    codebook = torch.tensor([-1.0, 0.0, 0.5, 1.0])
    assert nearest_code(torch.tensor([-0.5, 0.25, 0.75, -2, 2]), codebook).tolist() == [
        0,
        1,
        2,
        0,
        3,
    ]


def test_a_lookup_table_lives_as_long_as_its_codebook():
    gc.collect()  # frees codebooks of other tests
    before = len(ThresholdTables._cache)
    codebook = linear_codebook(4)
    nearest_code(torch.zeros(1), codebook)
    nearest_code(torch.zeros(1), codebook)
    assert len(ThresholdTables._cache) == before + 1
    del codebook
    gc.collect()
    assert len(ThresholdTables._cache) == before


# ------------------------------------------------------------------ bytes


@together("n", [0, 1, 3, 255, 256, 257, 4097, CHUNK_SIZE + 5])
@together("bits", [8, 4, 2])
@together("with_codebook", [True, False])
def test_bytes_are_n_times_bits_over_8_plus_4_per_block(n, bits, with_codebook):
    codebook = linear_codebook(bits) if with_codebook else None
    quantized = quantize_blockwise(torch.randn(n), bits=bits, codebook=codebook)
    tensors = [t for t in (quantized.codes, quantized.scales, quantized.offsets) if t is not None]
    assert quantized.nbytes == math.ceil(n * bits / 8) + 4 * math.ceil(n / 256)
    assert quantized.nbytes == sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("with_codebook", [True, False])
def test_temporaries_do_not_grow_with_the_tensor(with_codebook):
    codebook = dynamic_code(SIGNED) if with_codebook else None
    x = torch.randn(16 * CHUNK_SIZE)
    quantized = quantize_blockwise(x, codebook=codebook)  # builds the lookup table
    encode = memlab.measure(lambda: quantize_blockwise(x, codebook=codebook))
    decode = memlab.measure(lambda: dequantize_blockwise(quantized))
    assert encode.peak_bytes - x.nbytes - quantized.nbytes < 5 * MIB
    assert decode.peak_bytes - x.nbytes - quantized.nbytes < 5 * MIB


def test_codes_are_packed_from_the_lowest_bits():
    quantized = quantize_blockwise(torch.tensor([0.0, 1, 2, 3, 3]), bits=2, block=4)
    assert quantized.codes.tolist() == [0b11_10_01_00, 0b00]
    quantized = quantize_blockwise(torch.tensor([0.0, 15, 7]), bits=4, block=4)
    assert quantized.codes.tolist() == [0xF0, 0x07]


# ------------------------------------------------------------------ errors


def blocks_of(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return float64 (blocks, block), padded with NaN."""
    flat = x.double().flatten()
    return torch.cat([flat, flat.new_full((-len(flat) % block,), math.nan)]).view(-1, block)


@together("shape", [(), (7,), (3, 5, 7), (256,), (33, 257), (CHUNK_SIZE + 300,)])
@together("block", [4, 64, 256])
@together("bits", [8, 4, 2])
def test_affine_errors_are_at_most_half_a_step(shape, block, bits):
    x = torch.randn(shape, generator=seeded()) * 3 + 1
    quantized = quantize_blockwise(x, bits=bits, block=block)
    decoded = dequantize_blockwise(quantized)
    assert decoded.shape == x.shape
    error = (blocks_of(decoded, block) - blocks_of(x, block)).abs().nan_to_num(0).amax(1)
    rounding = 2**-22 * x.abs().max().item()
    assert (error <= quantized.scales.double() / 2 + rounding).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_an_affine_step_is_the_range_over_the_steps_rounded_to_bfloat16(bits):
    x = torch.rand(100, 256, generator=seeded())
    quantized = quantize_blockwise(x, bits=bits)
    low, high = x.aminmax(dim=1)
    step = (high - low) / (2**bits - 1)
    assert (quantized.offsets.float() <= low).all()
    assert (quantized.scales.float() >= step).all()
    assert (quantized.scales.float() <= step * 1.016).all()  # the range 2⁻⁷ wider, the step 2⁻⁷ up


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_with_a_codebook_each_element_gets_a_neighboring_entry(mode):
    codebook = dynamic_code(SIGNED)
    x = torch.randn(50, 256, generator=seeded(3)) * torch.logspace(-8, 8, 50)[:, None]
    quantized = quantize_blockwise(x, codebook=codebook, mode=mode, generator=seeded())
    assert torch.equal(quantized.scales, x.abs().amax(1))
    fractions = (x / quantized.scales[:, None]).view(-1)
    above = torch.searchsorted(codebook, fractions)
    candidates = torch.stack([above, (above - 1).clamp(min=0)], 1)
    if mode == "nearest":
        candidates = distances(fractions, codebook).argmin(1, keepdim=True)
    assert (quantized.codes.long()[:, None] == candidates).any(1).all()
    assert torch.equal(
        dequantize_blockwise(quantized),
        codebook[quantized.codes.long()].view_as(x) * quantized.scales[:, None],
    )


def test_a_constant_block_decodes_within_a_bfloat16_step():
    x = torch.full((512,), 3.14159)
    assert (round_trip(x) - x).abs().max() < 2**-6 / 255


def test_an_outlier_only_affects_its_own_block():
    x = torch.randn(4, 256, generator=seeded())
    spoilt = x.clone()
    spoilt[1, 7] = 1e6
    before, after = round_trip(x), round_trip(spoilt)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert (after[1] - spoilt[1]).abs().max() > 100 * (before[1] - x[1]).abs().max()


def test_more_bits_and_smaller_blocks_reduce_errors():
    x = torch.randn(2**16, generator=seeded())
    errors = [(round_trip(x, bits=bits) - x).norm() / x.norm() for bits in (8, 4, 2)]
    assert errors[0] < errors[1] / 12 < errors[2] / 36
    assert (round_trip(x, block=32) - x).norm() < (round_trip(x, block=1024) - x).norm()


# ------------------------------------------------------------------ stochastic


@pytest.mark.parametrize("bits", quick([4], [8, 4, 2]))
@pytest.mark.parametrize("with_codebook", quick([True], [True, False]))
def test_stochastic_rounding_is_unbiased(bits, with_codebook):
    codebook = linear_codebook(bits) if with_codebook else None
    x = torch.randn(3, 256, generator=seeded(4))
    generator, draws = seeded(5), 2000
    settings = {"bits": bits, "codebook": codebook, "mode": "stochastic", "generator": generator}
    mean = torch.stack([round_trip(x, **settings).double() for _ in range(draws)]).mean(0)
    quantized = quantize_blockwise(x, **settings)
    step = quantized.scales.double()[:, None] * (1 if codebook is None else 2 / (2**bits - 1))
    # The standard error of one mean is at most step/2/√draws.
    assert ((mean - x).abs() <= 5 * step / 2 / draws**0.5 + 1e-6).all()
    assert ((mean - x) / step).mean().abs() < 4 * 0.5 / (draws * x.numel()) ** 0.5


def test_the_dynamic_codebook_is_unbiased_within_its_range():
    codebook = dynamic_code(UNSIGNED)
    x = torch.rand(256, generator=seeded(6)) ** 4
    settings = {"codebook": codebook, "mode": "stochastic", "generator": seeded(7)}
    mean = torch.stack([round_trip(x, **settings).double() for _ in range(2000)]).mean(0)
    place = torch.searchsorted(codebook, x / x.max()).clamp(1, 255)
    step = (codebook[place] - codebook[place - 1]) * x.max()
    assert ((mean - x).abs() <= 5 * step / 2 / 2000**0.5 + 1e-6).all()


def test_nearest_has_a_smaller_error_and_a_bias():
    x = torch.randn(64 * 256, generator=seeded(8))
    nearest = round_trip(x, bits=2)
    draws = [round_trip(x, bits=2, mode="stochastic", generator=seeded(i)) for i in range(64)]
    assert (nearest - x).norm() < (draws[0] - x).norm()
    assert (torch.stack(draws).mean(0) - x).norm() < (nearest - x).norm() / 3


def test_a_generator_repeats_its_draws_and_the_default_one_is_untouched():
    x = torch.randn(1000)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    settings = {"bits": 4, "mode": "stochastic"}
    first, again = (round_trip(x, generator=seeded(3), **settings) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, round_trip(x, generator=seeded(4), **settings))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ special values


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("codebook", "zero"), [(None, 0), (dynamic_code(SIGNED), 127), (dynamic_code(UNSIGNED), 0)]
)
def test_a_block_of_zeros_stays_zero(codebook, zero, mode):
    quantized = quantize_blockwise(
        torch.cat([torch.zeros(256), torch.ones(256)]), codebook=codebook, mode=mode
    )
    assert quantized.codes[:256].eq(zero).all()
    assert quantized.scales[0] == 0
    assert dequantize_blockwise(quantized)[:256].eq(0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codebook", [None, dynamic_code(SIGNED)])
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_a_non_finite_element_makes_only_its_block_nan(value, codebook, mode):
    x = torch.randn(3, 256, generator=seeded())
    settings = {"codebook": codebook, "mode": mode}
    before = round_trip(x, generator=seeded(), **settings)
    x[1, 100] = value
    decoded = round_trip(x, generator=seeded(), **settings)
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[[0, 2]], before[[0, 2]])


def test_a_range_beyond_float32_is_nan_if_affine_and_fine_with_a_codebook():
    x = torch.tensor([3e38, -3e38, 1.0, 2.0])
    assert round_trip(x).isnan().all()
    assert (round_trip(x, codebook=dynamic_code(SIGNED)) - x).abs().max() < 0.01 * 3e38


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantizing_restores_dtype_and_shape(dtype):
    x = torch.randn(6, 50).to(dtype).T
    decoded = round_trip(x)
    assert (decoded.dtype, decoded.shape) == (dtype, x.shape)
    assert (decoded.float() - x.float()).abs().max() < 0.04


def test_the_codebook_is_shared_and_no_graph_is_recorded():
    x = torch.randn(300, requires_grad=True)
    codebook = dynamic_code(SIGNED)
    quantized = quantize_blockwise(x, codebook=codebook)
    assert quantized.codebook is codebook
    assert not dequantize_blockwise(quantized).requires_grad


def test_fake_tensors_have_the_same_bytes_and_shapes():
    with memlab.dry_run():
        quantized = quantize_blockwise(torch.rand(10, 101), codebook=dynamic_code(UNSIGNED))
        assert quantized.nbytes == 1010 + 4 * 4
        assert dequantize_blockwise(quantized).shape == (10, 101)
        assert quantize_blockwise(torch.rand(1001), bits=2).nbytes == 251 + 4 * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "got 3 bits; give 8, 4 or 2"),
        ({"block": 0}, "got blocks of 0 at 8 bits"),
        ({"block": 6, "bits": 2}, "got blocks of 6 at 2 bits; give a multiple of 4"),
        ({"mode": "random"}, "got mode 'random'; give 'nearest' or 'stochastic'"),
        ({"codebook": linear_codebook(4)}, r"shape \(16,\); give 256 float32 entries for 8 bits"),
        ({"codebook": dynamic_code(SIGNED).flip(0)}, "got a codebook that is not sorted"),
        ({"codebook": torch.zeros(256)}, "repeats an entry"),
        ({"codebook": dynamic_code(SIGNED) * 2}, "outside −1 … 1"),
        ({"codebook": torch.linspace(0.9, 1, 256)}, "closer than 1/128 of their size"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        quantize_blockwise(torch.ones(8), **settings)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"got torch.int64 to quantize; give float32"):
        quantize_blockwise(torch.arange(8))
