"""The shape of a model, from what a person names it by: a preset, or a `config.json`.

    config_named("llama-3-8b")              a row of memlab.configs.shapes.PRESETS
    config_named("Qwen3-8B/config.json")    a file in Hugging Face's format, or the folder it is in

Such a file names a family in `model_type`, and the family says what the file leaves out: that Qwen2
has biases, that Gemma is tied. Read is what the bytes of a training step depend on, and nothing is
built. Left out is what makes the same tensors:

    a sliding window        masks scores that fused attention never stores
    rope_scaling            turns by other angles, of which there are as many
    query_pre_attn_scalar   scales the scores by another number
    torch_dtype, quantization_config    how the file's weights are stored: what trains is a
                            technique's to choose

and of Gemma 3 the second table of angles, for its layers with a window: seq_len·D numbers.

`seq_len` is `max_position_embeddings`: the longest sequence, and the rows of the table of angles.
`dataclasses.replace(config, seq_len=2048)` has the rows that a training on shorter ones needs.
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
MOST = 10**18  # of a count: what is more is a slip
ATTENTION = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Family:
    """What a `model_type` says of a shape beside the numbers of its file."""

    tied: bool = False  # where `tie_word_embeddings` is missing
    head_width: int | None = None  # where `head_dim` is missing; None: width / heads
    biases: tuple[str, ...] = ()  # always there
    optional_biases: tuple[str, ...] = ()  # there if `attention_bias` is true
    head_norms: bool = False
    post_norms: bool = False
    activation: str = "silu"  # where `hidden_act` and `hidden_activation` are missing
    scaled_embeddings: bool = False
    rope_theta: float = 10_000.0  # where it is missing


FAMILIES = {
    "llama": Family(optional_biases=ATTENTION),
    "mistral": Family(),
    "qwen2": Family(biases=("query", "key", "value")),
    "qwen3": Family(head_width=128, optional_biases=ATTENTION, head_norms=True),
    "gemma": Family(
        tied=True,
        head_width=256,
        optional_biases=ATTENTION,
        activation="gelu_tanh",
        scaled_embeddings=True,
    ),
    "gemma3_text": Family(
        tied=True,
        head_width=256,
        optional_biases=ATTENTION,
        head_norms=True,
        post_norms=True,
        activation="gelu_tanh",
        scaled_embeddings=True,
        rope_theta=1e6,
    ),
}

# Gemma's first files say "gelu" and mean its approximation by tanh; both keep the same bytes.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields that change the tensors of a step in a way that memlab.model has no part for.
FOREIGN = {
    "mlp_bias": "biases in the MLP",
    "attn_logit_softcapping": "caps on attention scores",
    "final_logit_softcapping": "caps on logits",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
}


def config_named(name: str) -> GPTConfig:
    """The shape of a preset, or of the `config.json` with this path or in this folder.

    ValueError, in one sentence, for a name that is neither, and for a file that describes no shape,
    or that of a model which memlab.model is not.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, FILE)):
            raise ValueError(f"got the folder {name!r} as a model; there is no {FILE} in it")
        return config_from(_read(os.path.join(path, FILE)), source=os.path.join(name, FILE))
    if os.path.isfile(path):
        return config_from(_read(path), source=name)
    near = get_close_matches(name.lower(), PRESETS, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"got model {name!r}; choose one of {', '.join(PRESETS)}{hint}, or give the path of a "
        f"{FILE}, as Hugging Face has it, that is there"
    )


def config_from(fields: object, *, source: str = FILE) -> GPTConfig:
    """The shape that the contents of a `config.json` describe; errors call them `source`."""
    file = _Fields(fields, source)
    family = file.family()
    file.refuse_foreign_parts()
    width, heads = file.count("hidden_size"), file.count("num_attention_heads")
    head_width = file.count("head_dim", family.head_width or width // heads)
    kv_heads = file.count("num_key_value_heads", heads)
    if head_width < 2 or head_width % 2:
        raise ValueError(
            f"{source} has heads of {head_width} numbers (its head_dim, or hidden_size {width} "
            f"over num_attention_heads {heads}); rotary positions turn pairs: wanted an even number"
        )
    if heads % kv_heads:
        raise ValueError(
            f"{source} has num_attention_heads {heads} and num_key_value_heads {kv_heads}; wanted "
            f"a number of key/value heads that divides the other"
        )
    biases = family.optional_biases if file.flag("attention_bias", False) else ()
    return GPTConfig(
        vocab_size=file.count("vocab_size"),
        width=width,
        layers=file.count("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        hidden=file.count("intermediate_size"),
        seq_len=file.count("max_position_embeddings"),
        tied=file.flag("tie_word_embeddings", family.tied),
        rope_theta=file.rope_theta(family.rope_theta),
        norm_eps=file.number("rms_norm_eps", 1e-6),
        own_head_width=None if head_width == width / heads else head_width,
        attention_biases=family.biases or biases,
        head_norms=family.head_norms,
        post_norms=family.post_norms,
        activation=file.activation(family.activation),
        scaled_embeddings=family.scaled_embeddings,
    )


def name_of(config: GPTConfig) -> str:
    """For printing: the preset's name if it is one, else "3.21B: 28 layers, 3072 wide"."""
    for name, preset in PRESETS.items():
        if preset == config:
            return name
    return f"{_rounded(config.parameters)}: {config.layers} layers, {config.width} wide"


def _rounded(count: int) -> str:
    """3_212_749_824 is "3.21B", 494_032_768 "494M"."""
    if count >= 999_500_000:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.0f}M" if count >= 999_500 else f"{count / 1e3:.0f}K"


def _read(path: str) -> object:
    """What the JSON in the file says."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); give a {FILE} that can"
        ) from error
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of a number without end
        raise ValueError(f"{path} is no JSON ({error}); give a model's {FILE}") from error


class _Fields:
    """The fields of a `config.json`, read one by one, each with an error of its own.

    A field that is null is as good as missing.
    """

    def __init__(self, fields: object, source: str) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"{source} holds {_shown(fields)}, wanted an object of fields")
        self.fields: dict[str, Any] = fields
        self.source = source

    def family(self) -> Family:
        name = self.fields.get("model_type")
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
        known = f"known are {', '.join(FAMILIES)}, and --script path.py:build plans any model"
        if name is None:
            raise ValueError(f"{self.source} has no model_type, which names the family; {known}")
        why = ""
        if name == "gemma2":  # fused attention has no caps: a plan would miss the scores
            why = ", and memlab.model has no caps on attention scores and logits"
        if "text_config" in self.fields:
            why = ", several models in one, a text model in its text_config"
        raise ValueError(f"{self.source} has model_type {_shown(name)}{why}; {known}")

    def refuse_foreign_parts(self) -> None:
        """For what changes the tensors of a step and has no part in memlab.model."""
        for name, part in FOREIGN.items():
            if self.fields.get(name):
                raise ValueError(
                    f"{self.source} has {name} {_shown(self.fields[name])}, and memlab.model has "
                    f"no {part}; --script path.py:build plans any model"
                )

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if self.fields.get(name) is not None:
            if type(value) is not int or value < 1:
                self._refuse(name, "a whole number from 1 on")
            if value > MOST:
                self._refuse(name, f"at most {MOST:,}")
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
        """It stands by itself, or in newer files among `rope_parameters`."""
        parameters = self.fields.get("rope_parameters")
        if "rope_theta" in self.fields or not isinstance(parameters, dict):
            return self.number("rope_theta", default)
        of_full = parameters.get("full_attention", parameters)  # Gemma 3 has two kinds of layers
        return _Fields(of_full, f"{self.source}, rope_parameters").number("rope_theta", default)

    def _value(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        if value is None and default is None:
            raise ValueError(f"{self.source} has no {name}; a shape needs it")
        return default if value is None else value

    def _refuse(self, name: str, wanted: str) -> None:
        raise ValueError(f"{self.source} has {name} {_shown(self.fields[name])}, wanted {wanted}")


def _shown(value: object) -> str:
    """As JSON writes it, and no longer than an error can be."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = "lists in lists"
    return text if len(text) <= 60 else f"{text[:57]}..."
