"""What `make test` leaves out, it leaves out evenly."""

import pytest
from quick import quick, slow, spread


@pytest.mark.parametrize(
    ("count", "most", "kept"),
    [
        (3, 4, [0, 1, 2]),
        (4, 4, [0, 1, 2, 3]),
        (10, 4, [0, 3, 6, 9]),
        (100, 3, [0, 49, 99]),
        (0, 4, []),
    ],
)
def test_few_are_spread_from_the_first_to_the_last(count, most, kept):
    assert spread(range(count), most) == kept


def test_what_is_not_kept_is_slow():
    kept, left = quick([1], [1, (2, 3)])
    assert kept == 1
    assert left == slow((2, 3))
    assert (left.values, [mark.name for mark in left.marks]) == ((2, 3), ["slow"])
