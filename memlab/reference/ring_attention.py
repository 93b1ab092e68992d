"""Ring attention: each of R ranks holds 1/R of the sequence, and passes keys and values around.

Saves    (R − 1)/R of all activations: each rank saves its own q, k, v, output and log-sum-exp, and
         holds at most two blocks of other ranks' keys and values.
Costs    each rank sends R − 1 blocks of keys and values in forward. In backward it sends them
         again, and R blocks of their gradients. A block arrives while the rank computes with the
         block before. With a causal mask, rank r computes r + 1 blocks, so all ranks wait for the
         last one.
Source   Liu et al. 2023, arXiv 2310.01889, algorithm 1.

At step s, rank r has the block of rank (r − s) mod R. For R = 4, where the causal mask hides the
blocks marked `-`:

    step         0  1  2  3
    rank 0       0  -  -  -
    rank 1       1  0  -  -
    rank 2       2  1  0  -
    rank 3       3  2  1  0

Tiled attention returns out (…, T/R, D) and the log-sum-exp lse (…, T/R) of one block. Two blocks
are merged as two tiles are (online softmax):

    lse' = ln(e^lse + e^lse_b)      out' = out e^(lse − lse') + out_b e^(lse_b − lse')

Each rank is a process of the default process group, and all ranks have the same number of tokens.
`torch.distributed.tensor.experimental.context_parallel` is the version to train with, on GPUs.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memlab.reference.tiled_attention import Flash, attend


def pass_to_next(*tensors: Tensor) -> Callable[[], Sequence[Tensor]]:
    """Start sending tensors to the next rank.

    Returns a function that waits for the tensors of the previous rank, and returns them.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return lambda: tensors
    arriving = [x.new_empty(x.shape) for x in tensors]
    works: list[Any] = [dist.isend(x.contiguous(), (rank + 1) % ranks) for x in tensors]
    works += [dist.irecv(x, (rank - 1) % ranks) for x in arriving]

    def wait() -> Sequence[Tensor]:
        while works:
            works.pop(0).wait()
        return arriving

    return wait


def ring_blocks(k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each step with its block of keys and values, while the next block arrives."""
    last = dist.get_world_size() - 1
    for step in range(last):
        arrival = pass_to_next(k, v)
        yield step, k, v
        k, v = arrival()
    yield last, k, v


def merge(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention to two blocks of keys; out (…, T/R, D), lse (…, T/R)."""
    both = torch.logaddexp(lse, lse_b)
    scaled = out * (lse - both).exp()[..., None]
    return scaled + out_b * (lse_b - both).exp()[..., None], both


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tile: int) -> Tensor:
        rank, length = dist.get_rank(), q.shape[-2]
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for step, keys, values in ring_blocks(k, v):
            if step <= rank:
                out, lse = merge(out, lse, *attend(q, keys, values, tile, step * length))
            del keys, values  # before the next block arrives
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tile = tile
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, length = dist.get_rank(), q.shape[-2]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step, keys, values in ring_blocks(k, v):
            if step <= rank:
                saved, shift = (q, keys, values, out, lse), step * length
                block = SimpleNamespace(saved_tensors=saved, tile=ctx.tile, shift=shift)
                parts: Any = Flash.backward(block, dout)  # given the output and lse of all blocks
                for total, part in zip((dq, dk, dv), parts, strict=False):
                    total += part
                del saved, block, parts, part, total
            del keys, values
            dk, dv = pass_to_next(dk, dv)()  # gradients follow their block
        return dq, dk, dv, None


def ring(q: Tensor, k: Tensor, v: Tensor, tile: int) -> Tensor:
    """Compute causal attention of this rank's tokens to them and all earlier tokens.

    q, k, v (…, T/R, D) are tokens r·T/R to (r + 1)·T/R. Scores are computed in tiles of `tile` ×
    `tile`.
    """
    return Ring.apply(q, k, v, tile)
