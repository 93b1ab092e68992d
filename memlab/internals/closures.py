"""Closures: an optimizer such as LBFGS runs backward itself, by a function that it asks for.

Whoever steps another's optimizer, weight by weight, has none to give.
"""

from inspect import Parameter, signature

import torch


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer whose step cannot do without."""
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise TypeError(
            f"got {type(optimizer).__name__}, whose step needs a closure that runs backward; give "
            f"an optimizer that steps by the gradients it finds"
        )
