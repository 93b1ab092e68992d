"""DeepSpeed's configs are read as DeepSpeed reads them, and errors are one clear sentence."""

import json
from types import SimpleNamespace

import pytest

from memlab.configs.deepspeed import (
    _ALL,
    ACCUMULATION,
    FILLED,
    KEYS,
    MICRO,
    OPTIMIZER,
    PARAM,
    STAGE,
    UNCOUNTED,
    WITHOUT_EFFECT,
    ZERO,
    parse_deepspeed,
    read_deepspeed,
)

LIVE = "stage3_max_live_parameters"

# Two configs of a guide, as they stand there.
ON_CPU = """# DeepSpeed ZeRO-Offload
{
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": true
        },
        "offload_param": {
            "device": "cpu",
            "pin_memory": true
        }
    }
}
"""
ON_NVME = """# For even larger models
{
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme"
        }
    }
}
"""


def parsed(config=None, **settings):
    return parse_deepspeed(json.dumps(config or {}), **settings)


def zero(**keys):
    return {"zero_optimization": keys}


def test_a_guides_config_for_the_cpu_is_read_as_it_stands():
    config = parse_deepspeed(ON_CPU)
    assert config.stage == 3
    assert config.offloads(OPTIMIZER) == config.offloads(PARAM) == "cpu"
    assert config[f"{OPTIMIZER}.pin_memory"] is True
    assert not config.unknown


def test_a_guides_config_for_nvme_is_read_as_it_stands():
    config = parse_deepspeed(ON_NVME)
    assert config.offloads(OPTIMIZER) == "nvme"
    assert config.offloads(PARAM) == "none"
    assert config.without_effect == (f"{OPTIMIZER}.nvme_path",)
    assert any("trains in float32" in note for note in config.notes)


def test_no_key_is_in_two_lists():
    assert len(_ALL) == len({*KEYS, *WITHOUT_EFFECT, *UNCOUNTED})
    assert FILLED.keys() <= {*KEYS, *WITHOUT_EFFECT}


def test_defaults_are_of_their_kind():
    for path, key in KEYS.items():
        for value in (key.default, key.off):
            if value is not None and path != f"{ZERO}.mics_shard_size":
                given = parsed({MICRO: 1})
                assert given.with_value(path, value)[path] == value
                assert isinstance(
                    value, {"switch": bool, "count": int, "share": float}.get(key.kind, str)
                )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "line 1, column 1 is no JSON"),
        ('{"zero_optimization": {"stage": 3,}}', "is no JSON"),
        ("[1]", "a DeepSpeed config is an object"),
        ('{"bf16": {}, "bf16": {}}', "the key bf16 twice"),
        (zero(stage="3"), 'zero_optimization.stage = "3"; expected an integer from 0'),
        (zero(stage=True), "zero_optimization.stage = true; expected an integer"),
        (zero(stage=2.5), "expected an integer"),
        (zero(stage=4), "ZeRO has stages 0 to 3"),
        (zero(reduce_bucket_size=-1), "expected an integer from 0"),
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
        ({"bf16": {"bf16_optimizer_states": True}}, "without bf16.bf16_master_weights_and_grads"),
        ({"optimizer": {"type": "Adan"}}, "one of adam, adamw, lamb, lion, adagrad, sgd"),
        (
            {"train_batch_size": 32, MICRO: 2, ACCUMULATION: 4},
            "train_batch_size = 32, and train_micro_batch_size_per_gpu × "
            "gradient_accumulation_steps × GPUs = 2 × 4 × 8 = 64",
        ),
        ({"train_batch_size": 4, MICRO: 1}, "= 1 × 1 × 8 = 8"),
        ({MICRO: 0}, "above 0"),
    ],
)
def test_bad_configs_are_one_clear_sentence(config, words):
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(ValueError, match=r"got|is no JSON") as error:
        parse_deepspeed(text, gpus=8)
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


def test_the_batch_is_completed_as_deepspeed_does():
    def batch_of(gpus=8, batch=None, **config):
        found = parsed(config, gpus=gpus, batch=batch)
        return found.micro_batch, found.accumulation_steps

    assert batch_of(train_batch_size=64, **{MICRO: 2}) == (2, 4)
    assert batch_of(train_batch_size=64, **{ACCUMULATION: 4}) == (2, 4)
    assert batch_of(train_batch_size=64) == (8, 1)
    assert batch_of(**{MICRO: 3}) == (3, 1)
    assert batch_of(batch=5, **{MICRO: "auto", ACCUMULATION: "auto"}) == (5, 1)
    assert batch_of(batch=5, train_batch_size=80) == (5, 2)
    assert batch_of() == (1, 1)
    assert batch_of(tensor_parallel={"autotp_size": 4}, train_batch_size=64, **{MICRO: 2}) == (
        2,
        16,
    )
    with pytest.raises(ValueError, match=r"got --batch 4, and train_micro_batch_size_per_gpu = 2"):
        batch_of(batch=4, **{MICRO: 2})


def test_auto_is_what_transformers_fills():
    keys = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    config = parsed(zero(stage=3, **dict.fromkeys(keys, "auto")), hidden_size=4096)
    assert [config[f"{ZERO}.{key}"] for key in keys] == [16_777_216, 15_099_494, 40_960]
    assert sum("computes from the hidden size" in note for note in config.notes) == 3


def test_auto_is_filled_by_the_installed_transformers_in_the_same_way():
    integrations = pytest.importorskip("transformers.integrations.deepspeed")
    keys = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    asked = zero(stage=3, **dict.fromkeys(keys, "auto"))

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
    for key in keys:
        assert ours[f"{ZERO}.{key}"] == theirs.config["zero_optimization"][key]


def test_numbers_may_be_written_with_an_exponent():
    assert parsed(zero(reduce_bucket_size=5e8))[f"{ZERO}.reduce_bucket_size"] == 500_000_000


@pytest.mark.parametrize(
    ("config", "unknown"),
    [
        (zero(overlap_com=True), {f"{ZERO}.overlap_com": f"{ZERO}.overlap_comm"}),
        (zero(max_live_parameters=1), {f"{ZERO}.max_live_parameters": f"{ZERO}.{LIVE}"}),
        ({"zero_optimisation": {}}, {"zero_optimisation": "zero_optimization"}),
        ({"stage": 3}, {"stage": STAGE}),
        ({"xyzzy": 3}, {"xyzzy": ""}),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(config, unknown):
    assert parsed(config).unknown == unknown


def test_keys_without_effect_and_sections_that_are_not_counted_are_listed():
    config = parsed({"gradient_clipping": 1.0, "aio": {"block_size": 1}, "elasticity": {}})
    assert config.without_effect == ("gradient_clipping", "aio")
    assert config.uncounted == ("elasticity",)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (
            zero(stage=1, offload_param={"device": "cpu"}),
            f"{PARAM}.device has no effect in stage 1; it needs stage 3",
        ),
        (
            zero(stage=2, stage3_prefetch_bucket_size=1),
            "has no effect in stage 2; it needs stage 3",
        ),
        (
            zero(offload_optimizer={"device": "cpu"}),
            f"{OPTIMIZER}.device has no effect in stage 0; it needs stage 1 or 2 or 3",
        ),
        (
            zero(stage=3, offload_param={"pin_memory": False}),
            f"{PARAM}.pin_memory has no effect without {PARAM}.device",
        ),
        (
            zero(stage=3, offload_param={"device": "cpu", "buffer_size": 1e8}),
            f"{PARAM}.buffer_size has no effect with {PARAM}.device = cpu; it is for nvme",
        ),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            "without tensor parallelism",
        ),
    ],
)
def test_keys_that_another_key_switches_off_are_named(config, note):
    assert any(note in found for found in parsed(config).notes)


def test_a_device_without_effect_offloads_nothing():
    config = parsed(zero(stage=1, offload_param={"device": "cpu"}))
    assert config.offloads(PARAM) == "none"


def test_every_key_of_the_installed_deepspeed_is_known():
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    for name, field in zero_config.DeepSpeedZeroConfig.model_fields.items():
        path = f"{ZERO}.{field.alias or name}"
        known = {*_ALL, *(key.rpartition(".")[0] for key in _ALL)}
        assert path in known, path
        if path in KEYS and KEYS[path].default is not None and KEYS[path].kind != "share":
            theirs = field.default
            assert KEYS[path].default in (theirs, min(theirs, 2**62)), path
