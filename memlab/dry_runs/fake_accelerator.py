"""Run scripts for an accelerator in a dry run on a machine without one.

    devices               the CPU replaces every accelerator: `.cuda()`, `.to(0)`, `device="xpu"`,
                          `torch.Generator("cuda")`, `capturable=True`
    autocast              an accelerator's autocast acts on the CPU, in the accelerator's dtype
    GradScaler("cuda")    is enabled, unless by its first step nothing else named an accelerator
    pin_memory            changes nothing, because pinned memory is not on the device
    torch.save, torch.jit.save
                          write nothing: there are no values, and the file to overwrite could be a
                          real checkpoint. `memlab run` has placeholders.py instead
    synchronize, streams  return at once; a storage's record has the stream that was current
    device name, free memory, elapsed time
                          raise ValueError with the line; only a real device has them

`torch.cuda.is_available()` and `device_count()` are unchanged. If the machine has an accelerator,
its own functions replace the last two rows. In a prediction, the target's card replaces them
(prediction/fake_gpu.py).

Autocast follows the CPU's operator list. CUDA's list also computes layer, group and RMS norm,
softmax, powers, exponentials, logarithms and sums in float32 (ATen/autocast_mode.h). The CPU's
keeps their input dtype, so their results can be half as large as on CUDA.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from itertools import count
from typing import Any, NoReturn

import torch

from memlab.dry_runs import known_values
from memlab.internals.torch_internals import (
    DeviceContext,
    FakeTensor,
    device_constructors,
    get_current_function_mode_stack,
)
from memlab.metering.dry import DryRun
from memlab.metering.frames import user_line
from memlab.world.entering import ByName, Replacements

_REAL_DEVICES = ("cpu", "meta")


class StandIn:
    """The device that replaces every accelerator: the CPU, or a fake device."""

    device: str | torch.device = "cpu"
    was_named = False  # whether the script has named an accelerator in this dry run

    @classmethod
    @contextmanager
    def use(cls, device: torch.device) -> Iterator[None]:
        """Use another device, which fake tensors can be on, inside `with`."""
        before, cls.device = cls.device, device
        try:
            yield
        finally:
            cls.device = before


def to_stand_in(argument: Any) -> Any:
    """Replace an accelerator by the stand-in; return any other argument unchanged."""
    if isinstance(argument, (str, torch.device)):
        is_accelerator = torch.device(argument).type not in _REAL_DEVICES
    else:
        is_accelerator = type(argument) is int  # a device index, as in `.to(0)`
    StandIn.was_named |= is_accelerator
    return StandIn.device if is_accelerator else argument


def _to_cpu(argument: Any) -> Any:
    return "cpu" if to_stand_in(argument) is StandIn.device else argument


# ------------------------------------------------------------------ tensors


def _unchanged(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def on_stand_in(copy: torch.Tensor) -> torch.Tensor:
    """Return a copy to the stand-in. torch keeps a small literal's copy as a CPU constant."""
    device: Any = StandIn.device
    if isinstance(copy, FakeTensor) and device != "cpu":
        copy.fake_device, copy.constant = device, None
    return copy


def _to_device(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    StandIn.was_named = True
    return on_stand_in(tensor.to(StandIn.device))


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _to(move: Callable[..., Any]) -> Callable[..., Any]:
    def to(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(to_stand_in, args))
        kwargs = {name: to_stand_in(value) for name, value in kwargs.items()}
        moved = move(*args, **kwargs)
        names_it = any(each is StandIn.device for each in (*args[1:], *kwargs.values()))
        return on_stand_in(moved) if names_it else moved

    return to


def _create(
    make: Callable[..., Any],
    *args: Any,
    device: Any = None,
    pin_memory: bool | None = None,
    **kwargs: Any,
) -> Any:
    return make(*args, device=to_stand_in(device), **kwargs)


def _from_values(
    make: Callable[..., Any],
    data: Any,
    *args: Any,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Create the tensor on the CPU, then copy it to the stand-in.

    torch reads the elements of a list of tensors from their memory, which fake ones lack. So they
    are read as numbers first, and the result's values are known only if all of theirs are.
    """
    device = default_device() if device is None else device
    elements = known_values.tensors_in(data) if isinstance(data, list | tuple) else []
    if elements and "dtype" not in kwargs and not args:
        kwargs["dtype"] = reduce(torch.promote_types, (each.dtype for each in elements))
    tensor = make(_numbers(data), *args, device=to_stand_in(device), **kwargs)
    if not all(map(known_values.is_known, elements)):
        known_values.forget([tensor])
    if device is not None and to_stand_in(device) == StandIn.device:
        tensor = on_stand_in(tensor.to(StandIn.device))
    return tensor.requires_grad_() if requires_grad else tensor


def default_device() -> torch.device | None:
    """Return the device of `with torch.device(...)` or `torch.set_default_device`."""
    contexts = (m for m in get_current_function_mode_stack() if isinstance(m, DeviceContext))
    return next((context.device for context in reversed([*contexts])), None)


def _numbers(data: Any) -> Any:
    """Replace the tensors in nested lists by numbers."""
    if not isinstance(data, list | tuple):
        return data
    return [each.tolist() if isinstance(each, torch.Tensor) else _numbers(each) for each in data]


def _like_values(like: torch.Tensor, data: Any, *, device: Any = None, **kwargs: Any) -> Any:
    device = like.device if device is None else device
    return _from_values(partial(torch.Tensor.new_tensor, like), data, device=device, **kwargs)


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """Accept an index alone, which torch rejects on a machine without an accelerator."""
    is_index = not kwargs and len(args) == 1 and type(args[0]) is int
    return torch.device("cuda", args[0]) if is_index else torch.device(*args, **kwargs)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    **{
        make: partial(_create, make)
        for make in (*device_constructors(), torch.empty_like, torch.zeros_like, torch.ones_like)
    },
    **{
        make: partial(_from_values, make) for make in (torch.tensor, torch.as_tensor, torch.asarray)
    },
    torch.Tensor.new_tensor: _like_values,
    torch.Tensor.cuda: _to_device,
    torch.Tensor.xpu: _to_device,
    torch.Tensor.pin_memory: _unchanged,
    torch.Tensor.to: _to(torch.Tensor.to),
}


# ------------------------------------------------------------------ autocast and loss scaling


def _mark_as_dry(init: Callable[..., None]) -> Callable[..., None]:
    def marked(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.made_in_a_dry_run = True

    return marked


def _require_made_in_dry_run(made: Any, device: str) -> None:
    """Raise ValueError for an autocast or scaler from before the dry run that torch disabled.

    Without CUDA, torch disables them in the constructor, and the user's setting is lost.
    """
    is_off = not made._enabled and not hasattr(made, "made_in_a_dry_run")
    if is_off and device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"{user_line()}: this {type(made).__name__} for CUDA was made before the dry run, and "
            f"torch disabled it because there is no CUDA; create it, or import the module that "
            f"decorates with it, inside the dry run"
        )


def _enter_cpu_autocast_too(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __enter__(autocast: torch.autocast) -> Any:  # noqa: N807
        _require_made_in_dry_run(autocast, autocast.device)
        result = enter(autocast)
        if autocast.device not in _REAL_DEVICES:
            twin = torch.autocast("cpu", autocast.fast_dtype, autocast._enabled)
            autocast.__dict__.setdefault("twins", []).append(twin)
            enter(twin)
        return result

    return __enter__


def _exit_cpu_autocast_too(leave: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(autocast: Any, *exception: Any) -> Any:  # noqa: N807
        if autocast.__dict__.get("twins"):
            leave(autocast.twins.pop(), *exception)
        return leave(autocast, *exception)

    return __exit__


def _checked_scale(scale: Callable[..., Any]) -> Callable[..., Any]:
    def checked_scale(scaler: Any, outputs: Any) -> Any:
        _require_made_in_dry_run(scaler, scaler._device)
        if scaler._device not in _REAL_DEVICES and _script_is_for_the_cpu():
            # nanoGPT makes a CUDA scaler on the CPU too, where torch disables it. Enabled it added
            # 12 bytes to 281 MiB. Only at the first `scale` is it known whether the script uses an
            # accelerator (test_a_scaler_scales_only_if_the_script_uses_an_accelerator).
            scaler._enabled = False  # as torch does without the accelerator
        return scale(scaler, outputs)

    return checked_scale


def _initial_scale(real: Callable[[Any], float]) -> Callable[[Any], float]:
    """Return a function that reads the scale as a number: there are no infinities to lower it."""
    return lambda scaler: scaler._init_scale if scaler._enabled else real(scaler)


def _script_is_for_the_cpu() -> bool:
    return not (StandIn.was_named or StandIn.device != "cpu" or torch.cuda.is_available())


def _cast_on_cpu(cast: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, device, dtype: cast(value, _to_cpu(device), dtype)


# ------------------------------------------------------------------ torch.cuda and other backends


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, _to_cpu(device))  # type: ignore[call-arg]  # not in the stubs

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        """Leave the state as it is if a file's state has no values."""
        return self if isinstance(new_state, FakeTensor) else super().set_state(new_state)


class FinishedWork:
    """A stream, event or context manager with no work to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "FinishedWork":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: "FinishedWork | None" = None) -> "FinishedWork":
        return event or FinishedWork()

    def elapsed_time(self, end: "FinishedWork") -> float:
        _raise_unsupported("elapsed_time")

    synchronize = wait = wait_event = wait_stream = record = _nothing


class Stream(FinishedWork):
    """A stream with no work to wait for. What is allocated inside `with` belongs to its pools."""

    _numbers = count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(self._numbers)
        self._outer: list[int] = []

    def __enter__(self) -> "Stream":
        self._outer.append(DryRun.stream)
        DryRun.stream = self.number
        return self

    def __exit__(self, *exception: Any) -> None:
        DryRun.stream = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)


def _stream(number: int) -> Stream:
    stream = Stream.__new__(Stream)
    stream.number, stream._outer = number, []
    return stream


def _current_stream(device: Any = None) -> Stream:
    return _stream(DryRun.stream)


def _default_stream(device: Any = None) -> Stream:
    return _stream(0)


def _inside(stream: Any) -> FinishedWork:
    """Return `stream` as the context manager that `torch.cuda.stream` returns."""
    return stream if isinstance(stream, Stream) else FinishedWork()


def _set_stream(stream: Any) -> None:
    if isinstance(stream, Stream):
        DryRun.stream = stream.number


class DeviceNeededError(ValueError, RuntimeError):
    """Also a RuntimeError, as torch's own, for libraries that go on without an answer."""


def _raise_unsupported(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise DeviceNeededError(
        f"{user_line()}: {name} needs a real device, and a dry run uses none; remove the call, or "
        f"make it only if a device is available"
    )


def _always(answer: Any) -> Callable[[Any], Any]:
    return lambda real: answer


def _capturable(supports_xla: bool = True) -> list[str]:  # a plain function for TorchScript
    return ["cpu"]


_UNSUPPORTED = ByName(lambda name: _always(partial(_raise_unsupported, name)))


def nothing(real: Any) -> Callable[..., None]:
    """Return another function each time: dynamo has a rule for each function of torch."""
    return lambda *args, **kwargs: None


STAND_INS: Replacements = {
    "marked": _mark_as_dry,
    "enter_twin": _enter_cpu_autocast_too,
    "exit_twin": _exit_cpu_autocast_too,
    "cast": _cast_on_cpu,
    "scale": _checked_scale,
    "get_scale": _initial_scale,
    "never": _always(lambda *args, **kwargs: False),
    "bf16_supported": _always(lambda *args, **kwargs: True),
    "parse_to": _to,
    "generator": _always(Generator),
    "save": nothing,
    "jit_save": nothing,
    "capturable": _always(_capturable),
    "unchanged": _always(_unchanged),
    "nothing": nothing,
    "fact": _UNSUPPORTED,
    "unsupported": _UNSUPPORTED,
    "empty_cache": nothing,
    "event": _always(FinishedWork),
    "finished": _always(FinishedWork),
    "stream": _always(Stream),
    "in_stream": _always(_inside),
    "current_stream": _always(_current_stream),
    "default_stream": _always(_default_stream),
    "set_stream": _always(_set_stream),
    "first": _always(lambda: 0),
}
_MODULES = {  # of each accelerator
    torch.cuda: ("torch.cuda", "torch.cuda.memory", "torch.cuda.nvtx"),
    torch.xpu: ("torch.xpu",),
    torch.mps: ("torch.mps",),
}


def modules_of_this_machines() -> set[str]:
    """Return the modules of the accelerators that this machine has."""
    return {name for kind, names in _MODULES.items() if kind.is_available() for name in names}
