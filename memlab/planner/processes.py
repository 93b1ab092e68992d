"""A `map` over several processes, so that several measurements run at once."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@contextmanager
def processes(count: int) -> Iterator[Map]:
    """Yield a `map` over `count` processes. It keeps the order and ends with the `with` block."""
    if count == 1:
        yield map
        return
    # Don't fork: a process that has run a backward pass has threads that a fork would lose.
    with _ignored_interrupts():  # workers ignore Ctrl-C; this process handles it and ends them
        pool = multiprocessing.get_context("spawn").Pool(count)
    with pool:
        yield pool.imap


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore SIGINT, which child processes inherit. Only the main thread can set this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
