"""DeepSpeed's configs are read as DeepSpeed reads them, and its bytes match ZeRO's paper and
DeepSpeed's documentation."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from memlab.model import GPT, PRESETS, GPTConfig
from memlab.planner.deepspeed import (
    KEYS,
    KNOWN,
    OTHERS,
    STAGE,
    STATE,
    WEIGHTS,
    ZERO,
    held,
    parse_deepspeed,
    read_deepspeed,
    tensor_sizes,
)
from memlab.zero import model_state_bytes

SEVEN_BILLION = PRESETS["llama-2-7b"]
SMALL = GPTConfig(8_192, 512, 5, 8, 2, 1_376, 1_024, tied=False)
PSI = SEVEN_BILLION.parameters
SHARD = -(-PSI // 8)
LARGEST = SEVEN_BILLION.vocab_size * SEVEN_BILLION.hidden_size
ON_CPU, ON_NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/local_nvme"}


def parsed(config=None, **settings):
    return parse_deepspeed(json.dumps(config or {}), **settings)


def zero(**keys):
    return {"zero_optimization": keys}


def parts_of(zero=None, *, model=SEVEN_BILLION, gpus=8, **others):
    """Return {part: its bytes} of a bfloat16 config whose buffers hold nothing."""
    quiet = {
        "reduce_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 10**12,
    }
    config = {"bf16": {"enabled": True}, **others, "zero_optimization": {**quiet, **(zero or {})}}
    found = {}
    for each in held(model, parsed(config), gpus=gpus):
        before = found.get(each.part, (0, 0, 0))
        more = (each.gpu, each.host, each.disk)
        found[each.part] = tuple(a + b for a, b in zip(before, more, strict=True))
    return found


def on_gpu(parts, *names):
    return sum(parts[name][0] for name in names if name in parts)


MODEL_STATES = ("weights", "gradients", "state")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_model_states_are_those_of_the_paper(stage, gpus):
    parts = parts_of({"stage": stage}, gpus=gpus)
    assert on_gpu(parts, *MODEL_STATES) == model_state_bytes(PSI, ranks=gpus, stage=stage)


def test_the_documented_estimate_of_zero_2_is_stage_1s():
    """The page "Memory Requirements" has 4·params + 16·params/GPUs for ZeRO-2, and 15.93 GB for
    T5-3B on 8 GPUs. Gradients are whole in it, so it is stage 1; stage 2 is 2 + 18/GPUs."""
    names = (*MODEL_STATES, "the step's gradients")
    of_stage = {stage: on_gpu(parts_of({"stage": stage}), *names) for stage in (1, 2)}
    assert of_stage == {1: 4 * PSI + 16 * SHARD, 2: 2 * PSI + 18 * SHARD}
    assert of_stage[1] / PSI * 2851e6 / 2**30 == pytest.approx(15.93, abs=0.005)


def test_the_documented_estimate_of_zero_2_with_offload_is_the_weights():
    parts = parts_of({"stage": 2, "offload_optimizer": ON_CPU})
    found = on_gpu(parts, *parts)
    assert found == 2 * PSI
    assert found / PSI * 2851e6 / 2**30 == pytest.approx(5.31, abs=0.005)


@pytest.mark.parametrize(
    ("offloaded", "sharded"),
    [
        ({}, 18),
        ({"offload_optimizer": ON_CPU}, 2),
        ({"offload_optimizer": ON_CPU, "offload_param": ON_CPU}, 0),
    ],
)
def test_the_documented_estimates_of_zero_3(offloaded, sharded):
    """The page has 4·largest layer, for its gathered weights and its gradient, plus 18, 2 or 0
    bytes per weight and GPU. It leaves out the 16-bit gradients beside the float32 ones."""
    parts = parts_of({"stage": 3, **offloaded})
    assert on_gpu(parts, "weights", "state", "the step's gradients") == sharded * SHARD
    assert on_gpu(parts, "gradients") == (0 if offloaded else 2 * SHARD)
    assert on_gpu(parts, "gathered weights") == 2 * LARGEST


@pytest.mark.parametrize(("param", "documented"), [(None, 16), (ON_CPU, 18)])
def test_the_host_holds_the_documented_bytes_and_the_summed_gradients(param, documented):
    more = {"offload_param": param} if param else {}
    parts = parts_of({"stage": 3, "offload_optimizer": ON_CPU, **more})
    assert sum(host for _, host, _ in parts.values()) == (documented + 2) * SHARD
    assert parts["gradients"] == (0, 2 * SHARD, 0)


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, tied=True, head_norms=True, post_norms=True, layers=2)]
)
def test_tensor_sizes_are_the_models(config):
    with torch.device("meta"):
        model = GPT(config)
    assert sorted(tensor_sizes(config)) == sorted(w.numel() for w in model.parameters())


def test_small_tensors_stay_whole_up_to_the_threshold():
    quiet = {"stage": 3, "stage3_param_persistence_threshold": 512}
    assert parts_of(quiet, model=SMALL)["weights left whole"][0] == 2 * (2 * 5 + 1) * 512
    below = {**quiet, "stage3_param_persistence_threshold": 511}
    assert "weights left whole" not in parts_of(below, model=SMALL)


def test_one_gpu_uses_its_weights_where_they_are():
    assert "gathered weights" not in parts_of({"stage": 3}, gpus=1)
    away = parts_of({"stage": 3, "offload_param": ON_CPU}, gpus=1)
    assert away["gathered weights"] == (2 * LARGEST, 0, 0)
    assert away["weights"] == (0, 2 * PSI, 0)


def test_overlap_doubles_the_bucket_in_stages_1_and_2_only():
    bucket = {"reduce_bucket_size": 5e8}
    for stage, buffers in ((1, 2), (2, 2), (3, 1)):
        parts = parts_of({"stage": stage, "overlap_comm": True, **bucket})
        assert parts["reduce buckets"] == (buffers * 2 * 500_000_000, 0, 0)
        parts = parts_of({"stage": stage, "overlap_comm": False, **bucket})
        assert parts["reduce buckets"] == (2 * 500_000_000, 0, 0)


def test_nvme_buffers_hold_sub_groups_and_the_disk_holds_the_state():
    parts = parts_of({"stage": 3, "offload_optimizer": ON_NVME, "sub_group_size": 1e8})
    assert parts["buffers for state"] == (0, 4 * 4 * 100_000_000, 0)
    assert parts["state"] == (0, 0, 12 * SHARD)
    assert parts["the step's gradients"] == (0, 0, 4 * SHARD)


def test_weights_on_nvme_stay_on_the_host_up_to_max_in_cpu():
    param = {**ON_NVME, "max_in_cpu": 1e8, "buffer_count": 3, "buffer_size": 2e8}
    parts = parts_of({"stage": 3, "offload_param": param})
    assert parts["weights"] == (0, 2 * 100_000_000, 2 * (SHARD - 100_000_000))
    assert parts["buffers for weights"] == (0, 2 * 3 * 200_000_000, 0)


@pytest.mark.parametrize(("steps", "held"), [(1, 0), (4, 2 * SHARD)])
def test_the_host_keeps_gradients_in_stage_2_between_micro_batches(steps, held):
    zero = {"stage": 2, "offload_optimizer": ON_CPU}
    parts = parts_of(zero, gradient_accumulation_steps=steps)
    assert parts.get("gradients", (0, 0, 0)) == (0, held, 0)
    assert parts["stepped weights"] == (0, 2 * SHARD, 0)


def test_a_share_of_the_state_stays():
    parts = parts_of({"stage": 3, "offload_optimizer": {**ON_CPU, "ratio": 0.25}})
    away = round(0.25 * 12 * SHARD)
    assert parts["state"] == (12 * SHARD - away, away, 0)


def test_mics_shards_within_a_group_and_refuses_one_that_does_not_divide():
    parts = parts_of({"stage": 3, "mics_shard_size": 4})
    assert parts["state"] == (12 * -(-PSI // 4), 0, 0)
    with pytest.raises(ValueError, match=r"mics_shard_size = 3, which does not divide 8"):
        parts_of({"stage": 3, "mics_shard_size": 3})


def test_a_copy_of_the_weights_exists_beside_float32_in_stages_1_and_2():
    def state(stage, **zero):
        parts = parts_of({"stage": stage, **zero}, gpus=1, bf16={"enabled": False})
        return sum(parts["state"]) // PSI

    assert [state(stage) for stage in range(4)] == [8, 12, 12, 8]
    assert state(3, offload_optimizer=ON_CPU) == 12


# ------------------------------------------------------------------ reading


def test_a_guides_config_is_read_as_it_stands():
    config = parse_deepspeed("""# For even larger models
    {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}
        }
    }""")
    assert (config.place(STATE), config.place(WEIGHTS)) == ("nvme", "none")
    assert config.uncounted == [f"{STATE}.nvme_path"]
    assert any("weights are in float32" in note for note in config.notes)


def test_no_key_is_in_two_lists_and_defaults_are_of_their_kind():
    assert not OTHERS & KEYS.keys()
    for key in KEYS.values():
        kind = key.kind if isinstance(key.kind, type) else str
        assert key.default is None or type(key.default) is kind


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "line 1, column 1 is no JSON"),
        ('{"zero_optimization": {"stage": 3,}}', "is no JSON"),
        ("[1]", "a DeepSpeed config is an object"),
        ("[" * 100_000, "nested too deeply"),
        (zero(stage="3"), 'zero_optimization.stage = "3"; expected an integer from 0'),
        (zero(stage=True), "zero_optimization.stage = true; expected an integer"),
        (zero(stage=2.5), "expected an integer"),
        (zero(stage=4), "ZeRO has stages 0 to 3"),
        (zero(reduce_bucket_size=-1), "expected an integer from 0"),
        ('{"zero_optimization": {"reduce_bucket_size": NaN}}', "expected an integer from 0"),
        (zero(overlap_comm=1), "overlap_comm = 1; expected true or false"),
        (zero(offload_optimizer={"device": "cpuu"}), "one of none, cpu, nvme; did you mean cpu?"),
        (zero(offload_optimizer="cpu"), 'offload_optimizer = "cpu"; give a section'),
        (zero(stage=3, sub_group_size="auto"), '"auto", which transformers does not fill'),
        (
            zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/a"}),
            "NVMe needs stage 3",
        ),
        (zero(stage=3, offload_param={"device": "nvme"}), "nvme without nvme_path"),
        (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "needs stage 3"),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "both bf16.enabled and fp16.enabled",
        ),
        ({"optimizer": {"type": "Adan"}}, "one of adam, adamw, lamb, lion, adagrad, sgd"),
    ],
)
def test_bad_configs_are_one_clear_sentence(config, words):
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(ValueError, match=r"got|is no JSON|nested") as error:
        parse_deepspeed(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_one_clear_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"reading .*none.json failed: No such file"):
        read_deepspeed(str(tmp_path / "none.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is no text in UTF-8"):
        read_deepspeed(str(tmp_path / "binary.json"))
    (tmp_path / "large.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        read_deepspeed(str(tmp_path / "large.json"))


AUTO = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)


def test_auto_is_filled_by_the_installed_transformers_in_the_same_way():
    integrations = pytest.importorskip("transformers.integrations.deepspeed")
    asked = zero(stage=3, **dict.fromkeys(AUTO, "auto"))

    class Theirs(integrations.HfTrainerDeepSpeedConfig):
        """With what its base class, accelerate's, adds."""

        def __init__(self):
            self.config, self.mismatches = json.loads(json.dumps(asked)), []

        def find_config_node(self, path):
            *sections, name = path.split(".")
            node = self.config
            for section in sections:
                node = node.get(section, {})
            return node, name

        def get_value(self, path):
            node, name = self.find_config_node(path)
            return node.get(name)

        def is_zero3(self):
            return True

    class Arguments:
        max_steps = 1

        def __getattr__(self, name):
            return lambda *args: 1

    model = SimpleNamespace(config=SimpleNamespace(hidden_size=512))
    theirs = Theirs()
    theirs.trainer_config_finalize(Arguments(), model, 10)
    ours = parsed(asked, hidden_size=512)
    for key in AUTO:
        assert ours[f"{ZERO}.{key}"] == theirs.config["zero_optimization"][key]


@pytest.mark.parametrize(
    ("config", "unknown"),
    [
        (
            zero(max_live_parameters=1),
            {f"{ZERO}.max_live_parameters": f"{ZERO}.stage3_max_live_parameters"},
        ),
        ({"xyzzy": 3}, {"xyzzy": ""}),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(config, unknown):
    assert parsed(config).unknown == unknown


@pytest.mark.parametrize(
    ("config", "typed", "does", "meant"),
    [
        (zero(overlap_com=True), f"{ZERO}.overlap_com", "refuses", f"{ZERO}.overlap_comm"),
        ({"zero_optimisation": {}}, "zero_optimisation", "ignores", ZERO),
        ({"stage": 3}, "stage", "ignores", STAGE),
    ],
)
def test_a_mistyped_key_is_refused(config, typed, does, meant):
    said = f"got the key {typed}, which DeepSpeed {does}; did you mean {meant}\\?"
    with pytest.raises(ValueError, match=said):
        parsed(config)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_keys_that_have_an_effect_in_the_stage_are_said_to_decide(stage):
    config = parsed(zero(stage=stage, sub_group_size=10**6))
    keys = {path for part in held(PRESETS["tiny"], config, gpus=2) for path in part.keys}
    assert all(stage in KEYS[path].stages for path in keys)
    assert (f"{ZERO}.sub_group_size" in keys) == (stage == 3)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (
            zero(stage=1, offload_param={"device": "cpu"}),
            f"{WEIGHTS}.device has no effect in stage 1; it needs stage 3",
        ),
        (
            zero(stage=2, stage3_prefetch_bucket_size=1),
            "has no effect in stage 2; it needs stage 3",
        ),
        (
            zero(offload_optimizer={"device": "cpu"}),
            f"{STATE}.device has no effect in stage 0; it needs stage 1 or 2 or 3",
        ),
        (
            zero(stage=3, offload_param={"buffer_count": 2}),
            f"{WEIGHTS}.buffer_count has no effect without {WEIGHTS}.device",
        ),
    ],
)
def test_keys_that_another_key_switches_off_are_named(config, note):
    assert any(note in found for found in parsed(config).notes)


def test_every_key_of_the_installed_deepspeed_is_known():
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    sections = {key.rpartition(".")[0] for key in KNOWN}
    for name, field in zero_config.DeepSpeedZeroConfig.model_fields.items():
        path = f"{ZERO}.{field.alias or name}"
        assert path in {*KNOWN, *sections}, path
        if path in KEYS and KEYS[path].default is not None:
            assert KEYS[path].default == field.default, path
