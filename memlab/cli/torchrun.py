"""A command that torchrun started as one of several processes, the ranks.

One rank prints the error. torchrun ends all ranks as soon as one of them has failed.

    memlab train   all ranks fail alike: they wait for each other, so that rank 0 is not ended
                   before it has printed
    memlab run     the script fails: the first rank that fails by itself prints, and ranks that
                   fail because it has gone wait for its word

This module does not import torch, so bad input is reported at once.
"""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from memlab.cli.errors import UsageError, error_line
from memlab.cli.requests import TrainRequest
from memlab.configs.torchrun import torchrun
from memlab.internals.interrupts import INTERRUPTED, INTERRUPTED_MESSAGE

FAILING_SECONDS = 20.0  # how long a rank that fails waits for the others
CAUSE_SECONDS = 3.0  # how long one that has lost another rank waits for that one's message
ENDED = "interrupted, or another rank has ended without a message; nothing was written"
INTERRUPT_SECONDS = 3.0  # how long an interrupted rank may take to end by itself


class Rank(NamedTuple):
    """This process's place among all ranks, and among its machine's ranks."""

    index: int  # type: ignore[assignment]  # replaces tuple.index
    ranks: int
    local_index: int
    local_ranks: int

    @property
    def is_first(self) -> bool:
        return self.index == 0


def find_rank() -> Rank | None:
    """Return the rank that torchrun's variables give this process; None outside of torchrun."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    try:
        return Rank(*(int(os.environ[name]) for name in names))
    except (KeyError, ValueError):
        return None


def choose_rank(request: TrainRequest) -> Rank | None:
    """Return this process's rank if the options train on several; None for a single process."""
    rank = find_rank()
    if request.zero is None:
        if request.ranks is not None:
            raise UsageError(
                f"got --ranks {request.ranks} without --zero; give the stage of ZeRO, 0 to 3, or "
                f"leave --ranks out"
            )
        if rank is not None and rank.ranks > 1:
            raise UsageError(
                f"got {rank.ranks} processes from torchrun without --zero; give the stage of ZeRO, "
                f"0 to 3, or start memlab train without torchrun"
            )
        return None
    if rank is None:
        command = f"{torchrun(request.ranks or 2)} {shlex.join(sys.argv[1:])}"
        raise UsageError(
            f"got --zero {request.zero} in a single process; start one process for each GPU, or "
            f"several on the CPU: {command}"
        )
    if request.ranks not in (None, rank.ranks):
        raise UsageError(
            f"got {rank.ranks} processes for a recipe of --ranks {request.ranks}, whose ranks need "
            f"other memory; start {request.ranks} processes, or leave --ranks out"
        )
    return rank


def print_once(message: str, rank: Rank, *, waits: bool) -> None:
    """Print the message of ranks that fail, on rank 0 only, or on the rank that fails alone."""
    if rank.is_first:
        print(error_line(message), file=sys.stderr, flush=True)
    if not waits:
        return
    with suppress(KeyboardInterrupt):
        if not wait_for_failing_ranks(rank) and not rank.is_first:
            print(error_line(message), file=sys.stderr, flush=True)


def print_cause(message: str, rank: Rank, *, is_lost: bool) -> None:
    """Print why a script's ranks end, once for all of them.

    `is_lost` says that this rank only waited for another one, or was told to end. It prints if no
    other rank fails by itself within CAUSE_SECONDS. torchrun tells it to end meanwhile.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(KeyboardInterrupt):
        if _is_first_to_fail(rank, is_lost):
            print(error_line(f"rank {rank.index} of {rank.ranks}: {message}"), file=sys.stderr)


def _is_first_to_fail(rank: Rank, is_lost: bool) -> bool:
    """Return whether no other rank has printed. Without a store to ask, every rank prints."""
    from torch.distributed import DistError

    try:
        if (store := _store(CAUSE_SECONDS)) is None:
            return True
        end = time.monotonic() + CAUSE_SECONDS
        while is_lost and not store.check([_key("cause")]) and time.monotonic() < end:
            time.sleep(0.1)
        return store.compare_set(_key("cause"), "", str(rank.index)) == str(rank.index).encode()
    except DistError:
        return True


def wait_for_failing_ranks(rank: Rank) -> bool:
    """Wait until all ranks have failed too; return whether rank 0 has, which then has printed."""
    from torch.distributed import DistError

    keys = [_key(str(index)) for index in range(rank.ranks)]
    try:
        if (store := _store(FAILING_SECONDS)) is None:
            return True  # no launcher that ends the other ranks
        store.set(keys[rank.index], "")
        with suppress(DistError):
            store.wait(keys, timedelta(seconds=FAILING_SECONDS))
        return store.check(keys[:1])
    except (DistError, KeyError, ValueError):
        return False


def _store(seconds: float) -> Any:
    """Return the store that torchrun keeps for all ranks; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds))


def _key(name: str) -> str:
    return f"memlab/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"


@contextmanager
def interruptible(rank: Rank) -> Iterator[None]:
    """End this rank at Ctrl-C, even while it waits for another rank inside a collective.

    Python raises KeyboardInterrupt only after the collective has returned, and the other rank may
    never come. So a thread ends the process if it has not left the block in time.
    """
    left = threading.Event()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

    def end_in_time() -> None:
        while received := os.read(reads, 1):
            if received[0] == signal.SIGINT and not left.wait(INTERRUPT_SECONDS):
                if rank.is_first:
                    print(error_line(INTERRUPTED_MESSAGE), file=sys.stderr)
                sys.stdout.flush()
                os._exit(INTERRUPTED)
        os.close(reads)

    threading.Thread(target=end_in_time, daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writes)
