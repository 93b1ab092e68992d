"""Step in backward: each weight as soon as its gradient is there, which is then dropped.

Saves    the gradients: not all N numbers are alive when backward ends, but one weight's.
Costs    everything that looks at all gradients before the step (see below), and the fewer, larger
         operations of a step that takes all weights at once.
Source   Lv et al. 2023, arXiv 2306.09782 (LOMO); torch's hooks on gradients make it short.

Adds to memlab.reference.step_in_backward: any optimizer that steps weight by weight, groups, tied
weights, clipping by weight, and errors that say what to do.

    stepping = step_in_backward(torch.optim.AdamW(model.parameters()))
    for batch in batches:
        stepping.zero_grad()
        loss_of(batch).backward()       # steps
        stepping.step()                 # ends the step

Autograd walks the graph once and is done with a weight when the gradient of its last use has been
added: nothing further down needs it. What still does, such as a use of it detached, is an error, as
ever when a tensor is written over that backward needs. Only a checkpoint does not notice, where its
function takes such a tensor from outside: hand it over as an argument.

A tied matrix takes most. The unembedding's part of its gradient is made first, and waits for the
embedding's, which is made last; then torch adds the two into a third.

The weights are those of ordinary steps to the bit, unless the optimizer rounds at random: it draws
in the order in which the gradients arrive.

What it rules out, because the first weights have moved when the last gradient arrives:

    clipping by the global norm     the norm is not known before; clip each gradient by itself with
                                    `weight.register_hook(...)`, or let AdamW bound the step
    loss scaling                    a step that overflows can't be left out any more: use bfloat16,
                                    which needs no scale
    accumulation                    the first micro-batch's gradients are gone: a larger batch with
                                    checkpointing takes their place
    DistributedDataParallel         it adds the ranks' gradients after they were used here

An exception in the middle of backward leaves some weights stepped and others not. Load weights and
optimizer as they were saved last. Or take the half step as it is: call `zero_grad()` and `step()`,
which ends it, and go on with the next batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from memlab.internals.closures import require_no_closure


def step_in_backward(optimizer: torch.optim.Optimizer) -> "InBackward":
    """Let the optimizer step each of its weights inside backward; see `InBackward`.

    It may be any of torch's or of memlab.optim, with its groups, its learning-rate scheduler and
    its hooks, which are called for each weight. Raises TypeError for what steps no weights of its
    own (MasterWeights) and for what needs a closure (LBFGS).
    """
    return InBackward(optimizer)


class InBackward:
    """An optimizer whose step has happened when backward returns.

    `step()` is what ends a step: it takes the weights that still have a gradient, one set by hand,
    and lets the next backward come. Before it, a second gradient of a weight is refused; so is one
    that was there when backward began. A scheduler is given `optimizer`.

    Weights that don't require a gradient yet, and those of groups added later, are stepped in
    `step()`. `remove()`, or the end of a `with`, makes the optimizer what it was.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _require_steps_by_weight(optimizer)
        self.optimizer = optimizer
        self._stepped: set[Tensor] = set()
        self._lock = Lock()  # each device has a thread of its own in backward
        self._hooks: list[Any] = []
        for weight, place in self._places():
            if weight.requires_grad:
                self._hooks += (
                    weight.register_hook(partial(self._expect, weight)),
                    weight.register_post_accumulate_grad_hook(partial(self._step, place)),
                )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:
        """The optimizer's."""
        return self.optimizer.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the step: weights that still have a gradient are stepped, and it is dropped.

        A `closure`, which runs backward, is called first; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight, place in self._places():
            if weight.grad is not None:
                self._step(place, weight)
        self._stepped.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that were set by hand and not stepped; backward leaves none."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The optimizer's; what was begun of a step is forgotten."""
        self.optimizer.load_state_dict(state)
        self._stepped.clear()

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle hooks onto the weights of the copied optimizer."""
        return step_in_backward, (self.optimizer,)

    def __enter__(self) -> "InBackward":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()

    # ------------------------------------------------------------------ one weight

    def _expect(self, weight: Tensor, gradient: Tensor) -> None:
        """Before a gradient is added to `.grad`."""
        if weight in self._stepped:
            raise RuntimeError(
                f"got a second gradient of a weight of shape {tuple(weight.shape)}, whose first "
                f"was stepped already; call step() after each backward, or, to add up gradients of "
                f"several, use the optimizer without step_in_backward"
            )
        if weight.grad is not None:
            raise RuntimeError(
                f"got a gradient of a weight of shape {tuple(weight.shape)} that has one already, "
                f"and they would be stepped as one; call zero_grad() before backward"
            )

    def _step(self, place: tuple[int, int], weight: Tensor) -> None:
        """Step the weight by its gradient, and drop that."""
        with self._lock:
            self._stepped.add(weight)
            with self._alone(*place):
                self.optimizer.step()
            weight.grad = None
            # Fused kernels don't say that they write; backward has to know if it still needs this.
            increment_version(weight)

    @contextmanager
    def _alone(self, number: int, position: int) -> Iterator[None]:
        """The optimizer with that weight of that group for its only one."""
        groups = self.optimizer.param_groups
        lists = {name: groups[number].get(name) for name in ("params", "param_names")}
        one = {name: each[position : position + 1] for name, each in lists.items() if each}
        group = {**groups[number], **one}
        before = dict(group)
        self.optimizer.param_groups = [group]
        try:
            yield
        finally:
            self.optimizer.param_groups = groups
        if changed := [name for name in group if group[name] is not before.get(name)]:
            raise TypeError(
                f"got {type(self.optimizer).__name__}, whose step changes its group's "
                f"{', '.join(changed)}, once for all of its weights; use that optimizer without "
                f"step_in_backward"
            )

    def _places(self) -> list[tuple[Tensor, tuple[int, int]]]:
        """Each weight with its group's number and its position there: these stay, where a loaded
        state brings new groups."""
        return [
            (weight, (number, position))
            for number, group in enumerate(self.optimizer.param_groups)
            for position, weight in enumerate(group["params"])
        ]


def _require_steps_by_weight(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"got {type(optimizer).__name__}, which is no torch.optim.Optimizer of the weights "
            f"that backward reaches; for bfloat16 weights without copies give one of memlab.optim "
            f"with rounding='stochastic'"
        )
    require_no_closure(optimizer)
