"""The lessons' solutions as references of checks, and edits of them as wrong answers."""

import pytest
from edited import edited

from memlab.course import days, solutions
from memlab.course.cells import parsed
from memlab.course.exercises import Exercise
from memlab.course.solutions import changed, checked, edited_source, given, solution
from memlab.course.texts import Change, Mistake, Text

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


def test_code_runs_after_the_solutions_cell():
    assert changed("5.1", Change(code="def answer(x):\n    return helped(x)"))(2) == 6
    assert changed("5.1", Change(code="def helped(x):\n    return 7"))(2) == 8
    assert solution("5.1")(2) == 7


def test_edits_apply_in_order():
    assert edited("5.1", ("+ 1", "+ 10"), ("10", "20"))(2) == 26


def test_edited_text_must_be_in_exactly_one_cell():
    with pytest.raises(LookupError, match="0 cells"):
        edited("5.1", ("there is no such line", ""))
    with pytest.raises(LookupError, match="0 cells"):
        edited("5.1", ("SCALE = 3", "SCALE = 4"), ("y + 1", "y"))
    with pytest.raises(LookupError, match="2 cells"):
        edited_source(["a = 1", "b = 1", "c"], [(" = 1", " = 2")])


def test_the_answers_own_cell_is_preferred():
    assert edited_source(["a = 1", "b = 1"], [(" = 1", " = 2")]) == (1, "b = 2")


def test_an_exercise_has_its_texts_and_the_solution_as_its_reference(monkeypatch):
    change = Change((("+ 1", ""),))
    text = Text("5.1", "Title", 5, 2, ("a", "b", "c"), (Mistake("One is added.", change),))
    monkeypatch.setattr(days, "text_of", lambda id_: text)
    exercise = checked("5.1", str, rebuilds=["torch.add"])
    assert isinstance(exercise, Exercise)
    assert (exercise.id, exercise.title, exercise.minutes) == text[:3]
    assert (exercise.difficulty, exercise.hints) == text[3:5]
    assert (exercise.reference(2), exercise.check, exercise.rebuilds) == (7, str, ("torch.add",))
    (wrong,) = exercise.wrong_answers
    assert (wrong.remark, wrong.answer(2)) == ("One is added.", 6)
    assert checked("5.1", str, max).reference is max
