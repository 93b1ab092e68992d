"""Answers made by editing a solution, for tests that need more than a row of answers/dayNN.toml."""

from typing import Any

from memlab.course.days import exercise_of
from memlab.course.exercises import Verdict, judge
from memlab.course.solutions import changed
from memlab.course.texts import Change


def edited(id_: str, *edits: tuple[str, str]) -> Any:
    """Return the answer that a solution gives after these pairs of old and new text."""
    return changed(id_, Change(edits))


def verdict_on(id_: str, *edits: tuple[str, str]) -> Verdict:
    return judge(exercise_of(id_), edited(id_, *edits))
