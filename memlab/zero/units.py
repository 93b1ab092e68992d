"""Units: groups of weights gathered, used and freed together.

Each block of a transformer is a unit. The remaining weights (the embedding, the last norm, the
head) form one more unit, the root. Only one block's weights need to be whole at a time. A weight
that two units share belongs to the root, which stays whole while either runs.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from memlab.zero.partitioning import Weight

ROOT = "root"


def block_names(model: nn.Module) -> list[str]:
    """Return the names of the modules in the model's outermost lists: `blocks.0`, `blocks.1`, …"""
    return [name for name, _ in _blocks(model, "")]


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield prefix + name, child
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def units_of(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, str]:
    """Return {name of a weight: name of its unit}; `names` lists the modules to use as units.

    Without `names`, the blocks are units. A weight in no unit, or in several, belongs to the root.
    Raises ValueError for an unknown module, and for a unit inside another; TypeError for a
    single string.
    """
    if isinstance(names, str):
        raise TypeError(f"got units={names!r}, a single name; pass a list of names: [{names!r}]")
    names = block_names(model) if names is None else list(names)
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ValueError(
                f"got {name!r} as unit, which is not a module of the {type(model).__name__}; pass "
                f"names of modules below it, such as {', '.join(block_names(model)[:2]) or 'none'}"
            )
        outer = [other for other in names if name.startswith(f"{other}.")]
        if outer:
            raise ValueError(f"unit {name} is inside unit {outer[0]}; pass one of the two")
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
    """Return the model's weights as plain data, in the order of `named_parameters`.

    Raises ValueError if the optimizer steps a tensor outside the model, or misses a weight that
    requires a gradient.
    """
    groups = _group_of_each(optimizer.param_groups)
    unit_of = units_of(model, units)
    weights = []
    for name, parameter in model.named_parameters():
        group = groups.pop(id(parameter), None)
        if group is None and parameter.requires_grad:
            raise ValueError(
                f"{name} requires a gradient and the optimizer does not step it; pass it to the "
                f"optimizer, or call requires_grad_(False)"
            )
        shape, trained = tuple(parameter.shape), parameter.requires_grad
        weights.append(Weight(name, shape, parameter.dtype, group or 0, unit_of[name], trained))
    if groups:
        raise ValueError(
            f"the optimizer steps {len(groups)} tensors outside the model; pass "
            f"the optimizer of this model"
        )
    return weights


def _group_of_each(param_groups: Iterable[dict[str, list[torch.Tensor]]]) -> dict[int, int]:
    return {
        id(parameter): number
        for number, group in enumerate(param_groups)
        for parameter in group["params"]
    }
