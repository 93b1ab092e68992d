"""The shape of a model, from what a person names it by: a preset, or a `config.json`."""

from memlab.model import PRESETS, GPTConfig


def config_named(name: str) -> GPTConfig:
    """The shape of the preset of this name; ValueError for one that is not known."""
    if name not in PRESETS:
        raise ValueError(f"got model {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
