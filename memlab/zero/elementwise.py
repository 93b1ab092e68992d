"""Whether an optimizer may step shards: whether it treats each number by itself.

SGD, AdamW and Lion do. An optimizer whose neighbours share something (a scale of 8-bit codes, a
second moment, a norm, a matrix) would share it with others in a shard. That is not asked of its
name: it steps a small matrix whole, and again in two runs of numbers, and its state is looked at.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memlab.internals.torch_internals import disable_current_modes

SHAPE, CUT, STEPS = (72, 129), 4_500, 2


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """TypeError for an optimizer that steps shards otherwise than whole weights."""
    with disable_current_modes():  # in a dry run too: it needs the values
        _require_elementwise(optimizer)


def _require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    whole = torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).sin().view(SHAPE)
    gradients = [(whole * 7 + step).sin() * whole**3 for step in range(STEPS)]
    try:
        [expected], state = _stepped(optimizer, [whole], [[gradient] for gradient in gradients])
        runs, _ = _stepped(optimizer, _cut(whole), [_cut(gradient) for gradient in gradients])
    except Exception as error:  # whatever an optimizer raises for weights it was not made for
        raise TypeError(_refusal(optimizer, f"could not step a shard ({error})")) from error
    for name, kept in state.items():
        if isinstance(kept, Tensor) and kept.numel() not in (1, whole.numel()):
            raise TypeError(_refusal(optimizer, f"keeps {name}, which several numbers share"))
    if not torch.allclose(torch.cat(runs), expected.view(-1), rtol=1e-5, atol=1e-7):
        raise TypeError(_refusal(optimizer, "steps a weight in two runs otherwise than whole"))


def with_weights(
    optimizer: torch.optim.Optimizer, groups: Iterable[list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings, without state, on these weights, by group."""
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [
        {**group, "params": weights}
        for group, weights in zip(optimizer.param_groups, groups, strict=True)
    ]
    return other


def _refusal(optimizer: torch.optim.Optimizer, reason: str) -> str:
    return (
        f"{type(optimizer).__name__} {reason}, and a shard is a run of numbers without the rest of "
        f"its weight; give an optimizer that treats each number by itself, such as AdamW or SGD"
    )


def _cut(whole: Tensor) -> list[Tensor]:
    return list(whole.view(-1).tensor_split([CUT]))


def _stepped(
    optimizer: torch.optim.Optimizer, weights: list[Tensor], gradients: list[list[Tensor]]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The weights after a step by each of the gradients, by the settings of the first group, and
    the state of the first of them."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    other = with_weights(optimizer, [parameters, *([] for _ in optimizer.param_groups[1:])])
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        other.step()
    return [parameter.detach() for parameter in parameters], other.state[parameters[0]]
