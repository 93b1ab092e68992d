"""Checkpointing as one reads it: an autograd Function that forgets, and computes once more.

Saves    every tensor that autograd would keep inside `fn`; the inputs stay, and 5,056 bytes of
         random state.
Costs    a second forward pass of `fn`, all of it.
Source   Chen et al. 2016, arXiv 1604.06174, section 3.

    forward     run fn without a graph; keep its inputs
    backward    run fn again, with a graph; send the gradient of the result through that graph

This is what every implementation began with. What it cannot do, `memlab.checkpointing.checkpoint`
can, by saved-tensor hooks instead of a Function:

    keyword arguments, lists, dicts     a Function takes tensors, one after the other
    inputs that want no gradient        if none does, there is no backward pass to wait for, and the
                                        weights get no gradient, silently
    torch.autograd.grad,                the backward() inside fills the .grad of every weight,
    backward(inputs=...)                asked for or not
    a second derivative                 the second run's graph is gone by then: the first derivative
                                        looks like a constant
    stopping early                      the graph of the second run begins at its results
    autocast, BatchNorm's statistics    nothing is put back but the CPU's random numbers
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Forget(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.fn, ctx.random_state = fn, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return fn(*inputs)  # without a graph, as all that runs in a Function's forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random_state)
            outputs = ctx.fn(*inputs)
        torch.autograd.backward(outputs, gradients)
        return None, *(x.grad for x in inputs)


def checkpoint_reference(fn: Callable[..., Any], *inputs: Tensor) -> Any:
    """fn(*inputs), its activations forgotten: slow and obvious, for tensors in and tensors out.

    At least one input has to require a gradient, and every output a gradient of its own.
    """
    return _Forget.apply(fn, *inputs)
