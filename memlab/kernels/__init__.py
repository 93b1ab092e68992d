"""Techniques as kernels of a GPU, in Triton: what the readable versions cost is had back.

attention.py     flash attention, forward and backward
optim.py         8-bit Adam and 8-bit Lion, a step of a weight in one launch
compression.py   activations to 8, 4 or 2 bits and back, one pass over the numbers each
losses.py        a chunk's losses and gradients, from its logits, in place
launching.py     how a kernel is started
arithmetic.py    what they reckon with, rounded alike on a GPU and in the interpreter
compiling.py     what the compiler makes of a kernel, for a GPU that is not there

Each is chosen from outside, in the place of its readable twin, and does the same:

    from memlab import kernels

    GPT(config, attention=kernels.flash_attention, loss=kernels.chunked_cross_entropy)
    kernels.Adam8bit(model.parameters())
    with kernels.compressed_activations(bits=8): ...

Nothing else in memlab imports this: without Triton, importing it is an ImportError. Without a GPU,
TRITON_INTERPRET=1 in the environment has the kernels run on a CPU, slowly.
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ImportError(
        "memlab.kernels needs Triton, and there is none; install it (`pip install triton`, on "
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
