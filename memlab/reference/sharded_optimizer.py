"""ZeRO stage 1: each of R ranks keeps the optimizer state of its own shard of the weights.

Saves    (R − 1)/R of the optimizer state, including float32 copies of the weights.
Costs    nothing: a reduce-scatter and an all-gather send as much as an all-reduce.
Source   Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 5.1.

    reduce-scatter the gradients    rank r has shard r of their sum
    step shard r                    with AdamW, in float32
    all-gather the shards           every rank has all new weights

`memlab.zero.simulate` is the version to measure with, `memlab.zero.ZeroOptimizer` the one for real
processes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from memlab.reference.collectives import Collectives


class ShardedAdam:
    """`weights` holds the same flat tensor once per rank; it is stepped in place."""

    def __init__(self, weights: list[Tensor], comm: Any, lr: float) -> None:
        self.weights, self.comm, self.ranks = weights, comm, len(weights)
        pieces = [self.padded(w).chunk(self.ranks)[rank] for rank, w in enumerate(weights)]
        copies = [piece.to(torch.float32, copy=True) for piece in pieces]
        self.shards = [nn.Parameter(copy) for copy in copies]
        self.optimizers = [torch.optim.AdamW([s], lr=lr, foreach=False) for s in self.shards]

    def padded(self, x: Tensor) -> Tensor:
        """Pad x with zeros to a multiple of R."""
        return nn.functional.pad(x, (0, -len(x) % self.ranks))

    def step(self, gradients: list[Tensor], max_norm: float) -> None:
        """Step with the mean of the ranks' gradients, clipped to `max_norm`."""
        together = Collectives(self.comm)
        sums = together.reduce_scatter([self.padded(g) for g in gradients])
        for shard, total in zip(self.shards, sums, strict=True):
            shard.grad = total.float() / self.ranks
        norm = self.comm.sum(s.grad.square().sum() for s in self.shards) ** 0.5
        for shard, optimizer in zip(self.shards, self.optimizers, strict=True):
            shard.grad *= min(1, max_norm / (norm + 1e-6))
            optimizer.step()
            shard.grad = None
        stepped = [s.detach().to(self.weights[0].dtype) for s in self.shards]
        for w, whole in zip(self.weights, together.all_gather(stepped), strict=True):
            w.copy_(whole[: len(w)])
