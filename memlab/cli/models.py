"""Resolve `--model`: a shape of memlab's own model, or a config that transformers builds.

This module does not import torch.
"""

import importlib.util
import os

from memlab.cli.errors import UsageError, quoted, suggestions
from memlab.configs.config_json import NoShapeHere, config_named
from memlab.configs.shapes import PRESETS, GPTConfig
from memlab.transformers_models.sources import Source, find_source

MAX_LAYERS = 10_000  # a dry run goes through every layer: more layers take hours
MAX_ELEMENTS = 2**59  # the largest tensor whose bytes torch can still count
LIBRARIES = ("memlab", "transformers")
LIBRARY = (
    "Implementation of the model: memlab (Llama, Mistral, Qwen and Gemma) or transformers "
    "(any model it has). Default: memlab's if it has the model."
)


def choose_model(given: str, library: str | None = None) -> GPTConfig | Source:
    """Return a shape of memlab's model, or the config of any other model.

    A path, a folder, or an id in the local Hugging Face cache has a config.json.
    """
    if library is not None and library not in LIBRARIES:
        raise UsageError(f"got --library {quoted(library)}; {suggestions(library, LIBRARIES)}")
    if given in PRESETS:
        if library == "transformers":
            raise UsageError(
                f"got --model {quoted(given)} with --library transformers; a preset is memlab's "
                f"own: give the path of a config.json, or an id on the Hugging Face Hub"
            )
        return PRESETS[given]
    try:
        if library == "transformers":
            raise NoShapeHere
        return config_named(given if _is_path(given) else _find(given).path)
    except NoShapeHere as error:
        if library == "memlab":
            raise UsageError(f"got --model {quoted(given)}: {error}") from error
        return _for_transformers(given)
    except ValueError as error:
        raise UsageError(f"got --model {quoted(given)}: {error}") from error


def _for_transformers(given: str) -> Source:
    source = _find(given)
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"got --model {quoted(given)}, which only transformers can build, and it is not "
            f"installed: pip install 'memlab[transformers]'"
        )
    return source


def _find(given: str) -> Source:
    if not (_is_path(given) or "/" in given):
        near = suggestions(given, PRESETS)
        raise UsageError(
            f"got --model {quoted(given)}; {near}, or the path of a config.json, or an id on the "
            f"Hugging Face Hub such as Qwen/Qwen2.5-7B"
        )
    try:
        return find_source(given)
    except ValueError as error:
        raise UsageError(f"got --model {quoted(given)}: {error}") from error


def _is_path(given: str) -> bool:
    return given.endswith(".json") or os.path.exists(os.path.expanduser(given))


def require_countable(config: GPTConfig, batch: int, seq_len: int) -> None:
    """Limit the depth, which a dry run must walk, and the tensors, whose bytes torch must count."""
    if config.layers > MAX_LAYERS:
        raise UsageError(
            f"got a model of {config.layers:,} layers; give one of at most {MAX_LAYERS:,}"
        )
    tokens = batch * seq_len
    attention = config.heads * config.head_dim
    rows = max(config.hidden_size, tokens)
    columns = max(config.vocab_size, config.intermediate_size, attention)
    largest = max(rows * columns, batch * config.heads * seq_len**2)
    if largest > MAX_ELEMENTS:
        raise UsageError(
            f"got a tensor of {largest:.1e} elements, from this model with {batch:,} × {seq_len:,} "
            f"tokens; torch counts up to {MAX_ELEMENTS:.1e}: give a smaller model or batch"
        )
