"""A history that CUDA recorded, held against the rules decision by decision."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from memlab.allocator.blocks import Block
from memlab.allocator.caching import Allocator
from memlab.allocator.recorded_settings import of_recording
from memlab.allocator.recordings import Range, as_recorded, at_start, kind_of, placed_blocks, read
from memlab.allocator.settings import Settings
from memlab.allocator.simulation import segments
from memlab.units import format_bytes


class Score(NamedTuple):
    """How many of how many are right."""

    right: int
    all: int

    @property
    def share(self) -> float:
        return self.right / self.all if self.all else 1.0

    def __str__(self) -> str:
        return f"{self.right} of {self.all} ({self.share:.2%})"


@dataclass(frozen=True)
class Replay:
    """A recorded history held against what the rules here make of the same requests."""

    decisions: Score  # a new segment or a cached block, of all allocations
    segment_sizes: Score  # of all segments that the recording allocates
    addresses: Score  # of all allocations
    releases: Score  # which segments went back, of all moments at which some did
    blocks_at_end: Score  # address, size and state, of all blocks that the recording ends with
    recorded_reserved_bytes: int  # the peaks
    reserved_bytes: int
    misses: tuple[str, ...]  # one sentence for each decision that differs

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        scores = (self.decisions, self.segment_sizes, self.addresses, self.releases)
        return (
            all(score.right == score.all for score in (*scores, self.blocks_at_end))
            and self.recorded_reserved_bytes == self.reserved_bytes
        )


def replay(
    recording: Mapping[str, Any], settings: Settings | None = None, **changes: Any
) -> Replay:
    """Hold a history that CUDA recorded against the rules: the requests, and where the driver put
    its segments, are the recording's; which block serves a request is decided here.

    `recording` has `events` (`action`, `addr`, `size`, `stream`) and `segments_at_end`, or is
    what `torch.cuda.memory._snapshot()` returns, of its first device. Settings that the recording
    states (`allocator_settings`) or shows hold without being given. The start is worked out
    from the end. When the recording gives memory back, so does the replay, for why the driver
    refused, or who emptied the cache, is not in it; whether that is all that the rules would give
    back, is scored. With `capacity_bytes`, and where that makes the allocator give something back
    on its own, what it gives back is held against the recording.

    ValueError where settings are given that the recording was not made with.
    """
    events, at_end = read(recording)
    chosen = of_recording(recording, events, replace(settings or Settings(), **changes))
    player = _Player(chosen)
    player.start(at_start(events, at_end, chosen), events)
    for event in events:
        player.play(event)
    return player.result(at_end)


class _Player:
    """Plays a recording's requests to an allocator, and keeps the score."""

    def __init__(self, settings: Settings) -> None:
        self.allocator = Allocator(settings, place=self._place, keeps_history=True)
        self._blocks: dict[int, Block] = {}  # by the address in the recording
        self._granted: list[tuple[int, int]] = []  # (address, bytes) for the next allocation
        self._returned: set[tuple[int, int]] = set()  # (address, bytes) since the last request
        self._elsewhere = count(2**60, 2**50)  # addresses of what the recording does not have
        self._scores = {name: [0, 0] for name in ("kind", "size", "address", "release")}
        self._misses: list[str] = []
        self._events = 0
        self._reserved = self._reserved_peak = 0

    def start(self, ranges: Mapping[int, Range], events: Iterable[Mapping[str, Any]]) -> None:
        """Bring the allocator into the state from which the events lead on."""
        heads = self._pages(ranges, events) if self._expands else self._segments(ranges)
        for address, found in ranges.items():
            block = heads[address]
            for start, (size, let_go) in found.taken.items():
                taken = self._blocks[start] = self.allocator.occupy(block, start, size)
                block = taken.next or taken
                if let_go:
                    self.allocator.let_go(taken)
        self._reserved = self._reserved_peak = self.allocator.reserved_bytes

    @property
    def _expands(self) -> bool:
        return self.allocator.settings.expandable_segments

    def _segments(self, ranges: Mapping[int, Range]) -> dict[int, Block]:
        return {
            address: self.allocator.adopt(address, found.size, found.stream, found.kind)
            for address, found in ranges.items()
        }

    def _pages(
        self, ranges: Mapping[int, Range], events: Iterable[Mapping[str, Any]]
    ) -> dict[int, Block]:
        """One expandable segment for each pool, from the lowest address that it ever maps."""
        mapped: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for address, found in ranges.items():
            mapped[found.stream, found.kind].append((address, found.size))
        lowest = {pool: min(pages)[0] for pool, pages in mapped.items()}
        for event in events:
            pool = event["stream"], kind_of(event, self.allocator.settings)
            if event["action"] == "segment_map" and pool in lowest:
                lowest[pool] = min(lowest[pool], event["addr"])
        heads: dict[int, Block] = {}
        for pool, pages in mapped.items():
            heads |= self.allocator.adopt_pages(lowest[pool], pages, *pool)
        return heads

    def play(self, event: Mapping[str, Any]) -> None:
        """Take the next event of the recording."""
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
        on_its_own = limited and self.allocator.makes_room(size, stream)
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

    def _served(self, size: int, stream: int) -> tuple[Block, list[tuple[str, int, int, int]]]:
        """A block for the request, and what the allocator did for it."""
        history = self.allocator.history
        assert history is not None
        before = len(history)
        block = self.allocator.malloc(size, stream)
        if block is None:
            raise ValueError(
                f"event {self._events} of the recording was served and does not fit here; "
                f"give the capacity of the card it was recorded on"
            )
        return block, history[before:]

    def _free(self, action: str, address: int) -> None:
        if action == "free_requested":
            self.allocator.let_go(self._blocks[address])
            return
        block = self._blocks.pop(address)
        if not block.let_go:
            self.allocator.let_go(block)
        self.allocator.reclaim(block)

    def _return(self) -> None:
        """Give back what the recording has given back since the last request."""
        if not self._returned:
            return
        releasable = self.allocator.releasable()
        common = releasable.keys() & self._returned
        self._score_returns(set(releasable), "memory given back")
        for place in sorted(common):
            self.allocator.give_back(releasable[place])

    def _score_returns(self, here: set[tuple[int, int]], what: str) -> None:
        recorded, self._returned = self._returned, set()
        if not recorded and not here:
            return
        same = len(here & recorded)
        self._score(
            "release",
            here == recorded,
            what,
            f"{len(recorded)} pieces",
            f"{len(here)}, {same} same",
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
        """Where the recording's driver put the segment, if it gave one of that size now. Pages
        are less than the addresses that they are mapped into."""
        if self._granted and (self._expands or self._granted[0][1] == size):
            return self._granted.pop(0)[0]
        return next(self._elsewhere)


_GRANTS = ("segment_alloc", "segment_map")
_RETURNS = ("segment_free", "segment_unmap")


def _kind(grants: list[int]) -> str:
    return f"new memory of {' + '.join(map(format_bytes, grants))}" if grants else "a cached block"
