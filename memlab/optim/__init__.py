"""Optimizers with smaller state; each is a torch.optim.Optimizer, with its loop in base.py."""

from memlab.optim.adam8bit import Adam8bit
from memlab.optim.adam_mini import GPT_RULES, AdamMini, ByRules, gpt_partition, llama_partition
from memlab.optim.adamw import AdamW
from memlab.optim.in_backward import InBackward, step_in_backward
from memlab.optim.lion import Lion, Lion8bit
from memlab.optim.momentum import MomentumSGD
from memlab.optim.rounded import RoundedAdamW

__all__ = [
    "GPT_RULES",
    "Adam8bit",
    "AdamMini",
    "AdamW",
    "ByRules",
    "InBackward",
    "Lion",
    "Lion8bit",
    "MomentumSGD",
    "RoundedAdamW",
    "gpt_partition",
    "llama_partition",
    "step_in_backward",
]
