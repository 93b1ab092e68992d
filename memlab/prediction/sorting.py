"""Scratch memory of CUDA's sorts, scans along a dimension, and random permutations.

torch sorts rows of up to 4096 elements in place, with one thread block per row. Longer rows go
through CUB, which needs copies of the keys and of the int64 indices (SortStable.cu).
"""

from math import ceil, log, log2

import torch

from memlab.configs.targets import Target
from memlab.prediction.cub import (
    radix_sort_bytes,
    scan_by_key_bytes,
    scan_bytes,
    segmented_sort_bytes,
)

Sizes = tuple[int, ...]  # bytes of buffers

_INDEX_BYTES = 8
_LONGEST_SMALL_ROW = 4096
# `topk` splits rows of at least this many elements: (at most this many rows, elements)
_SPLIT_FROM = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
_SPLIT_MANY_ROWS_FROM = 400
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 6  # limited by 40 registers per thread
_MIN_ITEMS, _MAX_ITEMS = 4, 64  # per thread
_DIGITS = 256


# ------------------------------------------------------------------ sort


def sort_scratch(x: torch.Tensor, dim: int, target: Target) -> Sizes:
    """Return the buffers of a sort along `dim`."""
    if not x.dim() or not x.numel():
        return ()
    length, count, size = x.shape[dim], x.numel(), x.element_size()
    if length <= _LONGEST_SMALL_ROW:
        return (_INDEX_BYTES * length,)  # the row's indices
    # Beside these, CUB copies keys and values, because torch passes its inputs as const: a radix
    # sort of n int64 pairs needs 16 more bytes per pair
    # (test_a_radix_sort_copies_keys_and_values_unless_one_digit_is_enough).
    copies = () if x.stride(dim) == 1 else (count * size, count * size, count * _INDEX_BYTES)
    return (*copies, *_long_sort(count // length, length, size, target))


def _long_sort(rows: int, length: int, size: int, target: Target) -> Sizes:
    count = rows * length
    if rows == 1 or length >= 1_000_000:  # row by row
        return _INDEX_BYTES * length, radix_sort_bytes(length, size, _INDEX_BYTES, target)
    if rows < 128:  # all rows at once, with (row, index) pairs, which are then sorted by row
        pairs = _INDEX_BYTES * count
        return pairs, pairs, count * size, radix_sort_bytes(count, size, _INDEX_BYTES, target)
    return _INDEX_BYTES * count, segmented_sort_bytes(count, size, _INDEX_BYTES)


# ------------------------------------------------------------------ topk


def topk_scratch(
    x: torch.Tensor, dim: int, is_sorted: bool, values: torch.Tensor, target: Target
) -> Sizes:
    """Return the buffers of `topk`: of the selection, or of the results' sort if that has more."""
    if not x.dim() or not values.numel():
        return ()
    copy = () if x.is_contiguous() else (x.nbytes,)
    selection = (*copy, *_selection(x, dim, target.multiprocessors))
    if not is_sorted or values.shape[dim] <= _LONGEST_SMALL_ROW:
        return selection
    sorted_results = values.nbytes, values.numel() * _INDEX_BYTES
    return max(selection, (*sorted_results, *sort_scratch(values, dim, target)), key=sum)


def _selection(x: torch.Tensor, dim: int, multiprocessors: int) -> Sizes:
    """Return the buffers of a selection that splits each row among thread blocks."""
    length, size = x.shape[dim], x.element_size()
    rows = x.numel() // length
    if length < next((least for most, least in _SPLIT_FROM if rows <= most), _SPLIT_MANY_ROWS_FROM):
        return ()
    threads = multiprocessors * _BLOCKS_PER_MULTIPROCESSOR * _THREADS
    items = min(max(_ceil(x.numel(), threads), _MIN_ITEMS), _MAX_ITEMS)
    blocks = rows * _ceil(length, items * _THREADS)
    kth_values, semaphores, ranks, digits = size * rows, 4 * rows, 8 * rows, 2 * rows * max(size, 4)
    per_block = 2 * _DIGITS * blocks, 4 * blocks, 4 * blocks
    return kth_values, semaphores, ranks, digits, *per_block, scan_by_key_bytes(blocks)


# ------------------------------------------------------------------ scans, permutations


def scan_scratch(x: torch.Tensor, dim: int, result: torch.Tensor) -> Sizes:
    """Return the buffers of a cumulative sum or product: a cast, a contiguous copy, CUB's scan."""
    if not x.dim() or not x.numel():
        return ()
    copies = (x.dtype != result.dtype) + (not x.is_contiguous())
    is_one_row = x.numel() == x.shape[dim]
    temporary = (scan_bytes(x.numel(), result.element_size()),) if is_one_row else ()
    return (*[result.nbytes] * copies, *temporary)


def randperm_scratch(count: int, result: torch.Tensor, target: Target) -> Sizes:
    """Return the buffers of a random permutation: the range, and random keys to sort it by."""
    if not count:
        return ()
    # enough bits that equal keys are rare
    bits = min(64, ceil(log2(count - (6 * count**2 + 1) / (12 * log(0.9)))))
    key_bytes = 4 if bits <= 32 else 8
    temporary = radix_sort_bytes(count, key_bytes, result.element_size(), target, bits=bits)
    return count * result.element_size(), key_bytes * count, key_bytes * count, temporary


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
