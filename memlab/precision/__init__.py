"""Training in half the bits: what float16 needs, and what bfloat16 does not."""

from memlab.precision.master import MasterWeights
from memlab.precision.scaling import LossScaler

__all__ = ["LossScaler", "MasterWeights"]
