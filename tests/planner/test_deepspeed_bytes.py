"""DeepSpeed's bytes by formula match ZeRO's paper and DeepSpeed's documentation."""

import json
from dataclasses import replace

import pytest

from memlab.configs.deepspeed import KEYS, STAGE, UNLIMITED, ZERO, parse_deepspeed
from memlab.model import GPT, PRESETS, GPTConfig
from memlab.planner.deepspeed import DeepSpeedStep, effects, recipe_of, tensor_sizes
from memlab.planner.formulas import training_bytes
from memlab.zero import model_state_bytes

SEVEN_BILLION = PRESETS["llama-2-7b"]
SMALL = GPTConfig(8_192, 512, 5, 8, 2, 1_376, 1_024, tied=False)
PSI = SEVEN_BILLION.parameters
LARGEST = SEVEN_BILLION.vocab_size * SEVEN_BILLION.hidden_size
ON_CPU, ON_NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/local_nvme"}


def step_of(zero=None, *, model=SEVEN_BILLION, gpus=8, seq_len=2048, **others):
    """Return the step of a bfloat16 config whose buffers hold nothing."""
    quiet = {
        "reduce_bucket_size": 0,
        "stage3_max_live_parameters": 0,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": UNLIMITED,
    }
    config = {"bf16": {"enabled": True}, **others, "zero_optimization": {**quiet, **(zero or {})}}
    parsed = parse_deepspeed(json.dumps(config), gpus=gpus)
    return DeepSpeedStep(model, parsed, seq_len=seq_len, gpus=gpus)


def states(step, moment, *names):
    terms = step.moments[moment]
    return sum(terms.get(name, 0) for name in names)


ALL_STATES = ("weights", "gradients", "optimizer_state")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_model_states_are_those_of_the_paper(stage, gpus):
    step = step_of({"stage": stage}, gpus=gpus)
    expected = model_state_bytes(PSI, ranks=gpus, stage=stage)
    assert states(step, "optimizer", *ALL_STATES) == expected


def gigabytes_of_t5(stage_or_zero):
    """The optimizer step of 2,851M weights on 8 GPUs, in the unit that DeepSpeed prints as GB."""
    step = step_of(stage_or_zero)
    count = states(step, "optimizer", *ALL_STATES, "step_gradients")
    return count / PSI * 2851e6 / 2**30


def test_the_documented_estimate_of_zero_2_is_stage_1s():
    """The page "Memory Requirements" has 4·params + 16·params/GPUs for ZeRO-2, and 15.93 GB for
    T5-3B on 8 GPUs. Gradients are whole in it, so it is stage 1; stage 2 is 2 + 18/GPUs."""
    assert states(step_of({"stage": 1}), "optimizer", *ALL_STATES, "step_gradients") == 4 * PSI + (
        16 * -(-PSI // 8)
    )
    assert gigabytes_of_t5({"stage": 1}) == pytest.approx(15.93, abs=0.005)
    assert gigabytes_of_t5({"stage": 2}) == pytest.approx((2 + 18 / 8) * 2851e6 / 2**30, abs=1e-6)


def test_the_documented_estimate_of_zero_2_with_offload_is_the_weights():
    step = step_of({"stage": 2, "offload_optimizer": ON_CPU})
    assert states(step, "optimizer", *ALL_STATES, "step_gradients") == 2 * PSI
    assert gigabytes_of_t5({"stage": 2, "offload_optimizer": ON_CPU}) == pytest.approx(
        5.31, abs=0.005
    )


@pytest.mark.parametrize(
    ("zero", "sharded"),
    [
        ({}, 18),
        ({"offload_optimizer": ON_CPU}, 2),
        ({"offload_optimizer": ON_CPU, "offload_param": ON_CPU}, 0),
    ],
)
def test_the_documented_estimates_of_zero_3(zero, sharded):
    """The page has 4·largest layer, for its gathered weights and its gradient, plus 18, 2 or 0
    bytes per weight and GPU. It leaves out the 16-bit gradients beside the float32 ones."""
    step = step_of({"stage": 3, **zero})
    of_shard = states(step, "optimizer", "weights", "optimizer_state", "step_gradients")
    assert of_shard == sharded * -(-PSI // 8)
    assert states(step, "optimizer", "gradients") == (0 if zero else 2 * -(-PSI // 8))
    assert states(step, "backward", "gathered_weights", "layer_gradient") == 4 * LARGEST


@pytest.mark.parametrize(("param", "documented"), [(None, 16), (ON_CPU, 18)])
def test_the_host_holds_the_documented_bytes_and_the_summed_gradients(param, documented):
    zero = {"stage": 3, "offload_optimizer": ON_CPU}
    step = step_of({**zero, **({"offload_param": param} if param else {})})
    shard = -(-PSI // 8)
    assert step.host_bytes - step.host["gradients"] == documented * shard
    assert step.host["gradients"] == 2 * shard
    assert step.host_bytes * 8 <= 1.5 * documented * PSI  # the page's allowance for buffers


def test_activations_are_those_of_the_planner():
    step = step_of({"stage": 0}, model=SMALL, gpus=1, seq_len=512, activation_checkpointing={})
    recipe = recipe_of(step.config)
    assert recipe.checkpointing == "checkpointing"
    estimate = training_bytes(SMALL, recipe, 1, 512)
    for moment, terms in estimate.moments.items():
        for name in ("blocks_kept", "ends_kept", "loss_temporaries", "block_temporaries", "inputs"):
            assert step.moments[moment].get(name, 0) == terms.get(name, 0), (moment, name)


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, tied=True, head_norms=True, post_norms=True, layers=2)],
)
def test_tensor_sizes_are_the_models(config):
    import torch

    with torch.device("meta"):
        model = GPT(config)
    assert sorted(tensor_sizes(config)) == sorted(w.numel() for w in model.parameters())


def test_small_tensors_stay_whole_up_to_the_threshold():
    quiet = {"stage": 3, "stage3_param_persistence_threshold": 512}
    assert step_of(quiet, model=SMALL, seq_len=64).persistent == (2 * 5 + 1) * 512
    below = {**quiet, "stage3_param_persistence_threshold": 511}
    assert step_of(below, model=SMALL, seq_len=64).persistent == 0


def test_one_gpu_uses_its_weights_where_they_are():
    assert "gathered_weights" not in step_of({"stage": 3}, gpus=1).terms
    away = step_of({"stage": 3, "offload_param": ON_CPU}, gpus=1)
    assert away.terms["gathered_weights"] == 2 * LARGEST
    assert "weights" not in away.terms


def test_overlap_doubles_the_bucket_in_stages_1_and_2_only():
    bucket = {"reduce_bucket_size": 5e8}
    for stage, buffers in ((1, 2), (2, 2), (3, 1)):
        step = step_of({"stage": stage, "overlap_comm": True, **bucket})
        assert step.moments["backward"]["reduce_bucket"] == buffers * 2 * 500_000_000
        without = step_of({"stage": stage, "overlap_comm": False, **bucket})
        assert without.moments["backward"]["reduce_bucket"] == 2 * 500_000_000


def test_nvme_buffers_hold_sub_groups_and_the_disk_holds_the_state():
    zero = {"stage": 3, "offload_optimizer": ON_NVME, "sub_group_size": 1e8}
    step = step_of(zero)
    shard = -(-PSI // 8)
    assert step.host["swap_buffers"] == 4 * 4 * 100_000_000
    assert step.disk == {"optimizer_state": 12 * shard, "step_gradients": 4 * shard}


def test_weights_on_nvme_stay_on_the_host_up_to_max_in_cpu():
    param = {**ON_NVME, "max_in_cpu": 1e8, "buffer_count": 3, "buffer_size": 2e8}
    step = step_of({"stage": 3, "offload_param": param})
    shard = -(-PSI // 8)
    assert step.host == {"weights": 2 * 100_000_000, "weight_buffers": 2 * 3 * 200_000_000}
    assert step.disk == {"weights": 2 * (shard - 100_000_000)}


def test_block_inputs_wait_on_the_host():
    section = {"cpu_checkpointing": True}
    step = step_of({"stage": 1}, activation_checkpointing=section)
    kept = step_of({"stage": 1}, activation_checkpointing={})
    inputs = 2048 * 4096 * 2 * 32
    assert kept.moments["loss"]["blocks_kept"] == inputs
    assert step.moments["loss"]["blocks_kept"] == inputs // 32
    assert step.host["block_inputs"] == inputs


def test_mics_shards_within_a_group_and_refuses_one_that_does_not_divide():
    step = step_of({"stage": 3, "mics_shard_size": 4})
    assert step.moments["optimizer"]["optimizer_state"] == 12 * -(-PSI // 4)
    with pytest.raises(ValueError, match=r"mics_shard_size = 3, which does not divide 8"):
        step_of({"stage": 3, "mics_shard_size": 3})


def test_a_copy_of_the_weights_exists_beside_float32_in_stages_1_and_2():
    def state(stage, **zero):
        step = step_of({"stage": stage, **zero}, bf16={"enabled": False})
        return step.state_size

    assert [state(stage) for stage in range(4)] == [8, 12, 12, 8]
    assert state(3, offload_optimizer=ON_CPU) == 12


@pytest.mark.parametrize("path", KEYS)
def test_no_key_changes_bytes_when_it_is_off(path):
    """The report's comparison of a key with its off value is empty when the key is off."""
    config = parse_deepspeed('{"zero_optimization": {"stage": 3}}', gpus=8)
    off = KEYS[path].off
    step = DeepSpeedStep(SMALL, config.with_value(path, off), seq_len=64, gpus=8)
    found = {effect.path: effect for effect in effects(step)}
    assert path not in found or not found[path].changes


def test_effects_are_the_keys_of_the_file_and_the_defaults_that_change_bytes():
    step = step_of({"stage": 2, "overlap_comm": True}, train_micro_batch_size_per_gpu=2)
    found = {effect.path: effect for effect in effects(step)}
    assert found[STAGE].is_given
    assert f"{ZERO}.contiguous_gradients" not in found  # the bucket has no elements
    assert f"{ZERO}.stage3_max_live_parameters" in found  # given by step_of
    assert f"{ZERO}.stage3_max_reuse_distance" not in found
    assert found["optimizer.type"].peak == (8 - 4) * -(-PSI // 8)
