"""Pieces: long tensors worked through a run of numbers at a time."""

from collections.abc import Iterable

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def starts(numbers: Tensor, size: int) -> Iterable[int]:
    """Where pieces of `size` numbers begin, in order.

    Of fake tensors the first two and the last alone: two, for what is made of one may be there
    until that of the next is. The others would take the same bytes again, and a model of seven
    billion weights has fifty thousand.
    """
    every = range(0, numbers.numel(), size)
    if isinstance(numbers, FakeTensor):
        return sorted({*every[:2], *every[-1:]})
    return every
