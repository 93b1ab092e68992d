"""Check that an optimizer is elementwise, so that it may step shards.

SGD, AdamW and Lion update each element by itself. Other optimizers share something between
elements: an 8-bit scale, a second moment, a norm, a matrix. In a shard they would share it with the
wrong elements. The check does not rely on the optimizer's name. It steps a small matrix whole and
again in two parts, and compares the results and the state. An optimizer that steps only some
matrices as a whole, such as those larger than its rank, says so itself: `is_elementwise = False`.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memlab.internals.torch_internals import disable_current_modes

SHAPE, SPLIT_AT, STEPS = (72, 129), 4_500, 2


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer whose step on shards differs from its step on the whole."""
    if not getattr(optimizer, "is_elementwise", True):
        raise TypeError(_refusal(optimizer, "steps matrices as a whole"))
    with disable_current_modes():  # also in a dry run, because the check needs real values
        _require_elementwise(optimizer)


def _require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    whole = torch.linspace(-1, 1, SHAPE[0] * SHAPE[1], dtype=torch.float32).sin().view(SHAPE)
    gradients = [(whole * 7 + step).sin() * whole**3 for step in range(STEPS)]
    try:
        [expected], state = _after_steps(optimizer, [whole], [[gradient] for gradient in gradients])
        parts, _ = _after_steps(optimizer, _split(whole), [_split(grad) for grad in gradients])
    except Exception as error:  # an optimizer may raise anything for weights it does not support
        raise TypeError(_refusal(optimizer, f"could not step a shard ({error})")) from error
    for name, kept in state.items():
        # Adam-mini, row norms, and 8-bit blocks that a shard's edge cuts through.
        if isinstance(kept, Tensor) and kept.numel() not in (1, whole.numel()):
            raise TypeError(_refusal(optimizer, f"keeps {name}, which several elements share"))
    if not torch.allclose(torch.cat(parts), expected.view(-1), rtol=1e-5, atol=1e-7):
        raise TypeError(_refusal(optimizer, "steps a weight differently when it is split in two"))


def with_weights(
    optimizer: torch.optim.Optimizer, groups: Iterable[list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind and settings, without state, for these weights."""
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [
        {**group, "params": weights}
        for group, weights in zip(optimizer.param_groups, groups, strict=True)
    ]
    return other


def _refusal(optimizer: torch.optim.Optimizer, reason: str) -> str:
    return (
        f"{type(optimizer).__name__} {reason}, and a shard holds only part of a weight; use an "
        f"elementwise optimizer, such as AdamW or SGD"
    )


def _split(whole: Tensor) -> list[Tensor]:
    return list(whole.view(-1).tensor_split([SPLIT_AT]))


def _after_steps(
    optimizer: torch.optim.Optimizer, weights: list[Tensor], gradients: list[list[Tensor]]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the weights after one step per gradient, and the state of the first weight."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    other = with_weights(optimizer, [parameters, *([] for _ in optimizer.param_groups[1:])])
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        other.step()
    return [parameter.detach() for parameter in parameters], other.state[parameters[0]]
