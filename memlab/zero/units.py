"""Units: the weights that are gathered, used and freed together.

A transformer's blocks are units, and what is left over (the embedding, the last norm, the head) is
one more, the root. Only one block's weights need be whole at a time. A weight that two units share
belongs to the root, which is whole for as long as either runs.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from memlab.zero.partitioning import Weight

ROOT = "root"


def block_names(model: nn.Module) -> list[str]:
    """The modules of the outermost lists of the model: `blocks.0`, `blocks.1` and so on."""
    return [name for name, _ in _blocks(model, "")]


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield prefix + name, child
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def units_of(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, str]:
    """The unit of each weight, both by name; `names` are the modules that are units.

    Without `names`, the blocks are. A weight in no unit, or in several, is of the root. Raises
    ValueError for a name that is no module, and for a unit inside another; TypeError for one name
    that is not in a list.
    """
    if isinstance(names, str):
        raise TypeError(f"got units={names!r}, a single name; give a list of names: [{names!r}]")
    names = block_names(model) if names is None else list(names)
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ValueError(
                f"got {name!r} as unit, which is no module of the {type(model).__name__}; give "
                f"names of modules below it, such as {', '.join(block_names(model)[:2]) or 'none'}"
            )
        outer = [other for other in names if name.startswith(f"{other}.")]
        if outer:
            raise ValueError(f"unit {name} is inside of unit {outer[0]}; give one of the two")
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((unit for unit in names if name.startswith(f"{unit}.")), ROOT)
        owners.setdefault(id(parameter), set()).add(owner)
    return {
        name: next(iter(owners[id(parameter)])) if len(owners[id(parameter)]) == 1 else ROOT
        for name, parameter in model.named_parameters()
    }


def describe(
    model: nn.Module, optimizer: torch.optim.Optimizer, units: Sequence[str] | None = None
) -> list[Weight]:
    """The model's weights as plain data, in the order in which it names them.

    Raises ValueError where the optimizer steps what is no weight of the model, or leaves out one
    that requires a gradient.
    """
    groups = _group_of_each(optimizer.param_groups)
    unit_of = units_of(model, units)
    weights = []
    for name, parameter in model.named_parameters():
        group = groups.pop(id(parameter), None)
        if group is None and parameter.requires_grad:
            raise ValueError(
                f"{name} requires a gradient and the optimizer does not step it; give it to the "
                f"optimizer, or call requires_grad_(False)"
            )
        shape, trained = tuple(parameter.shape), parameter.requires_grad
        weights.append(Weight(name, shape, parameter.dtype, group or 0, unit_of[name], trained))
    if groups:
        raise ValueError(
            f"the optimizer steps {len(groups)} tensors that are no weights of the model; give the "
            f"optimizer of this model"
        )
    return weights


def _group_of_each(param_groups: Iterable[dict[str, list[torch.Tensor]]]) -> dict[int, int]:
    return {
        id(parameter): number
        for number, group in enumerate(param_groups)
        for parameter in group["params"]
    }
