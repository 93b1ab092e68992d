"""Run R ranks' programs in one process, in turns, so that a check never hangs.

Each program belongs to one rank, and communicates only through its `peer`. It runs until it has to
wait; then the next program that can continue runs. So the order is always the same, and a deadlock
is detected at once.

    def program(peer, mine):
        peer.send(mine)                 # to the next rank, without waiting
        return peer.receive() + mine    # from the previous rank: waits for a message

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
from memlab.internals.threads import scope
from memlab.metering.modes import restore_mode_flags

SHUTDOWN_SECONDS = 2.0  # for a thread that was told to end


class Stuck(Wrong):
    """The ranks deadlocked, or called different collectives together."""


class Peer:
    """One rank's connection to the others."""

    def __init__(self, rank: int, communicator: "_TurnCommunicator") -> None:
        self.rank, self.ranks = rank, communicator.ranks
        self.events: list[tuple[str, Any]] = []  # in order
        self.dtypes: list[torch.dtype] = []  # of sent and summed tensors
        self._communicator = communicator

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the next rank; the last rank sends to the first."""
        _require_tensor("send", tensor)
        self._note("send", tensor)
        self._communicator.boxes[(self.rank + 1) % self.ranks].append(tensor.detach().clone())

    def receive(self) -> Tensor:
        """Wait for a tensor from the previous rank."""
        box, before = self._communicator.boxes[self.rank], (self.rank - 1) % self.ranks
        self._communicator.wait(self.rank, f"for a message from rank {before}", lambda: bool(box))
        self.events.append(("receive", None))
        return self._communicator.altered(box.popleft())

    def begin(self, tensor: Tensor) -> "Work":
        """Start the sum of all ranks' tensors without waiting. `wait` returns the sum."""
        _require_tensor("begin", tensor)
        self._note("begin", tensor)
        what = f"a sum of {counted(tensor.numel(), 'element')}"
        return Work(self, self._communicator.join(self.rank, what, tensor.clone()))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors. Waits for all ranks."""
        return self.begin(tensor).wait()

    def most(self, number: float) -> float:
        """Return the maximum of one number per rank. Waits for all ranks."""
        if not isinstance(number, (int, float)):
            raise Wrong(f"peer.most got {type(number).__name__}; wanted a number.")
        self.events.append(("most", number))
        place = self._communicator.join(self.rank, "the maximum of one number per rank", number)
        return max(self._communicator.all_of(self.rank, place))

    def _note(self, event: str, tensor: Tensor) -> None:
        self.events.append((event, tensor.nbytes))
        self.dtypes.append(tensor.dtype)


class EchoPeer:
    """Stands for one of several equal ranks: it receives what it sends. A check measures a single
    rank with it, without threads."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._sent: deque[Tensor] = deque()

    def send(self, tensor: Tensor) -> None:
        self._sent.append(tensor.detach().clone())

    def receive(self) -> Tensor:
        return self._sent.popleft()


class Work:
    """A sum in flight."""

    def __init__(self, peer: Peer, place: int) -> None:
        self._peer, self._place, self.waited = peer, place, False

    def wait(self) -> Tensor:
        """Wait for the sum and return it."""
        if self.waited:
            raise Wrong("wait() was called twice on one sum; wanted once.")
        self.waited = True
        self._peer.events.append(("wait", self._place))
        communicator = self._peer._communicator
        return communicator.altered(
            torch.stack(communicator.all_of(self._peer.rank, self._place)).sum(0)
        )


def in_turns(
    program: Callable[..., Any],
    given: Sequence[Sequence[Any]],
    altered: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    peers: list[Peer] | None = None,
) -> list[Any]:
    """Return the results of `program(peer, *given[rank])` for all ranks.

    `altered` changes every tensor that arrives, for a check that tests whether it is used. The
    ranks' Peers are appended to `peers`. Raises the first error of a program, and Stuck if all
    ranks wait.
    """
    communicator = _TurnCommunicator(len(given), altered)
    made = [Peer(rank, communicator) for rank in range(communicator.ranks)]
    if peers is not None:
        peers.extend(made)
    return communicator.run(
        [_bound(program, peer, mine) for peer, mine in zip(made, given, strict=True)]
    )


def case_in_turns(case: str, *args: Any, **settings: Any) -> list[Any]:
    """`in_turns`, with the case in the message if the ranks deadlock."""
    try:
        return in_turns(*args, **settings)
    except Stuck as stuck:
        raise Stuck(f"{case}: {stuck}") from None


def _bound(program: Callable[..., Any], peer: Peer, given: Sequence[Any]) -> Callable[[], Any]:
    return lambda: program(peer, *given)


def _require_tensor(method: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise Wrong(f"peer.{method} got {type(tensor).__name__}; wanted a tensor.")


def counted(number: int, what: str) -> str:
    """Format a count: "1 message", "2 messages"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------ turns


class _Stopped(BaseException):
    """Ends a program whose result is no longer needed."""


class _TurnCommunicator:
    """The messages between the ranks, and whose turn it is. One thread runs at a time."""

    def __init__(self, ranks: int, altered: Callable[[Tensor], Tensor]) -> None:
        self.ranks, self.altered = ranks, altered
        self.boxes: list[deque[Tensor]] = [deque() for _ in range(ranks)]
        self._joined: list[dict[int, tuple[str, Any]]] = []
        self._count = [0] * ranks
        self._waits: list[tuple[str, Callable[[], bool]] | None] = [None] * ranks
        self._ended, self._results = [False] * ranks, [None] * ranks
        self._error: BaseException | None = None
        self._stopping = False
        self._turn = [threading.Semaphore(0) for _ in range(ranks)]
        self._control = threading.Semaphore(0)

    # -------------------------------------------------------------- called by programs

    def wait(self, rank: int, doing: str, ready: Callable[[], bool]) -> None:
        """Let other ranks run until `ready()` is true."""
        while not ready():
            self._waits[rank] = doing, ready
            self._control.release()
            self._turn[rank].acquire()
            self._waits[rank] = None
            if self._stopping:
                raise _Stopped

    def join(self, rank: int, kind: str, given: Any) -> int:
        """Enter this rank's next collective; return its index."""
        place = self._count[rank]
        self._count[rank] += 1
        if place == len(self._joined):
            self._joined.append({})
        for other, (theirs, _) in self._joined[place].items():
            if theirs != kind:
                first, second = sorted(((other, theirs), (rank, kind)))
                raise Stuck(
                    f"the collectives do not match: collective {place + 1} is {first[1]} on rank "
                    f"{first[0]}, and {second[1]} on rank {second[0]}; real ranks would hang, or "
                    f"mix up their data."
                )
        self._joined[place][rank] = kind, given
        return place

    def all_of(self, rank: int, place: int) -> list[Any]:
        """Wait until all ranks have entered a collective; return their inputs."""
        came = self._joined[place]
        self.wait(rank, f"in {came[rank][0]}", lambda: len(came) == self.ranks)
        return [came[each][1] for each in range(self.ranks)]

    # -------------------------------------------------------------- taking turns

    def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the programs and return their results."""
        threads = [
            threading.Thread(target=self._run_program, args=(rank, program), daemon=True)
            for rank, program in enumerate(programs)
        ]
        with scope(), restore_mode_flags():
            for thread in threads:  # inside, so that no rank waits for one that measures
                thread.start()
            try:
                while not all(self._ended):
                    rank = self._next()
                    self._turn[rank].release()
                    self._wait_for(threads[rank])
                    if self._error is not None:
                        raise self._error
            finally:
                self._stop(threads)
        return self._results

    def _wait_for(self, thread: threading.Thread) -> None:
        """Wait until the thread has to wait or ends. Add its frames to an interruption."""
        try:
            self._control.acquire()
        except BaseException as interruption:
            _add_frames_of(thread, interruption)
            raise

    def _run_program(self, rank: int, program: Callable[[], Any]) -> None:
        self._turn[rank].acquire()
        try:
            if not self._stopping:
                self._results[rank] = program()
        except _Stopped:
            pass
        except BaseException as error:  # raised again by in_turns
            self._error = self._error or error
        self._ended[rank] = True
        self._control.release()

    def _next(self) -> int:
        for rank, waits in enumerate(self._waits):
            if not self._ended[rank] and (waits is None or waits[1]()):
                return rank
        raise Stuck(self._describe_waiting())

    def _describe_waiting(self) -> str:
        waiting = [
            f"rank {rank} waits {waits[0]}" for rank, waits in enumerate(self._waits) if waits
        ]
        over = [f"rank {rank} has ended" for rank in range(self.ranks) if self._ended[rank]]
        what = ", ".join([*waiting, *over])
        return f"all ranks are stuck: {what}; real ranks would hang."

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        """End the threads that still run, even in an endless loop."""
        self._stopping = True
        for turn in self._turn:
            turn.release()
        for thread in threads:
            thread.join(0.05)
            if thread.is_alive() and thread.ident is not None:
                ended = ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(*ended)
                thread.join(SHUTDOWN_SECONDS)


def _add_frames_of(thread: threading.Thread, error: BaseException) -> None:
    """Add a thread's frames to the traceback. An alarm interrupts the main thread, but the slow
    code runs in another one."""
    frame, trace = sys._current_frames().get(thread.ident or 0), None
    while frame is not None:
        trace = TracebackType(trace, frame, max(frame.f_lasti, 0), frame.f_lineno)
        frame = frame.f_back
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is not None:
        last.tb_next = trace
