"""The loss computes the logits, in chunks, in a script that runs unmodified.

    late_logits(model.lm_head)      # from now on, its outputs are LateLogits
    logits = model(tokens)          # of the logits' shape and dtype, but nothing is computed
    F.cross_entropy(logits.view(-1, V), targets.view(-1))   # in chunks, by memlab.losses

With `in_chunks=False` the loss is the usual one. It shows what is saved if no name of the script
holds the logits during backward.

What scripts do between the two (views, slices over tokens, casts, `contiguous`) is done to the
layer's input. Whatever else reads the logits gets them computed, and raises `OtherUseError` if a
gradient flows through it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.internals.torch_internals import (
    DisableTorchFunctionSubclass,
    disable_current_modes,
    tree_leaves,
    tree_map_only,
)
from memlab.losses import chunked_cross_entropy

_NAMES = ("shape", "dtype", "ndim", "requires_grad", "layout")
_QUESTIONS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _NAMES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point),
    }
)
_PROPERTIES: Any = Tensor
_DEVICES = frozenset({_PROPERTIES.device.__get__, _PROPERTIES.is_cuda.__get__, Tensor.get_device})
_RESHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten})
_COPIES = frozenset({Tensor.contiguous, Tensor.clone, torch.clone})


class OtherUseError(Exception):
    """The script does more with its logits than torch's cross-entropy. The message says what."""


class LateLogits(Tensor):
    """The logits `F.linear(hidden, weight, bias)`. The tensor itself is one element on the CPU,
    expanded to their shape."""

    hidden: Tensor  # (…, C)
    head: "_Head"

    @classmethod
    def of(cls, hidden: Tensor, head: "_Head", dtype: torch.dtype) -> "LateLogits":
        shape = (*hidden.shape[:-1], head.layer.out_features)
        with disable_current_modes():  # no meter counts it, and it is not fake
            # A fake tensor is a Python object already and cannot become another subclass
            # (test_no_logits_are_made).
            logits = torch.empty((), dtype=dtype).expand(shape).as_subclass(cls)
        logits.hidden, logits.head = hidden, head
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DEVICES:
            return func(args[0].hidden)
        if func in _QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        if func is F.cross_entropy and (loss := _chunked(*args, **kwargs)) is not None:
            return loss
        if args and isinstance(args[0], LateLogits):
            moved = _moved(func, args[0], args[1:], kwargs)
            if moved is not None:
                return moved
        result = func(*_computed(args), **_computed(kwargs))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result)):
            raise OtherUseError(
                f"the script uses its logits in {getattr(func, '__name__', func)}, not only in "
                f"torch's cross_entropy"
            )
        return result


class _Head:
    """A linear layer whose outputs are LateLogits, and autocast's state when it ran."""

    def __init__(self, layer: nn.Linear, in_chunks: bool) -> None:
        self.layer, self.in_chunks = layer, in_chunks
        self.is_waiting = False  # for a loss
        self.autocast: Callable[[], torch.autocast]

    def __call__(self, hidden: Tensor) -> LateLogits:
        if self.is_waiting:
            raise OtherUseError("the script's loss is not torch's cross_entropy of the logits")
        device = hidden.device.type
        is_cast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.autocast = lambda: torch.autocast(device, dtype, enabled=is_cast)
        self.is_waiting = True
        return LateLogits.of(hidden, self, dtype if is_cast else self.layer.weight.dtype)


def late_logits(layer: nn.Linear, *, in_chunks: bool = True) -> None:
    """Make the layer return LateLogits wherever gradients are enabled."""
    forward, head = layer.forward, _Head(layer, in_chunks)

    @wraps(forward)
    def late(input: Tensor) -> Tensor:
        return head(input) if torch.is_grad_enabled() else forward(input)

    layer.forward = late


def _computed(arguments: Any) -> Any:
    """Return the arguments with their logits computed."""

    def compute(late: LateLogits) -> Tensor:
        with late.head.autocast():
            logits = F.linear(late.hidden, late.head.layer.weight, late.head.layer.bias)
        return logits.to(late.dtype)

    return tree_map_only(LateLogits, compute, arguments)


def _moved(func: Any, logits: LateLogits, args: Any, kwargs: Any) -> LateLogits | None:
    """Return the logits after a view, a slice, a cast or a copy; None for anything else."""
    hidden, dtype = logits.hidden, logits.dtype
    if func is Tensor.float:
        dtype = torch.float32
    elif func is Tensor.to:
        dtype = next(filter(None, map(_dtype, (*args, *kwargs.values()))), dtype)
    elif func in _RESHAPES:
        with disable_current_modes(), DisableTorchFunctionSubclass():
            shape = func(logits, *args, **kwargs).shape
        if shape[-1:] != logits.shape[-1:]:
            return None
        hidden = hidden.reshape(*shape[:-1], hidden.shape[-1])
    elif func is Tensor.__getitem__ and _indexes_tokens(args[0], logits.ndim):
        hidden = hidden[args[0]]
    elif func not in _COPIES:
        return None
    return LateLogits.of(hidden, logits.head, dtype)


def _dtype(given: Any) -> torch.dtype | None:
    """Return the dtype that an argument of `Tensor.to` asks for."""
    if isinstance(given, torch.dtype):
        return given
    return given.dtype if isinstance(given, Tensor) else None


def _indexes_tokens(index: Any, dims: int) -> bool:
    """Whether an index takes slices of all dimensions but the last, which it leaves whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return False
    named = [part for part in parts if part is not Ellipsis]
    reaches_last = len(named) == dims or (bool(parts) and Ellipsis in parts[:-1])
    return not reaches_last or parts[-1] == slice(None)


def _chunked(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss in chunks, or None if its settings or shapes need all logits."""
    is_usual = weight is None and size_average is None and reduce is None
    if not (is_usual and isinstance(input, LateLogits) and input.shape[:-1] == target.shape):
        return None
    input.head.is_waiting = False
    if not input.head.in_chunks:
        settings: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
        }
        return F.cross_entropy(_computed(input), target, reduction=reduction, **settings)
    with input.head.autocast():
        return chunked_cross_entropy(
            input.hidden,
            input.head.layer.weight,
            target,
            bias=input.head.layer.bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,  # type: ignore[arg-type]
        )
