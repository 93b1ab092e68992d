"""One training step with plugs: the only file that knows the model and the techniques together.

A technique is a row of TECHNIQUES, and each row fills one or more of the plugs: a function in place
of a function (attention, loss), a change of the model (a wrapper around each block, a layer in
place of a layer), a `with` around the forward pass, the size of a micro-batch, a scaler of the
loss, an optimizer, and who steps it. Delete the row and the technique is gone. Rows combine, as
long as no two fill the same plug or hold the same thing: `combined("checkpointing+autocast")`. What
doesn't go together says why: NOT_TOGETHER.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import combinations, count
from typing import Any

import torch
from torch import Tensor, nn

from memlab import optim, zero
from memlab.accumulation import accumulate, split
from memlab.attention import attention_reference, flash_attention
from memlab.checkpointing import (
    ATTENTION,
    MATMULS,
    checkpoint,
    checkpoint_blocks,
    selective,
    sqrt_schedule,
    uniform_schedule,
)
from memlab.checkpointing.schedules import Schedule
from memlab.compression import compressed_activations
from memlab.configs.config_json import config_named, name_of
from memlab.data import batches, source_bytes
from memlab.dry_runs import dry_run
from memlab.ema import PostHocEMA
from memlab.lora import add_lora
from memlab.losses import chunked_cross_entropy
from memlab.metering import measure, meter
from memlab.model import (
    GPT,
    AttentionFunction,
    GPTConfig,
    LossFunction,
    cross_entropy,
    scaled_dot_product_attention,
)
from memlab.offload import (
    DiskStore,
    OffloadedOptimizer,
    offloaded_activations,
    stream_layers,
)
from memlab.precision import LossScaler, MasterWeights
from memlab.prediction import predict
from memlab.trace import Trace

SEED = 0
TEXT = "1 MiB"

Optimizer = torch.optim.Optimizer | MasterWeights | optim.InBackward
OptimizerFunction = Callable[[nn.Module], Optimizer]


def of_all_weights(made: Callable[..., Optimizer], **settings: Any) -> OptimizerFunction:
    """Makes such an optimizer, with these settings, of all the weights of a model."""
    return lambda model: made(model.parameters(), **settings)


# Weights in bfloat16 lose steps that are rounded to the nearest; those in float32 don't notice.
rounded_at_random = partial(of_all_weights, rounding="stochastic")
one_by_one_adamw = partial(torch.optim.AdamW, foreach=False)
plain_optimizer = of_all_weights(one_by_one_adamw)
master_weights_optimizer = of_all_weights(MasterWeights, optimizer=one_by_one_adamw)


@dataclass(frozen=True)
class Setting:
    """What is trained: everything that the techniques leave alone."""

    model: str | GPTConfig = "25m"  # a preset, a file of a shape, or a shape
    batch: int = 4
    seq_len: int = 256
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        longest = self.config.seq_len
        if not 1 <= self.seq_len <= longest:
            raise ValueError(
                f"got sequences of {self.seq_len} tokens; {self.model} takes 1 to {longest}"
            )
        if self.batch < 1:
            raise ValueError(f"got a batch of {self.batch} sequences; give at least 1")

    @property
    def config(self) -> GPTConfig:
        return config_named(self.model) if isinstance(self.model, str) else self.model

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        model = self.model if isinstance(self.model, str) else name_of(self.model)
        return f"{model}, {self.batch} × {self.seq_len} tokens, {dtype}, {self.device}"


@dataclass(frozen=True)
class Technique:
    """What to put into each plug; every default is the plain step."""

    summary: str
    attention: AttentionFunction = scaled_dot_product_attention
    loss: LossFunction = cross_entropy
    change_model: Callable[[nn.Module], object] = lambda model: None  # in place
    around_forward: Callable[[str], AbstractContextManager[object]] = lambda device: nullcontext()
    micro_batch: int | None = None  # sequences at once, their gradients added; None: all
    scaler: Callable[[], LossScaler] | None = None
    optimizer: OptimizerFunction = plain_optimizer
    stepping: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer  # who steps it, when
    after_step: Callable[[nn.Module], Callable[[], object]] = lambda model: lambda: None
    holds: frozenset[str] = frozenset()  # what a step has but once, where a plug takes several


@dataclass(frozen=True)
class Training:
    """A step that can be run again and again, what it trains, and who holds its state.

    `update` is the part of the step after backward: it makes new weights of gradients. `batch` is
    what every step reads, tokens and targets: whoever wants another copies it into them.
    """

    step: Callable[[], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[[], object]
    batch: tuple[Tensor, Tensor]


def build(
    setting: Setting, technique: Technique, *, on_loss: Callable[[Tensor], object] | None = None
) -> Training:
    """The same weights and the same batch for every technique; the first step makes the state.

    `on_loss` is called with the loss of each micro-batch, unscaled, before its backward. Sets
    torch's seed.
    """
    model = _model(setting, technique)
    optimizer = technique.stepping(technique.optimizer(model))
    scaler = technique.scaler() if technique.scaler else None
    after_step = technique.after_step(model)
    tokens, targets = _batch(setting)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with technique.around_forward(setting.device):
            loss = model(tokens, targets)
        if on_loss is not None:
            on_loss(loss.detach())
        return scaler.scale(loss) if scaler else loss

    def share_of_loss(part: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        # Not a sum over tokens and their number: scaled, that overflows float16.
        share = part[1].numel() / targets.numel()
        return loss_of(*part) * share, share

    def update() -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        after_step()

    def step() -> None:
        optimizer.zero_grad()
        if technique.micro_batch is None:
            loss_of(tokens, targets).backward()
        else:
            parts = split((tokens, targets), technique.micro_batch)
            accumulate(parts, share_of_loss, model.parameters())
        update()

    holder = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    return Training(step, model, holder, update, (tokens, targets))


def _model(setting: Setting, technique: Technique) -> GPT:
    torch.manual_seed(SEED)
    with torch.device(setting.device):
        model = GPT(
            setting.config,
            attention=technique.attention,
            loss=technique.loss,
            dtype=setting.dtype,
        )
    technique.change_model(model)
    return model


def _batch(setting: Setting) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (B, T)."""
    text = source_bytes(TEXT)
    tokens, targets = next(batches(text, setting.batch, setting.seq_len, SEED))
    return tokens.to(setting.device), targets.to(setting.device)


def measured(training: Training) -> Trace:
    """The trace of the training's next step."""
    return measure(training.step, model=training.model, optimizer=training.optimizer)


def dry_trace(setting: Setting, technique: Technique) -> Trace:
    """The trace of the second step, in which nothing is computed and no memory taken.

    In place of a first step the optimizer steps alone, with gradients of zeros: it makes its state
    by that, as it would by a first step, in half the time.
    """
    with dry_run():
        training = build(setting, technique)
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        training.update()
        return measured(training)


def rank_step(setting: Setting, technique: Technique, ranks: int, stage: int) -> zero.Step:
    """The second step of one rank of so many, each with the setting's batch, in a stage of ZeRO; in
    it nothing is computed and no memory taken.

    Raises ValueError and TypeError for what `zero.one_rank` cannot shard.
    """
    with dry_run():
        return _rank(setting, technique, ranks, stage, meter=meter)()


def predicted_rank_trace(setting: Setting, technique: Technique, ranks: int, stage: int) -> Trace:
    """The trace of such a step as the setting's device, "cuda" or another target of `predict`,
    would take it, without one."""

    def parts() -> tuple[Callable[[], zero.Step], None, None]:
        on_cuda = replace(setting, device="cuda")
        return _rank(on_cuda, technique, ranks, stage), None, None

    return predict(parts, target=setting.device)


def _rank(
    setting: Setting, technique: Technique, ranks: int, stage: int, meter: Any = None
) -> Callable[[], zero.Step]:
    """The step of one rank, of fake tensors."""
    if technique.stepping is not Technique.stepping:
        raise ValueError(
            "a weight that is stepped in backward, or whose state is offloaded, has nothing there "
            "to be sent to other ranks; leave step-in-backward, offloaded-optimizer and "
            "streamed-layers out"
        )
    if technique.after_step is not Technique.after_step:
        raise ValueError(
            "averages are of whole weights, which a rank of ZeRO's third stage doesn't have; leave "
            "post-hoc-ema out"
        )

    def sum_of_losses(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        with technique.around_forward(setting.device):
            return model(*part) * part[1].numel(), part[1].numel()

    # Ranks have float32 copies of their own: of shards.
    copies = technique.optimizer is master_weights_optimizer
    made = plain_optimizer if copies else technique.optimizer
    model = _model(setting, technique)
    rank = zero.one_rank(model, made(model), ranks, stage, meter=meter, master_weights=copies)
    parts = list(split(_batch(setting), technique.micro_batch or setting.batch))
    scaler = technique.scaler() if technique.scaler else None
    return lambda: rank.step(parts, sum_of_losses, scaler=scaler)


def predicted_trace(setting: Setting, technique: Technique) -> Trace:
    """The trace of the second step as the setting's device, "cuda" or another target of `predict`,
    would take it, without one."""

    def parts() -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
        training = build(replace(setting, device="cuda"), technique)
        return training.step, training.model, training.optimizer

    return predict(parts, target=setting.device)


def scheduled(
    schedule: Callable[[int], Schedule], using: Callable[..., Any] = checkpoint
) -> Callable[[nn.Module], None]:
    """The change of a model that runs its blocks by the schedule for their number."""

    def change(model: nn.Module) -> None:
        checkpoint_blocks(model, schedule(len(model.blocks)), using=using)

    return change


each_block = partial(uniform_schedule, every=1)


@cache
def activations_on_disk() -> DiskStore:
    """One for all steps of this process, in a temporary folder that goes with it."""
    return DiskStore()


def offloaded(optimizer: Optimizer, **settings: Any) -> OffloadedOptimizer:
    """Its state in a temporary folder, in sub-groups that are smaller than the models here."""
    return OffloadedOptimizer(optimizer, DiskStore(), sub_group=2**20, **settings)


def averaged(model: nn.Module, **settings: Any) -> Callable[[], object]:
    """Two averages, updated after each step; no snapshot of them is taken."""
    ema, steps = PostHocEMA(model, "no-snapshots", **settings), count(1)
    return lambda: ema.update(next(steps))


def to_bfloat16(model: nn.Module) -> None:
    """Give the model weights of two bytes, and with them activations and gradients."""
    model.to(torch.bfloat16)


def adam_mini(model: nn.Module) -> optim.AdamMini:
    """Adam-mini of all the weights of our GPT that are trained; of LoRA's factors, by rows."""
    rules = optim.GPT_RULES | {"down": "row", "up": "row"}
    partition = optim.ByRules(rules, model.config.head_width)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return optim.AdamMini(trained, partition=partition, rounding="stochastic")


def combined(names: str, rows: Mapping[str, Technique] | None = None) -> Technique:
    """The technique of several rows at once, their names joined by "+", in any order; `rows` is
    TECHNIQUES unless given.

    Raises KeyError for a name that is no row, and ValueError for two that don't go together.
    """
    rows = TECHNIQUES if rows is None else rows
    given = {name: rows[name] for name in names.split("+")}
    parts = {name: part for name, part in rows.items() if name in given}
    _require_together(parts)
    plugs: dict[str, Any] = {}
    for plug in (field for field in fields(Technique) if field.name not in ("summary", "holds")):
        filled = {name: getattr(part, plug.name) for name, part in parts.items()}
        filled = {name: value for name, value in filled.items() if value is not plug.default}
        if len(filled) > 1 and plug.name not in _JOINED:
            advice = ""
            if plug.name == "optimizer" and "bfloat16" in filled:
                other = next(name for name in filled if name != "bfloat16")
                advice = f"; for weights in bfloat16, give {other} and --dtype bfloat16"
            raise ValueError(
                f"{' and '.join(filled)} each bring their own {plug.name.replace('_', ' ')}; "
                f"leave one of them out{advice}"
            )
        if filled:
            first, *others = filled.values()
            plugs[plug.name] = _JOINED[plug.name]([first, *others]) if others else first
    holds = frozenset().union(*(part.holds for part in parts.values()))
    return Technique(", ".join(part.summary for part in parts.values()), holds=holds, **plugs)


def _require_together(parts: dict[str, Technique]) -> None:
    for (name, part), (other, of_other) in combinations(parts.items(), 2):
        if both := part.holds & of_other.holds:
            raise ValueError(
                f"{name} and {other} each bring their own {' and '.join(both)}; leave one of them "
                f"out"
            )
        if reason := NOT_TOGETHER.get(frozenset((name, other))):
            raise ValueError(f"{name} and {other} do not go together: {reason}")


def _one_after_another(changes: Sequence[Callable[[nn.Module], object]]) -> Any:
    def change(model: nn.Module) -> None:
        for each in changes:
            each(model)

    return change


def _one_inside_another(arounds: Sequence[Callable[[str], AbstractContextManager[object]]]) -> Any:
    @contextmanager
    def around(device: str) -> Iterator[None]:
        with ExitStack() as stack:
            for each in arounds:
                stack.enter_context(each(device))
            yield

    return around


# Plugs that take more than one, and how.
_JOINED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "change_model": _one_after_another,
    "around_forward": _one_inside_another,
}


# What a step has but once.
SCHEDULE = frozenset({"schedule of what runs again"})
KEPT = frozenset({"form of what is kept for backward"})
CASTS = frozenset({"autocast"})

TECHNIQUES: dict[str, Technique] = {
    "plain": Technique("AdamW, fused attention, everything kept"),
    "checkpointing": Technique(
        "the activations of every block forgotten, and computed again",
        change_model=scheduled(each_block),
        holds=SCHEDULE,
    ),
    "sqrt-checkpointing": Technique(
        "the same for segments of about √L of the L blocks",
        change_model=scheduled(sqrt_schedule),
        holds=SCHEDULE,
    ),
    "selective-checkpointing": Technique(
        "the same for every block, but for its matrix products and attention, which are kept",
        change_model=scheduled(
            each_block, using=selective(MATMULS | ATTENTION | {flash_attention})
        ),
        holds=SCHEDULE,
    ),
    "int8-activations": Technique(
        "what is kept for backward, in 8 bits",
        around_forward=lambda device: compressed_activations(bits=8),
        holds=KEPT,
    ),
    "int4-activations": Technique(
        "what is kept for backward, in 4 bits, rounded at random",
        around_forward=lambda device: compressed_activations(bits=4),
        holds=KEPT,
    ),
    "autocast": Technique(
        "torch's autocast to bfloat16 in the forward pass",
        around_forward=lambda device: torch.autocast(device, torch.bfloat16),
        holds=CASTS,
    ),
    "loss-scaling": Technique(
        "autocast to float16, the loss scaled so that its gradients stay in float16's range",
        around_forward=lambda device: torch.autocast(device, torch.float16),
        scaler=LossScaler,
        holds=CASTS,
    ),
    "bfloat16": Technique(
        "everything in bfloat16, weights and AdamW's moments too, rounded at random",
        change_model=to_bfloat16,
        optimizer=of_all_weights(optim.RoundedAdamW),
    ),
    "master-weights": Technique(
        "a bfloat16 model, stepped by float32 copies of its weights",
        change_model=to_bfloat16,
        optimizer=master_weights_optimizer,
    ),
    "eager-attention": Technique(
        "attention with its score matrix in memory", attention=attention_reference
    ),
    "flash-attention": Technique(
        "our attention by tiles, which torch's fused attention is too", attention=flash_attention
    ),
    "chunked-loss": Technique(
        "the logits of some tokens at a time, and their gradients at once",
        loss=chunked_cross_entropy,
    ),
    "foreach-adamw": Technique(
        "torch's AdamW on all weights at once",
        optimizer=of_all_weights(torch.optim.AdamW, foreach=True),
    ),
    "fused-adamw": Technique(
        "torch's AdamW in one kernel", optimizer=of_all_weights(torch.optim.AdamW, fused=True)
    ),
    "accumulation": Technique("one sequence at a time, their gradients added", micro_batch=1),
    "lora": Technique(
        "frozen weights, and a trained change of rank 8 beside each matrix",
        change_model=partial(add_lora, rank=8, where=lambda name: name.startswith("blocks.")),
    ),
    "adam8bit": Technique(
        "AdamW with moments of 8 bits", optimizer=rounded_at_random(optim.Adam8bit)
    ),
    "lion": Technique("Lion: one moment, in float32", optimizer=rounded_at_random(optim.Lion)),
    "lion8bit": Technique(
        "Lion: one moment, in 8 bits", optimizer=rounded_at_random(optim.Lion8bit)
    ),
    "adam-mini": Technique("AdamW with a second moment for each row or head", optimizer=adam_mini),
    "step-in-backward": Technique(
        "each weight stepped as soon as its gradient is there",
        stepping=optim.step_in_backward,
    ),
    "offloaded-optimizer": Technique(
        "the optimizer's state on the disk, some weights' at a time on the device",
        stepping=offloaded,
    ),
    "offloaded-activations": Technique(
        "what is kept for backward, on the disk meanwhile",
        around_forward=lambda device: offloaded_activations(activations_on_disk()),
        holds=KEPT,
    ),
    "streamed-layers": Technique(
        "weights, gradients and state on the disk, a block at a time on the device",
        change_model=lambda model: stream_layers(model, DiskStore()),
        stepping=partial(offloaded, weights=True, gradients=True),
    ),
    "post-hoc-ema": Technique(
        "two averages of the weights, of which any other is made afterwards", after_step=averaged
    ),
    "sgd": Technique(
        "torch's SGD: no state at all", optimizer=of_all_weights(torch.optim.SGD, lr=0.01)
    ),
}


def rows_by_kernels() -> dict[str, Technique]:
    """Those rows of TECHNIQUES for which there is a kernel, with it in the plug; and selective
    checkpointing, which has to know attention's to keep what it gives.

    ImportError without Triton.
    """
    from memlab import kernels

    plugs: dict[str, dict[str, Any]] = {
        "selective-checkpointing": {
            "change_model": scheduled(
                each_block, using=selective(MATMULS | ATTENTION | {kernels.flash_attention})
            )
        },
        "flash-attention": {"attention": kernels.flash_attention},
        "chunked-loss": {"loss": kernels.chunked_cross_entropy},
        "int8-activations": {"around_forward": lambda device: kernels.compressed_activations(8)},
        "int4-activations": {"around_forward": lambda device: kernels.compressed_activations(4)},
        "adam8bit": {"optimizer": rounded_at_random(kernels.Adam8bit)},
        "lion8bit": {"optimizer": rounded_at_random(kernels.Lion8bit)},
    }
    return {name: replace(TECHNIQUES[name], **filled) for name, filled in plugs.items()}


# Pairs whose plugs have room for both, and that make no sense, or nobody has built: why.
NOT_TOGETHER: dict[frozenset[str], str] = {
    frozenset(pair.split("+")): reason
    for pair, reason in {
        "accumulation+step-in-backward": "a weight is stepped by the gradient of the first "
        "sequence, before those of the others are there to be added; leave one of them out",
        "accumulation+streamed-layers": "gradients leave for the disk as they come, and those of a "
        "sequence are not divided by the tokens of the batch there; leave one of them out",
        "loss-scaling+bfloat16": "what is float16 and what is bfloat16 add up in float32; take "
        "autocast, or weights in float32",
        "loss-scaling+master-weights": "what is float16 and what is bfloat16 add up in float32; "
        "take autocast, or weights in float32",
        "loss-scaling+step-in-backward": "a weight is stepped before its gradient can be divided "
        "by the scale; take autocast, whose bfloat16 needs no scale",
        "loss-scaling+streamed-layers": "gradients leave for the disk as they come, and the scaler "
        "finds none to divide by the scale; take autocast, whose bfloat16 needs no scale",
        "master-weights+step-in-backward": "the copies are stepped when backward is over; take "
        "bfloat16, whose weights are rounded at random and need no copies",
        "master-weights+offloaded-optimizer": "MasterWeights keeps its copies where the weights "
        "are; take bfloat16, and of OffloadedOptimizer weights=True, which has copies in its store",
        "master-weights+streamed-layers": "streamed layers have float32 copies of their weights in "
        "their store already; take bfloat16",
        "selective-checkpointing+streamed-layers": "a block that runs again has to call the "
        "operators that it called before, and a streamed one fetches its weights but once; take "
        "checkpointing",
        "post-hoc-ema+streamed-layers": "averages are of weights that are on the device, and "
        "between steps streamed ones are not; leave one of them out",
    }.items()
}

# Shown beside the rows: what people turn on together.
COMBINATIONS = (
    *("checkpointing+autocast", "checkpointing+int8-activations"),
    "checkpointing+flash-attention+chunked-loss",
    "checkpointing+lion8bit+step-in-backward",
)
