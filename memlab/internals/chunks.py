"""Pieces: long tensors worked through a run of numbers at a time."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from memlab.internals.torch_internals import FakeTensor

# Numbers: on a CPU 1 MiB of float32, for its cache; on an accelerator, which begins each operator
# anew, 16 MiB. A prediction's tensors are on the CPU's device 0 and count as CUDA's.
PIECE, PIECE_ELSEWHERE = 2**18, 2**22
_CPU = torch.device("cpu")


def size_on(device: torch.device) -> int:
    """Numbers of a piece there."""
    return PIECE if device == _CPU else PIECE_ELSEWHERE


def starts(numbers: Tensor, size: int) -> Iterable[int]:
    """Where pieces of `size` numbers begin, in order.

    Of fake tensors the first two and the last alone: two, for what is made of one may be there
    until that of the next is. The others would take the same bytes again, and a model of seven
    billion weights has fifty thousand. While the second is worked at, `stands_for` says how many.
    """
    every = range(0, numbers.numel(), size)
    return _some(every) if isinstance(numbers, FakeTensor) else every


_stands_for = 1


def stands_for() -> int:
    """How many pieces the one that is worked at just now stands for, itself counted."""
    return _stands_for


def _some(every: range) -> Iterator[int]:
    global _stands_for
    outside = _stands_for  # pieces of a piece
    for start in sorted({*every[:2], *every[-1:]}):
        is_second = start in every[1:-1]
        _stands_for = outside * (len(every) - 2 if is_second else 1)
        try:
            yield start
        finally:
            _stands_for = outside
