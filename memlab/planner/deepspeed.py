"""What a DeepSpeed training holds, by formula, and the keys of its config that decide it.

    config = read_deepspeed("ds_config.json", hidden_size=4096)
    config["zero_optimization.stage"]                the value, or DeepSpeed's default
    held(PRESETS["llama-2-7b"], config, gpus=8)      the parts, in bytes of one GPU's process

Ψ weights, S GPUs that share a copy of them (all, unless mics_shard_size is set), w bytes per weight
(2 in 16 bits, else 4), and K bytes of state: float32 copies and moments.

    part                   bytes                                   moves to the host with
    weights                w·Ψ, in stage 3 w·Ψ/S                   offload_param
    gathered weights       w·min(Ψ, max_live), stage 3
    weights left whole     w·P of tensors up to the threshold, stage 3
    second shard           w·Ψ/zero_hpz_partition_size, stage 3
    gradients              w·Ψ, from stage 2 on w·Ψ/S              offload_optimizer
    stepped weights        w·Ψ/S on the host, in stages 1 and 2 with offload_optimizer
    reduce buckets         w·reduce_bucket_size, twice with overlap_comm in stages 1 and 2
    state                  K·Ψ, from stage 1 on K·Ψ/S              offload_optimizer
    the step's gradients   4·Ψ/S in float32, in stage 3 of a sub-group

They do not all exist at the same moment: buckets and gathered weights in forward and backward, the
step's gradients in the step. Activations depend on the model; `memlab run` predicts them.

memlab does not run DeepSpeed. Tests compare these formulas with those of ZeRO's paper and with the
estimates in DeepSpeed's documentation, which count no buckets and no gathered weights.

DeepSpeed reads Hjson: lines that begin with # or // are comments. The other extensions of Hjson are
not read. transformers fills "auto" from its TrainingArguments.

Source   Rajbhandari et al. 2020, arXiv 1910.02054 (stages); Ren et al. 2021, 2101.06840 (offload to
         the CPU); Rajbhandari et al. 2021, 2104.07857 (NVMe); Wang et al. 2023, 2306.10209 (ZeRO++:
         hpz); DeepSpeed's pages "Memory Requirements" and "Configuration", and the docstrings of
         its config classes, version 0.19.6; transformers 5.23, `HfTrainerDeepSpeedConfig`.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from memlab.configs.shapes import GPTConfig
from memlab.planner.formulas import layer_shapes

MAX_BYTES = 2**20  # of a file; a config has a few kB
TYPO = 0.85  # a name this similar to a known one is mistyped
ZERO = "zero_optimization"
STATE, WEIGHTS = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
STAGE = f"{ZERO}.stage"
_STEPS = "gradient_accumulation_steps"
_ACCUMULATED = "data_types.grad_accum_dtype"
_IN_16_BITS = "bf16.bf16_master_weights_and_grads"
# Optimizer state in bytes per weight, in float32. SGD: with momentum.
STATE_BYTES = {"adam": 8, "adamw": 8, "lamb": 8, "lion": 4, "adagrad": 4, "sgd": 4}
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_DEVICES = ("none", "cpu", "nvme")


class Key(NamedTuple):
    """A key that changes the bytes of a part: its kind or its words, DeepSpeed's default, and the
    stages of ZeRO where it has an effect."""

    kind: type | tuple[str, ...]
    default: Any
    stages: tuple[int, ...] = (0, 1, 2, 3)


KEYS = {
    "optimizer.type": Key(tuple(STATE_BYTES), "adamw"),
    "bf16.enabled": Key(bool, False),
    "fp16.enabled": Key(bool, False),
    _IN_16_BITS: Key(bool, False, (1, 2, 3)),
    "bf16.bf16_optimizer_states": Key(bool, False, (1, 2, 3)),
    _ACCUMULATED: Key(tuple(DTYPE_BYTES), None),
    _STEPS: Key(int, 1),
    STAGE: Key(int, 0),
    f"{ZERO}.contiguous_gradients": Key(bool, True, (1, 2, 3)),
    f"{ZERO}.reduce_bucket_size": Key(int, 500_000_000, (1, 2, 3)),
    f"{ZERO}.overlap_comm": Key(bool, None, (1, 2, 3)),  # on by default in stage 3
    f"{ZERO}.sub_group_size": Key(int, 1_000_000_000, (3,)),
    f"{ZERO}.stage3_max_live_parameters": Key(int, 1_000_000_000, (3,)),
    f"{ZERO}.stage3_max_reuse_distance": Key(int, 1_000_000_000, (3,)),
    f"{ZERO}.stage3_prefetch_bucket_size": Key(int, 50_000_000, (3,)),
    f"{ZERO}.stage3_param_persistence_threshold": Key(int, 100_000, (3,)),
    f"{ZERO}.zero_hpz_partition_size": Key(int, 1, (3,)),
    f"{ZERO}.mics_shard_size": Key(int, -1, (3,)),
    f"{STATE}.device": Key(_DEVICES, "none", (1, 2, 3)),
    f"{STATE}.ratio": Key(float, 1.0, (3,)),
    f"{STATE}.buffer_count": Key(int, 4, (3,)),
    f"{WEIGHTS}.device": Key(_DEVICES, "none", (3,)),
    f"{WEIGHTS}.buffer_count": Key(int, 5, (3,)),
    f"{WEIGHTS}.buffer_size": Key(int, 100_000_000, (3,)),
    f"{WEIGHTS}.max_in_cpu": Key(int, 1_000_000_000, (3,)),
}
# Keys and sections that change none of the parts, or that memlab does not count.
_OTHERS = """
amp autotuning communication_data_type compile compression_training curriculum_learning
data_efficiency eigenvalue elasticity expert_parallel graph_harvesting hybrid_engine pipeline
progressive_layer_drop sparse_attention sparse_gradients sequence_parallel_size nebula bfloat16
seq_parallel_communication_data_type weight_quantization tensor_parallel activation_checkpointing
train_micro_batch_size_per_gpu train_batch_size torch_autocast
gradient_clipping prescale_gradients gradient_predivide_factor steps_per_print scheduler
wall_clock_breakdown memory_breakdown dump_state disable_allgather tensorboard wandb csv_monitor
comet comms_logger flops_profiler logging checkpoint aio gradient_allreduce_op log_level seed
managed_gradient_accumulation zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
dataloader_drop_last vocabulary_size max_grad_norm use_data_before_expert_parallelism
data_types.param_dtype data_types.buffer_dtype
optimizer.params optimizer.legacy_fusion bf16.immediate_grad_update bf16.check_grad_overflow
fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.hysteresis fp16.loss_scale_window
fp16.min_loss_scale fp16.consecutive_hysteresis fp16.fp16_master_weights_and_grads
""".split()  # noqa: SIM905 - a list of words
_OTHERS_OF_ZERO = """
allgather_bucket_size allgather_partitions reduce_scatter use_multi_rank_bucket_allreduce
load_from_fp32_weights elastic_checkpoint leaf_module ignore_unused_parameters
round_robin_gradients stage3_gather_16bit_weights_on_model_save
stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params pipeline_loading_checkpoint
override_module_apply log_trace_cache_warnings enable_sanity_checks grad_hooks
memory_efficient_linear legacy_stage1 mics_hierarchical_params_gather zenflow zeropp_loco_param
zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights
save_muon_momentum_buffer_in_memory cpu_offload cpu_offload_param cpu_offload_use_pin_memory
stage3_model_persistence_threshold offload_optimizer.nvme_path offload_optimizer.pipeline_read
offload_optimizer.pipeline_write offload_optimizer.fast_init offload_optimizer.pin_memory
offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc offload_param.nvme_path
offload_param.pin_memory
""".split()  # noqa: SIM905
OTHERS = frozenset([*_OTHERS, *(f"{ZERO}.{name}" for name in _OTHERS_OF_ZERO)])
KNOWN = (*KEYS, *sorted(OTHERS))
_SECTIONS = {path.rpartition(".")[0] for path in KNOWN if "." in path}


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A config that DeepSpeed accepts.

    values     of KEYS in the file, by path
    uncounted  other keys of DeepSpeed in the file
    unknown    keys that DeepSpeed does not have, each with the nearest one, or ""
    notes      assumptions and keys without effect, a sentence each
    """

    values: dict[str, Any] = field(default_factory=dict)
    uncounted: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, path: str) -> Any:
        return self.values.get(path, KEYS[path].default)

    @property
    def is_16_bit(self) -> bool:
        return self["bf16.enabled"] or self["fp16.enabled"]

    def place(self, part: str) -> str:
        """Return where STATE or WEIGHTS are kept: "none" (on the GPU), "cpu" or "nvme"."""
        device = self[f"{part}.device"]
        return device if self[STAGE] in KEYS[f"{part}.device"].stages else "none"


# ------------------------------------------------------------------ reading


def read_deepspeed(path: str, *, hidden_size: int = 1) -> DeepSpeedConfig:
    """Read the file. Raises ValueError with one sentence; see `parse_deepspeed`."""
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise ValueError(f"got {path} of more than 1 MiB; give DeepSpeed's JSON config")
        with open(path, encoding="utf-8") as file:
            return parse_deepspeed(file.read(), hidden_size=hidden_size)
    except OSError as error:
        raise ValueError(f"reading {path} failed: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8; give DeepSpeed's JSON config") from error


def parse_deepspeed(text: str, *, hidden_size: int = 1) -> DeepSpeedConfig:
    """Parse a config. `hidden_size` is what transformers computes values of "auto" from.

    Raises ValueError for text other than a JSON object, a value of the wrong type, an "auto" that
    transformers does not fill, values that make DeepSpeed stop, and mistyped keys.
    """
    lines = text.lstrip("\ufeff").splitlines()
    plain = "\n".join("" if line.lstrip().startswith(("#", "//")) else line for line in lines)
    try:
        content = json.loads(plain)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {error.lineno}, column {error.colno} is no JSON ({error.msg}); give DeepSpeed's "
            f'config, such as {{"zero_optimization": {{"stage": 3}}}}'
        ) from error
    except RecursionError as error:
        raise ValueError("the sections are nested too deeply for a DeepSpeed config") from error
    if not isinstance(content, dict):
        raise ValueError(f"got {_shown(content)}; a DeepSpeed config is an object, {{…}}")
    config = DeepSpeedConfig()
    _read_section(config, "", content, hidden_size)
    _require_accepted(config)
    config.notes.extend(_without_effect(config))
    return config


def _read_section(
    config: DeepSpeedConfig, section: str, content: Mapping[str, Any], hidden_size: int
) -> None:
    for name, value in content.items():
        path = f"{section}.{name}" if section else name
        if path in KEYS:
            value = _filled(config, path, hidden_size) if value == "auto" else value
            if value is not None:
                config.values[path] = _checked(path, value)
        elif path in _SECTIONS:
            if value in (None, False):  # DeepSpeed's "off" of a section
                continue
            if not isinstance(value, dict):
                raise ValueError(f"got {path} = {_shown(value)}; give a section, {{…}}")
            _read_section(config, path, value, hidden_size)
        elif path in OTHERS:
            config.uncounted.append(path)
        else:
            config.unknown[path] = _nearest(path, section)


def _filled(config: DeepSpeedConfig, path: str, hidden_size: int) -> Any:
    """Return what transformers fills in for "auto"."""
    sizes = {
        f"{ZERO}.reduce_bucket_size": hidden_size**2,
        f"{ZERO}.stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        f"{ZERO}.stage3_param_persistence_threshold": 10 * hidden_size,
    }
    switches = {"bf16.enabled": True, "fp16.enabled": False}
    if path in sizes:
        config.notes.append(f'{path} = "auto": {sizes[path]:,}, from the hidden size')
    elif path == _STEPS:
        config.notes.append(f'{path} = "auto": assumed 1')
        return 1
    elif path in switches:
        config.notes.append(f'{path} = "auto": assumed {"on" if switches[path] else "off"}')
    else:
        raise ValueError(
            f'got {path} = "auto", which transformers does not fill; give a value, or leave the '
            f"key out"
        )
    return {**sizes, **switches}[path]


def _checked(path: str, value: Any) -> Any:
    """Return the value, as an int where a count is written as 5e8."""
    kind = KEYS[path].kind
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif kind is float:
        if is_number and 0 <= value <= 1:
            return float(value)
        wanted = "a number from 0 to 1"
    elif kind is int:
        lowest = min(0, KEYS[path].default)  # -1 is mics_shard_size's default
        if is_number and lowest <= value < 2**62 and value == int(value):
            return int(value)
        wanted = "an integer from 0, such as 1 or 5e8"
    else:
        assert isinstance(kind, tuple)
        if isinstance(value, str) and value.lower() in kind:
            return value.lower()
        near = get_close_matches(str(value).lower(), kind, n=1)
        wanted = f"one of {', '.join(kind)}" + (f"; did you mean {near[0]}?" if near else "")
    raise ValueError(f"got {path} = {_shown(value)}; expected {wanted}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _nearest(path: str, section: str) -> str:
    """Return the most similar known key, of the same section if one is similar there."""
    name = path.rpartition(".")[2]
    for known in ([k for k in KNOWN if k.rpartition(".")[0] == section], [*KNOWN, *_SECTIONS]):
        names = {k.rpartition(".")[2]: k for k in known}
        if near := get_close_matches(name, names, n=1, cutoff=0.6 if known[0] in names else 0.7):
            return names[near[0]]
    return ""


def _require_accepted(config: DeepSpeedConfig) -> None:
    """Raise ValueError for what DeepSpeed raises an error for, and for a mistyped key."""
    stage = config[STAGE]
    problems = {
        f"got {STAGE} = {stage}; ZeRO has stages 0 to 3": stage not in range(4),
        "got both bf16.enabled and fp16.enabled; DeepSpeed takes one of them": (
            config["bf16.enabled"] and config["fp16.enabled"]
        ),
        f"got {STATE}.device = nvme with {STAGE} = {stage}; NVMe needs stage 3": (
            config[f"{STATE}.device"] == "nvme" and stage != 3
        ),
        f"got {STATE}.ratio with {STAGE} = {stage}; a partial offload needs stage 3": (
            config[f"{STATE}.ratio"] < 1 and stage != 3
        ),
        **{
            f'got {part}.device = nvme without nvme_path; add "nvme_path": "/local_nvme"': (
                config[f"{part}.device"] == "nvme" and f"{part}.nvme_path" not in config.uncounted
            )
            for part in (STATE, WEIGHTS)
        },
    }
    for complaint, is_true in problems.items():
        if is_true:
            raise ValueError(complaint)
    for path, near in config.unknown.items():
        name, known = (key.rpartition(".")[2] for key in (path, near))
        if get_close_matches(name, [known], cutoff=TYPO):  # else of another version, or one's own
            does = "refuses" if "." in path else "ignores"
            raise ValueError(f"got the key {path}, which DeepSpeed {does}; did you mean {near}?")


def _without_effect(config: DeepSpeedConfig) -> Iterator[str]:
    """Yield a note for each given key that another key switches off."""
    stage = config[STAGE]
    for path, value in config.values.items():
        section, _, name = path.rpartition(".")
        if stage not in KEYS[path].stages and value != KEYS[path].default:
            wanted = " or ".join(map(str, KEYS[path].stages))
            yield f"{path} has no effect in stage {stage}; it needs stage {wanted}"
        elif section in (STATE, WEIGHTS) and name != "device" and config.place(section) == "none":
            yield f"{path} has no effect without {section}.device"
    if not config.is_16_bit:
        yield (
            "neither bf16 nor fp16 is enabled, so the weights are in float32; add "
            '"bf16": {"enabled": true} for 16-bit weights'
        )


# ------------------------------------------------------------------ the parts


class Held(NamedTuple):
    """A part of the training: its bytes on the GPU, on the host and on NVMe, and its keys."""

    part: str
    gpu: int
    host: int
    disk: int
    keys: tuple[str, ...]


def held(model: GPTConfig, config: DeepSpeedConfig, *, gpus: int = 1) -> list[Held]:
    """Return the parts that hold bytes in one GPU's process.

    Raises ValueError if mics_shard_size does not divide the number of GPUs.
    """
    group = config[f"{ZERO}.mics_shard_size"]
    group = group if config[STAGE] == 3 and group > 0 else gpus
    if gpus % group:
        raise ValueError(
            f"got {ZERO}.mics_shard_size = {group}, which does not divide {gpus} GPUs; give a "
            f"divisor"
        )
    shard = -(-model.parameters // group)
    parts = (*_weights(model, config, shard, group), *_gradients(model, config, shard))
    parts = (*parts, *_state(model, config, shard))
    stage = config[STAGE]
    return [
        each._replace(keys=tuple(path for path in each.keys if stage in KEYS[path].stages))
        for each in parts
        if each.gpu or each.host or each.disk
    ]


def tensor_sizes(model: GPTConfig) -> Iterator[int]:
    """Yield the number of elements of each weight tensor of the model."""
    biases = [model.attention_sizes[name] for name in model.attention_biases]
    head_norms = 2 * [model.head_dim] * model.head_norms
    norms = (4 if model.post_norms else 2) * [model.hidden_size]
    matrices = [inputs * outputs for inputs, outputs in layer_shapes(model).values()]
    for _ in range(model.layers):
        yield from (*matrices, *norms, *head_norms, *biases)
    yield from (1 if model.tied else 2) * [model.vocab_size * model.hidden_size]
    yield model.hidden_size


def _weights(model: GPTConfig, config: DeepSpeedConfig, shard: int, group: int) -> Iterator[Held]:
    size, place = 2 if config.is_16_bit else 4, config.place(WEIGHTS)
    keys: tuple[str, ...] = ("bf16.enabled", "fp16.enabled", STAGE)
    if config[STAGE] < 3 or (group == 1 and place == "none"):  # used where they are
        yield Held("weights", size * model.parameters, 0, 0, keys)
        return
    keys = (*keys, f"{WEIGHTS}.device", f"{ZERO}.mics_shard_size")
    if place == "none":
        yield Held("weights", size * shard, 0, 0, keys)
    elif place == "cpu":
        yield Held("weights", 0, size * shard, 0, keys)
    else:
        kept = min(shard, config[f"{WEIGHTS}.max_in_cpu"])
        keys = (*keys, f"{WEIGHTS}.max_in_cpu")
        yield Held("weights", 0, size * kept, size * (shard - kept), keys)
        names = (f"{WEIGHTS}.buffer_count", f"{WEIGHTS}.buffer_size")
        yield Held("buffers for weights", 0, size * config[names[0]] * config[names[1]], 0, names)
    # At least the running layer's; prefetched and soon reused ones within max_live.
    largest = max(tensor_sizes(model))
    live = min(config[_LIVE], largest + max(config[path] for path in _AHEAD))
    gathered = min(model.parameters, max(largest, live))
    yield Held("gathered weights", size * gathered, 0, 0, (_LIVE, *_AHEAD))
    threshold = f"{ZERO}.stage3_param_persistence_threshold"
    small = sum(each for each in tensor_sizes(model) if each <= config[threshold])
    yield Held("weights left whole", size * small, 0, 0, (threshold,))
    second = f"{ZERO}.zero_hpz_partition_size"
    if config[second] > 1:
        yield Held("second shard", size * -(-model.parameters // config[second]), 0, 0, (second,))


_LIVE = f"{ZERO}.stage3_max_live_parameters"
_AHEAD = (f"{ZERO}.stage3_prefetch_bucket_size", f"{ZERO}.stage3_max_reuse_distance")


def _gradients(model: GPTConfig, config: DeepSpeedConfig, shard: int) -> Iterator[Held]:
    size, stage = 2 if config.is_16_bit else 4, config[STAGE]
    summed = DTYPE_BYTES.get(config[_ACCUMULATED], size)
    keys = (STAGE, _ACCUMULATED, f"{STATE}.device")
    if config.place(STATE) != "none":
        if stage < 3:
            yield Held("stepped weights", 0, size * shard, 0, (STAGE, f"{STATE}.device"))
        if stage == 3 or config[_STEPS] > 1:  # else they go straight to the step's
            yield Held("gradients", 0, summed * shard, 0, (*keys, _STEPS))
    else:
        yield Held("gradients", summed * (shard if stage > 1 else model.parameters), 0, 0, keys)
    overlap, bucket, copied = (
        f"{ZERO}.{name}" for name in ("overlap_comm", "reduce_bucket_size", "contiguous_gradients")
    )
    if stage and config[copied]:
        buffers = 2 if config[overlap] and stage < 3 else 1
        bytes_of_all = buffers * size * config[bucket]
        yield Held("reduce buckets", bytes_of_all, 0, 0, (bucket, overlap, copied))


def _state(model: GPTConfig, config: DeepSpeedConfig, shard: int) -> Iterator[Held]:
    stage, place = config[STAGE], config.place(STATE)
    stepped = shard if stage else model.parameters
    group = min(stepped, max(1, config[f"{ZERO}.sub_group_size"])) if stage == 3 else stepped
    away = config[f"{STATE}.ratio"] if place != "none" else 0.0
    keys: tuple[str, ...] = (
        "optimizer.type",
        STAGE,
        _IN_16_BITS,
        "bf16.bf16_optimizer_states",
        f"{STATE}.device",
    )
    yield _placed("state", (_copy(config) + _moments(config)) * stepped, away, place, keys)
    size = 2 if config[_IN_16_BITS] else 4
    keys = (STAGE, f"{STATE}.device")
    if away < 1:
        here = round((1 - away) * size * group)
        yield Held("the step's gradients", here, 0, 0, (*keys, f"{ZERO}.sub_group_size"))
    if away:
        yield _placed("the step's gradients", round(away * size * stepped), 1.0, place, keys)
    if place == "nvme":
        count = f"{STATE}.buffer_count"
        names = (count, f"{ZERO}.sub_group_size")
        yield Held("buffers for state", 0, 4 * config[count] * group, 0, names)


def _placed(part: str, count: int, away: float, place: str, keys: tuple[str, ...]) -> Held:
    """Return a part of which a share is away, on the host or on NVMe."""
    left = round(away * count)
    return Held(part, count - left, left * (place == "cpu"), left * (place == "nvme"), keys)


def _copy(config: DeepSpeedConfig) -> int:
    """Return the bytes of the optimizer's copy of a weight; 0 if it steps the weight itself."""
    if config[_IN_16_BITS]:
        return 2
    stage, stays = config[STAGE], config.place(STATE) == "none"
    return 0 if not config.is_16_bit and (not stage or (stage == 3 and stays)) else 4


def _moments(config: DeepSpeedConfig) -> int:
    """Return the bytes of the optimizer's moments per weight."""
    in_float32 = STATE_BYTES[config["optimizer.type"]]
    return in_float32 // 2 if config["bf16.bf16_optimizer_states"] else in_float32
