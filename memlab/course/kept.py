"""Find the tensors that an answer keeps between its calls: in globals, closures, default arguments,
attributes of functions and classes, and containers in these."""

import functools
import gc
from collections import deque
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType, MethodType, functools.partial)
_NAMED = (FunctionType, type, functools._lru_cache_wrapper)  # their module is where they were made


def kept(answer: Any) -> dict[int, tuple[Any, int, str]]:
    """Return what is kept, by the address of its memory: the tensor or array, its bytes, and the
    name of the variable or attribute."""
    return {
        address: (each, size, name)
        for each, name in _reachable(answer)
        for address, size in _memory(each)
    }


def _reachable(answer: Any) -> Iterator[tuple[Any, str]]:
    """Follow references, but not into modules, or objects of other modules than the answer's."""
    home, seen, waiting = _home(answer), {}, [(answer, "")]
    while waiting:
        each, name = waiting.pop()
        own = isinstance(each, (*_CONTAINERS, Tensor, np.ndarray)) or _module(each) == home
        if not own or id(each) in seen:
            continue
        seen[id(each)] = each  # keeps it alive, so that no id is reused
        yield each, name
        if isinstance(each, dict):
            waiting += [(part, name or str(key)) for key, part in each.items()]
        else:
            waiting += [(part, name) for part in gc.get_referents(each)]


def _home(answer: Any) -> Any:
    while isinstance(answer, functools.partial):
        answer = answer.func
    return home if (home := _module(answer)) != "builtins" else ""


def _module(thing: Any) -> Any:
    return getattr(thing if isinstance(thing, _NAMED) else type(thing), "__module__", None)


def _memory(thing: Any) -> Iterator[tuple[int, int]]:
    """Yield the address and the bytes of a tensor's or array's memory."""
    if isinstance(thing, np.ndarray):
        yield id(thing), thing.nbytes
    elif isinstance(thing, Tensor) and thing.layout == torch.strided and not thing.is_meta:
        storage = thing.untyped_storage()
        yield storage._cdata, storage.nbytes()
