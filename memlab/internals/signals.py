"""Handle a signal for a while, in this process alone."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_handled: dict[int, list[tuple[Any, Any]]] = {}  # by signal: (handler, the one from before)


@contextmanager
def handled(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    """Let `handler` handle the signal inside `with`. Forked processes keep the handler from before.

    Only the main thread can do this.
    """
    before = signal.signal(number, handler)
    _handled.setdefault(number, []).append((handler, before))
    try:
        yield
    finally:
        _handled[number].pop()
        signal.signal(number, before)


def _restore_in_forked_process() -> None:
    for number, handlers in _handled.items():
        for handler, before in reversed(handlers):
            if signal.getsignal(number) is handler:  # else the user's code has set its own
                signal.signal(number, before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_forked_process)
