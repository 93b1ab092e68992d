"""Models and GPUs as plain data, without torch.

shapes        the shape of a model, and the presets
config_json   a shape from a preset's name or a Hugging Face `config.json`
targets       the classes of GPUs that a prediction knows, and the kernels that they choose
block_size    the block size of quantized tensors
"""

from typing import TYPE_CHECKING

from memlab.internals.lazy import lazily

if TYPE_CHECKING:
    from memlab.configs.config_json import config_named, name_of
    from memlab.configs.shapes import PRESETS, GPTConfig

_HOME_OF = {
    **dict.fromkeys(("config_named", "name_of"), "memlab.configs.config_json"),
    **dict.fromkeys(("PRESETS", "GPTConfig"), "memlab.configs.shapes"),
}
__all__ = ["PRESETS", "GPTConfig", "config_named", "name_of"]

__getattr__ = lazily(__name__, _HOME_OF)
