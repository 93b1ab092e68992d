"""Dry runs: training steps on fake tensors, which have a size but use no memory."""

from memlab.dry_runs.fake_tensors import dry_run

__all__ = ["dry_run"]
