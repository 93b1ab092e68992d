"""NF4: the bits of bitsandbytes, exact bytes, temporaries of a fixed size."""

import math
from dataclasses import replace

import pytest
import torch
from close import assert_close
from quick import together
from torch import Tensor

import memlab
from memlab.internals.chunks import CHUNK_SIZE
from memlab.internals.torch_internals import DispatchKey
from memlab.quantize import (
    NF4,
    dequantize_nf4,
    nf4_bytes,
    nf4_code,
    nf4_codebooks,
    quantize_nf4,
)

functional = pytest.importorskip("bitsandbytes.functional")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
SHAPES = [(1, 1), (7, 9), (64, 64), (5, 77), (33, 65), (129, 130), (513, 1023)]
CODEBOOK_BYTES = 4 * (16 + 256)


def weights(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------ levels


def test_the_levels_equal_bitsandbytes_to_the_bit():
    assert torch.equal(nf4_code(), functional.get_4bit_type("nf4", device="cpu"))


def test_the_levels_divide_the_normal_distribution_evenly():
    """Steps of probability between neighbors: equal on each side of zero."""
    scale = torch.special.ndtri(torch.tensor(1 - (1 / 32 + 1 / 30) / 2, dtype=torch.float64))
    steps = torch.special.ndtr(nf4_code().double() * scale).diff()
    assert_close(steps[:7], steps[:1].expand(7), dtype=torch.float32)
    assert_close(steps[7:], steps[-1:].expand(8), dtype=torch.float32)
    assert steps[0] > steps[-1]  # seven below zero, eight above


# ------------------------------------------------------------------ against bitsandbytes


def with_bitsandbytes(weight: Tensor, *, double: bool, block: int = 64) -> tuple[NF4, Tensor]:
    """Return bitsandbytes' quantized weight as an NF4, and its decoded weight."""
    codes, state = functional.quantize_4bit(
        weight, blocksize=block, quant_type="nf4", compress_statistics=double
    )
    scales, mean = (state.state2.absmax, state.offset) if double else (None, None)
    codebooks = nf4_codebooks()
    made = NF4(
        codes.view(-1), state.absmax, scales, mean, codebooks, weight.shape, weight.dtype, block
    )
    return made, functional.dequantize_4bit(codes, state)


def assert_same(got: NF4, wanted: NF4) -> None:
    for name in ("codes", "absmax", "scales", "mean"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert ours is theirs is None or torch.equal(ours, theirs), name


@pytest.mark.few(1)
@each_dtype
@together("shape", SHAPES)
@together("zeros", [0, 64, 200])
def test_codes_absmax_and_decoded_values_equal_bitsandbytes(dtype, shape, zeros):
    weight = weights(*shape, dtype=dtype)
    weight.view(-1)[:-1][:zeros] = 0  # the last block is not all zeros
    theirs, decoded = with_bitsandbytes(weight, double=False)
    ours = quantize_nf4(weight, double=False)
    assert_same(ours, theirs)
    assert torch.equal(dequantize_nf4(ours), decoded)


@pytest.mark.parametrize("block", [32, 128, 4096])
def test_other_block_sizes_equal_bitsandbytes(block):
    weight = weights(130, 129) * 3
    theirs, decoded = with_bitsandbytes(weight, double=False, block=block)
    ours = quantize_nf4(weight, double=False, block=block)
    assert_same(ours, theirs)
    assert torch.equal(dequantize_nf4(ours), decoded)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_double_quantization_equals_bitsandbytes_except_for_its_coarse_grid(dtype, shape):
    """Its absmax codes are nearest to a point of the grid, and ours are nearest to the absmax."""
    weight = weights(*shape, dtype=dtype)
    theirs, decoded = with_bitsandbytes(weight, double=True)
    ours = quantize_nf4(weight)
    assert_same(replace(ours, absmax=theirs.absmax), theirs)
    assert torch.equal(dequantize_nf4(replace(ours, absmax=theirs.absmax)), decoded)

    scale = ours.scales.repeat_interleave(256)[: len(ours.absmax)]
    absmax = quantize_nf4(weight, double=False).absmax - ours.mean
    our_error, their_error = (
        (ours.codebooks.absmax[q.absmax.int()] * scale - absmax).abs() for q in (ours, theirs)
    )
    grid_step = 2 / 65_535
    assert (our_error <= their_error).all()
    assert (their_error <= our_error + 1.01 * grid_step * scale).all()
    assert (ours.absmax != theirs.absmax).sum() <= max(1, 0.01 * len(absmax))


@pytest.mark.parametrize("seed", range(5))
def test_absmax_codes_equal_bitsandbytes_implementation_in_torch(seed):
    """It is the one for devices without compiled code, and rounds to nearest, as CUDA does."""
    absmax = quantize_nf4(weights(1024, 1024, seed=seed), double=False).absmax
    quantize = torch.ops.bitsandbytes.quantize_blockwise.default
    codes, scales = quantize._op_dk(
        DispatchKey.CompositeExplicitAutograd, absmax - absmax.mean(), nf4_codebooks().absmax, 256
    )
    ours = quantize_nf4(weights(1024, 1024, seed=seed))
    assert torch.equal(ours.absmax, codes)
    assert torch.equal(ours.scales, scales)


# ------------------------------------------------------------------ values


def test_each_element_gets_the_nearest_level():
    weight = weights(100, 64)
    q = quantize_nf4(weight, double=False)
    codes = torch.stack([q.codes >> 4, q.codes & 15], 1).view(100, 64)
    fractions = weight.double() / q.absmax.double().view(-1, 1)
    distances = (fractions.unsqueeze(-1) - nf4_code().double()).abs()
    assert torch.equal(codes.long(), distances.argmin(-1))
    assert torch.equal(dequantize_nf4(q), nf4_code()[codes.int()] * q.absmax.view(-1, 1))


def test_double_quantization_changes_an_absmax_by_less_than_one_percent_of_their_range():
    weight = weights(512, 512)
    exact = quantize_nf4(weight, double=False).absmax
    q = quantize_nf4(weight)
    decoded = q.codebooks.absmax[q.absmax.int()] * q.scales.repeat_interleave(256) + q.mean
    assert (decoded - exact).abs().max() < 0.01 * (exact.max() - exact.min())


@pytest.mark.parametrize("double", [False, True])
def test_a_weight_of_zeros_stays_zero(double):
    q = quantize_nf4(torch.zeros(3, 50), double=double)
    assert (q.codes == 0x77).all()
    assert (dequantize_nf4(q) == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_leaves_nothing_finite_in_its_block(value):
    weight = weights(3, 64)
    before = dequantize_nf4(quantize_nf4(weight, double=False))
    weight[1, 7] = value
    after = dequantize_nf4(quantize_nf4(weight, double=False))
    assert not after[1].isfinite().any()
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not dequantize_nf4(quantize_nf4(weight)).isfinite().any()


@each_dtype
def test_decoding_into_a_buffer_rounds_once_to_its_dtype(dtype):
    q = quantize_nf4(weights(40, 100, dtype=torch.bfloat16))
    out = torch.empty(40, 100, dtype=dtype)
    assert dequantize_nf4(q, out) is out
    exact = dequantize_nf4(q, torch.empty(40, 100))
    assert torch.equal(out, exact.to(dtype))
    assert exact.bfloat16().ne(exact).any()


def test_several_chunks_equal_one():
    weight = weights(3, CHUNK_SIZE + 777)
    q = quantize_nf4(weight, double=False)
    rows = torch.nn.functional.pad(weight.view(-1), (0, -weight.numel() % 64)).view(-1, 64)
    assert torch.equal(q.absmax, rows.abs().amax(1))
    error = (dequantize_nf4(q).view(-1) - weight.view(-1)).abs()
    bound = q.absmax.repeat_interleave(64)[: weight.numel()] * 0.152  # half the widest gap
    assert (error <= bound).all()
    assert (dequantize_nf4(quantize_nf4(weight)) - dequantize_nf4(q)).abs().max() < 0.05


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 64 * 256, 64 * 256 + 1, CHUNK_SIZE + 5])
@pytest.mark.parametrize("double", [False, True])
def test_bytes_follow_the_formula(n, double):
    q = quantize_nf4(torch.randn(n), double=double)
    tensors = [t for t in (q.codes, q.absmax, q.scales, q.mean) if t is not None]
    blocks = math.ceil(n / 64)
    of_absmax = blocks + 4 * math.ceil(blocks / 256) + 4 if double else 4 * blocks
    assert q.nbytes == nf4_bytes(n, double=double) == math.ceil(n / 2) + of_absmax
    assert q.nbytes == sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize(
    ("double", "per_weight", "mean"), [(False, 0.5625, 0), (True, 0.515869140625, 4)]
)
def test_the_meter_sees_the_bytes_per_weight(double, per_weight, mean):
    weight = torch.randn(1024, 1024)
    codebooks = nf4_codebooks()
    kept = []
    trace = memlab.measure(
        lambda: kept.append(quantize_nf4(weight, double=double, codebooks=codebooks))
    )
    held = weight.nbytes + CODEBOOK_BYTES
    assert sum(trace.at_end.values()) - held == per_weight * weight.numel() + mean


@pytest.mark.few(1)
@pytest.mark.parametrize("double", [False, True])
def test_temporaries_do_not_grow_with_the_weight(double):
    """With double quantization, the float32 absmax do, by 4 bytes per block."""

    def extra(rows: int) -> tuple[int, int]:
        weight, codebooks = torch.randn(rows, CHUNK_SIZE), nf4_codebooks()
        q = quantize_nf4(weight, double=double, codebooks=codebooks)
        out, held = torch.empty_like(weight), weight.nbytes + CODEBOOK_BYTES
        encode = memlab.measure(lambda: quantize_nf4(weight, double=double, codebooks=codebooks))
        decode = memlab.measure(lambda: dequantize_nf4(q, out))
        made = q.codes.nbytes + 4 * len(q.absmax)
        return encode.peak_bytes - held - made, decode.peak_bytes - held - q.nbytes

    assert extra(4) == extra(8)
    assert extra(4) < (3.5 * 2**20, 1.6 * 2**20)


def test_fake_tensors_have_the_same_bytes_and_shapes():
    with memlab.dry_run():
        q = quantize_nf4(torch.rand(10, 101, dtype=torch.bfloat16))
        decoded = dequantize_nf4(q)
        assert q.nbytes == nf4_bytes(1010)
        assert (decoded.shape, decoded.dtype) == ((10, 101), torch.bfloat16)


# ------------------------------------------------------------------ errors


def test_invalid_calls_are_errors():
    weight = torch.randn(4, 64)
    with pytest.raises(TypeError, match=r"got torch.int64 to quantize; give float32"):
        quantize_nf4(torch.arange(8))
    with pytest.raises(ValueError, match="got blocks of 63; give an even number"):
        quantize_nf4(weight, block=63)
    for out in (torch.empty(64, 4), torch.empty(64, 4).T, torch.empty(4, 64, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"give a contiguous one of shape \(4, 64\)"):
            dequantize_nf4(quantize_nf4(weight), out)


@pytest.mark.parametrize("double", [False, True])
@each_dtype
@pytest.mark.parametrize("blocks", [1, 2, 300])
def test_the_largest_numbers_of_a_dtype_stay_finite(dtype, blocks, double):
    largest = torch.finfo(dtype).max
    weight = torch.linspace(-1, 1, 64 * blocks + 6).mul(largest).to(dtype)
    for given in (weight, torch.full_like(weight, largest)):
        decoded = dequantize_nf4(quantize_nf4(given, double=double))
        assert decoded.isfinite().all()
        assert ((decoded - given).abs() / largest).max() < 0.16  # half the widest step
