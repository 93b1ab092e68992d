"""Leaks and fragmentation are found in the memory of steps, and good reasons for growth are not."""

import random
from collections.abc import Iterable, Iterator

import pytest

from memlab.monitoring.counters import Reading
from memlab.monitoring.trends import (
    WARM_UP_STEPS,
    FragmentationDetector,
    LeakDetector,
    steps_until_full,
)

MIB, GIB = 2**20, 2**30


def first_leak(
    values: Iterable[tuple[int, int]], *, peak_is_per_step: bool = True
) -> tuple[int, object] | None:
    """The number of steps until a leak is found, and the leak."""
    detector = LeakDetector(MIB, 0.001, peak_is_per_step=peak_is_per_step)
    for number, (allocated, peak) in enumerate(values, start=1):
        leak = detector.add(allocated, peak)
        if leak is not None:
            return number, leak
    return None


def steps(allocated: Iterable[int], activations: int = GIB) -> Iterator[tuple[int, int]]:
    return ((bytes_, bytes_ + activations) for bytes_ in allocated)


def test_a_steady_leak_is_found_twelve_steps_after_the_warm_up():
    number, leak = first_leak(steps(GIB + 5 * MIB * n for n in range(100)))
    assert number == WARM_UP_STEPS + 12
    assert leak.bytes_per_step == 5 * MIB
    assert leak.to_bytes - leak.from_bytes == 55 * MIB


def test_a_leak_below_the_noise_of_the_steps_is_found_later():
    drawn = random.Random(0)
    noisy = (GIB + 4 * MIB * n + drawn.randrange(200 * MIB) for n in range(4000))
    number, leak = first_leak(steps(noisy))
    assert 50 < number < 2000
    assert leak.bytes_per_step == pytest.approx(4 * MIB, rel=0.2)


def test_a_leak_of_every_fourth_step_is_found():
    number, _ = first_leak(steps(GIB + 8 * MIB * (n // 4) for n in range(400)))
    assert number <= WARM_UP_STEPS + 4 * 12 + 4


def test_optimizer_state_of_the_first_step_is_no_leak():
    assert first_leak(steps([GIB, *[3 * GIB] * 1000])) is None


def test_weights_that_thaw_once_in_a_while_are_no_leak():
    assert first_leak(steps(GIB + (n // 100) * 100 * MIB for n in range(1100))) is None


@pytest.mark.parametrize("seed", range(20))
def test_outputs_of_random_lengths_are_no_leak(seed):
    drawn = random.Random(seed)
    lengths = [drawn.randrange(1, 4096) for _ in range(5000)]
    values = ((GIB + length * 32 * 1024, GIB + length * 512 * 1024) for length in lengths)
    assert first_leak(values) is None


def test_lengths_that_grow_are_no_leak_because_the_peak_grows_faster():
    grown = [(GIB + n * MIB, GIB + 20 * n * MIB) for n in range(1000)]
    assert first_leak(grown) is None
    assert first_leak(grown, peak_is_per_step=False) is not None


@pytest.mark.parametrize("micro_batches", [2, 4, 8, 32])
def test_gradients_that_accumulate_are_no_leak(micro_batches):
    held = [GIB + min(n % micro_batches, 1) * 2 * GIB for n in range(5000)]
    assert first_leak(steps(held)) is None


def test_an_evaluation_every_hundred_steps_is_no_leak():
    assert first_leak(steps(GIB + (n % 100 == 99) * GIB for n in range(5000))) is None


def test_an_evaluation_hides_no_leak():
    values = [GIB + 5 * MIB * n + (n % 10 == 9) * GIB for n in range(1000)]
    number, _ = first_leak(steps(values))
    assert number < 100


def test_growth_below_the_smallest_leak_is_noise():
    assert first_leak(steps(GIB + 10 * n for n in range(1000))) is None


def test_memory_of_the_detector_grows_with_the_logarithm_of_the_steps():
    detector = LeakDetector(MIB, 0.001, peak_is_per_step=True)
    for _ in range(2**12):
        detector.add(GIB, 2 * GIB)
    assert len(detector._levels) <= 13
    assert max(map(len, detector._levels)) <= 12


def test_the_steps_until_full_follow_from_the_rate():
    _, leak = first_leak(steps(GIB + 5 * MIB * n for n in range(100)))
    assert steps_until_full(leak, leak.to_bytes + 50 * MIB) == 10
    assert steps_until_full(leak, None) is None


# ------------------------------------------------------------------ fragmentation


def reading(reserved: int, retries: int = 0) -> Reading:
    return Reading(GIB, GIB, reserved, retries)


def first_fragmentation(readings: Iterable[Reading], peak: int, capacity: int = 24 * GIB):
    detector = FragmentationDetector(capacity)
    for number, one in enumerate(readings, start=1):
        found = detector.add(one, peak)
        if found is not None:
            return number, found
    return None


def test_reserved_memory_that_outgrows_the_peak_again_and_again_is_fragmentation():
    values = [reading(13 * GIB + n // 10 * GIB) for n in range(100)]
    number, found = first_fragmentation(values, peak=12 * GIB)
    assert number == 31  # the third rise, to 16 GiB
    assert found.unused_bytes == 4 * GIB


def test_one_large_step_is_no_fragmentation():
    values = [*[reading(13 * GIB)] * 10, *[reading(20 * GIB)] * 1000]
    assert first_fragmentation(values, peak=12 * GIB) is None


def test_unused_memory_of_a_card_that_is_half_empty_is_no_problem():
    values = [reading(13 * GIB + n // 10 * GIB) for n in range(100)]
    assert first_fragmentation(values, peak=12 * GIB, capacity=80 * GIB) is None


def test_a_retry_counts_at_once_and_one_from_before_the_first_step_does_not():
    assert first_fragmentation([reading(13 * GIB, 2)] * 100, peak=12 * GIB) is None
    values = [*[reading(13 * GIB, 2)] * 10, reading(13 * GIB, 3)]
    number, found = first_fragmentation(values, peak=12 * GIB)
    assert (number, found.retries, found.is_large) == (11, 3, False)


def test_a_device_that_reports_no_reserved_memory_has_no_fragmentation():
    detector = FragmentationDetector(None)
    assert all(detector.add(Reading(GIB, GIB), GIB) is None for _ in range(100))
