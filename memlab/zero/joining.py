"""Join several processes in one group, and name the missing rank when a collective fails.

A collective ends when every rank has joined it. If a rank never joins, the backend reports a closed
connection or a timeout, but not the missing rank. So each rank that stops leaves a note in the
group's store (a small server in the launcher or on rank 0):

    rank 2 stops with an error           it writes a note and closes its connections
    the other ranks' collectives fail    each notes its collective and how long it waited, closes
                                         its connections so that the others fail too, and reads
                                         the notes
    a rank has no note                   it has died, or is busy elsewhere for too long
    a rank waited less than the others   it reached the same collective after the others gave up
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

GRACE_SECONDS = 5.0  # how long to wait for the other ranks' notes after a failure
_LEFT = (
    "no error: it has left the group; run the same number of steps on every rank, and evaluate "
    "and save on all ranks together"
)
_groups = count()
_stores: list[dist.Store] = []  # of the joined groups; notes are left here


class RankLost(RuntimeError):  # noqa: N818 - reads as what happened
    """A rank did not reach a collective that the other ranks wait for."""


class Note(NamedTuple):
    """Why a rank stopped, or which collective it waited for."""

    stopped: str = ""
    doing: str = ""
    seconds: float = 0.0
    timed_out: bool = False


@contextmanager
def joined(backend: str | None = None, *, timeout: float = 600.0) -> Iterator[int]:
    """Join this process to the ranks that `torchrun` or `run_ranks` started; yields its rank.

    `backend` is "gloo" on the CPU, "nccl" on NVIDIA GPUs; None lets torch choose. No collective
    waits for longer than `timeout` seconds. When the block ends, the group is destroyed. If an
    error ends it, a note tells the other ranks. Raises RankLost, naming the missing ranks, if not
    all ranks arrive.
    """
    limit = timedelta(seconds=timeout)
    store, rank, ranks = _rendezvous(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    _stores.append(store)
    try:
        yield rank
        _leave_note(store, rank, Note(_LEFT))
    except BaseException as error:
        _leave_note(store, rank, Note(f"{type(error).__name__}: {error}"))
        raise
    finally:
        _stores.pop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _rendezvous(limit: timedelta) -> tuple[dist.Store, int, int]:
    """Return (store, rank, ranks) once all ranks have arrived."""
    try:
        store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=limit)))
    except ValueError as error:  # an environment variable is missing
        raise ValueError(
            f"this process was not started as one of several ranks ({error}); start it with "
            f"`torchrun --nproc-per-node 2 script.py` or memlab.zero.launch.run_ranks"
        ) from error
    except dist.DistError as error:
        raise RankLost(f"no process serves the store that all ranks connect to: {error}") from error
    store = dist.PrefixStore(f"memlab/{next(_groups)}", store)
    store.set(f"came/{rank}", "")
    try:
        store.wait([f"came/{other}" for other in range(ranks)], limit)
    except dist.DistError as error:
        missing = [other for other in range(ranks) if not store.check([f"came/{other}"])]
        raise RankLost(
            f"{format_ranks(missing, ranks)} did not arrive within {limit.total_seconds():g} s; "
            f"check the output of each"
        ) from error
    return store, rank, ranks


# ------------------------------------------------------------------ missing ranks


def rank_lost_error(
    doing: str, error: BaseException, seconds: float, group: dist.ProcessGroup | None
) -> RankLost:
    """Return the error for a collective of the group that failed after so many seconds.

    This destroys all process groups, so that no other rank keeps waiting.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    members = dist.get_process_group_ranks(group)
    store = _stores[-1] if _stores else dist.distributed_c10d._get_default_store()
    timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    try:
        store.set(_key(rank), json.dumps(Note("", doing, seconds, timed_out)))
        dist.destroy_process_group()
        notes = _read_notes(store, members)
    except (RuntimeError, dist.DistError):
        return RankLost(
            f"{doing} failed on rank {rank} of {ranks}, and the process with the store (rank 0 or "
            f"the launcher) is gone ({_first_line(error)})"
        )
    return RankLost(explain(notes, members, ranks, doing, _first_line(error)))


def explain(notes: dict[int, Note], members: list[int], ranks: int, doing: str, error: str) -> str:
    """Return a sentence that names the rank which made a collective fail, from the notes."""
    stopped = {rank: note.stopped for rank, note in notes.items() if note.stopped}
    if stopped:
        first = min(stopped, key=lambda rank: (stopped[rank] == _LEFT, rank))
        return f"rank {first} of {ranks} stopped before {doing}, with {stopped[first]}"
    missing = [rank for rank in members if rank not in notes] or _late(notes)
    if missing:
        timed_out = any(note.timed_out for note in notes.values())
        how = "did not arrive in time" if timed_out else "died without a message"
        return f"{format_ranks(missing, ranks)} {how}: {doing} cannot finish"
    places = [f"rank {rank} in {notes[rank].doing}" for rank in members]
    return (
        f"the ranks wait for each other, {', '.join(places)}; all ranks must call the same "
        f"collectives in the same order: check for a rank with more micro-batches, another branch "
        f"of the model, or a step that only one rank runs, such as saving or evaluating ({error})"
    )


def _late(notes: dict[int, Note]) -> list[int]:
    """Return the ranks that reached the collective after the others had given up."""
    if len({note.doing for note in notes.values()}) > 1:
        return []
    longest = max(note.seconds for note in notes.values())
    return [rank for rank, note in sorted(notes.items()) if note.seconds < longest / 2]


def format_ranks(some: list[int], ranks: int) -> str:
    """Return `rank 1 of 4`, or `ranks 1 and 2 of 4`."""
    words = [str(rank) for rank in some]
    if len(words) == 1:
        return f"rank {words[0]} of {ranks}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]} of {ranks}"


def _key(rank: int) -> str:
    return f"stopped/{rank}"


def _leave_note(store: dist.Store, rank: int, note: Note) -> None:
    """Leave the note unless the rank has left one already. Do nothing if the store is gone."""
    with suppress(RuntimeError, dist.DistError):
        store.compare_set(_key(rank), "", json.dumps(note))


def _read_notes(store: dist.Store, members: list[int]) -> dict[int, Note]:
    """Return the notes once all ranks left one, one explains the failure, or the grace is over."""
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        with_note = [rank for rank in members if store.check([_key(rank)])]
        notes = {rank: Note(*json.loads(store.get(_key(rank)))) for rank in with_note}
        explained = any(note.stopped for note in notes.values())
        if explained or len(notes) == len(members) or time.monotonic() > deadline:
            return notes
        time.sleep(0.05)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
