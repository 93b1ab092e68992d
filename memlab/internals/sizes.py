"""Sizes that follow from formulas alone.

`memlab.planner.formulas` adds them up without importing torch, so that it also runs in a browser.
"""

import math

# The elements of a chunk. On a CPU 1 MiB of float32, which fits its cache. On an accelerator 16
# MiB, because each operator is a kernel launch.
CHUNK_SIZE, CHUNK_SIZE_ON_ACCELERATOR = 2**18, 2**22
ABSMAX_BLOCK = 256  # absmax values of NF4 that share a scale


def added_weights(in_features: int, out_features: int, rank: int) -> int:
    """Return the number of weights that LoRA adds to a layer."""
    return rank * (in_features + out_features)


def chunk_rows(rows: int, vocab_size: int, width: int) -> int:
    """Choose the number of rows per chunk.

    A chunk's logits have at most half as many elements as the gradients, (rows + vocab_size)·width,
    which are needed anyway. This gives about width/2 rows, enough for the matmul that updates all
    of dW per chunk to be bound by compute. They also have at most an eighth of all logits, which
    matters for fewer rows than four widths, but at least 64 rows, so that matmuls stay fast. Within
    these limits, the function uses as few chunks as possible, of equal size.
    """
    if rows < 0 or vocab_size < 1 or width < 0:
        raise ValueError(
            f"got rows={rows}, vocab_size={vocab_size} and width={width}; give at least 0 rows, "
            f"1 token and a width of 0"
        )
    rows = max(1, rows)
    by_gradients = (rows + vocab_size) * width // (2 * vocab_size)
    most = max(1, min(by_gradients, max(rows // 8, 64)))
    return math.ceil(rows / math.ceil(rows / most))


def nf4_bytes(elements: int, *, block: int = 64, double: bool = True) -> int:
    """Return the bytes of a quantized weight, without the shared codebooks."""
    codes, blocks = -(-elements // 2), -(-elements // block)
    return codes + (blocks + 4 * -(-blocks // ABSMAX_BLOCK) + 4 if double else 4 * blocks)
