"""Bytes of a rank and bytes on the wire, by formula, for each stage of ZeRO.

Ψ weights on R ranks, of which each holds ⌈Ψ/R⌉:

    stage                        held by each rank                   sent by each rank in a step
    0  data parallel             (2 + 2 + K)·Ψ                       2·Ψ·(R−1)/R
    1  optimizer's state         (2 + 2)·Ψ + K·Ψ/R                   2·Ψ·(R−1)/R
    2  gradients too             2·Ψ + (2 + K)·Ψ/R                   (k+1)·Ψ·(R−1)/R
    3  weights too               (2 + 2 + K)·Ψ/R                     3k·Ψ·(R−1)/R

K is what the optimizer keeps of a weight: 12 bytes for Adam by way of float32 copies, 8 for float32
moments alone. k is the number of micro-batches between two steps. A ring of R ranks gathers, or
reduces and scatters, Ψ numbers by sending (R−1)/R of them from each rank; an all-reduce is both.

    stages 0 and 1   reduce-scatter once, all-gather once: of the gradients, or then of the weights
    stage 2          reduce-scatter in each backward pass, all-gather once
    stage 3          all-gather in each forward pass and again in each backward, reduce-scatter

Source   Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 (memory) and 7 (communication).
"""

from memlab.zero.partitioning import ceil_div, require


def model_state_bytes(
    parameters: int,
    *,
    ranks: int,
    stage: int,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> int:
    """Bytes of weights, gradients and optimizer's state on the rank that holds the most."""
    require(ranks, stage)
    shard = ceil_div(parameters, ranks)
    held = [  # from which stage on a rank holds a shard
        (optimizer_bytes, shard if stage >= 1 else parameters),
        (gradient_bytes, shard if stage >= 2 else parameters),
        (parameter_bytes, shard if stage >= 3 else parameters),
    ]
    return round(sum(size * elements for size, elements in held))


def communication_bytes(
    parameters: int, *, ranks: int, stage: int, micro_batches: int = 1, element_bytes: int = 2
) -> int:
    """Bytes that each rank sends (and receives as many) between two steps of the optimizer."""
    require(ranks, stage)
    passes = collective_passes(stage, micro_batches)
    return passes * ring_elements(parameters, ranks) * element_bytes


def collective_passes(stage: int, micro_batches: int = 1) -> int:
    """How often all weights, or their gradients, are gathered or scattered between two steps."""
    if micro_batches < 1:
        raise ValueError(f"got {micro_batches} micro-batches; give at least 1")
    return (2, 2, micro_batches + 1, 3 * micro_batches)[stage]


def ring_elements(elements: int, ranks: int) -> int:
    """Numbers that each rank of a ring sends to gather, or reduce and scatter, so many."""
    return (ranks - 1) * ceil_div(elements, ranks)
