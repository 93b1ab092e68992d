"""Step in backward: step each weight as soon as its gradient is ready, and free the gradient.

Saves    the gradients: one weight's gradient is in memory at a time, not all N elements.
Costs    everything that needs all gradients before the step (see below), and the larger kernels of
         a step that processes all weights at once.
Source   Lv et al. 2023, arXiv 2306.09782 (LOMO), with torch's gradient hooks.

Adds to memlab.reference.step_in_backward: any optimizer that steps weight by weight, groups, tied
weights, clipping by weight, and errors that say what to do.

    stepping = step_in_backward(torch.optim.AdamW(model.parameters()))
    for batch in batches:
        stepping.zero_grad()
        loss_of(batch).backward()       # steps
        stepping.step()                 # ends the step

Autograd finishes a weight when it has added the gradient of the weight's last use, after which
nothing needs the old value. If something does, such as a detached use, backward raises torch's
usual error for in-place changes. Only a checkpoint does not detect it, if its function takes such a
tensor from outside; pass the tensor as an argument instead.

A tied matrix needs the most memory. The unembedding's part of its gradient is computed first and
waits for the embedding's, which comes last; torch then adds both into a third tensor.

Weights are bitwise equal to ordinary steps, unless the optimizer rounds stochastically: random bits
are then drawn in the order of the gradients' arrival.

The first weights have changed before the last gradient arrives. This excludes:

    clipping by the global norm     the norm is not known yet; clip each gradient separately with
                                    `weight.register_hook(...)`, or rely on AdamW's bounded step
    loss scaling                    a step that overflows cannot be skipped any more; use bfloat16,
                                    which needs no loss scale
    gradient accumulation           the first micro-batch's gradients are already freed; use a
                                    larger batch with checkpointing
    DistributedDataParallel         it averages the ranks' gradients after they are used here

An exception during backward leaves some weights stepped and others not. Reload weights and
optimizer from a checkpoint. Or accept the partial step: call `zero_grad()` and `step()`, which ends
it, and continue with the next batch.
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
    """Make the optimizer step each of its weights during backward; see `InBackward`.

    Works with any optimizer of torch or memlab.optim, its groups, its learning-rate scheduler and
    its hooks, which are called for each weight. Raise TypeError for wrappers without their own
    weights (MasterWeights) and for optimizers that need a closure (LBFGS).
    """
    return InBackward(optimizer)


class InBackward:
    """An optimizer that steps during backward.

    `step()` ends a step: it steps weights that still have a gradient, such as one set by hand, and
    allows the next backward. Before `step()`, a second gradient of a weight raises an error, and so
    does a gradient that existed before backward. Pass `optimizer` to a learning-rate scheduler.

    Weights that don't require grad yet, and weights of groups added later, are stepped in `step()`.
    `remove()`, or leaving a `with` block, restores the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _require_steps_by_weight(optimizer)
        self.optimizer = optimizer
        self._stepped: set[Tensor] = set()
        self._lock = Lock()  # backward runs one thread per device
        self._hooks: list[Any] = []
        for weight, position in self._positions():
            if weight.requires_grad:
                self._hooks += (
                    weight.register_hook(partial(self._check_gradient, weight)),
                    weight.register_post_accumulate_grad_hook(partial(self._step, position)),
                )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param_groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:
        """The optimizer's state."""
        return self.optimizer.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the step: step weights that still have a gradient, and free it.

        A `closure`, which runs backward, is called first; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for weight, position in self._positions():
            if weight.grad is not None:
                self._step(position, weight)
        self._stepped.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free gradients that were set by hand and not stepped; backward leaves none."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state dict, and forget a partial step."""
        self.optimizer.load_state_dict(state)
        self._stepped.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles attach hooks to the copied optimizer's weights."""
        return step_in_backward, (self.optimizer,)

    def __enter__(self) -> "InBackward":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()

    # ------------------------------------------------------------------ one weight

    def _check_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        """Check that a weight can be stepped, before its gradient is added to `.grad`."""
        if weight in self._stepped:
            raise RuntimeError(
                f"got a second gradient of a weight of shape {tuple(weight.shape)}, whose first "
                f"was stepped already; call step() after each backward, or accumulate gradients "
                f"with the optimizer without step_in_backward"
            )
        if weight.grad is not None:
            raise RuntimeError(
                f"got a gradient of a weight of shape {tuple(weight.shape)} that has one already; "
                f"call zero_grad() before backward, so that they are not added up"
            )

    def _step(self, position: tuple[int, int], weight: Tensor) -> None:
        """Step the weight by its gradient, and free the gradient."""
        with self._lock:
            self._stepped.add(weight)
            with self._only(*position):
                self.optimizer.step()
            # A tied matrix needs three buffers for a moment: two parts of its gradient and their
            # sum (test_a_tied_matrix_needs_two_gradients_and_briefly_their_sum).
            weight.grad = None
            # Fused kernels don't record the write, and backward must detect it.
            increment_version(weight)

    @contextmanager
    def _only(self, group_index: int, weight_index: int) -> Iterator[None]:
        """Reduce the optimizer to one weight of one group inside the block."""
        groups = self.optimizer.param_groups
        per_weight = {name: groups[group_index].get(name) for name in ("params", "param_names")}
        this = slice(weight_index, weight_index + 1)
        single = {name: values[this] for name, values in per_weight.items() if values}
        group = {**groups[group_index], **single}
        before = dict(group)
        self.optimizer.param_groups = [group]
        try:
            yield
        finally:
            self.optimizer.param_groups = groups
        if changed := [name for name in group if group[name] is not before.get(name)]:
            raise TypeError(
                f"got {type(self.optimizer).__name__}, whose step changes its group's "
                f"{', '.join(changed)} once for all weights; use that optimizer without "
                f"step_in_backward"
            )

    def _positions(self) -> list[tuple[Tensor, tuple[int, int]]]:
        """Return each weight with its group's index and its index in the group.

        These stay valid when a loaded state replaces the groups.
        """
        return [
            (weight, (group_index, weight_index))
            for group_index, group in enumerate(self.optimizer.param_groups)
            for weight_index, weight in enumerate(group["params"])
        ]


def _require_steps_by_weight(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"got {type(optimizer).__name__}, which is not a torch.optim.Optimizer of the "
            f"weights that backward reaches; for bfloat16 weights without float32 copies use "
            f"memlab.optim with rounding='stochastic'"
        )
    require_no_closure(optimizer)
