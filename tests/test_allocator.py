"""The allocator's rules: worked examples, and properties for all traces and settings."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.allocator import (
    Allocator,
    Segment,
    Settings,
    block_bytes,
    history,
    segment_bytes,
    segments,
    simulate,
)
from memlab.allocator.blocks import FREE, MemoryBlock
from memlab.trace import Event, Trace

KIB, MIB, GIB = 2**10, 2**20, 2**30


# ------------------------------------------------------------------ traces written by hand


class Tape:
    """Builds a trace: allocations and frees in the order of the calls."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sizes: list[int] = []

    def take(self, size: int, category: str = "activations") -> int:
        """Allocate a new storage and return its number."""
        self.sizes.append(0)
        return self.change(len(self.sizes) - 1, size, category)

    def drop(self, *storages: int) -> None:
        for storage in storages:
            self.change(storage, -self.sizes[storage])

    def change(self, storage: int, size: int, category: str = "activations") -> int:
        self.sizes[storage] += size
        event = Event(size, storage, category, "aten.empty", "", "forward", "uint8", ())
        self.events.append(event)
        return storage

    @property
    def trace(self) -> Trace:
        return Trace(tuple(self.events))


@pytest.fixture
def tape():
    return Tape()


def layout(found: Iterable[Segment]) -> list[list[tuple[int, str]]]:
    """Return the (bytes, state) of each segment's blocks."""
    return [[(piece.bytes, piece.state) for piece in segment.blocks] for segment in found]


def taken(allocator: Allocator, *sizes: int, stream: int = 0) -> list[MemoryBlock]:
    blocks = [allocator.malloc(size, stream) for size in sizes]
    assert None not in blocks
    return blocks


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("requested", "size"),
    [(1, 512), (512, 512), (513, 1024), (1024, 1024), (MIB + 1, MIB + 512)],
)
def test_a_request_is_rounded_up_to_512_bytes(requested, size):
    assert block_bytes(requested) == size


@pytest.mark.parametrize(
    ("requested", "divisions", "size"),
    [
        (1200 * KIB, 4, 1280 * KIB),  # the steps from 1 to 2 MiB are 256 KiB
        (1280 * KIB, 4, 1280 * KIB),
        (1281 * KIB, 4, 1536 * KIB),
        (1801 * KIB, 4, 2048 * KIB),
        (4 * MIB, 4, 4 * MIB),  # powers of two are unchanged
        (2048, 4, 2048),  # up to 512 B per division, divisions have no effect
        (2049, 4, 2560),
        (5 * MIB + 1, 1, 5 * MIB + 512),  # one division has no effect
        (5 * MIB + 1, 0, 5 * MIB + 512),
    ],
)
def test_with_divisions_a_request_is_rounded_to_steps_between_powers_of_two(
    requested, divisions, size
):
    assert block_bytes(requested, divisions) == size


@pytest.mark.parametrize(
    ("requested", "size"),
    [
        (520 * KIB, 576 * KIB),  # 8 divisions below 1 MiB, like from 1 to 2 MiB
        (MIB + 1, MIB + 128 * KIB),
        (2 * MIB + 1, 3 * MIB),  # 2 divisions from 2 to 4 MiB
        (40 * GIB - 1, 40 * GIB),  # 4 divisions from 32 GiB on
        (65 * GIB, 80 * GIB),
    ],
)
def test_divisions_may_differ_by_size(requested, size):
    assert block_bytes(requested, (8, 2, *[0] * 13, 4)) == size


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (GIB + 512, GIB + 2 * MIB),
    ],
)
def test_a_segment_has_2_mib_or_20_mib_or_the_request_rounded_to_2_mib(block, segment):
    assert segment_bytes(block) == segment


def test_the_20_mib_of_a_large_segment_can_be_set(tape):
    tape.take(5 * MIB)
    assert simulate(tape.trace, large_segment_bytes=12 * MIB).reserved_bytes == 12 * MIB


# ------------------------------------------------------------------ pools, fit, split, merge


def test_a_small_request_leaves_the_rest_of_its_segment_as_a_free_block(tape):
    tape.take(1000)
    blocks = simulate(tape.trace)
    assert (blocks.allocated_bytes, blocks.reserved_bytes) == (1024, 2 * MIB)
    assert layout(blocks.at_end) == [[(1024, "allocated"), (2 * MIB - 1024, "free")]]


def test_a_rest_of_512_bytes_of_a_small_block_is_split_off(tape):
    for size in (MIB, MIB - 512, 512):
        tape.take(size)
    assert layout(simulate(tape.trace).at_end) == [
        [(MIB, "allocated"), (MIB - 512, "allocated"), (512, "allocated")]
    ]


def test_a_rest_of_1_mib_of_a_large_block_is_wasted_and_a_larger_one_split_off(tape):
    tape.take(19 * MIB)
    tape.take(19 * MIB - 512)
    blocks = simulate(tape.trace)
    assert layout(blocks.at_end) == [
        [(19 * MIB - 512, "allocated"), (MIB + 512, "free")],
        [(20 * MIB, "allocated")],
    ]
    assert blocks.allocated_bytes == 39 * MIB - 512


def test_small_and_large_requests_never_share_a_segment(tape):
    tape.drop(tape.take(MIB))
    tape.take(MIB + 512)  # would fit into the free 2 MiB
    tape.drop(tape.take(512))
    tape.take(512)  # would fit after the large one
    blocks = simulate(tape.trace)
    assert [segment.pool for segment in blocks.at_end] == ["small", "large"]


def test_a_request_takes_the_smallest_free_block_that_is_large_enough():
    allocator = Allocator()
    twelve, fourteen, sixteen = taken(allocator, 12 * MIB, 14 * MIB, 16 * MIB)
    for block in (sixteen, twelve, fourteen):
        allocator.free(block)
    assert taken(allocator, 13 * MIB) == [fourteen]


def test_among_free_blocks_of_one_size_a_request_takes_the_lowest():
    allocator = Allocator()
    first, second, third = taken(allocator, *[12 * MIB] * 3)  # the third in a new range, below
    for block in (second, third, first):
        allocator.free(block)
    assert taken(allocator, *[12 * MIB] * 3) == [third, first, second]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_a_freed_block_merges_with_both_free_neighbours(tape, order):
    storages = [tape.take(512 * KIB) for _ in range(4)]
    tape.drop(*(storages[index] for index in order))
    assert layout(simulate(tape.trace).at_end) == [[(1536 * KIB, "free"), (512 * KIB, "allocated")]]


def test_adjacent_free_segments_do_not_merge(tape):
    tape.drop(tape.take(10 * MIB), tape.take(10 * MIB))
    tape.take(20 * MIB)
    assert simulate(tape.trace).reserved_bytes == 40 * MIB


def test_freed_memory_stays_reserved(tape):
    tape.drop(tape.take(30 * MIB))
    tape.take(512)
    blocks = simulate(tape.trace)
    assert list(blocks.allocated) == [30 * MIB, 0, 512]
    assert list(blocks.reserved) == [30 * MIB, 30 * MIB, 32 * MIB]
    assert list(blocks.largest_free) == [0, 30 * MIB, 30 * MIB]


def test_a_free_block_serves_only_its_own_stream():
    allocator = Allocator()
    (block,) = taken(allocator, 512, stream=7)
    allocator.free(block)
    taken(allocator, 512, stream=0)
    assert allocator.segment_allocations == 2
    taken(allocator, 512, stream=7)
    assert allocator.segment_allocations == 2


def test_a_block_in_use_by_another_stream_is_not_reused():
    allocator = Allocator()
    (block,) = taken(allocator, 12 * MIB)
    allocator.request_free(block)
    assert allocator.allocated_bytes == 0
    assert layout(segments(allocator)) == [[(12 * MIB, "awaiting")]]
    (other,) = taken(allocator, 12 * MIB)
    assert other is not block
    allocator.complete_free(block)
    assert taken(allocator, 12 * MIB) == [block]


def test_a_block_cannot_be_freed_twice():
    allocator = Allocator()
    (block,) = taken(allocator, 512)
    allocator.free(block)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)


# ------------------------------------------------------------------ releasing memory


def test_emptying_the_cache_releases_only_entirely_free_segments():
    allocator = Allocator()
    first, _, third = taken(allocator, MIB, MIB, 30 * MIB)
    allocator.free(first)
    allocator.free(third)
    allocator.empty_cache()
    assert layout(segments(allocator)) == [[(MIB, "free"), (MIB, "allocated")]]
    assert (allocator.reserved_bytes, allocator.segment_frees) == (2 * MIB, 1)


def test_emptying_the_cache_waits_for_the_streams():
    allocator = Allocator()
    (block,) = taken(allocator, 30 * MIB)
    allocator.request_free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_the_cache_can_be_emptied_before_an_event(tape):
    tape.drop(tape.take(30 * MIB))
    tape.take(32 * MIB)
    assert simulate(tape.trace).reserved_bytes == 62 * MIB
    blocks = simulate(tape.trace, empty_cache_before=[2])
    assert list(blocks.reserved) == [30 * MIB, 30 * MIB, 32 * MIB]
    assert blocks.retries == 0


def test_after_a_refusal_the_cache_is_emptied_and_the_driver_asked_again(tape):
    tape.drop(tape.take(30 * MIB), tape.take(12 * MIB))
    tape.take(40 * MIB)
    blocks = simulate(tape.trace, capacity_bytes=50 * MIB)
    assert blocks.fits
    assert (blocks.retries, blocks.segment_frees) == (1, 2)
    assert list(blocks.reserved)[-1] == 40 * MIB


def test_without_a_refusal_nothing_is_released(tape):
    tape.drop(tape.take(30 * MIB))
    tape.take(40 * MIB)
    blocks = simulate(tape.trace, capacity_bytes=70 * MIB)
    assert (blocks.retries, blocks.segment_frees) == (0, 0)
    assert simulate(tape.trace, capacity_bytes=70 * MIB - 1).retries == 1


def test_a_request_can_fail_although_enough_bytes_are_free(tape):
    storages = [tape.take(5 * MIB) for _ in range(8)]  # two segments
    tape.drop(*storages[::2])
    tape.take(12 * MIB)
    blocks = simulate(tape.trace, capacity_bytes=50 * MIB)
    assert not blocks.fits
    problem = blocks.out_of_memory
    assert problem.position == 12
    assert (problem.requested_bytes, problem.segment_bytes) == (12 * MIB, 12 * MIB)
    assert (problem.allocated_bytes, problem.reserved_bytes) == (20 * MIB, 40 * MIB)
    assert problem.free_block_bytes == (5 * MIB,) * 4
    assert len(blocks.reserved) == 12
    assert str(problem) == (
        "out of memory at event 12 (forward aten.empty): a request of 12.00 MiB needs a segment "
        "of 12.00 MiB, but 40.00 MiB of 50.00 MiB are reserved: 20.00 MiB allocated, 20.00 MiB "
        "free in 4 blocks of at most 5.00 MiB"
    )
    assert str(problem) in str(blocks)
    assert blocks.fragmentation == 0.5  # at that moment; at the peak, all 40 MiB were in use
    assert "(50.0% fragmentation when memory ran out)" in str(blocks)


def test_a_process_may_reserve_its_fraction_of_the_device(tape):
    tape.take(50 * MIB)
    assert simulate(tape.trace, capacity_bytes=100 * MIB, memory_fraction=0.5).fits
    assert not simulate(tape.trace, capacity_bytes=100 * MIB, memory_fraction=0.49).fits


def test_memory_occupied_by_other_processes_is_not_available(tape):
    tape.take(50 * MIB)
    assert simulate(tape.trace, capacity_bytes=60 * MIB, occupied_bytes=10 * MIB).fits
    blocks = simulate(tape.trace, capacity_bytes=60 * MIB, occupied_bytes=10 * MIB + 1)
    assert blocks.out_of_memory.limit_bytes == 50 * MIB - 1


# ------------------------------------------------------------------ max_split_size_bytes

LARGE_KEPT = Settings(max_split_size_bytes=64 * MIB)


def test_a_block_of_max_split_size_is_kept_for_requests_of_that_size():
    allocator = Allocator(LARGE_KEPT)
    small, large = taken(allocator, 62 * MIB, 64 * MIB)
    allocator.free(large)
    taken(allocator, 60 * MIB)
    assert allocator.segment_allocations == 3
    allocator.free(small)
    assert taken(allocator, 60 * MIB) == [small]


def test_a_request_of_max_split_size_is_not_split_and_may_waste_less_than_20_mib():
    allocator = Allocator(LARGE_KEPT)
    (block,) = taken(allocator, 90 * MIB)
    allocator.free(block)
    assert taken(allocator, 70 * MIB + 512) == [block]
    assert block.size == 90 * MIB
    allocator.free(block)
    (other,) = taken(allocator, 70 * MIB)
    assert other is not block


def test_the_wasted_bytes_can_be_limited():
    allocator = Allocator(replace(LARGE_KEPT, max_non_split_rounding_bytes=40 * MIB))
    (block,) = taken(allocator, 100 * MIB)
    allocator.free(block)
    assert taken(allocator, 70 * MIB) == [block]


def test_after_a_refusal_the_smallest_sufficient_oversize_block_is_released_first():
    allocator = Allocator(replace(LARGE_KEPT, capacity_bytes=400 * MIB))
    for block in taken(allocator, 150 * MIB, 130 * MIB, 90 * MIB):
        allocator.free(block)
    taken(allocator, 100 * MIB)  # 130 would waste too much, so it is released
    assert (allocator.retries, allocator.segment_frees) == (0, 1)
    assert allocator.reserved_bytes == (150 + 90 + 100) * MIB


def test_after_a_refusal_the_largest_blocks_are_released_until_they_suffice():
    allocator = Allocator(replace(LARGE_KEPT, capacity_bytes=300 * MIB))
    blocks = taken(allocator, 64 * MIB, 66 * MIB, 68 * MIB, 30 * MIB)
    for block in blocks:
        allocator.free(block)
    taken(allocator, 130 * MIB)
    assert (allocator.retries, allocator.segment_frees) == (0, 2)  # 68 and 66 MiB
    assert allocator.reserved_bytes == (64 + 30 + 130) * MIB


def test_if_oversize_blocks_do_not_suffice_all_unused_memory_is_released():
    allocator = Allocator(replace(LARGE_KEPT, capacity_bytes=200 * MIB))
    for block in taken(allocator, 64 * MIB, 30 * MIB):
        allocator.free(block)
    taken(allocator, 130 * MIB)  # it would fit without the 64, but 64 is less than 130
    assert (allocator.retries, allocator.reserved_bytes) == (1, 130 * MIB)


# ------------------------------------------------------------------ garbage collection

COLLECTING = Settings(capacity_bytes=200 * MIB, garbage_collection_threshold=0.5)


def test_above_the_threshold_the_least_recently_used_blocks_are_released():
    allocator = Allocator(COLLECTING)
    old, young = taken(allocator, 60 * MIB, 40 * MIB)
    allocator.free(old)
    taken(allocator, 10 * MIB, stream=1)  # a search that skips `old`
    allocator.free(young)
    # 110 MiB are reserved, 10 too many; after this search, the ages are 2 and 1, with mean 1.5
    taken(allocator, 70 * MIB)
    assert allocator.reserved_bytes == (40 + 10 + 70) * MIB
    assert (allocator.segment_frees, allocator.retries) == (1, 0)


@pytest.mark.parametrize(("reserved", "given_back"), [(100 * MIB, 0), (102 * MIB, 1)])
def test_up_to_the_threshold_nothing_is_released(reserved, given_back):
    allocator = Allocator(COLLECTING)
    (block,) = taken(allocator, reserved)
    allocator.free(block)
    taken(allocator, 10 * MIB, stream=1)
    assert allocator.segment_frees == given_back


@pytest.mark.parametrize(("threshold", "given_back"), [(0.3, 2), (0.2, 3)])
def test_collection_continues_with_younger_blocks_until_it_suffices(threshold, given_back):
    allocator = Allocator(Settings(capacity_bytes=GIB, garbage_collection_threshold=threshold))
    (spare,) = taken(allocator, 10 * MIB, stream=1)
    for block in taken(allocator, *[200 * MIB] * 3):
        allocator.free(block)
        allocator.free(spare)
        (spare,) = taken(allocator, 10 * MIB, stream=1)  # a search that succeeds
    # the ages are 4, 3 and 2: two are at least the mean and release 400 MiB
    assert allocator.reserved_bytes == 610 * MIB
    taken(allocator, 250 * MIB)
    assert allocator.segment_frees == given_back


def test_collection_skips_partly_used_segments_and_the_small_pool():
    allocator = Allocator(COLLECTING)
    part, _, small, _ = taken(allocator, 5 * MIB, 5 * MIB, 512, 100 * MIB)
    allocator.free(part)
    allocator.free(small)
    taken(allocator, 30 * MIB)
    assert allocator.segment_frees == 0


def test_small_requests_do_not_age_large_blocks():
    allocator = Allocator(COLLECTING)
    first, second = taken(allocator, 60 * MIB, 40 * MIB)
    allocator.free(first)
    taken(allocator, 512)
    allocator.free(second)
    taken(allocator, 70 * MIB)  # both have the same age, so neither is below the mean
    assert allocator.segment_frees == 2


# ------------------------------------------------------------------ expandable segments

EXPANDING = Settings(expandable_segments=True)


def test_an_expandable_segment_grows_by_pages_of_20_mib_and_small_ones_of_2(tape):
    for size in (30 * MIB, 5 * MIB, 30 * MIB, 512):
        tape.take(size)
    blocks = simulate(tape.trace, EXPANDING)
    assert list(blocks.reserved) == [40 * MIB, 40 * MIB, 80 * MIB, 82 * MIB]
    assert blocks.segment_allocations == 3
    assert layout(blocks.at_end)[1] == [
        (30 * MIB, "allocated"),
        (5 * MIB, "allocated"),
        (30 * MIB, "allocated"),
        (15 * MIB, "free"),
    ]


def test_an_expandable_large_block_is_split_down_to_512_bytes(tape):
    tape.take(20 * MIB - 512)
    assert layout(simulate(tape.trace, EXPANDING).at_end) == [
        [(20 * MIB - 512, "allocated"), (512, "free")]
    ]


def test_pages_in_the_middle_are_released_and_mapped_again_at_the_lowest_address():
    allocator = Allocator(EXPANDING)
    first, _, third, _ = taken(allocator, 50 * MIB, 30 * MIB, 70 * MIB, 10 * MIB)
    (start,) = allocator.heads
    allocator.free(first)
    allocator.free(third)
    allocator.empty_cache()
    # released: pages 0–40 of 0–50, and pages 80–140 of 80–150
    assert allocator.reserved_bytes == (160 - 40 - 60) * MIB
    assert [(segment.address - start, segment.bytes) for segment in segments(allocator)] == [
        (40 * MIB, 40 * MIB),
        (140 * MIB, 20 * MIB),
    ]
    (block,) = taken(allocator, 15 * MIB)
    assert (block.address - start, allocator.reserved_bytes) == (0, 80 * MIB)
    (block,) = taken(allocator, 52 * MIB)  # 0–50 is too short, but 80–150 is not
    assert block.address - start == 80 * MIB


def test_free_memory_below_unmapped_pages_is_combined_with_them():
    allocator = Allocator(EXPANDING)
    first, second = taken(allocator, 30 * MIB, 30 * MIB)
    (start,) = allocator.heads
    assert (second.address - start, allocator.reserved_bytes) == (30 * MIB, 60 * MIB)
    allocator.free(second)
    (block,) = taken(allocator, 45 * MIB)
    assert (block.address - start, allocator.reserved_bytes) == (30 * MIB, 80 * MIB)
    assert first.address == start


def test_a_request_avoids_a_block_that_can_grow():
    allocator = Allocator(EXPANDING)
    first, _ = taken(allocator, 12 * MIB, 20 * MIB)
    (start,) = allocator.heads
    allocator.free(first)
    # 12 MiB are free at the start, and 8 MiB 32 MiB above it, which can grow without limit
    (block,) = taken(allocator, 6 * MIB)
    assert block.address == start


def test_an_expandable_segment_gets_pages_up_to_the_devices_capacity():
    allocator = Allocator(replace(EXPANDING, capacity_bytes=60 * MIB, occupied_bytes=20 * MIB))
    taken(allocator, 30 * MIB)
    assert allocator.malloc(12 * MIB) is None  # 10 are free, but not a page of 20
    assert allocator.retries == 1
    taken(allocator, 10 * MIB)


def test_a_limit_applies_to_the_whole_request_although_fewer_pages_would_suffice(tape):
    tape.take(512)
    tape.drop(tape.take(35 * MIB))
    tape.take(45 * MIB)  # one page of 20 MiB after the free 40, but 42 and 46 exceed 65
    blocks = simulate(tape.trace, EXPANDING, capacity_bytes=65 * MIB)
    assert blocks.retries == 1
    assert list(blocks.reserved) == [2 * MIB, 42 * MIB, 42 * MIB, 62 * MIB]


def test_after_a_refusal_the_free_pages_of_all_pools_are_released(tape):
    tape.drop(tape.take(35 * MIB))
    for _ in range(30):
        tape.take(MIB)
    blocks = simulate(tape.trace, EXPANDING, capacity_bytes=60 * MIB)
    assert blocks.retries == 1
    assert blocks.reserved_bytes == 60 * MIB
    assert list(blocks.reserved)[-1] == 30 * MIB


def test_expandable_segments_reduce_fragmentation(tape):
    storages = [tape.take(5 * MIB) for _ in range(8)]
    tape.drop(*storages[2:4], *storages[4:6])
    tape.take(20 * MIB)
    assert simulate(tape.trace).reserved_bytes == 60 * MIB
    assert simulate(tape.trace, EXPANDING).reserved_bytes == 40 * MIB


# ------------------------------------------------------------------ traces


def test_a_resized_storage_is_moved_and_briefly_holds_both_blocks(tape):
    storage = tape.take(30 * MIB)
    tape.change(storage, 10 * MIB)
    tape.change(storage, -28 * MIB)
    blocks = simulate(tape.trace)
    assert list(blocks.allocated) == [30 * MIB, (30 + 40) * MIB, (40 + 12) * MIB]
    assert blocks.allocated_bytes == 70 * MIB
    assert layout(blocks.at_end)[1][0] == (12 * MIB, "allocated")
    assert blocks.reserved_bytes == 70 * MIB  # the 12 MiB fit where the 30 were


def test_a_devices_own_history_has_both_blocks_of_a_moved_storage(tape):
    storage = tape.take(30 * MIB)
    tape.change(storage, 40 * MIB)
    tape.change(storage, -30 * MIB)
    tape.change(storage, -40 * MIB)
    blocks = simulate(tape.trace)
    assert list(blocks.allocated) == [30 * MIB, 70 * MIB, 40 * MIB, 0]
    assert blocks.reserved_bytes == 70 * MIB


@pytest.mark.parametrize(("stream", "segments"), [(0, 1), (3, 2)])
def test_a_trace_of_several_streams_has_pools_for_each(tape, stream, segments):
    tape.drop(tape.take(24 * MIB))
    tape.take(24 * MIB)
    *start, last = tape.events
    trace = [*start, last._replace(stream=stream)]
    assert simulate(trace).reserved_bytes == segments * 24 * MIB
    assert simulate(trace).segment_allocations == segments


def test_rounding_events_in_a_trace_are_ignored(tape):
    storage = tape.take(100)
    tape.take(412, "rounding")
    tape.drop(storage)
    blocks = simulate(tape.trace)
    assert list(blocks.allocated) == [512, 512, 0]


def test_storages_without_bytes_take_nothing(tape):
    tape.drop(tape.take(0))
    blocks = simulate(tape.trace)
    assert (blocks.reserved_bytes, blocks.fragmentation, blocks.at_end) == (0, 0.0, ())
    assert list(blocks.reserved) == [0, 0]


def test_an_empty_trace_fits():
    blocks = simulate(())
    assert blocks.fits
    assert (blocks.peak_position, blocks.at_peak) == (0, ())


def test_fragmentation_is_the_share_of_the_reserved_peak_that_was_never_allocated(tape):
    tape.take(5 * MIB)
    assert simulate(tape.trace).fragmentation == 0.75


def test_blocks_have_the_event_that_allocated_them(tape):
    tape.take(1000, "gradients")
    [segment] = simulate(tape.trace).at_end
    used, free = segment.blocks
    assert used.event == tape.events[0]
    assert (used.requested_bytes, used.bytes) == (1000, 1024)
    assert (free.event, free.requested_bytes) == (None, 0)


def test_segments_are_available_for_any_moment(tape):
    first = tape.take(30 * MIB)
    tape.take(12 * MIB)
    tape.drop(first)
    blocks = simulate(tape.trace)
    assert [layout(blocks.segments(position)) for position in range(4)] == [
        [],
        [[(30 * MIB, "allocated")]],
        [[(12 * MIB, "allocated")], [(30 * MIB, "allocated")]],
        [[(12 * MIB, "allocated")], [(30 * MIB, "free")]],
    ]
    assert blocks.peak_position == 2
    assert blocks.at_peak == blocks.segments(2)
    assert blocks.at_end == blocks.segments(3)
    with pytest.raises(ValueError, match="0 to 3"):
        blocks.segments(4)


# ------------------------------------------------------------------ a history before the trace


@pytest.fixture
def later(tape):
    """A trace of one event after a history of four that leaves 12 MiB in the first segment."""
    large = tape.take(30 * MIB)
    tape.change(large, 10 * MIB)
    kept = tape.take(12 * MIB)
    tape.drop(large)
    before = tape.events[kept + 1]._replace(phase="before")
    earlier, tape.events = tuple(tape.events), [before]
    tape.take(35 * MIB)
    return Trace(tuple(tape.events), history=earlier)


def test_a_trace_with_a_history_begins_with_the_historys_final_state(later):
    blocks = simulate(later)
    assert layout(blocks.at_end) == [
        [(35 * MIB, "allocated"), (5 * MIB, "free")],
        [(12 * MIB, "allocated"), (18 * MIB, "free")],
    ]
    assert blocks.reserved_bytes == 70 * MIB
    assert simulate(Trace(later.events)).reserved_bytes == 48 * MIB  # without the history
    assert simulate(as_one_trace(later)).reserved_bytes == 70 * MIB


def as_one_trace(trace: Trace) -> Trace:
    """Return the same process as one trace, without restated storages."""
    return Trace((*trace.history, *(e for e in trace.events if e.phase != "before")))


def test_peaks_exclude_the_history(later):
    blocks = simulate(later)
    assert list(blocks.allocated) == [12 * MIB, 47 * MIB]
    assert list(blocks.reserved) == [70 * MIB, 70 * MIB]
    assert blocks.allocated_bytes == 47 * MIB  # 70 MiB in its history
    assert blocks.segment_allocations == 2
    assert simulate(later, empty_cache_before=[0]).reserved_bytes == (30 + 36) * MIB  # 70 before


def test_a_storage_moved_after_the_history_holds_one_block_at_the_end(later):
    kept = later.events[0]
    grown = kept._replace(bytes=20 * MIB, phase="forward")
    blocks = simulate(replace(later, events=(kept, grown, grown._replace(bytes=-12 * MIB))))
    assert list(blocks.allocated) == [12 * MIB, 32 * MIB, 20 * MIB]
    assert blocks.allocated_bytes == 32 * MIB  # not 12 plus a block of 32


def test_the_segments_of_any_moment_include_the_history(later):
    blocks = simulate(later)
    assert layout(blocks.segments(0)) == [
        [(40 * MIB, "free")],
        [(12 * MIB, "allocated"), (18 * MIB, "free")],
    ]
    assert blocks.segments(2) == blocks.at_end


def test_a_history_that_does_not_fit_is_reported_as_before_the_step(later):
    blocks = simulate(later, capacity_bytes=60 * MIB)
    assert blocks.out_of_memory.position == -3
    assert str(blocks.out_of_memory).startswith("out of memory before the measured step (forward")
    assert len(blocks.reserved) == 0


def test_the_history_of_a_trace_is_recorded_with_it(later):
    assert history(later) == history(as_one_trace(later))


# ------------------------------------------------------------------ printing


def test_the_result_prints_a_summary(tape):
    tape.take(5 * MIB)
    assert str(simulate(tape.trace)) == (
        "reserved 20.00 MiB, allocated 5.00 MiB at the peak (75.0% fragmentation)\n"
        "1 segment allocated, 0 released, 0 retries"
    )


# ------------------------------------------------------------------ invariants

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 80 * MIB),
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), SIZES, st.integers(0, 1)),
        st.tuples(st.sampled_from(["free", "free", "let go", "reclaim"]), st.integers(0, 99)),
        st.tuples(st.just("empty")),
    ),
    max_size=60,
)
SETTINGS = st.builds(
    Settings,
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 32 * MIB]),
    expandable_segments=st.booleans(),
    roundup_power2_divisions=st.sampled_from([None, 4]),
    garbage_collection_threshold=st.sampled_from([None, 0.2, 0.8]),
    large_segment_bytes=st.sampled_from([12 * MIB, 20 * MIB]),
    capacity_bytes=st.sampled_from([60 * MIB, 200 * MIB, GIB]),
    memory_fraction=st.sampled_from([0.9, 1.0]),
)


def run_actions(settings: Settings, actions: list, check) -> tuple[Allocator, list[MemoryBlock]]:
    """Return an allocator after all actions, and the blocks in use. `check` runs after each."""
    allocator = Allocator(settings)
    in_use: list[MemoryBlock] = []
    going: list[MemoryBlock] = []
    for action, *arguments in actions:
        if action == "take":
            block = allocator.malloc(*arguments)
            if block is not None:
                in_use.append(block)
        elif action == "empty":
            allocator.empty_cache()
            going.clear()
        elif action == "reclaim" and going:
            allocator.complete_free(going.pop(arguments[0] % len(going)))
        elif action in ("free", "let go") and in_use:
            block = in_use.pop(arguments[0] % len(in_use))
            if action == "let go":
                allocator.request_free(block)
                going.append(block)
            else:
                allocator.free(block)
        going = [block for block in going if block.free_pending]  # a retry completes their frees
        check(allocator, in_use, going)
    for block in going:
        allocator.complete_free(block)
    return allocator, in_use


def check_bytes(allocator: Allocator, in_use: list[MemoryBlock], going: list[MemoryBlock]) -> None:
    found = segments(allocator)
    pieces = [piece for segment in found for piece in segment.blocks]
    assert sum(segment.bytes for segment in found) == allocator.reserved_bytes
    assert sum(block.size for block in in_use) == allocator.allocated_bytes
    used = sorted((block.address, block.size) for block in (*in_use, *going))
    assert used == [(piece.address, piece.bytes) for piece in pieces if piece.state != "free"]
    free = sorted((block.address, block.size) for block in allocator.free_blocks())
    assert free == [(piece.address, piece.bytes) for piece in pieces if piece.state == "free"]
    assert allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.reserved_bytes <= min(
        allocator.settings.fraction_bytes, allocator.settings.driver_bytes
    )


def check_tiling(allocator: Allocator, *_) -> None:
    end = -1
    for segment in segments(allocator):
        assert segment.address >= end
        address = segment.address
        for piece in segment.blocks:
            assert piece.address == address
            assert piece.bytes > 0
            assert piece.bytes % 512 == 0
            address += piece.bytes
        end = segment.address + segment.bytes
        assert address == end


def check_merging(allocator: Allocator, *_) -> None:
    for segment in segments(allocator):
        states = [piece.state for piece in segment.blocks]
        assert ("free", "free") not in list(pairwise(states))


@given(SETTINGS, ACTIONS)
def test_bytes_are_conserved(settings, actions):
    run_actions(settings, actions, check_bytes)


@given(SETTINGS, ACTIONS)
def test_blocks_tile_their_segments_and_nothing_overlaps(settings, actions):
    run_actions(settings, actions, check_tiling)


@given(SETTINGS, ACTIONS)
def test_no_two_neighbours_are_free(settings, actions):
    run_actions(settings, actions, check_merging)


@given(SETTINGS, ACTIONS)
def test_when_everything_is_freed_everything_can_be_released(settings, actions):
    allocator, in_use = run_actions(settings, actions, lambda *_: None)
    for block in in_use:
        allocator.free(block)
    assert all(block.state == FREE for block in allocator.free_blocks())
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.heads) == (0, {})


@given(SETTINGS, st.lists(SIZES, max_size=30), st.randoms(use_true_random=False))
def test_a_trace_gives_the_same_result_twice_and_never_exceeds_its_limits(settings, sizes, random):
    blocks = simulate(shuffled(sizes, random), settings)
    assert blocks == simulate(blocks.events, settings)
    assert all(map(int.__le__, blocks.allocated, blocks.reserved))
    assert all(map(int.__le__, blocks.largest_free, blocks.reserved))
    assert blocks.reserved_bytes == max(blocks.reserved, default=0)


def shuffled(sizes: list[int], random) -> Trace:
    """A trace that allocates storages in order and frees each at a random later time."""
    tape, alive = Tape(), []
    for size in sizes:
        alive.append(tape.take(size))
        if random.random() < 0.6:
            tape.drop(alive.pop(random.randrange(len(alive))))
    return tape.trace


# ------------------------------------------------------------------ naive oracle


class NaiveDriver:
    """The addresses of segments, never released. A range is [its free address, its end]."""

    def __init__(self) -> None:
        self.lowest = 2**57
        self.ranges: list[list[int]] = []

    def place(self, size: int) -> int:
        fits = [known for known in self.ranges if known[1] - known[0] >= size]
        if not fits:
            end = self.lowest
            self.lowest -= -(-size // (32 * MIB)) * 32 * MIB
            fits = [[self.lowest, end]]
            self.ranges += fits
        newest = fits[-1]
        newest[0] += size
        return newest[0] - size


class NaiveAllocator:
    """The rules without settings, on one list of all blocks: [segment, start, size, used].

    A segment is named by its address.
    """

    def __init__(self) -> None:
        self.driver = NaiveDriver()
        self.blocks: list[list[int]] = []
        self.small: dict[int, bool] = {}  # by segment

    def take(self, requested: int) -> tuple[int, int, int]:
        """Return (segment, start in it, size)."""
        size = -(-requested // 512) * 512
        small = size <= MIB
        fits = [b for b in self.blocks if not b[3] and b[2] >= size and self.small[b[0]] == small]
        if not fits:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB))
            whole = whole if whole >= MIB else whole * 2 * MIB
            segment = self.driver.place(whole)
            fits = [[segment, 0, whole, False]]
            self.blocks += fits
            self.small[segment] = small
        block = min(fits, key=lambda b: (b[2], b[0], b[1]))
        rest = block[2] - size
        if rest >= 512 if small else rest > MIB:
            self.blocks.append([block[0], block[1] + size, rest, False])
            block[2] = size
        block[3] = True
        return tuple(block[:3])

    def drop(self, segment: int, start: int) -> None:
        for block in self.blocks:
            if block[:2] == [segment, start]:
                block[3] = False
        self.blocks.sort()
        joined: list[list[int]] = []
        for block in self.blocks:
            last = joined[-1] if joined else [None] * 4
            if last[0] == block[0] and not last[3] and not block[3]:
                last[2] += block[2]
            else:
                joined.append(block)
        self.blocks = joined


@given(st.lists(SIZES, max_size=40), st.randoms(use_true_random=False))
def test_every_block_has_the_address_of_the_naive_allocator(sizes, random):
    obvious, allocator = NaiveAllocator(), Allocator()
    alive = []
    for size in sizes:
        segment, start, whole = obvious.take(size)
        block = allocator.malloc(size)
        assert (block.address, block.size) == (segment + start, whole)
        alive.append((segment, start, block))
        while alive and random.random() < 0.5:
            segment, start, block = alive.pop(random.randrange(len(alive)))
            obvious.drop(segment, start)
            allocator.free(block)
