"""Mixed-precision training: loss scaling for float16, float32 master weights, and FP8 matmuls."""

from memlab.precision.fp8 import FP8Linear, FP8Recipe, advance_scales, convert_to_fp8
from memlab.precision.master import MasterWeights
from memlab.precision.scaling import LossScaler

__all__ = [
    "FP8Linear",
    "FP8Recipe",
    "LossScaler",
    "MasterWeights",
    "advance_scales",
    "convert_to_fp8",
]
