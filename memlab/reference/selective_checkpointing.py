"""Selective checkpointing: recompute everything in backward but the outputs of chosen operators.

Saves    less than full checkpointing: the chosen outputs stay in memory.
Costs    less, too: the chosen operators, often the matmuls, do not run twice.
Source   Korthikanti et al. 2022, arXiv 2205.05198, section 5; torch.utils.checkpoint's
         create_selective_checkpoint_contexts.

    first run     keep what each chosen operator returns
    second run    the same operators come in the same order: return what was kept

`memlab.checkpointing.selective` is the version to train with.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.reference.checkpointing import forget


class Choosing(TorchDispatchMode):
    """Sees every operator, below autograd. Set `is_second` before the second run."""

    def __init__(self, chosen: Container[Any]) -> None:
        super().__init__()
        self.chosen, self.kept, self.is_second = chosen, [], False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_second and func in self.chosen:
            return self.kept.pop(0)
        made = func(*args, **(kwargs or {}))
        if func in self.chosen:
            detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)
            self.kept.append(detached)
        return made


def keeping(chosen: Container[Any], block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """block(x), checkpointed, with the outputs of chosen operators kept."""
    mode = Choosing(chosen)

    def run(x: Tensor) -> Tensor:
        with mode:
            return block(x)

    y = forget(run, x)
    mode.is_second = True
    return y
