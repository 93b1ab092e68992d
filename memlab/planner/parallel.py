"""Formulas for the bytes that a rank saves and sends, for each way to divide a model.

A micro-batch has n tokens, and the residual stream C elements per token. Of a layer's saved
tensors, tensor parallelism leaves w bytes per token whole (the residual stream and the norms'
saved tensors) and divides d bytes (heads and the MLP):

    way                        saved by a layer    sent for a layer and micro-batch
    one process                n·(w + d)           nothing
    tensor, t ranks            n·(w + d/t)         4 all-reduces: 8·n·C·(t−1)/t elements
    with sequence parallelism  n·(w + d)/t         10·n·C·(t−1)/t elements
    context, r ranks           n·(w + d)/r         (3·r − 2)/r·n·KV elements (KV: both widths)

    pipeline, stage i of p     saves min(m, p − i) micro-batches of its layers under 1F1B, m under
                               GPipe; sends n·C elements for each micro-batch and neighbor

Sequence parallelism sends 8 in place of the all-reduces, and gathers the inputs of two matmuls once
more in backward. A ring sends r − 1 blocks of keys and values in forward, as many in backward, and
r blocks of their gradients. `memlab.planner.formulas` divides all saved tensors of blocks by t.

Source   Korthikanti et al. 2022, arXiv 2205.05198, section 4; Narayanan et al. 2021, arXiv
         2006.09503 (1F1B); Liu et al. 2023, arXiv 2310.01889 (ring attention). The reference
         implementations are memlab.reference.tensor_parallel, pipeline and ring_attention.
"""

from memlab.zero.formulas import ring_elements

ALL_REDUCES = 4  # two in forward, two in backward


def saved_bytes(
    tokens: int,
    *,
    whole: int,
    divided: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    context: int = 1,
) -> int:
    """Return the bytes that a rank saves of a layer for one micro-batch.

    `whole` and `divided` are the bytes per token of the two kinds. Raises ValueError for sizes that
    the ranks don't divide.
    """
    own = _divided(tokens, context, "tokens", "context")
    if sequence_parallel:
        return _divided(own, tensor, "tokens", "tensor") * (whole + divided)
    return own * whole + _divided(own * divided, tensor, "bytes", "tensor")


def micro_batches_in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Return the micro-batches that a stage of 1F1B saves at once, at most."""
    if not 0 <= stage < stages or micro_batches < 1:
        raise ValueError(
            f"got stage {stage} of {stages} and {micro_batches} micro-batches; number the stages "
            f"from 0 and use at least 1 micro-batch"
        )
    return min(micro_batches, stages - stage)


def tensor_parallel_elements(
    tokens: int, hidden_size: int, ranks: int, *, sequence_parallel: bool = False
) -> int:
    """Return the elements that a rank of a ring sends for one layer."""
    passes = 2 * ALL_REDUCES + (2 if sequence_parallel else 0)
    return passes * ring_elements(tokens * hidden_size, ranks)


def pipeline_elements(stage: int, stages: int, micro_batches: int, stream: int) -> int:
    """Return the elements that a stage sends in a step; `stream` is a micro-batch's n·C."""
    neighbors = (stage > 0) + (stage < stages - 1)
    return neighbors * micro_batches * stream


def ring_attention_elements(tokens: int, kv_width: int, ranks: int) -> int:
    """Return the elements that a rank sends for one layer; `kv_width` is the width of keys plus
    values."""
    blocks = 3 * ranks - 2  # forward, backward, gradients
    return blocks * _divided(tokens, ranks, "tokens", "context") * kv_width


def gathered_context_bytes(own_keys: int, ranks: int, *, recomputed: bool = False) -> int:
    """Return the bytes that a rank of torch's context parallel sends for one layer.

    `own_keys` are the bytes of its keys and values in bfloat16. Each pass gathers all ranks' keys
    and values. Their gradients travel around the whole ring in float32, back to their rank.
    """
    if ranks == 1:
        return 0
    gathered = (2 + recomputed) * (ranks - 1) * own_keys
    return gathered + 2 * ranks * own_keys


def ring_attention_blocks(rank: int, ranks: int) -> int:
    """Return how many other ranks' blocks of keys and values a rank holds while it computes.

    One is there and one arrives. Rank 0 computes with its own block alone.
    """
    return min(ranks - 1, 1 if rank == 0 else 2)


def _divided(count: int, ranks: int, what: str, way: str) -> int:
    if ranks < 1 or count % ranks:
        raise ValueError(
            f"got {count} {what} for {ranks} {way} ranks; use a divisor as the number of ranks"
        )
    return count // ranks
