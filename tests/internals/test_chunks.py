"""Chunks: a real tensor gets all of them, a fake tensor enough of them to find the peak."""

import pytest
import torch

import memlab
from memlab.internals.chunks import chunk_starts, repeat_count


@pytest.mark.parametrize(
    ("numel", "expected", "expected_fake"),
    [
        (0, [], []),
        (1, [0], [0]),
        (4, [0], [0]),
        (5, [0, 4], [0, 4]),
        (12, [0, 4, 8], [0, 4, 8]),
        (41, [*range(0, 41, 4)], [0, 4, 40]),
    ],
)
def test_chunk_starts_of_real_and_fake_tensors(numel, expected, expected_fake):
    assert list(chunk_starts(torch.zeros(numel), 4)) == expected
    with memlab.dry_run():
        assert list(chunk_starts(torch.zeros(numel), 4)) == expected_fake


@pytest.mark.parametrize("numel", [0, 1, 4, 5, 8, 12, 13, 41])
def test_repeat_counts_add_up_to_all_chunks(numel):
    every = len(range(0, numel, 4))
    with memlab.dry_run():
        assert sum(repeat_count() for _ in chunk_starts(torch.zeros(numel), 4)) == every
    assert sum(repeat_count() for _ in chunk_starts(torch.zeros(numel), 4)) == every


def test_repeat_counts_multiply_in_nested_chunks():
    with memlab.dry_run():
        found = [
            repeat_count()
            for _ in chunk_starts(torch.zeros(41), 4)
            for _ in chunk_starts(torch.zeros(20), 4)
        ]
    assert sum(found) == 11 * 5
    assert max(found) == 9 * 3


def test_leaving_the_loop_early_resets_the_repeat_count():
    with memlab.dry_run():
        for start in chunk_starts(torch.zeros(41), 4):
            if start == 4:
                assert repeat_count() == 9
                break
        del start
    assert repeat_count() == 1


@pytest.mark.parametrize("numel", [5, 8, 41, 44])
def test_a_dry_run_has_the_real_peak_when_temporaries_outlive_their_chunk(numel):
    def step():
        x = torch.zeros(numel)
        for start in chunk_starts(x, 4):
            copy = x[start : start + 4] * 2
        return copy

    real = memlab.measure(step).peak_bytes
    with memlab.dry_run():
        assert memlab.measure(step).peak_bytes == real
