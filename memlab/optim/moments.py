"""Optimizer state: the tensors stored per weight between steps, and their formats.

    FloatMoment       one value per element: float32, or bfloat16 with stochastic rounding
    QuantizedMoment   one 8-bit code per element, and one float32 scale per 256 elements
    SharedMoment      one value for all elements of a block

Each can create its zero state, read a chunk as float tensors, and write the chunk back. Tensors are
stored in the optimizer's state by name: `exp_avg`, or `exp_avg_codes` with `exp_avg_scales` and
`exp_avg_codebook`, which all weights share.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memlab.configs.block_size import BLOCK_SIZE
from memlab.internals.shards import is_dtensor, new_by_shard, shard_of
from memlab.quantize import Quantized, dequantize_blockwise, dynamic_code, quantize_blockwise
from memlab.rounding import stochastic_round_

State = dict[str, Any]
MIN_NUMEL = 4096  # smaller weights keep float32 moments, as in bitsandbytes


class Chunk(NamedTuple):
    """Elements `start` to `stop` (exclusive) of a flattened weight."""

    start: int
    stop: int

    @property
    def as_slice(self) -> slice:
        return slice(self.start, self.stop)

    def blocks(self, size: int) -> slice:
        """Return the blocks of `size` elements that the chunk overlaps; it starts at one."""
        return slice(self.start // size, -(-self.stop // size))


class Moment(Protocol):
    """A tensor of an optimizer's state, in any storage format."""

    def new(self, weight: Tensor, others: Iterable[State]) -> State:
        """Return zeros for a weight, sharing what weights can share with the `others`' states."""

    def read(self, state: State, chunk: Chunk) -> Tensor:
        """Return a chunk: a view to update in place, or a decoded float32 copy."""

    def write(self, state: State, chunk: Chunk, value: Tensor) -> None:
        """Store a chunk; does nothing if `value` is the view that `read` returned."""


@dataclass(frozen=True)
class FloatMoment:
    """One value per element, in at least float32 unless `dtype` is set.

    bfloat16 is rounded stochastically. With round to nearest a second moment would never decrease:
    it shrinks by 1/1000 per step, less than half the spacing of bfloat16, which is at least 2/1000.
    """

    name: str
    dtype: torch.dtype | None = None
    generator: torch.Generator | None = None

    def new(self, weight: Tensor, others: Iterable[State]) -> State:
        """Return zeros in the weight's shape."""
        dtype = self.dtype or torch.promote_types(weight.dtype, torch.float32)
        zeros = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        return {self.name: zeros}

    def read(self, state: State, chunk: Chunk) -> Tensor:
        """Return a view."""
        return shard_of(state[self.name]).view(-1)[chunk.as_slice]

    def write(self, state: State, chunk: Chunk, value: Tensor) -> None:
        """Round and store; does nothing for a float32 view updated in place."""
        stored = self.read(state, chunk)
        if stored.dtype == torch.bfloat16:
            stochastic_round_(stored, value.float(), generator=self.generator)
        elif stored.dtype != value.dtype:  # the weight's dtype has changed since
            stored.copy_(value)


@dataclass(frozen=True)
class QuantizedMoment:
    """One byte per element in the dynamic codebook (memlab.quantize), and a scale per 256 elements.

    If unsigned, positive values never decode as zero: see `keep_nonzero`. Each rank of a DTensor
    quantizes blocks of its shard, so values differ from the unsharded ones by rounding errors.
    """

    name: str
    signed: bool

    def new(self, weight: Tensor, others: Iterable[State]) -> State:
        """Return uint8 codes (n,), float32 scales (⌈n/256⌉,) and the shared codebook (256,).

        The codes of a DTensor have its shape.
        """
        count, device = weight.numel(), weight.device
        zero = 127 if self.signed else 0
        if is_dtensor(weight):
            codes = torch.full_like(
                weight, zero, dtype=torch.uint8, memory_format=torch.contiguous_format
            )
            scales = new_by_shard(weight, torch.float32, BLOCK_SIZE)
        else:
            codes = torch.full((count,), zero, dtype=torch.uint8, device=device)
            scales = torch.zeros(-(-count // BLOCK_SIZE), dtype=torch.float32, device=device)
        return {
            f"{self.name}_codes": codes,
            f"{self.name}_scales": scales,
            f"{self.name}_code": self._shared_codebook(device, others),
        }

    def read(self, state: State, chunk: Chunk) -> Tensor:
        """Return a decoded copy."""
        return dequantize_blockwise(self._quantized_view(state, chunk))

    def write(self, state: State, chunk: Chunk, value: Tensor) -> None:
        """Encode to the nearest codebook entries and store."""
        stored = self._quantized_view(state, chunk)
        new = quantize_blockwise(value.float(), block=BLOCK_SIZE, codebook=stored.codebook)
        stored.codes.copy_(new.codes if self.signed else keep_nonzero(new.codes, value))
        stored.scales.copy_(new.scales)

    def _quantized_view(self, state: State, chunk: Chunk) -> Quantized:
        codes = shard_of(state[f"{self.name}_codes"]).view(-1)[chunk.as_slice]
        scales = shard_of(state[f"{self.name}_scales"])[chunk.blocks(BLOCK_SIZE)]
        codebook = state[f"{self.name}_code"]
        return Quantized(codes, scales, None, codebook, codes.shape, torch.float32, 8, BLOCK_SIZE)

    def _shared_codebook(self, device: torch.device, others: Iterable[State]) -> Tensor:
        for state in others:
            codebook = state.get(f"{self.name}_code")
            if codebook is not None and codebook.device == device:
                return codebook
        return dynamic_code(self.signed).to(device)


def keep_nonzero(codes: Tensor, values: Tensor) -> Tensor:
    """Replace code 0 by code 1 for every nonzero value; values are never negative.

    A second moment that decodes as zero beside a nonzero first moment makes a step bounded only by
    eps.
    """
    return torch.maximum(codes, values.bool().view(torch.uint8))


def is_worth_quantizing(weight: Tensor) -> bool:
    """Return whether a weight is large enough to quantize its moments."""
    return weight.numel() >= MIN_NUMEL


@dataclass(frozen=True)
class SharedMoment:
    """One value for each `size` neighboring elements of a flattened weight, in at least float32."""

    name: str
    size: int

    def new(self, weight: Tensor, others: Iterable[State]) -> State:
        """Return zeros (⌈n/size⌉,)."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        blocks = -(-weight.numel() // self.size)
        return {self.name: torch.zeros(blocks, dtype=dtype, device=weight.device)}

    def read(self, state: State, chunk: Chunk) -> Tensor:
        """Return a view (blocks, 1)."""
        return state[self.name][chunk.blocks(self.size)].view(-1, 1)

    def write(self, state: State, chunk: Chunk, value: Tensor) -> None:
        """Do nothing, unless the weight's dtype has changed since the state was created."""
        stored = self.read(state, chunk)
        if stored.dtype != value.dtype:
            stored.copy_(value)
