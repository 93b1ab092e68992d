"""Triton kernels for techniques whose readable versions launch many small operators on a GPU.

    attention.py     flash attention, forward and backward
    optim.py         8-bit Adam and 8-bit Lion: one launch per weight and step
    compression.py   activations to 8, 4 or 2 bits and back, in one pass each
    losses.py        losses and gradients of a chunk of logits, in place
    launching.py     kernel launches
    arithmetic.py    operations that round the same on a GPU and in the interpreter
    compiling.py     compiles kernels without a GPU

Each replaces its readable version, with the same results:

    from memlab import kernels

    GPT(config, attention=kernels.flash_attention, loss=kernels.chunked_cross_entropy)
    kernels.Adam8bit(model.parameters())
    with kernels.compressed_activations(bits=8): ...

No other part of memlab imports this package; without Triton, importing it raises ImportError.
Without a GPU, set TRITON_INTERPRET=1 to run the kernels on a CPU, slowly.
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ImportError(
        "memlab.kernels needs Triton, which is not installed; install it (`pip install triton`, on "
        "Linux), or use memlab.attention, memlab.optim, memlab.compression and memlab.losses, "
        "which do the same without it"
    )

from memlab.kernels.attention import flash_attention
from memlab.kernels.compression import (
    compressed_activations,
    dequantize_affine,
    quantize_affine,
)
from memlab.kernels.losses import chunked_cross_entropy
from memlab.kernels.optim import Adam8bit, Lion8bit

__all__ = [
    "Adam8bit",
    "Lion8bit",
    "chunked_cross_entropy",
    "compressed_activations",
    "dequantize_affine",
    "flash_attention",
    "quantize_affine",
]
