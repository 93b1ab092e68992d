"""Mixed-precision training: loss scaling for float16, and float32 master weights."""

from memlab.precision.master import MasterWeights
from memlab.precision.scaling import LossScaler

__all__ = ["LossScaler", "MasterWeights"]
