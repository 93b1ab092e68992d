"""Traces extrapolated from shallow models equal the deep models' own traces."""

import re
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quick import quick

from memlab.allocator import simulate
from memlab.checkpointing import uniform_schedule
from memlab.model import PRESETS
from memlab.planner.repetition import (
    Insertion,
    NotRepeating,
    extrapolate,
    insertions,
    sort_frees_by_age,
)
from memlab.trace import Event, Trace
from memlab.train import (
    COMBINATIONS,
    TECHNIQUES,
    Plugs,
    Setting,
    combined,
    dry_trace,
    predicted_trace,
)
from memlab.train.plugs import scheduled

FEWER, MORE, DEEP = 3, 4, 7

SEGMENTS_OF_ROOT = "sqrt-checkpointing"  # ⌊√L⌋ segments, so blocks differ
HASHED = "checkpointing+autocast"  # frees in the order of a hash table

QUICK = [("cuda", "plain"), ("cuda", HASHED), ("cpu", "streamed-layers")]
TOGETHER = ("foreach-adamw+accumulation", "selective-checkpointing+flash-attention+adam8bit")
ROWS = [name for name in (*TECHNIQUES, *COMBINATIONS, *TOGETHER) if name != SEGMENTS_OF_ROOT]
ALL = [(device, name) for device in ("cuda", "cpu") for name in ROWS]
CASES = quick(QUICK, ALL)


@cache
def run(device: str, names: str, blocks: int) -> Trace:
    trace = dry_trace if device == "cpu" else predicted_trace
    config = replace(PRESETS["tiny"], layers=blocks)
    return trace(Setting(config, 2, 8, torch.float32, device), combined(names))


def numbered_by_age(trace: Trace) -> list[Event]:
    """Return all events, with storages numbered in the order of their first event."""
    numbers: dict[int, int] = {0: 0, -1: -1, -2: -2}  # not storages

    def renumbered(event: Event) -> Event:
        return event._replace(storage=numbers.setdefault(event.storage, len(numbers)))

    return [renumbered(event) for event in (*trace.history, *trace.events)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("device", "names"), CASES)
def test_an_extrapolated_trace_equals_the_deep_models(device, names):
    made = extrapolate(run(device, names, FEWER), run(device, names, MORE), MORE, DEEP)
    whole = run(device, names, DEEP)
    in_order = sort_frees_by_age if names == HASHED else (lambda trace: trace)
    assert numbered_by_age(in_order(made)) == numbered_by_age(in_order(whole))
    assert len(made.history) == len(whole.history)
    assert replace(made, events=(), history=()) == replace(whole, events=(), history=())
    assert (made.peak_bytes, made.at_peak) == (whole.peak_bytes, whole.at_peak)


def test_blocks_checkpointed_in_pairs_are_extrapolated_by_pairs():
    technique = Plugs(change_model=scheduled(partial(uniform_schedule, every=2)))

    def run(blocks: int) -> Trace:
        return dry_trace(Setting(replace(PRESETS["tiny"], layers=blocks), 1, 8), technique)

    made = extrapolate(run(5), run(7), 7, 11, unit=2)
    assert numbered_by_age(made) == numbered_by_age(run(11))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_segments_that_change_with_the_depth_are_refused(device):
    fewer, more = (run(device, SEGMENTS_OF_ROOT, blocks) for blocks in (FEWER, MORE))
    with pytest.raises(NotRepeating):
        extrapolate(fewer, more, MORE, DEEP)


def test_adding_no_block_returns_the_deeper_trace():
    fewer, more = run("cpu", "plain", FEWER), run("cpu", "plain", MORE)
    assert numbered_by_age(extrapolate(fewer, more, MORE, MORE)) == numbered_by_age(more)


@pytest.mark.parametrize(("blocks", "unit"), [(3, 1), (7, 2)])
def test_a_depth_that_cannot_be_reached_is_an_error(blocks, unit):
    fewer, more = run("cpu", "plain", FEWER), run("cpu", "plain", MORE)
    with pytest.raises(
        ValueError,
        match=f"got {blocks} blocks; these traces give 4 blocks plus a multiple of {unit}",
    ):
        extrapolate(fewer, more, MORE, blocks, unit=unit)


def test_sorting_frees_by_age_does_not_change_the_allocators_blocks():
    trace = run("cuda", HASHED, MORE)
    by_age = sort_frees_by_age(trace)
    assert by_age.events != trace.events
    assert sorted(by_age.events) == sorted(trace.events)
    assert simulate(by_age).reserved_bytes == simulate(trace).reserved_bytes
    assert (by_age.peak_bytes, by_age.at_peak) == (trace.peak_bytes, trace.at_peak)


# ------------------------------------------------------------------ errors


def altered(trace: Trace, position: int, **changes: object) -> Trace:
    event = trace.events[position]._replace(**changes)
    return replace(trace, events=(*trace.events[:position], event, *trace.events[position + 1 :]))


def frees(trace: Trace) -> list[int]:
    return [position for position, event in enumerate(trace.events) if event.bytes < 0]


@pytest.mark.parametrize("which", range(0, 300, 37))
def test_bytes_in_only_one_block_are_refused(which):
    fewer, more = run("cpu", "plain", FEWER), run("cpu", "plain", MORE)
    position = frees(more)[which]
    other = altered(more, position, bytes=more.events[position].bytes + 4)
    with pytest.raises(NotRepeating):
        extrapolate(fewer, other, MORE, DEEP)


@pytest.mark.slow
def test_frees_swapped_in_one_trace_are_refused_unless_consecutive():
    fewer, more = run("cpu", "plain", FEWER), run("cpu", "plain", MORE)
    expected = numbered_by_age(sort_frees_by_age(run("cpu", "plain", DEEP)))
    alike: dict[Event, list[int]] = {}
    for position in frees(more):
        event = more.events[position]
        kind = event._replace(storage=0, module=re.sub(r"[0-9]", "*", event.module))
        alike.setdefault(kind, []).append(position)
    pairs = [pair for positions in alike.values() for pair in pairwise(positions)]
    refused = 0
    for one, other in pairs:
        swapped = altered(more, one, storage=more.events[other].storage)
        swapped = altered(swapped, other, storage=more.events[one].storage)
        try:
            made = extrapolate(fewer, swapped, MORE, DEEP)
        except NotRepeating:
            refused += 1
        else:
            assert numbered_by_age(made) == expected
    assert len(pairs) > 200
    assert refused > 0.8 * len(pairs)


def test_a_block_with_an_additional_event_is_refused():
    fewer, more = run("cpu", "plain", FEWER), run("cpu", "plain", MORE)
    position = len(more.events) // 2
    extra = more.events[position]._replace(storage=10**9, bytes=12)
    events = (*more.events[:position], extra, *more.events[position:])
    with pytest.raises(NotRepeating):
        extrapolate(fewer, replace(more, events=events), MORE, DEEP)


@pytest.mark.parametrize("change", [{"device": "cuda"}, {"dry": False}, {"notes": ("another",)}])
def test_traces_of_different_runs_are_refused(change):
    fewer, more = run("cpu", "plain", FEWER), run("cpu", "plain", MORE)
    with pytest.raises(NotRepeating, match="different devices or notes"):
        extrapolate(fewer, replace(more, **change), MORE, DEEP)


def event(count: int, storage: int, operator: str, module: str = "") -> Event:
    return Event(count, storage, "activations", operator, module, "forward", "uint8", (1,))


def test_a_storage_that_each_block_shrinks_is_refused():
    def shrinking(blocks: int) -> Trace:
        return Trace((event(100, 1, "made"), *[event(-10, 1, "shrunk")] * blocks))

    with pytest.raises(NotRepeating, match="other bytes"):
        extrapolate(shrinking(3), shrinking(4), 4, 5)


def test_ambiguous_rules_are_refused():
    def shrinking(targets: tuple[int, ...]) -> Trace:
        made = [event(9, 10 + i, "made") for i in range(len(targets))]
        return Trace((*made, event(1, 5, "between"), *[event(-1, 10 + i, "") for i in targets]))

    # Either all but the first shrink one storage, or all but the last their own.
    with pytest.raises(NotRepeating, match="two rules"):
        extrapolate(shrinking((0, 1)), shrinking((0, 1, 1)), 3, 9)


def test_the_three_rules_are_distinguished():
    def three_ways(blocks: int) -> Trace:
        """Use a storage within each block, one freed in backward, and one that all blocks free."""
        numbers = range(blocks)
        made = [event(8, 10 + i, "kept", f"blocks.{i}") for i in numbers]
        own = [event(c, 100 + i, "own", f"blocks.{i}") for i in numbers for c in (4, -4)]
        mirrored = [event(-8, 10 + i, "kept", f"blocks.{i}") for i in reversed(numbers)]
        return Trace((*made, *own, event(1, 5, "between"), *mirrored))

    made = extrapolate(three_ways(3), three_ways(4), 4, 20)
    assert numbered_by_age(made) == numbered_by_age(three_ways(20))
    assert [e.module for e in made.events] == [e.module for e in three_ways(20).events]


# ------------------------------------------------------------------ finding inserted copies


def test_insertions_are_found_after_the_copies_that_they_repeat():
    short, long = np.array([*b"hABABfxyxyt"]), np.array([*b"hABABABfxyxyxyt"])
    assert insertions(short, long) == [Insertion(5, 2), Insertion(10, 2)]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (b"hABABt", b"hABABCDt"),  # new and not repeated
        (b"hABCDt", b"hABCDAXCDt"),  # almost a repetition
        (b"hABABt", b"hABABAt"),  # part of a repetition
        (b"hABABt", b"hABAt"),  # shorter
        (b"hABABt", b"hABABABu"),  # another end
        (b"hABABt", b"hABABAB"),  # no end
    ],
)
def test_other_differences_are_refused(short, long):
    with pytest.raises(NotRepeating, match="without a repetition"):
        insertions(np.array([*short]), np.array([*long]))


letters = st.text("abc", max_size=6)
groups = st.lists(st.tuples(letters, st.text("abc", min_size=1, max_size=8)), max_size=4)


@given(groups, letters)
def test_inserting_the_copies_gives_the_longer_sequence(parts, end):
    def text(copies: int) -> str:
        # The mark keeps one group's copies from continuing into the next group.
        marked = (before + str(i) + copy * copies for i, (before, copy) in enumerate(parts))
        return "".join(marked) + "." + end

    short, long = text(3), text(4)
    made, done = "", 0
    for position, length in insertions(
        *(np.array([*map(ord, t)], dtype=int) for t in (short, long))
    ):
        made += short[done:position]
        made += made[len(made) - length :]
        done = position
    assert made + short[done:] == long
