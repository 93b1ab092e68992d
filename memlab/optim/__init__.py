"""Optimizers whose state takes fewer bytes; each is torch's Optimizer with one loop, in base.py."""

from memlab.optim.adam8bit import Adam8bit
from memlab.optim.adamw import AdamW
from memlab.optim.lion import Lion, Lion8bit

__all__ = ["Adam8bit", "AdamW", "Lion", "Lion8bit"]
