"""Collectives: reduce-scatter and all-gather among R ranks in one process.

Saves    nothing itself: ZeRO is built on these two.
Costs    each rank sends (R − 1)/R of the whole tensor, in either.
Source   Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054, section 7; the NCCL documentation.

    reduce_scatter    every rank has a whole tensor; rank r gets chunk r of the sum
    all_gather        every rank has a chunk; every rank gets the whole

A list has one tensor per rank. All data between ranks passes through the communicator, which counts
bytes. `memlab.zero.simulate` is the version to measure with, `torch.distributed` the one to train
with.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Communicator:
    """A communicator that copies tensors between ranks and counts each rank's bytes sent."""

    def __init__(self, ranks: int) -> None:
        self.sent, self.sums = [0] * ranks, 0

    def send(self, source: int, target: int, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor at the target."""
        self.sent[source] += tensor.nbytes
        return tensor.clone()

    def sum(self, values: Iterable[float]) -> float:
        """Return the sum of one value per rank, on all ranks."""
        self.sums += 1
        return sum(map(float, values))


class Collectives:
    """Collective operations on lists with one tensor per rank."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def reduce_scatter(self, wholes: list[Tensor]) -> list[Tensor]:
        """Return chunk r of the sum for each rank r."""
        shards = []
        for rank in range(len(wholes)):
            total = 0
            for source, whole in enumerate(wholes):
                piece = whole.chunk(len(wholes))[rank]
                if source != rank:
                    piece = self.comm.send(source, rank, piece)
                total = total + piece
            shards.append(total)
        return shards

    def all_gather(self, shards: list[Tensor]) -> list[Tensor]:
        """Return the concatenated shards for every rank."""
        wholes = []
        for rank in range(len(shards)):
            pieces = [
                x if source == rank else self.comm.send(source, rank, x)
                for source, x in enumerate(shards)
            ]
            wholes.append(torch.cat(pieces))
        return wholes
