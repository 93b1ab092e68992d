"""Models and GPUs as plain data. This package does not import torch.

shapes        the shape of a model, and the presets
config_json   a shape from a preset's name or a Hugging Face `config.json`
targets       the classes of GPUs that predictions support, and the kernels they run
"""

from memlab.configs.config_json import config_named, name_of
from memlab.configs.shapes import PRESETS, GPTConfig

__all__ = ["PRESETS", "GPTConfig", "config_named", "name_of"]
