"""A memory meter: count every storage when it appears and when it is freed.

Saves    nothing: it measures what other techniques save.
Costs    a Python call per operator.
Source   torch.utils._python_dispatch.TorchDispatchMode; METER.md's comparison of meters.

    with Meter() as meter:
        loss = model(x); loss.backward(); optimizer.step()
    meter.peak_bytes

A dispatch mode sees every operator below autograd, including backward's. Inputs that no operator
has returned existed before and are not counted. `memlab.measure` is the version to use.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Meter(TorchDispatchMode):
    """`live_bytes` now, and `peak_bytes`, of all tensors created inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(torch.Tensor, lambda x: self._seen.add(x.untyped_storage()), (args, kwargs))
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, made)
        return made

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._free, storage.nbytes()).atexit = False
        return tensor

    def _free(self, nbytes: int) -> None:
        self.live_bytes -= nbytes
