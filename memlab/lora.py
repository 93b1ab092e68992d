"""LoRA: freeze the weights and train a low-rank change.

Saves    gradients and optimizer state of frozen weights: with AdamW, 12 of 16 bytes per weight in
         float32; in bf16, all except 2.
Costs    rank·(in + out) new weights per layer with gradients and optimizer state, and their
         activations. The model's own activations stay, because gradients still flow through
         every layer.
Source   Hu et al. 2021, arXiv 2106.09685, section 4.1.

    W x    becomes    W x + (alpha/rank)·B A x        A: (rank, in), B: (out, rank)

A starts random and B zero, so the initial change is zero. A full-rank change would have out·in
weights. After merging, W + (alpha/rank)·B A costs nothing.

    names = add_lora(model, rank=8)           # freezes everything else
    ...                                       # train; save adapters(model): a few MB
    merge_lora(model)                         # the original structure with new weights
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.internals.sizes import added_weights as added_weights


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained low-rank bypass.

    `frozen` is an nn.Linear, which `memlab.qlora` replaces by its 4-bit layer.
    """

    frozen: Any

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        weight = frozen.weight
        self.frozen = frozen
        self.scale = alpha / rank
        self.down = nn.Parameter(weight.new_empty(rank, frozen.in_features))
        self.up = nn.Parameter(weight.new_zeros(frozen.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # like nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        # Autocast casts by itself. Without it, float32 adapters may stand beside a 16-bit layer.
        cast = x if torch.is_autocast_enabled(x.device.type) else x.to(self.down.dtype)
        detour = F.linear(F.linear(cast, self.down), self.up)  # (..., rank), then (..., out)
        out = self.frozen(x)
        return out + (self.scale * detour).to(out.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Add the change to the frozen weight in place, rounded once from at least float32.

        A 4-bit weight is decoded first, and the layer is an nn.Linear again.
        """
        layer = self.frozen if isinstance(self.frozen, nn.Linear) else self.frozen.decoded()
        weight = layer.weight
        precise = torch.promote_types(weight.dtype, torch.float32)
        change = self.up.to(precise) @ self.down.to(precise)  # (out, in)
        weight.copy_(change.mul_(self.scale).add_(weight))
        return layer


def add_lora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    where: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Freeze the model and replace nn.Linear layers with LoRALinear. Return their names.

    Args:
        alpha: scales the change by alpha/rank; None scales it by 2.
        where: selects layers by name, such as `lambda name: "attention" in name`.

    A layer used twice in the model stays shared.
    """
    if rank < 1:
        raise ValueError(f"got rank {rank}; give at least 1")
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError("the model has LoRA layers already; call merge_lora(model) first")
    layers = {name: m for name, m in named_layers(model) if name and isinstance(m, nn.Linear)}
    chosen = [name for name in layers if where(name)]
    if not chosen:
        known = ", ".join(list(layers)[:3]) or "none"
        raise ValueError(
            f"where= selected no nn.Linear; the model has {known}, …; select at least one"
        )
    model.requires_grad_(False)
    made: dict[nn.Linear, LoRALinear] = {}
    for name in chosen:
        layer = layers[name]
        if layer not in made:
            made[layer] = LoRALinear(layer, rank, 2.0 * rank if alpha is None else alpha)
        replace_layer(model, name, made[layer])
    return chosen


def merge_lora(model: nn.Module) -> list[str]:
    """Add each change to its frozen weight and restore the nn.Linear. Return the names.

    Outputs are equal up to rounding. Frozen weights stay frozen.
    """
    layers = {n: m for n, m in named_layers(model) if isinstance(m, LoRALinear)}
    merged: dict[LoRALinear, nn.Linear] = {}
    for name, layer in layers.items():
        if layer not in merged:
            merged[layer] = layer.merged()
        replace_layer(model, name, merged[layer])
    return list(layers)


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained part of the state dict, for `load_state_dict(..., strict=False)`."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name in trained}


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module by name; a shared module appears under each of its names."""
    return model.named_modules(remove_duplicate=False)


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    # get_submodule uses attributes, but a model with a checkpointing schedule has an attribute
    # `blocks` without modules.
    setattr(dict(named_layers(model))[parent], child, layer)
