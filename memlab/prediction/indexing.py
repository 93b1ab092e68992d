"""Scratch memory of CUDA's indexing: embeddings' gradients, sums by index, and masks.

Sums by index sort the indices first, so that one warp adds all rows of an index (Indexing.cu).
Masks become int64 indices first: 8 bytes per selected element and dimension of the mask.
"""

from collections.abc import Sequence
from math import prod

import torch

from memlab.configs.targets import Target
from memlab.prediction.cub import radix_sort_bytes, scan_bytes

Sizes = tuple[int, ...]  # bytes of buffers
Indices = Sequence[torch.Tensor | None]

_INDEX_BYTES = 8
_MOST_UNSORTED = 3072  # indices that an embedding's gradient sums without a sort
_ROWS_PER_PARTIAL_SUM = 10


# ------------------------------------------------------------------ embeddings


def embedding_backward_scratch(
    grad: torch.Tensor, indices: torch.Tensor, vocab_size: int, by_frequency: bool
) -> Sizes:
    """Return the buffers of an embedding's gradient while it adds up partial sums.

    A partial sum adds up to 10 rows with the same index, in float32. Their number depends on the
    indices, so torch allocates the most there can be: one per index and one per 10 rows.
    """
    count, size = indices.numel(), indices.element_size()
    if count <= _MOST_UNSORTED and not by_frequency:
        return ()
    segments = min(count, vocab_size)
    partial_sums = count // _ROWS_PER_PARTIAL_SUM + segments
    per_index = [count * size] * (4 if by_frequency else 3)  # sorted, original, segments; counts
    per_segment = [segments * size] * 2
    row_bytes = grad.shape[-1] * max(4, grad.element_size())
    # About 28 MB for 8,192 × 768, after the peak
    # (test_an_embeddings_gradient_adds_up_partial_sums_in_float32).
    counters = 8, 8
    sums = partial_sums * size, partial_sums * row_bytes
    return (*per_index, *per_segment, *counters, *sums)


# ------------------------------------------------------------------ sums by index


def index_put_scratch(
    x: torch.Tensor, indices: Indices, values: torch.Tensor, accumulate: bool, target: Target
) -> Sizes:
    """Return the buffers of `x[indices] += values` or, not accumulated, `x[indices] = values`."""
    fills = not accumulate and not values.dim()  # `masked_fill` writes a number
    if fills or not any(_are_indexed(x, indices)):
        return ()
    count = _count(x, indices, values)
    masks = _mask_scratch(indices, count)
    if not accumulate or not count:
        return masks
    slice_size = _slice_size(x, indices)
    bits = max(1, ((x.numel() - 1) // slice_size).bit_length())
    linear_sorted_original_range = [_INDEX_BYTES * count] * 4
    temporary = radix_sort_bytes(count, _INDEX_BYTES, _INDEX_BYTES, target, bits=bits)
    return (*masks, *_copies(x, indices, values), *linear_sorted_original_range, temporary)


def _copies(x: torch.Tensor, indices: Indices, values: torch.Tensor) -> Sizes:
    """Return the copies of non-contiguous tensors, once expanded and transposed."""
    expanded = _count(x, indices, values) * prod(_kept(x, indices)) * x.element_size()
    return (
        *[x.nbytes] * (not x.is_contiguous()),
        *[x.nbytes] * (not _is_adjacent(x, indices)),
        *[expanded] * (not values.is_contiguous() or values.nbytes != expanded),
        *[_INDEX_BYTES * i.numel() for i in indices if i is not None and i.dtype == torch.int32],
    )


# ------------------------------------------------------------------ masks


def index_scratch(x: torch.Tensor, indices: Indices, result: torch.Tensor) -> Sizes:
    """Return the buffers of `x[indices]`: the indices of each mask."""
    return _mask_scratch(indices, _count(x, indices, result))


def masked_select_scratch(x: torch.Tensor, mask: torch.Tensor, result: torch.Tensor) -> Sizes:
    """Return the buffers of `x.masked_select(mask)`: indices for each dimension of both."""
    return (_INDEX_BYTES * max(x.dim(), mask.dim()) * result.numel(),)


def masked_scatter_scratch(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Sizes:
    """Return the buffers of `x.masked_scatter(mask, source)`: for each element, its source."""
    expanded = mask.expand(x.shape)
    copies = [tensor.nbytes for tensor in (source,) if not tensor.is_contiguous()]
    copies += [x.numel()] if not expanded.is_contiguous() else []
    return (_INDEX_BYTES * x.numel(), *copies, scan_bytes(x.numel(), _INDEX_BYTES))


def _mask_scratch(indices: Indices, count: int) -> Sizes:
    return tuple(_INDEX_BYTES * count * i.dim() for i in indices if i is not None and _is_mask(i))


# ------------------------------------------------------------------ shapes


def _count(x: torch.Tensor, indices: Indices, values: torch.Tensor) -> int:
    """Return the number of indices. A mask's are counted by the values read or written."""
    tensors = [index for index in indices if index is not None]
    if any(map(_is_mask, tensors)):
        return values.numel() // max(1, prod(_kept(x, indices)))
    return prod(torch.broadcast_shapes(*(index.shape for index in tensors)))


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _are_indexed(x: torch.Tensor, indices: Indices) -> list[bool]:
    """Return whether each dimension is indexed; a mask indexes as many as it has."""
    indexed = []
    for index in indices:
        width = index.dim() if index is not None and _is_mask(index) else 1
        indexed += [index is not None] * width
    return indexed + [False] * (x.dim() - len(indexed))


def _kept(x: torch.Tensor, indices: Indices) -> list[int]:
    """Return the sizes of the dimensions without an index."""
    are_indexed = _are_indexed(x, indices)
    return [size for size, indexed in zip(x.shape, are_indexed, strict=True) if not indexed]


def _is_adjacent(x: torch.Tensor, indices: Indices) -> bool:
    """Return whether the indexed dimensions are next to each other; torch transposes others."""
    are_indexed = _are_indexed(x, indices)
    first, last = are_indexed.index(True), len(are_indexed) - are_indexed[::-1].index(True)
    return all(are_indexed[first:last])


def _slice_size(x: torch.Tensor, indices: Indices) -> int:
    """Return the number of elements per index: the dimensions after the indexed ones."""
    first = _are_indexed(x, indices).index(True) if _is_adjacent(x, indices) else 0
    return max(1, prod(_kept(x, indices)[first:]))
