"""Compression kernels: bitwise equal to memlab.quantize, without temporaries."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from close import assert_close
from torch import nn

import memlab
from memlab import compression
from memlab.kernels.compression import compressed_activations, dequantize_affine, quantize_affine
from memlab.quantize import Quantized, dequantize_blockwise, dynamic_code, quantize_blockwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 3, 255, 256, 257, 1030, 4096, 4097, 9001)
TILE = 4096

# numpy, used by the interpreter, warns about intended infinities and NaN.
ignore_numpy_warnings = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_bits = pytest.mark.parametrize("bits", [8, 4, 2])


def seeded(seed: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether tensors are equal, with NaN equal to NaN."""
    result = result.cpu()
    is_nan = expected.isnan()
    return torch.equal(result.isnan(), is_nan) and torch.equal(result[~is_nan], expected[~is_nan])


def assert_matches_reference(x: torch.Tensor, device: torch.device, **settings) -> Quantized:
    """Require bitwise equality with the reference on the CPU, encoded and decoded."""
    result, expected = quantize_affine(x.to(device), **settings), quantize_blockwise(x, **settings)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(result.codes.cpu(), expected.codes)
    assert same(result.scales, expected.scales)
    assert same(result.offsets, expected.offsets)
    decoded, expected_decoded = dequantize_affine(result), dequantize_blockwise(expected)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    if device.type == "cpu":  # on a GPU offset + c·scale is rounded once
        assert same(decoded, expected_decoded)
    else:
        finite = (t.nan_to_num(0, 0, 0) for t in (decoded.cpu(), expected_decoded))
        assert_close(*finite, terms=1)
    return result


# ------------------------------------------------------------------ bitwise equality


@every_dtype
@every_bits
def test_codes_scales_and_offsets_match_the_reference(dtype, bits, device):
    for n in SIZES:
        x = (torch.randn(n, generator=seeded(n)) * 3 + 1).to(dtype)
        assert_matches_reference(x, device, bits=bits)


@pytest.mark.parametrize("block", [32, 128, 1024, 4096])
@every_bits
def test_blocks_can_be_other_powers_of_two(block, bits, device):
    x = torch.randn(TILE + block + 5, generator=seeded()) * 100
    assert_matches_reference(x, device, bits=bits, block=block)


@every_bits
def test_ties_round_to_even(bits, device):
    levels = 2**bits - 1
    halves = torch.arange(0, levels, 0.5)
    x = torch.cat([halves, torch.tensor([float(levels)])])
    result = assert_matches_reference(x, device, bits=bits, block=1024)
    assert result.scales.item() == 1
    assert result.offsets.item() == 0


@every_bits
@pytest.mark.parametrize("power", [-120, 0, 100])
def test_neighbors_of_ties_round_to_nearest_for_any_scale(bits, power, device):
    """Use one block for each of the 128 mantissas of a scale.

    A quotient with a wrong last bit, such as a product with 1/scale, would give other codes.
    """
    levels = 2**bits - 1
    scales = (1 + torch.arange(128.0) / 128).unsqueeze(1) * 2.0**power
    halves = scales * (torch.arange(levels) + 0.5)  # exact in float32
    below, above = (halves.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf))
    ends = scales * torch.tensor([0.0, levels])
    x = torch.cat([ends, below, halves, above], dim=1)
    x = torch.nn.functional.pad(x, (0, 1024 - x.shape[1]))
    result = assert_matches_reference(x, device, bits=bits, block=1024)
    assert torch.equal(result.scales.float().cpu(), scales.squeeze(1))


@every_bits
def test_values_of_every_size_match_the_reference(bits, device):
    """Use one block for each power of two, from the smallest subnormal to the largest."""
    sizes = torch.arange(-149, 128).double().exp2()
    draws = torch.rand(len(sizes), 32, generator=seeded(1), dtype=torch.float64) * 2 - 1
    x = (draws * sizes[:, None]).float()
    result = assert_matches_reference(x, device, bits=bits, block=32)
    assert result.scales.isfinite().all()


def special_blocks() -> torch.Tensor:
    """Return (blocks, 32) of special values."""
    float32_max = torch.finfo(torch.float32).max
    wave = torch.linspace(-1, 1, 32)
    blocks = [
        torch.zeros(32),
        -torch.zeros(32),
        torch.full((32,), 3.14159),
        torch.full((32,), -3.14159),
        torch.full((32,), 2.0**-149),
        torch.full((32,), -(2.0**-149)),
        wave * 2.0**-149,
        wave * 2.0**-126,
        torch.full((32,), float32_max),  # rounding to nearest would give an infinite bfloat16
        torch.full((32,), -float32_max),
        wave * float32_max,
        wave * 3e38 / 2,
        torch.full((32,), math.inf),
        torch.full((32,), -math.inf),
        torch.full((32,), math.nan),
    ]
    for bad in (math.inf, -math.inf, math.nan, 1e30, -1e30):
        spoilt = wave.clone()
        spoilt[7] = bad
        blocks.append(spoilt)
    negative_nan = wave.clone()
    negative_nan.view(torch.int32)[3] = -1  # all ones
    return torch.stack([*blocks, negative_nan, wave])


@ignore_numpy_warnings
@every_bits
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_special_values_match_the_reference(bits, mode, device):
    x = special_blocks()
    if mode == "nearest":
        assert_matches_reference(x, device, bits=bits, block=32)
        return
    result = quantize_affine(x.to(device), bits=bits, block=32, mode=mode)
    expected = quantize_blockwise(x, bits=bits, block=32)
    assert same(result.scales, expected.scales)
    assert same(result.offsets, expected.offsets)
    decoded = dequantize_affine(result).cpu()
    assert torch.equal(decoded.isnan(), dequantize_blockwise(expected).isnan())
    assert not decoded[:2].any()


def test_the_last_block_is_padded_with_the_last_element(device):
    x = torch.cat([torch.randn(256), torch.tensor([5.0, 6.0, 7.0])])
    result = assert_matches_reference(x, device)
    assert result.offsets[1] == 5
    assert result.codes[256] == 0


@every_dtype
def test_any_shape_and_strides_are_restored(dtype, device):
    for x in (torch.tensor(2.5), torch.randn(6, 50).T, torch.randn(2, 9, 64)[:, 1:, ::2]):
        assert_matches_reference(x.to(dtype), device)


def test_a_view_with_an_offset_is_encoded_from_its_start(device):
    assert_matches_reference(torch.randn(5001)[1:], device, bits=4)


def test_codes_are_packed_from_the_lowest_bits(device):
    result = quantize_affine(torch.tensor([0.0, 1, 2, 3, 3], device=device), bits=2, block=32)
    assert result.codes.tolist() == [0b11_10_01_00, 0b11]
    result = quantize_affine(torch.tensor([15.0, 0, 7], device=device), bits=4, block=32)
    assert result.codes.tolist() == [0x0F, 0x07]


@every_bits
def test_kernel_and_reference_decode_each_others_codes(bits):
    x = torch.randn(700, generator=seeded())
    if torch.cuda.is_available():
        x = x.cuda()
    ours, theirs = quantize_affine(x, bits=bits), quantize_blockwise(x, bits=bits)
    assert_close(dequantize_affine(theirs), dequantize_blockwise(theirs))
    assert_close(dequantize_affine(ours), dequantize_blockwise(ours))


def test_no_graph_is_recorded(device):
    x = torch.randn(300, device=device, requires_grad=True)
    assert not dequantize_affine(quantize_affine(x)).requires_grad


# ------------------------------------------------------------------ stochastic


@every_bits
def test_stochastic_rounding_is_unbiased(bits, device):
    rows = 20 * TILE // 256  # one draw per row
    x = (torch.randn(256, generator=seeded(4)) * 2).to(device)
    settings = {"bits": bits, "mode": "stochastic", "generator": seeded(5, device)}
    kept = quantize_affine(x.expand(rows, 256), **settings)
    mean = dequantize_affine(kept).double().mean(0)
    step = kept.scales[0].double().item()
    assert (kept.scales == kept.scales[0]).all()
    # The standard error of one mean is at most step/2/√draws.
    assert ((mean - x).abs() <= 5 * step / 2 / rows**0.5 + 1e-6).all()
    assert abs(((mean - x) / step).mean().item()) < 4 * 0.5 / (rows * 256) ** 0.5


@every_bits
def test_a_value_slightly_above_the_last_code_gets_it_for_any_draw(bits, device):
    """Subnormal scales have so few bits that one can be smaller than its range requires."""
    levels = 2**bits - 1
    scale, overshoot = (
        2**16,
        levels // 2,
    )  # in units of the smallest float32; overshoot/levels is below half
    float32_max = torch.tensor(levels * scale + overshoot, dtype=torch.int32).view(torch.float32)
    x = float32_max.repeat(2 * TILE).to(device)
    x[::256] = 0
    kept = quantize_affine(x, bits=bits, mode="stochastic", generator=seeded(3, device))
    assert kept.scales.float().cpu().view(torch.int32).unique().tolist() == [scale]
    codes = dequantize_affine(kept)[x > 0].cpu().view(torch.int32)
    assert codes.unique().tolist() == [levels * scale]


@every_bits
def test_a_draw_is_one_of_the_two_neighbors(bits, device):
    x = torch.randn(5000, generator=seeded(6)).to(device)
    kept = quantize_affine(x, bits=bits, mode="stochastic", generator=seeded(7, device))
    steps = kept.scales.float().repeat_interleave(256)[:5000]
    assert ((dequantize_affine(kept) - x).abs() <= steps * 1.0001).all()


def test_draws_are_independent(device):
    """Round 8192 halves: half of them go up, and neighbors, blocks and programs are independent."""
    x = torch.full((2 * TILE,), 0.5, device=device)
    x[::256], x[1::256] = 0.0, 3.0
    kept = quantize_affine(x, bits=2, mode="stochastic", generator=seeded(1, device))
    is_up = (dequantize_affine(kept) > 0.5).double().view(2, 16, 256)[:, :, 4:] - 0.5
    assert abs(is_up.mean().item()) < 0.03
    for a, b in (
        (is_up[0], is_up[1]),
        (is_up[:, ::2], is_up[:, 1::2]),
        *((is_up[..., :-n], is_up[..., n:]) for n in (1, 2, 3, 4, 64, 128)),
    ):
        assert abs((a * b).mean().item()) < 0.03 / 2  # 0.25 if they were equal


def test_a_generator_repeats_its_draws_and_the_default_one_is_untouched(device):
    x = torch.randn(1000, device=device)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    settings = {"bits": 4, "mode": "stochastic"}
    first, again, other = (
        quantize_affine(x, generator=seeded(n, device), **settings).codes for n in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_draws_different_bits_each_time(device):
    x, generator = torch.randn(1000, device=device), seeded(3, device)
    draws = [quantize_affine(x, mode="stochastic", generator=generator).codes for _ in range(2)]
    assert not torch.equal(*draws)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(("mode", "seed_bytes"), [("nearest", 0), ("stochastic", 8)])
@every_bits
def test_only_the_result_is_allocated(bits, mode, seed_bytes):
    n, peaks = 100_001, []

    def step(decode: bool) -> None:
        kept = quantize_affine(x, bits=bits, mode=mode)
        assert kept.nbytes == math.ceil(n * bits / 8) + 4 * math.ceil(n / 256)
        if decode:
            dequantize_affine(kept)

    with memlab.dry_run():
        x = torch.empty(n)
        for decode in (False, True):
            peaks.append(memlab.measure(partial(step, decode)).peak_bytes)
    kept_bytes = math.ceil(n * bits / 8) + 4 * math.ceil(n / 256)
    assert peaks == [x.nbytes + kept_bytes + seed_bytes, x.nbytes + kept_bytes + x.nbytes]


def a_step(around, device: torch.device | None = None) -> None:
    x = torch.randn(2, 5001, requires_grad=True, device=device)
    with around:
        out = (x * 2).sin().exp().sum()
    out.backward()


@every_bits
def test_the_peak_of_a_step_is_below_the_reference(bits):
    peaks = []
    for module in (compression, memlab.kernels.compression):
        with memlab.dry_run():
            around = module.compressed_activations(bits)
            peaks.append(memlab.measure(partial(a_step, around)).peak_bytes)
    assert peaks[1] < peaks[0]


@pytest.mark.gpu
@every_bits
def test_a_dry_run_has_the_peak_of_a_gpu(bits):
    """The interpreter's peak differs, because it keeps arguments alive until garbage collection."""
    step = partial(a_step, compressed_activations(bits), torch.device("cuda"))
    real = memlab.measure(step)
    with memlab.dry_run():
        dry = memlab.measure(partial(a_step, compressed_activations(bits)))
    assert (dry.peak_bytes, dry.at_peak) == (real.peak_bytes, real.at_peak)


def test_meta_tensors_have_shapes_and_dtypes():
    kept = quantize_affine(torch.empty(3, 700, dtype=torch.bfloat16, device="meta"), bits=2)
    assert (kept.codes.shape, kept.scales.shape) == ((525,), (9,))
    decoded = dequantize_affine(kept)
    assert (decoded.shape, decoded.dtype, decoded.device.type) == ((3, 700), torch.bfloat16, "meta")


# ------------------------------------------------------------------ the context manager


def layers(device: torch.device) -> nn.Module:
    """GELU and ReLU, LayerNorm and dropout: activations, ReLU outputs and masks."""
    torch.manual_seed(0)
    parts = (nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU())
    return nn.Sequential(*parts, nn.Dropout(0.1), nn.Linear(64, 32)).to(device)


def gradients(around, device: torch.device) -> torch.Tensor:
    model = layers(device)
    x = torch.randn(64, 32, generator=seeded()).to(device).requires_grad_()
    with around:
        out = model(x * 1)
    result = torch.autograd.grad(out.square().mean(), [x, *model.parameters()])
    return torch.cat([gradient.flatten() for gradient in result])


@every_bits
def test_gradients_and_report_of_a_model_match_the_reference(bits, device):
    around = {
        module: module.compressed_activations(bits, mode="nearest")
        for module in (compression, memlab.kernels.compression)
    }
    result = {module: gradients(context, device) for module, context in around.items()}
    expected, ours = result.values()
    assert not torch.equal(expected, gradients(nullcontext(), device))
    if device.type == "cpu":
        assert torch.equal(ours, expected)
    else:
        assert (ours - expected).norm() < 1e-3 * expected.norm()


@every_bits
def test_the_report_matches_the_reference(bits, device):
    reports = []
    for module in (compression, memlab.kernels.compression):
        with module.compressed_activations(bits, min_numel=64) as report:
            layers(device)(torch.randn(64, 32, device=device) * 1)
        reports.append(report)
    assert reports[0].kinds == reports[1].kinds
    assert {"activations", "ReLU outputs"} <= set(reports[0].kinds)


def test_stochastic_gradients_are_as_accurate_as_the_reference(device):
    exact = gradients(nullcontext(), device)
    errors = []
    for module in (compression, memlab.kernels.compression):
        around = module.compressed_activations(4, generator=seeded(1, device))
        errors.append((gradients(around, device) - exact).norm().item())
    assert errors[1] == pytest.approx(errors[0], rel=0.2)
    assert errors[1] != errors[0]  # the kernel draws different bits


# ------------------------------------------------------------------ invalid input


@pytest.mark.parametrize("block", [16, 96, 8192])
def test_an_unsupported_block_is_refused(block):
    message = f"got blocks of {block}; give a power of two from 32 to 4096, or use memlab.compres"
    with pytest.raises(ValueError, match=message):
        quantize_affine(torch.ones(8), block=block)
    with pytest.raises(ValueError, match=message):
        compressed_activations(group=block)
    with pytest.raises(ValueError, match=message):
        dequantize_affine(quantize_blockwise(torch.ones(8), block=block))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "got 3 bits; give 8, 4 or 2"),
        ({"block": 0}, "got blocks of 0 at 8 bits"),
        ({"mode": "random"}, "got mode 'random'; give 'nearest' or 'stochastic'"),
    ],
)
def test_invalid_input_is_refused_as_in_the_reference(settings, message):
    with pytest.raises(ValueError, match=message):
        quantize_affine(torch.ones(8), **settings)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"got torch.int64 to quantize; give float32"):
        quantize_affine(torch.arange(8))


def test_tensors_with_a_codebook_are_refused():
    kept = quantize_blockwise(torch.ones(8), codebook=dynamic_code(signed=True))
    with pytest.raises(ValueError, match="quantized with a codebook, which has no offsets; decode"):
        dequantize_affine(kept)


# ------------------------------------------------------------------ compiled

COMPILED = """
from memlab.kernels.compression import dequantize_affine, quantize_affine
found = []
for capability in (80, 89):
    with compiled_for(capability) as made:
        for dtype, bits in ((torch.float32, 8), (torch.float32, 2), (torch.bfloat16, 4)):
            x = torch.empty(2**20, dtype=dtype, device="meta")
            quantize_affine(x, bits=bits, mode="stochastic")
            dequantize_affine(quantize_affine(x, bits=bits))
    found += made
report(found)
"""


@pytest.mark.slow
def test_compiled_kernels_spill_nothing_and_load_16_bytes(compiled):
    made = compiled(COMPILED)
    assert len(made) == 2 * 3 * 3
    for kernel in made:
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= 128
        assert kernel["shared"] <= 4096
        wide = "ld.global.v4" if kernel["name"] == "_encode" else "st.global.v4"
        assert wide in kernel["ptx"]
