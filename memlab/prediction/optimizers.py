"""Optimizers in a prediction: torch.optim's default implementations on CUDA."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from memlab.internals.threads import only_where_asked
from memlab.world.entering import enter


@contextmanager
def optimizer_defaults(choice: str) -> Iterator[None]:
    """Make torch.optim and `clip_grad_norm_` use CUDA's default implementations."""
    kinds = [] if choice == "loop" else ["cpu"]
    with enter({"foreach": lambda real: lambda: kinds}), ExitStack() as stack:
        if choice == "fused":
            chosen: list[dict[str, Any]] = []
            choose = only_where_asked(_choose_fused(chosen))
            hook = torch_optimizer.register_optimizer_step_pre_hook(choose)
            stack.callback(_undo_fused, chosen)
            stack.callback(hook.remove)
        yield


def implementation(group: dict[str, Any], choice: str) -> str:
    """Return how an optimizer of torch.optim updates a group: as the script says, else as chosen
    for the prediction."""
    if group.get("fused"):
        return "fused"
    if group.get("foreach") is not None:
        return "foreach" if group["foreach"] else "for-loop"
    return {"auto": "foreach", "loop": "for-loop"}.get(choice, choice)


def _choose_fused(chosen: list[dict[str, Any]]) -> Callable[..., None]:
    def choose(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("fused", False) is None and group.get("foreach") is None:
                group["fused"] = True
                chosen.append(group)

    return choose


def _undo_fused(chosen: list[dict[str, Any]]) -> None:
    for group in chosen:
        group["fused"] = None
