"""Temporarily replace functions, attributes and kernels of others, for the threads that asked."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import getattr_static
from types import FrameType, FunctionType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch  # noqa: F401 - TorchScript compiles replaced functions of torch with these names
from torch.library import Library, get_kernel

from memlab.internals import threads
from memlab.internals.torch_internals import (
    exclude_frame_from_dynamo,
    forget_python_dispatch,
    has_kernel,
)

_MISSING: Any = object()


def modules_with(names: Set[str]) -> dict[str, list[ModuleType]]:
    """Return the modules that have each name, whether it is theirs or imported."""
    found: dict[str, list[ModuleType]] = {name: [] for name in names}
    for module in list(sys.modules.values()):
        # One intersection of keys each: transformers alone has 250 names in a thousand modules.
        for name in names & getattr(module, "__dict__", {}).keys():
            found[name].append(module)
    return found


def caller_of(frame: FrameType) -> FrameType | None:
    """Return the frame that called a replacement, given the replacement's own frame."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename == __file__:
        caller = caller.f_back
    return caller


@contextmanager
def replaced(replacements: Mapping[tuple[Any, str], Callable[[Any], Any]]) -> Iterator[None]:
    """Replace each (owner, name) by `replacement(original)` inside the block, then restore it.

    Only the threads that asked notice (threads.py), with two exceptions: an object's attribute that
    is no function, and a value with a true `checks_thread`, which calls `asked()` itself. A class
    in a module is replaced for all who read it from the module; the module's own code keeps it,
    unless a function replaces it.
    """
    with threads.scope(), ExitStack() as stack:
        install(replacements, stack)
        yield


def install(replacements: Mapping[tuple[Any, str], Callable[[Any], Any]], stack: ExitStack) -> None:
    """Replace each (owner, name) as `replaced` does, in an open scope, until `stack` ends."""
    for (owner, name), replacement in replacements.items():
        place = _place(owner, name)
        stack.callback(place.remove, place.add(replacement))


# ------------------------------------------------------------------ one attribute

# A module may keep the function that it has found here, so the place is found again.
_PLACES: "WeakValueDictionary[tuple[int, str], _Place]" = WeakValueDictionary()
_changing = threading.RLock()


def _place(owner: Any, name: str) -> "_Place":
    with _changing:
        place = _PLACES.get((id(owner), name))
        if place is None:
            place = _PLACES[id(owner), name] = _Place(owner, name)
        return place


def always(new: Any) -> Callable[[Any], Any]:
    """Return a replacement that is the same whatever it replaces."""
    return lambda real: new


class _Place:
    """An attribute of a module, class or object, and what replaces it: the last replacement acts.

    Replacements may end in any order, because several threads can work for the one that asked.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self._new: dict[object, Any] = {}
        self._own = self._original = _MISSING

    def add(self, replacement: Callable[[Any], Any]) -> object:
        """Replace the attribute, and return what `remove` needs."""
        with _changing:
            if not self._new:
                self._own = vars(self.owner).get(self.name, _MISSING)
                self._original = self._found()
            new = replacement(self._bound(self.value()))
            if not self._new:
                self._install(new)
            token = object()
            self._new[token] = new
            return token

    def remove(self, token: object) -> None:
        with _changing:
            del self._new[token]
            if not self._new:
                self._restore()

    def value(self) -> Any:
        """Return the attribute for this thread."""
        if self._new and threads.asked():
            return next(reversed(self._new.values()))
        return self._original

    def _found(self) -> Any:
        if isinstance(self.owner, type):
            return getattr_static(self.owner, self.name, _MISSING)  # with its descriptor
        return getattr(self.owner, self.name, _MISSING)

    def _bound(self, value: Any) -> Any:
        """Return what the class gives for its attribute."""
        is_descriptor = isinstance(self.owner, type) and hasattr(type(value), "__get__")
        return value.__get__(None, self.owner) if is_descriptor else value

    def _install(self, new: Any) -> None:
        installed: Any
        is_module, is_class = isinstance(self.owner, ModuleType), isinstance(self._original, type)
        if isinstance(self.owner, type):
            if type(new) is FunctionType and callable(self._original):
                installed = self._function()
            else:
                is_data = any(hasattr(type(each), "__set__") for each in (new, self._original))
                installed = (_DataDescriptor if is_data else _Descriptor)(self)
        elif callable(self._original) and not (is_class and isinstance(new, type)):
            installed = self._function()
        elif getattr(new, "checks_thread", not is_module):
            installed = new
        else:
            installed = self._original
        if installed is not self._original:
            setattr(self.owner, self.name, installed)
        if is_module and (is_class or installed is self._original):
            setattr(_view(self.owner), self.name, self._property())

    def _restore(self) -> None:
        kind = type(self.owner)
        if vars(kind).get(_IS_VIEW) and self.name in vars(kind):
            delattr(kind, self.name)
            if not any(isinstance(value, property) for value in vars(kind).values()):
                self.owner.__class__ = kind.__mro__[1]
        if self._own is not _MISSING:
            setattr(self.owner, self.name, self._own)
        elif self.name in vars(self.owner):  # the original was inherited
            delattr(self.owner, self.name)

    def _function(self) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            return self.value()(*args, **kwargs)

        exclude_frame_from_dynamo(called)
        for name in ("cache_clear", "cache_info"):  # of functools.cache
            if hasattr(self._original, name):
                setattr(called, name, getattr(self._original, name))
        return wraps(self._original)(called)

    def _property(self) -> property:
        def read(module: ModuleType) -> Any:
            value = self.value()
            if value is _MISSING:
                raise AttributeError(f"module {module.__name__!r} has no attribute {self.name!r}")
            return value

        def write(module: ModuleType, value: Any) -> None:
            vars(module)[self.name] = self._original = value

        return property(read, write)


class _Descriptor:
    """An attribute of a class, as each thread finds it."""

    def __init__(self, place: _Place) -> None:
        self._place = place

    @exclude_frame_from_dynamo
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        value, name = self._place.value(), self._place.name
        if not hasattr(type(value), "__set__") and name in getattr(instance, "__dict__", ()):
            return vars(instance)[name]
        return value.__get__(instance, owner) if hasattr(type(value), "__get__") else value


class _DataDescriptor(_Descriptor):
    """A property, in the threads that asked or in the others."""

    @exclude_frame_from_dynamo
    def __set__(self, instance: Any, new: Any) -> None:
        value = self._place.value()
        if hasattr(type(value), "__set__"):
            value.__set__(instance, new)
        else:
            vars(instance)[self._place.name] = new


_IS_VIEW = "_is_memlabs_view"


def _view(module: ModuleType) -> type:
    """Return the module's own class, whose properties act before the module's attributes."""
    kind = type(module)
    if not vars(kind).get(_IS_VIEW):
        module.__class__ = kind = type(kind.__name__, (kind,), {_IS_VIEW: True})
    return kind


# ------------------------------------------------------------------ kernels


@contextmanager
def registered(kernels: Mapping[tuple[Any, str], Callable[..., Any]]) -> Iterator[None]:
    """Register a kernel for each (operator, dispatch key) inside the block.

    The threads that asked call `kernel(keys, *args, **kwargs)`, the others the kernel from before.
    """
    library = Library("aten", "IMPL")
    with threads.scope():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about overridden kernels
                for (func, key), kernel in kernels.items():
                    switch = _switch(func, key, kernel)
                    library.impl(func, switch, key, with_keyset=True, allow_override=True)
                    forget_python_dispatch(func)
            yield
        finally:
            library._destroy()
            # `OpOverload._dispatch_cache` still names the kernel. A later trace for torch.compile
            # would get autograd's fallback, and `backward()` would return without gradients
            # (test_pythons_dispatcher_forgets_a_kernel_that_is_gone,
            # test_models_train_after_the_first_one_was_compiled_inside).
            for func, _ in kernels:
                forget_python_dispatch(func)


def _switch(func: Any, key: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    before = _kernel(func, key)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return (kernel if threads.asked() else before)(keys, *args, **kwargs)

    return run


def _kernel(func: Any, key: str) -> Callable[..., Any]:
    """Return the kernel that the operator has for a key."""
    if key.startswith("Autocast") and not has_kernel(func.name(), key):
        from torch import DispatchKey

        return lambda keys, *args, **kwargs: func.redispatch(
            keys.remove(getattr(DispatchKey, key)), *args, **kwargs
        )
    return get_kernel(func, key).call_boxed
