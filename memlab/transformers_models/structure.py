"""The stacks of a model's layers, and which of their layers are alike.

A stack is an nn.ModuleList of layers that run one after another. Two layers are alike if their
modules have the same classes, settings and weights' shapes. In most models all layers are alike; in
some the first ones differ (DeepSeek's have no experts), or layers alternate (gpt-oss: sliding and
full attention).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import NoneType
from typing import Any, NamedTuple

from torch import nn

from memlab.transformers_models.recipes import ALL_LINEAR


class Stack(NamedTuple):
    """A list of layers.

    path    of the nn.ModuleList in the model
    count   the number of layers
    head    the number of layers before the repetition; `count` if nothing repeats
    unit    the number of layers that repeat
    """

    path: str
    count: int  # type: ignore[assignment]  # replaces tuple.count
    head: int
    unit: int


def stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Return the outermost lists of at least two layers with weights."""
    return tuple(_stacks(model, ""))


def _stacks(module: nn.Module, path: str) -> Iterator[Stack]:
    if isinstance(module, nn.ModuleList) and sum(map(_has_weights, module)) > 1:
        signatures = [_signature(layer) for layer in module]
        yield Stack(path, len(module), *_repetition(signatures))
        return
    for name, child in module.named_children():
        yield from _stacks(child, f"{path}.{name}".lstrip("."))


def _has_weights(layer: nn.Module) -> bool:
    return any(True for _ in islice(layer.parameters(), 1))


def _repetition(signatures: list[Any]) -> tuple[int, int]:
    """Return (head, unit), with the fewest layers in both together."""
    count = len(signatures)
    for length in range(1, count):
        for unit in range(1, length + 1):
            head = length - unit
            if signatures[length:] == signatures[head : count - unit]:
                return head, unit
    return count, 1


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, type(module), _settings(module), _shapes(module))
        for name, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the module's attributes that may change what it computes, except its position."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | NoneType) and not name.endswith(_POSITIONS)
    )


# Only the layer's index may differ.
_POSITIONS = ("idx", "index", "layer_id", "layer_number")


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return tuple(
        (name, tensor.shape, tensor.dtype) for name, tensor in tensors if tensor is not None
    )


def shorten(model: nn.Module, depths: Mapping[str, int]) -> None:
    """Keep only the first layers of the stacks at these paths."""
    for path, depth in depths.items():
        parent, _, name = path.rpartition(".")
        layers: Any = model.get_submodule(path)
        setattr(model.get_submodule(parent), name, layers[:depth])


def with_fewer_layers(
    fields: Mapping[str, Any], stacks: Iterable[Stack], depths: Mapping[str, int]
) -> dict[str, Any] | None:
    """Return a config's fields for a model whose stacks have these depths; None if the fields do
    not say so. Numbers of layers are found by their names and values, and lists of one entry per
    layer, such as `layer_types`, are cut."""
    counts = {stack.count: depths[stack.path] for stack in stacks if stack.path in depths}
    wanted = {(stack.count, depths[stack.path]) for stack in stacks if stack.path in depths}
    if len(wanted) != len(counts):
        return None

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cut(key, part) for key, part in value.items()}
        if isinstance(value, list) and len(value) in counts and "layer" in name:
            return value[: counts[len(value)]]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return counts.get(value, value) if is_number and _LAYERS.search(name) else value

    return {name: cut(name, value) for name, value in fields.items()}


_LAYERS = re.compile(r"layers?$|^n_layer|depth|num_blocks")


def is_shortened(model: Any, whole: Any, depths: Mapping[str, int]) -> bool:
    """Return whether the model is the whole one with only the first layers of these stacks."""
    kept = {
        name: parameter.shape
        for name, parameter in whole.named_parameters()
        if all(_is_kept(name, path, depth) for path, depth in depths.items())
    }
    return kept == {name: parameter.shape for name, parameter in model.named_parameters()} and all(
        list(map(_signature, model.get_submodule(path)))
        == list(map(_signature, whole.get_submodule(path)[:depth]))
        for path, depth in depths.items()
    )


def _is_kept(name: str, path: str, depth: int) -> bool:
    inside = name.removeprefix(f"{path}.")
    return inside == name or int(inside.partition(".")[0]) < depth


def linear_share(model: nn.Module) -> float:
    """Return the share of the weights in linear layers of the stacks."""
    layers = (
        module
        for stack in stacks(model)
        for module in model.get_submodule(stack.path).modules()
        if isinstance(module, nn.Linear)
    )
    linear = sum(layer.weight.numel() for layer in layers)
    return linear / sum(weight.numel() for weight in model.parameters())


def adapted_layers(model: nn.Module, targets: str) -> str:
    """Return peft's target_modules for "all", "attention", "mlp", or names joined by commas.

    Attention's layers are the linear ones in the stacks with "attention" or "attn" in their path,
    the MLP's the others. The result is "all-linear", or names joined by commas. Raises ValueError
    for a name that the model does not have.
    """
    if targets == "all":
        return ALL_LINEAR
    found: dict[str, set[str]] = {"attention": set(), "mlp": set()}
    for stack in stacks(model):
        for path, module in model.get_submodule(stack.path).named_modules():
            if isinstance(module, nn.Linear):
                is_attention = "attention" in path.lower() or "attn" in path.lower()
                found["attention" if is_attention else "mlp"].add(path.rpartition(".")[2])
    names = found.get(targets) or set(targets.split(","))
    known = found["attention"] | found["mlp"]
    if unknown := sorted(names - known):
        raise ValueError(
            f"got {unknown[0]!r} as a layer with adapters; give all, attention, mlp, or some of "
            f"{', '.join(sorted(known))}, joined by commas"
        )
    return ",".join(sorted(names))
