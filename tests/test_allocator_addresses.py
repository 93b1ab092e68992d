"""The addresses of segments: worked examples, and no overlap for any sequence of calls."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.allocator import Allocator
from memlab.allocator.addresses import DriverAddresses

MIB = 2**20
TOP = 2**57


@pytest.fixture
def driver():
    return DriverAddresses()


def placed(driver: DriverAddresses, *sizes: int) -> list[int]:
    """Return the addresses of new segments."""
    return [driver.place(size) for size in sizes]


# ------------------------------------------------------------------ ranges


def test_a_new_range_is_whole_32_mib_right_below_the_older_ones(driver):
    addresses = placed(driver, 32 * MIB, 34 * MIB, 96 * MIB, 32 * MIB)
    assert [TOP - address for address in addresses] == [32 * MIB, 96 * MIB, 192 * MIB, 224 * MIB]


def test_small_segments_fill_the_rest_of_a_range_from_its_lowest_address(driver):
    (large,) = placed(driver, 20 * MIB)
    small = placed(driver, *[2 * MIB] * 6)
    assert small == [large + offset * MIB for offset in (20, 22, 24, 26, 28, 30)]
    assert driver.place(2 * MIB) == large - 32 * MIB  # the range is full


def test_a_segment_takes_whole_2_mib(driver):
    first, second = placed(driver, 11 * MIB, 2 * MIB)
    assert second == first + 12 * MIB


@pytest.mark.parametrize(("in_older", "in_newer"), [(20, 24), (24, 20)])
def test_the_newest_range_with_enough_room_is_taken(driver, in_older, in_newer):
    older, newer = placed(driver, in_older * MIB, in_newer * MIB)  # 8 or 12 MiB are left in each
    assert driver.place(8 * MIB) == newer + in_newer * MIB
    assert driver.place(8 * MIB) == older + in_older * MIB  # the newer has 4 MiB at most


# ------------------------------------------------------------------ released segments


def test_the_addresses_of_a_released_segment_are_used_again(driver):
    _, second, _ = placed(driver, *[8 * MIB] * 3)
    driver.release(second, 8 * MIB)
    assert driver.place(8 * MIB) == second  # not the 8 MiB at the end, which are free too


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_released_neighbours_merge(driver, order):
    addresses = placed(driver, *[8 * MIB] * 4)
    for index in order:
        driver.release(addresses[index], 8 * MIB)
    assert driver.place(24 * MIB) == addresses[0]


def test_released_segments_with_one_in_use_between_them_do_not_merge(driver):
    addresses = placed(driver, *[8 * MIB] * 4)
    driver.release(addresses[0], 8 * MIB)
    driver.release(addresses[2], 8 * MIB)
    assert driver.place(16 * MIB) == addresses[0] - 32 * MIB


def test_a_segment_is_released_with_the_2_mib_that_it_took(driver):
    first, _ = placed(driver, 11 * MIB, 20 * MIB)
    driver.release(first, 11 * MIB)
    assert driver.place(12 * MIB) == first


def test_a_free_range_is_dropped_and_its_addresses_may_become_a_larger_one(driver):
    older, newer = placed(driver, 32 * MIB, 32 * MIB)
    driver.release(newer, 32 * MIB)
    assert driver.place(64 * MIB) == older - 64 * MIB


def test_a_new_range_goes_into_the_highest_gap(driver):
    lower_half, upper_half, newer = placed(driver, 16 * MIB, 16 * MIB, 32 * MIB)
    driver.release(upper_half, 16 * MIB)
    driver.release(lower_half, 16 * MIB)
    assert driver.place(64 * MIB) == newer - 64 * MIB
    assert driver.place(24 * MIB) == lower_half


def test_an_allocator_gives_the_addresses_of_released_segments_back():
    allocator = Allocator()
    block = allocator.malloc(30 * MIB)
    address = block.address
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.malloc(30 * MIB).address == address


# ------------------------------------------------------------------ no overlap

PLACEMENTS = st.tuples(
    st.just("place"), st.one_of(st.integers(1, 8), st.integers(1, 20), st.integers(1, 80))
)
RELEASES = st.tuples(st.just("release"), st.integers(0, 99))


@given(st.lists(st.one_of(PLACEMENTS, RELEASES), max_size=60))
def test_segments_never_overlap(calls):
    driver = DriverAddresses()
    alive: list[tuple[int, int]] = []  # (address, bytes)
    for call, number in calls:
        if call == "place":
            alive.append((driver.place(number * MIB), number * MIB))
        elif alive:
            driver.release(*alive.pop(number % len(alive)))
        for (address, size), (above, _) in pairwise(sorted(alive)):
            assert address + size <= above
