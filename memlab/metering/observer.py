"""What watching changes, and how to tell.

A dispatch mode makes autograd believe that it handles tensor subclasses, whose operators might not
be writable in place. It then takes other branches: `old + new` where a gradient has several
sources instead of `old += new`, `zeros.scatter_add(…)` in gather's backward instead of
`zeros.scatter_add_(…)`. Each makes a storage that the step does not make unwatched.

The rules below name these branches. They were found by recording 65 kinds of steps with and
without a mode that does nothing (profiler_recording.py), and a test records them again: a
new torch with a new branch fails it.
"""

from typing import Any

import torch
from torch.autograd.graph import Node
from torch.library import Library

from memlab.metering.registry import Storage

aten = torch.ops.aten

# In these formulas of autograd's, zeros are made and then written into.
_INTO_ZEROS = frozenset(
    {
        aten.scatter_add.default,
        aten.scatter.src,
        aten.index_put.default,
        aten.index_add.default,
        aten.masked_scatter.default,
        aten.put.default,
        aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor,
    }
)
# Single formulas that have an in-place branch of their own.
_IN_FORMULA = frozenset(
    {
        ("BinaryCrossEntropyWithLogitsBackward0", aten.sub.Tensor),
        ("BinaryCrossEntropyWithLogitsBackward0", aten.mul.Tensor),
        ("Atan2Backward0", aten.masked_fill.Scalar),
    }
)


# Nodes that take other operators altogether while they are watched: most look for zeros, or for
# NaNs, in the values otherwise.
_OTHER_FORMULAS = {
    "AngleBackward0": "angle",
    "CumprodBackward0": "cumprod",
    "LinalgHouseholderProductBackward0": "householder_product",
    "LinalgLstsqBackward0": "lstsq",
    "LinalgMatrixExpBackward0": "matrix_exp",
    "LinalgPinvBackward0": "pinv",
    "LinalgQrBackward0": "qr",
    "MaskedFillBackward1": "masked_fill by a tensor",
    "MaxBackward1": "max of all elements",
    "MedianBackward0": "median of all elements",
    "MinBackward1": "min of all elements",
    "NanmedianBackward0": "nanmedian of all elements",
    "ProdBackward0": "prod",
    "ProdBackward1": "prod",
}

# What can be in place unwatched, at all.
OUT_OF_PLACE = _INTO_ZEROS | {func for _, func in _IN_FORMULA} | {aten.add.Tensor}

# Compositions of operators that end with `add_`, watched with `add`, in the forward pass.
_COMPOSITIONS = (aten.linear.default, aten._scaled_dot_product_attention_math.default)


class Compositions:
    """Knows whether the operator that runs now is a part of one of _COMPOSITIONS.

    They are taken apart before a dispatch mode sees them, so nothing else tells their sum from
    one that the user wrote. While anybody looks, a function of ours stands before each: it only
    notes that the composition has begun and ended.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._lookers = 0
        self._library: Library | None = None

    def __enter__(self) -> None:
        self._lookers += 1
        if self._lookers == 1:
            self._library = Library("aten", "IMPL")
            for operator in _COMPOSITIONS:
                for key in (
                    "AutogradCPU",
                    *(["AutogradCUDA"] if torch.cuda.is_available() else []),
                ):
                    self._library.impl(operator, self._noting(operator), key)

    def __exit__(self, *exception: Any) -> None:
        self._lookers -= 1
        if self._lookers == 0:
            self._library._destroy()
            self._library = None

    def _noting(self, operator: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return operator.decompose(*args, **kwargs)
            finally:
                self.depth -= 1

        return run


COMPOSITIONS = Compositions()


def is_in_place_unwatched(
    func: Any, first: torch.Tensor, old: Storage, new: Storage, node: Node
) -> bool:
    """Whether the engine, unwatched, would write the result `new` of `func` into `first`.

    `node` is the node that it evaluates.

    Asked of calls that come straight from autograd's engine, without a graph of their own; it
    remains to be seen whether the storage `old` of `first` dies right after the call. A view is
    written to by nobody: its base is a second owner of the storage.
    """
    if func is aten.add.Tensor:
        return not first._is_view() and _is_dense(first)
    if func in _INTO_ZEROS:
        return old.node is not None and old.node == new.node
    return (node.name(), func) in _IN_FORMULA


def formulas_note(nodes: set[str]) -> tuple[str, ...]:
    """A note on the gradients among these nodes that are not metered to the byte, if any is."""
    names = sorted({_OTHER_FORMULAS[node] for node in nodes & _OTHER_FORMULAS.keys()})
    if not names:
        return ()
    return (
        f"the gradient of {', '.join(names)} is computed in another way while it is watched: what "
        f"it takes meanwhile is not exact",
    )


def is_formula(func: Any, next_func: Any) -> bool:
    """Whether a sum that the next operator of the same node takes is a step of a formula (atan2's,
    say, which multiplies with it), not a gradient that still accumulates."""
    return func is aten.add.Tensor and next_func is not aten.add.Tensor


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements, in some order of the dimensions, lie side by side without a gap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
