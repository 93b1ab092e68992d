"""Replay a history recorded by CUDA and compare each decision with the simulation."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from memlab.allocator.blocks import MemoryBlock
from memlab.allocator.caching import Allocator
from memlab.allocator.recorded_settings import settings_of_recording
from memlab.allocator.recordings import (
    Range,
    as_recorded,
    kind_of,
    placed_blocks,
    read,
    state_at_start,
)
from memlab.allocator.settings import Settings
from memlab.allocator.simulation import counted, segments
from memlab.units import format_bytes


class Score(NamedTuple):
    """The count of correct decisions out of all decisions."""

    right: int
    all: int

    @property
    def share(self) -> float:
        return self.right / self.all if self.all else 1.0

    def __str__(self) -> str:
        return f"{self.right} of {self.all} ({self.share:.2%})"


@dataclass(frozen=True)
class Replay:
    """How a recorded history compares with the simulation of the same requests."""

    decisions: Score  # new segment or cached block, per allocation
    segment_sizes: Score  # per segment allocated in the recording
    addresses: Score  # per allocation
    releases: Score  # the set of released segments, per moment with a release
    blocks_at_end: Score  # address, size and state, per block at the recording's end
    recorded_reserved_bytes: int  # peak
    reserved_bytes: int  # peak of the simulation
    misses: tuple[str, ...]  # one sentence per differing decision

    @property
    def exact(self) -> bool:
        """Whether every decision agrees."""
        scores = (self.decisions, self.segment_sizes, self.addresses, self.releases)
        return (
            all(score.right == score.all for score in (*scores, self.blocks_at_end))
            and self.recorded_reserved_bytes == self.reserved_bytes
        )


def replay(
    recording: Mapping[str, Any], settings: Settings | None = None, **changes: Any
) -> Replay:
    """Compare a history recorded by CUDA with the allocator's rules.

    The requests and the addresses of segments come from the recording. The simulation chooses the
    block for each request. The state before the events is reconstructed from the end.

    The replay releases memory when the recording does, because the recording does not contain
    the reason. It scores whether the rules would release the same segments. With
    `capacity_bytes`, releases that the allocator starts on its own are scored too.

    Args:
        recording: has `events` (`action`, `addr`, `size`, `stream`) and `segments_at_end`, or is
            the result of `torch.cuda.memory._snapshot()`; only its first device is read.
        settings: needed only if the recording neither states nor shows them.

    Raises:
        ValueError: if `settings` contradict the recording's.
    """
    events, at_end = read(recording)
    chosen = settings_of_recording(recording, events, replace(settings or Settings(), **changes))
    player = _Player(chosen)
    player.start(state_at_start(events, at_end, chosen), events)
    for event in events:
        player.play(event)
    return player.result(at_end)


class _Player:
    """Replays a recording's requests on an allocator and keeps the scores."""

    def __init__(self, settings: Settings) -> None:
        self.allocator = Allocator(settings, place=self._place, keeps_history=True)
        self._blocks: dict[int, MemoryBlock] = {}  # by the address in the recording
        self._granted: list[tuple[int, int]] = []  # (address, bytes) for the next allocation
        self._returned: set[tuple[int, int]] = set()  # (address, bytes) since the last request
        self._elsewhere = count(2**60, 2**50)  # addresses for segments not in the recording
        self._scores = {name: [0, 0] for name in ("kind", "size", "address", "release")}
        self._misses: list[str] = []
        self._events = 0
        self._reserved = self._reserved_peak = 0

    def start(self, ranges: Mapping[int, Range], events: Iterable[Mapping[str, Any]]) -> None:
        """Restore the allocator's state before the events."""
        heads = self._pages(ranges, events) if self._expands else self._segments(ranges)
        for address, found in ranges.items():
            block = heads[address]
            for start, (size, free_pending) in found.taken.items():
                taken = self._blocks[start] = self.allocator.occupy(block, start, size)
                block = taken.next or taken
                if free_pending:
                    self.allocator.request_free(taken)
        self._reserved = self._reserved_peak = self.allocator.reserved_bytes

    @property
    def _expands(self) -> bool:
        return self.allocator.settings.expandable_segments

    def _segments(self, ranges: Mapping[int, Range]) -> dict[int, MemoryBlock]:
        return {
            address: self.allocator.adopt(address, found.size, found.stream, found.kind)
            for address, found in ranges.items()
        }

    def _pages(
        self, ranges: Mapping[int, Range], events: Iterable[Mapping[str, Any]]
    ) -> dict[int, MemoryBlock]:
        """Add one expandable segment per pool, starting at the lowest address it ever maps."""
        mapped: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for address, found in ranges.items():
            mapped[found.stream, found.kind].append((address, found.size))
        lowest = {pool: min(pages)[0] for pool, pages in mapped.items()}
        for event in events:
            pool = event["stream"], kind_of(event, self.allocator.settings)
            if event["action"] == "segment_map" and pool in lowest:
                lowest[pool] = min(lowest[pool], event["addr"])
        heads: dict[int, MemoryBlock] = {}
        for pool, pages in mapped.items():
            heads |= self.allocator.adopt_pages(lowest[pool], pages, *pool)
        return heads

    def play(self, event: Mapping[str, Any]) -> None:
        """Replay the next event."""
        address, size, action = event["addr"], event["size"], event["action"]
        if action in ("segment_free", "segment_unmap"):
            self._returned.add((address, size))
            self._reserve(-size)
        elif action in ("segment_alloc", "segment_map"):
            self._granted.append((address, size))
            self._reserve(size)
        elif action == "alloc":
            self._allocate(address, size, event["stream"])
        elif action in ("free_requested", "free_completed"):
            self._return()
            self._free(action, address)
        self._events += 1

    def result(self, at_end: Iterable[Mapping[str, Any]]) -> Replay:
        self._return()
        scores = {name: Score(*score) for name, score in self._scores.items()}
        return Replay(
            scores["kind"],
            scores["size"],
            scores["address"],
            scores["release"],
            self._score_end(at_end),
            self._reserved_peak,
            self.allocator.reserved_peak_bytes,
            tuple(self._misses),
        )

    def _reserve(self, size: int) -> None:
        self._reserved += size
        self._reserved_peak = max(self._reserved_peak, self._reserved)

    def _allocate(self, address: int, size: int, stream: int) -> None:
        limited = self.allocator.settings.capacity_bytes is not None
        on_its_own = limited and self.allocator.must_release_first(size, stream)
        if not on_its_own:
            self._return()
        recorded = [grant for _, grant in self._granted]
        block, made = self._served(size, stream)
        self._blocks[address] = block
        self._granted.clear()
        request = f"{format_bytes(size)} on stream {stream}"
        if on_its_own:
            self._score_returns({entry[1:3] for entry in made if entry[0] in _RETURNS}, request)
        here = [entry[2] for entry in made if entry[0] in _GRANTS]
        self._score_grants(recorded, here, request)
        right = block.address == address
        self._score("address", right, request, f"{address:#x}", f"{block.address:#x}")

    def _served(
        self, size: int, stream: int
    ) -> tuple[MemoryBlock, list[tuple[str, int, int, int]]]:
        """Return a block for the request, and the history entries it caused."""
        history = self.allocator.history
        assert history is not None
        before = len(history)
        block = self.allocator.malloc(size, stream)
        if block is None:
            raise ValueError(
                f"event {self._events} of the recording was served but does not fit here; "
                f"set capacity_bytes to the capacity of the device that recorded it"
            )
        return block, history[before:]

    def _free(self, action: str, address: int) -> None:
        if action == "free_requested":
            self.allocator.request_free(self._blocks[address])
            return
        block = self._blocks.pop(address)
        if not block.free_pending:
            self.allocator.request_free(block)
        self.allocator.complete_free(block)

    def _return(self) -> None:
        """Release the memory that the recording released since the last request."""
        if not self._returned:
            return
        releasable = self.allocator.releasable()
        common = releasable.keys() & self._returned
        self._score_returns(set(releasable), "memory released")
        for place in sorted(common):
            self.allocator.release(releasable[place])

    def _score_returns(self, here: set[tuple[int, int]], what: str) -> None:
        recorded, self._returned = self._returned, set()
        if not recorded and not here:
            return
        same = len(here & recorded)
        self._score(
            "release",
            here == recorded,
            what,
            counted(len(recorded), "range"),
            f"{counted(len(here), 'range')}, {same} equal",
        )

    def _score_grants(self, recorded: list[int], here: list[int], what: str) -> None:
        words = what, _kind(recorded), _kind(here)
        self._score("kind", bool(recorded) == bool(here), *words)
        if recorded and here:
            self._score("size", recorded == here, *words)
        elif recorded:
            self._scores["size"][1] += 1

    def _score(self, name: str, right: bool, what: str, recorded: str, here: str) -> None:
        self._scores[name][0] += right
        self._scores[name][1] += 1
        if not right:
            self._misses.append(
                f"event {self._events}, {what}: {recorded} in the recording, {here} here"
            )

    def _score_end(self, at_end: Iterable[Mapping[str, Any]]) -> Score:
        recorded = {
            (block["address"], block["size"], block["state"])
            for segment in at_end
            for block in placed_blocks(segment)
        }
        here = {
            (block["address"], block["size"], block["state"])
            for segment in map(as_recorded, segments(self.allocator))
            for block in segment["blocks"]
        }
        return Score(len(recorded & here), len(recorded))

    def _place(self, size: int) -> int:
        """Return the recorded address of a new segment if its size matches.

        Expandable segments skip the size check: the recorded pages are smaller than the reserved
        address range.
        """
        if self._granted and (self._expands or self._granted[0][1] == size):
            return self._granted.pop(0)[0]
        return next(self._elsewhere)


_GRANTS = ("segment_alloc", "segment_map")
_RETURNS = ("segment_free", "segment_unmap")


def _kind(grants: list[int]) -> str:
    return f"new memory of {' + '.join(map(format_bytes, grants))}" if grants else "a cached block"
