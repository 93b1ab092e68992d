"""Stop a script that compiles a C++ or CUDA extension, with a sentence that says what can be done.

Many scripts catch the error, and go on without the extension.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from memlab.world.data.hub import UnavailableError
from memlab.world.entering import enter


def refused(*, real: bool, allow_writes: bool) -> AbstractContextManager[None]:
    """Refuse to compile inside `with`, unless the run is real and may write files."""
    if real and allow_writes:
        return nullcontext()
    return enter({"refused_extension": _refusing(real=real)})


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
