"""A Trace's properties against naive computations from its events."""

import json
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.trace import CATEGORIES, PHASES, DeviceMemory, Event, Trace

FLOAT32 = 4


def event(count, storage, category="activations", **fields):
    """Return an event on a float32 vector, with defaults for unspecified fields."""
    plain = {"operator": "aten.mm", "module": "", "phase": "forward", "dtype": "float32"}
    plain["shape"] = (abs(count) // FLOAT32,)
    return Event(count, storage, category, **{**plain, **fields})


def trace(*events, **fields):
    return Trace(tuple(events), **fields)


@st.composite
def traces(draw, storages=range(4)):
    """Draw a trace: each storage is allocated, perhaps resized, and perhaps freed."""
    born, alive_bytes, events = {}, Counter(), []
    for number in draw(st.lists(st.sampled_from(storages), max_size=10)):
        if number in born:
            wanted = draw(st.sampled_from([0, 4, 400]))
        else:
            born[number] = draw(births(number))
            wanted = born[number].bytes
        events.append(born[number]._replace(bytes=wanted - alive_bytes[number]))
        alive_bytes[number] = wanted
    return trace(*events)


def births(storage):
    return st.builds(
        event,
        st.integers(1, 1000),
        st.just(storage),
        st.sampled_from(CATEGORIES),
        module=st.sampled_from(["", "head", "blocks.0", "blocks.0.mlp", "blocks.1.mlp"]),
        phase=st.sampled_from(PHASES),
    )


# ------------------------------------------------------------------ the peak


@given(traces())
def test_the_peak_is_the_largest_running_sum(step):
    assert step.peak_bytes == max(accumulate((e.bytes for e in step.events), initial=0))


@given(traces())
def test_the_peak_position_is_the_first_with_the_largest_sum(step):
    sums = list(accumulate((e.bytes for e in step.events), initial=0))
    assert step.peak_position == sums.index(max(sums))


@given(traces())
def test_the_categories_at_the_peak_sum_to_the_peak(step):
    assert sum(step.at_peak.values()) == step.peak_bytes


@given(traces())
def test_the_categories_at_the_end_sum_to_the_live_bytes(step):
    assert sum(step.at_end.values()) == step.live_bytes == sum(e.bytes for e in step.events)


@given(traces())
def test_a_category_at_the_peak_is_its_own_running_sum_there(step):
    before_peak = step.events[: step.peak_position]
    for category in CATEGORIES:
        count = sum(e.bytes for e in before_peak if e.category == category)
        assert step.at_peak.get(category, 0) == count


@given(traces())
def test_categories_with_bytes_come_in_order(step):
    assert list(step.at_peak) == [c for c in CATEGORIES if step.at_peak.get(c)]


@pytest.mark.parametrize("question", [lambda t: t.at_peak, lambda t: t.at_end, Trace.by_module])
def test_an_unknown_category_is_an_error(question):
    with pytest.raises(AssertionError, match=r"no category of a Trace: \{'parameter'\}"):
        question(trace(event(8, 1, "parameter")))  # misspelt


def test_the_peak_of_two_that_do_not_overlap_is_the_larger():
    step = trace(event(100, 1), event(-100, 1), event(60, 2))
    assert (step.peak_bytes, step.live_bytes) == (100, 60)


def test_the_peak_phase_is_the_phase_of_its_last_event():
    step = trace(
        event(8, 1, phase="forward"), event(8, 2, phase="backward"), event(-8, 1, phase="optimizer")
    )
    assert step.peak_phase == "backward"


def test_a_trace_without_events_has_no_bytes():
    step = trace()
    assert (step.peak_bytes, step.live_bytes, step.peak_phase) == (0, 0, "before")
    assert (step.at_peak, step.alive(), step.by_module()) == ({}, [], {})


# ------------------------------------------------------------------ live storages


@given(traces(), st.integers(0, 12))
def test_alive_lists_each_storage_with_its_bytes_after_so_many_events(step, position):
    sums = Counter()
    for e in step.events[:position]:
        sums[e.storage] += e.bytes
    assert {e.storage: e.bytes for e in step.alive(position)} == {
        s: b for s, b in sums.items() if b
    }


@given(traces())
def test_alive_starts_with_the_largest(step):
    sizes = [e.bytes for e in step.alive()]
    assert sizes == sorted(sizes, reverse=True)


def test_alive_describes_a_storages_first_event():
    step = trace(event(8, 1, phase="forward"), event(4, 1, phase="backward"))
    assert step.alive() == [event(12, 1, phase="forward", shape=(2,))]


def test_a_storage_that_shrank_to_nothing_can_grow_again():
    step = trace(event(8, 1), event(-8, 1), event(8, 1))
    assert step.alive() == [event(8, 1)]


@given(traces(), st.sampled_from([None, 0, 1, 2, 3]))
def test_the_modules_at_any_depth_sum_to_the_categories_at_the_peak(step, depth):
    sums = Counter()
    for categories in step.by_module(depth).values():
        sums.update(categories)
    assert sums == step.at_peak


@given(traces())
def test_the_largest_module_comes_first(step):
    sizes = [sum(categories.values()) for categories in step.by_module().values()]
    assert sizes == sorted(sizes, reverse=True)


def test_depth_sums_submodules():
    step = trace(
        event(4, 1, module="blocks.0.mlp.up"),
        event(8, 2, module="blocks.0.attention", category="parameters"),
        event(16, 3, module="blocks.1.mlp.up"),
        event(1, 4),
    )
    assert step.by_module(depth=2) == {
        "blocks.1": {"activations": 16},
        "blocks.0": {"parameters": 8, "activations": 4},
        "": {"activations": 1},
    }


# ------------------------------------------------------------------ differences


@given(traces())
def test_a_trace_does_not_differ_from_itself(step):
    difference = step.diff(step)
    assert not difference
    assert difference.rows == ()


@given(traces(), traces(storages=range(2, 6)))
def test_the_bytes_of_a_difference_are_the_change_in_live_bytes(first, second):
    assert first.diff(second).bytes == second.live_bytes - first.live_bytes


@given(traces(), traces(storages=range(2, 6)))
def test_a_difference_the_other_way_round_has_the_opposite_bytes(first, second):
    assert first.diff(second).bytes == -second.diff(first).bytes


def test_a_difference_shows_what_each_step_leaks():
    leaks = [event(400, n, module="loss", line="train.py:12") for n in range(4)]
    first, second = trace(*leaks[:2]), trace(*leaks)
    [(kind, count)] = first.diff(second).rows
    assert (kind.bytes, kind.module, kind.line, count) == (400, "loss", "train.py:12", 2)


def test_a_freed_and_recomputed_gradient_is_no_difference():
    first = trace(event(400, 1, "parameters"), event(400, 2, "gradients"))
    second = trace(*first.events, event(-400, 2, "gradients"), event(400, 3, "gradients"))
    assert not first.diff(second)


def test_a_larger_recomputed_gradient_is_one_more_and_one_fewer():
    first, second = trace(event(400, 1, "gradients")), trace(event(800, 2, "gradients"))
    rows = [(kind.bytes, count) for kind, count in first.diff(second).rows]
    assert rows == [(800, 1), (400, -1)]


def test_a_storage_with_another_description_in_the_second_trace_is_the_same():
    first = trace(event(400, 1, "gradients", operator="aten.mm", phase="backward"))
    second = trace(event(400, 1, "gradients", operator="", phase="before"))
    assert not first.diff(second)


def test_only_the_growth_of_a_storage_is_a_difference():
    first, second = trace(event(400, 1)), trace(event(400, 1), event(200, 1))
    [(kind, count)] = first.diff(second).rows
    assert (kind.bytes, count) == (200, 1)


def test_a_freed_storage_is_one_fewer():
    first, second = trace(event(400, 1)), trace(event(400, 1), event(-400, 1))
    [(kind, count)] = first.diff(second).rows
    assert (kind.bytes, count) == (400, -1)


def test_a_difference_starts_with_the_most_bytes():
    many_small = [event(100, n, module="small") for n in range(1, 6)]
    second = trace(event(300, 0, module="large"), *many_small)
    assert [kind.module for kind, _ in trace().diff(second).rows] == ["small", "large"]


# ------------------------------------------------------------------ JSON and text


@given(
    traces(),
    st.builds(DeviceMemory, *[st.none() | st.integers(0, 2**60)] * 3),
    st.lists(st.text(), max_size=2).map(tuple),
)
def test_a_trace_survives_a_round_trip_through_json(step, memory, notes):
    step = replace(step, device="cuda", dry=True, memory=memory, notes=notes)
    assert Trace.from_dict(json.loads(json.dumps(step.to_dict()))) == step


def test_lines_and_shapes_survive_json():
    step = trace(event(24, 1, shape=(2, 3), line="train.py:3"), event(4, 2, shape=()))
    assert Trace.from_dict(json.loads(json.dumps(step.to_dict()))) == step


def test_the_stream_survives_json():
    step = trace(event(24, 1)._replace(stream=3))
    assert Trace.from_dict(json.loads(json.dumps(step.to_dict()))) == step


def test_a_trace_without_streams_is_still_read():
    plain = trace(event(24, 1)).to_dict()
    plain["events"] = [row[:-1] for row in plain["events"]]
    assert Trace.from_dict(plain).events[0].stream == 0


def test_the_history_survives_json():
    step = replace(trace(event(4, 2)), history=(event(8, 1, shape=(2,)), event(-8, 1, shape=(2,))))
    assert Trace.from_dict(json.loads(json.dumps(step.to_dict()))) == step


def test_simulated_memory_is_labelled_as_simulated():
    memory = DeviceMemory(reserved_peak_bytes=2**21)
    step = trace(event(1024, 1), device="cuda", dry=True, memory=memory)
    assert "simulated allocator: reserved peak 2.00 MiB" in str(step)


def test_plain_data_includes_the_peak_and_categories():
    plain = trace(event(8, 1, "parameters"), event(4, 2), event(-4, 2)).to_dict()
    assert (plain["peak_bytes"], plain["live_bytes"]) == (12, 8)
    assert plain["at_peak"] == {"parameters": 8, "activations": 4}
    assert dict(zip(plain["fields"], plain["events"][0], strict=True)) == {
        **event(8, 1, "parameters")._asdict(),
        "shape": [2],
    }


def test_reserved_bytes_are_the_devices_report():
    assert trace(memory=DeviceMemory(reserved_peak_bytes=2**21)).reserved_bytes == 2**21
    assert trace().reserved_bytes is None


def test_a_trace_prints_peak_categories_device_and_notes():
    step = trace(
        event(3072, 1, "parameters"),
        event(1024, 2, phase="backward"),
        event(-1024, 2),
        device="cuda",
        memory=DeviceMemory(allocated_peak_bytes=2**21, used_bytes=0),
        notes=("the first step",),
    )
    assert str(step).splitlines() == [
        "peak 4.00 KiB in backward (cuda)",
        "  parameters                3.00 KiB  75.0%  " + "█" * 18,
        "  activations               1.00 KiB  25.0%  " + "█" * 6,
        "alive at the end 3.00 KiB",
        "device: allocated peak 2.00 MiB",
        "device: used 0 B",
        "note: the first step",
    ]


def test_a_dry_run_is_printed_as_such():
    assert str(trace(dry=True)).startswith("peak 0 B in before (cpu, dry run)")


def test_a_difference_prints_how_many_more_of_what():
    second = trace(*[event(1024, n, shape=(16, 16), line="train.py:3") for n in range(2)])
    assert str(trace().diff(second)).splitlines() == [
        "+2.00 KiB alive",
        "  +2 × 16×16 float32 = 2.00 KiB, activations: aten.mm train.py:3",
    ]


def test_a_difference_of_unknown_origin_ends_with_the_category():
    printed = str(trace().diff(trace(event(4, 1, "inputs", operator="", shape=()))))
    assert printed.endswith("+1 × scalar float32 = 4 B, inputs")


def test_an_empty_difference_prints_a_sentence():
    assert str(trace().diff(trace())) == "nothing more is alive than before"
