"""Stop a script that compiles a C++ or CUDA extension, with a sentence that says what can be done.

Many scripts catch the error, and go on without the extension.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NoReturn

from memlab.internals.imports import when_imported
from memlab.internals.replacing import replaced
from memlab.scripts.hub import UnavailableError

_COMPILING = ("load", "load_inline")


@contextmanager
def refused(*, real: bool, allow_writes: bool) -> Iterator[None]:
    """Refuse to compile inside `with`, unless the run is real and may write files."""
    with ExitStack() as stack:

        def refuse(module: ModuleType) -> None:
            stack.enter_context(
                replaced({(module, name): _refusing(real=real) for name in _COMPILING})
            )

        if not (real and allow_writes):
            stack.enter_context(when_imported({"torch.utils.cpp_extension": refuse}))
        yield


def _refusing(*, real: bool) -> Callable[[Any], Callable[..., NoReturn]]:
    can_be = (
        "pass --allow-writes with --real, because it compiles into your cache of extensions"
        if real
        else "it cannot be predicted, because its kernels need real tensors: switch it off if the "
        "script has an option for that, or measure with --real --allow-writes"
    )

    def load(name: Any = "", *args: Any, **options: Any) -> NoReturn:
        raise UnavailableError(f"the script compiles the extension {name}; {can_be}")

    return lambda real_load: load
