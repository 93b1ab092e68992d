"""Selective checkpointing: recompute all operators in backward except the chosen ones.

Saves    less than full checkpointing: the chosen outputs stay in memory.
Costs    less than full checkpointing: the chosen operators, often matmuls, run only once.
Source   Korthikanti et al. 2022, arXiv 2205.05198, section 5; torch.utils.checkpoint's
         create_selective_checkpoint_contexts.

    first run     keep the outputs of each chosen operator
    second run    operators come in the same order: return the kept outputs

`memlab.checkpointing.selective` is the version to train with.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.reference.checkpointing import forget


class Choosing(TorchDispatchMode):
    """Intercepts every operator below autograd. Set `is_second` before the second run."""

    def __init__(self, chosen: Container[Any]) -> None:
        super().__init__()
        self.chosen, self.is_second = chosen, False
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_second and func in self.chosen:
            return self.kept.pop(0)
        made = func(*args, **(kwargs or {}))
        if func in self.chosen:
            detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)
            self.kept.append(detached)
        return made


def keeping(chosen: Container[Any], block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run block(x), checkpointed, and keep the outputs of chosen operators."""
    mode = Choosing(chosen)

    def run(x: Tensor) -> Tensor:
        with mode:
            return block(x)

    y = forget(run, x)
    mode.is_second = True
    return y
