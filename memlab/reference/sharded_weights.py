"""ZeRO stages 2 and 3: shard gradients, then weights too; gather one unit's weights at a time.

Saves    stage 2: (R − 1)/R of the gradients. Stage 3: also of the weights.
Costs    stage 3 gathers the weights again for backward: 3 passes where stage 1 needs 2.
Source   Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, sections 5.2 and 5.3.

    stage 2, backward of a unit     reduce-scatter its gradients immediately; keep one shard
    stage 3, forward of a unit      all-gather its weights, run it, free them
    stage 3, backward of a unit     all-gather its weights again, then as in stage 2

A unit is one layer, tanh(x W), so that its backward pass takes three lines.
`memlab.zero.simulate` is the version to measure with, `memlab.zero.shard` the one for real
processes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memlab.reference.collectives import Collectives


def forward_of(w: Tensor, x: Tensor) -> Tensor:
    """Run one unit; w is a flat matrix with one row per column of x."""
    return torch.tanh(x @ w.view(x.shape[1], -1))


def backward_of(w: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of w (flat) and x."""
    matrix = w.view(x.shape[1], -1)
    dz = dy * (1 - torch.tanh(x @ matrix) ** 2)
    return (x.T @ dz).flatten(), dz @ matrix.T


def add_gradients_(
    comm: Any,
    weights: list[list[Tensor]],
    inputs: list[list[Tensor]],
    dys: list[Tensor],
    sums: list[list[Tensor]],
) -> list[Tensor]:
    """Run stage 2's backward pass: add shard r of each unit's gradient to sums[r].

    Return dx per rank. Lists are by rank, inner lists by unit.
    """
    dys, together = list(dys), Collectives(comm)
    for unit in reversed(range(len(weights[0]))):
        wholes = []
        for rank, dy in enumerate(dys):
            dw, dys[rank] = backward_of(weights[rank][unit], inputs[rank][unit], dy)
            wholes.append(dw)
        for rank, shard in enumerate(together.reduce_scatter(wholes)):
            sums[rank][unit] += shard
    return dys


def sharded_pass(
    comm: Any,
    shards: list[list[Tensor]],
    xs: list[Tensor],
    dy_of: Callable[[Tensor], Tensor],
    sums: list[list[Tensor]],
) -> None:
    """Run stage 3's forward and backward pass with one unit's whole weights at a time."""
    together, inputs, units = Collectives(comm), [list(xs)], range(len(shards[0]))
    for unit in units:
        wholes = together.all_gather([mine[unit] for mine in shards])
        inputs.append([forward_of(w, x) for w, x in zip(wholes, inputs[-1], strict=True)])
        del wholes
    dys = [dy_of(y) for y in inputs[-1]]
    for unit in reversed(units):
        wholes = together.all_gather([mine[unit] for mine in shards])
        given = [[w] for w in wholes], [[x] for x in inputs[unit]]
        dys = add_gradients_(comm, *given, dys, [[mine[unit]] for mine in sums])
        del wholes, given
