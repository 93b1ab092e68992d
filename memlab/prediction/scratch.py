"""Scratch memory of CUDA kernels that can be computed from shapes, from the sources of torch 2.13.

The dispatcher does not see scratch. This module counts the buffers alive together at an operator's
largest moment, after it has allocated its results. Sources are in torch's aten/src/ATen.

    operator                      source                         buffers
    sum, mean, norm, max, argmax  native/cuda/Reduce.cuh         partial results, counters
    softmax, log_softmax          native/cuda/SoftMax.cu         gradient × output, copies
    LayerNorm, RMSNorm, backward  native/cuda/                   partial sums, above 65,536 rows
                                  layer_norm_kernel.cu           if they are narrow
    BatchNorm                     native/cuda/                   partial statistics and sums, if
                                  Normalization.cuh              channels-last and not cuDNN's
    GroupNorm                     native/cuda/                   sums and coefficients per channel
                                  group_norm_kernel.cu           and group
    attention in backward         native/transformers/cuda/      row sums, float32 gradients
                                  attention_backward.cu
    sort, argsort                 native/cuda/SortStable.cu      indices, copies, CUB's storage
    topk                          native/cuda/TensorTopK.cu      digit counts per thread block
    cumsum, cumprod               native/cuda/ScanUtils.cuh      casts, copies, CUB's storage (1-D)
    randperm                      native/cuda/Randperm.cu        range, random keys, CUB's storage
    embedding in backward         native/cuda/Embedding.cu,      sorted indices, partial sums; only
                                  EmbeddingBackwardKernel.cu     copies below 3073 indices
    index_put, accumulated        native/cuda/Indexing.cu        indices, copies, CUB's storage
    masks: index, masked_select   native/cuda/Nonzero.cu         indices of the selected elements
    masked_scatter                native/cuda/IndexKernel.cpp    source positions (int64), copies
    grouped matmul                native/cuda/GroupMM.cu         arguments and tensor maps
                                                                 (bfloat16 on Hopper)

CUB is the CUDA library for sorts and scans (cub.py). Softmax's backward first multiplies gradient
and output into a temporary of their size; log_softmax's does not. Both copy non-contiguous inputs.

`scatter_add`, `index_add`, `nll_loss`, and `index_put` with neither masks nor accumulation have no
scratch for contiguous tensors. Not counted: tens of KiB of `nonzero`; `unique` and `multinomial`.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from memlab.configs.targets import Target
from memlab.internals.torch_internals import compute_elementwise_output_strides
from memlab.metering.copies import copied_bytes, in_format_of
from memlab.prediction import attention_backward, indexing, sorting
from memlab.prediction.reductions import REDUCTIONS, reduction_bytes, reduction_scratch

aten = torch.ops.aten
_WARP = 32


def scratch_bytes(
    func: Any, args: Any, kwargs: Any, result: Any, target: Target
) -> tuple[int, ...]:
    """Return the sizes of the scratch buffers that an operator's kernel allocates."""
    copies = tuple(copied_bytes(func, args, result, "cuda"))
    if func in REDUCTIONS:
        return copies + reduction_scratch(func, args, kwargs, target.chip)
    if func in _KERNELS:
        return copies + _KERNELS[func](_arguments(func, args, kwargs), result, target)
    return copies


def _arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return all arguments in the schema's order, with defaults."""
    schema = func._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    return [given.get(argument.name, argument.default_value) for argument in schema]


# ------------------------------------------------------------------ softmax


def _softmax_backward_scratch(grad: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
    """Return the product `grad * output`, which the kernel reads in place of the gradient, and
    copies of the product and the output if they are not contiguous."""
    strides = compute_elementwise_output_strides(grad, output)
    product = output.as_strided(output.shape, strides)
    copies = (x.nbytes for x in (product, output) if not x.is_contiguous())
    return output.nbytes, *copies


# ------------------------------------------------------------------ losses


def _loss_scratch(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> tuple[int, ...]:
    """Return the loss of each element, if they are reduced."""
    return (max(x.nbytes, y.nbytes),) if reduction else ()


# ------------------------------------------------------------------ norms

_MANY_ROWS, _ROWS_PER_BLOCK, _MAX_BLOCKS = 64 * 1024, 32, 32 * 1024


def _norm_backward_scratch(
    x: torch.Tensor, normalized_shape: Sequence[int], gradients: Sequence[Any], target: Target
) -> tuple[int, ...]:
    """Return the partial sums of the weight's and the bias's gradient, and of their reduction.

    `gradients` are the weight's and the bias's, None if they are not computed. Only many short rows
    are split among blocks.
    """
    N = prod(normalized_shape)
    M = x.numel() // N if N else 0
    if M <= _MANY_ROWS or target.multiprocessors // 2 <= N // _WARP:
        return ()
    blocks = min(_MAX_BLOCKS // -(-N // _WARP), -(-M // _ROWS_PER_BLOCK))
    sizes = [blocks * N * g.element_size() for g in gradients if isinstance(g, torch.Tensor)]
    reduction = reduction_bytes(
        *((blocks, N), (N, 1), [0], 4),
        multiprocessors=target.multiprocessors,
        threads_per_multiprocessor=target.chip.threads_per_multiprocessor,
    )
    return (*sizes, *reduction) if sizes else ()


def _group_norm_scratch(
    x: torch.Tensor, weight: Any, bias: Any, N: int, C: int, HxW: int
) -> tuple[int, ...]:
    """Return each channel's scale and shift."""
    is_affine = weight is not None or bias is not None
    return (_accumulator_bytes(x) * N * C,) * 2 if is_affine and HxW > 1 else ()


def _group_norm_backward_scratch(
    grad: torch.Tensor, weight: Any, N: int, C: int, HxW: int, groups: int, wanted: Sequence[bool]
) -> tuple[int, ...]:
    """Return sums over each channel and, for the input's gradient, its three coefficients: one per
    channel, two per group."""
    size = _accumulator_bytes(grad)
    channels, per_group = size * N * C, size * N * groups
    sums = channels, channels
    if not wanted[0]:
        return sums
    return (*sums, *(channels,) * (weight is not None and HxW > 1), per_group, per_group)


_BATCH_NORM_THREADS, _ROWS_PER_THREAD, _MAX_ROW_BLOCKS = 512, 16, 128


def _batch_norm_scratch(
    x: torch.Tensor, weight: Any, bias: Any, is_training: bool
) -> tuple[int, ...]:
    """Return the partial statistics that thread blocks exchange, four numbers for each channel, and
    a counter for each group of channels: torch's own kernel for channels-last inputs."""
    if not is_training or not _reads_channels_last(x) or _uses_cudnn(x, weight, bias):
        return ()
    channels = x.shape[1]
    rows = x.numel() // channels if channels else 0
    width = min(_power_of_2(channels), _WARP)
    height = min(_power_of_2(-(-rows // _ROWS_PER_THREAD)), _BATCH_NORM_THREADS // width)
    if width * height != _BATCH_NORM_THREADS:
        width = min(_power_of_2(channels), _BATCH_NORM_THREADS // height)
    blocks = min(-(-rows // (height * _ROWS_PER_THREAD)), _MAX_ROW_BLOCKS)
    if blocks < 8:
        return ()
    return 4 * 4 * channels * blocks, 4 * -(-channels // width)


def _batch_norm_backward_scratch(
    grad: torch.Tensor, x: torch.Tensor, weight: Any
) -> tuple[int, ...]:
    """Return cuDNN's copy of a gradient in another format, or torch's two sums for each channel of
    a channels-last input."""
    if _uses_cudnn(x, weight, weight):
        return tuple(in_format_of(x, grad))
    return (4 * x.shape[1],) * 2 if _reads_channels_last(x) else ()


def _reads_channels_last(x: torch.Tensor) -> bool:
    """Return whether the channels are adjacent, as in a matrix of tokens by channels."""
    return x.stride(1) == 1 and x.shape[1] > 1


def _uses_cudnn(x: torch.Tensor, weight: Any, bias: Any) -> bool:
    """Follow `_select_batch_norm_backend` (native/Normalization.cpp)."""
    if weight is None or bias is None or x.dim() < 3 or not torch.backends.cudnn.enabled:
        return False
    return x.dtype != torch.bfloat16 and weight.dtype in (torch.float32, torch.float64)


def _power_of_2(number: int) -> int:
    """Return the largest power of 2 up to `number`."""
    return 1 << max(number.bit_length() - 1, 0)


def _accumulator_bytes(x: torch.Tensor) -> int:
    return max(4, x.element_size())


# ------------------------------------------------------------------ grouped matmuls

_TENSOR_MAP_BYTES = 128


def _grouped_matmul_scratch(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None, target: Target
) -> tuple[int, ...]:
    """Return Hopper's buffers of a bfloat16 matmul: arguments per group, maps per multiprocessor.

    CUTLASS's workspace is at most 5 tensor maps: two inputs, one output and two for the epilogue.
    """
    if a.dtype != torch.bfloat16 or target.capability[0] not in (9, 10):
        return ()
    ragged = offsets if a.dim() == b.dim() == 2 else b if b.dim() == 3 else a
    if ragged is None:
        return ()
    groups = ragged.shape[0]
    pointers, strides, shapes = 3 * 8 * (groups + groups % 2), 3 * 8 * groups, 3 * 4 * groups
    return pointers + strides + shapes, 5 * _TENSOR_MAP_BYTES * target.multiprocessors


# ------------------------------------------------------------------ operators

_Kernel = Callable[[list[Any], Any, Target], tuple[int, ...]]


def _topk(a: list[Any], result: Any, target: Target) -> tuple[int, ...]:
    x, _, dim, _, is_sorted = a
    return sorting.topk_scratch(x, dim, is_sorted, result[0], target)


def _index_put(a: list[Any], result: Any, target: Target) -> tuple[int, ...]:
    return indexing.index_put_scratch(a[0], a[1], a[2], a[3], target)


_KERNELS: dict[Any, _Kernel] = {
    aten._scaled_dot_product_flash_attention_backward.default: (
        lambda a, result, target: attention_backward.flash_scratch(*a[1:3])
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: (
        lambda a, result, target: attention_backward.efficient_scratch(
            a[0], a[1], a[2], a[3], target.capability
        )
    ),
    aten._scaled_dot_product_cudnn_attention.default: (
        lambda a, result, target: attention_backward.CUDNN_FORWARD
    ),
    aten._scaled_dot_product_cudnn_attention_backward.default: (
        lambda a, result, target: attention_backward.cudnn_scratch(a[1])
    ),
    **dict.fromkeys(
        (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default),
        lambda a, result, target: _loss_scratch(*a[:3]),
    ),
    aten.binary_cross_entropy_with_logits.default: (lambda a, result, target: 2 * (a[0].nbytes,)),
    aten.logsumexp.default: lambda a, result, target: (a[0].nbytes, result.nbytes),
    aten.im2col.default: lambda a, result, target: (a[0].nbytes,),
    # One more tensor of the output's size is alive beside both gradients; log_softmax needs none
    # (test_softmax_scratch_is_alive_with_both_gradients).
    aten._softmax_backward_data.default: (
        lambda a, result, target: _softmax_backward_scratch(*a[:2])
    ),
    aten.native_batch_norm.default: (
        lambda a, result, target: _batch_norm_scratch(a[0], a[1], a[2], is_training=a[5])
    ),
    aten.native_batch_norm_backward.default: (
        lambda a, result, target: _batch_norm_backward_scratch(*a[:3])
    ),
    aten.native_group_norm.default: lambda a, result, target: _group_norm_scratch(*a[:6]),
    aten.native_group_norm_backward.default: (
        lambda a, result, target: _group_norm_backward_scratch(a[0], *a[4:10])
    ),
    aten.native_layer_norm_backward.default: (
        lambda a, result, target: _norm_backward_scratch(a[1], a[2], result[1:], target)
    ),
    aten._fused_rms_norm_backward.default: (
        lambda a, result, target: _norm_backward_scratch(a[1], a[2], result[1:], target)
    ),
    aten.sort.default: lambda a, result, target: sorting.sort_scratch(a[0], a[1], target),
    aten.sort.stable: lambda a, result, target: sorting.sort_scratch(a[0], a[2], target),
    aten.topk.default: _topk,
    **dict.fromkeys(
        (aten.cumsum.default, aten.cumprod.default, aten._logcumsumexp.default),
        lambda a, result, target: sorting.scan_scratch(a[0], a[1], result),
    ),
    aten.randperm.default: (
        lambda a, result, target: sorting.randperm_scratch(a[0], result, target)
    ),
    aten.embedding_dense_backward.default: (
        lambda a, result, target: indexing.embedding_backward_scratch(a[0], a[1], a[2], a[4])
    ),
    **dict.fromkeys(
        (
            *(aten.index_put.default, aten.index_put_.default),
            *(aten._unsafe_index_put.default, aten._index_put_impl_.default),
        ),
        _index_put,
    ),
    aten.index.Tensor: lambda a, result, target: indexing.index_scratch(*[*a, result]),
    aten.masked_select.default: (
        lambda a, result, target: indexing.masked_select_scratch(*[*a, result])
    ),
    **dict.fromkeys(
        (aten.masked_scatter.default, aten.masked_scatter_.default),
        lambda a, result, target: indexing.masked_scatter_scratch(result, *a[1:]),
    ),
    aten._grouped_mm.default: lambda a, result, target: _grouped_matmul_scratch(
        a[0], a[1], a[2], target
    ),
}
