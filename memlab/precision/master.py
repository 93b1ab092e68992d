"""Master weights: train a float16 or bfloat16 model with float32 copies of its weights.

Saves    half of the activations and, during backward, half of the gradients: the model is in low
         precision throughout.
Costs    a float32 copy of every weight. 2 bytes of weight, 2 of gradient, 4 of copy and 8 of Adam
         state are 16 bytes per weight after backward, as in float32. During the step it is 18,
         because gradients become float32; with `gather_at_once`, always.
Source   Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.

In bfloat16, adding 1/1000 to a weight of 1 never changes it (see memlab.rounding). So the optimizer
updates a float32 copy, and the model gets the rounded copy after each step.

    master = MasterWeights(model.parameters(), torch.optim.AdamW)
    loss.backward()
    master.gather_gradients()             # to float32, one at a time; frees the model's gradients
    clip_grad_norm_(master.weights, 1.0)  # and other uses of gradients
    master.step()
    master.zero_grad()

A LossScaler accepts it as an optimizer: call `scaler.step(master)` instead of `master.step()`. Both
gather the gradients that you have not gathered.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MasterWeights:
    """Float32 copies of weights, and an optimizer for them.

    Args:
        optimizer: makes the optimizer from the copies, such as
            `functools.partial(torch.optim.AdamW, lr=1e-4)`.
        gather_at_once: convert each gradient to float32 as soon as backward computes it, so that
            several backward passes accumulate in float32. gather_gradients() is then not needed.

    Pass `.optimizer` to a learning-rate scheduler.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        gather_at_once: bool = False,
    ) -> None:
        self._models: list[nn.Parameter] = []
        self.weights: list[nn.Parameter] = []
        self._gather_at_once = gather_at_once
        if not self._add(parameters):
            raise ValueError("got no weights to train; give parameters that require a gradient")
        self.optimizer = optimizer(list(self.weights))

    def _add(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Add and return copies of the trainable parameters, without duplicates."""
        models = list(dict.fromkeys(p for p in parameters if p.requires_grad))
        copies = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in models]
        if self._gather_at_once:
            for low, copy in zip(models, copies, strict=True):
                low.register_post_accumulate_grad_hook(lambda low, copy=copy: _gather(low, copy))
        self._models += models
        self.weights += copies
        return copies

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further weights of the model with their own copies."""
        given = param_group["params"]
        models: Any = [given] if isinstance(given, torch.Tensor) else given
        copies = self._add(models)
        self.optimizer.add_param_group({**param_group, "params": copies})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups of float32 copies."""
        return self.optimizer.param_groups

    def gather_gradients(self) -> None:
        """Add the model's gradients to the copies' gradients, and free each one immediately."""
        for low, copy in zip(self._models, self.weights, strict=True):
            if low.grad is not None:
                _gather(low, copy)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the copies and round them into the model. Return the optimizer's result.

        `closure` computes the loss and the model's gradients, as for torch's optimizers.
        """

        def evaluate() -> Any:
            self.copy_to_model()  # LBFGS evaluates again after it has moved the copies
            assert closure is not None
            loss = closure()
            self.gather_gradients()
            return loss

        self.gather_gradients()
        result = self.optimizer.step(evaluate) if closure else self.optimizer.step()
        self.copy_to_model()
        return result

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the copies into the model, after a step or after loading a state."""
        for low, copy in zip(self._models, self.weights, strict=True):
            low.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients of the model and of the copies, or set them to zero."""
        for parameter in (*self._models, *self.weights):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the float32 copies and the optimizer's state."""
        copies = [copy.detach() for copy in self.weights]
        return {"weights": copies, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, and update the model. Raise ValueError for other weights' state."""
        shapes = [copy.shape for copy in state["weights"]]
        if shapes != [copy.shape for copy in self.weights]:
            raise ValueError(
                f"got a state of {len(shapes)} weights for {len(self.weights)}, or of other "
                f"shapes; give the state of the same model, its parameters in the same order"
            )
        for copy, loaded in zip(self.weights, state["weights"], strict=True):
            copy.copy_(loaded)
        self.optimizer.load_state_dict(state["optimizer"])
        self.copy_to_model()


@torch.no_grad()
def _gather(low: nn.Parameter, copy: nn.Parameter) -> None:
    gradient, low.grad = low.grad, None
    assert gradient is not None
    if copy.grad is None:
        copy.grad = gradient.to(torch.float32, copy=True)
    else:
        copy.grad.add_(gradient)
