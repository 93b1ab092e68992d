"""LoRA: leave the weights as they are, and train a low-rank change of them.

Saves    gradient and optimizer state of every frozen weight: with AdamW 12 of its 16 bytes in
         float32, all but 2 in bf16.
Costs    rank·(in + out) new weights a layer, with everything a trained weight has, and the
         activations of the detour. The model's own activations stay: the gradient still passes
         through every layer to the ones below.
Source   Hu et al. 2021, arXiv 2106.09685, section 4.1.

    W x    becomes    W x + (alpha/rank)·B A x        A: (rank, in), B: (out, rank)

A begins random and B zero, so at first nothing is changed; a change of full rank would have
out·in weights. Merged, W + (alpha/rank)·B A costs nothing at all.

    names = add_lora(model, rank=8)           # everything else is frozen
    ...                                       # train; save adapters(model): a few MB
    merge_lora(model)                         # the same model again, with other weights
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained detour of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        weight = frozen.weight
        self.frozen = frozen
        self.scale = alpha / rank
        self.down = nn.Parameter(weight.new_empty(rank, frozen.in_features))
        self.up = nn.Parameter(weight.new_zeros(frozen.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as nn.Linear begins

    def forward(self, x: Tensor) -> Tensor:
        detour = F.linear(F.linear(x, self.down), self.up)  # (..., rank), then (..., out)
        return self.frozen(x) + self.scale * detour

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The frozen layer with the change added to its weight, in place; the sum is taken in
        float32 at least, and rounded once."""
        weight = self.frozen.weight
        precise = torch.promote_types(weight.dtype, torch.float32)
        change = self.up.to(precise) @ self.down.to(precise)  # (out, in)
        weight.copy_(change.mul_(self.scale).add_(weight))
        return self.frozen


def add_lora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    where: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Freeze the model and put a LoRALinear in the place of each nn.Linear; their names.

    `where(name)` chooses among the layers, such as `lambda name: "attention" in name`. `alpha`
    scales the change by alpha/rank; without it, by 2. A layer that the model holds twice stays one.
    """
    if rank < 1:
        raise ValueError(f"got rank {rank}; give at least 1")
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError("the model has LoRA layers already; call merge_lora(model) first")
    layers = {name: m for name, m in _named(model) if name and isinstance(m, nn.Linear)}
    chosen = [name for name in layers if where(name)]
    if not chosen:
        known = ", ".join(list(layers)[:3]) or "none"
        raise ValueError(f"no nn.Linear was chosen; the model's are {known}, …: see where=")
    model.requires_grad_(False)
    made: dict[nn.Linear, LoRALinear] = {}
    for name in chosen:
        layer = layers[name]
        if layer not in made:
            made[layer] = LoRALinear(layer, rank, 2.0 * rank if alpha is None else alpha)
        _replace(model, name, made[layer])
    return chosen


def merge_lora(model: nn.Module) -> list[str]:
    """Add each change to its frozen weight and take the detours out again; their names.

    The outputs stay the same up to rounding. What was frozen stays frozen.
    """
    layers = {n: m for n, m in _named(model) if isinstance(m, LoRALinear)}
    merged: dict[LoRALinear, nn.Linear] = {}
    for name, layer in layers.items():
        if layer not in merged:
            merged[layer] = layer.merged()
        _replace(model, name, merged[layer])
    return list(layers)


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """The trained part of `model.state_dict()`: `load_state_dict(..., strict=False)` takes it."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name in trained}


def added_weights(in_features: int, out_features: int, rank: int) -> int:
    """How many weights a layer gets: those of A and B."""
    return rank * (in_features + out_features)


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every place in the model; a module that stands in two is given twice."""
    return model.named_modules(remove_duplicate=False)


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    # Not get_submodule, which asks attributes: those of a model whose blocks run by a schedule are
    # no modules.
    setattr(dict(_named(model))[parent], child, layer)
