"""Hide fake tensors from libraries that check for them.

transformers treats a fake tensor as a sign that its model is being traced. It then builds attention
masks that a real run does not build, and skips other work. It checks with
`isinstance(x, torch._subclasses.FakeTensor)`, as torch does. During a dry run that name refers to a
stand-in class: torch and memlab get the true answer, other callers get False. The class is also
replaced in modules that have imported it under this name.
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from memlab.internals.torch_internals import FakeTensor, subclasses

_NAME = "FakeTensor"
_TRUSTED = ("torch", "memlab")


class _AnswersByCaller(type):
    """Metaclass whose `isinstance` and `issubclass` depend on the calling module."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return _caller_is_trusted() and isinstance(instance, FakeTensor)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _caller_is_trusted() and issubclass(subclass, FakeTensor)

    def __eq__(cls, other: object) -> bool:  # torch compares types, too
        return other is cls or (_caller_is_trusted() and other is FakeTensor)

    def __hash__(cls) -> int:
        return hash(FakeTensor)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(*args, **kwargs)


class _FakeTensorProxy(metaclass=_AnswersByCaller):
    pass


def _caller_is_trusted() -> bool:
    """Return whether the caller, two frames up, belongs to torch or memlab."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in _TRUSTED


def replacements() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """Return the places where the stand-in replaces FakeTensor, for `replaced`."""
    return {
        (module, _NAME): lambda real: _FakeTensorProxy for module in (subclasses, *_importers())
    }


def _importers() -> Iterator[ModuleType]:
    """Yield other libraries' modules that have imported FakeTensor under this name."""
    for name, module in list(sys.modules.items()):
        is_other = name.partition(".")[0] not in _TRUSTED
        if is_other and getattr(module, "__dict__", {}).get(_NAME) is FakeTensor:
            yield module
