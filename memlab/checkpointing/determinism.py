"""Did a function save the same tensors when it ran again? What is remembered of each, to tell.

    metadata    shape, dtype and device; of a weight also how often it has been written to, for an
                optimizer's step between the two runs changes no shape
    hash        64 bits of all of its values. Running statistics differ between the runs and do not
                count, but InstanceNorm saves a copy of its own, which is an error here

    fingerprint = Σ  bits of element i · odd weight i      (mod 2⁶⁴)

An odd weight has an inverse modulo 2⁶⁴: if one element differs, in a single bit, so does the sum,
always. Weights that follow no pattern make it improbable (about 2⁻⁶⁴) that several differences
cancel, those of two elements that have changed places among them.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Check = Literal["none", "metadata", "hash"]

CHUNK = 2**18  # elements at once: the integers beside them take 2 MiB a tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2⁶⁴ / golden ratio, as a signed integer
_MIX = 0xBF58476D1CE4E5B9 - 2**64  # a multiplier of splitmix64 (Steele et al. 2014)


class Facts(NamedTuple):
    """What is remembered of a tensor that was saved."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    changes: int | None  # how often a weight had been written to; of other tensors None
    fingerprint: int | None

    def __str__(self) -> str:
        words = f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}"
        if self.changes is not None:
            words += f", a weight written to {self.changes} times"
        return words if self.fingerprint is None else f"{words}, hash {self.fingerprint:#018x}"


def facts(tensor: Tensor, check: Check) -> Facts | None:
    """What the check remembers of the tensor; None if nothing."""
    if check == "none":
        return None
    whole = tensor if tensor._base is None else tensor._base  # a linear layer saves weight.T
    changes = tensor._version if isinstance(whole, nn.Parameter) else None
    values = fingerprint(tensor) if check == "hash" else None
    return Facts(tensor.shape, tensor.dtype, tensor.device, changes, values)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """64 bits of all of a dense tensor's bits; equal for equal bits, NaNs too, on any device."""
    bits = tensor.detach().flatten().view(_INTEGERS[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(bits.split(CHUNK)):
        start = number * CHUNK
        positions = torch.arange(start, start + len(chunk), device=tensor.device)
        total += (chunk.long() * odd_weights(positions)).sum()
    return int(total.item()) % 2**64


def odd_weights(positions: Tensor) -> Tensor:
    """An odd 64-bit integer for each position, as if at random."""
    mixed = (positions + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return (mixed ^ (mixed >> 27)) | 1
