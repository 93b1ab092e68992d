"""What an optimizer keeps of a weight between steps, and in how many bits.

    Float       a number a weight: 4 bytes of float32, or 2 of bfloat16, rounded at random
    Dynamic     a code of 8 bits a weight, and a float32 scale for each 256
    PerBlock    one number for all the weights of a block

Each can make itself anew (zeros), give a piece of itself as numbers, and take the piece back. The
tensors lie in the optimizer's state by name: `exp_avg`, or `exp_avg_codes` with its scales and the
code by which they are read, which all weights share.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from memlab.quantize import Quantized, dequantize_blockwise, dynamic_code, quantize_blockwise
from memlab.rounding import stochastic_round_

State = dict[str, Any]
BLOCK = 256
SMALLEST = 4096  # numbers in a weight whose moments are worth encoding; as in bitsandbytes


class Piece(NamedTuple):
    """The numbers from `start` to before `stop` of a flattened weight."""

    start: int
    stop: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)

    def blocks(self, size: int) -> slice:
        """The blocks that it touches; it begins with one."""
        return slice(self.start // size, -(-self.stop // size))


class Moment(Protocol):
    """A tensor of an optimizer's state, however it is kept."""

    def new(self, weight: Tensor, others: Iterable[State]) -> State:
        """Zeros, for a weight; what weights can share is taken from the other weights' states."""

    def read(self, state: State, piece: Piece) -> Tensor:
        """The piece as numbers: a view to be updated in place, or decoded to float32."""

    def write(self, state: State, piece: Piece, value: Tensor) -> None:
        """Keep the piece; nothing is left to do where `value` is the view that `read` gave."""


@dataclass(frozen=True)
class Float:
    """One number a weight, in float32 at least unless `dtype` says otherwise.

    In bfloat16 it is rounded at random: to the nearest, a second moment would never fall. In a step
    it loses a thousandth, and half a step of bfloat16 is at least two.
    """

    name: str
    dtype: torch.dtype | None = None
    generator: torch.Generator | None = None

    def new(self, weight: Tensor, others: Iterable[State]) -> State:
        """(the weight's shape)"""
        dtype = self.dtype or torch.promote_types(weight.dtype, torch.float32)
        zeros = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        return {self.name: zeros}

    def read(self, state: State, piece: Piece) -> Tensor:
        """A view."""
        return state[self.name].view(-1)[piece.span]

    def write(self, state: State, piece: Piece, value: Tensor) -> None:
        """Rounded; nothing where it was updated in place."""
        kept = self.read(state, piece)
        if kept.dtype == torch.bfloat16:
            stochastic_round_(kept, value.float(), generator=self.generator)
        elif kept.dtype != value.dtype:  # the weight's has changed since this was made
            kept.copy_(value)


@dataclass(frozen=True)
class Dynamic:
    """One byte a weight, by the dynamic code (memlab.quantize), and a scale for each 256.

    Without a sign, what is positive stays positive: see `kept_positive`.
    """

    name: str
    signed: bool

    def new(self, weight: Tensor, others: Iterable[State]) -> State:
        """uint8 (n,), float32 (⌈n/256⌉,), and the code, float32 (256,), which all weights share."""
        count, device = weight.numel(), weight.device
        zero = 127 if self.signed else 0
        return {
            f"{self.name}_codes": torch.full((count,), zero, dtype=torch.uint8, device=device),
            f"{self.name}_scales": torch.zeros(-(-count // BLOCK), device=device),
            f"{self.name}_code": self._code(device, others),
        }

    def read(self, state: State, piece: Piece) -> Tensor:
        """Decoded."""
        return dequantize_blockwise(self._kept(state, piece))

    def write(self, state: State, piece: Piece, value: Tensor) -> None:
        """Encoded, each number by the nearest of the code."""
        kept = self._kept(state, piece)
        new = quantize_blockwise(value.float(), block=BLOCK, code=kept.code)
        kept.codes.copy_(new.codes if self.signed else kept_positive(new.codes, value))
        kept.scales.copy_(new.scales)

    def _kept(self, state: State, piece: Piece) -> Quantized:
        codes = state[f"{self.name}_codes"][piece.span]
        scales = state[f"{self.name}_scales"][piece.blocks(BLOCK)]
        code = state[f"{self.name}_code"]
        return Quantized(codes, scales, None, code, codes.shape, torch.float32, 8, BLOCK)

    def _code(self, device: torch.device, others: Iterable[State]) -> Tensor:
        codes = (state.get(f"{self.name}_code") for state in others)
        there = (code for code in codes if code is not None and code.device == device)
        found = next(there, None)
        return dynamic_code(self.signed).to(device) if found is None else found


def kept_positive(codes: Tensor, numbers: Tensor) -> Tensor:
    """Code 1 in place of code 0 for each number that is not zero; there are no negative ones.

    Code 0 of a second moment would come back as zero, and the step of a weight whose first moment
    is not zero would have no bound but its share of eps.
    """
    return torch.maximum(codes, numbers.bool().view(torch.uint8))


def in_8_bits(weight: Tensor) -> bool:
    """Whether a weight's moments are worth encoding."""
    return weight.numel() >= SMALLEST


@dataclass(frozen=True)
class PerBlock:
    """One number for each `size` neighbours of a flattened weight, in float32 at least."""

    name: str
    size: int

    def new(self, weight: Tensor, others: Iterable[State]) -> State:
        """(⌈n/size⌉,)"""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        blocks = -(-weight.numel() // self.size)
        return {self.name: torch.zeros(blocks, dtype=dtype, device=weight.device)}

    def read(self, state: State, piece: Piece) -> Tensor:
        """A view, (blocks, 1)."""
        return state[self.name][piece.blocks(self.size)].view(-1, 1)

    def write(self, state: State, piece: Piece, value: Tensor) -> None:
        """Nothing, unless the weight has another dtype now than when this was made."""
        kept = self.read(state, piece)
        if kept.dtype != value.dtype:
            kept.copy_(value)
