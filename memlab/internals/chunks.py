"""Chunks: process a long tensor a fixed number of elements at a time."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from memlab.internals.sizes import CHUNK_SIZE, CHUNK_SIZE_ON_ACCELERATOR
from memlab.internals.torch_internals import FakeTensor

_CPU = torch.device("cpu")  # a prediction's tensors on CPU device 0 count as CUDA tensors


def chunk_size_on(device: torch.device) -> int:
    """Return the chunk size for a device, in elements."""
    return CHUNK_SIZE if device == _CPU else CHUNK_SIZE_ON_ACCELERATOR


def chunk_starts(tensor: Tensor, size: int) -> Iterable[int]:
    """Return the index of the first element of each chunk of `size` elements, in order.

    A fake tensor gets only its first two chunks and its last. Two, because the temporaries of one
    chunk may live until the next chunk replaces them. The chunks between would allocate the same
    bytes again, and a model of seven billion weights has fifty thousand of them. During the second
    chunk, `repeat_count` returns how many chunks it represents.
    """
    every = range(0, tensor.numel(), size)
    return _representatives(every) if isinstance(tensor, FakeTensor) else every


_repeat_count = 1


def repeat_count() -> int:
    """Return how many chunks the current chunk represents, itself included."""
    return _repeat_count


def _representatives(every: range) -> Iterator[int]:
    global _repeat_count
    outer_count = _repeat_count  # more than 1 when chunks are nested
    for start in sorted({*every[:2], *every[-1:]}):
        # Without the second chunk, a dry run missed 97 KB of a moment when two chunks are alive
        # (test_a_dry_run_has_the_real_peak_when_temporaries_outlive_their_chunk); without the
        # count, 8-bit Adam seemed faster than AdamW.
        is_second = start in every[1:-1]
        _repeat_count = outer_count * (len(every) - 2 if is_second else 1)
        try:
            yield start
        finally:
            _repeat_count = outer_count
