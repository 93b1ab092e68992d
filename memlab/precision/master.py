"""Master weights: train a float16 or bfloat16 model by float32 copies of its weights.

Saves    half of the activations and, while backward runs, half of the gradients: the model is low
         precision throughout.
Costs    a float32 copy of every weight. 2 bytes of weight, 2 of gradient, 4 of copy and 8 of Adam
         are 16 a weight when backward ends, as many as in float32; 18 in the step, which makes the
         gradients float32, and always where they are gathered at once.
Source   Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.

A weight of 1 in bfloat16 does not move by 1/1000, however often (see memlab.rounding): the updates
are added to a float32 copy, and the model gets that copy, rounded, after each step.

    master = MasterWeights(model.parameters(), torch.optim.AdamW)
    loss.backward()
    master.gather_gradients()             # into float32, one by one; the model's own are dropped
    clip_grad_norm_(master.weights, 1.0)  # and whatever else looks at gradients
    master.step()
    master.zero_grad()

It is an optimizer to a LossScaler: `scaler.step(master)` in place of `master.step()`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MasterWeights:
    """Float32 copies of weights, and the optimizer that steps them.

    `optimizer(copies)` makes it, such as `functools.partial(torch.optim.AdamW, lr=1e-4)`. With
    `gather_at_once`, each gradient becomes float32 as soon as backward has made it: sums of several
    backward passes are then taken in float32, and gather_gradients() has nothing left to do.

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
        """Copies of the parameters that train, each once."""
        models = list(dict.fromkeys(p for p in parameters if p.requires_grad))
        copies = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in models]
        if self._gather_at_once:
            for low, copy in zip(models, copies, strict=True):
                low.register_post_accumulate_grad_hook(lambda low, copy=copy: _gather(low, copy))
        self._models += models
        self.weights += copies
        return copies

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further weights of the model, by copies of their own."""
        given = param_group["params"]
        copies = self._add([given] if isinstance(given, torch.Tensor) else given)
        self.optimizer.add_param_group({**param_group, "params": copies})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's: groups of float32 copies."""
        return self.optimizer.param_groups

    def gather_gradients(self) -> None:
        """Add the model's gradients to those of the copies, and drop them: each before the next."""
        for low, copy in zip(self._models, self.weights, strict=True):
            if low.grad is not None:
                _gather(low, copy)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the copies and give them, rounded, to the model; returns what the optimizer returns.

        `closure` computes the loss and the model's gradients, as for torch's optimizers.
        """

        def evaluate() -> Any:
            self.hand_over()  # LBFGS evaluates again after it has moved the copies
            loss = closure()
            self.gather_gradients()
            return loss

        self.gather_gradients()
        result = self.optimizer.step(evaluate) if closure else self.optimizer.step()
        self.hand_over()
        return result

    @torch.no_grad()
    def hand_over(self) -> None:
        """Give the model the copies, rounded: after each step, and after a state is loaded."""
        for low, copy in zip(self._models, self.weights, strict=True):
            low.copy_(copy)

    def zero_grad(self) -> None:
        """Drop all gradients, the model's and the copies'."""
        for parameter in (*self._models, *self.weights):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The copies, which are the truth, and the optimizer's state."""
        copies = [copy.detach() for copy in self.weights]
        return {"weights": copies, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, in the model too; ValueError for that of other weights."""
        shapes = [copy.shape for copy in state["weights"]]
        if shapes != [copy.shape for copy in self.weights]:
            raise ValueError(
                f"got a state of {len(shapes)} weights for {len(self.weights)}, or of other "
                f"shapes; give the state of the same model, its parameters in the same order"
            )
        for copy, loaded in zip(self.weights, state["weights"], strict=True):
            copy.copy_(loaded)
        self.optimizer.load_state_dict(state["optimizer"])
        self.hand_over()


@torch.no_grad()
def _gather(low: nn.Parameter, copy: nn.Parameter) -> None:
    gradient, low.grad = low.grad, None
    assert gradient is not None
    if copy.grad is None:
        copy.grad = gradient.to(torch.float32, copy=True)
    else:
        copy.grad.add_(gradient)
