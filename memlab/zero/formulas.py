"""Formulas for the bytes that a rank stores and sends, for each stage of ZeRO.

Ψ weights on R ranks; a shard has ⌈Ψ/R⌉ elements:

    stage                        stored by each rank                 sent by each rank in a step
    0  data parallel             (2 + 2 + K)·Ψ                       2·Ψ·(R−1)/R
    1  shard optimizer state     (2 + 2)·Ψ + K·Ψ/R                   2·Ψ·(R−1)/R
    2  shard gradients too       2·Ψ + (2 + K)·Ψ/R                   (k+1)·Ψ·(R−1)/R
    3  shard weights too         (2 + 2 + K)·Ψ/R                     3k·Ψ·(R−1)/R

K is the optimizer state in bytes per weight: 12 for Adam with float32 copies, 8 for float32 moments
alone. k is the number of micro-batches per step. To all-gather or reduce-scatter Ψ elements, each
rank of a ring sends (R−1)/R of them. An all-reduce does both.

    stages 0 and 1   one reduce-scatter of gradients, then one all-gather (gradients or weights)
    stage 2          one reduce-scatter per backward pass, one all-gather
    stage 3          an all-gather per forward and per backward pass, a reduce-scatter per backward

Source   Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 (memory) and 7 (communication).
"""

from memlab.zero.stages import ceil_div, require


def model_state_bytes(
    parameters: int,
    *,
    ranks: int,
    stage: int,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> int:
    """Return the bytes of weights, gradients and optimizer state on the fullest rank."""
    require(ranks, stage)
    shard = ceil_div(parameters, ranks)
    stored = [  # (bytes per element, elements)
        (optimizer_bytes, shard if stage >= 1 else parameters),
        (gradient_bytes, shard if stage >= 2 else parameters),
        (parameter_bytes, shard if stage >= 3 else parameters),
    ]
    return round(sum(size * elements for size, elements in stored))


def communication_bytes(
    parameters: int, *, ranks: int, stage: int, micro_batches: int = 1, element_bytes: int = 2
) -> int:
    """Return the bytes that each rank sends (and receives) in one optimizer step."""
    require(ranks, stage)
    passes = collective_passes(stage, micro_batches)
    return passes * ring_elements(parameters, ranks) * element_bytes


def collective_passes(stage: int, micro_batches: int = 1) -> int:
    """Return how often all weights, or their gradients, are gathered or scattered in one step."""
    if micro_batches < 1:
        raise ValueError(f"got {micro_batches} micro-batches; pass at least 1")
    return (2, 2, micro_batches + 1, 3 * micro_batches)[stage]


def ring_elements(elements: int, ranks: int) -> int:
    """Return the elements that each rank of a ring sends in one all-gather or reduce-scatter."""
    return (ranks - 1) * ceil_div(elements, ranks)
