"""INT8 activations: autograd saves 8-bit codes, with an offset and a step per group of 256.

Saves    three quarters of the saved float32 activations: n + 4⌈n/256⌉ bytes, not 4n.
Costs    encoding each activation, decoding it in backward, and gradients off by about 0.5 %.
Source   Chen et al. 2021 (ActNN), arXiv 2104.14129, section 4; Liu et al. 2022 (GACT), 2206.11357.

    encode    smallest = min(group)        step = (max(group) − smallest) / 255
              code = round((x − smallest) / step)
    decode    smallest + code · step

The forward pass computes with exact values; only what autograd saves is rounded.
`memlab.compression.compressed_activations` is the version to train with. This version compresses a
storage once: an operator that saves it after an in-place write gets the codes from before, so
layers that write in place (`inplace=True`, GRU, LSTM cells) get wrong gradients.
"""

import weakref
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor


def as_bfloat16(x: Tensor, towards: float) -> Tensor:
    """Round to bfloat16 in one direction: down for towards=-inf, up for inf."""
    nearest = x.bfloat16()
    beyond = torch.nextafter(nearest, torch.full_like(nearest, towards))
    passed = nearest.float() > x if towards < 0 else nearest.float() < x
    return torch.where(passed, beyond, nearest)


def quantize(
    groups: Tensor, levels: int, round: Callable[[Tensor], Tensor] = torch.round
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes (groups, 256), and offset and step (groups, 1) in bfloat16."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    smallest = as_bfloat16(low, -inf)
    step = as_bfloat16((high - smallest.float()) / levels, inf)
    steps = (groups - smallest.float()) / torch.where(step == 0, 1, step.float())
    return round(steps).clamp(0, levels).to(torch.uint8), smallest, step


def compress(x: Tensor) -> tuple[Any, ...]:
    """Compress a flat tensor to 8-bit codes. Return the arguments of `decompress`."""
    groups = torch.cat([x, x[-1:].expand(-len(x) % 256)]).view(-1, 256).float()
    codes, smallest, step = quantize(groups, 255)
    return codes.view(-1)[: len(x)].clone(), smallest, step, x.dtype


def decompress(kept: tuple[Any, ...]) -> Tensor:
    """Return the flat tensor; each element is off by at most half a step."""
    codes, smallest, step, dtype = kept
    each = [x.float().expand(-1, 256).reshape(-1)[: len(codes)] for x in (smallest, step)]
    return (each[0] + codes * each[1]).to(dtype)


def whole(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor's storage, flat and without a graph."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((count,), (1,), 0)


def hooks(
    weights: Iterable[Tensor],
    compress: Callable[[Tensor], Any] = compress,
    decompress: Callable[[Any], Tensor] = decompress,
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return (pack, unpack) for torch.autograd.graph.saved_tensors_hooks around the forward."""
    left_alone = {weight.untyped_storage() for weight in weights}
    known = weakref.WeakKeyDictionary()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage in left_alone or not tensor.requires_grad or len(whole(tensor)) < 256:
            return tensor.detach()
        if storage not in known:
            known[storage] = compress(whole(tensor))
        return known[storage], tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        compressed, *view = kept
        return decompress(compressed).as_strided(*view)

    return pack, unpack
