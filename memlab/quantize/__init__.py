"""Quantization: fewer bits per element, and one scale per block of elements.

blockwise    8, 4 or 2 bits, for optimizer state and activations
nf4          4 bits per element of a frozen weight, as in QLoRA
codebooks    the dynamic codebook, and the lookup of the nearest entry
packing      several codes per byte
"""

from memlab.internals.sizes import nf4_bytes
from memlab.quantize.blockwise import Mode, Quantized, dequantize_blockwise, quantize_blockwise
from memlab.quantize.codebooks import dynamic_code, nearest_code, thresholds
from memlab.quantize.nf4 import (
    NF4,
    Codebooks,
    dequantize_nf4,
    nf4_code,
    nf4_codebooks,
    quantize_nf4,
)
from memlab.quantize.packing import pack, unpack

__all__ = [
    "NF4",
    "Codebooks",
    "Mode",
    "Quantized",
    "dequantize_blockwise",
    "dequantize_nf4",
    "dynamic_code",
    "nearest_code",
    "nf4_bytes",
    "nf4_code",
    "nf4_codebooks",
    "pack",
    "quantize_blockwise",
    "quantize_nf4",
    "thresholds",
    "unpack",
]
