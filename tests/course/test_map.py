"""docs/COURSE.md is what the lessons say, and no day needs a later one."""

import pytest

from memlab.course import days
from memlab.course import map as course_map


def test_the_page_is_up_to_date():
    """Otherwise run `python -m memlab.course.map`."""
    assert course_map.PAGE.read_text(encoding="utf-8") == course_map.markdown()
    assert course_map.DRAWING.read_text(encoding="utf-8") == course_map.drawing()


def test_each_day_is_in_one_part():
    in_parts = sorted(day for of in course_map.PARTS.values() for day in of)
    assert {*days.numbers()} <= {*in_parts}
    assert len(in_parts) == len({*in_parts})


def test_a_day_needs_earlier_days_that_there_are():
    for day, needs in course_map.NEEDS.items():
        assert all(before < day and before in days.numbers() for before in needs)


@pytest.mark.parametrize("number", days.numbers())
def test_a_lesson_says_what_you_can_do_after_it(number):
    summary = course_map.summary_of(number)
    assert summary.ability.startswith("you")
    assert 30 <= summary.minutes <= 120


def test_a_list_of_abilities_becomes_a_sentence(monkeypatch):
    abilities = "After today you can:\n\n- read\n- write"
    cell = f"# Day 1: A title\n\n**A question?** {abilities}\n\nAbout 75 minutes."
    monkeypatch.setattr(course_map.notebooks, "cells", lambda path: [("markdown", cell)])
    assert course_map.summary_of(1).ability == "you can read; write"


def test_a_first_cell_without_a_part_is_refused(monkeypatch):
    cell = "# Day 1: A title\n\nAbout 75 minutes."
    monkeypatch.setattr(course_map.notebooks, "cells", lambda path: [("markdown", cell)])
    with pytest.raises(ValueError, match="the first cell of day 1 lacks"):
        course_map.summary_of(1)
