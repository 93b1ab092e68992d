"""Closures: optimizers such as LBFGS call a function, the closure, that runs backward.

Code that steps an optimizer one weight at a time has no closure to pass.
"""

from inspect import Parameter, signature

import torch


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer whose `step` requires a closure."""
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise TypeError(
            f"got {type(optimizer).__name__}, whose step needs a closure that runs backward; give "
            f"an optimizer that reads the gradients from .grad"
        )
