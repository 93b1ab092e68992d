"""The notebooks as they are committed: made of their source, clean, and true to the exercises.

That their outputs still come out as stored is tried by `make solutions`, which runs them.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from quick import quick, together

from memlab.course import days
from memlab.course.answers import judged
from memlab.course.build import differences
from memlab.course.exercises import NOT_ATTEMPTED, OK
from memlab.course.lint import lint
from memlab.course.notebooks import code_cells

ROOT = Path(__file__).parents[1]
DAYS = days.numbers()
NOTEBOOKS = [*sorted(ROOT.glob("lessons/*.ipynb")), *sorted(ROOT.glob("solutions/*.ipynb"))]
FIRST_WORDS = re.compile(r"# Day (\d+): .+\n\n\*\*.+\?\*\*\n\n.*\bminutes\b", re.S)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def printed(path: Path) -> str:
    outputs = [output for cell in read(path)["cells"] for output in cell.get("outputs", ())]
    return "".join("".join(output.get("text", "")) for output in outputs)


def test_the_notebooks_are_what_their_sources_give():
    assert differences(ROOT) == []


@together("path", NOTEBOOKS)
def test_a_notebook_is_clean(path):
    assert lint(read(path), executed=path.parent.name == "solutions") == []


def test_each_day_has_a_lesson_and_each_lesson_a_day():
    numbers = [int(re.match(r"day(\d+)_", path.name)[1]) for path in NOTEBOOKS]
    assert sorted(numbers) == sorted(DAYS * 2)


@together("number", DAYS)
def test_a_lesson_says_its_question_and_its_minutes_first(number):
    first = "".join(read(days.notebook(number))["cells"][0]["source"])
    assert int(FIRST_WORDS.match(first)[1]) == number


@pytest.mark.slow  # make test runs them in Jupyter
@together("number", DAYS)
def test_the_solution_s_answers_pass(number):
    exercises = days.day(number).exercises
    verdicts = list(judged(days.notebook(number, "solutions"), exercises))
    assert [(v.exercise.id, v.status) for v in verdicts] == [(e.id, OK) for e in exercises]


EXERCISES = [exercise.id for number in DAYS for exercise in days.day(number).exercises]
CALLING_EARLIER_ONES = ["10.4", "12.4", "18.1", "20.2"]


@pytest.mark.few(1)
@pytest.mark.parametrize("id_", quick(CALLING_EARLIER_ONES, EXERCISES))
def test_an_exercise_can_be_solved_alone(id_, tmp_path):
    """All other answers are stubs, so the lesson's references stand in for them."""
    exercises = days.day(days.day_of(id_)).exercises
    lesson = days.notebook(days.day_of(id_))
    notebook, solved = read(lesson), read(days.notebook(days.day_of(id_), "solutions"))
    solutions = {cell["id"]: cell["source"] for cell in solved["cells"]}
    for cell in notebook["cells"]:
        if f"exercise {id_}," in "".join(cell["source"]):
            cell["source"] = solutions[cell["id"]]
    copy = tmp_path / lesson.name
    copy.write_text(json.dumps(notebook), encoding="utf-8")
    [verdict] = judged(copy, exercises, [e for e in exercises if e.id == id_])
    assert verdict.status == OK, verdict


@pytest.mark.few(8)
@pytest.mark.parametrize("number", DAYS)
def test_the_lesson_s_stubs_are_not_attempted(number):
    exercises = days.day(number).exercises
    verdicts = list(judged(days.notebook(number), exercises))
    wanted = [(e.id, NOT_ATTEMPTED) for e in exercises]
    assert [(v.exercise.id, v.status) for v in verdicts] == wanted


@together("number", DAYS)
def test_the_solution_was_checked_when_it_ran(number):
    found = re.findall(r"^\[ok\] (\S+)", printed(days.notebook(number, "solutions")), re.M)
    assert found == [exercise.id for exercise in days.day(number).exercises]


@together("number", DAYS)
def test_what_is_guessed_is_revealed(number):
    cells = "\n".join(code_cells(days.notebook(number)))
    guessed, revealed = (re.findall(rf'^{word}\("(\S+?)"', cells, re.M) for word in GUESSING)
    assert guessed
    assert guessed == revealed


GUESSING = ("guess", "reveal")


@together("number", DAYS)
def test_a_lesson_and_the_records_agree_on_the_minutes_of_an_exercise(number):
    prose = "\n".join("".join(c["source"]) for c in read(days.notebook(number))["cells"])
    stated = re.findall(r"^### Exercise (\S+): .+\n\nAbout (\d+) minutes", prose, re.M)
    assert stated == [(e.id, str(e.minutes)) for e in days.day(number).exercises]


@together("number", DAYS)
def test_a_day_ends_with_the_running_bill(number):
    assert code_cells(days.notebook(number))[-1].startswith(f"running_bill({number}")
