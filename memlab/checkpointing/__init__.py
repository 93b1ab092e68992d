"""Activation checkpointing: drop activations and recompute them in the backward pass."""

from memlab.checkpointing.costs import Chain, Costs, predicted_peak_bytes, recomputed
from memlab.checkpointing.execution import checkpoint_blocks
from memlab.checkpointing.operations import ATTENTION, MATMULS
from memlab.checkpointing.optimal import optimal_schedule, tradeoffs
from memlab.checkpointing.recompute import Checkpoint, CheckpointError, checkpoint
from memlab.checkpointing.schedules import plain_schedule, sqrt_schedule, uniform_schedule
from memlab.checkpointing.selection import best_within, operators_of, selective

__all__ = [
    "ATTENTION",
    "MATMULS",
    "Chain",
    "Checkpoint",
    "CheckpointError",
    "Costs",
    "best_within",
    "checkpoint",
    "checkpoint_blocks",
    "operators_of",
    "optimal_schedule",
    "plain_schedule",
    "predicted_peak_bytes",
    "recomputed",
    "selective",
    "sqrt_schedule",
    "tradeoffs",
    "uniform_schedule",
]
