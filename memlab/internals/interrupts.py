"""Ctrl-C: what a command prints, and how to ignore it for a moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # the shells' exit status after SIGINT: 128 + the signal's number
INTERRUPTED_MESSAGE = "interrupted; nothing was written"


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore Ctrl-C. Processes started inside the block inherit this, and a group of files is
    renamed as a whole. Only the main thread receives signals and can set this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
