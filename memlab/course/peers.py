"""R programs in one process that take turns: ranks that a check can run, and that never hang.

Each program is one rank's, and knows of the others what comes by the wire alone. It runs until it
has to wait; then the next that need not wait goes on. So the order is always the same, and where
all of them wait, nobody ever would come: that is found at once, and said.

    def program(peer, mine):
        peer.send(mine)                 # to the next rank, which takes it when it likes
        return peer.receive() + mine    # from the rank before: waits until something has come

    in_turns(program, [(torch.ones(2),), (torch.zeros(2),)])
"""

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from memlab.course.exercises import Wrong
from memlab.metering.modes import restore_mode_flags

PATIENCE_SECONDS = 2.0  # for a thread that was told to end


class Stuck(Wrong):
    """Ranks wait for what will never come, or have come together for different things."""


class Peer:
    """What one rank's program has of the others."""

    def __init__(self, rank: int, wire: "_Wire") -> None:
        self.rank, self.ranks = rank, wire.ranks
        self.events: list[tuple[str, Any]] = []  # in their order
        self.dtypes: list[torch.dtype] = []  # of what was sent, or begun to add up
        self._wire = wire

    def send(self, numbers: Tensor) -> None:
        """Numbers for the next rank; after the last comes the first."""
        _require_tensor("send", numbers)
        self._note("send", numbers)
        self._wire.boxes[(self.rank + 1) % self.ranks].append(numbers.detach().clone())

    def receive(self) -> Tensor:
        """Numbers of the rank before: waits for them."""
        box, before = self._wire.boxes[self.rank], (self.rank - 1) % self.ranks
        self._wire.wait(self.rank, f"for a message of rank {before}", lambda: bool(box))
        self.events.append(("receive", None))
        return self._wire.altered(box.popleft())

    def begin(self, numbers: Tensor) -> "Work":
        """Begin to add up the numbers of all ranks, and go on; the sum comes from `wait`."""
        _require_tensor("begin", numbers)
        self._note("begin", numbers)
        what = f"a sum of {counted(numbers.numel(), 'number')}"
        return Work(self, self._wire.join(self.rank, what, numbers.clone()))

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum of all ranks' numbers, which each of them gets: waits for all."""
        return self.begin(numbers).wait()

    def most(self, number: float) -> float:
        """The greatest of one number of each rank, which all of them get: waits for all."""
        if not isinstance(number, (int, float)):
            raise Wrong(f"peer.most got {type(number).__name__}; wanted a number.")
        self.events.append(("most", number))
        place = self._wire.join(self.rank, "the greatest of a number", number)
        return max(self._wire.all_of(self.rank, place))

    def _note(self, event: str, numbers: Tensor) -> None:
        self.events.append((event, numbers.nbytes))
        self.dtypes.append(numbers.dtype)


class Work:
    """A sum that is on its way."""

    def __init__(self, peer: Peer, place: int) -> None:
        self._peer, self._place, self.waited = peer, place, False

    def wait(self) -> Tensor:
        """The sum, when it is there."""
        if self.waited:
            raise Wrong("wait() was called twice of one sum; wanted once.")
        self.waited = True
        self._peer.events.append(("wait", self._place))
        wire = self._peer._wire
        return wire.altered(torch.stack(wire.all_of(self._peer.rank, self._place)).sum(0))


def in_turns(
    program: Callable[..., Any],
    given: Sequence[Sequence[Any]],
    altered: Callable[[Tensor], Tensor] = lambda numbers: numbers,
    peers: list[Peer] | None = None,
) -> list[Any]:
    """What `program(peer, *given[rank])` returns at each rank.

    `altered` changes all that arrives, for a check that asks whether it is used. To `peers` the
    ranks' are added. Raises what the first program that fails does, and Stuck where all wait.
    """
    wire = _Wire(len(given), altered)
    made = [Peer(rank, wire) for rank in range(wire.ranks)]
    if peers is not None:
        peers.extend(made)
    return wire.run([_bound(program, peer, mine) for peer, mine in zip(made, given, strict=True)])


def _bound(program: Callable[..., Any], peer: Peer, given: Sequence[Any]) -> Callable[[], Any]:
    return lambda: program(peer, *given)


def _require_tensor(method: str, numbers: Any) -> None:
    if not isinstance(numbers, Tensor):
        raise Wrong(f"peer.{method} got {type(numbers).__name__}; wanted a tensor.")


def counted(number: int, what: str) -> str:
    """ "1 message", "2 messages"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------ turns


class _Stopped(BaseException):
    """Ends a program that nobody needs any more."""


class _Wire:
    """What is between the ranks, and whose turn it is. One thread runs at a time."""

    def __init__(self, ranks: int, altered: Callable[[Tensor], Tensor]) -> None:
        self.ranks, self.altered = ranks, altered
        self.boxes: list[deque[Tensor]] = [deque() for _ in range(ranks)]
        self._joined: list[dict[int, tuple[str, Any]]] = []
        self._count = [0] * ranks
        self._waits: list[tuple[str, Callable[[], bool]] | None] = [None] * ranks
        self._over, self._results = [False] * ranks, [None] * ranks
        self._error: BaseException | None = None
        self._stopping = False
        self._turn = [threading.Semaphore(0) for _ in range(ranks)]
        self._back = threading.Semaphore(0)

    # -------------------------------------------------------------- what programs call

    def wait(self, rank: int, doing: str, ready: Callable[[], bool]) -> None:
        """Let the others go on until it is ready."""
        while not ready():
            self._waits[rank] = doing, ready
            self._back.release()
            self._turn[rank].acquire()
            self._waits[rank] = None
            if self._stopping:
                raise _Stopped

    def join(self, rank: int, kind: str, given: Any) -> int:
        """Come to a collective, the rank's first, second, …; its place."""
        place = self._count[rank]
        self._count[rank] += 1
        if place == len(self._joined):
            self._joined.append({})
        for other, (theirs, _) in self._joined[place].items():
            if theirs != kind:
                first, second = sorted(((other, theirs), (rank, kind)))
                raise Stuck(
                    f"the collectives do not match: number {place + 1} of rank {first[0]} is "
                    f"{first[1]}, of rank {second[0]} {second[1]}; real ranks would hang, or mix "
                    f"up their numbers."
                )
        self._joined[place][rank] = kind, given
        return place

    def all_of(self, rank: int, place: int) -> list[Any]:
        """What all ranks gave to a collective, when the last has come."""
        came = self._joined[place]
        self.wait(rank, f"in {came[rank][0]}", lambda: len(came) == self.ranks)
        return [came[each][1] for each in range(self.ranks)]

    # -------------------------------------------------------------- whose turn it is

    def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each returned."""
        threads = [
            threading.Thread(target=self._one, args=(rank, program), daemon=True)
            for rank, program in enumerate(programs)
        ]
        for thread in threads:
            thread.start()
        with restore_mode_flags():
            try:
                while not all(self._over):
                    rank = self._next()
                    self._turn[rank].release()
                    self._wait_for(threads[rank])
                    if self._error is not None:
                        raise self._error
            finally:
                self._stop(threads)
        return self._results

    def _wait_for(self, thread: threading.Thread) -> None:
        """Till it has to wait, or ends. An interruption is told where the program was."""
        try:
            self._back.acquire()
        except BaseException as interruption:
            _add_frames_of(thread, interruption)
            raise

    def _one(self, rank: int, program: Callable[[], Any]) -> None:
        self._turn[rank].acquire()
        try:
            if not self._stopping:
                self._results[rank] = program()
        except _Stopped:
            pass
        except BaseException as error:  # raised again where in_turns was called
            self._error = self._error or error
        self._over[rank] = True
        self._back.release()

    def _next(self) -> int:
        for rank, waits in enumerate(self._waits):
            if not self._over[rank] and (waits is None or waits[1]()):
                return rank
        raise Stuck(self._who_waits())

    def _who_waits(self) -> str:
        waiting = [
            f"rank {rank} waits {waits[0]}" for rank, waits in enumerate(self._waits) if waits
        ]
        over = [f"rank {rank} has ended" for rank in range(self.ranks) if self._over[rank]]
        what = ", ".join([*waiting, *over])
        return f"nobody can go on: {what}; real ranks would hang."

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        """End those that still run, also in a loop without end."""
        self._stopping = True
        for turn in self._turn:
            turn.release()
        for thread in threads:
            thread.join(0.05)
            if thread.is_alive() and thread.ident is not None:
                ended = ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(*ended)
                thread.join(PATIENCE_SECONDS)


def _add_frames_of(thread: threading.Thread, error: BaseException) -> None:
    """To the traceback: an alarm comes to the main thread, and what is slow runs in another."""
    frame, trace = sys._current_frames().get(thread.ident or 0), None
    while frame is not None:
        trace = TracebackType(trace, frame, max(frame.f_lasti, 0), frame.f_lineno)
        frame = frame.f_back
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is not None:
        last.tb_next = trace
