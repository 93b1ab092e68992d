"""Records: what lies under one key of a store, and where in it each tensor begins.

    value            a tensor, or several in a list
    record           their numbers one after another, each tensor from a multiple of 64 bytes on

A plan alone: bytes and offsets. A tensor that is no contiguous run of numbers is stored as one.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.internals.torch_internals import FakeTensor

ALIGNMENT = 64  # bytes: a cache line, and what vectors of numbers are loaded from

Value = Tensor | Sequence[Tensor]


class Piece(NamedTuple):
    """A tensor of a record."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """The pieces of a value, and whether that is a list."""

    pieces: tuple[Piece, ...]
    is_list: bool
    device: torch.device  # from which it came

    @property
    def bytes(self) -> int:
        """Of the tensors; this is what moves."""
        return sum(piece.bytes for piece in self.pieces)

    @property
    def extent(self) -> int:
        """Bytes from the first tensor's begin to the last one's end."""
        return self.pieces[-1].offset + self.pieces[-1].bytes if self.pieces else 0

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """The tensors in the form in which they were given."""
        return list(tensors) if self.is_list else tensors[0]

    def empty(self, device: torch.device | str | None) -> list[Tensor]:
        """Tensors for it."""
        where = self.device if device is None else device
        return [torch.empty(piece.shape, dtype=piece.dtype, device=where) for piece in self.pieces]

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the device: it may be read on another machine."""
        pieces = [[list(p.shape), str(p.dtype).removeprefix("torch."), p.offset]
                  for p in self.pieces]  # fmt: skip
        return {"pieces": pieces, "is_list": self.is_list}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Record":
        """The opposite."""
        pieces = tuple(Piece(tuple(s), getattr(torch, d), o) for s, d, o in data["pieces"])
        return cls(pieces, data["is_list"], torch.device("cpu"))


def listed(value: Value) -> list[Tensor]:
    """Its tensors, without a graph and each a contiguous run of numbers."""
    tensors = [value] if isinstance(value, Tensor) else list(value)
    return [tensor.detach().contiguous() for tensor in tensors]


def record_of(value: Value, tensors: Sequence[Tensor]) -> Record:
    """Where each of a value's tensors lies."""
    pieces, at = [], 0
    for tensor in tensors:
        at = -(-at // ALIGNMENT) * ALIGNMENT
        pieces.append(Piece(tuple(tensor.shape), tensor.dtype, at))
        at += tensor.nbytes
    device = tensors[0].device if tensors else torch.device("cpu")
    return Record(tuple(pieces), not isinstance(value, Tensor), device)


def is_fake(tensors: Sequence[Tensor]) -> bool:
    """Whether there are no numbers, as in a dry run."""
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the host's memory, to be read and written for as long as
    it lives. (By way of `numpy()`, its storage could never be resized again.)"""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
