"""The lessons' solutions as references of checks, and edits of them as wrong answers."""

import pytest

from memlab.course import solutions
from memlab.course.cells import parsed
from memlab.course.solutions import body, edited, edited_source, given, mistakes, solution

CELLS = (
    "SCALE = 3\ndef helped(x):\n    return SCALE * x",
    'def answer(x):\n    """Doc."""\n    y = helped(x)\n    return y + 1',
    'answer = exercise("5.1", answer)',
    "def answer(x):\n    return None",
)


@pytest.fixture(autouse=True)
def of_these_cells(monkeypatch):
    monkeypatch.setattr(solutions, "_cells", lambda day: [parsed(c, "<test>") for c in CELLS])
    solutions._ran.cache_clear()
    yield
    solutions._ran.cache_clear()


def test_the_solution_is_the_answer_passed_to_exercise():
    assert solution("5.1")(2) == 7


def test_a_lessons_definitions_are_available_by_name():
    assert given(5, "SCALE") == 3
    scale, helped = given(5, "SCALE", "helped")
    assert helped(2) == 2 * scale


def test_an_edit_changes_the_answer_and_nothing_else():
    assert edited("5.1", ("+ 1", "- 1"))(2) == 5
    assert solution("5.1")(2) == 7


def test_an_edit_of_a_helper_changes_the_answers_result():
    assert edited("5.1", ("SCALE * x", "SCALE + x"))(2) == 6
    assert given(5, "helped")(2) == 6


def test_a_replaced_body_keeps_the_docstring():
    one = edited("5.1", body("answer", "if x:\n    return 5\nreturn 6"))
    assert (one(0), one(1), one.__doc__) == (6, 5, "Doc.")


def test_edits_apply_in_order():
    assert edited("5.1", ("+ 1", "+ 10"), ("10", "20"))(2) == 26


def test_edited_text_must_be_in_exactly_one_cell():
    with pytest.raises(LookupError, match="0 cells"):
        edited("5.1", ("there is no such line", ""))
    with pytest.raises(LookupError, match="0 cells"):
        edited("5.1", ("SCALE = 3", "SCALE = 4"), ("y + 1", "y"))
    with pytest.raises(LookupError, match="2 cells"):
        edited_source(["a = 1", "b = 1", "c"], [(" = 1", " = 2")])
    with pytest.raises(LookupError, match="0 cells"):
        edited("5.1", body("no_function", "pass"))


def test_the_answers_own_cell_is_preferred():
    assert edited_source(["a = 1", "b = 1"], [(" = 1", " = 2")]) == (1, "b = 2")


def test_a_row_gives_a_named_wrong_answer():
    (wrong,) = mistakes("5.1", ("One is added.", ("+ 1", "")))
    assert wrong.remark == "One is added."
    assert wrong.answer(2) == 6
