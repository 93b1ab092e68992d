"""Rules for allocations that a dispatch mode adds to a step.

Under a dispatch mode, autograd assumes tensor subclasses, whose operators might not work in place.
It then uses out-of-place branches: `old + new` instead of `old += new` where a gradient has several
sources, or `zeros.scatter_add(…)` instead of `zeros.scatter_add_(…)` in gather's backward. Each of
them allocates a storage that the step does not allocate without the mode.

The rules come from recording 65 kinds of steps with and without a no-op mode
(profiler_recording.py). A test repeats the recordings and fails if a new torch adds a branch.
"""

import threading
from contextlib import ExitStack
from typing import Any

import torch

from memlab.internals.replacing import registered
from memlab.internals.torch_internals import call_composite
from memlab.metering.registry import Storage

aten = torch.ops.aten

# Autograd formulas that create zeros and then write into them.
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
# Single formulas with their own in-place branch: (node, operator).
_IN_FORMULA = frozenset(
    {
        ("BinaryCrossEntropyWithLogitsBackward0", aten.sub.Tensor),
        ("BinaryCrossEntropyWithLogitsBackward0", aten.mul.Tensor),
        ("Atan2Backward0", aten.masked_fill.Scalar),
        ("MaximumBackward0", aten.masked_fill.Scalar),  # from torch 2.14 on
        ("MinimumBackward0", aten.masked_fill.Scalar),
    }
)

# Nodes that run entirely different operators under a mode. Without a mode, most of them check the
# values for zeros or NaNs. A step with an orthogonal parametrization was 2.2 % too low. The test
# test_a_note_names_a_gradient_that_is_computed_differently_under_the_meter has one kind for each.
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

# All operators that can be in place without a mode.
OUT_OF_PLACE = _INTO_ZEROS | {func for _, func in _IN_FORMULA} | {aten.add.Tensor}

# Composite operators whose forward ends with `add_`, or with `add` under a mode: F.linear with a
# bias and a non-contiguous 3-D input, math attention with a mask.
_COMPOSITES = (aten.linear.default, aten._scaled_dot_product_attention_math.default)


class CompositeTracker:
    """Track whether the current operator is part of one of _COMPOSITES; then `depth` is above 0.

    torch decomposes them before a dispatch mode sees them, so their `add` looks like the user's.
    While a meter runs, a registered kernel around each of them counts entries and exits.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._users = 0
        self._registered = ExitStack()

    @property
    def depth(self) -> int:
        return getattr(self._of_thread, "depth", 0)

    def __enter__(self) -> None:
        self._users += 1
        if self._users == 1:
            keys = ("AutogradCPU", *(["AutogradCUDA"] if torch.cuda.is_available() else []))
            kernels = {(func, key): self._counting(func) for func in _COMPOSITES for key in keys}
            self._registered.enter_context(registered(kernels))

    def __exit__(self, *exception: Any) -> None:
        self._users -= 1
        if self._users == 0:
            self._registered.close()

    def _counting(self, operator: Any) -> Any:
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            self._of_thread.depth = self.depth + 1
            try:
                return call_composite(operator, *args, **kwargs)
            finally:
                self._of_thread.depth -= 1

        return run


COMPOSITE_TRACKER = CompositeTracker()


def is_in_place_without_mode(
    func: Any, first: torch.Tensor, old: Storage, new: Storage, node: Any
) -> bool:
    """Return whether the engine, without a mode, might write the result `new` into `first`.

    Call it for operators that the autograd engine itself calls while it evaluates `node`. The
    caller must also check that the storage `old` of `first` dies right after the operator.
    """
    if func is aten.add.Tensor:
        # a view's base is a second owner of the storage, so autograd does not write to views
        return not first._is_view() and _is_dense(first)
    # In place only if the same formula made the zeros: the backward passes of Scatter and IndexPut
    # really are out of place (test_gathers_backward_scatters_in_place).
    if func in _INTO_ZEROS:
        return old.node is not None and old.node == new.node
    return (node.name(), func) in _IN_FORMULA


def formulas_note(nodes: set[str]) -> tuple[str, ...]:
    """Return a note on the nodes whose gradient is not metered exactly, () if there are none."""
    names = sorted({_OTHER_FORMULAS[node] for node in nodes & _OTHER_FORMULAS.keys()})
    if not names:
        return ()
    return (
        f"the gradient of {', '.join(names)} is computed differently under the meter, so its "
        f"temporaries are not exact",
    )


def is_formula_step(func: Any, next_func: Any) -> bool:
    """Return whether a sum, an input of the node's next operator, is a step of the node's formula.

    For example, atan2's formula multiplies with the sum. Otherwise it is an accumulated gradient.
    """
    return func is aten.add.Tensor and next_func is not aten.add.Tensor


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is contiguous for some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
