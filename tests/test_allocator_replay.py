"""Replays of recorded histories: agreement scores in full, and differences are named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.allocator import Allocator, Score, Settings, history, recording, replay
from memlab.allocator.recorded_settings import stated_settings
from memlab.trace import Event

MIB, GIB = 2**20, 2**30
PLAIN = Settings()


def record(settings: Settings = PLAIN, *, place=None) -> "Recorder":
    return Recorder(settings, place)


class Recorder:
    """An allocator that keeps its history, driven by hand."""

    def __init__(self, settings: Settings, place) -> None:
        self.allocator = Allocator(settings, keeps_history=True, place=place)

    def take(self, *sizes: int, stream: int = 0):
        blocks = [self.allocator.malloc(size, stream) for size in sizes]
        assert None not in blocks
        return blocks

    def drop(self, *blocks) -> None:
        for block in blocks:
            self.allocator.free(block)

    @property
    def recording(self) -> dict:
        return json.loads(json.dumps(recording(self.allocator)))


def a_step(settings: Settings = PLAIN) -> Recorder:
    """Small and large blocks, split, merged and partly wasted, on two streams; an emptied cache."""
    step = record(settings)
    weights = step.take(3 * MIB, 5 * MIB, 19 * MIB, 700, 300)
    for _ in range(3):
        activations = step.take(4 * MIB, 2 * MIB, 30 * MIB, 10_000, 512)
        others = step.take(6 * MIB, 1000, stream=1)
        step.drop(*activations[::2], *others, *activations[1::2])
    step.drop(weights[1])
    step.allocator.empty_cache()
    step.take(7 * MIB, 25 * MIB, 4 * MIB + 1)
    return step


def without_start(recorded: dict, events: int) -> dict:
    """Return the same history recorded from a later event on."""
    return {**recorded, "events": recorded["events"][events:]}


# ------------------------------------------------------------------ agreement


def test_a_simulated_history_replays_exactly():
    result = replay(a_step().recording)
    assert result.exact
    assert result.misses == ()
    assert result.decisions == result.addresses == Score(29, 29)
    assert result.segment_sizes.right == result.segment_sizes.all > 5
    assert result.releases == Score(1, 1)
    assert result.recorded_reserved_bytes == result.reserved_bytes


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        Settings(max_split_size_bytes=20 * MIB),
        Settings(roundup_power2_divisions=4),
        Settings(large_segment_bytes=12 * MIB),
        Settings(expandable_segments=True),
    ],
)
def test_the_start_of_a_history_is_reconstructed_from_its_end(settings):
    recorded = a_step(settings).recording
    for events in range(len(recorded["events"]) + 1):
        if not inside_a_request(recorded, events):
            result = replay(without_start(recorded, events), settings)
            assert result.misses == (), events
            assert result.exact, events


def inside_a_request(recorded: dict, events: int) -> bool:
    """Whether a cut there would separate an allocation from its new memory, or split a release."""
    actions = [event["action"] for event in recorded["events"]]
    before, after = actions[:events][-1:], actions[events : events + 1]
    parted = {"segment_alloc", "segment_map", "segment_free", "segment_unmap"}
    return bool(before and before[0] in parted and after)


def test_an_oversize_block_spans_its_segment_from_the_start():
    settings = Settings(max_split_size_bytes=64 * MIB)
    step = record(settings)
    step.drop(*step.take(82 * MIB))
    (block,) = step.take(64 * MIB)  # out of 82
    events = len(step.allocator.history)
    step.take(18 * MIB)
    step.drop(block)
    step.take(80 * MIB)
    assert replay(without_start(step.recording, events), settings).exact


@pytest.mark.parametrize("is_free", [False, True])
def test_waste_from_before_the_history_is_reconstructed(is_free):
    step = record()
    step.drop(*step.take(24 * MIB))
    lower, upper = step.take(12 * MIB, 12 * MIB)
    step.drop(lower)
    (wasteful,) = step.take(23 * MIB // 2)  # out of the lower 12
    if is_free:
        step.drop(upper)
    events = len(step.allocator.history)
    if not is_free:
        step.drop(upper)
    step.take(3 * MIB)  # at the start of the upper 12, not half a MiB below
    step.drop(wasteful)
    result = replay(without_start(step.recording, events))
    assert result.misses == ()
    assert result.exact


def test_waste_between_two_blocks_is_not_reused():
    step = record()
    step.drop(*step.take(24 * MIB))
    lower, upper = step.take(12 * MIB, 12 * MIB)
    step.drop(lower)
    (wasteful,) = step.take(23 * MIB // 2)  # out of the lower 12
    (larger,) = step.take(14 * MIB)
    events = len(step.allocator.history)
    step.drop(larger, upper)
    step.take(49 * MIB // 4)  # more than the upper 12, less than with half a MiB below
    step.drop(wasteful)
    assert replay(without_start(step.recording, events)).misses == ()


def test_blocks_that_wait_for_a_stream_at_the_start_are_reconstructed():
    step = record()
    waiting, going = step.take(3 * MIB, 2 * MIB)
    step.allocator.request_free(waiting)
    step.allocator.request_free(going)
    events = len(step.allocator.history)
    step.take(3 * MIB)
    step.allocator.complete_free(waiting)
    step.take(3 * MIB)
    assert replay(without_start(step.recording, events)).exact


def test_a_refusal_of_the_driver_is_inferred_from_the_history():
    step = record(Settings(capacity_bytes=50 * MIB))
    step.drop(*step.take(30 * MIB, 12 * MIB))
    step.take(40 * MIB)
    assert step.allocator.retries == 1
    result = replay(step.recording)  # with an unlimited driver
    assert result.exact
    assert result.releases == Score(1, 1)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(capacity_bytes=120 * MIB),
        Settings(capacity_bytes=200 * MIB, garbage_collection_threshold=0.4),
        Settings(capacity_bytes=120 * MIB, max_split_size_bytes=40 * MIB),
        Settings(capacity_bytes=120 * MIB, expandable_segments=True),
    ],
)
def test_releases_by_the_allocator_itself_are_scored(settings):
    step = record(settings)
    for size in (45, 50, 42, 60, 30, 62):
        step.drop(*step.take(size * MIB))
        step.take(MIB * size // 20, stream=1)
    result = replay(step.recording, settings)
    assert result.exact
    assert result.releases.all >= 1


def test_torchs_own_snapshot_format_is_accepted():
    step = a_step()
    mine = step.recording
    blocks = [block for segment in mine["segments_at_end"] for block in segment["blocks"]]
    for block in blocks:
        del block["address"]  # as in older versions
    snapshot = {
        "device_traces": [[*mine["events"], {"action": "snapshot", "addr": 0}], []],
        "segments": mine["segments_at_end"],
    }
    assert replay(snapshot).exact


def test_a_trace_becomes_a_history():
    event = Event(5 * MIB, 1, "gradients", "", "", "backward", "uint8", ())
    recorded = history([event, event._replace(bytes=-5 * MIB)])
    assert [entry["action"] for entry in recorded["events"]] == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
    ]
    start = recorded["events"][0]["addr"]
    assert recorded["segments_at_end"][0]["blocks"] == [
        {"address": start, "size": 20 * MIB, "requested_size": 0, "state": "inactive"}
    ]
    assert replay(recorded).exact


def test_an_allocator_without_a_history_cannot_be_recorded():
    with pytest.raises(ValueError, match="keeps_history=True"):
        recording(Allocator())


@given(
    st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(0, 1)), max_size=25),
    st.sampled_from(
        [
            PLAIN,
            Settings(max_split_size_bytes=20 * MIB),
            Settings(roundup_power2_divisions=8),
            Settings(expandable_segments=True),
        ]
    ),
    st.randoms(use_true_random=False),
)
def test_every_simulated_history_replays_exactly_at_any_addresses(requests, settings, random):
    places = list(range(1, 200))
    random.shuffle(places)
    following = iter(places)
    step = record(settings, place=lambda size: next(following) * 2**51)
    alive = []
    for size, stream in requests:
        alive += step.take(size, stream=stream)
        while alive and random.random() < 0.4:
            step.drop(alive.pop(random.randrange(len(alive))))
        if random.random() < 0.1:
            step.allocator.empty_cache()
    assert replay(step.recording, settings).misses == ()


# ------------------------------------------------------------------ differences


def test_another_address_is_a_miss():
    recorded = record(place=lambda size: 0)
    first, second, _ = recorded.take(MIB, 512 * 1024, 512 * 1024)
    recorded.drop(first, second)
    recorded.take(MIB)
    plain = recorded.recording
    events = plain["events"]
    assert events[-1]["addr"] == first.address
    events[-1]["addr"] += 512 * 1024
    at_end = plain["segments_at_end"][0]["blocks"]
    at_end[0]["size"], at_end[1]["size"] = at_end[1]["size"], at_end[0]["size"]
    at_end[0]["state"], at_end[1]["state"] = at_end[1]["state"], at_end[0]["state"]
    at_end[1]["address"] = events[-1]["addr"]
    result = replay(plain)
    assert not result.exact
    assert result.addresses == Score(3, 4)
    assert result.decisions == Score(4, 4)
    assert result.blocks_at_end.right < result.blocks_at_end.all
    assert result.misses == ("event 8, 1.00 MiB on stream 0: 0x80000 in the recording, 0x0 here",)


def test_a_segment_of_another_size_is_a_miss():
    step = record()
    step.take(30 * MIB)
    recorded = step.recording
    recorded["events"][0]["size"] = recorded["segments_at_end"][0]["total_size"] = 32 * MIB
    result = replay(recorded)
    assert result.segment_sizes == Score(0, 1)
    assert result.decisions == Score(1, 1)
    assert result.recorded_reserved_bytes == 32 * MIB
    assert result.reserved_bytes == 30 * MIB
    assert "new memory of 32.00 MiB in the recording, new memory of 30.00 MiB" in result.misses[0]
    assert not result.exact


def test_a_new_segment_instead_of_a_cached_block_is_a_miss():
    lavish = record()
    (block,) = lavish.take(12 * MIB)
    lavish.allocator.request_free(block)
    lavish.take(12 * MIB)
    lavish.allocator.complete_free(block)
    recorded = lavish.recording
    recorded["events"].insert(3, recorded["events"].pop())  # freed before it is taken again
    result = replay(recorded)
    assert result.decisions == Score(1, 2)
    assert "new memory of 12.00 MiB in the recording, a cached block here" in result.misses[0]


def test_memory_that_is_not_released_is_a_miss():
    step = record()
    step.drop(*step.take(30 * MIB, 40 * MIB))
    for (_, size), block in step.allocator.releasable().items():
        if size == 30 * MIB:
            step.allocator.release(block)
    result = replay(step.recording)
    assert result.releases == Score(0, 1)
    assert result.misses[0].endswith("1 range in the recording, 2 ranges, 1 equal here")


OTHERS = [
    Settings(large_segment_bytes=12 * MIB),
    Settings(roundup_power2_divisions=2),
    Settings(max_split_size_bytes=24 * MIB),
    Settings(expandable_segments=True),
]


def as_in_old_versions(recorded: dict) -> dict:
    """Return a recording that does not state its settings."""
    return {name: value for name, value in recorded.items() if name != "allocator_settings"}


@pytest.mark.parametrize("others", OTHERS[:2])
def test_a_history_of_other_settings_is_not_exact(others):
    recorded = as_in_old_versions(a_step(others).recording)
    assert not replay(recorded).exact
    assert replay(recorded, others).exact


@pytest.mark.parametrize("settings", OTHERS)
def test_settings_stated_in_a_recording_are_used(settings):
    recorded = a_step(settings).recording
    assert replay(recorded).exact
    assert replay(recorded, settings).exact


def test_torchs_names_for_settings_are_accepted():
    snapshot = {  # in the format of torch.cuda.memory._snapshot()
        "PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:24,pinned_num_register_threads:1",
        "max_split_size": 128 * MIB,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "roundup_power2_divisions": {str(2**power): 4 * (power > 8) for power in range(16)},
    }
    assert stated_settings(snapshot) == {
        "large_segment_bytes": 24 * MIB,
        "max_split_size_bytes": 128 * MIB,
        "garbage_collection_threshold": None,
        "expandable_segments": False,
        "roundup_power2_divisions": (0,) * 9 + (4,) * 7,
    }
    unset = {"max_split_size": -1, "roundup_power2_divisions": {str(2**n): 0 for n in range(16)}}
    assert set(stated_settings(unset).values()) == {None}


def test_expandable_segments_are_inferred_from_the_events():
    recorded = as_in_old_versions(a_step(Settings(expandable_segments=True)).recording)
    assert replay(recorded).exact


@pytest.mark.parametrize("forget", [dict, as_in_old_versions])
def test_expandable_segments_contradict_a_recording_without_them(forget):
    plain = forget(a_step().recording)
    with pytest.raises(ValueError, match="made with expandable_segments=False, but expandable_"):
        replay(plain, Settings(expandable_segments=True))


def test_settings_that_contradict_the_recording_are_an_error():
    recorded = a_step(Settings(max_split_size_bytes=24 * MIB)).recording
    with pytest.raises(ValueError, match="made with max_split_size_bytes=25165824, but max_spl"):
        replay(recorded, max_split_size_bytes=48 * MIB)


def test_a_fraction_of_the_device_needs_no_capacity_in_a_replay():
    settings = Settings(garbage_collection_threshold=0.5, capacity_bytes=1 * GIB)
    recorded = a_step(settings).recording
    assert recorded["allocator_settings"]["garbage_collection_threshold"] == 0.5
    assert replay(recorded).exact
    assert replay(recorded, capacity_bytes=1 * GIB).exact


def test_a_recording_with_both_kinds_of_segments_is_an_error():
    recorded = a_step().recording
    recorded["events"].append({"action": "segment_map", "addr": 0, "size": 20 * MIB, "stream": 0})
    with pytest.raises(ValueError, match="both ordinary and expandable segments"):
        replay(recorded)


def test_a_history_with_a_gap_is_an_error():
    recorded = a_step().recording
    del recorded["segments_at_end"][0]
    with pytest.raises(ValueError, match="without a gap"):
        replay(recorded)


def test_a_history_that_does_not_fit_the_device_is_an_error():
    with pytest.raises(ValueError, match="capacity of the device that recorded it"):
        replay(a_step().recording, capacity_bytes=40 * MIB)


def test_a_score_prints_a_percentage():
    assert str(Score(1, 3)) == "1 of 3 (33.33%)"
    assert Score(0, 0).share == 1
