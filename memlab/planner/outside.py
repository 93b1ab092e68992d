"""Techniques put around a training that somebody else wrote: (step, model, optimizer) in and out.

    for rung in LADDER:                       # from what changes least to what saves most
        step, model, optimizer = rung.applied(*build())

The step is a closure and stays as it is. What can be changed around it: the layers of the model's
list run inside a checkpoint; the optimizer that the step calls hands its step on to another of the
same weights; what backward will want is kept elsewhere. Each rung has the lines that do the same
where the training is built.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.checkpointing import checkpoint
from memlab.offload import DiskStore, offloaded_activations
from memlab.optim import Adam8bit, Lion8bit, step_in_backward

Parts = tuple[Callable[[], Any], nn.Module | None, Any]


def checkpointed(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
    """Each layer of the model's longest `nn.ModuleList` forgets its activations."""
    for layer in layers_of(model):
        layer.forward = partial(checkpoint, layer.forward)
    return step, model, optimizer


def stepped_by(made: Callable[..., Any], in_backward: bool = False) -> Callable[..., Parts]:
    """The optimizer's weights are stepped by another one, at its learning rate."""

    def change(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"build() returned {_named(optimizer)} as optimizer; another can only take the "
                f"place of a torch.optim.Optimizer"
            )
        groups = [{"params": g["params"], "lr": g["lr"]} for g in optimizer.param_groups]
        other = made(groups, rounding="stochastic")
        stepping = step_in_backward(other) if in_backward else other
        optimizer.step = lambda *args, **kwargs: stepping.step()
        return step, model, other

    return change


def kept_on_disk(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
    """What backward will want waits on the disk."""
    store = DiskStore()

    def changed() -> None:
        with offloaded_activations(store):
            step()

    return changed, model, optimizer


def layers_of(model: nn.Module | None) -> list[nn.Module]:
    """The layers that a checkpoint can be put around; ValueError where there is no list of them."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)] if model else []
    if not lists:
        raise ValueError(
            f"{_named(model)} holds its layers in no nn.ModuleList, where a checkpoint could be "
            f"put around each; call memlab.checkpointing.checkpoint(layer, x) in its forward"
        )
    return list(max(lists, key=len))


def _named(part: object) -> str:
    return "nothing" if part is None else f"a {type(part).__name__}"


@dataclass(frozen=True)
class Rung:
    """Some techniques at once, and the lines that turn them on where a training is built."""

    name: str
    changes: tuple[Callable[..., Parts], ...] = ()
    lines: tuple[str, ...] = ()

    def applied(self, step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        parts = step, model, optimizer
        for change in self.changes:
            parts = change(*parts)
        return parts


_CHECKPOINT = "for layer in model.layers: layer.forward = partial(checkpoint, layer.forward)"
_ADAM = 'optimizer = memlab.optim.Adam8bit(model.parameters(), lr=lr, rounding="stochastic")'
_LION = 'optimizer = memlab.optim.Lion8bit(model.parameters(), lr=lr / 5, rounding="stochastic")'
_IN_BACKWARD = "optimizer = memlab.optim.step_in_backward(optimizer)  # no accumulation then"
_ON_DISK = "with memlab.offload.offloaded_activations(store): loss = model(...)"

LADDER = (
    Rung("as it is"),
    Rung("checkpointing", (checkpointed,), (_CHECKPOINT,)),
    Rung("adam8bit", (stepped_by(Adam8bit),), (_ADAM,)),
    Rung("checkpointing, adam8bit", (checkpointed, stepped_by(Adam8bit)), (_CHECKPOINT, _ADAM)),
    Rung(
        "checkpointing, lion8bit, step in backward",
        (checkpointed, stepped_by(Lion8bit, in_backward=True)),
        (_CHECKPOINT, _LION, _IN_BACKWARD),
    ),
    Rung(
        "checkpointing, lion8bit, step in backward, offloaded-activations",
        (checkpointed, stepped_by(Lion8bit, in_backward=True), kept_on_disk),
        (_CHECKPOINT, _LION, _IN_BACKWARD, _ON_DISK),
    ),
)
