"""Predictions: the memory of a training step on a GPU, from a dry run on a machine without one."""

from memlab.configs.targets import Kernels
from memlab.prediction.cuda import predict

__all__ = ["Kernels", "predict"]
