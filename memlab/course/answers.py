"""The answers in a notebook, judged.

An answer is what a notebook hands to `exercise`. To judge it nothing is run but what defines it
(memlab.course.cells), so a check takes as long as the check alone.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.course.cells import CodeCell, answering, parsed_cells, run
from memlab.course.exercises import OK, WRONG, Exercise, Verdict, judge

_NO_NAME = re.compile(r"NameError: name '(\w+)' is not defined")


def answers(path: Path) -> dict[str, Any]:
    """For each exercise "1.2" what is handed over as the answer to it: a function or class, or an
    Unusable where there is none. ValueError for what is no notebook."""
    return {call.id: answer for call, answer, _ in run(parsed_cells(path), path.parent)}


def judged(
    path: Path,
    exercises: Sequence[Exercise],
    only: Sequence[Exercise] | None = None,
    announce: Callable[[Exercise], None] = lambda exercise: None,
) -> Iterator[Verdict]:
    """A verdict on each exercise, or on some of them, as they follow in the notebook.

    As in the notebook, what follows an exercise goes on with the reference where the answer is not
    right. ValueError, and at once, for what is no notebook.
    """
    return _judged(
        parsed_cells(path), path, exercises, exercises if only is None else only, announce
    )


def cell_of(path: Path, id_: str) -> str:
    """The source of the cell that defines the answer to an exercise; ValueError if none does."""
    found = parsed_cells(path)
    if where := answering(found, id_):
        return found[where[1]].source
    raise ValueError(
        f"{path.name} has no cell that defines the answer to exercise {id_}, followed by a line "
        f'`name = exercise("{id_}", name)`; copy both from the lesson'
    )


# ------------------------------------------------------------------ judging


def _judged(
    found: Sequence[CodeCell],
    path: Path,
    exercises: Sequence[Exercise],
    only: Sequence[Exercise],
    announce: Callable[[Exercise], None],
) -> Iterator[Verdict]:
    known = {exercise.id: exercise for exercise in exercises}
    wanted = {exercise.id: exercise for exercise in only}
    for call, answer, namespace in run(found, path.parent):
        right = False
        if exercise := wanted.pop(call.id, None):
            announce(exercise)
            verdict = _verdict(exercise, answer)
            right = verdict.status == OK
            yield verdict
        if call.id in known and not right:
            namespace[call.target] = known[call.id].reference
    for exercise in wanted.values():
        announce(exercise)
        missing = (
            f'{path.name} has no line `name = exercise("{exercise.id}", name)`; copy it from the '
            f"lesson."
        )
        yield Verdict(exercise, WRONG, missing)


def _verdict(exercise: Exercise, answer: Any) -> Verdict:
    if answer is exercise.reference:
        return Verdict(exercise, WRONG, "This is the library's own answer: write yours.")
    return _with_advice(judge(exercise, answer))


def _with_advice(verdict: Verdict) -> Verdict:
    """What to do where an answer uses what only a whole run of the notebook defines."""
    missed = _NO_NAME.match(verdict.text) if verdict.status == WRONG else None
    if missed is None:
        return verdict
    advice = (
        f"`memlab check` runs only a notebook's imports, functions, classes and plain constants: "
        f"if another line makes {missed[1]}, put that line into the function, or hand {missed[1]} "
        f"over as an argument."
    )
    return replace(verdict, text=f"{verdict.text} {advice}")
