"""Hide fake tensors from libraries that check for them.

transformers treats a fake tensor as a sign that its model is being traced. It then builds attention
masks that a real run does not build, and skips other work. It checks with
`isinstance(x, torch._subclasses.FakeTensor)`, as torch does. During a dry run that name refers to a
stand-in class: torch and memlab get the true answer, other callers get False. The class is also
replaced in modules that have imported it under this name.

Calling a fake parameter's type makes a parameter, as calling a real one's type does.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memlab.internals.replacing import caller_of
from memlab.internals.threads import asked
from memlab.internals.torch_internals import FakeTensor

TRUSTED = ("torch", "memlab")


class _AnswersByCaller(type):
    """Metaclass whose `isinstance` and `issubclass` depend on the calling module."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return caller_is_trusted() and isinstance(instance, FakeTensor)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return caller_is_trusted() and issubclass(subclass, FakeTensor)

    def __eq__(cls, other: object) -> bool:  # torch compares types, too
        return other is cls or (caller_is_trusted() and other is FakeTensor)

    def __hash__(cls) -> int:
        return hash(FakeTensor)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(*args, **kwargs)


# A check for the exact class never reaches a metaclass, so the name itself is replaced. Without it
# transformers builds one more boolean mask per sequence
# (test_transformers_checks_give_the_answers_of_a_real_run).
class _FakeTensorProxy(metaclass=_AnswersByCaller):
    checks_thread = True  # for `replaced`


def caller_is_trusted() -> bool:
    """Return whether the caller of the replacement that calls this belongs to torch or memlab.

    Every caller is trusted in the threads that did not ask for a dry run.
    """
    if not asked():
        return True
    return caller_module(sys._getframe(1)).partition(".")[0] in TRUSTED


def caller_module(frame: FrameType) -> str:
    """Return the name of the module that called a replacement, given the replacement's frame."""
    caller = caller_of(frame)
    return "" if caller is None else caller.f_globals.get("__name__", "")


def _new(real: Callable[..., Any]) -> Callable[..., Any]:
    """Make a parameter for `type(parameter)(tensor, requires_grad=...)`, as for a real one."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        is_conversion = len(args) == 1 and isinstance(args[0], FakeTensor) and cls is FakeTensor
        if is_conversion and kwargs.keys() == {"requires_grad"}:
            return torch.nn.Parameter(args[0], **kwargs)
        return real(cls, *args, **kwargs)

    return new


STAND_INS: dict[str, Callable[[Any], Any]] = {
    "of_parameter": _new,
    "hidden": lambda real: _FakeTensorProxy,
}
