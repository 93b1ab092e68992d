"""Tensor parallelism: each of R ranks holds 1/R of every matrix and computes 1/R of every matmul.

Saves    (R − 1)/R of the matrices and of the activations between two matmuls. With sequence
         parallelism, also (R − 1)/R of the norms' inputs and of the residual stream.
Costs    one all-reduce in forward and one in backward for each pair of matmuls. Sequence
         parallelism replaces an all-reduce by an all-gather and a reduce-scatter, which send as
         many bytes, and gathers the input once more in backward.
Source   Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3; Korthikanti et al. 2022
         (sequence parallelism), arXiv 2205.05198, section 4.2.

Matmuls are split in pairs, such as the two of an MLP. A column-parallel matmul computes 1/R of the
output elements on each rank. The row-parallel matmul after it reads them, and each rank computes
one term of a sum over ranks.

    tensor parallel      column_parallel, activation function or heads, row_parallel
    sequence parallel    sequence_parallel_norm, column_parallel_gather, activation function or
                         heads, row_parallel_scatter

The gradient of each collective needs another collective:

    forward           backward          here
    copy              all-reduce        copy_to_ranks
    all-reduce        copy              sum_over_ranks
    all-gather        reduce-scatter    GatherLinear (with its matmul)
    reduce-scatter    all-gather        scatter_tokens

Each rank is a process of the default process group. Tokens are dimension 0 of x. A weight is
(out, in), as in torch.nn.Linear. `torch.distributed.tensor.parallel` is the version to train with.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

Collective = Callable[[Tensor], Tensor]


def shard(x: Tensor, dim: int) -> Tensor:
    """Return a copy of this rank's 1/R of x. Raises ValueError if R does not divide the size."""
    ranks = dist.get_world_size()
    if x.shape[dim] % ranks:
        raise ValueError(f"got size {x.shape[dim]} in dimension {dim}; use a multiple of {ranks}")
    return x.chunk(ranks, dim)[dist.get_rank()].clone()


def all_reduce(x: Tensor) -> Tensor:
    """Return the sum of all ranks' x."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def all_gather(x: Tensor) -> Tensor:
    """Concatenate all ranks' tokens (T/R, …) to (T, …)."""
    whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather(list(whole.chunk(dist.get_world_size())), x.contiguous())
    return whole


def reduce_scatter(x: Tensor) -> Tensor:
    """Return this rank's tokens (T/R, …) of the sum of all ranks' x (T, …)."""
    parts = x.contiguous().chunk(dist.get_world_size())
    total = torch.empty_like(parts[0])
    dist.reduce_scatter(total, list(parts))
    return total


class Conjugates(torch.autograd.Function):
    """Apply a collective to x in forward, and its conjugate to the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, conjugate: Collective) -> Tensor:
        ctx.conjugate = conjugate
        return collective(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.conjugate(dy), None, None


def copy_to_ranks(x: Tensor) -> Tensor:
    """Return x; in backward, sum the gradients of all ranks (f in the Megatron-LM paper)."""
    return Conjugates.apply(x, lambda x: x.view_as(x), all_reduce)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of all ranks' x; in backward, copy (g in the Megatron-LM paper)."""
    return Conjugates.apply(x, all_reduce, lambda dy: dy)


def scatter_tokens(x: Tensor) -> Tensor:
    """Return this rank's tokens of the sum of all ranks' x; in backward, all-gather."""
    return Conjugates.apply(x, reduce_scatter, all_gather)


class GatherLinear(torch.autograd.Function):
    """Gather tokens and multiply. Backward gathers again, so only this rank's tokens are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return all_gather(x) @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dweight = dy.flatten(0, -2).T @ all_gather(x).flatten(0, -2)
        return reduce_scatter(dy @ weight), dweight


def column_parallel(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (T, …, in) by this rank's rows of the weight, (out/R, in)."""
    return F.linear(copy_to_ranks(x), weight)


def row_parallel(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (T, …, in/R) by this rank's columns (out, in/R), and sum over ranks."""
    return sum_over_ranks(F.linear(x, weight))


def column_parallel_gather(x: Tensor, weight: Tensor) -> Tensor:
    """Run column_parallel on the gathered tokens; x (T/R, …, in), returns (T, …, out/R)."""
    return GatherLinear.apply(x, weight)


def row_parallel_scatter(x: Tensor, weight: Tensor) -> Tensor:
    """Run row_parallel and keep this rank's tokens; x (T, …, in/R), returns (T/R, …, out)."""
    return scatter_tokens(F.linear(x, weight))


def sequence_parallel_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Run RMSNorm on this rank's tokens x (T/R, …, C).

    All ranks hold the whole weight (C). Its gradient is a sum over tokens, and so over ranks.
    """
    return F.rms_norm(x, x.shape[-1:], copy_to_ranks(weight), eps)
