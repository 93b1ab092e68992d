"""Optimizers with smaller state; each is a torch.optim.Optimizer, with its loop in base.py."""

from memlab.optim.adam8bit import Adam8bit
from memlab.optim.adam_mini import GPT_RULES, AdamMini, ByRules, gpt_partition, llama_partition
from memlab.optim.adamw import AdamW
from memlab.optim.apollo import Apollo
from memlab.optim.galore import GaLore
from memlab.optim.in_backward import InBackward, step_in_backward
from memlab.optim.lion import Lion, Lion8bit
from memlab.optim.matrices import matrix_groups
from memlab.optim.momentum import MomentumSGD
from memlab.optim.muon import Muon
from memlab.optim.rounded import RoundedAdamW

__all__ = [
    "GPT_RULES",
    "Adam8bit",
    "AdamMini",
    "AdamW",
    "Apollo",
    "ByRules",
    "GaLore",
    "InBackward",
    "Lion",
    "Lion8bit",
    "MomentumSGD",
    "Muon",
    "RoundedAdamW",
    "gpt_partition",
    "llama_partition",
    "matrix_groups",
    "step_in_backward",
]
