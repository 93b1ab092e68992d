"""Ring attention: each of R ranks holds 1/R of the sequence; keys and values go round in a ring.

Saves    (R − 1)/R of everything that grows with the sequence: each rank saves its own q, k, v,
         output and log-sum-exp, and holds two more blocks of keys and values at most.
Costs    each rank sends R − 1 blocks of keys and values in forward, and again in backward, where
         R blocks of their gradients go round, too. Each pass can overlap with the attention to the
         block before. Under a causal mask rank r computes r + 1 blocks, so that all wait for the
         last rank.
Source   Liu et al. 2023, arXiv 2310.01889, algorithm 1.

At step s, rank r has the block of rank (r − s) mod R. With 4 ranks, each row is a rank, and `-` is
a block that the causal mask hides:

    step         0  1  2  3
    rank 0       0  -  -  -
    rank 1       1  0  -  -
    rank 2       2  1  0  -
    rank 3       3  2  1  0

Tiled attention gives out (…, T/R, D) and the log-sum-exp lse (…, T/R) for one block. Two blocks are
merged as two tiles are (online softmax):

    lse' = ln(e^lse + e^lse_b)      out' = out e^(lse − lse') + out_b e^(lse_b − lse')

Every function runs in a process of the default group, and all ranks have equally many tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memlab.reference.tiled_attention import Flash, attend


def pass_on(*tensors: Tensor) -> Callable[[], Sequence[Tensor]]:
    """Start sending tensors to the next rank. Return a function that waits for those of the rank
    before, and returns them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return lambda: tensors
    arriving = [x.new_empty(x.shape) for x in tensors]
    works = [dist.isend(x.contiguous(), (rank + 1) % ranks) for x in tensors]
    works += [dist.irecv(x, (rank - 1) % ranks) for x in arriving]

    def wait() -> Sequence[Tensor]:
        while works:
            works.pop(0).wait()
        return arriving

    return wait


def round_the_ring(k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each step with its block of keys and values, while the next block arrives."""
    last = dist.get_world_size() - 1
    for step in range(last):
        arrival = pass_on(k, v)
        yield step, k, v
        k, v = arrival()
    yield last, k, v


def merge(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the attention to two sets of keys; out (…, T/R, D), lse (…, T/R)."""
    both = torch.logaddexp(lse, lse_b)
    scaled = out * (lse - both).exp()[..., None]
    return scaled + out_b * (lse_b - both).exp()[..., None], both


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tile: int) -> Tensor:
        rank, length = dist.get_rank(), q.shape[-2]
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for step, keys, values in round_the_ring(k, v):
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
        for step, keys, values in round_the_ring(k, v):
            if step <= rank:
                saved, shift = (q, keys, values, out, lse), step * length
                block = SimpleNamespace(saved_tensors=saved, tile=ctx.tile, shift=shift)
                parts = Flash.backward(block, dout)  # given the output and lse of all blocks
                for total, part in zip((dq, dk, dv), parts, strict=False):
                    total += part
                del saved, block, parts, part, total
            del keys, values
            dk, dv = pass_on(dk, dv)()  # the gradients follow their block, and home in the end
        return dq, dk, dv, None


def ring(q: Tensor, k: Tensor, v: Tensor, tile: int) -> Tensor:
    """Compute causal attention of rank r's tokens to those and all before them.

    q, k, v are (…, T/R, D): tokens r T/R and after. Scores exist for `tile` × `tile` at a time.
    """
    return Ring.apply(q, k, v, tile)
