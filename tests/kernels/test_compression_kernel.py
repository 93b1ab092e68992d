"""The coding in kernels: memlab.quantize's to the bit, and nothing taken meanwhile."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import memlab
from memlab import compression
from memlab.kernels.compression import compressed_activations, dequantize_affine, quantize_affine
from memlab.quantize import Quantized, dequantize_blockwise, dynamic_code, quantize_blockwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 3, 255, 256, 257, 1030, 4096, 4097, 9001)
TILE = 4096

# numpy, in the interpreter, warns of what IEEE's arithmetic is asked for on purpose.
of_infinities = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_bits = pytest.mark.parametrize("bits", [8, 4, 2])


def seeded(seed: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Number by number, NaN being the same as NaN."""
    found = found.cpu()
    is_nan = expected.isnan()
    return torch.equal(found.isnan(), is_nan) and torch.equal(found[~is_nan], expected[~is_nan])


def assert_as_the_reference(x: torch.Tensor, device: torch.device, **settings) -> Quantized:
    """All that is kept, to the bit, of a reference on the CPU; and what comes back of it."""
    found, expected = quantize_affine(x.to(device), **settings), quantize_blockwise(x, **settings)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert same(found.scales, expected.scales)
    assert same(found.offsets, expected.offsets)
    back, expected_back = dequantize_affine(found), dequantize_blockwise(expected)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    if device.type == "cpu":  # on a GPU offset + c·scale is rounded once
        assert same(back, expected_back)
    else:
        tolerance = torch.finfo(x.dtype).eps * x.abs().nan_to_num(0, 0, 0).max().item()
        torch.testing.assert_close(
            back.cpu(), expected_back, atol=tolerance, rtol=0, equal_nan=True
        )
    return found


# ------------------------------------------------------------------ to the bit


@every_dtype
@every_bits
def test_codes_scales_and_offsets_are_those_of_the_reference(dtype, bits, device):
    for n in SIZES:
        x = (torch.randn(n, generator=seeded(n)) * 3 + 1).to(dtype)
        assert_as_the_reference(x, device, bits=bits)


@pytest.mark.parametrize("block", [32, 128, 1024, 4096])
@every_bits
def test_blocks_may_be_of_other_powers_of_two(block, bits, device):
    x = torch.randn(TILE + block + 5, generator=seeded()) * 100
    assert_as_the_reference(x, device, bits=bits, block=block)


@every_bits
def test_halves_are_rounded_to_the_even(bits, device):
    levels = 2**bits - 1
    halves = torch.arange(0, levels, 0.5)
    x = torch.cat([halves, torch.tensor([float(levels)])])
    found = assert_as_the_reference(x, device, bits=bits, block=1024)
    assert found.scales.item() == 1
    assert found.offsets.item() == 0


@every_bits
@pytest.mark.parametrize("power", [-120, 0, 100])
def test_the_neighbours_of_halves_are_rounded_to_the_nearer_whatever_the_scale(bits, power, device):
    """A block for each of the 128 mantissas that a scale can have: a quotient that is off in its
    last bit, as a product with 1/scale is, has other codes."""
    levels = 2**bits - 1
    scales = (1 + torch.arange(128.0) / 128).unsqueeze(1) * 2.0**power
    halves = scales * (torch.arange(levels) + 0.5)  # exact in float32
    below, above = (halves.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf))
    ends = scales * torch.tensor([0.0, levels])
    x = torch.cat([ends, below, halves, above], dim=1)
    x = torch.nn.functional.pad(x, (0, 1024 - x.shape[1]))
    found = assert_as_the_reference(x, device, bits=bits, block=1024)
    assert torch.equal(found.scales.float().cpu(), scales.squeeze(1))


@every_bits
def test_numbers_of_every_size_have_the_reference_s_codes(bits, device):
    """A block for each power of two, from the smallest subnormal to the largest."""
    sizes = torch.arange(-149, 128).double().exp2()
    draws = torch.rand(len(sizes), 32, generator=seeded(1), dtype=torch.float64) * 2 - 1
    x = (draws * sizes[:, None]).float()
    found = assert_as_the_reference(x, device, bits=bits, block=32)
    assert found.scales.isfinite().all()


def special_blocks() -> torch.Tensor:
    """(blocks, 32), each of some kind."""
    largest = torch.finfo(torch.float32).max
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
        torch.full((32,), largest),  # its bfloat16, to the nearest, would be infinite
        torch.full((32,), -largest),
        wave * largest,
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


@of_infinities
@every_bits
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_zeros_constants_infinities_and_nan_are_kept_as_the_reference_does(bits, mode, device):
    x = special_blocks()
    if mode == "nearest":
        assert_as_the_reference(x, device, bits=bits, block=32)
        return
    found = quantize_affine(x.to(device), bits=bits, block=32, mode=mode)
    expected = quantize_blockwise(x, bits=bits, block=32)
    assert same(found.scales, expected.scales)
    assert same(found.offsets, expected.offsets)
    back = dequantize_affine(found).cpu()
    assert torch.equal(back.isnan(), dequantize_blockwise(expected).isnan())
    assert not back[:2].any()


def test_the_last_number_fills_the_last_block(device):
    x = torch.cat([torch.randn(256), torch.tensor([5.0, 6.0, 7.0])])
    found = assert_as_the_reference(x, device)
    assert found.offsets[1] == 5
    assert found.codes[256] == 0


@every_dtype
def test_any_shape_and_any_strides_come_back(dtype, device):
    for x in (torch.tensor(2.5), torch.randn(6, 50).T, torch.randn(2, 9, 64)[:, 1:, ::2]):
        assert_as_the_reference(x.to(dtype), device)


def test_what_begins_in_the_middle_of_a_storage_is_taken_from_there(device):
    assert_as_the_reference(torch.randn(5001)[1:], device, bits=4)


def test_codes_lie_side_by_side_from_the_lowest_bits(device):
    found = quantize_affine(torch.tensor([0.0, 1, 2, 3, 3], device=device), bits=2, block=32)
    assert found.codes.tolist() == [0b11_10_01_00, 0b11]
    found = quantize_affine(torch.tensor([15.0, 0, 7], device=device), bits=4, block=32)
    assert found.codes.tolist() == [0x0F, 0x07]


@every_bits
def test_either_may_decode_what_the_other_encoded(bits):
    x = torch.randn(700, generator=seeded())
    if torch.cuda.is_available():
        x = x.cuda()
    ours, theirs = quantize_affine(x, bits=bits), quantize_blockwise(x, bits=bits)
    torch.testing.assert_close(dequantize_affine(theirs), dequantize_blockwise(theirs))
    torch.testing.assert_close(dequantize_affine(ours), dequantize_blockwise(ours))


def test_the_graph_is_not_kept(device):
    x = torch.randn(300, device=device, requires_grad=True)
    assert not dequantize_affine(quantize_affine(x)).requires_grad


# ------------------------------------------------------------------ stochastic


@every_bits
def test_the_mean_of_many_draws_is_the_number(bits, device):
    rows = 20 * TILE // 256  # each row is a draw
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
def test_what_is_above_the_last_code_by_a_rounding_has_it_whatever_is_drawn(bits, device):
    """Where scales are subnormal: they keep so few bits that one falls short of its range."""
    levels = 2**bits - 1
    scale, excess = 2**16, levels // 2  # times the smallest float32; excess/levels is below half
    largest = torch.tensor(levels * scale + excess, dtype=torch.int32).view(torch.float32)
    x = largest.repeat(2 * TILE).to(device)
    x[::256] = 0
    kept = quantize_affine(x, bits=bits, mode="stochastic", generator=seeded(3, device))
    assert kept.scales.float().cpu().view(torch.int32).unique().tolist() == [scale]
    codes = dequantize_affine(kept)[x > 0].cpu().view(torch.int32)
    assert codes.unique().tolist() == [levels * scale]


@every_bits
def test_a_draw_is_one_of_the_two_neighbours(bits, device):
    x = torch.randn(5000, generator=seeded(6)).to(device)
    kept = quantize_affine(x, bits=bits, mode="stochastic", generator=seeded(7, device))
    steps = kept.scales.float().repeat_interleave(256)[:5000]
    assert ((dequantize_affine(kept) - x).abs() <= steps * 1.0001).all()


def test_no_two_numbers_share_their_draw(device):
    """Of 8192 halves: as many up as down, and neighbours, blocks and programs independent."""
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
        assert abs((a * b).mean().item()) < 0.03 / 2  # 0.25 if they were the same


def test_a_generator_repeats_its_draws_and_the_user_s_stream_is_untouched(device):
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


def test_one_generator_draws_anew_each_time(device):
    x, generator = torch.randn(1000, device=device), seeded(3, device)
    draws = [quantize_affine(x, mode="stochastic", generator=generator).codes for _ in range(2)]
    assert not torch.equal(*draws)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize(("mode", "seed_bytes"), [("nearest", 0), ("stochastic", 8)])
@every_bits
def test_nothing_is_taken_but_what_is_kept(bits, mode, seed_bytes):
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
def test_the_peak_of_a_step_is_below_the_reference_s(bits):
    peaks = []
    for module in (compression, memlab.kernels.compression):
        with memlab.dry_run():
            around = module.compressed_activations(bits)
            peaks.append(memlab.measure(partial(a_step, around)).peak_bytes)
    assert peaks[1] < peaks[0]


@pytest.mark.gpu
@every_bits
def test_a_dry_run_has_the_peak_of_a_gpu(bits):
    """In the interpreter it has not: that holds its arguments until Python looks for cycles."""
    step = partial(a_step, compressed_activations(bits), torch.device("cuda"))
    real = memlab.measure(step)
    with memlab.dry_run():
        dry = memlab.measure(partial(a_step, compressed_activations(bits)))
    assert (dry.peak_bytes, dry.at_peak) == (real.peak_bytes, real.at_peak)


def test_meta_tensors_have_shapes_and_dtypes():
    kept = quantize_affine(torch.empty(3, 700, dtype=torch.bfloat16, device="meta"), bits=2)
    assert (kept.codes.shape, kept.scales.shape) == ((525,), (9,))
    back = dequantize_affine(kept)
    assert (back.shape, back.dtype, back.device.type) == ((3, 700), torch.bfloat16, "meta")


# ------------------------------------------------------------------ the context


def layers(device: torch.device) -> nn.Module:
    """GELU and ReLU, LayerNorm and dropout: activations, outputs of ReLU and masks."""
    torch.manual_seed(0)
    parts = (nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU())
    return nn.Sequential(*parts, nn.Dropout(0.1), nn.Linear(64, 32)).to(device)


def gradients(around, device: torch.device) -> torch.Tensor:
    model = layers(device)
    x = torch.randn(64, 32, generator=seeded()).to(device).requires_grad_()
    with around:
        out = model(x * 1)
    found = torch.autograd.grad(out.square().mean(), [x, *model.parameters()])
    return torch.cat([gradient.flatten() for gradient in found])


@every_bits
def test_a_model_s_gradients_and_report_are_those_of_the_reference(bits, device):
    around = {
        module: module.compressed_activations(bits, mode="nearest")
        for module in (compression, memlab.kernels.compression)
    }
    found = {module: gradients(context, device) for module, context in around.items()}
    expected, ours = found.values()
    assert not torch.equal(expected, gradients(nullcontext(), device))
    if device.type == "cpu":
        assert torch.equal(ours, expected)
    else:
        assert (ours - expected).norm() < 1e-3 * expected.norm()


@every_bits
def test_the_report_is_the_reference_s(bits, device):
    reports = []
    for module in (compression, memlab.kernels.compression):
        with module.compressed_activations(bits, min_numel=64) as report:
            layers(device)(torch.randn(64, 32, device=device) * 1)
        reports.append(report)
    assert reports[0].kinds == reports[1].kinds
    assert {"activations", "ReLU outputs"} <= set(reports[0].kinds)


def test_stochastic_gradients_are_as_near_as_the_reference_s(device):
    exact = gradients(nullcontext(), device)
    errors = []
    for module in (compression, memlab.kernels.compression):
        around = module.compressed_activations(4, generator=seeded(1, device))
        errors.append((gradients(around, device) - exact).norm().item())
    assert errors[1] == pytest.approx(errors[0], rel=0.2)
    assert errors[1] != errors[0]  # other draws: it was the kernel's turn


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("block", [16, 96, 8192])
def test_a_block_that_no_tile_is_made_of_is_refused(block):
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
def test_what_the_reference_refuses_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        quantize_affine(torch.ones(8), **settings)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"got torch.int64 to quantize; give float32"):
        quantize_affine(torch.arange(8))


def test_numbers_by_a_code_are_for_the_reference_to_decode():
    kept = quantize_blockwise(torch.ones(8), codebook=dynamic_code(signed=True))
    with pytest.raises(ValueError, match="quantized by a code, which have no offsets; decode"):
        dequantize_affine(kept)


# ------------------------------------------------------------------ on a GPU that is not there

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


def test_compiled_nothing_is_spilled_and_16_bytes_are_read_at_once(compiled):
    made = compiled(COMPILED)
    assert len(made) == 2 * 3 * 3
    for kernel in made:
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= 128
        assert kernel["shared"] <= 4096
        wide = "ld.global.v4" if kernel["name"] == "_encode" else "st.global.v4"
        assert wide in kernel["ptx"]
