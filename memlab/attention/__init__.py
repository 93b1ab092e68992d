"""Attention: a readable reference and a tiled version that never stores the score matrix.

tiling.py      the mask as plain data: visible keys per query, and tiles to visit
reference.py   attention with the full score matrix, the oracle for all other versions
flash.py       tiled forward and backward passes with an online softmax
package_interface.py    the same with the arguments of the flash-attn package's flash_attn_func
"""

from memlab.attention.flash import flash_attention
from memlab.attention.reference import attention_reference, repeat_heads
from memlab.attention.tiling import Alignment, Band, Kind, Tile, Window, band, tiles

__all__ = [
    "Alignment",
    "Band",
    "Kind",
    "Tile",
    "Window",
    "attention_reference",
    "band",
    "flash_attention",
    "repeat_heads",
    "tiles",
]
