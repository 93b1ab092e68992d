"""Pieces of a tensor: all of a real one; of a fake one those that tell the peak."""

import pytest
import torch

import memlab
from memlab.pieces import starts


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
    assert list(starts(torch.zeros(numbers), 4)) == wanted
    with memlab.dry_run():
        assert list(starts(torch.zeros(numbers), 4)) == of_a_fake_one


@pytest.mark.parametrize("numbers", [5, 8, 41, 44])
def test_the_peak_is_the_same_though_one_piece_is_there_until_the_next_is(numbers):
    def step():
        x = torch.zeros(numbers)
        for start in starts(x, 4):
            copy = x[start : start + 4] * 2
        return copy

    real = memlab.measure(step).peak_bytes
    with memlab.dry_run():
        assert memlab.measure(step).peak_bytes == real
