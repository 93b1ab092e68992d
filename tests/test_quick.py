"""Which parameters `make test` tries."""

from types import SimpleNamespace

import pytest
from quick import leave_few


def an_item(name, *marks):
    """What the choice reads of an item."""
    item = SimpleNamespace(parent="a module", originalname=name, marks=list(marks))
    item.get_closest_marker = lambda of: next((m for m in item.marks if m.name == of), None)
    item.add_marker = lambda mark: item.marks.append(mark.mark)
    return item


def test_a_few_parameters_are_kept_evenly_spread_and_other_tests_whole():
    few = [an_item("test_a", pytest.mark.few(2).mark) for _ in range(6)]
    slow = [an_item("test_a", pytest.mark.few(2).mark, pytest.mark.slow.mark) for _ in range(3)]
    one = [an_item("test_b", pytest.mark.few(2).mark)]
    all_of_them = [an_item("test_c") for _ in range(3)]
    leave_few([*slow, *few, *one, *all_of_them])
    left = [place for place, item in enumerate(few) if not item.get_closest_marker("slow")]
    assert left == [0, 3]
    assert not any(item.get_closest_marker("slow") for item in [*one, *all_of_them])
