"""Attention: written to be read, and by tiles that never meet in memory.

tiling.py      which query sees which key, and which tiles have to be visited: plain data
reference.py   by way of the whole score matrix: what every other form is held against
flash.py       by tiles, forward and backward, with the numbers of a row corrected as it goes
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
