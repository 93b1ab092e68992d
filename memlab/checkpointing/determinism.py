"""Check that a function saves the same tensors in both runs.

    metadata    shape, dtype and device; for a weight also its version counter, because an optimizer
                step between the runs does not change its shape
    hash        64 bits of all values. Running statistics differ between the runs and are ignored,
                but InstanceNorm saves a copy of them, so it fails this check

    fingerprint = Σ  bits of element i · odd multiplier i      (mod 2⁶⁴)

An odd multiplier has an inverse modulo 2⁶⁴, so a difference in a single element always changes the
sum. The multipliers follow no pattern, so several differences (such as two swapped elements) cancel
with a probability of only about 2⁻⁶⁴.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Check = Literal["none", "metadata", "hash"]

CHUNK = 2**18  # elements per chunk; each int64 temporary takes 2 MiB

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2⁶⁴ / golden ratio, as a signed integer
_MIX = 0xBF58476D1CE4E5B9 - 2**64  # a multiplier of splitmix64 (Steele et al. 2014)


class SavedTensorInfo(NamedTuple):
    """The recorded properties of a saved tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    changes: int | None  # version counter of a weight; None for other tensors
    fingerprint: int | None

    def __str__(self) -> str:
        words = f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}"
        if self.changes is not None:
            words += f", a weight written to {self.changes} times"
        return words if self.fingerprint is None else f"{words}, hash {self.fingerprint:#018x}"


def saved_tensor_info(tensor: Tensor, check: Check) -> SavedTensorInfo | None:
    """Return the properties to compare; None if `check` is "none"."""
    if check == "none":
        return None
    whole = tensor if tensor._base is None else tensor._base  # a linear layer saves weight.T
    changes = tensor._version if isinstance(whole, nn.Parameter) else None
    values = fingerprint(tensor) if check == "hash" else None
    return SavedTensorInfo(tensor.shape, tensor.dtype, tensor.device, changes, values)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit hash of a dense tensor's bits (NaNs too), equal on every device."""
    bits = tensor.detach().flatten().view(_INTEGERS[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(bits.split(CHUNK)):
        start = number * CHUNK
        stop = start + len(chunk)
        positions = torch.arange(start, stop, dtype=torch.int64, device=tensor.device)
        total += (chunk.long() * odd_multipliers(positions)).sum()
    return int(total.item()) % 2**64


def odd_multipliers(positions: Tensor) -> Tensor:
    """Return a pseudorandom odd 64-bit integer for each position."""
    mixed = (positions + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return (mixed ^ (mixed >> 27)) | 1
