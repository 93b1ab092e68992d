"""What each remedy would save, predicted by replaying the history with it.

The replay drives memlab.allocator with the recorded requests, in a card that has as much room as
this process had: what it had reserved when memory ran out, plus what the driver had free. Three
kinds of remedies are replayed:

    settings     expandable_segments, max_split_size_mb, garbage_collection_threshold
    empty_cache  the cache is emptied before each step
    sizes        blocks that depend on the batch shrink to half, or blocks are freed earlier

A record that begins late does not show how its oldest blocks were placed; the replay places them
anew.
If the replay with the recorded settings does not fail where the history did, the predictions are
marked as approximate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memlab.allocator import Allocator, Settings
from memlab.allocator.blocks import MemoryBlock
from memlab.allocator.recorded_settings import stated_settings
from memlab.explain.categories import Category
from memlab.explain.histories import Block
from memlab.explain.situation import Situation
from memlab.units import format_bytes

MOST_EVENTS = 400_000  # a replay of more takes longer than a reader waits
SCALED = ("activations", "logits", "inputs", "temporaries")  # grow with the batch
MIB = 2**20

Change = Callable[[Block], tuple[int, int]]  # a block's bytes and when it dies, with a remedy


@dataclass(frozen=True)
class Outcome:
    """The result of a replay up to the explained moment."""

    name: str
    cause: str  # the cause that it is a remedy for; "" for the recorded settings
    fits: bool
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    failed_at: int | None  # position of the refused request

    def against(self, base: "Outcome") -> str:
        """Say what the remedy changes."""
        if not base.fits and self.fits:
            return f"fits, {format_bytes(self.reserved_peak_bytes)} reserved at most"
        allocated = base.allocated_peak_bytes - self.allocated_peak_bytes
        reserved = base.reserved_peak_bytes - self.reserved_peak_bytes
        saved, of = (
            (reserved, "reserved") if self.cause == "fragmentation" else (allocated, "allocated")
        )
        change = f"saves {format_bytes(saved)} of what is {of}" if saved > 0 else "saves nothing"
        return f"still runs out of memory, {change}" if not base.fits else change


@dataclass(frozen=True)
class Replays:
    """The replay with the recorded settings, and one for each remedy."""

    base: Outcome
    remedies: tuple[Outcome, ...]
    reproduces: bool  # whether the replay with the recorded settings fails as the history did
    room_bytes: int | None  # what this process could reserve; None if the history does not say


def replays(situation: Situation, on_remedy: Callable[[str], object] = str) -> Replays | None:
    """Replay the history with each remedy. Return None if the history is too long.

    `on_remedy` is called with the name of each remedy before it is replayed.
    """
    history = situation.history
    if not history.blocks or history.length > MOST_EVENTS:
        return None
    room = _room(situation)
    settings = _settings(situation, room)
    base = _replay(situation, "as recorded", "", settings)
    found = []
    for name, cause, variant, how in _variants(situation, settings):
        on_remedy(name)
        found.append(_replay(situation, name, cause, variant, **how))
    failed = history.refusal is not None
    return Replays(base, tuple(found), base.fits != failed, room)


def _room(s: Situation) -> int | None:
    if s.history.refusal is None:
        return s.total_bytes
    free = s.device_free if s.device_free is not None else 0
    return s.reserved_bytes + free if s.history.has_segments else None


def _settings(s: Situation, room: int | None) -> Settings:
    """Return the recorded settings, with as much memory as the process had."""
    try:
        stated = stated_settings(s.history.settings)
    except (ValueError, AttributeError, TypeError):
        stated = {}
    stated.pop("memory_fraction", None)
    if room is None:
        stated.pop("garbage_collection_threshold", None)
    if any(span.expandable for span in s.history.spans):
        stated["expandable_segments"] = True
    return Settings(capacity_bytes=room, **stated)


def _variants(s: Situation, base: Settings) -> list[tuple[str, str, Settings, dict[str, Any]]]:
    """Return (name, cause, settings, further arguments) of each remedy."""
    found: list[tuple[str, str, Settings, dict[str, Any]]] = []
    if not base.expandable_segments:
        expandable = replace(base, expandable_segments=True, max_split_size_bytes=None)
        found.append(("expandable_segments:True", "fragmentation", expandable, {}))
        split = replace(base, max_split_size_bytes=128 * MIB)
        found.append(("max_split_size_mb:128", "fragmentation", split, {}))
    if base.capacity_bytes is not None and base.garbage_collection_threshold is None:
        collects = replace(base, garbage_collection_threshold=0.8)
        found.append(("garbage_collection_threshold:0.8", "fragmentation", collects, {}))
    if s.loop:
        empties = {"empty_before": frozenset(s.loop.starts)}
        found.append(("empty_cache() before each step", "fragmentation", base, empties))
    found.append(("half the batch", "batch", base, {"change": _halved(s)}))
    return found + _freed_earlier(s, base)


def _freed_earlier(s: Situation, base: Settings) -> list[tuple[str, str, Settings, dict]]:
    found = []
    if s.leaks:
        leaked = set(s.leaked_blocks)
        words = "free tensors of earlier steps"
        found.append((words, "kept-graphs", base, {"change": _freed(s, leaked)}))
    if not s.trains_now and (s.evaluation or s.trained_before) and s.activations:
        words = "no_grad in the evaluation"
        change = _soon_freed(s, set(s.activations) | set(s.leaked_blocks))
        found.append((words, "no-grad", base, {"change": change}))
    if s.layers >= 2 and not s.recomputes:
        change = _checkpointed(s)
        found.append(("checkpoint every layer", "no-checkpointing", base, {"change": change}))
    if s.by_category.get("optimizer_state") or s.phase == "optimizer":
        change = _shrunk(s, "optimizer_state", 4)
        found.append(("8-bit optimizer state", "optimizer-state", base, {"change": change}))
    if s.held("logits"):
        change = _shrunk(s, "logits", 8)
        found.append(("the loss in 8 chunks", "logits", base, {"change": change}))
    if s.score_blocks:
        blocks = set(s.score_blocks)
        change = _without(blocks | {b for b in s.history.blocks if b.bytes in _sizes(blocks)})
        found.append(("attention without stored scores", "sequence", base, {"change": change}))
    return found


def _sizes(blocks: set[Block]) -> set[int]:
    return {block.bytes for block in blocks}


# ------------------------------------------------------------------ what a remedy does to a block


def _unchanged(block: Block) -> tuple[int, int]:
    return block.bytes, block.died


def _halved(s: Situation) -> Change:
    return _shrunk(s, SCALED, 2)


def _shrunk(s: Situation, names: str | tuple[str, ...], factor: int) -> Change:
    wanted = (names,) if isinstance(names, str) else names

    def change(block: Block) -> tuple[int, int]:
        scaled = s.categories.name(block) in wanted
        return (max(1, block.bytes // factor) if scaled else block.bytes), block.died

    return change


def _without(blocks: set[Block]) -> Change:
    return lambda block: (0 if block in blocks else block.bytes, block.died)


def _freed(s: Situation, blocks: set[Block]) -> Change:
    """Free blocks at the end of the step that made them."""
    starts = sorted({start for loop in s.loops for start in loop.starts})

    def change(block: Block) -> tuple[int, int]:
        later = (start for start in starts if start > block.born)
        return block.bytes, next(later, block.died) if block in blocks else block.died

    return change


def _soon_freed(s: Situation, blocks: set[Block]) -> Change:
    """Free blocks when the code has allocated a few more, as without gradients."""
    born = sorted(block.born for block in s.history.blocks if block.born)
    index_of = {position: number for number, position in enumerate(born)}

    def change(block: Block) -> tuple[int, int]:
        if block not in blocks:
            return block.bytes, block.died
        later = min(index_of[block.born] + 6, len(born) - 1)
        return block.bytes, min(block.died, max(born[later], block.born + 1))

    return change


def _checkpointed(s: Situation) -> Change:
    """Keep one block of a layer's input size per layer; free the rest when the layer ends.

    Recomputing needs one layer's activations again in backward.
    """
    groups = [g for g in s.layer_groups.values() if len(g) >= 2]
    inputs = max(
        (g for g in groups if g[0].bytes == s.layer_bytes),
        key=len,
        default=groups[0] if groups else [],
    )
    kept = set(inputs)
    dropped = {block for group in groups for block in group} - kept
    last = max((block.born for block in dropped), default=0)
    length = (last - min((b.born for b in dropped), default=0)) / max(2.0, s.layers)

    def change(block: Block) -> tuple[int, int]:
        if block not in dropped or block.born > last - length:
            return block.bytes, block.died
        return block.bytes, min(block.died, block.born + max(1, int(length)))

    return change


# ------------------------------------------------------------------ the replay


def _replay(
    s: Situation,
    name: str,
    cause: str,
    settings: Settings,
    *,
    change: Change = _unchanged,
    empty_before: frozenset[int] = frozenset(),
) -> Outcome:
    """Serve the history's requests up to the moment, and the refused one."""
    allocator = Allocator(settings)
    held: dict[Block | None, MemoryBlock] = {}
    failed_at = None
    for position, actions in _schedule(s, change):
        if position in empty_before:
            allocator.empty_cache()
        if not _serve(allocator, actions, held):
            failed_at = position
            break
    return Outcome(
        name,
        cause,
        failed_at is None,
        allocator.allocated_peak_bytes,
        allocator.reserved_peak_bytes,
        failed_at,
    )


Action = tuple[Block | None, int]  # a block to allocate with its bytes, or to free with 0


def _schedule(s: Situation, change: Change) -> list[tuple[int, list[Action]]]:
    """Return what happens at each position: frees first, as at the end of a step."""
    frees: dict[int, list[Action]] = {}
    requests: dict[int, list[Action]] = {}
    for block in s.history.blocks:
        if block.born > s.moment:
            continue
        size, died = change(block)
        if not size:
            continue
        requests.setdefault(block.born, []).append((block, size))
        if died <= s.moment:
            frees.setdefault(max(died, block.born + 1), []).append((block, 0))
    if s.history.refusal:
        size, _ = change(_refused(s))
        requests.setdefault(s.moment, []).append((None, size))
    positions = sorted(frees.keys() | requests.keys())
    return [(p, frees.get(p, []) + requests.get(p, [])) for p in positions]


def _refused(s: Situation) -> Block:
    """Return the refused request as a block with the category that it would have had."""
    block = Block(-1, s.request_bytes, 0, s.moment, s.stack)
    s.categories.of[block] = Category(s.request_category)
    return block


def _serve(
    allocator: Allocator, actions: list[Action], held: dict[Block | None, MemoryBlock]
) -> bool:
    """Serve the actions. Return whether every request was served. `held` has the blocks in use."""
    for block, size in actions:
        if size:
            served = allocator.malloc(size, block.stream if block else 0)
            if served is None:
                return False
            held[block] = served
        elif block in held:
            allocator.free(held.pop(block))
    return True


def outcome_for(found: Replays | None, cause: str) -> Mapping[str, Outcome]:
    """Return the outcomes of a cause's remedies by their name."""
    return {o.name: o for o in found.remedies if o.cause == cause} if found else {}
