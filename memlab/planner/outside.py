"""Apply techniques to a user's own training, given as (step, model, optimizer).

    step, model, optimizer = build()
    for attempt in attempts(find(model, optimizer)):  # from the smallest change to the most saving
        attempt.applied(*build())

The step is a closure and stays unchanged. Three things around it can change. The layers in the
model's lists run under a checkpoint. The optimizer's step calls another optimizer of the same
weights. Saved tensors go to disk. Each attempt also has the lines of code that do the same in the
user's script. They use the paths of the lists of layers that were found, and the optimizer's own
parameter groups.
"""

import sys
from collections.abc import Callable, Iterable
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
    "memlab cannot checkpoint this model from outside: no nn.ModuleList or nn.Sequential holds its "
    "layers, or the layers write in place or have hooks before their forward pass; call "
    "memlab.checkpointing.checkpoint(layer, x) in its forward"
)
NO_ADAM = (
    "the optimizer is not replaced: memlab can only convert the learning rate of Adam and AdamW "
    "(decoupled weight decay, no AMSGrad, a learning rate given as a number)"
)


def checkpointed(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
    """Checkpoint each layer in the model's lists."""
    layers = [] if model is None else layers_of(model)
    if not layers:
        raise ValueError(f"got {_named(model)}; {NO_LAYERS}")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward)
    return step, model, optimizer


def stepped_by(
    made: Callable[..., Any], groups_of: Callable[[Any], Groups], in_backward: bool = False
) -> Change:
    """Step the optimizer's weights by another optimizer, built from its parameter groups."""

    def change(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        if not is_adam(optimizer):
            raise ValueError(f"build() returned {_named(optimizer)} as optimizer; {NO_ADAM}")
        groups = groups_of(optimizer)
        has_float16 = any(w.dtype is torch.float16 for group in groups for w in group["params"])
        other = made(groups, rounding="nearest" if has_float16 else "stochastic")
        stepping = step_in_backward(other) if in_backward else other
        optimizer.step = _redirected(stepping, optimizer)
        return step, model, other

    return change


def _redirected(stepping: Any, optimizer: Any) -> Callable[..., Any]:
    """Return a replacement for the optimizer's step that satisfies learning rate schedulers."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return stepping.step()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def adams_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """Return groups for an optimizer that steps like Adam: the same settings."""
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    return [{key: group[key] for key in keys} for group in optimizer.param_groups]


def lions_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """Return groups for Lion, whose steps all have the length of the learning rate. Divide Adam's
    rate by 5 and multiply the weight decay by 5, so that their product stays the same
    (Chen et al. 2023, arXiv 2302.06675)."""
    return [
        {"params": g["params"], "lr": g["lr"] / 5, "weight_decay": g["weight_decay"] * 5}
        for g in optimizer.param_groups
    ]


class KeptOnDisk:
    """A step whose saved tensors wait on disk."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step, self.store = step, DiskStore()

    def __call__(self) -> None:
        with offloaded_activations(self.store):
            self.step()


def kept_on_disk(step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
    """Keep saved tensors on disk until backward needs them."""
    return KeptOnDisk(step), model, optimizer


def _named(part: object) -> str:
    return "nothing" if part is None else f"a {type(part).__name__}"


# ------------------------------------------------------------------ finding places


def paths_of_layers(model: nn.Module, path: str = "") -> tuple[str, ...]:
    """Return the paths of the lists of layers that can be checkpointed; "" is the model itself.

    Lists are `nn.ModuleList` and `nn.Sequential` of at least two layers with weights. Of nested
    lists, take the outer one unless its layers are of several classes.
    """
    inner = tuple(
        found
        for name, child in model.named_children()
        for found in paths_of_layers(child, f"{path}.{name}".lstrip("."))
    )
    if not isinstance(model, nn.ModuleList | nn.Sequential):
        return inner
    layers = list(model)
    if None in layers:  # a ModuleList may have holes
        return inner
    kinds = [type(layer) for layer in layers if any(True for _ in layer.parameters())]
    is_list = len(kinds) > 1 and (len(set(kinds)) == 1 or not inner)
    return (path,) if is_list and all(map(_can_recompute, layers)) else inner


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers in the lists that can be checkpointed."""
    lists: Iterable[Any] = map(model.get_submodule, paths_of_layers(model))
    return [layer for each in lists for layer in each]


def _can_recompute(layer: nn.Module) -> bool:
    """Return False for a layer that overwrites its input, which the checkpoint before it keeps, and
    for one whose hooks change its weights before each forward pass (spectral_norm). FSDP2's hooks
    gather the weights before backward recomputes the layer."""
    has_hooks = any(
        module._forward_pre_hooks and not is_sharded(module) for module in layer.modules()
    )
    return not has_hooks and not getattr(layer, "inplace", False)


def is_sharded(module: nn.Module) -> bool:
    """Return True for a module that `fully_shard` (FSDP2) was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_adam(optimizer: Any) -> bool:
    """Return True if another optimizer can replace it at a known learning rate."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        return False
    return all(
        isinstance(group["lr"], float | int)
        and not (group["amsgrad"] or group["maximize"])
        and (group["decoupled_weight_decay"] or not group["weight_decay"])
        for group in optimizer.param_groups
    )


@dataclass(frozen=True)
class Places:
    """Where techniques can be applied in a training.

    layers   paths of the lists of layers; empty if they cannot be checkpointed
    is_adam  True if another optimizer can replace its optimizer
    """

    layers: tuple[str, ...] = ()
    is_adam: bool = False


def find(model: nn.Module | None, optimizer: Any) -> Places:
    """Find the places in a training that `build()` returned."""
    return Places(() if model is None else paths_of_layers(model), is_adam(optimizer))


# ------------------------------------------------------------------ attempts


@dataclass(frozen=True)
class Wrapper:
    """Techniques of the registry, applied together.

    change   applies them to a built training
    inside   the number of the code's last lines that go around the forward pass
    """

    techniques: tuple[str, ...]
    change: Change
    inside: int = 0

    @property
    def name(self) -> str:
        return ", ".join(self.techniques)

    def lines(self, places: Places) -> list[str]:
        """Return the lines that go after the model and the optimizer are created."""
        lines = [line for name in self.techniques for line in TECHNIQUES[name].code.memlab]
        lines = lines[: len(lines) - self.inside]
        return [written for line in lines for written in _for_each_list(line, places.layers)]

    @property
    def lines_inside(self) -> list[str]:
        """The lines that go around the forward pass."""
        lines = TECHNIQUES[self.techniques[-1]].code.memlab
        return list(lines[len(lines) - self.inside :])

    @property
    def costs(self) -> list[str]:
        """The cost of each technique."""
        return [f"{name}: {TECHNIQUES[name].costs}" for name in self.techniques]


@dataclass(frozen=True)
class Attempt:
    """Some wrappers, and the code that applies them in the user's script."""

    wrappers: tuple[Wrapper, ...] = ()
    places: Places = Places()

    @property
    def name(self) -> str:
        return ", ".join(each.name for each in self.wrappers) or "as it is"

    @property
    def lines(self) -> list[str]:
        """Python code to put after the model and the optimizer are created, imports first."""
        lines = [line for each in self.wrappers for line in each.lines(self.places)]
        imports = {line for line in lines if line.startswith(("from ", "import "))}
        return sorted(imports) + [line for line in lines if line not in imports]

    @property
    def lines_inside(self) -> list[str]:
        """Python code to put around the forward pass."""
        return [line for each in self.wrappers for line in each.lines_inside]

    @property
    def costs(self) -> list[str]:
        """The cost of each technique."""
        return [sentence for each in self.wrappers for sentence in each.costs]

    @property
    def production(self) -> list[str]:
        """The same code with the usual packages, if there is any."""
        names = [name for each in self.wrappers for name in each.techniques]
        return [line for name in names for line in TECHNIQUES[name].code.production]

    def applied(self, step: Callable[[], Any], model: nn.Module | None, optimizer: Any) -> Parts:
        parts = step, model, optimizer
        for each in self.wrappers:
            parts = each.change(*parts)
        return parts


_ANY_LIST = "model.layers"  # how the registry's code refers to a list of layers


def _for_each_list(line: str, paths: tuple[str, ...]) -> list[str]:
    """Repeat a line that refers to a list of layers for each of the model's lists."""
    if _ANY_LIST not in line:
        return [line]
    return [line.replace(_ANY_LIST, _python_path(path)) for path in paths]


def _python_path(path: str) -> str:
    """Format a path as Python: `model.encoder[1]` for "encoder.1"."""
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
    (CHECKPOINTED, ON_DISK),  # before ON_DISK alone, which writes more to disk
    (ON_DISK,),
    (CHECKPOINTED, ADAM, ON_DISK),
    (ADAM, ON_DISK),
    (LION,),
    (CHECKPOINTED, LION),
    (CHECKPOINTED, LION, ON_DISK),
    (LION, ON_DISK),
)


def attempts(places: Places) -> tuple[Attempt, ...]:
    """Return the attempts in order; leave out what this training has no place for."""
    return tuple(
        Attempt(wrappers, places)
        for wrappers in ORDER
        if (places.layers or CHECKPOINTED not in wrappers)
        and (places.is_adam or not {ADAM, LION} & set(wrappers))
    )
