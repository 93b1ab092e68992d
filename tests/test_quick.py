"""`make test` leaves out tests marked slow, and tries some parameters in one test."""

import inspect

import pytest
from quick import quick, slow, together


def test_what_is_not_kept_is_slow():
    kept, left = quick([1], [1, (2, 3)])
    assert kept == 1
    assert left == slow((2, 3))
    assert (left.values, [mark.name for mark in left.marks]) == ((2, 3), ["slow"])


def test_values_together_are_all_tried_and_the_failing_one_is_named():
    tried = []

    @together("number", iter([1, 2]))
    @together(("one", "other"), [("a", "b"), ("c", "d")])
    def test(number, one, other, fixture):
        tried.append((number, one + other, fixture))
        assert (number, one) != (2, "c")

    assert list(inspect.signature(test).parameters) == ["fixture"]
    with pytest.raises(AssertionError) as failed:
        test(fixture=0)
    assert tried == [(1, "ab", 0), (1, "cd", 0), (2, "ab", 0), (2, "cd", 0)]
    assert failed.value.__notes__ == ["with {'one': 'c', 'other': 'd'}", "with {'number': 2}"]
