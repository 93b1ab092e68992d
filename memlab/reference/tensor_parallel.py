"""Tensor parallelism: each of R ranks holds 1/R of every matrix and computes 1/R of every matmul.

Saves    (R − 1)/R of the matrices and of the activations between the two matmuls of a pair. With
         sequence parallelism also of the norms' inputs and of the residual stream.
Costs    one all-reduce per pair in forward, and one in backward. Sequence parallelism replaces
         each by an all-gather and a reduce-scatter, which send as many bytes, and gathers once more
         in backward. No communication overlaps with its own matmul here.
Source   Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3; Korthikanti et al. 2022
         (sequence parallelism), arXiv 2205.05198, section 4.2.

A pair of matmuls: the first is split by columns, so that each rank has whole outputs; the second by
rows, so that each rank has one term of the sum.

    tensor parallel      column_parallel, an elementwise function or heads, row_parallel
    sequence parallel    norm_of_tokens, column_of_tokens, the same, row_to_tokens

The backward pass of each collective is its conjugate:

    forward           backward          here
    copy              all-reduce        copy_to_ranks
    all-reduce        copy              sum_over_ranks
    all-gather        reduce-scatter    ColumnOfTokens, which includes the matmul
    reduce-scatter    all-gather        scatter_tokens

Every function runs in a process of the default group. Dimension 0 of x is the tokens. A weight is
(out, in), as in torch.nn.Linear. `torch.distributed.tensor.parallel` is the version to train with.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

Collective = Callable[[Tensor], Tensor]


def part_of(x: Tensor, dim: int) -> Tensor:
    """Return a copy of this rank's 1/R of x. Raises ValueError if R does not divide its size."""
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
    """Apply one collective to x in forward, and its conjugate to the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, conjugate: Collective) -> Tensor:
        ctx.conjugate = conjugate
        return collective(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.conjugate(dy), None, None


def copy_to_ranks(x: Tensor) -> Tensor:
    """Return x, whose gradient is the sum of all ranks' gradients (f in the paper)."""
    return Conjugates.apply(x, lambda x: x.view_as(x), all_reduce)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of all ranks' x; each term's gradient is the sum's (g in the paper)."""
    return Conjugates.apply(x, all_reduce, lambda dy: dy)


def scatter_tokens(x: Tensor) -> Tensor:
    """Return this rank's tokens of the sum of all ranks' x (g with a bar in the paper)."""
    return Conjugates.apply(x, reduce_scatter, all_gather)


class ColumnOfTokens(torch.autograd.Function):
    """Save this rank's tokens instead of the gathered ones, and gather them again in backward."""

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
    """Multiply all tokens x (T, …, in) by rank r's weight (out/R, in) to y_r (T, …, out/R)."""
    return F.linear(copy_to_ranks(x), weight)


def row_parallel(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x_r (T, …, in/R) by rank r's weight (out, in/R); return the sum (T, …, out)."""
    return sum_over_ranks(F.linear(x, weight))


def column_of_tokens(x: Tensor, weight: Tensor) -> Tensor:
    """Do as column_parallel, of rank r's tokens x (T/R, …, in)."""
    return ColumnOfTokens.apply(x, weight)


def row_to_tokens(x: Tensor, weight: Tensor) -> Tensor:
    """Do as row_parallel, but return rank r's tokens of the sum (T/R, …, out)."""
    return scatter_tokens(F.linear(x, weight))


def norm_of_tokens(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of rank r's tokens x (T/R, …, C). All ranks hold the same weight (C), whose gradient
    is the sum over all tokens, and so over all ranks."""
    return F.rms_norm(x, x.shape[-1:], copy_to_ranks(weight), eps)
