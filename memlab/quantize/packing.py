"""Bit packing: several codes per byte, the first in the lowest bits."""

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int, count: int) -> Tensor:
    """Pack `count` codes (uint8, below 2ᵇ, padded to whole bytes) into ⌈count·bits/8⌉ bytes."""
    per_byte = 8 // bits
    codes[count:] = 0  # padding of the last byte
    in_byte = codes.view(-1, per_byte)
    packed = in_byte[:, 0].clone() if per_byte > 1 else codes
    for place in range(1, per_byte):
        packed |= in_byte[:, place] << place * bits
    return packed[: -(-count // per_byte)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` codes, padded with zeros."""
    per_byte = 8 // bits
    if padding := count // per_byte - len(packed):
        packed = torch.cat([packed, packed.new_zeros(padding)])
    if per_byte == 1:
        return packed
    places = torch.arange(per_byte, device=packed.device, dtype=torch.uint8) * bits
    return (packed.view(-1, 1) >> places).bitwise_and_(2**bits - 1).view(-1)
