"""Ctrl-C: what a command prints, and how files are renamed without being interrupted."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # the shells' exit status after SIGINT: 128 + the signal's number
INTERRUPTED_MESSAGE = "interrupted; nothing was written"


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C for a moment, so that either all of several files are renamed or none."""
    if threading.current_thread() is not threading.main_thread():  # only it receives signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
