"""Read DeepSpeed's JSON config: its keys, their types, and which of them contradict each other.

    config = read_deepspeed("ds_config.json")
    config["zero_optimization.stage"]        the value, or DeepSpeed's default
    config.given                             the keys in the file
    config.unknown                           keys that DeepSpeed does not have, with the nearest one

KEYS has every key that changes the bytes of a training step: what it may be, its default, the value
that turns it off, and a sentence. WITHOUT_EFFECT has the keys that change no bytes. UNCOUNTED has
sections that may change them, and that memlab does not count.

DeepSpeed reads Hjson: lines that begin with # or // are comments. The other extensions of Hjson are
not read. transformers fills "auto" from its TrainingArguments; FILLED says with what.

Source   DeepSpeed's page "DeepSpeed Configuration JSON" and the docstrings of its config classes,
         version 0.19.6; transformers 5.23, `HfTrainerDeepSpeedConfig`, for "auto".
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

AUTO = "auto"
UNLIMITED = 2**62  # elements: more than any model has
MAX_BYTES = 2**20  # of a file; a config has a few kB
ZERO, OPTIMIZER, PARAM = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)
STAGE = f"{ZERO}.stage"
MICRO, ACCUMULATION, TRAIN_BATCH = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
CHECKPOINTING = "activation_checkpointing"  # as a key: whether the section is in the file
DEVICES = ("none", "cpu", "nvme")
DTYPES = ("fp32", "fp16", "bf16")
# Optimizer state in bytes per weight, in float32. SGD: with momentum.
STATE_BYTES = {"adam": 8, "adamw": 8, "lamb": 8, "lion": 4, "adagrad": 4, "sgd": 4}


@dataclass(frozen=True)
class Key:
    """A key that changes bytes.

    kind      "switch", "count" (an integer from 0; 5e8 is one), "share" (0 to 1), or the words
    default   DeepSpeed's
    off       the value that a report compares with
    does      what the key does, as the end of a sentence
    stages    the stages of ZeRO where it has an effect
    """

    kind: str | tuple[str, ...]
    default: Any
    off: Any
    does: str
    stages: tuple[int, ...] = (0, 1, 2, 3)


_SHARDED, _BUCKETED, _THIRD = (1, 2, 3), (1, 2, 3), (3,)
KEYS: dict[str, Key] = {
    MICRO: Key("count", None, 1, "activations grow with it"),
    ACCUMULATION: Key("count", None, 1, "keeps the gradients between micro-batches"),
    TRAIN_BATCH: Key("count", None, None, "micro-batch × steps × GPUs"),
    "optimizer.type": Key(
        tuple(STATE_BYTES), "adamw", "sgd", "state per weight in float32; compared with SGD"
    ),
    "bf16.enabled": Key("switch", False, False, "16-bit weights with float32 copies"),
    "bf16.bf16_master_weights_and_grads": Key(
        "switch", False, False, "copies and the step's gradients in 16 bits", _SHARDED
    ),
    "bf16.bf16_optimizer_states": Key(
        "switch", False, False, "optimizer state in 16 bits", _SHARDED
    ),
    "fp16.enabled": Key(
        "switch", False, False, "16-bit weights beside float32 copies, and loss scaling"
    ),
    "torch_autocast.enabled": Key("switch", False, False, "float32 weights, 16-bit matmuls"),
    "data_types.grad_accum_dtype": Key(DTYPES, None, None, "dtype of accumulated gradients"),
    STAGE: Key("count", 0, 0, "GPUs shard 1: optimizer state, 2: gradients too, 3: weights too"),
    f"{ZERO}.contiguous_gradients": Key(
        "switch", True, False, "copies gradients into the reduce bucket", _BUCKETED
    ),
    f"{ZERO}.reduce_bucket_size": Key(
        "count", 500_000_000, 0, "elements of the buffer for reducing gradients", _BUCKETED
    ),
    f"{ZERO}.overlap_comm": Key(
        "switch", None, False, "a second reduce bucket in stages 1 and 2; on by default in stage 3",
        _BUCKETED,
    ),
    f"{ZERO}.sub_group_size": Key(
        "count", 1_000_000_000, UNLIMITED,
        "elements that the optimizer steps at a time: the float32 gradients, or the NVMe buffers",
        _THIRD,
    ),
    f"{ZERO}.stage3_max_live_parameters": Key(
        "count", 1_000_000_000, 0, "gathered elements that may stay on the GPU", _THIRD
    ),
    f"{ZERO}.stage3_max_reuse_distance": Key(
        "count", 1_000_000_000, 0, "keeps weights reused within this many elements", _THIRD
    ),
    f"{ZERO}.stage3_prefetch_bucket_size": Key(
        "count", 50_000_000, 0, "elements to prefetch, within stage3_max_live_parameters", _THIRD
    ),
    f"{ZERO}.stage3_param_persistence_threshold": Key(
        "count", 100_000, 0, "leaves tensors up to this size unsharded", _THIRD
    ),
    f"{ZERO}.stage3_model_persistence_threshold": Key(
        "count", UNLIMITED, UNLIMITED, "limit on elements left unsharded", _THIRD
    ),
    f"{ZERO}.zero_hpz_partition_size": Key(
        "count", 1, 1, "a second shard of the weights within this many GPUs", _THIRD
    ),
    f"{ZERO}.mics_shard_size": Key(
        "count", -1, -1, "shards over this many GPUs instead of all", _THIRD
    ),
    f"{ZERO}.zero_quantized_weights": Key(
        "switch", False, False, "gathers weights in 8 bits; stores them as before", _THIRD
    ),
    f"{ZERO}.zero_quantized_gradients": Key(
        "switch", False, False, "reduces gradients in 4 bits; stores them as before", _THIRD
    ),
    f"{OPTIMIZER}.device": Key(
        DEVICES, "none", "none", "device for state, float32 copies and gradients", _SHARDED
    ),
    f"{OPTIMIZER}.ratio": Key("share", 1.0, 1.0, "share of the state that leaves the GPU", _THIRD),
    f"{OPTIMIZER}.pin_memory": Key(
        "switch", True, False, "page-locks this part of the host's memory", _SHARDED
    ),
    f"{OPTIMIZER}.buffer_count": Key(
        "count", 4, 0, "host buffers of a sub-group in float32, for NVMe", _THIRD
    ),
    f"{PARAM}.device": Key(DEVICES, "none", "none", "device for sharded weights", _THIRD),
    f"{PARAM}.pin_memory": Key(
        "switch", True, False, "page-locks this part of the host's memory", _THIRD
    ),
    f"{PARAM}.buffer_count": Key("count", 5, 0, "host buffers for weights, for NVMe", _THIRD),
    f"{PARAM}.buffer_size": Key("count", 100_000_000, 0, "elements of such a buffer", _THIRD),
    f"{PARAM}.max_in_cpu": Key(
        "count", 1_000_000_000, 0, "elements that stay on the host instead of NVMe", _THIRD
    ),
    CHECKPOINTING: Key(
        "switch", False, False,
        "recomputes blocks, if the model calls deepspeed.checkpointing.checkpoint",
    ),
    f"{CHECKPOINTING}.partition_activations": Key(
        "switch", False, False, "divides block inputs among tensor-parallel GPUs"
    ),
    f"{CHECKPOINTING}.cpu_checkpointing": Key(
        "switch", False, False, "keeps block inputs on the host"
    ),
    "tensor_parallel.autotp_size": Key("count", 1, 1, "GPUs that split each matrix"),
}  # fmt: skip

WITHOUT_EFFECT = (
    *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "steps_per_print"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "scheduler", "disable_allgather"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler", "logging"),
    *("checkpoint", "aio", "gradient_allreduce_op", "managed_gradient_accumulation", "log_level"),
    *("optimizer.params", "optimizer.legacy_fusion", "bf16.immediate_grad_update", "seed"),
    "bf16.check_grad_overflow",
    *(f"fp16.{name}" for name in ("auto_cast", "loss_scale", "initial_scale_power", "hysteresis")),
    *(f"fp16.{name}" for name in ("loss_scale_window", "min_loss_scale", "consecutive_hysteresis")),
    *(f"torch_autocast.{name}" for name in ("dtype", "lower_precision_safe_modules")),
    *(f"{ZERO}.{name}" for name in ("allgather_bucket_size", "allgather_partitions")),  # in place
    *(f"{ZERO}.{name}" for name in ("reduce_scatter", "use_multi_rank_bucket_allreduce")),
    *(f"{ZERO}.{name}" for name in ("load_from_fp32_weights", "elastic_checkpoint", "leaf_module")),
    *(f"{ZERO}.{name}" for name in ("ignore_unused_parameters", "round_robin_gradients")),
    *(f"{ZERO}.stage3_{name}" for name in ("gather_16bit_weights_on_model_save",)),
    *(f"{ZERO}.stage3_{name}" for name in ("gather_fp16_weights_on_model_save",)),
    *(f"{ZERO}.stage3_{name}" for name in ("module_granularity_threshold", "allgather_sequential")),
    *(f"{ZERO}.stage3_{name}" for name in ("use_all_reduce_for_fetch_params",)),
    *(f"{ZERO}.{name}" for name in ("pipeline_loading_checkpoint", "override_module_apply")),
    *(f"{ZERO}.{name}" for name in ("log_trace_cache_warnings", "enable_sanity_checks")),
    *(f"{ZERO}.{name}" for name in ("grad_hooks", "memory_efficient_linear", "legacy_stage1")),
    *(f"{ZERO}.mics_hierarchical_params_gather",),
    *(f"{OPTIMIZER}.{name}" for name in ("nvme_path", "pipeline_read", "pipeline_write")),
    *(f"{OPTIMIZER}.{name}" for name in ("fast_init", "super_offload", "cpuadam_cores_perc")),
    f"{PARAM}.nvme_path",
    *(f"{CHECKPOINTING}.{name}" for name in ("contiguous_memory_optimization", "profile")),
    *(f"tensor_parallel.{name}" for name in ("preset_model", "tp_overlap_comm")),
    "tensor_parallel.partition_config",
    *("vocabulary_size", "max_grad_norm", "use_data_before_expert_parallelism"),
    f"{CHECKPOINTING}.number_checkpoints",
    f"{CHECKPOINTING}.synchronize_checkpoint_boundary",
)  # fmt: skip
UNCOUNTED = (
    *("amp", "autotuning", "communication_data_type", "compile", "compression_training"),
    *("curriculum_learning", "data_efficiency", "eigenvalue", "elasticity", "expert_parallel"),
    *(
        "graph_harvesting",
        "hybrid_engine",
        "pipeline",
        "progressive_layer_drop",
        "sparse_attention",
    ),
    *("sparse_gradients", "sequence_parallel_size", "seq_parallel_communication_data_type"),
    *("fp16.fp16_master_weights_and_grads", f"{ZERO}.zenflow", f"{ZERO}.zeropp_loco_param"),
    *(f"{ZERO}.zero_quantized_nontrainable_weights", "weight_quantization", "nebula", "bfloat16"),
    *(f"{ZERO}.save_muon_momentum_buffer_in_memory", "data_types.param_dtype"),
    *("data_types.buffer_dtype", "tensor_parallel", f"{ZERO}.cpu_offload"),
    *(f"{ZERO}.cpu_offload_param", f"{ZERO}.cpu_offload_use_pin_memory"),
)
_ALL = (*KEYS, *WITHOUT_EFFECT, *UNCOUNTED)
_SECTIONS = {path.rpartition(".")[0] for path in _ALL if "." in path}

# The values that transformers fills in for "auto"; some are functions of the hidden size.
# None: a training argument, which the command line gives or memlab assumes.
FILLED: Mapping[str, Any] = {
    MICRO: None,
    ACCUMULATION: None,
    TRAIN_BATCH: None,
    "bf16.enabled": None,
    "fp16.enabled": None,
    f"{ZERO}.reduce_bucket_size": lambda hidden_size: hidden_size**2,
    f"{ZERO}.stage3_prefetch_bucket_size": lambda hidden_size: int(0.9 * hidden_size**2),
    f"{ZERO}.stage3_param_persistence_threshold": lambda hidden_size: 10 * hidden_size,
}


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A config whose values are complete and consistent.

    values          of KEYS that differ from the default, by path
    given           the paths of KEYS in the file
    without_effect  given keys that change no bytes
    uncounted       given keys whose bytes are not counted
    unknown         unknown keys and the nearest known one, or ""
    notes           assumptions and keys that have no effect together, a sentence each
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    without_effect: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Any:
        return self.values.get(path, KEYS[path].default)

    def with_value(self, path: str, value: Any) -> "DeepSpeedConfig":
        """Return the config with another value, without checking it."""
        return replace(self, values={**self.values, path: value})

    @property
    def stage(self) -> int:
        return self[STAGE]

    @property
    def micro_batch(self) -> int:
        return self[MICRO] or 1

    @property
    def accumulation_steps(self) -> int:
        return self[ACCUMULATION] or 1

    @property
    def overlaps(self) -> bool:
        """Whether communication overlaps with backward."""
        given = self[f"{ZERO}.overlap_comm"]
        return self.stage == 3 if given is None else given

    @property
    def is_16_bit(self) -> bool:
        return self["bf16.enabled"] or self["fp16.enabled"]

    def offloads(self, part: str) -> str:
        """Return where OPTIMIZER or PARAM is kept: "none", "cpu" or "nvme"."""
        device = self[f"{part}.device"]
        return device if self.stage in KEYS[f"{part}.device"].stages else "none"


def read_deepspeed(
    path: str, *, gpus: int = 1, batch: int | None = None, hidden_size: int = 1
) -> DeepSpeedConfig:
    """Read the file; `parse_deepspeed` has the arguments.

    Raises ValueError with one sentence for a file that cannot be read.
    """
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise ValueError(f"got {path} of more than 1 MiB; give DeepSpeed's JSON config")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ValueError(f"reading {path} failed: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8; give DeepSpeed's JSON config") from error
    try:
        return parse_deepspeed(text, gpus=gpus, batch=batch, hidden_size=hidden_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_deepspeed(
    text: str, *, gpus: int = 1, batch: int | None = None, hidden_size: int = 1
) -> DeepSpeedConfig:
    """Parse a config and complete it.

    `batch` is the micro-batch if the config has none or has "auto". `hidden_size` is what
    transformers computes other values of "auto" from.

    Raises ValueError for text other than a JSON object, a value of the wrong type, an "auto" that
    transformers does not fill, and values that make DeepSpeed stop.
    """
    found = _Reader(hidden_size)
    found.read_section("", _loaded(text))
    values = found.values
    _complete_batch(values, found.notes, gpus, batch)
    config = DeepSpeedConfig(
        values,
        frozenset(found.given),
        tuple(found.without_effect),
        tuple(found.uncounted),
        found.unknown,
    )
    if complaint := _why_deepspeed_stops(config, found.paths):
        raise ValueError(complaint)
    return replace(config, notes=(*found.notes, *_without_effect_together(config)))


def _loaded(text: str) -> dict[str, Any]:
    lines = text.lstrip("\ufeff").splitlines()
    plain = "\n".join("" if line.lstrip().startswith(("#", "//")) else line for line in lines)
    try:
        content = json.loads(plain, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {error.lineno}, column {error.colno} is no JSON ({error.msg}); give DeepSpeed's "
            f'config, such as {{"zero_optimization": {{"stage": 3}}}}'
        ) from error
    except RecursionError as error:
        raise ValueError("the sections are nested too deeply for a DeepSpeed config") from error
    if not isinstance(content, dict):
        raise ValueError(f"got {_shown(content)}; a DeepSpeed config is an object, {{…}}")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"got the key {twice} twice in one section; DeepSpeed refuses that")
    return found


class _Reader:
    """Sorts the keys of a file, and checks the values of the ones that count."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.values: dict[str, Any] = {}
        self.given: list[str] = []
        self.paths: dict[str, Any] = {}  # of all known keys, with the values as they are
        self.without_effect: list[str] = []
        self.uncounted: list[str] = []
        self.unknown: dict[str, str] = {}
        self.notes: list[str] = []

    def read_section(self, section: str, content: Mapping[str, Any]) -> None:
        for name, value in content.items():
            path = f"{section}.{name}" if section else name
            self.paths[path] = value
            if path in KEYS and path != CHECKPOINTING:
                self._read_key(path, value)
            elif path in _SECTIONS and (isinstance(value, dict) or path not in _ALL):
                self._read_subsection(path, value)
            elif path in WITHOUT_EFFECT:
                self.without_effect.append(path)
            elif path in UNCOUNTED:
                self.uncounted.append(path)
            else:
                self.unknown[path] = _nearest(path, section)

    def _read_subsection(self, path: str, value: Any) -> None:
        if value is None or value is False:  # DeepSpeed's "off" of a section
            return
        if not isinstance(value, dict):
            raise ValueError(f"got {path} = {_shown(value)}; give a section, {{…}}")
        if path == CHECKPOINTING:
            self.given.append(path)
            self.values[path] = True
        self.read_section(path, value)

    def _read_key(self, path: str, value: Any) -> None:
        self.given.append(path)
        if value == AUTO:
            value = self._filled(path)
        elif value is not None:
            value = _checked(path, value)
        if value is not None:
            self.values[path] = value

    def _filled(self, path: str) -> Any:
        if path not in FILLED:
            known = ", ".join(FILLED)
            raise ValueError(
                f'got {path} = "auto", which transformers does not fill; give a value, or leave '
                f"the key out (it fills {known})"
            )
        rule = FILLED[path]
        if rule is not None:
            value = rule(self.hidden_size)
            self.notes.append(
                f'{path} = "auto": {value:,}, which transformers computes from the hidden size'
            )
            return value
        if path == "bf16.enabled":
            self.notes.append(
                'bf16.enabled = "auto": assumed on, as with TrainingArguments(bf16=True)'
            )
            return True
        if path == "fp16.enabled":
            self.notes.append('fp16.enabled = "auto": assumed off, as in TrainingArguments')
            return False
        return None  # the batch and its steps


def _checked(path: str, value: Any) -> Any:
    """Return the value, as an int where a count is written as 5e8."""
    kind = KEYS[path].kind
    if kind == "switch":
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif kind == "share":
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
        wanted = "a number from 0 to 1"
    elif kind == "count":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        lowest = -1 if path.endswith("mics_shard_size") else 0
        if is_number and math.isfinite(value) and value == int(value) and value >= lowest:
            return min(int(value), UNLIMITED)
        wanted = "an integer from 0, such as 1 or 5e8"
    else:
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
    known = (*_ALL, *_SECTIONS)
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    if near := get_close_matches(name, siblings, n=1):
        return siblings[near[0]]
    anywhere = {k.rpartition(".")[2]: k for k in known}
    near = get_close_matches(name, anywhere, n=1, cutoff=0.8)
    return anywhere[near[0]] if near else ""


def _complete_batch(values: dict[str, Any], notes: list[str], gpus: int, batch: int | None) -> None:
    """Compute the one of the three batch sizes that the file leaves out, as DeepSpeed does."""
    ranks = max(1, gpus // values.get("tensor_parallel.autotp_size", 1))
    micro, steps, total = (values.get(key) for key in (MICRO, ACCUMULATION, TRAIN_BATCH))
    if micro is not None and batch is not None and micro != batch:
        raise ValueError(
            f"got --batch {batch}, and {MICRO} = {micro}; leave --batch out, or change the file"
        )
    if micro is None and batch is not None:
        micro = batch
    if total is not None and micro is None:
        micro = total // ranks // (steps or 1)
    if micro is None:
        micro = 1
        notes.append(f"{MICRO} is not in the file: assumed 1; --batch sets it")
    if steps is None:
        steps = max(1, total // micro // ranks) if total is not None and micro else 1
    values[MICRO], values[ACCUMULATION] = micro, steps
    expected = micro * steps * ranks
    if not expected or total not in (None, expected):
        raise ValueError(
            f"got {TRAIN_BATCH} = {total}, and {MICRO} × {ACCUMULATION} × GPUs = {micro} × "
            f"{steps} × {ranks} = {expected}; DeepSpeed stops unless they are equal and above 0: "
            f"change one of them, or --gpus"
        )


def _why_deepspeed_stops(config: DeepSpeedConfig, given: Mapping[str, Any]) -> str | None:
    """Return what DeepSpeed raises an error for; None if nothing."""
    stage, state = config.stage, config[f"{OPTIMIZER}.device"]
    if stage > 3:
        return f"got {STAGE} = {stage}; ZeRO has stages 0 to 3"
    if config["bf16.enabled"] and config["fp16.enabled"]:
        return "got both bf16.enabled and fp16.enabled; DeepSpeed takes one of them"
    if config["bf16.bf16_optimizer_states"] and not config["bf16.bf16_master_weights_and_grads"]:
        return "got bf16.bf16_optimizer_states without bf16.bf16_master_weights_and_grads; add it"
    if config["bf16.bf16_master_weights_and_grads"] and not stage:
        return f"got bf16.bf16_master_weights_and_grads with {STAGE} = 0; it needs stage 1, 2 or 3"
    if state == "nvme" and stage != 3:
        return f"got {OPTIMIZER}.device = nvme with {STAGE} = {stage}; NVMe needs stage 3"
    if config[f"{OPTIMIZER}.ratio"] < 1 and stage != 3:
        return f"got {OPTIMIZER}.ratio with {STAGE} = {stage}; a partial offload needs stage 3"
    for part in (OPTIMIZER, PARAM):
        if config[f"{part}.device"] == "nvme" and not given.get(f"{part}.nvme_path"):
            return f'got {part}.device = nvme without nvme_path; add "nvme_path": "/local_nvme"'
    buffers = config[f"{OPTIMIZER}.buffer_count"]
    if state == "nvme" and buffers < 4 and config["optimizer.type"] in ("adam", "adamw", "lamb"):
        return (
            f"got {OPTIMIZER}.buffer_count = {buffers}; Adam needs 4: weights, gradients and two "
            f"moments"
        )
    return None


def _without_effect_together(config: DeepSpeedConfig) -> list[str]:
    """Name given keys that another key switches off."""
    notes, stage = [], config.stage
    for path in sorted(config.given):
        if stage not in KEYS[path].stages and config[path] != KEYS[path].off:
            wanted = " or ".join(map(str, KEYS[path].stages))
            notes.append(f"{path} has no effect in stage {stage}; it needs stage {wanted}")
    notes += _about_offloading(config)
    tensor = config["tensor_parallel.autotp_size"]
    if config[f"{CHECKPOINTING}.partition_activations"] and tensor <= 1:
        notes.append(
            f"{CHECKPOINTING}.partition_activations has no effect without tensor parallelism"
        )
    if not config.is_16_bit and not config["torch_autocast.enabled"]:
        notes.append(
            "neither bf16 nor fp16 is enabled, so DeepSpeed trains in float32; add "
            '"bf16": {"enabled": true} for 16-bit weights'
        )
    return notes


def _about_offloading(config: DeepSpeedConfig) -> list[str]:
    """Name given keys of a part without offloading, and NVMe's keys of a part not on NVMe."""
    notes = []
    for part in (OPTIMIZER, PARAM):
        device = config.offloads(part)
        own = [path for path in sorted(config.given) if path.startswith(f"{part}.")]
        for path in own:
            name = path.rpartition(".")[2]
            if name == "device" or config.stage not in KEYS[path].stages:
                continue
            if device == "none":
                notes.append(f"{path} has no effect without {part}.device")
            elif device == "cpu" and name in ("buffer_count", "buffer_size", "max_in_cpu"):
                notes.append(f"{path} has no effect with {part}.device = cpu; it is for nvme")
    return notes
