"""What a training holds besides its model and its optimizer's state.

Batches in a list, the tensors of a data set, the optimizer of an earlier `Trainer.fit`: they are in
memory while the step runs, whether it touches them or not. No operator shows them, so they are
found from the outside, along the references that Python's garbage collector follows.
"""

import dis
import gc
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_SHARED_BY_ALL = (ModuleType, type, CodeType)  # everything is reachable from those


_WANTED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """The tensors, modules and optimizers that can be reached from the roots; each once.

    Of a function: its closure, its defaults and the globals that it names, and those of the
    functions of the same file that it calls. What a module of Python's or a class holds belongs to
    everybody, and what a hook holds to whoever registered it: by that of one rank of a simulation
    all others would be reached.
    """
    waiting = [root for root in roots if root is not None]
    files = {id(root.__globals__) for root in waiting if isinstance(root, FunctionType)}
    seen: set[int] = set()
    while waiting:
        reached = waiting.pop()
        if id(reached) in seen or isinstance(reached, _SHARED_BY_ALL):
            continue
        seen.add(id(reached))
        if isinstance(reached, _WANTED):
            yield reached
        waiting += filter(gc.is_tracked, _referents(reached, files))


def _referents(reached: Any, files: set[int]) -> list[Any]:
    if isinstance(reached, torch.nn.Module):
        return [held for name, held in vars(reached).items() if not name.endswith("_hooks")]
    if isinstance(reached, torch.Tensor):
        hooks = (reached._backward_hooks, reached._post_accumulate_grad_hooks)
        return [held for held in gc.get_referents(reached) if not any(held is h for h in hooks)]
    if not isinstance(reached, FunctionType):
        return gc.get_referents(reached)
    cells = list(reached.__closure__ or ())
    defaults = [reached.__defaults__, reached.__kwdefaults__, reached.__dict__]
    names = _global_names(reached.__code__) if id(reached.__globals__) in files else ()
    return cells + defaults + [reached.__globals__.get(name) for name in names]


@cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The names that the code, and the functions that it defines, look up outside. Those of
    attributes, which stand in the same list of the code, are not among them."""
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [_global_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return tuple(dict.fromkeys(chain(own, *inner)))
