"""Run a script's own `Process`es: in this process, where the meter sees them, or in a fork.

A started process waits until the script joins it, asks whether it is alive, reads an empty queue or
pipe, or sleeps again and again. Then its function runs here. If it cannot go on because it needs an
answer of the script, it is forked and starts anew, as are all that wait when the script sends
something through a pipe: they are workers, and the script trains. A read that nobody can answer
ends the script with a sentence.

Libraries' own processes (pools, loaders, managers) are forked when they start, and so inherit all
replacements.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, process
from multiprocessing.process import BaseProcess
from typing import Any

from memlab.internals.libraries import is_librarys, is_pythons

_SLEEP_SECONDS = 1e-3  # between two looks for an answer of another process
_MOST_SLEEPS = 10  # of a script until the processes that wait run
_MOST_VAIN_READS = 100  # with a time limit, one after another, until nothing is to come
_MOST_UNREAD_BYTES = 2**15  # a pipe holds twice as much
_PIPE = connection._ConnectionBase


class NoAnswerError(BaseException):
    """The script waits for what no process can send. Scripts catch Exceptions."""

    def __init__(self) -> None:
        super().__init__(
            "the script waits for a message from another process, and no process is left to send "
            "it: memlab run runs the script's processes one after another; give the arguments that "
            "make it train without processes of its own"
        )


class _BlockedError(BaseException):
    """The process that runs here cannot go on without an answer of the script."""


class StartedProcesses:
    """The processes that a script has started."""

    def __init__(self, announce: Callable[[str], object]) -> None:
        self.announce = announce
        self.waiting: list[_Started] = []
        self._forked: list[BaseProcess] = []
        self._here: list[_Started] = []  # that run in this process, the innermost last
        self._sleeps = self._vain_reads = self._unread_bytes = 0
        self._really_sleep = time.sleep

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """End those that still wait or run after `with`: Python would join them when it exits."""
        self._own = os.getpid(), threading.current_thread()
        self._threads = set(threading.enumerate())
        try:
            yield
        finally:
            for each in tuple(self.waiting):
                each.terminate()
            for forked in self._forked:
                forked.kill()

    def run_waiting(self) -> None:
        """Run the processes that the script has started and not yet waited for."""
        while self.waiting:
            self.waiting[0].run()

    def run_here(self, started: "_Started") -> bool:
        """Run a process here, or fork it if it cannot go on; return whether it ended here."""
        self.waiting.remove(started)
        self.announce(f"{started.process.name} of the script runs in this process")
        self._here.append(started)
        self._unread_bytes = self._sleeps = 0
        try:
            started.process.run()
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        except _BlockedError:
            self._fork(started)
            return False
        finally:
            self._here.remove(started)
        return True

    def _fork(self, started: "_Started") -> None:
        if not hasattr(os, "fork"):
            raise NoAnswerError
        from multiprocessing.popen_fork import Popen

        self.announce(f"{started.process.name} of the script runs in a process of its own")
        started.remember()
        started.process._popen = Popen(started.process)  # type: ignore[attr-defined]
        self._forked.append(started.process)

    def stand_ins(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "start_process": self._start,
            "no_cleanup": lambda real: lambda: None,
            "get": self._get,
            "put": self._put,
            "receive": self._receive,
            "poll": self._poll,
            "send": self._send,
            "send_bytes": self._send_bytes,
            "wait": self._wait,
            # as a collective, it finishes at once
            "pass_barrier": lambda real: lambda barrier, timeout=None: 0,
            "sleep": self._sleep,
        }

    def _start(self, real: Any) -> Any:
        def start(started: BaseProcess) -> Any:
            if not _is_librarys(started):
                return _Started(started, self)
            from multiprocessing.popen_fork import Popen

            return Popen(started) if hasattr(os, "fork") else real(started)

        return staticmethod(start)

    # ------------------------------------------------------------------ waiting for an answer

    def _is_mine(self) -> bool:
        """Return whether the caller is this process's own thread, not a fork or a queue's."""
        return (os.getpid(), threading.current_thread()) == self._own

    def _until(self, is_ready: Callable[[], bool], *, blocks: bool = True) -> None:
        """Let other processes run until the script, or its process that runs here, can go on.

        Raises _BlockedError or NoAnswerError if no other process can change that.
        """
        if not self._is_mine():
            return
        if not is_ready():
            self.run_waiting()
        while not is_ready():
            if not self._others_run():
                self._vain_reads += 1
                if blocks or self._vain_reads > _MOST_VAIN_READS:
                    raise _BlockedError if self._here else NoAnswerError
            if not blocks:
                return
            self._really_sleep(_SLEEP_SECONDS)
        self._vain_reads = 0

    def _others_run(self) -> bool:
        """Return whether another process, or a thread of the script, may send a message."""
        children = [vars(child)["_popen"] for child in process.active_children()]
        return any(not isinstance(c, _Started) and c.poll() is None for c in children) or any(
            map(_may_send, set(threading.enumerate()) - self._threads)
        )

    def _get(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def get(queue: Any, *args: Any, **kwargs: Any) -> Any:
            self._until(lambda: _size(queue) > 0, blocks=_blocks(*args, **kwargs))
            return real(queue, *args, **kwargs)

        return get

    def _put(self, real: Callable[..., None]) -> Callable[..., None]:
        def put(queue: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
            self._until(lambda: _size(queue) < queue._maxsize, blocks=_blocks(*args, **kwargs))
            real(queue, obj, *args, **kwargs)

        return put

    def _receive(self, real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def recv(pipe: Any) -> Any:
            self._until(lambda: pipe._poll(0.0))
            return real(pipe)

        return recv

    def _poll(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def poll(pipe: Any, timeout: float | None = 0.0) -> bool:
            self._until(lambda: pipe._poll(0.0), blocks=timeout is None)
            return real(pipe, timeout)

        return poll

    def _send(self, real: Callable[..., None]) -> Callable[..., None]:
        """Fork all that wait: they may need the message to go on, and others after it."""

        def send(pipe: Any, obj: Any) -> None:
            if not self._is_mine():
                real(pipe, obj)
            elif self._here:
                pipe.send_bytes(connection._ForkingPickler.dumps(obj))  # type: ignore[attr-defined]
            else:
                while self.waiting:
                    self._fork(self.waiting.pop(0))
                real(pipe, obj)

        return send

    def _send_bytes(self, real: Callable[..., None]) -> Callable[..., None]:
        def send_bytes(pipe: Any, buf: Any, *args: Any) -> None:
            if self._is_mine() and self._here:
                self._unread_bytes += len(buf)
                self._until(lambda: self._unread_bytes <= _MOST_UNREAD_BYTES)
            real(pipe, buf, *args)

        return send_bytes

    def _wait(self, real: Callable[..., bool]) -> Callable[..., bool]:
        def wait(event: Any, timeout: float | None = None) -> bool:
            self._until(event.is_set, blocks=timeout is None)
            return real(event, timeout)

        return wait

    def _sleep(self, real: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            if self._is_mine() and (self.waiting or self._here):
                self._sleeps += 1
                if self._sleeps > _MOST_SLEEPS:
                    self._sleeps = 0
                    self._until(self._others_run if self._here else lambda: not self.waiting)
            real(seconds)

        return sleep


class _Started:
    """What a Process has as its `_popen`: it has started, but runs only when it is asked for."""

    def __init__(self, started: BaseProcess, all_started: StartedProcesses) -> None:
        self.process, self._all = started, all_started
        names = ("_target", "_args", "_kwargs")  # which the process forgets when it has started
        self._what = {name: vars(started)[name] for name in names}
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.sentinel, end = os.pipe()
        os.close(end)  # a caller that waits for the process goes on, and joins it
        self._all.waiting.append(self)

    def run(self) -> None:
        """Run it here, the first time. Its exception is the script's."""
        if self in self._all.waiting:
            self.returncode = 1
            self.remember()
            if self._all.run_here(self):
                self.returncode = 0

    def remember(self) -> None:
        """Give the process its function again."""
        # `Process.start` deletes its `_target`, `_args` and `_kwargs`
        # (test_a_started_process_trains_here).
        vars(self.process).update(self._what)

    def wait(self, timeout: float | None = None) -> int | None:
        self.run()
        own = vars(self.process)["_popen"]
        return self.returncode if own is self else own.wait(timeout)

    def poll(self, *args: Any) -> int | None:
        return self.wait(0.0)

    def terminate(self) -> None:
        """End it; if it has not run, it never will."""
        if self in self._all.waiting:
            self._all.waiting.remove(self)
            self.returncode = -15

    kill = terminate

    def close(self) -> None:
        os.close(self.sentinel)


def _blocks(block: bool = True, timeout: float | None = None) -> bool:
    return block and timeout is None


def _size(queue: Any) -> int:
    """Return how many objects have been put into a queue and not been taken."""
    try:
        return queue.qsize()
    except (AttributeError, NotImplementedError):  # a SimpleQueue; macOS
        return len(getattr(queue, "_buffer", ())) + queue._reader._poll(0.0)


def _file_of(started: Any) -> str | None:
    """Return the file whose function runs in a process or thread; None for the script itself."""
    function = getattr(started, "_target", None)
    while isinstance(function, partial):
        function = function.func
    name = getattr(function or type(started), "__module__", "") or ""
    return None if name == "__main__" else getattr(sys.modules.get(name), "__file__", None)


def _is_librarys(started: BaseProcess) -> bool:
    """Return whether a library's function runs in the process, not one of the script's."""
    file = _file_of(started)
    return file is not None and is_librarys(file)


def _may_send(thread: threading.Thread) -> bool:
    """Return whether a thread may send messages: the script's own, or one of an executor that the
    script gives its functions, but not a queue's or a library's."""
    file = _file_of(thread)
    if file is None or thread.name.startswith("QueueFeeder"):
        return file is None
    return is_pythons(file) or not is_librarys(file)
