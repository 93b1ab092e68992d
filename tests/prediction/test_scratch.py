"""Kernel scratch computed by hand from torch's rules."""

import pytest
import torch
from torch.nn import functional as F

from memlab.prediction.scratch import reduction_bytes

from traces import predicted  # isort: skip

HOPPER = 132  # multiprocessors


@pytest.mark.parametrize(
    ("shape", "strides", "accumulator_bytes", "expected"),
    [
        # A maximum with its index, then a sum, over a vocabulary of 10,000 for 4 × 128 contiguous
        # tokens: 128 threads on 128 outputs, 157 blocks for each, 16 values per thread.
        ((4, 128, 10_000), (128, 1, 512), 16, (16 * 512 * 157 * 128, 4 * 4)),
        ((4, 128, 10_000), (128, 1, 512), 4, (4 * 512 * 157 * 128, 4 * 4)),
        ((4, 128, 2_560), (128, 1, 512), 4, (4 * 512 * 40 * 128, 4 * 4)),
        # Along the fastest dimension, one thread block is enough.
        ((4, 128, 10_000), (1_280_000, 10_000, 1), 4, ()),
        ((4, 128, 1_000), (128, 1, 512), 4, ()),
        # Sizes of 1 and gaps between rows change nothing.
        ((4, 1, 128, 10_000), (128, 7, 1, 512), 4, (4 * 512 * 157 * 128, 4 * 4)),
        ((4, 128, 0), (0, 0, 1), 4, ()),
    ],
)
def test_buffers_of_a_reduction_over_the_last_dimension(
    shape, strides, accumulator_bytes, expected
):
    got = reduction_bytes(
        shape, strides, [len(shape) - 1], accumulator_bytes, multiprocessors=HOPPER
    )
    assert got == expected


def test_a_full_sum_has_one_partial_result_per_block():
    blocks = -(-1_000_000 // (512 * 16))
    assert reduction_bytes((1_000_000,), (1,), [0], 4) == (4 * blocks, 4)


def test_outputs_at_an_odd_offset_are_computed_one_by_one():
    even = reduction_bytes((8192, 4096), (4096, 1), [0], 4)
    odd = reduction_bytes((8192, 4096), (4096, 1), [0], 4, offset=1)
    assert even == (4 * 4096 * 54 * 32 * 4, 4 * 32)
    assert odd == (4 * 4096 * 4 * 32, 4 * 128)


def test_many_outputs_need_no_second_block():
    assert reduction_bytes((8192, 2**20), (2**20, 1), [0], 4, multiprocessors=1) == ()


@pytest.mark.parametrize(
    ("reduce", "accumulator_bytes"),
    [
        (lambda x: x.sum(0), 4),
        (lambda x: x.sum(dim=0, keepdim=True), 4),
        (lambda x: x.mean(-2), 4),
        (lambda x: x.max(0), 16),
        (lambda x: x.argmin(0), 16),
        (lambda x: torch.linalg.vector_norm(x, dim=0), 4),
    ],
)
def test_each_reduction_has_its_accumulator_size(reduce, accumulator_bytes):
    trace = predicted(lambda device: reduce(torch.zeros(8192, 4096, device=device)))
    scratch = [e.bytes for e in trace.events if e.category == "workspace" and e.bytes > 0]
    assert scratch == [accumulator_bytes * 4096 * 54 * 128, 128]


def test_bfloat16_sums_accumulate_in_float32():
    def step(device):
        torch.zeros(8192, 4096, dtype=torch.bfloat16, device=device).sum(0)

    assert [e.bytes for e in predicted(step).events if e.category == "workspace"][:1] == [
        4 * 4096 * 54 * 128
    ]


@pytest.mark.parametrize(("key_heads", "T", "D"), [(4, 64, 32), (2, 100, 40), (1, 128, 200)])
def test_flash_backward_accumulates_in_float32(key_heads, T, D):
    B, H = 2, 4

    def step(device):
        q = torch.zeros(B, H, T, D, dtype=torch.bfloat16, device=device, requires_grad=True)
        k, v = (q.new_zeros(B, key_heads, T, D) for _ in range(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y.backward(torch.zeros_like(y))

    rounded_D = {32: 32, 40: 64, 200: 256}[D]
    expected = [4 * B * H * 128, 4 * B * H * 128 * rounded_D]
    expected += [] if key_heads == H else 2 * [2 * B * T * H * D]
    events = [e for e in predicted(step).events if e.category == "workspace"]
    assert [e.bytes for e in events if e.bytes > 0] == expected
    assert sum(e.bytes for e in events) == 0


def softmax_scratch(function, *, forward_strides=(1024, 64, 1), expanded=False) -> list[int]:
    """Return the scratch of softmax's forward and backward over a (2, 16, 64) float32 tensor."""

    def step(device):
        x = torch.empty_strided((2, 16, 64), forward_strides, device=device, requires_grad=True)
        y = function(x)
        grad = torch.ones((), device=device).expand_as(y) if expanded else torch.ones_like(y)
        y.backward(grad)

    return [e.bytes for e in predicted(step).events if e.category == "workspace" and e.bytes > 0]


SCORES = 4 * 2 * 16 * 64


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_backward_multiplies_gradient_and_output_first(dim):
    assert softmax_scratch(lambda x: x.softmax(dim)) == [SCORES]
    assert softmax_scratch(lambda x: x.log_softmax(dim)) == []


def test_softmax_backwards_temporary_has_the_dtype_of_the_output():
    assert softmax_scratch(lambda x: x.bfloat16().softmax(-1)) == [SCORES // 2]
    assert softmax_scratch(lambda x: x.half().softmax(-1, dtype=torch.float32)) == [SCORES]


def test_softmax_copies_non_contiguous_inputs():
    transposed = {"forward_strides": (1024, 1, 16)}
    assert softmax_scratch(lambda x: x.log_softmax(-1), **transposed)[:1] == [SCORES]
    assert softmax_scratch(lambda x: x.log_softmax(-1), expanded=True) == [SCORES]
    # The product of an expanded gradient and a contiguous output is contiguous.
    assert softmax_scratch(lambda x: x.softmax(-1), expanded=True) == [SCORES]


def test_softmax_scratch_is_alive_with_both_gradients():
    def step(device):
        scores = torch.zeros(64, 1024, device=device, requires_grad=True)
        y = scores.softmax(-1)
        y.backward(torch.ones_like(y))

    # the scores, the output, its gradient, the scores' gradient, and the scratch
    assert predicted(step).peak_bytes == 5 * 4 * 64 * 1024
