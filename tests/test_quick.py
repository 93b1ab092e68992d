"""`make test` leaves out tests marked slow."""

from quick import quick, slow


def test_what_is_not_kept_is_slow():
    kept, left = quick([1], [1, (2, 3)])
    assert kept == 1
    assert left == slow((2, 3))
    assert (left.values, [mark.name for mark in left.marks]) == ((2, 3), ["slow"])
