"""Find tensors that a training run keeps besides its model and optimizer state.

Examples are batches in a list, a dataset's tensors, or the optimizer of an earlier `Trainer.fit`.
They occupy memory during the step even if no operator uses them. They are found by following
references, as Python's garbage collector does.
"""

import dis
import gc
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_SHARED = (ModuleType, type, CodeType)  # nearly every object is reachable from these
_WANTED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield each tensor, module and optimizer that can be reached from the roots, once.

    A function leads to its closure, its defaults and the globals that it uses; so do functions in
    the same file that it calls. Python modules and classes are skipped, because they are shared.
    Hooks are skipped too: the hooks of one simulated rank would lead to all other ranks.
    """
    pending = [root for root in roots if root is not None]
    files = {id(root.__globals__) for root in pending if isinstance(root, FunctionType)}
    seen: set[int] = set()
    while pending:
        reached = pending.pop()
        if id(reached) in seen or isinstance(reached, _SHARED):
            continue
        seen.add(id(reached))
        if isinstance(reached, _WANTED):
            yield reached
        pending += filter(gc.is_tracked, _referents(reached, files))


def _referents(reached: Any, files: set[int]) -> list[Any]:
    if isinstance(reached, torch.nn.Module):
        return [value for name, value in vars(reached).items() if not name.endswith("_hooks")]
    if isinstance(reached, torch.Tensor):
        hooks = (reached._backward_hooks, reached._post_accumulate_grad_hooks)
        return [value for value in gc.get_referents(reached) if not any(value is h for h in hooks)]
    if not isinstance(reached, FunctionType):
        return gc.get_referents(reached)
    cells = list(reached.__closure__ or ())
    defaults = [reached.__defaults__, reached.__kwdefaults__, reached.__dict__]
    names = _global_names(reached.__code__) if id(reached.__globals__) in files else ()
    return cells + defaults + [reached.__globals__.get(name) for name in names]


@cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Return the global names that the code and its inner functions use.

    `code.co_names` also has the names of attributes, so the instructions are read instead.
    """
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [_global_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return tuple(dict.fromkeys(chain(own, *inner)))
