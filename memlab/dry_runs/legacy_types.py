"""Tensor types from before dtypes, which many scripts still use, on the stand-in.

    torch.cuda.FloatTensor      makes tensors on the accelerator; `isinstance` knows them
    torch.FloatTensor           makes CPU tensors; `isinstance` knows them, too
    x.type(...)                 casts and moves to a type or its name; without one, returns the name
    x.new(2, 3)                 makes a tensor on the device of `x`
    set_default_tensor_type     sets the default dtype and device, also of `torch.Tensor(2, 3)`

In a dry run of CPU kernels, where the CPU replaces the accelerator, its tensors are of both types.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from memlab.dry_runs import fake_accelerator
from memlab.dry_runs.fake_accelerator import StandIn
from memlab.internals.torch_internals import FakeTensor
from memlab.metering.dry import DryRun

_DTYPES = {
    name: kind.dtype
    for name, kind in vars(torch).items()
    if name.endswith("Tensor") and isinstance(getattr(kind, "dtype", None), torch.dtype)
}
_NAME = re.compile(r"torch\.(?:(?P<device>cuda|xpu)\.)?(?P<kind>\w+)")


class _LegacyType(type):
    """The type of a stand-in for `torch.FloatTensor` or `torch.cuda.FloatTensor`."""

    dtype: torch.dtype
    real: Any
    on_accelerator: bool

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # A module that was imported in a dry run keeps the type.
        if DryRun.active is None or not cls.on_accelerator:
            return cls.real(*args, **kwargs)
        StandIn.was_named = True
        return _made(args, cls.dtype, kwargs.get("device") or StandIn.device)

    def __instancecheck__(cls, value: Any) -> bool:
        if not isinstance(value, FakeTensor):
            return isinstance(value, cls.real)
        device = StandIn.device if cls.on_accelerator else "cpu"
        return value.dtype is cls.dtype and value.device == torch.device(device)


def _is_on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device == torch.device(StandIn.device)


def _made(args: tuple[Any, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Return what a type, or `x.new`, makes of sizes, of a storage or of values."""
    empty, tensor = (fake_accelerator.FUNCTIONS[make] for make in (torch.empty, torch.tensor))
    if len(args) != 1 or isinstance(args[0], (int, torch.Size)):
        sizes = args[0] if args and not isinstance(args[0], int) else args or (0,)
        return empty(sizes, dtype=dtype, device=device)
    if isinstance(args[0], torch.Tensor):
        return args[0].detach().to(device=fake_accelerator.to_stand_in(device), dtype=dtype)
    if torch.is_storage(args[0]):
        return empty((0,), dtype=dtype, device=device).set_(args[0])
    return tensor(args[0], dtype=dtype, device=device)


def _new(tensor: torch.Tensor, *args: Any, device: Any = None) -> torch.Tensor:
    return _made(args, tensor.dtype, device or tensor.device)


def _type(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        kind, is_on_cpu = torch.Tensor.type(tensor), tensor.device == torch.device("cpu")
        return kind if is_on_cpu else kind.replace("torch.", "torch.cuda.", 1)
    if (named := _parsed(dtype)) is None:
        return torch.Tensor.type(tensor, dtype, non_blocking)
    dtype, on_accelerator = named
    if on_accelerator == _is_on_accelerator(tensor):
        return tensor.to(dtype=dtype)
    device = StandIn.device if on_accelerator else "cpu"
    return tensor.to(device=device, dtype=dtype)


def _parsed(kind: Any) -> tuple[torch.dtype, bool] | None:
    """Return the dtype of a type or its name, and whether it is an accelerator's; None for what is
    neither."""
    name = f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else kind
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None or found["kind"] not in _DTYPES:
        return None
    StandIn.was_named |= found["device"] is not None
    return _DTYPES[found["kind"]], found["device"] is not None


class _DefaultType:
    """The default type that a script has set in this dry run."""

    def __init__(self) -> None:
        self.on_accelerator = False

    def setter(self, real: Callable[[Any], None]) -> Callable[[Any], None]:
        def set_default_tensor_type(t: Any) -> None:
            if (named := _parsed(t)) is None:
                real(t)
                return
            dtype, self.on_accelerator = named
            torch.set_default_dtype(dtype)
            torch.set_default_device("cuda" if self.on_accelerator else None)

        return set_default_tensor_type

    def constructor(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `torch.Tensor.__new__`, which `torch.set_default_device` leaves alone."""

        def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
            if cls is torch.Tensor and self.on_accelerator:
                return _made(args, torch.get_default_dtype(), StandIn.device)
            return real(cls, *args, **kwargs)

        return construct


def _stand_in(real: Any) -> _LegacyType:
    attributes = {
        "real": real,
        "dtype": real.dtype,
        "is_cuda": real.is_cuda,
        "on_accelerator": real.__module__ != "torch",
        "__module__": real.__module__,
    }
    return _LegacyType(real.__name__, (), attributes)


FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.Tensor.new: _new, torch.Tensor.type: _type}


def stand_ins() -> dict[str, Callable[[Any], Any]]:
    default = _DefaultType()
    return {
        "legacy_type": _stand_in,
        "default_type": default.setter,
        "of_default_type": default.constructor,
    }
