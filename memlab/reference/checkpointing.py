"""Activation checkpointing: drop the activations of a function, recompute them in backward.

Saves    every tensor that autograd would save inside `fn`; the inputs and 5,056 bytes of random
         state stay.
Costs    a second forward pass of `fn`.
Source   Chen et al. 2016, arXiv 1604.06174, section 3.

    forward     run fn without a graph; save its inputs
    backward    run fn again, with a graph; send the gradient of its output through that graph

`memlab.checkpointing.checkpoint` is the version to train with. This version does not support:

    keyword arguments, lists, dicts     a Function takes tensors, one after the other
    several outputs                     backward takes one gradient
    inputs without requires_grad        if no input requires a gradient, backward never runs, and
                                        the weights silently get no gradient
    torch.autograd.grad,                the inner backward() fills the .grad of every weight,
    backward(inputs=...)                requested or not
    second derivatives                  the recomputed graph is freed immediately
    early stopping                      the recomputed graph starts at the output
    autocast, BatchNorm statistics      only the CPU's random state is restored
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Forget(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return fn(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.random.fork_rng([]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            output = ctx.fn(*inputs)
        torch.autograd.backward(output, gradient)
        return None, *(x.grad for x in inputs)  # None: fn is no tensor


def forget(fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Run fn(*inputs), checkpointed. At least one input must require a gradient."""
    return Forget.apply(fn, *inputs)
