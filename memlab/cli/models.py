"""Resolve `--model`: a shape of memlab's own model, or a config that transformers builds.

This module does not import torch.
"""

import importlib.util
import os

from memlab.cli.errors import UsageError, quoted, require_known, suggestions
from memlab.configs.config_json import NoShapeHere, config_named
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.transformers_models.sources import Source, find_source

LIBRARIES = ("memlab", "transformers")
LIBRARY = (
    "Implementation of the model: memlab (Llama, Mistral, Qwen and Gemma) or transformers "
    "(any model it has). Default: memlab's if it has the model."
)


def choose_model(given: str, library: str | None = None) -> GPTConfig | Source:
    """Return a shape of memlab's model, or the config of any other model.

    A path, a folder, or an id in the local Hugging Face cache has a config.json.
    """
    require_known("--library", library, LIBRARIES)
    if given in PRESETS:
        if library == "transformers":
            raise UsageError(
                f"got --model {quoted(given)} with --library transformers; a preset is memlab's "
                f"own: give the path of a config.json, or an id on the Hugging Face Hub"
            )
        return PRESETS[given]
    source = _find(given)
    try:
        if library != "transformers":
            return config_named(source.path)
    except NoShapeHere as error:
        if library == "memlab":
            raise UsageError(f"got --model {quoted(given)}: {error}") from error
    except ValueError as error:
        raise UsageError(f"got --model {quoted(given)}: {error}") from error
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"got --model {quoted(given)}, which only transformers can build, and it is not "
            f"installed: pip install 'memlab[transformers]'"
        )
    return source


def _find(given: str) -> Source:
    if not (given.endswith(".json") or os.path.exists(os.path.expanduser(given)) or "/" in given):
        near = suggestions(given, PRESETS)
        raise UsageError(
            f"got --model {quoted(given)}; {near}, or the path of a config.json, or an id on the "
            f"Hugging Face Hub such as Qwen/Qwen2.5-7B"
        )
    try:
        return find_source(given)
    except ValueError as error:
        raise UsageError(f"got --model {quoted(given)}: {error}") from error
