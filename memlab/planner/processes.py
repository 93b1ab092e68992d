"""A `map` over several processes: what is measured in one does not wait for what is in another."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@contextmanager
def processes(count: int) -> Iterator[Map]:
    """A `map` over so many processes, whose results come in order; they end with the block."""
    if count == 1:
        yield map
        return
    # Not forked: a process that has run a backward pass has threads that a copy would not have.
    with _interrupts_ignored():  # as they begin: Ctrl-C is this process's, which ends the others
        pool = multiprocessing.get_context("spawn").Pool(count)
    with pool:
        yield pool.imap


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """What a process ignores, those that it starts ignore, too. Only a main thread can say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
