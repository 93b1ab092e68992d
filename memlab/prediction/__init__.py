"""Predict a training step's memory on a GPU, on a machine without one."""

from memlab.configs.targets import Kernels
from memlab.prediction.cuda import PredictedRun, predict

__all__ = ["Kernels", "PredictedRun", "predict"]
