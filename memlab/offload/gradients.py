"""Gradients that a store holds in the place of `.grad`.

Each goes there as soon as backward has made it, and is added to what is there already, so `.grad`
is None after backward. Whoever looks for gradients to clip would find none: their norms are taken
as they come, and the factor waits for the step.

Where the step is computed on the host and the store is its memory, a gradient only goes down: it is
added to, and stepped by, right there.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memlab.offload.stores import Store
from memlab.offload.sub_groups import Place


class StoredGradients:
    """Of weights that are watched: what they have in the store.

    borrows    whether the step is computed with the store's own tensors
    precise    whether it is computed in float32 at least
    """

    def __init__(self, store: Store, *, borrows: bool, precise: bool) -> None:
        self._store, self._borrows, self._precise = store, borrows, precise
        self._norms: dict[Place, Tensor] = {}  # of those that are there
        self._factors: list[Tensor] = []
        self._hooks: list[Any] = []

    def watch(self, places: Sequence[Place], weights: Sequence[Tensor]) -> None:
        """Take these weights' gradients, from now on until `remove`."""
        for place, weight in zip(places, weights, strict=True):
            if weight.requires_grad:
                hook = weight.register_post_accumulate_grad_hook(partial(self.take, place))
                self._hooks.append(hook)

    def remove(self) -> None:
        """Let gradients stay with the weights again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def take(self, place: Place, weight: Tensor) -> None:
        """Send a gradient to the store, added to what is there; nothing where there is none."""
        if weight.grad is None:
            return
        gradient, weight.grad = weight.grad, None
        if place not in self:
            self._store.put(_key(place), gradient)
        elif self._borrows:
            there = self._store.lend(_key(place))[0]
            self._store.traffic.written += gradient.nbytes
            gradient = there.add_(gradient.to(there.device))
        else:
            gradient = self._store.get(_key(place), device=gradient.device).add_(gradient)
            self._store.put(_key(place), gradient)
        dtype = precise_dtype(weight) if self._precise else weight.dtype
        self._norms[place] = torch.linalg.vector_norm(gradient.to(dtype))

    def __contains__(self, place: Place) -> bool:
        return place in self._norms

    def ask_for(self, place: Place, device: torch.device) -> None:
        """Begin to bring one, if it is there."""
        if place in self and not self._borrows:
            self._store.prefetch(_key(place), device=device)

    def get(self, place: Place, work: Tensor) -> Tensor | None:
        """One to step `work` by: scaled, in its dtype and where it is. None where there is none."""
        if place not in self:
            return None
        if self._borrows:
            gradient = self._store.lend(_key(place))[0]
        else:
            gradient = self._store.get(_key(place), device=work.device)
        gradient = gradient.to(work.dtype)
        for factor in self._factors:
            gradient.mul_(factor.to(gradient.device))
        return gradient

    def clip_norm_(self, max_norm: float) -> Tensor:
        """Have all scaled so that their norm is at most `max_norm`; their norm before."""
        norms = [self._norms[place] for place in sorted(self._norms)]
        if not norms:
            return torch.tensor(0.0)
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        for factor in self._factors:
            total = total * factor
        self._factors.append(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def forget(self) -> None:
        """Drop all of them."""
        for place in self._norms:
            self._store.delete(_key(place))
        self._norms.clear()
        self._factors.clear()


def precise_dtype(weight: Tensor) -> torch.dtype:
    """Float32, or better if the weight is."""
    return torch.promote_types(weight.dtype, torch.float32)


def _key(place: Place) -> str:
    return f"gradient/{place.number}"
