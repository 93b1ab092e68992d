"""Step in backward: update each weight as soon as its gradient is complete, then free the gradient.

Saves    the gradients: at most two of them exist at once, not one per weight.
Costs    no gradient accumulation, and no clipping by the global norm.
Source   Lv et al. 2023 (LOMO), arXiv 2306.09782, section 3.1;
         torch.Tensor.register_post_accumulate_grad_hook.

    backward accumulates the gradient of a weight    update the weight, free the gradient
    a second gradient before end_step()              raise an error: the weight has changed

`memlab.optim.step_in_backward` is the version to train with.
"""

from collections.abc import Callable, Iterable

from torch import Tensor


def in_backward(weights: Iterable[Tensor], update: Callable[[Tensor], None]) -> Callable[[], None]:
    """Step each weight in backward with `update(weight)`. Return end_step, to call afterwards."""
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
