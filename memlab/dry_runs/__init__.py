"""Dry runs: a training step on fake tensors, which have a size in bytes and take no memory."""

from memlab.dry_runs.fake_tensors import dry_run

__all__ = ["dry_run"]
