"""The step inside backward: update each weight as soon as its gradient is complete, then free it.

Saves    the gradients: at most two of them exist at once, not one per weight.
Costs    no gradient accumulation, no clipping by the norm of all gradients.
Source   Lv et al. 2023 (LOMO), arXiv 2306.09782, section 3.1;
         torch.Tensor.register_post_accumulate_grad_hook.

    backward accumulates the gradient of a weight    update the weight, free the gradient
    a second gradient before end_step()              refuse it: the weight has moved already

`memlab.optim.step_in_backward` is the version to train with.
"""

from collections.abc import Callable, Iterable

from torch import Tensor


def in_backward(weights: Iterable[Tensor], update: Callable[[Tensor], None]) -> Callable[[], None]:
    """`update(weight)` steps a weight by its .grad. Returns end_step, to call after backward."""
    stepped = set()

    def hook(weight):
        if weight in stepped:
            weight.grad = None
            raise RuntimeError("got a second gradient; call end_step() after each backward")
        stepped.add(weight)
        update(weight)
        weight.grad = None

    for weight in weights:
        weight.register_post_accumulate_grad_hook(hook)
    return stepped.clear
