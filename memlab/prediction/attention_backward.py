"""Scratch memory of fused attention's backward, by kernel. Shapes are (B, H, T, D).

    flash      a float32 gradient of the queries, a float32 row sum and, with grouped queries,
               gradients of keys and values for all heads (flash_api.cpp, `mha_bwd`)
    efficient  a float32 row sum (B, H, T) and a workspace: float32 tiles of the queries' gradient,
               each with a lock of 16 bytes. Head dimensions above 128 also need tiles of the keys'
               and values' gradients. For float32 inputs, torch's operators compute the row sum
               first, from a product (attention_backward.cu, kernel_backward.h)
    cudnn      one workspace. cuDNN's frontend, which is open, puts a float32 gradient of the
               queries and a row sum into it (scaled_dot_product_flash_attention.h). The closed
               kernels add 256 bytes on an H200, and need as many in forward (cuDNN 9.19)

A tile of efficient attention has 64 × 64 elements. Head dimensions above 64 use larger tiles on
GPUs with more shared memory per thread block (V100 and data center GPUs from A100).
"""

from typing import NamedTuple

import torch

Sizes = tuple[int, ...]  # bytes of buffers

_LOCK_ELEMENTS = 4  # of 4 bytes
_WANTED_BLOCKS = 200
_MANY_BLOCKS = 256
_LARGE_SHARED_MEMORY = ((7, 0), (8, 0), (9, 0), (10, 0))  # compute capabilities


def flash_scratch(query: torch.Tensor, key: torch.Tensor) -> Sizes:
    """Return the buffers of flash attention's backward."""
    B, H, T, D = query.shape
    rounded_T, rounded_D = _round_up(T, 128), 256 if D > 192 else _round_up(D, 32)
    buffers = [4 * B * H * rounded_T, 4 * B * H * rounded_T * rounded_D]
    if key.shape[1] != H:
        buffers += 2 * [query.element_size() * B * key.shape[2] * H * D]
    return tuple(buffers)


CUDNN_FORWARD: Sizes = (256,)


def cudnn_scratch(query: torch.Tensor) -> Sizes:
    """Return cuDNN's workspace in backward."""
    B, H, T, D = query.shape
    return (4 * B * H * T * D + 4 * B * H * T + sum(CUDNN_FORWARD),)


# ------------------------------------------------------------------ efficient attention


class _Tile(NamedTuple):
    queries: int
    keys: int
    accumulates_keys: bool  # gradients of keys and values, in the workspace


def efficient_scratch(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    capability: tuple[int, int],
) -> Sizes:
    """Return the buffers of efficient attention's backward."""
    B, H, T, _ = query.shape
    copy = () if grad.transpose(1, 2).is_contiguous() else (grad.nbytes,)
    row_sums = 4 * B * H * T
    return (*copy, row_sums, _efficient_workspace(query, key, value, capability))


def efficient_product(grad: torch.Tensor) -> Sizes:
    """Return the product of output and its gradient, whose row sums a float32 kernel reads, the
    sums, and their contiguous copy."""
    if grad.dtype != torch.float32:
        return ()  # the kernel computes the row sums
    B, H, T, _ = grad.shape
    return (grad.nbytes, *(4 * B * H * T,) * (1 if 1 in (H, T) else 2))


def _efficient_workspace(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]
) -> int:
    B, H, T, D = query.shape
    tile = _tile(query.element_size() == 2, max(D, value.shape[-1]), capability)
    tiles = -(-T // tile.queries) * -(-D // tile.keys)
    elements = tiles * (tile.queries * tile.keys + _LOCK_ELEMENTS)
    if tile.accumulates_keys:
        widths = (_round_up(tensor.shape[-1], tile.queries) for tensor in (key, value))
        elements += _key_splits(B * H, key.shape[2], tile) * tile.keys * sum(widths)
    return 4 * B * H * _round_up(elements, 4)


def _tile(is_half: bool, head_dim: int, capability: tuple[int, int]) -> _Tile:
    """Return the tile of the first kernel in cutlassB.h that supports the inputs and the GPU."""
    if head_dim <= 64:
        return _Tile(64, 64, accumulates_keys=False)
    if is_half and head_dim <= 96 and capability in ((8, 6), (8, 9)):
        return _Tile(128, 64, accumulates_keys=False)
    least = (7, 0) if is_half else (8, 0)
    if capability < least or capability not in _LARGE_SHARED_MEMORY:
        return _Tile(64, 64, accumulates_keys=is_half)  # float32 gradients accumulate themselves
    if head_dim > 128:
        return _Tile(128, 64, accumulates_keys=is_half)
    return _Tile(128, 128 if is_half and capability >= (8, 0) else 64, accumulates_keys=False)


def _key_splits(rows: int, key_len: int, tile: _Tile) -> int:
    """Return the number of key parts processed at the same time."""
    splits = -(-key_len // tile.keys)
    if rows >= _MANY_BLOCKS and key_len <= 2 * tile.keys:
        splits = 1
    return max(1, min(splits, _WANTED_BLOCKS // rows))


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
