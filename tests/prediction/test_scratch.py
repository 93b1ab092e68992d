"""Kernel scratch computed by hand from torch's rules."""

import pytest
import torch
from torch.nn import functional as F

from memlab import Kernels
from memlab.configs.targets import target_named
from memlab.prediction import attention_backward, cub
from memlab.prediction.reductions import reduction_bytes

from traces import WORKSPACE, predicted  # isort: skip

HOPPER = 132  # multiprocessors
A100, H100 = target_named("cuda"), target_named("cuda:hopper")


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


@pytest.mark.few(3)
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
    copies = 2 * [2 * B * H * T * D]  # of the gradient and the output, in the query's layout
    expected = [*copies, 4 * B * H * 128, 4 * B * H * 128 * rounded_D]
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


@pytest.mark.few(1)
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


# ------------------------------------------------------------------ sorts, scans


def scratch(operator, function, **options) -> list[int]:
    """Return the scratch of an operator in a prediction of `function`."""
    events = predicted(function, **options).events
    workspaces = [e for e in events if e.category == "workspace" and operator in e.operator]
    assert sum(e.bytes for e in workspaces) == 0
    return [e.bytes for e in workspaces if e.bytes > 0]


@pytest.mark.parametrize(
    ("bits", "expected"),
    # The first two are what CUB 3.0 returned for A100's tiles: 10,000 pairs of 8 bytes are 3 tiles
    # of 3840 (3 KiB of counts); 8 passes have 8 × 256 counts of 8 bytes, and 32 bytes of counters.
    [
        (64, 8 * 256 * 8 + 3 * 1024 + 2 * 80_128 + 256 + 255),
        (20, 3 * 256 * 8 + 3 * 1024 + 2 * 80_128 + 256 + 255),
        (8, 256 * 8 + 3 * 1024 + 256 + 255),  # one pass needs no copies
    ],
)
def test_a_radix_sort_copies_keys_and_values_unless_one_digit_is_enough(bits, expected):
    assert cub.radix_sort_bytes(10_000, 8, 8, A100, bits=bits) == expected
    assert expected == {64: 180_223, 20: 169_983, 8: 5_631}[bits]


def test_cub_returned_the_same_sizes():
    got = [cub.radix_sort_bytes(1_000_000, *pair, card) for pair in ((8, 8), (4, 8))
           for card in (A100, H100)]  # fmt: skip
    assert got == [16_284_159, 16_240_127, 12_342_527, 12_200_191]


def test_one_thread_block_sorts_2304_pairs_without_storage():
    assert cub.radix_sort_bytes(2304, 8, 8, A100) == 1
    assert cub.radix_sort_bytes(2305, 8, 8, A100) > 2 * 8 * 2305


def test_rows_of_4096_are_sorted_in_place():
    assert scratch("sort", lambda device: torch.zeros(9, 4096, device=device).sort()) == [8 * 4096]


def test_a_long_row_is_sorted_with_copies_of_keys_and_indices():
    n = 5000
    temporary = 4 * 256 * 8 + 2 * 1024 + 20_224 + 40_192 + 256 + 255  # 2 tiles of 3072
    expected = [8 * n, temporary]
    assert scratch("sort", lambda device: torch.zeros(n, device=device).sort()) == expected
    assert scratch("sort", lambda device: torch.zeros(n, device=device).argsort()) == expected


def test_a_few_long_rows_are_sorted_together_by_value_then_by_row():
    rows, n = 2, 2 * 5000
    temporary = 4 * 256 * 8 + 4 * 1024 + 40_192 + 80_128 + 256 + 255  # 4 tiles of 3072
    got = scratch("sort", lambda device: torch.zeros(rows, n // rows, device=device).sort(-1))
    assert got == [8 * n, 8 * n, 4 * n, temporary]


def test_many_long_rows_are_sorted_as_segments():
    n = 128 * 5000
    got = scratch("sort", lambda device: torch.zeros(128, 5000, device=device).sort(-1))
    assert got == [8 * n, 4 * n + 8 * n + 255]


def test_a_sort_along_a_slow_dimension_copies_input_and_results():
    n = 2 * 5000
    got = scratch("sort", lambda device: torch.zeros(5000, 2, device=device).sort(0))
    assert got[:3] == [4 * n, 4 * n, 8 * n]
    assert len(got) == 7


def test_topk_counts_digits_of_rows_that_several_blocks_share():
    def step(device):
        torch.zeros(2, 50_000, device=device).topk(10)

    # 108 multiprocessors × 6 blocks × 256 threads for 100,000 elements: the least, 4 per thread
    blocks = 2 * 49
    per_row = [2 * 4, 2 * 4, 2 * 8, 2 * 8]
    temporary = 768 + 256 + 255  # 33 tiles' status words of 16 bytes, 2 keys
    assert scratch("topk", step) == [*per_row, 512 * blocks, 4 * blocks, 4 * blocks, temporary]


def test_topk_of_short_rows_needs_no_scratch():
    assert scratch("topk", lambda device: torch.zeros(4096, 64, device=device).topk(2)) == []
    assert scratch("topk", lambda device: torch.zeros(2, 19_999, device=device).topk(2)) == []


def test_topk_sorts_more_than_4096_results_with_copies():
    got = scratch("topk", lambda device: torch.zeros(5000, device=device).topk(4097))
    sort = scratch("sort", lambda device: torch.zeros(4097, device=device).sort())
    assert got == [4 * 4097, 8 * 4097, *sort]
    unsorted = scratch(
        "topk", lambda device: torch.zeros(5000, device=device).topk(4097, sorted=False)
    )
    assert unsorted == []


def test_a_cumulative_sum_of_a_mask_casts_it_to_int64_first():
    def step(device):
        torch.zeros(4, 512, dtype=torch.bool, device=device).cumsum(-1)

    assert scratch("cumsum", step) == [8 * 4 * 512]
    assert scratch("cumsum", lambda device: torch.zeros(4, 512, device=device).cumsum(-1)) == []


def test_a_cumulative_sum_copies_a_transposed_input():
    got = scratch("cumsum", lambda device: torch.zeros(512, 4, device=device).T.cumsum(-1))
    assert got == [4 * 4 * 512]


def test_a_cumulative_sum_of_one_row_keeps_a_status_per_tile():
    tiles = 6  # of 1920 elements
    status_bytes = 8 * (tiles + 32)
    got = scratch("cumsum", lambda device: torch.zeros(10_000, device=device).cumsum(0))
    assert got == [-(-status_bytes // 256) * 256 + 255]


def test_a_random_permutation_sorts_random_keys():
    n = 10_000  # 27 bits of an int32 key would often be equal; log2(n² / 0.21) = 29
    temporary = cub.radix_sort_bytes(n, 4, 8, A100, bits=29)
    got = scratch("randperm", lambda device: torch.randperm(n, device=device))
    assert got == [8 * n, 4 * n, 4 * n, temporary]


def test_scratch_of_cpu_operators_is_not_counted():
    def step(device):
        torch.randperm(10_000)
        torch.zeros(8192, 4096).sum(0)
        torch.zeros(10, device=device)

    assert [e for e in predicted(step).events if e.category == "workspace"] == []


# ------------------------------------------------------------------ indexing


def embedding_scratch(count, vocab_size, width=64, dtype=torch.float32) -> list[int]:
    def step(device):
        table = torch.zeros(vocab_size, width, dtype=dtype, device=device, requires_grad=True)
        rows = F.embedding(torch.zeros(count, dtype=torch.long, device=device), table)
        rows.backward(torch.zeros_like(rows))

    return scratch("embedding_dense_backward", step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embeddings_gradient_adds_up_partial_sums_in_float32(dtype):
    n, segments = 5000, 1000  # at most one segment for each row of the table
    partial_sums = 500 + segments  # and one more for every 10 indices
    assert embedding_scratch(n, 1000, dtype=dtype) == [
        *[8 * n] * 3,
        *[8 * segments] * 2,
        *(8, 8),
        *(8 * partial_sums, 4 * 64 * partial_sums),
    ]


def test_an_embeddings_gradient_sorts_only_from_3073_indices():
    assert embedding_scratch(3072, 1000) == []
    assert sum(embedding_scratch(3073, 1000)) > 4 * 64 * (307 + 1000)


def test_an_embeddings_gradient_copies_an_expanded_output_gradient():
    def step(device):
        table = torch.zeros(1000, 64, device=device, requires_grad=True)
        F.embedding(torch.zeros(5000, dtype=torch.long, device=device), table).sum().backward()

    assert scratch("embedding_dense_backward", step)[0] == 4 * 5000 * 64


def test_a_sum_by_index_sorts_the_indices():
    def step(device):
        rows = torch.zeros(1000, 64, device=device, requires_grad=True)
        chosen = rows[torch.zeros(5000, dtype=torch.long, device=device)]
        chosen.backward(torch.zeros_like(chosen))

    # linear, sorted, original and counted indices; CUB sorts by the 10 bits of indices below 1000
    temporary = 2 * 256 * 8 + 2 * 1024 + 2 * 40_192 + 256 + 255
    assert scratch("index_put", step) == [*[8 * 5000] * 4, temporary]


def test_a_sum_by_index_into_few_rows_needs_one_pass():
    def step(device):
        index = torch.zeros(5000, dtype=torch.long, device=device)
        values = torch.zeros(5000, 64, device=device)
        torch.zeros(256, 64, device=device).index_put_((index,), values, accumulate=True)

    assert scratch("index_put", step) == [*[8 * 5000] * 4, 256 * 8 + 2 * 1024 + 256 + 255]


def test_assignment_by_index_needs_no_scratch():
    def step(device):
        x = torch.zeros(1000, 64, device=device)
        x[torch.zeros(50, dtype=torch.long, device=device)] = torch.zeros(50, 64, device=device)
        x[x > 0] = 1.0

    assert scratch("index_put", step) == []


def test_a_sum_by_two_separated_indices_copies_the_transposed_tensor():
    def step(device):
        i = torch.zeros(50, dtype=torch.long, device=device)
        chosen = torch.zeros(8, 16, 4, device=device, requires_grad=True)[i, :, i]
        chosen.backward(torch.zeros_like(chosen))

    assert scratch("index_put", step) == [4 * 8 * 16 * 4, *[8 * 50] * 4, 1]


def test_a_mask_becomes_an_int64_index_per_dimension():
    def step(device):
        x = torch.zeros(30, 20, 64, device=device)
        mask = torch.ones(30, 20, dtype=torch.bool, device=device)
        x[mask]

    assert scratch("index", step, assume="most") == [8 * 2 * 30 * 20]


def test_a_masks_gradient_sorts_the_masks_indices():
    def step(device):
        x = torch.zeros(100, 64, device=device, requires_grad=True)
        chosen = x[torch.ones(100, dtype=torch.bool, device=device)]
        chosen.backward(torch.zeros_like(chosen))

    assert scratch("index_put", step, assume="most") == [8 * 100, *[8 * 100] * 4, 1]


def test_masked_select_has_an_index_for_each_dimension():
    def step(device):
        x = torch.zeros(30, 20, 64, device=device)
        x.masked_select(torch.ones(30, 20, 1, dtype=torch.bool, device=device))

    assert scratch("masked_select", step, assume="most") == [8 * 3 * 30 * 20 * 64]


def test_masked_scatter_has_a_position_for_each_element():
    n = 30 * 64

    def step(device):
        x, source = torch.zeros(30, 64, device=device), torch.zeros(30, 64, device=device)
        x.masked_scatter(torch.ones(30, 1, dtype=torch.bool, device=device), source)

    temporary = 768 + 255  # 3 tiles of 896 elements and 32 more, of 16 bytes
    assert scratch("masked_scatter", step) == [8 * n, n, temporary]


# ------------------------------------------------------------------ efficient attention, cuDNN


def attention_scratch(kernel, *, D=64, H=4, T=100, dtype=torch.float16, **options) -> list[int]:
    def step(device):
        q, k, v = (
            torch.zeros(2, H, T, D, dtype=dtype, device=device, requires_grad=True)
            for _ in range(3)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y.backward(torch.zeros_like(y))

    return scratch("attention_backward", step, kernels=Kernels(attention=kernel), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_efficient_attention_has_float32_tiles_of_the_queries_gradient(dtype):
    tiles = 2 * 4 * 2  # of 64 × 64 elements, and 16 bytes for a lock
    got = attention_scratch("efficient", dtype=dtype)
    assert got[-2:] == [4 * 2 * 4 * 100, tiles * (4 * 64 * 64 + 16)]


def test_efficient_attentions_tiles_are_larger_for_wide_heads():
    half = attention_scratch("efficient", D=128)
    assert half[-1] == 2 * 4 * (4 * 128 * 128 + 16)
    single = attention_scratch("efficient", D=128, dtype=torch.float32)
    assert single[-1] == 2 * 4 * 2 * (4 * 128 * 64 + 16)


def test_efficient_attention_accumulates_the_gradients_of_very_wide_keys_and_values():
    queries = 4 * (4 * 128 * 64 + 16)  # 4 tiles of 64 columns
    keys = values = 2 * (4 * 64 * 256)  # 2 parts of 64 keys
    assert attention_scratch("efficient", D=256)[-1] == 2 * 4 * (queries + keys + values)


@pytest.mark.parametrize(
    ("capability", "D", "half", "expected"),
    [
        ((7, 5), 64, True, (64, 64, False)),
        ((7, 5), 128, True, (64, 64, True)),  # a T4 has 64 KiB of shared memory per block
        ((7, 0), 128, True, (128, 64, False)),  # V100
        ((8, 6), 96, True, (128, 64, False)),
        ((8, 6), 128, True, (64, 64, True)),
        ((8, 6), 128, False, (64, 64, False)),
        ((8, 0), 128, True, (128, 128, False)),
    ],
)
def test_efficient_attentions_tiles_depend_on_shared_memory(capability, D, half, expected):
    assert attention_backward._tile(half, D, capability) == expected


def test_efficient_attention_copies_an_expanded_output_gradient():
    def step(device):
        q, k, v = (torch.zeros(2, 4, 100, 64, device=device, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    got = scratch("attention_backward", step, kernels=Kernels(attention="efficient"))
    assert got[0] == 4 * 2 * 4 * 100 * 64


def test_efficient_attention_multiplies_float32_outputs_and_their_gradients_for_the_row_sums():
    """As a recorded step on an H200 does (32 MiB and twice 512 KiB, then the workspace)."""
    row_sums, product = 4 * 2 * 4 * 100, 4 * 2 * 4 * 100 * 64
    got = attention_scratch("efficient", dtype=torch.float32)
    assert got[:3] == [product, row_sums, row_sums]
    assert len(attention_scratch("efficient", dtype=torch.bfloat16)) == 2


def test_cudnns_attention_asks_for_a_float32_gradient_of_the_queries():
    """As all 18 calls recorded on an H200 (cuDNN 9.19), with head dimensions 64, 80 and 128."""
    got = attention_scratch("cudnn", device="cuda:hopper")
    assert got == [4 * 2 * 4 * 100 * (64 + 1) + 256]


# ------------------------------------------------------------------ grouped matmuls


def grouped_matmul(device):
    a = torch.zeros(64, 32, dtype=torch.bfloat16, device=device)
    b = torch.zeros(5, 32, 64, dtype=torch.bfloat16, device=device)
    torch._grouped_mm(a, b, offs=torch.zeros(5, dtype=torch.int32, device=device))


def test_a_grouped_matmul_has_arguments_for_each_group_and_tensor_maps():
    pointers, strides, shapes = 3 * 8 * 6, 3 * 8 * 5, 3 * 4 * 5  # pointers for an even number
    assert scratch("grouped_mm", grouped_matmul, device="cuda:hopper") == [
        pointers + strides + shapes,
        5 * 128 * HOPPER,
    ]


@pytest.mark.parametrize(("device", "workspaces"), [("cuda", [WORKSPACE]), ("cuda:hopper", [])])
def test_a_grouped_matmul_runs_group_by_group_where_it_has_no_kernel(device, workspaces):
    events = predicted(grouped_matmul, device=device).events
    assert [e.bytes for e in events if e.bytes == WORKSPACE] == workspaces


# ------------------------------------------------------------------ norms


def layer_norm(rows, width, norm=F.layer_norm):
    def step(device):
        x = torch.zeros(rows, width, device=device)
        weight = torch.ones(width, device=device, requires_grad=True)
        y = norm(x, (width,), weight)
        y.backward(torch.ones_like(y))

    return step


def test_a_norm_of_many_short_rows_sums_its_weights_gradient_in_two_passes():
    got = scratch("layer_norm_backward", layer_norm(2**17, 64))
    blocks = 2**17 // 32
    assert got[0] == blocks * 64 * 4
    assert tuple(got[1:]) == reduction_bytes((blocks, 64), (64, 1), [0], 4)


@pytest.mark.parametrize(("rows", "width"), [(2**16, 64), (2**17, 32 * 54)])
def test_a_norm_of_few_or_long_rows_has_no_scratch(rows, width):
    assert scratch("layer_norm_backward", layer_norm(rows, width)) == []


def test_rms_norm_has_the_partial_sums_of_its_weight():
    got = scratch("rms_norm_backward", layer_norm(2**17, 64, F.rms_norm))
    assert got[0] == 2**17 // 32 * 64 * 4


def group_norm(shape, groups, *, layout=torch.contiguous_format, affine=True, inputs=True):
    def step(device):
        x = torch.zeros(shape, device=device).contiguous(memory_format=layout)
        x.requires_grad_(inputs)
        weight = torch.ones(shape[1], device=device, requires_grad=True) if affine else None
        y = F.group_norm(x, groups, weight, weight)
        y.backward(torch.ones_like(y, memory_format=torch.contiguous_format))

    return step


def test_group_norm_keeps_sums_and_coefficients_per_channel_and_group():
    """With 4 channels a group these are 14 numbers a group, as measured on a B200 and an H200."""
    N, C, G = 8, 512, 128
    got = scratch("native_group_norm_backward", group_norm((N, C, 16, 16), G))
    assert got == 3 * [4 * N * C] + 2 * [4 * N * G]
    assert sum(got) == 14 * 4 * N * G
    assert scratch("native_group_norm.", group_norm((N, C, 16, 16), G)) == 2 * [4 * N * C]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"affine": False}, [16_384, 16_384, 1_024, 1_024]),
        ({"inputs": False}, [16_384, 16_384]),
        ({"shape": (8, 512, 1, 1)}, [16_384, 16_384, 1_024, 1_024]),
    ],
    ids=["no weight", "no input gradient", "one pixel"],
)
def test_group_norms_backward_needs_less_without_a_weight_an_input_or_pixels(options, expected):
    """Measured on an H200."""
    options = {"shape": (8, 512, 16, 16), "groups": 32, **options}
    assert scratch("native_group_norm_backward", group_norm(**options)) == expected


def test_group_norm_keeps_a_contiguous_copy_of_a_channels_last_input():
    """Measured on an H200; the CPU's kernel reads channels-last."""
    trace = predicted(group_norm((8, 512, 16, 16), 32, layout=torch.channels_last))
    clones = [e for e in trace.events if e.operator == "aten.clone.default"]
    assert [e.phase for e in clones] == ["forward", "forward", "backward", "backward"]
    assert {abs(e.bytes) for e in clones} == {4 * 8 * 512 * 256}  # the input, and its copy


def batch_norm(layout, *, dtype=torch.float32, expanded_grad=False):
    def step(device):
        x = torch.zeros(32, 64, 56, 56, device=device, dtype=dtype).contiguous(memory_format=layout)
        weight = torch.ones(64, device=device, requires_grad=True)
        y = F.batch_norm(x.requires_grad_(), None, None, weight, weight, training=True)
        y.backward(torch.ones((), device=device, dtype=dtype).expand_as(y) if expanded_grad else y)

    return step


def test_batch_norm_of_channels_last_images_exchanges_partial_statistics():
    """Measured on an H200. torch computes bfloat16 without cuDNN."""
    step = batch_norm(torch.channels_last, dtype=torch.bfloat16)
    assert scratch("native_batch_norm.", step) == [131_072, 8]
    assert scratch("native_batch_norm_backward", step) == [256, 256]
    assert scratch("batch_norm", batch_norm(torch.contiguous_format, dtype=torch.bfloat16)) == []


def test_cudnns_batch_norm_copies_an_expanded_gradient():
    """Measured on an H200."""
    step = batch_norm(torch.contiguous_format, expanded_grad=True)
    assert scratch("batch_norm", step) == [4 * 32 * 64 * 56 * 56]
    without = batch_norm(torch.contiguous_format, expanded_grad=True, dtype=torch.bfloat16)
    assert scratch("batch_norm", without) == []


# ------------------------------------------------------------------ copies


def expanded(*shape):
    return torch.ones((1,) * len(shape)).expand(shape)


def transposed(*shape):
    return torch.ones(*shape[:-2], shape[-1], shape[-2]).mT


def every_second(*shape):
    return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]


COPIES = {  # operator: (a call, the bytes of its scratch), each measured on an H200
    "mm of an expanded matrix": (
        lambda: torch.mm(expanded(1024, 512), torch.ones(512, 256)),
        [2**21],
    ),
    "mm of a matrix with gaps": (
        lambda: torch.mm(torch.ones(1024, 512), every_second(512, 256)),
        [2**19],
    ),
    "mm of transposed matrices": (
        lambda: torch.mm(transposed(1024, 512), transposed(512, 256)),
        [],
    ),
    "bmm of a batch with gaps": (
        lambda: torch.bmm(every_second(8, 256, 128), torch.ones(8, 128, 64)),
        [2**20],
    ),
    "bmm of one matrix, expanded": (
        lambda: torch.bmm(torch.ones(1, 256, 128).expand(8, 256, 128), torch.ones(8, 128, 64)),
        [],
    ),
    "mv of an expanded matrix": (lambda: torch.mv(expanded(1024, 512), torch.ones(512)), [2**21]),
    "roll": (lambda: transposed(1024, 1024).roll(3, 0), [2**22]),
    "kthvalue": (lambda: transposed(1024, 1024).kthvalue(7), [2**22]),
    "cummax": (lambda: transposed(4096, 1024).cummax(0), [2**24]),
    "nll_loss": (
        lambda: F.nll_loss(transposed(1024, 512), torch.zeros(1024, dtype=torch.int64)),
        [2**21],
    ),
    "mse_loss": (lambda: F.mse_loss(torch.ones(1024, 512), torch.ones(1024, 512)), [2**21]),
    "max_pool2d": (lambda: F.max_pool2d(every_second(8, 64, 32, 32), 2), [2**21]),
    "max_pool2d, channels last": (
        lambda: F.max_pool2d(torch.ones(8, 32, 32, 64).permute(0, 3, 1, 2), 2),
        [],
    ),
    "bilinear": (
        lambda: F.interpolate(every_second(8, 64, 32, 32), scale_factor=2, mode="bilinear"),
        [],
    ),
    "nearest": (lambda: F.interpolate(every_second(8, 64, 32, 32), scale_factor=2), [2**21]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", COPIES)
def test_a_kernel_copies_what_it_cannot_read_in_place(name):
    call, expected = COPIES[name]

    def step(device):
        with torch.device(device):
            call()

    workspaces = [e.bytes for e in predicted(step).events if e.category == "workspace"]
    assert [size for size in workspaces if size > 0 and size != WORKSPACE] == expected


def test_a_sums_gradient_is_copied_for_both_matmuls_of_a_linear_layer():
    def step(device):
        x = torch.ones(1024, 512, device=device, requires_grad=True)
        weight = torch.ones(256, 512, device=device, requires_grad=True)
        F.linear(x, weight).sum().backward()

    events = predicted(step).events
    sizes = [
        e.bytes for e in events if e.category == "workspace" and e.operator == "aten.mm.default"
    ]
    assert [size for size in sizes if size != WORKSPACE] == 2 * [4 * 1024 * 256, -4 * 1024 * 256]
