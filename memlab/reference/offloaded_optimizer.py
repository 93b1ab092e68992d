"""Offloaded optimizer: the state is in host memory; only one group's state is on the device.

Saves    the optimizer state of all groups except two.
Costs    transfers in every step: 8 bytes per weight to the device and 8 back.
Source   Ren et al. 2021 (ZeRO-Offload), arXiv 2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity),
         arXiv 2104.07857, section 5.

    device    step 0            step 1            step 2
    store     read 1            write 0, read 2   write 1, read 3

`memlab.offload.OffloadedOptimizer` is the version to train with.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_


class Host:
    """Lists of tensors by key, in host memory."""

    def __init__(self, device: str = "cpu") -> None:
        self.kept: dict[Any, list[Tensor]] = {}
        self.device = device

    def put(self, key: Any, tensors: list[Tensor]) -> None:
        self.kept[key] = [tensor.to("cpu", copy=True) for tensor in tensors]

    def get(self, key: Any) -> list[Tensor]:
        return [tensor.to(self.device, copy=True) for tensor in self.kept[key]]

    def prefetch(self, key: Any) -> None:
        """Do nothing. A real store starts a copy in the background."""


class OffloadedAdam:
    """AdamW over groups of weights, with the moments in `store`."""

    def __init__(self, groups: list[list[Tensor]], store: Any, lr: float) -> None:
        self.groups, self.store = groups, store
        self.steps: dict[int, list[Tensor]] = {}
        self.adams = [torch.optim.AdamW(group, lr=lr, foreach=False) for group in groups]

    def send(self, n: int) -> None:
        """Move the moments of group n to the store."""
        of_each = [self.adams[n].state.pop(w) for w in self.groups[n]]
        self.steps[n] = [kept["step"] for kept in of_each]
        self.store.put(n, [kept[m] for kept in of_each for m in ("exp_avg", "exp_avg_sq")])

    def bring(self, n: int) -> None:
        """Fetch the moments of group n from the store."""
        moments = iter(self.store.get(n))
        for w, step in zip(self.groups[n], self.steps[n], strict=True):
            m, v = next(moments), next(moments)
            self.adams[n].state[w] = {"step": step, "exp_avg": m, "exp_avg_sq": v}

    def step(self, max_norm: float) -> None:
        """Clip the gradients of all groups together, then step one group after the other."""
        clip_grad_norm_([w for group in self.groups for w in group], max_norm)
        for n, adam in enumerate(self.adams):
            if n in self.steps:
                self.bring(n)
            if n + 1 in self.steps:
                self.store.prefetch(n + 1)
            adam.step()
            self.send(n)
