"""The progress that `memlab run` prints while a script runs, and how a signal ends it."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

from memlab.cli import terminal
from memlab.cli.script import is_users
from memlab.internals.signals import handled

SECONDS = 10  # between two lines that say where the script is


def announce(stage: str) -> None:
    terminal.announce(f"memlab: {stage}")


@contextmanager
def ended_by_a_signal() -> Iterator[None]:
    """Let Ctrl-C end the command even if the script catches it, and SIGTERM do as Ctrl-C does, so
    that temporary files go."""
    is_interrupted = False

    def interrupt(*args: Any) -> NoReturn:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    with ExitStack() as stack:
        stack.enter_context(handled(signal.SIGTERM, interrupt))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
            stack.enter_context(handled(signal.SIGINT, interrupt))
        try:
            yield
        finally:
            if is_interrupted:
                raise KeyboardInterrupt


@contextmanager
def telling_where(folder: Path) -> Iterator[None]:
    """Print every few seconds which line of the user's code runs.

    A signal's handler runs in the script's own thread. Another thread that looks at a frame could
    keep the tensors in it alive.
    """
    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return
    start = monotonic()

    # A thread that looked every ten seconds held the frame of nanoGPT's evaluation: 15.7 GiB
    # reserved instead of 12.7.
    def tell(number: int, frame: FrameType | None) -> None:
        where = next(_lines_of(frame, folder), "still running")  # in no line of the user's code
        announce(f"{where} after {monotonic() - start:.0f} s")

    with handled(signal.SIGALRM, tell):
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _lines_of(frame: FrameType | None, folder: Path) -> Iterator[str]:
    """Yield the lines of the user's code that led to a frame, the innermost first."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if is_users(file.absolute(), folder):
            yield f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back
