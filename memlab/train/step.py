"""One training step with plugs: where the model and the techniques come together."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memlab.accumulation import accumulate, split
from memlab.configs import GPTConfig, config_named, name_of
from memlab.data import batches, source_bytes
from memlab.dry_runs import dry_run
from memlab.metering import measure
from memlab.model import GPT
from memlab.precision import LossScaler
from memlab.prediction import predict
from memlab.trace import Trace
from memlab.train.plugs import Plugs, plugs_of
from memlab.train.technique import Technique

SEED = 0
TEXT = "1 MiB"


@dataclass(frozen=True)
class Setting:
    """The model, batch, dtype and device of a training: the parts that no technique changes."""

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

    @property
    def parameters(self) -> int:
        """The number of the model's weights."""
        return self.config.parameters

    def build(self, technique: Technique | Plugs) -> "Training":
        """Build a training; see `build`."""
        return build(self, technique)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        model = self.model if isinstance(self.model, str) else name_of(self.model)
        return f"{model}, {self.batch} × {self.seq_len} tokens, {dtype}, {self.device}"


@dataclass(frozen=True)
class Training:
    """A step that can run repeatedly, with its model and optimizer.

    `update` is the part of the step after backward, which updates the weights. Every step reads
    `batch`, tokens and targets. To train on another batch, copy it into these tensors.
    """

    step: Callable[[], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[[], object]
    batch: tuple[Tensor, ...]


def build(
    setting: Setting,
    technique: Technique | Plugs,
    *,
    on_loss: Callable[[Tensor], object] | None = None,
) -> Training:
    """Build a training: the same weights and batch for every technique. The first step makes the
    optimizer's state.

    `on_loss` is called with the loss of each micro-batch, unscaled, before its backward. Sets
    torch's seed.
    """
    plugs = plugs_of(technique)
    model = make_model(setting, plugs)
    optimizer = plugs.stepping(plugs.optimizer(model))
    scaler = plugs.scaler() if plugs.scaler else None
    update = _update(optimizer, scaler, plugs.after_step(model))
    tokens, targets = make_batch(setting)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with plugs.around_forward(setting.device):
            loss = model(tokens, targets)
        if on_loss is not None:
            on_loss(loss.detach())
        return scaler.scale(loss) if scaler else loss

    def share_of_loss(part: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        # Not a sum over tokens and their number: scaled, that overflows float16.
        share = part[1].numel() / targets.numel()
        return loss_of(*part) * share, share

    def step() -> None:
        optimizer.zero_grad()
        if plugs.micro_batch is None:
            loss_of(tokens, targets).backward()
        else:
            parts = split((tokens, targets), plugs.micro_batch)
            accumulate(parts, share_of_loss, model.parameters())
        update()

    holder = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    return Training(step, model, holder, update, (tokens, targets))


def _update(
    optimizer: Any, scaler: LossScaler | None, after_step: Callable[[], object]
) -> Callable[[], None]:
    """The part of a step after backward."""

    def update() -> None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        after_step()

    return update


def make_model(setting: Setting, plugs: Plugs) -> GPT:
    """Make the model, with the same weights for every technique. Sets torch's seed."""
    torch.manual_seed(SEED)
    with torch.device(setting.device):
        model = GPT(
            setting.config,
            attention=plugs.attention,
            loss=plugs.loss,
            dtype=setting.dtype,
        )
    plugs.change_model(model)
    return model


def make_batch(setting: Setting) -> tuple[Tensor, Tensor]:
    """Make tokens and targets, each (B, T)."""
    text = source_bytes(TEXT)
    tokens, targets = next(batches(text, setting.batch, setting.seq_len, SEED))
    return tokens.to(setting.device), targets.to(setting.device)


def measured(training: Training) -> Trace:
    """The trace of the training's next step."""
    return measure(training.step, model=training.model, optimizer=training.optimizer)


def dry_trace(setting: Setting, technique: Technique | Plugs) -> Trace:
    """The trace of the second step, in a dry run: it computes nothing and allocates no memory.

    Instead of a first step, only the optimizer steps, with zero gradients. This creates its state
    as a first step would, in half the time.
    """
    with dry_run():
        training = build(setting, technique)
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        training.update()
        return measured(training)


def predicted_trace(setting: Setting, technique: Technique | Plugs) -> Trace:
    """The trace of the second step, predicted for the setting's device: "cuda" or another target
    of `predict`. Needs no GPU."""

    def parts() -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
        training = build(replace(setting, device="cuda"), technique)
        return training.step, training.model, training.optimizer

    return predict(parts, device=setting.device)
