"""Which threads memlab acts in: the one that asked, and those that work for it.

While memlab measures, it replaces functions, kernels and hooks of the whole process. Other threads,
such as one that writes checkpoints, must not notice. So a thread that asks opens a scope, and every
replacement acts only where `asked()` is true:

    the thread that opened the scope
    threads that it starts, and tasks that it submits to a pool of concurrent.futures
    autograd's own threads while they run its backward

One scope is open at a time. Another thread that asks waits until it ends.
"""

import _thread
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any

from memlab.internals.torch_internals import (
    exclude_from_dynamo,
    get_obj_in_tls,
    is_key_in_tls,
    remove_obj_from_tls,
    stash_obj_in_tls,
)

_KEY = "memlab"  # of autograd's thread-local objects, which its threads inherit


class Scope:
    """The threads that work for the one that asked. It lasts as long as it has users."""

    def __init__(self) -> None:
        self.users = 0
        self.measuring: list[int] = []  # the thread of each open measurement, the outermost first


_own = threading.local()  # `scope`: the last one that this thread belonged to
_changed = threading.Condition()
_open: Scope | None = None


def asked() -> bool:
    """Return whether this thread works for the one that asked."""
    return _open is not None and _scope_of_this_thread() is _open


def _scope_of_this_thread() -> Scope | None:
    """Return the last scope that this thread belonged to."""
    scope = getattr(_own, "scope", None)
    if scope is None and is_key_in_tls(_KEY):  # a thread of autograd's
        scope = get_obj_in_tls(_KEY)
    return scope


@contextmanager
def scope() -> Iterator[Scope]:
    """Open a scope, or join this thread's. Waits while other threads have one."""
    global _open
    with _changed:
        mine = _scope_of_this_thread()
        if mine is None or mine is not _open:
            _changed.wait_for(lambda: _open is None)
            _open = _own.scope = mine = Scope()
            # Autograd's threads inherit these objects and all modes; Python's threads inherit
            # neither (test_autograds_own_threads_work_for_the_thread_that_asked).
            stash_obj_in_tls(_KEY, mine)
            _let_threads_inherit(True)
        mine.users += 1
    try:
        yield mine
    finally:
        with _changed:
            mine.users -= 1
            if not mine.users:
                _open = None
                _let_threads_inherit(False)
                if getattr(_own, "scope", None) is mine:
                    remove_obj_from_tls(_KEY)
                _changed.notify_all()


@contextmanager
def measurement() -> Iterator[None]:
    """Open a scope for a measurement.

    Raises RuntimeError if another thread that works for the same one is measuring: what it counts
    would mix with this, and waiting for it could last for ever.
    """
    with scope() as mine:
        me = threading.get_ident()
        if mine.measuring and mine.measuring[-1] != me:
            raise RuntimeError(
                "a measurement is running in the thread that this one works for; measure in one "
                "of the two threads, or after the running measurement"
            )
        mine.measuring.append(me)
        try:
            yield
        finally:
            mine.measuring.pop()


# ------------------------------------------------------------------ threads that inherit


def _inheriting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that it runs in this thread's scope, in whichever thread it runs."""
    inherited = _scope_of_this_thread()

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before, _own.scope = getattr(_own, "scope", None), inherited
        try:
            return function(*args, **kwargs)
        finally:
            _own.scope = before

    return run


class _Starter:
    """A function of Python that lets another thread run a function: its argument at `place`."""

    def __init__(self, owner: Any, name: str, place: int = 0) -> None:
        self.owner, self.name, self.real = owner, name, getattr(owner, name)

        @wraps(self.real)
        def start(*args: Any, **kwargs: Any) -> Any:
            if asked() and len(args) > place:
                args = (*args[:place], _inheriting(args[place]), *args[place + 1 :])
            return self.real(*args, **kwargs)

        self.start = start

    def replace(self, wanted: bool) -> None:
        """Leave the function alone if another library has replaced it in the meantime."""
        before, after = (self.real, self.start) if wanted else (self.start, self.real)
        if getattr(self.owner, self.name) is before:
            setattr(self.owner, self.name, after)


_STARTERS = (
    *(
        _Starter(owner, name)
        for owner, name in (
            (_thread, "start_new_thread"),
            (_thread, "start_joinable_thread"),  # from Python 3.13 on
            (threading, "_start_new_thread"),
            (threading, "_start_joinable_thread"),
        )
        if hasattr(owner, name)
    ),
    _Starter(ThreadPoolExecutor, "submit", place=1),
)


def _let_threads_inherit(wanted: bool) -> None:
    for starter in _STARTERS:
        starter.replace(wanted)


def only_where_asked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a global hook act only where memlab was asked, and hide it from torch.compile."""

    @exclude_from_dynamo
    @wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if asked() else None

    return called


def _forget_other_threads() -> None:
    """In a forked process, whose only thread is the one that forked: end another thread's scope."""
    global _open, _changed
    _changed = threading.Condition()
    if _open is not None and not asked():
        _open = None
        _let_threads_inherit(False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
