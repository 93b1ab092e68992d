"""Read the shape of a model from a preset's name or a Hugging Face `config.json`.

    config_named("llama-3-8b")              a row of memlab.configs.shapes.PRESETS
    config_named("Qwen3-8B/config.json")    a file in Hugging Face's format, or its folder

The file's `model_type` names a family, which supplies the facts that the file leaves out, such as
Qwen2's biases and Gemma's tied embeddings. Only fields that change the bytes of a training step are
read, and no model is built. These fields are ignored, because the tensors stay the same:

    a sliding window        masks scores that fused attention never stores
    rope_scaling            changes the rotary angles, not their number
    query_pre_attn_scalar   changes the scale of the scores
    torch_dtype, quantization_config    how the file's weights are stored; a technique decides the
                            dtype in training

Gemma 3's second table of angles (seq_len·D elements, for its sliding window layers) is left out.

`seq_len` is `max_position_embeddings`: the longest sequence and the rows of the table of angles.
Use `dataclasses.replace(config, seq_len=2048)` to count the rows for shorter sequences.
"""

import json
import math
import os
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from memlab.configs.shapes import PRESETS, GPTConfig

FILE = "config.json"
MAX_COUNT = 10**18  # a larger count is a typo
ATTENTION = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Family:
    """The facts that a `model_type` implies and its file leaves out."""

    tied: bool = False  # default of `tie_word_embeddings`
    head_dim: int | None = None  # default of `head_dim`; None: hidden_size / heads
    biases: tuple[str, ...] = ()  # always present
    optional_biases: tuple[str, ...] = ()  # present if `attention_bias` is true
    head_norms: bool = False
    post_norms: bool = False
    activation: str = "silu"  # default of `hidden_act` and `hidden_activation`
    scaled_embeddings: bool = False
    rope_theta: float = 10_000.0  # default


FAMILIES = {
    "llama": Family(optional_biases=ATTENTION),
    "mistral": Family(),
    "qwen2": Family(biases=("query", "key", "value")),
    "qwen3": Family(head_dim=128, optional_biases=ATTENTION, head_norms=True),
    "gemma": Family(
        tied=True,
        head_dim=256,
        optional_biases=ATTENTION,
        activation="gelu_tanh",
        scaled_embeddings=True,
    ),
    "gemma3_text": Family(
        tied=True,
        head_dim=256,
        optional_biases=ATTENTION,
        head_norms=True,
        post_norms=True,
        activation="gelu_tanh",
        scaled_embeddings=True,
        rope_theta=1e6,
    ),
}

# Gemma's first files say "gelu" and mean its tanh approximation; both save the same bytes.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields that change a step's tensors and that memlab.model does not support.
UNSUPPORTED = {
    "mlp_bias": "biases in the MLP",
    "attn_logit_softcapping": "caps on attention scores",
    "final_logit_softcapping": "caps on logits",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
}


class NoShapeHere(ValueError):  # noqa: N818 - describes the file
    """The model is not one of memlab.model's; transformers may know it."""


def config_named(name: str) -> GPTConfig:
    """Return the shape of a preset, or of the `config.json` at this path or in this folder.

    Raises NoShapeHere, in one sentence, for any other name, and for a model that memlab.model does
    not support; ValueError for a file with a missing or wrong field.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, FILE)):
            raise ValueError(f"got the folder {name!r} as a model; it contains no {FILE}")
        return config_from(read_json(os.path.join(path, FILE)), source=os.path.join(name, FILE))
    if os.path.isfile(path):
        return config_from(read_json(path), source=name)
    near = get_close_matches(name.lower(), PRESETS, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise NoShapeHere(
        f"got model {name!r}; choose one of {', '.join(PRESETS)}{hint}, or give the path of an "
        f"existing {FILE} in Hugging Face's format"
    )


def config_from(fields: object, *, source: str = FILE) -> GPTConfig:
    """Return the shape that a `config.json` describes. Errors name it as `source`."""
    file = _Fields(fields, source)
    family = file.family()
    file.refuse_unsupported()
    hidden_size, heads = file.count("hidden_size"), file.count("num_attention_heads")
    head_dim = file.count("head_dim", family.head_dim or hidden_size // heads)
    kv_heads = file.count("num_key_value_heads", heads)
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"{source} has head_dim {head_dim} (given, or hidden_size {hidden_size} over "
            f"num_attention_heads {heads}); rotary embeddings rotate pairs: wanted an even integer"
        )
    if heads % kv_heads:
        raise ValueError(
            f"{source} has num_attention_heads {heads} and num_key_value_heads {kv_heads}; wanted "
            f"a number of key/value heads that divides the number of heads"
        )
    biases = family.optional_biases if file.flag("attention_bias", False) else ()
    return GPTConfig(
        vocab_size=file.count("vocab_size"),
        hidden_size=hidden_size,
        layers=file.count("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=file.count("intermediate_size"),
        seq_len=file.count("max_position_embeddings"),
        tied=file.flag("tie_word_embeddings", family.tied),
        rope_theta=file.rope_theta(family.rope_theta),
        norm_eps=file.number("rms_norm_eps", 1e-6),
        custom_head_dim=None if head_dim == hidden_size / heads else head_dim,
        attention_biases=family.biases or biases,
        head_norms=family.head_norms,
        post_norms=family.post_norms,
        activation=file.activation(family.activation),
        scaled_embeddings=family.scaled_embeddings,
    )


def name_of(config: GPTConfig) -> str:
    """Return the preset's name, or a description such as "3.21B: 28 layers, 3072 wide"."""
    for name, preset in PRESETS.items():
        if preset == config:
            return name
    return f"{_rounded(config.parameters)}: {config.layers} layers, {config.hidden_size} wide"


def _rounded(count: int) -> str:
    """Format 3_212_749_824 as "3.21B" and 494_032_768 as "494M"."""
    if count >= 999_500_000:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.0f}M" if count >= 999_500 else f"{count / 1e3:.0f}K"


def read_json(path: str) -> object:
    """Load a JSON file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); give a readable {FILE}"
        ) from error
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or an endless number
        raise ValueError(f"{path} is not valid JSON ({error}); give a model's {FILE}") from error


class _Fields:
    """Reads and checks the fields of a `config.json`.

    A null field counts as missing.
    """

    def __init__(self, fields: object, source: str) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"{source} holds {_shown(fields)}, wanted a JSON object")
        self.fields: dict[str, Any] = fields
        self.source = source

    def family(self) -> Family:
        name = self.fields.get("model_type")
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
        known = f"known are {', '.join(FAMILIES)}; --script path.py:build plans any model"
        if name is None:
            raise ValueError(f"{self.source} has no model_type, which names the family; {known}")
        why = ""
        if name == "gemma2":  # caps rule out fused attention: a plan would omit the scores
            why = ", and memlab.model has no caps on attention scores and logits"
        if "text_config" in self.fields:
            why = ", which combines several models, with a text model in its text_config"
        raise NoShapeHere(f"{self.source} has model_type {_shown(name)}{why}; {known}")

    def refuse_unsupported(self) -> None:
        """Raise ValueError for fields that memlab.model does not support."""
        for name, part in UNSUPPORTED.items():
            if self.fields.get(name):
                raise NoShapeHere(
                    f"{self.source} has {name} {_shown(self.fields[name])}, and memlab.model has "
                    f"no {part}; --script path.py:build plans any model"
                )

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if self.fields.get(name) is not None:
            if type(value) is not int or value < 1:
                self._refuse(name, "an integer from 1")
            if value > MAX_COUNT:
                self._refuse(name, f"at most {MAX_COUNT:,}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self._refuse(name, "a number above 0")
        if value > sys.float_info.max:
            self._refuse(name, "a number above 0 that a float can hold")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            self._refuse(name, "true or false")
        return value

    def activation(self, default: str) -> str:
        name = "hidden_activation" if self.fields.get("hidden_activation") else "hidden_act"
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self._refuse(name, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def rope_theta(self, default: float) -> float:
        """Read rope_theta, which newer files keep in `rope_parameters`."""
        parameters = self.fields.get("rope_parameters")
        if "rope_theta" in self.fields or not isinstance(parameters, dict):
            return self.number("rope_theta", default)
        full = parameters.get("full_attention", parameters)  # Gemma 3 has two kinds of layers
        return _Fields(full, f"{self.source}, rope_parameters").number("rope_theta", default)

    def _value(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        if value is None and default is None:
            raise ValueError(f"{self.source} has no {name}, which a shape needs")
        return default if value is None else value

    def _refuse(self, name: str, wanted: str) -> None:
        raise ValueError(f"{self.source} has {name} {_shown(self.fields[name])}, wanted {wanted}")


def _shown(value: object) -> str:
    """Format a value as JSON, shortened for an error message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "nested lists"
    return text if len(text) <= 60 else f"{text[:57]}..."
