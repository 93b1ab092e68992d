"""Keep gradients in a store instead of in `.grad`.

Each gradient moves to the store as soon as backward has computed it. It is added to any gradient
stored already, so `.grad` is None after backward. Functions that clip `.grad` would find nothing.
Instead, norms are recorded as gradients arrive, and the clipping factor is applied in the step.

If the step runs on the host and the store is host memory, gradients move only once, to the host.
They are accumulated and used there.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memlab.offload.stores import Store
from memlab.offload.sub_groups import WeightIndex


class StoredGradients:
    """The stored gradients of watched weights.

    borrows    whether the step uses the store's own tensors
    precise    whether the step uses at least float32
    """

    def __init__(self, store: Store, *, borrows: bool, precise: bool) -> None:
        self._store, self._borrows, self._precise = store, borrows, precise
        self._norms: dict[WeightIndex, Tensor] = {}  # of the stored gradients
        self._factors: list[Tensor] = []
        self._hooks: list[Any] = []

    def watch(self, places: Sequence[WeightIndex], weights: Sequence[Tensor]) -> None:
        """Store these weights' gradients from now on, until `remove`."""
        for place, weight in zip(places, weights, strict=True):
            if weight.requires_grad:
                hook = weight.register_post_accumulate_grad_hook(
                    partial(self.store_gradient, place)
                )
                self._hooks.append(hook)

    def remove(self) -> None:
        """Stop storing: gradients stay in `.grad` again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def store_gradient(self, place: WeightIndex, weight: Tensor) -> None:
        """Move a gradient to the store and add it to the stored one; do nothing without one."""
        if weight.grad is None:
            return
        gradient, weight.grad = weight.grad, None
        if place not in self:
            self._store.put(_key(place), gradient)
        elif self._borrows:
            stored = self._store.lend(_key(place))[0]
            self._store.traffic.written += gradient.nbytes
            gradient = stored.add_(gradient.to(stored.device))
        else:
            gradient = self._store.get(_key(place), device=gradient.device).add_(gradient)
            self._store.put(_key(place), gradient)
        dtype = precise_dtype(weight) if self._precise else weight.dtype
        self._norms[place] = torch.linalg.vector_norm(gradient.to(dtype))

    def __contains__(self, place: WeightIndex) -> bool:
        return place in self._norms

    def prefetch(self, place: WeightIndex, device: torch.device) -> None:
        """Start loading a stored gradient."""
        if place in self and not self._borrows:
            self._store.prefetch(_key(place), device=device)

    def get(self, place: WeightIndex, param: Tensor) -> Tensor | None:
        """Return the clipped gradient in the dtype and on the device of `param`, or None."""
        if place not in self:
            return None
        if self._borrows:
            gradient = self._store.lend(_key(place))[0]
        else:
            gradient = self._store.get(_key(place), device=param.device)
        gradient = gradient.to(param.dtype)
        for factor in self._factors:
            gradient.mul_(factor.to(gradient.device))
        return gradient

    def clip_norm_(self, max_norm: float) -> Tensor:
        """Clip all gradients to norm `max_norm`; return the norm before clipping."""
        norms = [self._norms[place] for place in sorted(self._norms)]
        if not norms:
            return torch.tensor(0.0, dtype=torch.float32)
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        for factor in self._factors:
            total = total * factor
        self._factors.append(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def clear(self) -> None:
        """Delete all stored gradients."""
        for place in self._norms:
            self._store.delete(_key(place))
        self._norms.clear()
        self._factors.clear()


def precise_dtype(weight: Tensor) -> torch.dtype:
    """Return float32, or the weight's dtype if it is wider."""
    return torch.promote_types(weight.dtype, torch.float32)


def _key(place: WeightIndex) -> str:
    return f"gradient/{place.number}"
