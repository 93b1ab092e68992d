"""A `map` over several processes, so that several measurements run at once."""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from memlab.internals.interrupts import interrupts_ignored

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


class ProcessEndedError(RuntimeError):
    """A process ended before it returned its results."""


@contextmanager
def processes(count: int) -> Iterator[Map]:
    """Yield a `map` over `count` processes. It keeps the order and ends with the `with` block.

    Raises ProcessEndedError if one of them ends, such as by the system's out-of-memory killer.
    """
    if count == 1:
        yield map
        return
    context = _Context()
    executor = ProcessPoolExecutor(count, context)
    try:
        yield executor.map
    except BrokenProcessPool as error:
        executor.shutdown()  # it has terminated the others; afterwards all exit codes are known
        raise ProcessEndedError(_why(context.started)) from error
    finally:
        for worker in context.started:
            worker.terminate()
        executor.shutdown(cancel_futures=True)


class _Worker(SpawnProcess):
    """Ignores Ctrl-C from its start on: the parent handles it and ends the workers."""

    def start(self) -> None:
        with interrupts_ignored():
            super().start()


class _Context(SpawnContext):
    """Doesn't fork: a process that has run a backward pass has threads that a fork would lose."""

    def __init__(self) -> None:
        self.started: list[_Worker] = []

    def Process(self, **settings: Any) -> _Worker:  # type: ignore[override]  # noqa: N802 - its name
        self.started.append(worker := _Worker(**settings))
        return worker


def _why(workers: Sequence[_Worker]) -> str:
    """Say how the first worker ended."""
    codes = filter(None, (worker.exitcode for worker in workers))
    code = next((code for code in codes if code != -signal.SIGTERM), -signal.SIGTERM)
    if code < 0:
        return (
            f"one of {len(workers)} processes that predict steps was ended by "
            f"{signal.Signals(-code).name}, as the system does when its memory runs out; close "
            f"other programs and run this again"
        )
    return (
        f"one of {len(workers)} processes that predict steps ended with status {code}; its error "
        f"is printed above. A script that uses several must call them below "
        f'if __name__ == "__main__":'
    )
