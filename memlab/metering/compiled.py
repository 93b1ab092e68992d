"""Meter compiled functions while they run compiled.

Under a dispatch mode Dynamo runs a function uncompiled, unless the mode opts out with
`ignore_compile_internals`. The meter needs two more steps:

1. Compiled code guards on global module hooks, so memlab's hooks would break the graph in each
   module. They are removed while Dynamo compiles and while compiled code runs (`runs_reported`).
2. Inductor allocates its buffers with functions such as `empty_strided_cpu`, which bypass the
   dispatcher. These functions are wrapped, in code loaded now or later. Matmuls and other operators
   that Inductor leaves to torch still pass the dispatcher.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn.modules import module as torch_module

from memlab.internals.replacing import replaced
from memlab.internals.torch_internals import CODE_CACHE, CONVERT_FRAME, EVAL_FRAME, GUARDS

_ALLOCATE = "empty_strided_"


class CompiledLayer:
    """What the compiled code of a dry run computes: whose operators, from which line of user code.

    Both are "" outside such code, and where they are unknown.
    """

    name = line = ""


def hook_warning() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """Return what to replace so that torch.compile does not warn about the meter's module hooks."""
    return {(torch_module, "_has_any_global_hook"): lambda real: lambda: False}


class CompiledCode:
    """Report compiled code inside `reported()`.

    `on_buffer(tensor)` is called for each tensor that compiled code allocates, `on_run(True)`
    before compiled code may run, and `on_run(False)` after it.
    """

    def __init__(self, on_buffer: Callable[[Tensor], None], on_run: Callable[[bool], None]) -> None:
        self._on_buffer, self._on_run = on_buffer, on_run

    @contextmanager
    def reported(self) -> Iterator[None]:
        if (guards := sys.modules.get(GUARDS)) is None:
            yield  # Dynamo is not imported
            return
        allocators = [name for name in dir(guards) if name.startswith(f"_{_ALLOCATE}")]
        replacements = {
            **{(guards, name): self._reporting_buffers for name in allocators},
            **{
                (module, name[1:]): self._reporting_buffers
                for module in _inductor_modules()
                for name in allocators
                if hasattr(module, name[1:])
            },
        }
        with runs_reported(self._on_run), replaced(replacements):
            try:
                yield
            finally:
                reporting = {name: getattr(guards, name) for name in allocators}
        for module in _inductor_modules():  # those loaded since then have the replacements
            for name, function in reporting.items():
                if vars(module).get(name[1:]) is function:
                    setattr(module, name[1:], getattr(guards, name))

    def _reporting_buffers(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(allocate)
        def reported(*shape: Any) -> Tensor:
            tensor = allocate(*shape)
            self._on_buffer(tensor)
            return tensor

        return reported


class _Runs:
    def __init__(self, on_run: Callable[[bool], None]) -> None:
        self.on_run = on_run
        self._is_compiling = False

    def reporting(self, set_frame: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Call `on_run` when Dynamo is enabled or disabled around a compiled function."""

        def reported(callback: Any) -> Any:
            if not self._is_compiling:
                self.on_run(callback is not None)
            return set_frame(callback)

        return reported

    def marking_compilation(self, compile_frame: Callable[..., Any]) -> Callable[..., Any]:
        """Mark compilation, during which Dynamo is also enabled and disabled."""

        @wraps(compile_frame)
        def marked(*args: Any, **kwargs: Any) -> Any:
            before, self._is_compiling = self._is_compiling, True
            try:
                return compile_frame(*args, **kwargs)
            finally:
                self._is_compiling = before

        return marked


@contextmanager
def runs_reported(on_run: Callable[[bool], None]) -> Iterator[None]:
    """Call `on_run(True)` before compiled code may run, and `on_run(False)` after it."""
    if (eval_frame := sys.modules.get(EVAL_FRAME)) is None:
        yield  # Dynamo is not imported
        return
    runs, converter = _Runs(on_run), sys.modules[CONVERT_FRAME].CatchErrorsWrapper
    # Dynamo calls the first one before and after compiled code. With memlab's hooks in place the
    # code would be compiled again, with graph breaks
    # (test_compiling_during_a_measurement_does_not_change_it).
    replacements = {
        (eval_frame, "_maybe_set_eval_frame"): runs.reporting,
        (converter, "__call__"): runs.marking_compilation,
    }
    with replaced(replacements):
        try:
            yield
        finally:
            runs.on_run = lambda is_running: None  # a replacement that lasts longer still calls it


def _inductor_modules() -> list[ModuleType]:
    """Return the modules that Inductor has generated and loaded."""
    cache = sys.modules.get(CODE_CACHE)
    return [] if cache is None else list(cache.PyCodeCache.modules)
