"""One training step with plugs: the only file that knows the model and the techniques together.

A technique is a row of TECHNIQUES, and each row fills one or more of the plugs: a function in place
of a function (attention, loss), a change of the model (a wrapper around each block, a layer in
place of a layer), a `with` around the forward pass, the size of a micro-batch, an optimizer. Delete
the row and the technique is gone.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memlab.accumulation import accumulate, split
from memlab.attention import attention_reference
from memlab.data import batches, stdlib_bytes
from memlab.lora import add_lora
from memlab.metering import dry_run, measure, predict
from memlab.model import (
    GPT,
    PRESETS,
    AttentionFunction,
    LossFunction,
    cross_entropy,
    scaled_dot_product_attention,
)
from memlab.trace import Trace

SEED = 0
TEXT = "1 MiB"

OptimizerFunction = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
one_by_one_adamw = partial(torch.optim.AdamW, foreach=False)


@dataclass(frozen=True)
class Setting:
    """What is trained: everything that the techniques leave alone."""

    model: str = "25m"
    batch: int = 4
    seq_len: int = 256
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.model not in PRESETS:
            raise ValueError(f"got model {self.model!r}; choose one of {', '.join(PRESETS)}")
        longest = PRESETS[self.model].seq_len
        if not 1 <= self.seq_len <= longest:
            raise ValueError(
                f"got sequences of {self.seq_len} tokens; {self.model} takes 1 to {longest}"
            )
        if self.batch < 1:
            raise ValueError(f"got a batch of {self.batch} sequences; give at least 1")

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.model}, {self.batch} × {self.seq_len} tokens, {dtype}, {self.device}"


@dataclass(frozen=True)
class Technique:
    """What to put into each plug; every default is the plain step."""

    summary: str
    attention: AttentionFunction = scaled_dot_product_attention
    loss: LossFunction = cross_entropy
    change_model: Callable[[nn.Module], object] = lambda model: None  # in place
    around_forward: Callable[[str], AbstractContextManager[object]] = lambda device: nullcontext()
    micro_batch: int | None = None  # sequences at once, their gradients added; None: all
    optimizer: OptimizerFunction = one_by_one_adamw


@dataclass(frozen=True)
class Training:
    """A step that can be run again and again, and what it trains."""

    step: Callable[[], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer


def build(setting: Setting, technique: Technique) -> Training:
    """The same weights and the same batch for every technique; the first step makes the state.

    It sets torch's seed.
    """
    torch.manual_seed(SEED)
    device = setting.device
    with torch.device(device):
        model = GPT(
            PRESETS[setting.model],
            attention=technique.attention,
            loss=technique.loss,
            dtype=setting.dtype,
        )
    technique.change_model(model)
    optimizer = technique.optimizer(model.parameters())
    text = stdlib_bytes(TEXT)
    tokens, targets = next(batches(text, setting.batch, setting.seq_len, SEED))
    tokens, targets = tokens.to(device), targets.to(device)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with technique.around_forward(device):
            return model(tokens, targets)

    def sum_of_losses(part: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        _, its_targets = part
        return loss_of(*part) * its_targets.numel(), its_targets.numel()

    def step() -> None:
        optimizer.zero_grad()
        if technique.micro_batch is None:
            loss_of(tokens, targets).backward()
        else:
            parts = split((tokens, targets), technique.micro_batch)
            accumulate(parts, sum_of_losses, model.parameters())
        optimizer.step()

    return Training(step, model, optimizer)


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
        training.optimizer.step()
        return measured(training)


def predicted_trace(setting: Setting, technique: Technique) -> Trace:
    """The trace of the second step as the setting's device, "cuda" or another target of `predict`,
    would take it, without one."""

    def parts() -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
        training = build(replace(setting, device="cuda"), technique)
        return training.step, training.model, training.optimizer

    return predict(parts, target=setting.device)


def each_block(wrap: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """The change of a model that wraps every block of it."""

    def change(model: nn.Module) -> None:
        for block in model.blocks:
            wrap(block)

    return change


def checkpoint_block(block: nn.Module) -> None:
    """Let `block` drop its activations and compute them again in backward."""
    forward = block.forward
    block.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)


TECHNIQUES: dict[str, Technique] = {
    "plain": Technique("AdamW, fused attention, everything kept"),
    "checkpointing": Technique(
        "torch's activation checkpointing around every block",
        change_model=each_block(checkpoint_block),
    ),
    "autocast": Technique(
        "torch's autocast to bfloat16 in the forward pass",
        around_forward=lambda device: torch.autocast(device, torch.bfloat16),
    ),
    "eager-attention": Technique(
        "attention with its score matrix in memory", attention=attention_reference
    ),
    "foreach-adamw": Technique(
        "torch's AdamW on all weights at once",
        optimizer=partial(torch.optim.AdamW, foreach=True),
    ),
    "fused-adamw": Technique(
        "torch's AdamW in one kernel", optimizer=partial(torch.optim.AdamW, fused=True)
    ),
    "accumulation": Technique("one sequence at a time, their gradients added", micro_batch=1),
    "lora": Technique(
        "frozen weights, and a trained change of rank 8 beside each matrix",
        change_model=partial(add_lora, rank=8, where=lambda name: name.startswith("blocks.")),
    ),
    "sgd": Technique("torch's SGD: no state at all", optimizer=partial(torch.optim.SGD, lr=0.01)),
}
