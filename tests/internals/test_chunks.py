"""Pieces of a tensor: all of a real one; of a fake one those that tell the peak."""

import pytest
import torch

import memlab
from memlab.internals.chunks import chunk_starts, repeat_count


@pytest.mark.parametrize(
    ("numbers", "wanted", "of_a_fake_one"),
    [
        (0, [], []),
        (1, [0], [0]),
        (4, [0], [0]),
        (5, [0, 4], [0, 4]),
        (12, [0, 4, 8], [0, 4, 8]),
        (41, [*range(0, 41, 4)], [0, 4, 40]),
    ],
)
def test_where_pieces_of_four_begin(numbers, wanted, of_a_fake_one):
    assert list(chunk_starts(torch.zeros(numbers), 4)) == wanted
    with memlab.dry_run():
        assert list(chunk_starts(torch.zeros(numbers), 4)) == of_a_fake_one


@pytest.mark.parametrize("numbers", [0, 1, 4, 5, 8, 12, 13, 41])
def test_the_pieces_of_a_fake_one_stand_for_all(numbers):
    every = len(range(0, numbers, 4))
    with memlab.dry_run():
        assert sum(repeat_count() for _ in chunk_starts(torch.zeros(numbers), 4)) == every
    assert sum(repeat_count() for _ in chunk_starts(torch.zeros(numbers), 4)) == every


def test_pieces_of_pieces_stand_for_as_many_of_each():
    with memlab.dry_run():
        found = [
            repeat_count()
            for _ in chunk_starts(torch.zeros(41), 4)
            for _ in chunk_starts(torch.zeros(20), 4)
        ]
    assert sum(found) == 11 * 5
    assert max(found) == 9 * 3


def test_whoever_leaves_between_two_pieces_leaves_nothing_behind():
    with memlab.dry_run():
        for start in chunk_starts(torch.zeros(41), 4):
            if start == 4:
                assert repeat_count() == 9
                break
        del start
    assert repeat_count() == 1


@pytest.mark.parametrize("numbers", [5, 8, 41, 44])
def test_the_peak_is_the_same_though_one_piece_is_there_until_the_next_is(numbers):
    def step():
        x = torch.zeros(numbers)
        for start in chunk_starts(x, 4):
            copy = x[start : start + 4] * 2
        return copy

    real = memlab.measure(step).peak_bytes
    with memlab.dry_run():
        assert memlab.measure(step).peak_bytes == real
