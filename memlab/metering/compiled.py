"""Meter compiled functions while they run compiled.

Under a dispatch mode Dynamo runs a function uncompiled, unless the mode opts out with
`ignore_compile_internals`. The meter needs two more steps:

1. Compiled code guards on global module hooks, so the meter's hooks would trigger a recompilation.
   They are removed while Dynamo compiles and while compiled code runs.
2. Inductor allocates its buffers with functions such as `empty_strided_cpu`, which bypass the
   dispatcher. These functions are wrapped, in code loaded now or later. Matmuls and other operators
   that Inductor leaves to torch still pass the dispatcher.
"""

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor

from memlab.internals.torch_internals import CODE_CACHE, CONVERT_FRAME, EVAL_FRAME, GUARDS

_ALLOCATE = "empty_strided_"


def ignore_hook_warning() -> None:
    """Silence torch.compile's warning about global module hooks: the meter registers them."""
    remark = r"Using `torch\.compile\(module\)` when there are global hooks"
    warnings.filterwarnings("ignore", message=remark)


class CompiledCode:
    """Report compiled code between `start()` and `stop()`.

    `on_buffer(tensor)` is called for each tensor that compiled code allocates, `on_run(True)`
    before compiled code may run, and `on_run(False)` after it.
    """

    def __init__(self, on_buffer: Callable[[Tensor], None], on_run: Callable[[bool], None]) -> None:
        self._on_buffer, self._on_run = on_buffer, on_run
        self._is_compiling = False
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        if (eval_frame := sys.modules.get(EVAL_FRAME)) is None:
            return  # Dynamo is not imported
        guards, converter = sys.modules[GUARDS], sys.modules[CONVERT_FRAME].CatchErrorsWrapper
        self._wrappers = {
            name: self._reporting_buffers(getattr(guards, name))
            for name in dir(guards)
            if name.startswith(f"_{_ALLOCATE}")
        }
        for name, wrapper in self._wrappers.items():
            self._replace(guards, name, wrapper)
        self._replace(
            eval_frame,
            "_maybe_set_eval_frame",
            self._reporting_runs(eval_frame._maybe_set_eval_frame),
        )
        self._replace(converter, "__call__", self._marking_compilation(converter.__call__))
        for module in _inductor_modules():
            for name in vars(module).keys() & {name[1:] for name in self._wrappers}:
                self._replace(module, name, self._wrappers[f"_{name}"])

    def stop(self) -> None:
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        if not self._replaced:
            return
        for module in _inductor_modules():  # includes modules loaded since start()
            for name, wrapper in self._wrappers.items():
                if vars(module).get(name[1:]) is wrapper:
                    setattr(module, name[1:], wrapper.__wrapped__)
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _reporting_buffers(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(allocate)
        def reported(*shape: Any) -> Tensor:
            tensor = allocate(*shape)
            self._on_buffer(tensor)
            return tensor

        return reported

    def _reporting_runs(self, set_frame: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Call `on_run` when Dynamo is enabled or disabled around a compiled function."""

        def reported(callback: Any) -> Any:
            if not self._is_compiling:
                self._on_run(callback is not None)
            return set_frame(callback)

        return reported

    def _marking_compilation(self, compile_frame: Callable[..., Any]) -> Callable[..., Any]:
        """Mark compilation, during which Dynamo is also enabled and disabled."""

        @wraps(compile_frame)
        def marked(*args: Any, **kwargs: Any) -> Any:
            before, self._is_compiling = self._is_compiling, True
            try:
                return compile_frame(*args, **kwargs)
            finally:
                self._is_compiling = before

        return marked


def _inductor_modules() -> list[ModuleType]:
    """Return the modules that Inductor has generated and loaded."""
    cache = sys.modules.get(CODE_CACHE)
    return [] if cache is None else list(cache.PyCodeCache.modules)
