"""Copies that kernels make of inputs which they cannot read in place.

Most kernels read any strides. Others expect a contiguous tensor, or a matrix as BLAS stores it.
They copy the rest, such as the expanded gradient of a sum, and free the copy when they return. The
dispatcher does not see it. The table below has the operators that copy, with their rules:

    rule                  copies operands that are
    contiguous            not contiguous
    in_format_of          not contiguous in the first operand's memory format, as channels-last
    unless_channels_last  not contiguous, if the first operand is not channels-last
    convolution           not channels-last if the input or the weight is, else not contiguous
    heads_last            not contiguous as (batch, tokens, heads, head dimension)
    adjacent              without adjacent elements in the last dimension
    matrices              no matrices for BLAS: rows overlap, or no dimension is contiguous. Of
                          a batch, all matrices are copied
    matrix_slices         the same, but the matrices of a batch are copied one by one
    rows_or_columns       not contiguous, neither as they are nor transposed, as LAPACK's solvers
    columns               not contiguous when transposed, as LAPACK stores matrices
    batches               batches of matrices that do not follow each other without gaps
    transforms            for an FFT along some dimensions: the others are not one dimension, or
                          elements are repeated
    draws                 not contiguous, unless several are drawn with replacement
    embeddings            not contiguous, but with adjacent elements in a row

The CPU's rows are measured (tests/metering/test_copies.py). CUDA's were measured on an H200 with
torch 2.11; linear algebra and FFTs are not among them. Copies of another size are in no table: the
factorizations of `torch.linalg` always copy their input to a result or to scratch, `masked_select`
makes two int64 tensors of its input's shape, and an inverse FFT to real numbers along several
dimensions stores what comes before its last one.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from memlab.internals.torch_internals import suggest_memory_format

aten = torch.ops.aten

_SMALL_BATCH = 400  # multiplications of a matrix below which the CPU reads any strides

Sizes = list[int]  # bytes of copies that are alive together


# ------------------------------------------------------------------ rules


def contiguous(*tensors: torch.Tensor) -> Sizes:
    return [tensor.nbytes for tensor in tensors if not tensor.is_contiguous()]


def in_format_of(first: torch.Tensor, *others: torch.Tensor) -> Sizes:
    return _not_in(suggest_memory_format(first), others)


def unless_channels_last(x: torch.Tensor, *others: torch.Tensor) -> Sizes:
    return contiguous(*others) if suggest_memory_format(x) == torch.contiguous_format else []


def heads_last(*tensors: torch.Tensor) -> Sizes:
    return [tensor.nbytes for tensor in tensors if not _is_contiguous_as(tensor, (0, 2, 1, 3))]


def adjacent(*tensors: torch.Tensor) -> Sizes:
    return [tensor.nbytes for tensor in tensors if tensor.stride(-1) != 1]


def convolution(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> Sizes:
    formats = {suggest_memory_format(x), suggest_memory_format(weight)}
    wanted = (formats - {torch.contiguous_format} or formats).pop()
    tensors = (x, weight, *others)
    images = [tensor for tensor in tensors if tensor.dim() == x.dim()]
    biases = [tensor for tensor in tensors if tensor.dim() == 1]
    return _not_in(wanted, images) + contiguous(*biases)


def matrices(*tensors: torch.Tensor) -> Sizes:
    return [tensor.nbytes for tensor in tensors if not _are_blas_matrices(tensor)]


def matrix_slices(left: torch.Tensor, right: torch.Tensor) -> Sizes:
    multiplications = prod(left.shape[1:]) * right.shape[-1]
    copies = matrices(left, right) if multiplications >= _SMALL_BATCH else []
    return [size // len(left) for size in copies]


def rows_or_columns(*tensors: torch.Tensor) -> Sizes:
    return [t.nbytes for t in tensors if not (t.is_contiguous() or _is_column_major(t))]


def columns(matrix: torch.Tensor, *vectors: torch.Tensor) -> Sizes:
    return ([] if _is_column_major(matrix) else [matrix.nbytes]) + contiguous(*vectors)


def batches(tensor: torch.Tensor) -> Sizes:
    step = prod(tensor.shape[-2:])
    for size, stride in zip(tensor.shape[-3::-1], tensor.stride()[-3::-1], strict=True):
        if stride != step:
            return contiguous(tensor)
        step *= size
    return []


def transforms(tensor: torch.Tensor, dims: Sequence[int]) -> Sizes:
    others = [dim for dim in range(tensor.dim()) if dim not in dims and tensor.shape[dim] > 1]
    others.sort(key=tensor.stride, reverse=True)
    are_one = all(
        tensor.stride(outer) == tensor.stride(inner) * tensor.shape[inner]
        for outer, inner in pairwise(others)
    )
    repeats = any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return [] if are_one and not repeats else [tensor.nbytes]


def draws(tensor: torch.Tensor, count: int, with_replacement: bool = False) -> Sizes:
    return [] if with_replacement and count > 1 else contiguous(tensor)


def embeddings(weight: torch.Tensor) -> Sizes:
    return contiguous(weight) if weight.stride(-1) == 1 else []


def _is_column_major(matrix: torch.Tensor) -> bool:
    dims = range(matrix.dim())
    return _is_contiguous_as(matrix, (*dims[:-2], dims[-1], dims[-2]))


def _not_in(memory_format: torch.memory_format, tensors: Iterable[torch.Tensor]) -> Sizes:
    return [t.nbytes for t in tensors if not t.is_contiguous(memory_format=memory_format)]


def _are_blas_matrices(tensor: torch.Tensor) -> bool:
    """Return whether the last two dimensions are rows of adjacent elements that do not overlap, or
    columns of them."""
    (rows, columns), (row_step, column_step) = tensor.shape[-2:], tensor.stride()[-2:]
    return (
        not tensor.numel()
        or _are_rows(rows, columns, row_step, column_step)
        or _are_rows(columns, rows, column_step, row_step)
    )


def _are_rows(rows: int, columns: int, row_step: int, column_step: int) -> bool:
    if (columns == 1 or column_step == 1) and (rows == 1 or row_step == columns):
        return True
    return column_step == 1 and row_step >= columns


def _is_contiguous_as(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Return whether the tensor is contiguous with its dimensions in this order."""
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            return False
        expected *= tensor.shape[dim]
    return True


# ------------------------------------------------------------------ operators

_HAS_MKL = torch.backends.mkl.is_available()
_IS_2_14 = torch.__version__ >= "2.14"
_IS_2_15 = torch.__version__ >= "2.15"
_RESULTS = -1  # in place of an argument's position: the operator's results


class _Reads(NamedTuple):
    """How a kernel reads its operands: the rule, and the positions of the operands."""

    rule: Callable[..., Sizes]
    operands: tuple[int, ...]


def _rows(rule: Callable[..., Sizes], rows: dict[tuple[int, ...], str]) -> dict[Any, _Reads]:
    """Return table rows from {positions: the operators' names}."""
    return {
        getattr(getattr(aten, name), overload or "default"): _Reads(rule, operands)
        for operands, names in rows.items()
        for name, _, overload in (each.partition(".") for each in names.split())
    }


_BOTH = {
    **_rows(matrices, {(0, 1): "mm", (1, 2): "addmm", (0,): "mv", (1,): "addmv"}),
    **_rows(matrix_slices, {(1, 2): "addbmm"}),
    **_rows(
        contiguous,
        {
            (0,): "_softmax _log_softmax max min aminmax im2col col2im avg_pool3d "
            "avg_pool3d_backward _adaptive_avg_pool3d_backward upsample_nearest1d_backward "
            "upsample_linear1d_backward upsample_bicubic2d_backward reflection_pad1d "
            "reflection_pad1d_backward _embedding_bag_dense_backward",
            (0, 1): "_log_softmax_backward_data embedding_dense_backward multi_margin_loss "
            "_cdist_forward searchsorted.Tensor bucketize.Tensor",
            (0, 1, 2): "nll_loss_forward nll_loss2d_forward",
            (0, 1, 2, 4): "_cdist_backward",
            (0, 1, 5, 6): "native_layer_norm_backward",
            (0, 2, 3): "native_layer_norm",
            (1,): "embedding",
            (2, 3): "nll_loss2d_backward",
            (3,): "nll_loss_backward",
        },
    ),
    **_rows(
        in_format_of,
        {
            (0, 0): "avg_pool2d max_pool2d_with_indices max_pool3d_with_indices "
            "_adaptive_avg_pool2d upsample_trilinear3d_backward",
            (0, 0, _RESULTS): "upsample_nearest2d_backward _upsample_nearest_exact2d_backward "
            "upsample_nearest3d_backward upsample_bilinear2d_backward",
        },
    ),
}
if _IS_2_14:  # before, autograd's formula copies, and the dispatcher sees it
    _BOTH.update(_rows(contiguous, {(0, 1, 2, 3, 4): "native_group_norm_backward"}))
_CPU_ATTENTION: dict[tuple[int, ...], str] = {  # before, the kernels read any strides
    (0, 1, 2): "_scaled_dot_product_flash_attention_for_cpu",
    (1, 2, 3): "_scaled_dot_product_flash_attention_for_cpu_backward",
}
_TABLES = {
    "cpu": {
        **_BOTH,
        **_rows(matrix_slices, {(0, 1): "bmm", (1, 2): "baddbmm"}),
        **_rows(
            contiguous,
            {
                (0,): "_safe_softmax log_sigmoid_forward binary_cross_entropy_with_logits bincount "
                "_unique2 grid_sampler_2d_backward replication_pad1d replication_pad1d_backward",
                (1,): "linalg_householder_product lu_unpack",
                (0, 1): "_softmax_backward_data",
                (0, _RESULTS): "gelu_backward",
                (2,): "index_select index_add masked_scatter",
            },
        ),
        **_rows(
            in_format_of,
            {
                (0, 0): "adaptive_max_pool2d pixel_shuffle pixel_unshuffle channel_shuffle "
                "reflection_pad2d replication_pad2d",
                (0, 0, 1, _RESULTS): "max_unpool2d",
                (0, 0, 7, _RESULTS): "max_pool2d_with_indices_backward "
                "max_pool3d_with_indices_backward",
                (0, 0, _RESULTS): "_adaptive_avg_pool2d_backward avg_pool2d_backward "
                "reflection_pad2d_backward replication_pad2d_backward",
                (1, 0, 2): "adaptive_max_pool2d_backward",
            },
        ),
        # From 2.15 on, it computes the minimum of the repeats, of a second copy.
        **_rows(contiguous, {(0, 0) if _IS_2_15 else (0,): "repeat_interleave.Tensor"}),
        **_rows(convolution, {(0, 1, 2): "convolution", (1, 2, 0): "convolution_backward"}),
        **_rows(rows_or_columns, {(0,): "linalg_solve_triangular"}),
        **_rows(columns, {(0, 1): "linalg_lu_solve linalg_ldl_solve ormqr"}),
        **_rows(batches, {(0,): "tril triu linalg_cholesky_ex"}),
        **_rows(draws, {(0, 1, 2): "multinomial"}),
        **_rows(embeddings, {(0,): "_embedding_bag _embedding_bag_forward_only"}),
        **(_rows(adjacent, _CPU_ATTENTION) if _IS_2_14 else {}),
        # Builds without MKL have another library, which reads any strides.
        **(_rows(transforms, {(0, 1): "_fft_r2c _fft_c2c _fft_c2r"}) if _HAS_MKL else {}),
    },
    "cuda": {
        **_BOTH,
        **_rows(matrices, {(0, 1): "bmm", (1, 2): "baddbmm"}),
        **_rows(
            contiguous,
            {
                (0,): "kthvalue median.dim mode cummax cummin logcumsumexp roll rrelu_with_noise "
                "histc reflection_pad2d reflection_pad2d_backward",
                (0, _RESULTS): "adaptive_max_pool2d",
                (0, 1): "_fused_rms_norm_backward",
                (0, 2): "_fused_rms_norm",
                (0, 2, _RESULTS): "adaptive_max_pool2d_backward",
            },
        ),
        **_rows(
            in_format_of,
            {
                (0, 0): "upsample_nearest2d _upsample_nearest_exact2d",
                (1, 0, 1): "avg_pool2d_backward",
                (1, 0, 1, 7): "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
            },
        ),
        **_rows(unless_channels_last, {(1, 0): "_adaptive_avg_pool2d_backward"}),
        **_rows(heads_last, {(0, 4): "_scaled_dot_product_flash_attention_backward"}),
        **_rows(adjacent, {(0,): "_scaled_dot_product_cudnn_attention_backward"}),
        **_rows(convolution, {(0, 1): "convolution", (1, 2, 0): "convolution_backward"}),
    },
}


def copied_bytes(func: Any, args: Any, result: Any, device: Literal["cpu", "cuda"]) -> Sizes:
    """Return the sizes of the copies that an operator's kernel makes.

    The tensors are on the CPU, or fake. Real tensors on other devices give []: their allocators
    report the copies.
    """
    reads = _TABLES[device].get(func)
    if reads is None:
        return []
    results = result if isinstance(result, (tuple, list)) else (result,)
    operands = chain.from_iterable(
        results if position == _RESULTS else args[position : position + 1]
        for position in reads.operands
    )
    given = [operand for operand in operands if operand is not None]
    tensors = [operand for operand in given if isinstance(operand, torch.Tensor)]
    are_plain = all(t.is_cpu and t.layout is torch.strided and not t.is_nested for t in tensors)
    return reads.rule(*given) if are_plain else []
