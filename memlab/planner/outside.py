"""Techniques put around a training that somebody else wrote: (step, model, optimizer) in and out.

    step, model, optimizer = build()
    for attempt in attempts(find(model, optimizer)):  # from what changes least to what saves most
        attempt.applied(*build())

The step is a closure and stays as it is. What can be changed around it: the layers of the model's
list run inside a checkpoint; the optimizer that the step calls hands its step on to another of the
same weights; what backward will want is kept elsewhere. Each attempt has the lines that do the same
where the training is built: they name the lists of layers that were found there, and take the
optimizer's groups as they are.
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
from memlab.train.registry import TECHNIQUES

Parts = tuple[Callable[[], Any], nn.Module | None, Any]
Change = Callable[..., Parts]
Groups = list[dict[str, Any]]

NO_LAYERS = (
    "checkpointing cannot be put around this model: no nn.ModuleList or nn.Sequential holds its "
    "layers, or these write in place or have hooks before their forward pass; call "
    "memlab.checkpointing.checkpoint(layer, x) in its forward"
)
NO_ADAM = (
    "the optimizer stays: only for Adam and AdamW (decoupled weight decay, no AMSGrad, a learning "
    "rate that is a number) is it known which rate another would want"
)


def checkpointed(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
    """Each layer of the model's lists forgets its activations."""
    paths = () if model is None else paths_of_layers(model)
    if not paths:
        raise ValueError(f"got {_named(model)}; {NO_LAYERS}")
    for path in paths:
        for layer in model.get_submodule(path):
            layer.forward = partial(checkpoint, layer.forward)
    return step, model, optimizer


def stepped_by(
    made: Callable[..., Any], groups_of: Callable[[Any], Groups], in_backward: bool = False
) -> Change:
    """The optimizer's weights are stepped by another one, of groups made of its own."""

    def change(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        if not is_adam(optimizer):
            raise ValueError(f"build() returned {_named(optimizer)} as optimizer; {NO_ADAM}")
        other = made(groups_of(optimizer), rounding="stochastic")
        stepping = step_in_backward(other) if in_backward else other
        optimizer.step = _handed_to(stepping, optimizer)
        return step, model, other

    return change


def _handed_to(stepping: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """A step of the other in the place of the optimizer's own, as a scheduler wants to see it."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return stepping.step()

    step._wrapped_by_lr_sched = True
    return step


def adams_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """For one that steps as Adam does: the same settings."""
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    return [{key: group[key] for key in keys} for group in optimizer.param_groups]


def lions_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """For Lion, whose steps all have the length of the rate: a fifth of Adam's, and five times the
    weight decay, so that their product is the same (Chen et al. 2023, arXiv 2302.06675)."""
    return [
        {"params": g["params"], "lr": g["lr"] / 5, "weight_decay": g["weight_decay"] * 5}
        for g in optimizer.param_groups
    ]


class KeptOnDisk:
    """A step of which what backward will want waits on the disk."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step, self.store = step, DiskStore()

    def __call__(self) -> None:
        with offloaded_activations(self.store):
            self.step()


def kept_on_disk(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
    """What backward will want waits on the disk."""
    return KeptOnDisk(step), model, optimizer


def _named(part: object) -> str:
    return "nothing" if part is None else f"a {type(part).__name__}"


# ------------------------------------------------------------------ what is there to change


def paths_of_layers(model: nn.Module, path: str = "") -> tuple[str, ...]:
    """The names in the model of the lists around whose layers a checkpoint can be put; "" is the
    model itself. Lists are `nn.ModuleList` and `nn.Sequential` of two layers with weights or more;
    of lists inside of lists the outer, unless its layers are of several kinds.
    """
    inner = tuple(
        found
        for name, child in model.named_children()
        for found in paths_of_layers(child, f"{path}.{name}".lstrip("."))
    )
    if not isinstance(model, nn.ModuleList | nn.Sequential):
        return inner
    layers = list(model)
    kinds = [type(layer) for layer in layers if any(True for _ in layer.parameters())]
    is_list = len(kinds) > 1 and (len(set(kinds)) == 1 or not inner)
    return (path,) if is_list and all(map(_can_run_again, layers)) else inner


def _can_run_again(layer: nn.Module) -> bool:
    """Not one that writes over what the checkpoint before it has to keep, nor one whose hooks
    change its weights before each forward pass (spectral_norm)."""
    has_hooks = any(module._forward_pre_hooks for module in layer.modules())
    return not has_hooks and not getattr(layer, "inplace", False)


def is_adam(optimizer: Any) -> bool:
    """Whether another optimizer can take its place at a rate that is known."""
    if not isinstance(optimizer, torch.optim.Adam):  # of which AdamW is one
        return False
    return all(
        isinstance(group["lr"], float | int)
        and not (group["amsgrad"] or group["maximize"])
        and (group["decoupled_weight_decay"] or not group["weight_decay"])
        for group in optimizer.param_groups
    )


@dataclass(frozen=True)
class Places:
    """Where techniques can be put in a training.

    layers   the paths of its lists of layers; none where a checkpoint cannot be put
    is_adam  whether another optimizer can take its optimizer's place
    """

    layers: tuple[str, ...] = ()
    is_adam: bool = False


def find(model: nn.Module | None, optimizer: Any) -> Places:
    """The places of a training, as `build()` made it."""
    return Places(() if model is None else paths_of_layers(model), is_adam(optimizer))


# ------------------------------------------------------------------ attempts


@dataclass(frozen=True)
class Wrapper:
    """Techniques of the registry that are put around a training together.

    change   the same, done to a training that is built
    inside   how many of the code's last lines go around the forward pass
    """

    techniques: tuple[str, ...]
    change: Change
    inside: int = 0

    @property
    def name(self) -> str:
        return ", ".join(self.techniques)

    def lines(self, places: Places) -> list[str]:
        """The lines that go after the model and the optimizer are made."""
        lines = [line for name in self.techniques for line in TECHNIQUES[name].code.memlab]
        lines = lines[: len(lines) - self.inside]
        return [written for line in lines for written in _at_each_list(line, places.layers)]

    @property
    def lines_inside(self) -> list[str]:
        """The lines that go around the forward pass."""
        lines = TECHNIQUES[self.techniques[-1]].code.memlab
        return list(lines[len(lines) - self.inside :])

    @property
    def costs(self) -> list[str]:
        """What each technique costs."""
        return [f"{name}: {TECHNIQUES[name].costs}" for name in self.techniques]


@dataclass(frozen=True)
class Attempt:
    """Some wrappers at once, and the lines that turn them on where a training is built."""

    wrappers: tuple[Wrapper, ...] = ()
    places: Places = Places()

    @property
    def name(self) -> str:
        return ", ".join(each.name for each in self.wrappers) or "as it is"

    @property
    def lines(self) -> list[str]:
        """Python, to be put after the model and the optimizer are made; imports come first."""
        lines = [line for each in self.wrappers for line in each.lines(self.places)]
        imports = {line for line in lines if line.startswith(("from ", "import "))}
        return sorted(imports) + [line for line in lines if line not in imports]

    @property
    def lines_inside(self) -> list[str]:
        """Python, to be put around the forward pass."""
        return [line for each in self.wrappers for line in each.lines_inside]

    @property
    def costs(self) -> list[str]:
        """What each technique costs."""
        return [sentence for each in self.wrappers for sentence in each.costs]

    @property
    def production(self) -> list[str]:
        """The same by the packages that most people use, where there is one."""
        names = [name for each in self.wrappers for name in each.techniques]
        return [line for name in names for line in TECHNIQUES[name].code.production]

    def applied(self, step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        parts = step, model, optimizer
        for each in self.wrappers:
            parts = each.change(*parts)
        return parts


_ANY_LIST = "model.layers"  # how the registry's code names a model's list of layers


def _at_each_list(line: str, paths: tuple[str, ...]) -> list[str]:
    """The line, for each of the model's lists of layers if it is about one."""
    if _ANY_LIST not in line:
        return [line]
    return [line.replace(_ANY_LIST, _written(path)) for path in paths]


def _written(path: str) -> str:
    """As Python: `model.encoder[1]` for "encoder.1"."""
    names = path.split(".") if path else []
    if not all(name.isdecimal() or name.isidentifier() for name in names):
        return f"model.get_submodule({path!r})"
    return "model" + "".join(f"[{name}]" if name.isdecimal() else f".{name}" for name in names)


CHECKPOINTED = Wrapper(("checkpointing",), checkpointed)
ADAM = Wrapper(("adam8bit",), stepped_by(Adam8bit, adams_groups))
LION = Wrapper(
    ("lion8bit", "step-in-backward"), stepped_by(Lion8bit, lions_groups, in_backward=True)
)
ON_DISK = Wrapper(("offloaded-activations",), kept_on_disk, inside=1)

AS_IT_IS = Attempt()
ORDER = (
    (CHECKPOINTED,),
    (ADAM,),
    (CHECKPOINTED, ADAM),
    (CHECKPOINTED, ON_DISK),  # before what takes more to the disk for it
    (ON_DISK,),
    (CHECKPOINTED, ADAM, ON_DISK),
    (ADAM, ON_DISK),
    (LION,),
    (CHECKPOINTED, LION),
    (CHECKPOINTED, LION, ON_DISK),
    (LION, ON_DISK),
)


def attempts(places: Places) -> tuple[Attempt, ...]:
    """What to try, one after the other, where the training has a place for it."""
    return tuple(
        Attempt(wrappers, places)
        for wrappers in ORDER
        if (places.layers or CHECKPOINTED not in wrappers)
        and (places.is_adam or not {ADAM, LION} & set(wrappers))
    )
