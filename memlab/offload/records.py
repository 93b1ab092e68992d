"""Records: the layout of a value in a store.

    value            a tensor, or a list of tensors
    record           their bytes one after another; each tensor starts at a multiple of 64 bytes

A record contains only offsets, shapes and dtypes. A non-contiguous tensor is stored contiguously.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.internals.torch_internals import FakeTensor

ALIGNMENT = 64  # bytes: a cache line, and the widest vector load

Value = Tensor | Sequence[Tensor]


def is_count(value: Any) -> bool:
    """Return whether a value read from a file is an integer that can count something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


class TensorSpec(NamedTuple):
    """Shape, dtype and byte offset of a tensor in a record."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """The tensors of a value, and whether it is a list."""

    specs: tuple[TensorSpec, ...]
    is_list: bool
    device: torch.device  # of the original tensors

    @property
    def bytes(self) -> int:
        """Bytes of the tensors, without padding; this is the traffic."""
        return sum(spec.bytes for spec in self.specs)

    @property
    def extent(self) -> int:
        """Bytes from the start of the first tensor to the end of the last one."""
        return self.specs[-1].offset + self.specs[-1].bytes if self.specs else 0

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tensors in the form of the original value."""
        return list(tensors) if self.is_list else tensors[0]

    def empty(self, device: torch.device | str | None) -> list[Tensor]:
        """Allocate tensors for the record."""
        where = self.device if device is None else device
        return [torch.empty(spec.shape, dtype=spec.dtype, device=where) for spec in self.specs]

    def to_json(self) -> dict[str, Any]:
        """Return plain data without the device, because it may be read on another machine."""
        specs = [[list(p.shape), str(p.dtype).removeprefix("torch."), p.offset]
                  for p in self.specs]  # fmt: skip
        return {"pieces": specs, "is_list": self.is_list}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Record":
        """Return the record of this plain data. Raise ValueError if it is none."""
        specs, end = [], 0
        for shape, dtype, offset in data["pieces"]:
            spec = TensorSpec(tuple(shape), getattr(torch, dtype), offset)
            sizes = (*spec.shape, spec.offset)
            if not isinstance(spec.dtype, torch.dtype) or not all(map(is_count, sizes)):
                raise ValueError(f"a tensor of {dtype!r} with the sizes {sizes}")
            if spec.offset % ALIGNMENT or not 0 <= spec.offset - end < ALIGNMENT:
                raise ValueError(f"a tensor at byte {offset} after one that ends at byte {end}")
            specs.append(spec)
            end = spec.offset + spec.bytes
        if not isinstance(data["is_list"], bool) or not (specs or data["is_list"]):
            raise ValueError(f"{len(specs)} tensors with is_list={data['is_list']!r}")
        return cls(tuple(specs), data["is_list"], torch.device("cpu"))


def contiguous_tensors(value: Value) -> list[Tensor]:
    """Return the tensors of a value, detached and contiguous."""
    tensors = [value] if isinstance(value, Tensor) else list(value)
    return [tensor.detach().contiguous() for tensor in tensors]


def make_record(value: Value, tensors: Sequence[Tensor]) -> Record:
    """Return the layout of a value's tensors."""
    specs, at = [], 0
    for tensor in tensors:
        at = -(-at // ALIGNMENT) * ALIGNMENT
        specs.append(TensorSpec(tuple(tensor.shape), tensor.dtype, at))
        at += tensor.nbytes
    device = tensors[0].device if tensors else torch.device("cpu")
    return Record(tuple(specs), not isinstance(value, Tensor), device)


def is_fake(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors have no values, as in a dry run."""
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a writable view, valid while the tensor lives.

    `numpy()` would do the same, but then torch could never resize the storage again.
    """
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
