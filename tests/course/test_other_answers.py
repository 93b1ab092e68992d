"""Answers besides the named wrong ones: what passes, what fails, and what a learner is told.

They stand in answers/dayNN.toml, as changes of the solution (see memlab/course/texts.py):

    [[right]]          passes
    [[wrong]]          fails
    [[told]]           fails, and the verdict contains the row's `told`
    [[unnamed]]        fails like a named wrong answer in some cases, and gets no remark
"""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from memlab.course import days, exercises
from memlab.course.days import exercise_of
from memlab.course.exercises import OK, WRONG, Verdict, judge
from memlab.course.solutions import changed
from memlab.course.texts import Change, change_of, joined, tables

FIELDS = {"exercise": str, "name": str}
KINDS = {
    "right": FIELDS,
    "wrong": FIELDS,
    "told": {"exercise": str, "told": str},
    "unnamed": FIELDS,
}
FILES = [
    (path, tables(path, *KINDS)) for path in sorted(Path(__file__).parent.glob("answers/*.toml"))
]


QUICK = 2  # of each kind and exercise, that `make test` tries


def each(kind: str) -> Any:
    """Parametrize a test with the rows of this kind, as `row`, and their changes."""
    rows, counts = [], Counter()
    for path, found in FILES:
        for place, row in enumerate(found[kind], 1):
            where = f"answers/{path.name}, [[{kind}]] {place}"
            fields, change = change_of(where, row, KINDS[kind])
            counts[row["exercise"]] += 1
            marks = [pytest.mark.slow] if counts[row["exercise"]] > QUICK else []
            name = f"{row['exercise']} {row.get('name') or row['told']}"
            rows.append(pytest.param(fields, change, id=name, marks=marks))
    return pytest.mark.parametrize(("row", "change"), rows)


def verdict_on(row: dict[str, Any], change: Change) -> Verdict:
    return judge(exercise_of(row["exercise"]), changed(row["exercise"], change))


def test_no_answer_stands_twice():
    named = [
        (text.id, mistake.change)
        for number in days.numbers()
        for text in days.texts(number)
        for mistake in text.mistakes
    ]
    others = [
        (row["exercise"], change_of("", row, KINDS[kind])[1])
        for _, found in FILES
        for kind in ("right", "wrong", "told")
        for row in found[kind]
    ]
    assert [each for each, n in Counter(named + others).items() if n > 1] == []


@pytest.mark.few(1)
@each("right")
def test_a_right_answer_written_differently_passes(row, change):
    verdict = verdict_on(row, change)
    assert verdict.status == OK, verdict


@pytest.mark.few(6)
@each("wrong")
def test_a_wrong_answer_is_refused(row, change):
    """Without the search for the named mistake, which takes longer than the check."""
    with patch.object(exercises, "_mistake", return_value=""):
        verdict = verdict_on(row, change)
    assert verdict.status == WRONG


@pytest.mark.few(1)
@each("told")
def test_a_verdict_says_what_is_wrong(row, change):
    verdict = verdict_on(row, change)
    assert verdict.status == WRONG
    assert joined(row["told"]) in str(verdict)


@pytest.mark.few(1)
@each("unnamed")
def test_a_mistake_without_a_remark_gets_none(row, change):
    verdict = verdict_on(row, change)
    assert verdict.status == WRONG
    assert not any(wrong.remark in verdict.text for wrong in verdict.exercise.wrong_answers)
