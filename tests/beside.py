"""A thread that has nothing to do with a measurement."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any


@contextmanager
def another_thread() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yield a function that calls another in a thread from before, and returns its result."""
    tasks: SimpleQueue[Any] = SimpleQueue()
    results: SimpleQueue[Any] = SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            try:
                results.put((task(), None))
            except BaseException as error:
                results.put((None, error))

    def call(function: Callable[[], Any]) -> Any:
        tasks.put(function)
        result, error = results.get()
        if error is not None:
            raise error
        return result

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield call
    finally:
        tasks.put(None)
        thread.join()
