"""Several processes that become one group, and a sentence about who is missing when one is.

A collective ends when all ranks have come to it. If one never does, the others learn no more than
that a connection closed, or that time is up, and not of whom. So each rank leaves a note in the
store that all can read (a small server that the launcher keeps, or rank 0) when it stops:

    rank 2 stops with its own error      notes it, and closes its connections
    the others' collectives fail         each notes what it waited for, and how long, closes its
                                         connections too, so that nobody waits on, and reads the
                                         notes
    no note of a rank                    that one is gone, or at something else for too long
    it waited less than the others       for the same: it came when they had given up
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

GRACE_SECONDS = 5.0  # for the notes of others, once somebody is missing
_LEFT = (
    "no error: it has left the group; give every rank as many steps, and have all of them evaluate "
    "and save together"
)
_groups = count()
_stores: list[dist.Store] = []  # of the groups that are joined: where notes are left


class RankLost(RuntimeError):  # noqa: N818 - reads as what happened
    """A rank did not come to where the others wait for it."""


class Note(NamedTuple):
    """What a rank leaves for the others: why it stopped, or what it waited for in vain."""

    stopped: str = ""
    doing: str = ""
    seconds: float = 0.0
    timed_out: bool = False


@contextmanager
def joined(backend: str | None = None, *, timeout: float = 600.0) -> Iterator[int]:
    """This process as one of the ranks that `torchrun`, or `run_ranks`, started; yields its number.

    `backend` is "gloo" on the CPU, "nccl" on NVIDIA's GPUs; None is torch's choice. No collective
    waits for longer than `timeout` seconds. At the end the group is gone, and an error that ends
    the block is noted for the others. Raises RankLost, naming them, if not all ranks come.
    """
    limit = timedelta(seconds=timeout)
    store, rank, ranks = _meet(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    _stores.append(store)
    try:
        yield rank
        _note(store, rank, Note(_LEFT))
    except BaseException as error:
        _note(store, rank, Note(f"{type(error).__name__}: {error}"))
        raise
    finally:
        _stores.pop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(limit: timedelta) -> tuple[dist.Store, int, int]:
    """(store, rank, ranks), when all have come."""
    try:
        store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=limit)))
    except ValueError as error:  # a variable of the environment is not there
        raise ValueError(
            f"this process is no rank of several ({error}); start it by `torchrun --nproc-per-node "
            f"2 script.py`, or by memlab.zero.launch.run_ranks"
        ) from error
    except dist.DistError as error:
        raise RankLost(f"nobody keeps the store that ranks meet at: {error}") from error
    store = dist.PrefixStore(f"memlab/{next(_groups)}", store)
    store.set(f"came/{rank}", "")
    try:
        store.wait([f"came/{other}" for other in range(ranks)], limit)
    except dist.DistError as error:
        missing = [other for other in range(ranks) if not store.check([f"came/{other}"])]
        raise RankLost(
            f"{named(missing, ranks)} did not come within {limit.total_seconds():g} s; see what "
            f"they say themselves"
        ) from error
    return store, rank, ranks


# ------------------------------------------------------------------ who is missing


def lost(
    doing: str, error: BaseException, seconds: float, group: dist.ProcessGroup | None
) -> RankLost:
    """What to raise where a collective of the group failed after so many seconds. All process
    groups end: nobody is to wait on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    members = dist.get_process_group_ranks(group)
    store = _stores[-1] if _stores else dist.distributed_c10d._get_default_store()
    timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    try:
        store.set(_key(rank), json.dumps(Note("", doing, seconds, timed_out)))
        dist.destroy_process_group()
        notes = _notes(store, members)
    except (RuntimeError, dist.DistError):
        return RankLost(
            f"{doing} failed on rank {rank} of {ranks}, and the store is gone with the process "
            f"that kept it, rank 0 or the launcher ({_first_line(error)})"
        )
    return RankLost(sentence(notes, members, ranks, doing, _first_line(error)))


def sentence(notes: dict[int, Note], members: list[int], ranks: int, doing: str, error: str) -> str:
    """Who of the group's members is to blame that a collective failed, by their notes."""
    stopped = {rank: note.stopped for rank, note in notes.items() if note.stopped}
    if stopped:
        first = min(stopped, key=lambda rank: (stopped[rank] == _LEFT, rank))
        return f"rank {first} of {ranks} stopped before {doing}, with {stopped[first]}"
    missing = [rank for rank in members if rank not in notes] or _late(notes)
    if missing:
        timed_out = any(note.timed_out for note in notes.values())
        how = "did not come in time" if timed_out else "ended without a word"
        return f"{named(missing, ranks)} {how}: {doing} waits in vain"
    places = [f"rank {rank} in {notes[rank].doing}" for rank in members]
    return (
        f"the ranks wait for each other, {', '.join(places)}; all have to do the same in the same "
        f"order: look for one with more micro-batches than another, another branch of the model, "
        f"or something that one rank does alone, such as saving or evaluating ({error})"
    )


def _late(notes: dict[int, Note]) -> list[int]:
    """Those that came to where all waited when the others had given up."""
    if len({note.doing for note in notes.values()}) > 1:
        return []
    longest = max(note.seconds for note in notes.values())
    return [rank for rank, note in sorted(notes.items()) if note.seconds < longest / 2]


def named(some: list[int], ranks: int) -> str:
    """`rank 1 of 4`, `ranks 1 and 2 of 4`."""
    words = [str(rank) for rank in some]
    if len(words) == 1:
        return f"rank {words[0]} of {ranks}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]} of {ranks}"


def _key(rank: int) -> str:
    return f"stopped/{rank}"


def _note(store: dist.Store, rank: int, note: Note) -> None:
    """Leave it, unless there is one; without it, if the store is gone."""
    with suppress(RuntimeError, dist.DistError):
        store.compare_set(_key(rank), "", json.dumps(note))


def _notes(store: dist.Store, members: list[int]) -> dict[int, Note]:
    """What each rank noted, as soon as all have or one says why, at the latest after the grace."""
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        noted = [rank for rank in members if store.check([_key(rank)])]
        notes = {rank: Note(*json.loads(store.get(_key(rank)))) for rank in noted}
        explained = any(note.stopped for note in notes.values())
        if explained or len(notes) == len(members) or time.monotonic() > deadline:
            return notes
        time.sleep(0.05)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
