"""Shapes from config.json: published files and their parameter counts, and bad input."""

import json
from dataclasses import replace

import pytest
import torch
from quick import together

from memlab.configs.config_json import FAMILIES, config_from, config_named, name_of
from memlab.model import GPT, PRESETS, GPTConfig

# The published config.json files, without the fields that no shape needs.
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_3_8B = LLAMA_2_7B | {
    "attention_bias": False,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_3_2_3B = LLAMA_3_8B | {
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "rope_scaling": {"factor": 32.0, "rope_type": "llama3"},
    "tie_word_embeddings": True,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_NEMO = MISTRAL_7B | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN_2_5_7B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_2_5_HALF_B = QWEN_2_5_7B | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN_3_8B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN_3_SMALLEST = QWEN_3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
GEMMA_7B = {
    "model_type": "gemma",
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
GEMMA_2B = GEMMA_7B | {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
}
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}

PUBLISHED = {  # Hugging Face's parameter counts; a tied matrix counts once
    "llama-2-7b": (LLAMA_2_7B, 6_738_415_616),
    "llama-3-8b": (LLAMA_3_8B, 8_030_261_248),
    "llama-3.2-3b": (LLAMA_3_2_3B, 3_212_749_824),
    "mistral-7b-v0.1": (MISTRAL_7B, 7_241_732_096),
    "mistral-nemo": (MISTRAL_NEMO, 12_247_782_400),
    "qwen2.5-7b": (QWEN_2_5_7B, 7_615_616_512),
    "qwen2.5-0.5b": (QWEN_2_5_HALF_B, 494_032_768),
    "qwen3-8b": (QWEN_3_8B, 8_190_735_360),
    "qwen3-0.6b": (QWEN_3_SMALLEST, 596_049_920),
    "gemma-7b": (GEMMA_7B, 8_537_680_896),
    "gemma-2b": (GEMMA_2B, 2_506_172_416),
    "gemma-3-1b": (GEMMA_3_1B, 999_885_952),
}
ONE_OF_EACH = {
    fields["model_type"]: fields
    for fields in (LLAMA_3_2_3B, MISTRAL_NEMO, QWEN_2_5_7B, QWEN_3_8B, GEMMA_2B, GEMMA_3_1B)
}
SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 70,
    "max_position_embeddings": 64,
}


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def written(folder, fields):
    path = folder / "config.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields), encoding="utf-8")
    return str(path)


# Shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_gives_the_published_parameter_count(name):
    fields, parameters = PUBLISHED[name]
    assert config_from(fields).parameters == parameters


@pytest.mark.few(5)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_formula_counts_a_built_models_parameters(name):
    fields, parameters = PUBLISHED[name]
    with torch.device("meta"):
        model = GPT(config_from(fields))
    assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_every_family_is_tested_with_a_published_file():
    assert set(ONE_OF_EACH) == set(FAMILIES)


@pytest.mark.parametrize(
    ("fields", "preset"), [(LLAMA_2_7B, "llama-2-7b"), (LLAMA_3_8B, "llama-3-8b")]
)
def test_a_presets_file_gives_the_preset(fields, preset):
    assert config_from(fields) == PRESETS[preset]


def test_each_field_of_a_file_is_read():
    assert config_from(GEMMA_3_1B) == GPTConfig(
        vocab_size=262144,
        hidden_size=1152,
        layers=26,
        heads=4,
        kv_heads=1,
        intermediate_size=6912,
        seq_len=32768,
        tied=True,
        rope_theta=1e6,
        norm_eps=1e-6,
        custom_head_dim=256,
        head_norms=True,
        post_norms=True,
        activation="gelu_tanh",
        scaled_embeddings=True,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_fields_take_the_familys_defaults(family):
    few = without(ONE_OF_EACH[family], "tie_word_embeddings", "num_key_value_heads", "head_dim")
    config = config_from(few)
    assert config.tied == family.startswith("gemma")
    assert config.kv_heads == config.heads
    of_family = {"qwen3": 128, "gemma": 256, "gemma3_text": 256}
    assert config.head_dim == of_family.get(family, config.hidden_size // config.heads)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ("query", "key", "value", "output")),
        ("mistral", ()),  # no biases, even if the file sets attention_bias
        ("qwen2", ("query", "key", "value")),
        ("qwen3", ("query", "key", "value", "output")),
        ("gemma", ("query", "key", "value", "output")),
    ],
)
def test_attention_bias_turns_on_the_familys_biases(family, names):
    config = config_from(ONE_OF_EACH[family] | {"attention_bias": True})
    assert config.attention_biases == names


def test_null_counts_as_missing():
    nulls = dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta", "attention_bias"))
    assert config_from(LLAMA_2_7B | nulls) == config_from(without(LLAMA_2_7B, *nulls))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_theta": 5e5, "rope_type": "default"},
        {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}},
    ],
)
def test_rope_theta_is_read_from_newer_files(parameters):
    fields = without(LLAMA_3_8B, "rope_theta") | {"rope_parameters": parameters}
    assert config_from(fields).rope_theta == 5e5


def test_sliding_windows_and_rope_scaling_change_nothing():
    plain = without(LLAMA_3_2_3B, "rope_scaling")
    assert config_from(LLAMA_3_2_3B) == config_from(plain | {"sliding_window": 16})


def test_reading_a_file_builds_no_model():
    deep = LLAMA_3_8B | {"num_hidden_layers": 10**12}
    assert config_from(deep).parameters > 10**20


# Transformers' own classes


@pytest.mark.parametrize("more", [{}, {"head_dim": 16}, {"head_dim": 16, "attention_bias": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_shape_has_as_many_parameters_as_in_transformers(family, more):
    transformers = pytest.importorskip("transformers")
    fields = {"model_type": family, **SMALL, **more}
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **SMALL, **more)
        )
    assert config_from(fields).parameters == sum(w.numel() for w in theirs.parameters())


# Names


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_name_gives_the_preset(name):
    assert config_named(name) is PRESETS[name]


def test_a_file_and_its_folder_give_the_same_shape(tmp_path):
    path = written(tmp_path, QWEN_3_8B)
    assert config_named(path) == config_named(str(tmp_path)) == config_from(QWEN_3_8B)


def test_a_path_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, QWEN_3_8B)
    assert config_named("~/config.json") == config_from(QWEN_3_8B)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_named_by_its_name(name):
    assert name_of(PRESETS[name]) == name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (config_from(LLAMA_3_2_3B), "3.21B: 28 layers, 3072 wide"),
        (config_from(QWEN_2_5_HALF_B), "494M: 24 layers, 896 wide"),
        (config_from(GEMMA_3_1B), "1.00B: 26 layers, 1152 wide"),
        (replace(PRESETS["tiny"], layers=2), "33K: 2 layers, 32 wide"),
    ],
)
def test_another_shape_is_named_by_its_size(config, name):
    assert name_of(config) == name


# Errors


def message_of(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (each caller checks the whole message)
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert not message.endswith(".")
    return message


@pytest.mark.parametrize(
    ("name", "nearest"), [("llama-3-8B-it", "llama-3-8b"), ("Llama-2-7b-hf", "llama-2-7b")]
)
def test_an_unknown_name_gets_the_nearest_and_how_to_give_a_file(name, nearest):
    message = message_of(config_named, name)
    assert message == (
        f"got model {name!r}; choose one of {', '.join(PRESETS)} (did you mean {nearest}?), "
        f"or give the path of an existing config.json in Hugging Face's format"
    )


@pytest.mark.parametrize("name", ["nonsense", "no/such/config.json", "", "\0", "x" * 5000])
def test_a_name_unlike_any_preset_gets_the_list(name):
    message = message_of(config_named, name)
    assert "did you mean" not in message
    assert "choose one of tiny, " in message


def test_a_folder_without_the_file_is_named(tmp_path):
    assert message_of(config_named, str(tmp_path)) == (
        f"got the folder {str(tmp_path)!r} as a model; it contains no config.json"
    )


@pytest.mark.parametrize(
    "text", ["", "{", "model: llama", "[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"]
)
def test_invalid_json_is_named(tmp_path, text):
    path = written(tmp_path, text)
    assert message_of(config_named, path).startswith(f"{path} is not valid JSON (")


def test_a_binary_file_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00\x80" * 10)
    assert message_of(config_named, str(path)).startswith(f"{path} is not valid JSON (")


@pytest.mark.parametrize("contents", [[LLAMA_2_7B], 7, "llama", None])
def test_json_that_is_not_an_object_is_named(tmp_path, contents):
    path = written(tmp_path, contents if not isinstance(contents, str) else f'"{contents}"')
    message = message_of(config_named, path)
    assert message.startswith(f"{path} holds ")
    assert message.endswith(", wanted a JSON object")
    assert len(message) < len(path) + 120


def test_without_a_model_type_the_families_are_named():
    assert message_of(config_from, without(LLAMA_2_7B, "model_type"), source="a.json") == (
        "a.json has no model_type, which names the family; known are llama, mistral, qwen2, "
        "qwen3, gemma, gemma3_text; --script path.py:build plans any model"
    )


@pytest.mark.parametrize("family", ["bert", "gpt2", "mamba", "mixtral", "Llama", 3, ["llama"]])
def test_an_unknown_family_is_refused_with_the_known_ones(family):
    message = message_of(config_from, LLAMA_2_7B | {"model_type": family})
    assert message.startswith(f"config.json has model_type {json.dumps(family)}; known are llama, ")
    assert message.endswith("--script path.py:build plans any model")


def test_gemma_2_is_refused_because_of_its_caps():
    message = message_of(config_from, GEMMA_7B | {"model_type": "gemma2"})
    assert '"gemma2", and memlab.model has no caps on attention scores and logits; ' in message


def test_a_multimodal_model_is_refused():
    message = message_of(config_from, {"model_type": "gemma3", "text_config": GEMMA_3_1B})
    assert (
        '"gemma3", which combines several models, with a text model in its text_config; ' in message
    )


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"mlp_bias": True}, "mlp_bias true, and memlab.model has no biases in the MLP"),
        ({"num_local_experts": 8}, "num_local_experts 8, and memlab.model has no experts"),
        ({"num_experts": 128}, "num_experts 128, and memlab.model has no experts"),
        ({"n_routed_experts": 64}, "n_routed_experts 64, and memlab.model has no experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0, and memlab.model"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0, and memlab.model"),
    ],
)
def test_unsupported_parts_are_refused(more, part):
    message = message_of(config_from, LLAMA_3_8B | more)
    assert part in message
    assert message.endswith("--script path.py:build plans any model")


NEEDED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings"),
)


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_field_is_named(name):
    wanted = f"config.json has no {name}, which a shape needs"
    assert message_of(config_from, without(LLAMA_3_8B, name)) == wanted
    assert message_of(config_from, LLAMA_3_8B | {name: None}) == wanted


@together("value", ["4096", -8, 0, 1.5, 4096.0, True, [1], {"a": 1}])
@together("name", [*NEEDED, "num_key_value_heads", "head_dim"])
def test_an_invalid_count_is_shown(name, value):
    assert message_of(config_from, LLAMA_3_8B | {name: value}) == (
        f"config.json has {name} {json.dumps(value)}, wanted an integer from 1"
    )


@pytest.mark.parametrize("value", ["1e-5", 0, -1.0, True, [], float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_an_invalid_number_is_shown(name, value):
    assert message_of(config_from, LLAMA_3_8B | {name: value}) == (
        f"config.json has {name} {json.dumps(value)}, wanted a number above 0"
    )


@pytest.mark.parametrize("value", ["true", 1, 0.0, []])
@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias"])
def test_an_invalid_flag_is_shown(name, value):
    assert message_of(config_from, LLAMA_3_8B | {name: value}) == (
        f"config.json has {name} {json.dumps(value)}, wanted true or false"
    )


@pytest.mark.parametrize("value", ["relu", 3, ["silu"], "x" * 500])
@pytest.mark.parametrize("name", ["hidden_act", "hidden_activation"])
def test_an_unsupported_activation_is_refused(name, value):
    message = message_of(config_from, LLAMA_3_8B | {name: value})
    assert message.startswith(f"config.json has {name} {json.dumps(value)[:20]}"[:60])
    assert message.endswith("wanted one of silu, swish, gelu, gelu_pytorch_tanh")
    assert len(message) < 160


@pytest.mark.parametrize(
    ("more", "rest"),
    [
        ({"num_key_value_heads": 5}, "num_attention_heads 32 and num_key_value_heads 5; wanted"),
        ({"num_key_value_heads": 64}, "num_attention_heads 32 and num_key_value_heads 64; wanted"),
        (
            {"head_dim": 127},
            "head_dim 127 (given, or hidden_size 4096 over num_att",
        ),
        ({"num_attention_heads": 4097}, "head_dim 0 (given, or hidden_size 4096 o"),
        ({"num_attention_heads": 4096}, "head_dim 1 (given, or hidden_size 4096 o"),
    ],
)
def test_inconsistent_fields_are_named(more, rest):
    few = (
        without(LLAMA_3_8B, "num_key_value_heads") if "num_attention_heads" in more else LLAMA_3_8B
    )
    assert message_of(config_from, few | more).startswith(f"config.json has {rest}")


def test_a_huge_count_is_refused_quickly():
    """It is refused before any loop over its divisors."""
    huge = {"num_attention_heads": 10**30, "num_key_value_heads": 7}
    assert message_of(config_from, LLAMA_3_8B | huge) == (
        f"config.json has num_attention_heads {10**30}, wanted at most {10**18:,}"
    )


def test_a_number_too_large_for_a_float_is_refused():
    message = message_of(config_from, LLAMA_3_8B | {"rms_norm_eps": 10**400})
    assert message.endswith("..., wanted a number above 0 that a float can hold")
