"""Libraries that ask whether a tensor is fake get the answer of a real run.

transformers takes fake tensors for a sign that its model is being traced. It then builds attention
masks that a real run leaves out, and skips what a real run computes. It asks through
`torch._subclasses.FakeTensor`, and so does torch itself. During a dry run that name leads to a
class whose answer depends on who asks: torch learns the truth, anybody else hears that no tensor
is fake. Nothing is imported for this, and other libraries that ask in this way are covered too. A
module of theirs that imported the class earlier, under its own name, has the class replaced.
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from memlab.internals.torch_internals import FakeTensor, subclasses

_NAME = "FakeTensor"
_WHO_MAY_KNOW = ("torch", "memlab")


class _AnswersByCaller(type):
    """The class of a stand-in for FakeTensor."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return _caller_may_know() and isinstance(instance, FakeTensor)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _caller_may_know() and issubclass(subclass, FakeTensor)

    def __eq__(cls, other: object) -> bool:  # torch compares types, too
        return other is cls or (_caller_may_know() and other is FakeTensor)

    def __hash__(cls) -> int:
        return hash(FakeTensor)

    def __getattr__(cls, name: str) -> Any:
        return getattr(FakeTensor, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> FakeTensor:
        return FakeTensor(*args, **kwargs)


class _StandIn(metaclass=_AnswersByCaller):
    pass


def _caller_may_know() -> bool:
    """Whether the function that asks, two frames up, is one of torch's or ours."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in _WHO_MAY_KNOW


def replacements() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """Where the stand-in takes FakeTensor's place, for `replaced`."""
    return {(module, _NAME): lambda real: _StandIn for module in (subclasses, *_importers())}


def _importers() -> Iterator[ModuleType]:
    """Modules of others that have imported FakeTensor under its name."""
    for name, module in list(sys.modules.items()):
        is_others = name.partition(".")[0] not in _WHO_MAY_KNOW
        if is_others and getattr(module, "__dict__", {}).get(_NAME) is FakeTensor:
            yield module
