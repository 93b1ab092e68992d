"""Techniques put around a training that somebody else wrote: (step, model, optimizer) in and out.

    step, model, optimizer = build()
    for rung in ladder(find(model, optimizer)):  # from what changes least to what saves most
        rung.applied(*build())

The step is a closure and stays as it is. What can be changed around it: the layers of the model's
list run inside a checkpoint; the optimizer that the step calls hands its step on to another of the
same weights; what backward will want is kept elsewhere. Each rung has the lines that do the same
where the training is built: they name the list and the learning rate that were found there.
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

NO_LAYERS = (
    "checkpointing cannot be put around this model: no nn.ModuleList or nn.Sequential holds its "
    "layers; call memlab.checkpointing.checkpoint(layer, x) in its forward"
)
RULED_OUT = (
    "a weight that is stepped in backward has no gradient left: no accumulation then, no clipping "
    "by the global norm, no loss scaling"
)
LION_RATE = 1 / 5  # of Adam's: Lion's steps all have the length of the learning rate


def checkpointed(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
    """Each layer of the model's list forgets its activations."""
    path = None if model is None else path_of_layers(model)
    if path is None:
        raise ValueError(f"got {_named(model)}; {NO_LAYERS}")
    for layer in model.get_submodule(path):
        layer.forward = partial(checkpoint, layer.forward)
    return step, model, optimizer


def stepped_by(
    made: Callable[..., Any], rate: float = 1.0, in_backward: bool = False
) -> Callable[..., Parts]:
    """The optimizer's weights are stepped by another one, at so much of its learning rate."""

    def change(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"build() returned {_named(optimizer)} as optimizer; another can only take the "
                f"place of a torch.optim.Optimizer"
            )
        groups = [{"params": g["params"], "lr": g["lr"] * rate} for g in optimizer.param_groups]
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


def _named(part: object) -> str:
    return "nothing" if part is None else f"a {type(part).__name__}"


# ------------------------------------------------------------------ what is there to change


def path_of_layers(model: nn.Module) -> str | None:
    """The name in the model of the list around whose layers a checkpoint can be put: its
    `nn.ModuleList`, else `nn.Sequential`, of the most layers with weights; "" is the model itself.
    """
    for kind in (nn.ModuleList, nn.Sequential):
        found = {
            path: sum(any(True for _ in layer.parameters()) for layer in module)
            for path, module in model.named_modules()
            if isinstance(module, kind)
        }
        longest = max(found, key=found.__getitem__, default=None)  # of equal ones the outermost
        if longest is not None and found[longest] > 1:
            return longest
    return None


@dataclass(frozen=True)
class Places:
    """Where techniques can be put in a training.

    layers  the path of the list of layers in the model; None where a checkpoint cannot be put
    rate    the optimizer's learning rate; None where its groups have several, or it has none
    """

    layers: str | None = None
    rate: float | None = None


def find(model: nn.Module | None, optimizer: Any) -> Places:
    """The places of a training, as `build()` made it."""
    rates = [group.get("lr") for group in getattr(optimizer, "param_groups", ())]
    is_one = all(isinstance(rate, float | int) for rate in rates) and len(set(rates)) == 1
    return Places(None if model is None else path_of_layers(model), rates[0] if is_one else None)


# ------------------------------------------------------------------ rungs


@dataclass(frozen=True)
class Rung:
    """Some techniques at once, and the lines that turn them on where a training is built."""

    techniques: tuple["Around", ...] = ()
    places: Places = Places()

    @property
    def name(self) -> str:
        return ", ".join(each.name for each in self.techniques) or "as it is"

    @property
    def lines(self) -> list[str]:
        """Python, to be put after the model and the optimizer are made."""
        imports = {line for each in self.techniques for line in each.imports}
        return sorted(imports) + [each.line(self.places) for each in self.techniques]

    def applied(self, step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        parts = step, model, optimizer
        for each in self.techniques:
            parts = each.change(*parts)
        return parts


@dataclass(frozen=True)
class Around:
    """One change, and how it is written."""

    name: str
    change: Callable[..., Parts]
    imports: tuple[str, ...]
    line: Callable[[Places], str]
    but: str | None = None  # what it rules out


def _layers_line(places: Places) -> str:
    path = f"model.{places.layers}" if places.layers else "model"
    return f"for layer in {path}: layer.forward = partial(checkpoint, layer.forward)"


def _optimizer_line(made: type, rate: float, in_backward: bool, places: Places) -> str:
    share = "" if rate == 1 else f" * {rate:g}"
    if places.rate is None:
        groups = f'{{"params": g["params"], "lr": g["lr"]{share}}} for g in optimizer.param_groups'
        given = f"[{groups}]"
    else:
        given = f"model.parameters(), lr={places.rate * rate:g}"
    new = f'{made.__name__}({given}, rounding="stochastic")'
    return f"optimizer = {f'step_in_backward({new})' if in_backward else new}"


def _stepped_by(made: type, rate: float = 1.0, in_backward: bool = False) -> Around:
    imported = f"{made.__name__}, step_in_backward" if in_backward else made.__name__
    return Around(
        f"{made.__name__.lower()}{', step in backward' if in_backward else ''}",
        stepped_by(made, rate, in_backward),
        (f"from memlab.optim import {imported}",),
        partial(_optimizer_line, made, rate, in_backward),
        RULED_OUT if in_backward else None,
    )


CHECKPOINTED = Around(
    "checkpointing",
    checkpointed,
    ("from functools import partial", "from memlab.checkpointing import checkpoint"),
    _layers_line,
)
ADAM = _stepped_by(Adam8bit)
LION = _stepped_by(Lion8bit, LION_RATE, in_backward=True)
ON_DISK = Around(
    "offloaded-activations",
    kept_on_disk,
    ("from memlab.offload import DiskStore, offloaded_activations",),
    lambda places: "with offloaded_activations(DiskStore()): loss = ...  # as before, to the loss",
)

AS_IT_IS = Rung()
CLIMB = (
    (CHECKPOINTED,),
    (ADAM,),
    (CHECKPOINTED, ADAM),
    (LION,),
    (CHECKPOINTED, LION),
    (LION, ON_DISK),
    (CHECKPOINTED, LION, ON_DISK),
)


def ladder(places: Places) -> tuple[Rung, ...]:
    """What to try, one after the other: a rung that needs a list of layers only where there is."""
    return tuple(
        Rung(techniques, places)
        for techniques in CLIMB
        if places.layers is not None or CHECKPOINTED not in techniques
    )
