"""Compiled functions, metered as they run compiled.

Under a dispatch mode Dynamo takes a function's Python code instead, unless the mode says that it
leaves compiled code alone (`ignore_compile_internals`). Two more things are in the way:

1. Compiled code is good for the global hooks of modules that were there when it was compiled; with
   the meter's own it would be compiled anew, with the hooks in it. So they are taken away while
   compiled code runs or is made: Dynamo, which begins again after what it cannot compile, has to
   find the same.
2. What Inductor's code takes for itself comes from `empty_strided_cpu` and its like, which no
   dispatcher sees. So those are wrapped, in the code that was loaded and in what is loaded next.
   Only matrix products and what else Inductor leaves to torch are seen as operators.
"""

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor

from memlab.internals.torch_internals import CODE_CACHE, CONVERT_FRAME, EVAL_FRAME, GUARDS

_TAKES = "empty_strided_"


def leave_out_the_remark_on_hooks() -> None:
    """That of torch.compile on global hooks of modules: they are the meter's, and it knows."""
    remark = r"Using `torch\.compile\(module\)` when there are global hooks"
    warnings.filterwarnings("ignore", message=remark)


class CompiledCode:
    """Between `start()` and `stop()`, `on_buffer(tensor)` is called for each tensor that compiled
    code takes, `on_run(True)` before compiled code may run and `on_run(False)` after it."""

    def __init__(self, on_buffer: Callable[[Tensor], None], on_run: Callable[[bool], None]) -> None:
        self._on_buffer, self._on_run = on_buffer, on_run
        self._is_compiling = False
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Nothing is to be done where nobody compiles."""
        if (eval_frame := sys.modules.get(EVAL_FRAME)) is None:
            return
        guards, converter = sys.modules[GUARDS], sys.modules[CONVERT_FRAME].CatchErrorsWrapper
        self._tellers = {
            name: self._telling(getattr(guards, name))
            for name in dir(guards)
            if name.startswith(f"_{_TAKES}")
        }
        for name, teller in self._tellers.items():
            self._replace(guards, name, teller)
        self._replace(
            eval_frame, "_maybe_set_eval_frame", self._announcing(eval_frame._maybe_set_eval_frame)
        )
        self._replace(converter, "__call__", self._noting_that_it_compiles(converter.__call__))
        for module in _generated():
            for name in vars(module).keys() & {name[1:] for name in self._tellers}:
                self._replace(module, name, self._tellers[f"_{name}"])

    def stop(self) -> None:
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        if not self._replaced:
            return
        for module in _generated():  # those that were made meanwhile
            for name, teller in self._tellers.items():
                if vars(module).get(name[1:]) is teller:
                    setattr(module, name[1:], teller.__wrapped__)
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _telling(self, take: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(take)
        def told(*shape: Any) -> Tensor:
            tensor = take(*shape)
            self._on_buffer(tensor)
            return tensor

        return told

    def _announcing(self, set_frame: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Dynamo is switched on before a compiled function runs, and off behind it."""

        def announced(callback: Any) -> Any:
            if not self._is_compiling:
                self._on_run(callback is not None)
            return set_frame(callback)

        return announced

    def _noting_that_it_compiles(self, compile_frame: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo is switched off and on for functions of its own, too."""

        @wraps(compile_frame)
        def noting(*args: Any, **kwargs: Any) -> Any:
            before, self._is_compiling = self._is_compiling, True
            try:
                return compile_frame(*args, **kwargs)
            finally:
                self._is_compiling = before

        return noting


def _generated() -> list[ModuleType]:
    """What Inductor has written and loaded."""
    cache = sys.modules.get(CODE_CACHE)
    return [] if cache is None else list(cache.PyCodeCache.modules)
