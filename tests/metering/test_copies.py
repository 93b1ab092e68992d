"""The rules for copies inside kernels, held against the CPU's allocator for every input layout."""

from collections.abc import Callable, Iterator
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from kinds import KINDS
from torch import nn

import memlab
from memlab.internals.torch_internals import OpOverload
from memlab.metering.copies import _TABLES, copied_bytes
from memlab.metering.profiler_recording import compare, record

aten = torch.ops.aten
X, Y = (3, 4, 6, 10), (3, 4, 3, 5)  # images: batch, channels, height, width
X3, Y3 = (3, 4, 4, 6, 10), (3, 4, 2, 3, 5)  # with depth
POOL, POOL3 = ([2, 2], [2, 2], [0, 0]), ([2, 2, 2], [2, 2, 2], [0, 0, 0])


class Below:
    """An int64 tensor of this shape with elements below `limit`, in a case."""

    def __init__(self, limit: int, *shape: int) -> None:
        self.limit, self.shape = limit, shape


class Complex(tuple):
    """The shape of a complex64 tensor, in a case."""


PIVOTS = torch.arange(1, 17, dtype=torch.int32)

# Arguments by operator: a tuple is a float32 tensor's shape.
CASES: dict[str, tuple[Any, ...]] = {
    "mm": ((8, 16), (16, 5)),
    "addmm": ((8, 5), (8, 16), (16, 5)),
    "mv": ((8, 16), (16,)),
    "addmv": ((8,), (8, 16), (16,)),
    "dot": ((16,), (16,)),
    "bmm": ((3, 8, 16), (3, 16, 11)),
    "baddbmm": ((3, 8, 11), (3, 8, 16), (3, 16, 11)),
    "addbmm": ((8, 11), (3, 8, 16), (3, 16, 11)),
    "_softmax": (X, 2, False),
    "_log_softmax": (X, 2, False),
    "_softmax_backward_data": (X, X, 2, torch.float32),
    "_log_softmax_backward_data": (X, X, 2, torch.float32),
    "_safe_softmax": ((3, 6, 10), 2),
    "native_layer_norm": ((6, 10), [10], (10,), (10,), 1e-5),
    "native_layer_norm_backward": (
        *((6, 10), (6, 10), [10], (6, 1), (6, 1), (10,), (10,), [True] * 3),
    ),
    "native_group_norm_backward": (X, X, (3, 2), (3, 2), (4,), 3, 4, 60, 2, [True] * 3),
    "_adaptive_avg_pool2d": (X, [3, 5]),
    "_adaptive_avg_pool2d_backward": (Y, X),
    "_adaptive_avg_pool3d": (X3, [2, 3, 5]),
    "_adaptive_avg_pool3d_backward": (Y3, X3),
    "adaptive_max_pool2d": (X, [3, 5]),
    "adaptive_max_pool2d_backward": (Y, X, Below(9, *Y)),
    "avg_pool2d": (X, [2, 2]),
    "avg_pool2d_backward": (Y, X, *POOL, False, True, None),
    "avg_pool3d": (X3, [2, 2, 2]),
    "avg_pool3d_backward": (Y3, X3, *POOL3, False, True, None),
    "max_pool2d_with_indices": (X, [2, 2]),
    "max_pool2d_with_indices_backward": (Y, X, *POOL, [1, 1], False, Below(9, *Y)),
    "max_pool3d_with_indices": (X3, [2, 2, 2]),
    "max_pool3d_with_indices_backward": (Y3, X3, *POOL3, [1, 1, 1], False, Below(9, *Y3)),
    "max_unpool2d": (Y, Below(60, *Y), [6, 10]),
    "upsample_nearest1d_backward": ((3, 4, 12), [12], [3, 4, 6]),
    "upsample_linear1d_backward": ((3, 4, 12), [12], [3, 4, 6], False),
    "upsample_nearest2d_backward": ((3, 4, 12, 20), [12, 20], [*X]),
    "_upsample_nearest_exact2d_backward": ((3, 4, 12, 20), [12, 20], [*X]),
    "upsample_bilinear2d_backward": ((3, 4, 12, 20), [12, 20], [*X], False),
    "upsample_bicubic2d_backward": ((3, 4, 12, 20), [12, 20], [*X], False),
    "upsample_nearest3d_backward": ((3, 4, 8, 12, 20), [8, 12, 20], [*X3]),
    "upsample_trilinear3d_backward": ((3, 4, 8, 12, 20), [8, 12, 20], [*X3], False),
    "embedding": ((20, 10), Below(20, 3, 7)),
    "embedding_dense_backward": ((3, 7, 10), Below(20, 3, 7), 20, -1, False),
    "_embedding_bag_dense_backward": (
        *((2, 10), Below(20, 7), Below(1, 7), Below(9, 2), Below(2, 2)),
        *(20, False, 0, None),
    ),
    "pixel_shuffle": (X, 2),
    "pixel_unshuffle": (X, 2),
    "channel_shuffle": (X, 2),
    "reflection_pad1d": ((3, 4, 10), [2, 2]),
    "reflection_pad1d_backward": ((3, 4, 14), (3, 4, 10), [2, 2]),
    "reflection_pad2d": (X, [2, 2, 1, 1]),
    "reflection_pad2d_backward": ((3, 4, 8, 14), X, [2, 2, 1, 1]),
    "replication_pad1d": ((3, 4, 10), [2, 2]),
    "replication_pad1d_backward": ((3, 4, 14), (3, 4, 10), [2, 2]),
    "replication_pad2d": (X, [2, 2, 1, 1]),
    "replication_pad2d_backward": ((3, 4, 8, 14), X, [2, 2, 1, 1]),
    "grid_sampler_2d_backward": ((3, 4, 5, 7), X, (3, 5, 7, 2), 0, 0, False, [True, True]),
    "im2col": (X, [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": ((3, 16, 45), [6, 10], [2, 2], [1, 1], [0, 0], [1, 1]),
    "gelu_backward": ((6, 10), (6, 10)),
    "log_sigmoid_forward": ((6, 10),),
    "nll_loss_forward": ((6, 10), Below(10, 6), (10,), 1, -100),
    "nll_loss_backward": ((), (6, 10), Below(10, 6), (10,), 1, -100, ()),
    "nll_loss2d_forward": (X, Below(4, 3, 6, 10), (4,), 1, -100),
    "nll_loss2d_backward": ((), X, Below(4, 3, 6, 10), (4,), 1, -100, ()),
    "binary_cross_entropy_with_logits": ((6, 10), (6, 10)),
    "multi_margin_loss": ((6, 10), Below(10, 6)),
    "_cdist_forward": ((6, 10), (7, 10), 2.0, None),
    "_cdist_backward": ((6, 7), (6, 10), (7, 10), 2.0, (6, 7)),
    "searchsorted.Tensor": ((6, 10), (6, 3)),
    "bucketize.Tensor": ((6, 10), (5,)),
    "max": ((6, 10),),
    "min": ((6, 10),),
    "aminmax": ((6, 10),),
    "bincount": (Below(5, 7),),
    "multinomial": ((6, 10), 2),
    "multinomial, with replacement": ((6, 10), 2, True),
    "repeat_interleave.Tensor": (Below(4, 20),),
    "tril": ((3, 4, 16, 16),),
    "triu": ((3, 16, 16),),
    "tril, a matrix": ((16, 16),),
    "linalg_cholesky_ex": ((3, 16, 16),),
    "linalg_solve_triangular": ((3, 16, 16), (3, 16, 5)),
    "linalg_lu_solve": ((16, 16), PIVOTS, (16, 5)),
    "linalg_lu_solve, batched": ((3, 16, 16), PIVOTS.expand(3, 16).contiguous(), (3, 16, 5)),
    "linalg_ldl_solve": ((16, 16), PIVOTS, (16, 5)),
    "ormqr": ((16, 16), (16,), (16, 16)),
    "linalg_householder_product": ((16, 16), (16,)),
    "lu_unpack": ((16, 16), PIVOTS),
    "_fft_r2c": ((3, 4, 20), [2], 0, True),
    "_fft_r2c, first": ((12, 20), [0], 0, True),
    "_fft_r2c, middle": ((3, 4, 20), [1], 0, True),
    "_fft_r2c, two": ((3, 4, 20), [0, 2], 0, True),
    "_fft_c2c": (Complex((3, 4, 20)), [2], 0, True),
    "_fft_c2c, middle": (Complex((3, 4, 20)), [1], 0, True),
    "_fft_c2c, images": (Complex(X), [2, 3], 0, True),
    "_fft_c2r": (Complex((3, 4, 11)), [2], 0, 20),
    "_fft_c2r, middle": (Complex((3, 4, 11)), [1], 0, 6),
    "_embedding_bag": ((50, 10), Below(50, 24), torch.tensor([0, 7])),
    "_embedding_bag_forward_only": ((50, 10), Below(50, 24), torch.tensor([0, 7])),
    "_unique2": ((6, 10),),
    "index_select": ((6, 10), 0, Below(6, 3)),
    "index_add": ((6, 10), 0, Below(6, 3), (3, 10)),
    "masked_scatter": ((6, 10), Below(1, 6, 10), (60,)),
    "convolution": (X, (5, 4, 3, 3), (5,), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "convolution_backward": (
        *((3, 5, 6, 10), X, (5, 4, 3, 3), [5], [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        [True] * 3,
    ),
    # Operators that read any strides.
    "gelu": ((6, 10),),
    "silu_backward": ((6, 10), (6, 10)),
    "threshold_backward": ((6, 10), (6, 10), 0),
    "glu_backward": ((6, 5), (6, 10), 1),
    "mse_loss_backward": ((), (6, 10), (6, 10), 1),
    "cumsum": ((6, 10), 0),
    "cumprod": ((6, 10), 0),
    "cummax": ((6, 10), 0),
    "_logcumsumexp": ((6, 10), 0),
    "sort": ((6, 10), 0),
    "topk": ((6, 10), 2, 0),
    "kthvalue": ((6, 10), 2, 0),
    "sum.dim_IntList": ((6, 10), [0]),
    "mean.dim": ((6, 10), [0]),
    "amax": ((6, 10), [0]),
    "gather": ((6, 10), 0, Below(6, 3, 10)),
    "scatter_add": ((6, 10), 0, Below(6, 3, 10), (3, 10)),
    "roll": ((6, 10), [1], [0]),
    "_ctc_loss": ((12, 3, 6), Below(5, 3, 4), [12] * 3, [4] * 3),
    "_scaled_dot_product_flash_attention_for_cpu": ((2, 3, 8, 16),) * 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        *((2, 3, 8, 16),) * 5,
        *((2, 3, 8), 0.0, False),
    ),
    "add.Tensor": ((6, 10), (6, 10)),
    "linalg_lu_factor_ex": ((3, 16, 16),),
    "linalg_qr": ((3, 16, 16),),
    "_linalg_solve_ex": ((3, 16, 16), (3, 16, 5)),
    "linalg_inv_ex": ((3, 16, 16),),
    "cholesky_solve": ((3, 16, 5), (3, 16, 16)),
    "_linalg_svd": ((3, 16, 20),),
    "_linalg_eigh": ((3, 16, 16),),
}
# The kernel's other scratch also depends on the layout.
KERNEL_CHANGES = {
    *(("convolution", "channels last"), ("convolution_backward", "channels last")),
    *product(
        ("_embedding_bag", "_embedding_bag_forward_only"),
        ("one element", "every second column", "one column", "transposed", "permuted"),
    ),
}


def operator(name: str) -> OpOverload:
    packet, _, overload = name.partition(",")[0].partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def made(argument: Any) -> Any:
    if isinstance(argument, Below):
        return torch.randint(0, argument.limit, argument.shape)
    if isinstance(argument, Complex):
        return torch.rand(argument, dtype=torch.complex64)
    is_shape = isinstance(argument, tuple)
    return torch.rand(argument) if is_shape else argument


def layouts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the same shape and dtype in other layouts, with their names."""
    if not tensor.dim():
        return
    first = tensor.flatten()[:1].view([1] * tensor.dim())
    yield "one element", first.expand(tensor.shape)
    wide = torch.cat((tensor, tensor), -1)
    yield "every second column", wide.copy_(tensor.repeat_interleave(2, -1))[..., ::2]
    if tensor.dim() > 1:
        yield "columns of a wider one", torch.cat((tensor, tensor), -1)[..., : tensor.shape[-1]]
        yield "one row", tensor[:1].expand(tensor.shape)
        yield "one column", tensor[..., :1].expand(tensor.shape)
        yield "transposed", tensor.mT.contiguous().mT
        yield "permuted", tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    if tensor.dim() in (4, 5):
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        yield "channels last", tensor.contiguous(memory_format=last)


def scratch(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Return the peak and the sum of the scratch that `run` allocates, and its result."""
    results: list[Any] = []
    recording = record(lambda: results.append(run()))
    sizes = [event.bytes for event in recording.events if event.kind == "scratch"]
    allocated = sum(size for size in sizes if size > 0)
    return max(accumulate(sizes), default=0), allocated, results[0]


@pytest.mark.filterwarnings("ignore:torch.searchsorted..:UserWarning")
@pytest.mark.few(14)
@pytest.mark.parametrize("name", CASES)
def test_a_kernels_copies_are_its_scratch_beyond_that_for_dense_inputs(name):
    """By peak, or by sum if other scratch has its peak at another time."""
    if name.startswith("_fft") and not torch.backends.mkl.is_available():
        pytest.skip("this build of torch computes FFTs with another library")
    if name == "multinomial" and torch.__version__ < "2.13":
        pytest.skip("needs torch ≥ 2.13: before, it copies twice")
    torch.manual_seed(0)
    func = operator(name)
    dense = tuple(made(argument) for argument in CASES[name])
    if name == "masked_scatter":
        dense = (dense[0], dense[1].bool(), dense[2])
    options = {"upper": True} if name == "linalg_solve_triangular" else {}
    dense_peak, dense_sum, dense_result = scratch(lambda: func(*dense, **options))
    dense_copies = sum(copied_bytes(func, dense, dense_result, "cpu"))
    for position, tensor in enumerate(dense):
        if not isinstance(tensor, torch.Tensor):
            continue
        for layout, changed in layouts(tensor):
            if (name, layout) in KERNEL_CHANGES:
                continue
            args = (*dense[:position], changed, *dense[position + 1 :])
            try:
                peak, total, result = scratch(lambda args=args: func(*args, **options))
            except RuntimeError:
                continue  # the kernel refuses this layout
            expected = sum(copied_bytes(func, args, result, "cpu")) - dense_copies
            assert expected in (peak - dense_peak, total - dense_sum), (position, layout)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="FFTs of MKL")
@pytest.mark.parametrize("frames", [(3, 100, 20, 5), (3, 100, 20, 20), (1, 100, 20, 5)])
def test_overlapping_frames_of_several_signals_are_copied_for_an_fft(frames):
    signals, length, size, hop = frames
    x = torch.rand(signals, length)
    func, args = aten._fft_r2c.default, (x.unfold(1, size, hop), [2], 0, True)
    peak, _, result = scratch(lambda: func(*args))
    assert peak == sum(copied_bytes(func, args, result, "cpu"))
    assert (peak > 0) == (signals > 1 and hop < size)


def test_every_row_of_the_cpus_table_has_a_case():
    assert set(_TABLES["cpu"]) <= set(map(operator, CASES))


def test_the_meter_counts_the_copy_of_an_expanded_gradient():
    """The gradient of a sum is one expanded element, which BLAS cannot read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 256))
    tokens = torch.randint(0, 100, (16, 128))

    def step() -> None:
        model.zero_grad()
        model(tokens).sum().backward()

    step()
    trace = memlab.measure(step, model=model)
    comparison = compare(trace, record(step, warm_up=step))
    assert comparison.exact, comparison
    assert comparison.real_peak_difference == 0
    assert trace.at_peak["workspace"] == 4 * 16 * 128 * 256


def test_a_dry_run_counts_the_same_copies():
    traces = []
    for runs_dry in (False, True):
        with memlab.dry_run() if runs_dry else torch.enable_grad():
            step, model, optimizer = KINDS["gpt_sdpa"]()
            step()
            trace = memlab.measure(step, model=model, optimizer=optimizer)
        traces.append([e.bytes for e in trace.events if e.category == "workspace"])
    assert traces[0] == traces[1]
    assert traces[0]
