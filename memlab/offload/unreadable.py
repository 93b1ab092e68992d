"""Unreadable tensors: reading an emptied storage raises an error instead of crashing the process.

torch reads a tensor's storage without checking that it has memory. So an unreadable tensor has a
class whose torch functions raise, except for those that need only its shape, dtype or gradient.
Autograd and kernels ignore the class. A tensor's aliases keep their own class. What a caller keeps
of `present()` has its own storage afterwards; an alias made elsewhere, such as by `torch.vmap` over
a weight, is unreadable only in torch's builds for GPUs, which let a storage itself raise.
"""

from functools import cache
from typing import Any

from torch import Tensor

from memlab.internals.torch_internals import DisableTorchFunctionSubclass, forbid_data_access

_HOW = "is in its store; read and change it inside `with streamed.present():`"
_ALIASES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # properties that share the storage
_WITHOUT_VALUES = (
    *("__hash__", "__len__", "dim", "element_size", "get_device", "ndimension", "nelement"),
    *("numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *("retain_grad", "size", "storage_offset", "stride", "untyped_storage"),
)


def make_unreadable(tensor: Tensor) -> None:
    """Let each use of the tensor's values raise RuntimeError. Its storage is empty."""
    if not isinstance(tensor, _Unreadable):
        tensor.__class__ = _unreadable_class(type(tensor))
    forbid_data_access(tensor.untyped_storage(), f"a streamed weight {_HOW}")


def make_readable(tensor: Tensor) -> None:
    """Undo `make_unreadable`, after `allow_data_access` and after the storage is filled."""
    if isinstance(tensor, _Unreadable):
        tensor.__class__ = type(tensor).__bases__[1]


class _Unreadable:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            if func is Tensor.__repr__:
                return f"{cls.__name__}(streamed, in its store, shape={tuple(args[0].shape)})"
            if not _reads_values(func):
                return func(*args, **(kwargs or {}))
        raise RuntimeError(f"got {_name(func)} of a streamed weight, which {_HOW}")


def _reads_values(func: Any) -> bool:
    name = _name(func)
    if name != func.__name__:  # a property
        return name in _ALIASES
    only_asks = name.startswith(("is_", "_is_", "new_")) or name.endswith("_like")
    return name == "is_nonzero" or not (only_asks or name in _WITHOUT_VALUES)


def _name(func: Any) -> str:
    """Return a function's name; of the getter or setter of a property, the property's name."""
    is_property = func.__name__ in ("__get__", "__set__", "__delete__")
    return func.__self__.__name__ if is_property else func.__name__


@cache
def _unreadable_class(cls: type) -> type:
    return type(cls)(cls.__name__, (_Unreadable, cls), {})
