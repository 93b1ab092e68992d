"""The bytes of a DeepSpeed training by formula, and what each key of its config costs and saves.

    step = DeepSpeedStep(PRESETS["llama-2-7b"], read_deepspeed("ds_config.json"), gpus=8)
    step.gpu_bytes, step.host_bytes, step.disk_bytes      of one GPU's process
    effects(step)                                         the same, key by key

Ψ weights, S GPUs that share a copy of them (all data-parallel GPUs, unless mics_shard_size is set),
w bytes per weight (2 in 16 bits, else 4), and K bytes of state: float32 copies and moments.

    where                 bytes                                   moves to the host with
    weights               w·Ψ, in stage 3 w·Ψ/S                   offload_param
    gathered weights      w·min(Ψ, max_live), stage 3
    small weights         w·P of tensors up to the threshold, stage 3
    second shard          w·Ψ/zero_hpz_partition_size, stage 3
    gradients             w·Ψ, from stage 2 on w·Ψ/S              offload_optimizer
    layer gradient        w·V·C, of the unembedding, before it is reduced
    reduce bucket         w·reduce_bucket_size, twice with overlap_comm in stages 1 and 2
    state                 K·Ψ, from stage 1 on K·Ψ/S              offload_optimizer
    gradients of a step   4·Ψ/S in float32, in stage 3 of a sub-group
    activations           as in `memlab.planner.formulas`, for a micro-batch

On the host, offload_optimizer keeps K + 4 bytes (the float32 gradients) and w for the gradients or
the stepped weights; offload_param keeps w, or its buffers and max_in_cpu elements for NVMe. On
NVMe are K + 4 bytes of state and gradients, and the weights that do not stay on the host.

The report compares each key with the value that turns it off, everything else unchanged. So two
keys that only work together (a bucket and its overlap) each show the whole difference.

memlab does not run DeepSpeed: these are formulas. Tests compare them with the formulas of ZeRO's
paper and with the estimates that DeepSpeed's documentation states. Neither counts activations,
buckets and gathered weights; those follow DeepSpeed 0.19.6's documented buffers.

Source   Rajbhandari et al. 2020, arXiv 1910.02054 (stages); Ren et al. 2021, 2101.06840 (offload to
         the CPU); Rajbhandari et al. 2021, 2104.07857 (NVMe); Wang et al. 2023, 2306.10209 (ZeRO++:
         hpz, quantized communication); DeepSpeed's pages "Memory Requirements" and "Configuration".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from memlab.configs.deepspeed import (
    CHECKPOINTING,
    KEYS,
    OPTIMIZER,
    PARAM,
    STATE_BYTES,
    ZERO,
    DeepSpeedConfig,
)
from memlab.configs.shapes import GPTConfig
from memlab.planner.formulas import FLOAT32, MOMENTS, StepFormula, layer_shapes
from memlab.planner.recipes import Recipe

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
ALL_REDUCE_BUCKET = 500_000_000  # elements that stage 0 flattens at a time
TERMS_OF_STATES = ("weights", "gradients", "optimizer_state", "optimizer_temporaries")


def recipe_of(config: DeepSpeedConfig) -> Recipe:
    """Return memlab's recipe with the same activations: precision, checkpointing, parallelism.

    ZeRO's stage, offloading and DeepSpeed's optimizers are not in it; `DeepSpeedStep` has them.
    """
    precision = "float32"
    if config.is_16_bit:
        precision = "master-weights"
    elif config["torch_autocast.enabled"]:
        precision = "autocast"
    return Recipe(
        precision,
        checkpointing="checkpointing" if config[CHECKPOINTING] else None,
        tensor_parallel=config["tensor_parallel.autotp_size"],
    )


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


class DeepSpeedStep:
    """The bytes of one process (one GPU) in an optimizer step, by formula.

    Raises ValueError for sizes that do not fit the model or the number of GPUs.
    """

    def __init__(
        self,
        model: GPTConfig,
        config: DeepSpeedConfig,
        *,
        seq_len: int | None = None,
        gpus: int = 1,
        target: str = "cuda",
    ) -> None:
        self.model, self.config, self.gpus = model, config, gpus
        self.seq_len, self.target = seq_len, target
        self.formula = StepFormula.of(
            model, recipe_of(config), config.micro_batch, seq_len, gpus=gpus, target=target
        )
        self.stage, self.steps = config.stage, config.accumulation_steps
        self.ranks, self.tensor = self.formula.ranks, self.formula.tensor
        group = config[f"{ZERO}.mics_shard_size"]
        self.group = group if self.stage == 3 and group > 0 else self.ranks
        if self.ranks % self.group:
            raise ValueError(
                f"got {ZERO}.mics_shard_size = {group}, which does not divide {self.ranks} "
                f"data-parallel GPUs; give a divisor"
            )
        self.size = self.formula.weight_bytes
        self.elements = -(-model.parameters // self.tensor)
        self.shard = -(-self.elements // self.group)
        self.state_on = config.offloads(OPTIMIZER)
        self.weights_on = config.offloads(PARAM)

    def changed(self, path: str, value: object) -> "DeepSpeedStep":
        """Return the step with another value of one key."""
        return DeepSpeedStep(
            self.model,
            self.config.with_value(path, value),
            seq_len=self.seq_len,
            gpus=self.gpus,
            target=self.target,
        )

    # -------------------------------------------------------------- elements and their bytes

    @property
    def summed_size(self) -> int:
        """The bytes of a gradient that micro-batches are summed in."""
        dtype = self.config["data_types.grad_accum_dtype"]
        return DTYPE_BYTES[dtype] if dtype else self.size

    @property
    def copy_size(self) -> int:
        """The bytes of the optimizer's copy of a weight; 0 if it steps the weight itself."""
        if self.config["bf16.bf16_master_weights_and_grads"]:
            return 2
        if self.size == FLOAT32 and (not self.stage or (self.stage == 3 and not self._leaves)):
            return 0
        return FLOAT32

    @property
    def _leaves(self) -> bool:
        return self.state_on != "none"

    @property
    def moments_size(self) -> int:
        """The bytes of the optimizer's moments per weight."""
        in_float32 = STATE_BYTES[self.config["optimizer.type"]]
        return in_float32 // 2 if self.config["bf16.bf16_optimizer_states"] else in_float32

    @property
    def state_size(self) -> int:
        """K: the bytes of copies and moments per weight."""
        return self.copy_size + self.moments_size

    @property
    def stepped_gradient_size(self) -> int:
        """The bytes of a gradient in the optimizer step."""
        return 2 if self.config["bf16.bf16_master_weights_and_grads"] else FLOAT32

    @property
    def stepped(self) -> int:
        """The elements whose state a GPU steps."""
        return self.shard if self.stage else self.elements

    @property
    def left_share(self) -> float:
        """The share of state and float32 gradients that leaves the GPU."""
        return self.config[f"{OPTIMIZER}.ratio"] if self._leaves else 0.0

    @property
    def sub_group(self) -> int:
        """The elements that the optimizer steps at a time."""
        if self.stage < 3:
            return self.stepped
        return min(self.stepped, max(1, self.config[f"{ZERO}.sub_group_size"]))

    @property
    def persistent(self) -> int:
        """The elements of small tensors, which stage 3 keeps whole on every GPU."""
        threshold = self.config[f"{ZERO}.stage3_param_persistence_threshold"]
        small = sum(each for each in tensor_sizes(self.model) if each <= threshold)
        return min(small, self.config[f"{ZERO}.stage3_model_persistence_threshold"])

    @property
    def gathered(self) -> int:
        """The most elements that stage 3 gathers at once: at least the running layer's, plus
        prefetched and soon reused elements within stage3_max_live_parameters."""
        layer = -(-self.formula.weights.largest // self.tensor)
        names = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance")
        ahead = layer + max(self.config[f"{ZERO}.{name}"] for name in names)
        live = min(self.config[f"{ZERO}.stage3_max_live_parameters"], ahead)
        return min(self.elements, max(layer, live))

    # -------------------------------------------------------------- the GPU

    @cached_property
    def moments(self) -> dict[str, dict[str, int]]:
        """The GPU's bytes at each of MOMENTS, by term."""
        return {moment: self._moment(moment) for moment in MOMENTS}

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def terms(self) -> dict[str, int]:
        """The GPU's bytes at the peak, by term."""
        return self.moments[self.moment]

    @property
    def gpu_bytes(self) -> int:
        """The GPU's bytes at the peak."""
        return sum(self.terms.values())

    def _moment(self, moment: str) -> dict[str, int]:
        of_model = getattr(self.formula, moment)()
        others = {k: v for k, v in of_model.items() if k not in TERMS_OF_STATES}
        if "blocks_kept" in others:
            others["blocks_kept"] = self._blocks_kept(others["blocks_kept"])
        terms = {**self._weights(), "optimizer_state": self._state(), **others}
        terms["gradients"] = self._gradients(moment)
        terms["layer_gradient"] = self._layer_gradient(moment)
        terms["copy_buffer"] = self._copy_buffer()
        terms["reduce_bucket"] = self._bucket(moment)
        if moment == "optimizer" and not self._steps_elsewhere:
            share = 1 - self.left_share
            terms["step_gradients"] = round(share * self.stepped_gradient_size * self.sub_group)
        return {name: count for name, count in terms.items() if count}

    @property
    def _steps_elsewhere(self) -> bool:
        return self.left_share == 1

    def _weights(self) -> dict[str, int]:
        if self.stage < 3:
            return {"weights": self.size * self.elements}
        if self.group == 1 and self.weights_on == "none":  # used where they are
            return {"weights": self.size * self.elements}
        second = self.config[f"{ZERO}.zero_hpz_partition_size"]
        return {
            "weights": 0 if self.weights_on != "none" else self.size * self.shard,
            "gathered_weights": self.size * self.gathered,
            "small_weights": self.size * self.persistent,
            "second_shard": self.size * -(-self.elements // second) if second > 1 else 0,
        }

    def _state(self) -> int:
        return round((1 - self.left_share) * self.state_size * self.stepped)

    def _gradients(self, moment: str) -> int:
        """The gradients that stay on the GPU: from the micro-batches before, or all of them."""
        if self._leaves and self.stage > 1:
            return 0
        count = self.shard if self.stage > 1 else self.elements
        if self._leaves and moment == "optimizer":
            return 0  # they have gone to the host
        if self.stage == 3 or self.steps > 1 or moment in ("gradients", "optimizer"):
            return self.summed_size * count
        return 0

    def _layer_gradient(self, moment: str) -> int:
        """The gradient that autograd has just made, before it is reduced: the unembedding's when
        backward begins. In stages 0 and 1 it stays and is one of all gradients at their end."""
        C = self.model.hidden_size
        columns = {"backward": self.model.vocab_size, "gradients": self.model.intermediate_size}
        if moment not in columns or (self.stage < 2 and moment == "gradients"):
            return 0
        return self.size * -(-C * columns[moment] // self.tensor)

    def _copy_buffer(self) -> int:
        """Stages 1 and 2 copy gradients to the host through a buffer of the largest tensor."""
        if not self._leaves or self.stage == 3:
            return 0
        return self.size * -(-self.formula.weights.largest // self.tensor)

    def _bucket(self, moment: str) -> int:
        """The buffers that gradients are reduced from. Stages 1 and 2 free them after backward; in
        stage 2, a bucket in flight holds its gradients even without the buffer."""
        in_backward = moment in ("backward", "gradients")
        if self.stage == 0:
            whole = min(self.elements, ALL_REDUCE_BUCKET)
            return self.size * whole if self.ranks > 1 and moment == "gradients" else 0
        if not (in_backward or self.stage == 3):
            return 0
        if not self.config[f"{ZERO}.contiguous_gradients"]:
            return 0
        buffers = 2 if self.config.overlaps and self.stage < 3 else 1
        return buffers * self.size * self.config[f"{ZERO}.reduce_bucket_size"]

    def _blocks_kept(self, kept: int) -> int:
        """The block inputs that stay on the GPU; without checkpointing, all saved tensors."""
        if not self.config[CHECKPOINTING]:
            return kept
        if self.config[f"{CHECKPOINTING}.partition_activations"]:
            kept = -(-kept // self.tensor)
        is_away = self.config[f"{CHECKPOINTING}.cpu_checkpointing"]
        return -(-kept // self.formula.layers) if is_away else kept

    # -------------------------------------------------------------- the host and the disk

    @cached_property
    def host(self) -> dict[str, int]:
        """The bytes of a process in the host's memory, by term, during training."""
        terms = {**self._host_state(), **self._host_weights()}
        if self.config[CHECKPOINTING] and self.config[f"{CHECKPOINTING}.cpu_checkpointing"]:
            terms["block_inputs"] = self._all_block_inputs()
        return {name: count for name, count in terms.items() if count}

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def pinned_bytes(self) -> int:
        """The page-locked part of the host's bytes."""
        of_state = sum(self._host_state().values())
        of_weights = sum(self._host_weights().values())
        has = {part: self.config[f"{part}.pin_memory"] for part in (OPTIMIZER, PARAM)}
        always = self.weights_on == "nvme"  # the disk is read into pinned buffers
        return of_state * has[OPTIMIZER] + of_weights * (has[PARAM] or always)

    def _all_block_inputs(self) -> int:
        kept = self.formula.loss()["blocks_kept"]
        is_divided = self.config[f"{CHECKPOINTING}.partition_activations"]
        return -(-kept // self.tensor) if is_divided else kept

    def _host_state(self) -> dict[str, int]:
        if not self._leaves:
            return {}
        gradients = {"gradients": self.summed_size * self.shard}
        if self.stage < 3:  # the stepped weights on their way back
            gradients = {"stepped_weights": self.size * self.shard}
            if self.steps > 1:
                gradients["gradients"] = self.summed_size * self.shard
        if self.state_on == "nvme":
            buffers = self.config[f"{OPTIMIZER}.buffer_count"]
            return {"swap_buffers": buffers * FLOAT32 * self.sub_group, **gradients}
        left = self.left_share * self.shard
        return {
            "optimizer_state": round(left * self.state_size),
            "step_gradients": round(left * self.stepped_gradient_size),
            **gradients,
        }

    def _host_weights(self) -> dict[str, int]:
        if self.weights_on == "none":
            return {}
        if self.weights_on == "cpu":
            return {"weights": self.size * self.shard}
        count, elements = (
            self.config[f"{PARAM}.{name}"] for name in ("buffer_count", "buffer_size")
        )
        return {
            "weights": self.size * min(self.shard, self.config[f"{PARAM}.max_in_cpu"]),
            "weight_buffers": self.size * count * elements,
        }  # fmt: skip

    @cached_property
    def disk(self) -> dict[str, int]:
        """The bytes of a process on NVMe, by term."""
        terms = {}
        if self.state_on == "nvme":
            left = self.left_share * self.shard
            terms["optimizer_state"] = round(left * self.state_size)
            terms["step_gradients"] = round(left * self.stepped_gradient_size)
        if self.weights_on == "nvme":
            terms["weights"] = self.size * self._weights_on_disk
        return {name: count for name, count in terms.items() if count}

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    @property
    def _weights_on_disk(self) -> int:
        return max(0, self.shard - self.config[f"{PARAM}.max_in_cpu"])


# ------------------------------------------------------------------ key by key


@dataclass(frozen=True)
class Effect:
    """What a key changes, compared with `off`: bytes of one process.

    gpu     at the moment at which it changes most
    peak    at the peak
    """

    path: str
    value: object
    off: object
    is_given: bool
    gpu: int
    peak: int
    host: int
    pinned: int
    disk: int

    @property
    def changes(self) -> bool:
        """True if it changes any bytes."""
        counts = (self.gpu, self.peak, self.host, self.pinned, self.disk)
        return any(counts)


def effects(step: DeepSpeedStep) -> Iterator[Effect]:
    """Yield what each key changes: those in the file, and defaults that change bytes too."""
    for path, key in KEYS.items():
        value = step.config[path]
        if path == f"{ZERO}.overlap_comm":
            value = step.config.overlaps
        effect = _effect(step, path, value, key.off)
        if effect.is_given or effect.changes:
            yield effect


def _effect(step: DeepSpeedStep, path: str, value: object, off: object) -> Effect:
    without = step.changed(path, off)
    differences = [
        sum(step.moments[moment].values()) - sum(without.moments[moment].values())
        for moment in MOMENTS
    ]
    return Effect(
        path,
        value,
        off,
        path in step.config.given,
        max(differences, key=abs),
        step.gpu_bytes - without.gpu_bytes,
        step.host_bytes - without.host_bytes,
        step.pinned_bytes - without.pinned_bytes,
        step.disk_bytes - without.disk_bytes,
    )
