"""The plugs of a training step, and how the registry's rows fill them.

    attention, loss   a function that replaces the plain one
    change_model      a change of the model: wraps each block, or replaces layers
    around_forward    a `with` around the forward pass
    micro_batch       how many sequences run at once
    scaler            a loss scaler
    optimizer         an optimizer
    stepping          when the optimizer steps: after backward, inside it, or offloaded
    after_step        a call after each step

`combined("checkpointing+autocast")` returns the plugs of several rows at once.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import nn

from memlab import optim
from memlab.checkpointing import (
    ATTENTION,
    MATMULS,
    checkpoint,
    checkpoint_blocks,
    selective,
    uniform_schedule,
)
from memlab.checkpointing.schedules import Schedule
from memlab.compression import compressed_activations
from memlab.ema import PostHocEMA
from memlab.lora import add_lora
from memlab.model import (
    AttentionFunction,
    LossFunction,
    cross_entropy,
    scaled_dot_product_attention,
)
from memlab.offload import DiskStore, OffloadedOptimizer, offloaded_activations, stream_layers
from memlab.optim.apollo import MINI
from memlab.precision import LossScaler, MasterWeights, convert_to_fp8
from memlab.qlora import add_qlora
from memlab.train.adapters import Adapters
from memlab.train.registry import ADAPTERS, JOIN, rows_of
from memlab.train.technique import Technique

Optimizer = torch.optim.Optimizer | MasterWeights | optim.InBackward
OptimizerFunction = Callable[[nn.Module], Optimizer]


def of_all_weights(made: Callable[..., Optimizer], **settings: Any) -> OptimizerFunction:
    """Return a function that makes this optimizer, with these settings, of all of a model's
    weights."""
    return lambda model: made(model.parameters(), **settings)


one_by_one_adamw = partial(torch.optim.AdamW, foreach=False)
plain_optimizer = of_all_weights(one_by_one_adamw)
USUAL_ADAPTERS = Adapters()


@dataclass(frozen=True)
class Plugs:
    """What goes into each plug of a training step; the defaults are the plain step."""

    attention: AttentionFunction = scaled_dot_product_attention
    loss: LossFunction = cross_entropy
    change_model: Callable[[nn.Module], object] = lambda model: None  # in place
    around_forward: Callable[[str], AbstractContextManager[object]] = lambda device: nullcontext()
    micro_batch: int | None = None  # sequences at once, their gradients added; None: all
    scaler: Callable[[], LossScaler] | None = None
    optimizer: OptimizerFunction = plain_optimizer
    stepping: Callable[[Optimizer], Optimizer] = lambda optimizer: optimizer
    after_step: Callable[[nn.Module], Callable[[], object]] = lambda model: lambda: None


# ------------------------------------------------------------------ several rows at once


def combined(names: str, *, adapters: Adapters = USUAL_ADAPTERS) -> Plugs:
    """Return the plugs of one row, or of several joined by "+", in any order. `adapters` sets the
    adapters of lora and qlora.

    Raises KeyError for an unknown name, and ValueError for two that do not work together.
    """
    return _filled(rows_of(names).values(), adapters=adapters)


def plugs_of(technique: "Technique | Plugs") -> Plugs:
    """Return the plugs of a row of the registry; Plugs are returned as they are."""
    return technique if isinstance(technique, Plugs) else _filled([technique])


def _filled(rows: Iterable[Technique], *, adapters: Adapters = USUAL_ADAPTERS) -> Plugs:
    filled: dict[str, list[Any]] = {}
    for row in rows:
        for plug, make in row.plugs.items():
            put_in = partial(make(), adapters=adapters) if row.slot == ADAPTERS else make()
            filled.setdefault(plug, []).append(put_in)
    return Plugs(
        **{
            plug: values[0] if len(values) == 1 else JOIN[plug](values)
            for plug, values in filled.items()
        }
    )


# ------------------------------------------------------------------ what the rows put in


def stochastically_rounded(made: Callable[..., Optimizer]) -> OptimizerFunction:
    """Return a function that makes an optimizer which rounds bfloat16 weights stochastically.

    Rounded to nearest, they would lose most small steps. Weights in float32 are not rounded.
    """
    return of_all_weights(made, rounding="stochastic")


master_weights_optimizer = of_all_weights(MasterWeights, optimizer=one_by_one_adamw)
each_block = partial(uniform_schedule, every=1)


def scheduled(
    schedule: Callable[[int], Schedule], using: Callable[..., Any] = checkpoint
) -> Callable[[nn.Module], None]:
    """Return a change of a model: its blocks run by the schedule for their number."""

    def change(model: Any) -> None:
        checkpoint_blocks(model, schedule(len(model.blocks)), using=using)

    return change


def selectively_checkpointed(attention: Callable[..., Any]) -> Callable[[nn.Module], None]:
    """Checkpoint each block, but keep the outputs of its matmuls and of attention."""
    return scheduled(each_block, using=selective(MATMULS | ATTENTION | {attention}))


def compressing(bits: int) -> Callable[[str], AbstractContextManager[object]]:
    """Keep what the forward pass saves for backward in so many bits."""
    return lambda device: compressed_activations(bits=bits)


def activations_offloaded(device: str) -> AbstractContextManager[object]:
    """Keep what the forward pass saves for backward on the disk."""
    return offloaded_activations(_activations_on_disk())


@cache
def _activations_on_disk() -> DiskStore:
    """One for all steps of this process, in a temporary folder that goes with it."""
    return DiskStore()


def offloaded(optimizer: torch.optim.Optimizer, **settings: Any) -> OffloadedOptimizer:
    """Keep optimizer state in a temporary folder, in sub-groups smaller than our models."""
    return OffloadedOptimizer(optimizer, DiskStore(), sub_group=2**20, **settings)


offloaded_with_weights = partial(offloaded, weights=True, gradients=True)


def streamed(model: nn.Module) -> None:
    """Keep the weights of each block on the disk while it does not run."""
    stream_layers(model, DiskStore())


def averaged(model: nn.Module, **settings: Any) -> Callable[[], object]:
    """Update two averages of the weights after each step; take no snapshots."""
    ema, steps = PostHocEMA(model, "no-snapshots", **settings), count(1)
    return lambda: ema.update(next(steps))


def to_bfloat16(model: nn.Module) -> None:
    """Convert the weights to bfloat16, and with them activations and gradients."""
    model.to(torch.bfloat16)


def blocks_to_fp8(model: nn.Module) -> None:
    """Run the matmuls of the blocks' linear layers in FP8."""
    convert_to_fp8(model, where=_is_in_block)


def add_lora_to_blocks(model: nn.Module, adapters: Adapters) -> object:
    """Freeze the model, and train a low-rank change beside matrices of its blocks."""
    return add_lora(model, adapters.rank, where=adapters.selects)


def add_qlora_to_blocks(model: nn.Module, adapters: Adapters) -> object:
    """Freeze the model, quantize all matrices of its blocks to 4 bits, and train such changes."""
    return add_qlora(model, adapters.rank, where=_is_in_block, adapt=adapters.selects)


def _is_in_block(name: str) -> bool:
    return name.startswith("blocks.")


def of_matrices(made: Callable[..., Optimizer], **settings: Any) -> OptimizerFunction:
    """Return a function that makes an optimizer with a step of its own for matrices of hidden
    layers, which rounds bfloat16 weights stochastically.

    A function as a setting gets the model's hidden size.
    """

    def make(model: Any) -> Optimizer:
        hidden_size = model.config.hidden_size
        own = {name: got(hidden_size) if callable(got) else got for name, got in settings.items()}
        return made(optim.matrix_groups(model), rounding="stochastic", **own)

    return make


apollo_mini = of_matrices(optim.Apollo, **MINI)


def adam_mini(model: Any) -> optim.AdamMini:
    """Adam-mini of all the trained weights of our GPT; LoRA's factors by rows."""
    rules = optim.GPT_RULES | {"down": "row", "up": "row"}
    partition = optim.ByRules(rules, model.config.head_dim)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return optim.AdamMini(trained, partition=partition, rounding="stochastic")
