"""Check the answers in a notebook.

An answer is a value that a notebook passes to `exercise`. Only the code that defines answers runs
(see memlab.course.cells), so checking takes no longer than the checks themselves.
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
    """Return the answer to each exercise by id: a function or class, or an Unusable if none is
    defined. Raises ValueError if the file is not a notebook."""
    return {call.id: answer for call, answer, _ in run(parsed_cells(path), path.parent)}


def judged(
    path: Path,
    exercises: Sequence[Exercise],
    only: Sequence[Exercise] | None = None,
    announce: Callable[[Exercise], None] = lambda exercise: None,
) -> Iterator[Verdict]:
    """Yield a verdict on each exercise, or on some of them, in the notebook's order.

    As in the notebook, a right answer serves the later exercises, and the reference replaces a
    wrong one. Raises ValueError at once if the file is not a notebook.
    """
    return _judged(
        parsed_cells(path), path, exercises, exercises if only is None else only, announce
    )


def cell_of(path: Path, id_: str) -> str:
    """Return the source of the cell that defines the answer; raise ValueError if none does."""
    found = parsed_cells(path)
    if where := answering(found, id_):
        return found[where[1]].source
    raise ValueError(
        f"{path.name} has no cell that defines the answer to exercise {id_}, followed by a line "
        f'`name = exercise("{id_}", name)`; copy both from the lesson'
    )


# ------------------------------------------------------------------ checking


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
        if not wanted:
            break
        if exercise := known.get(call.id):
            is_wanted = wanted.pop(call.id, None) is not None
            if is_wanted:
                announce(exercise)
            verdict = _verdict(exercise, answer, exercises)
            if is_wanted:
                yield verdict
            if verdict.status != OK:
                namespace[call.target] = exercise.reference
    for exercise in wanted.values():
        announce(exercise)
        missing = (
            f'{path.name} has no line `name = exercise("{exercise.id}", name)`; copy it from the '
            f"lesson."
        )
        yield Verdict(exercise, WRONG, missing)


def _verdict(exercise: Exercise, answer: Any, others: Sequence[Exercise]) -> Verdict:
    if answer is exercise.reference:
        return Verdict(exercise, WRONG, "This is the library's own answer: write your own.")
    return _with_advice(judge(exercise, answer, others))


def _with_advice(verdict: Verdict) -> Verdict:
    """Add advice if an answer uses a name that only a full run of the notebook defines."""
    missed = _NO_NAME.match(verdict.text) if verdict.status == WRONG else None
    if missed is None:
        return verdict
    advice = (
        f"`memlab check` runs only a notebook's imports, functions, classes and plain constants: "
        f"if another line defines {missed[1]}, move that line into the function, or pass "
        f"{missed[1]} as an argument."
    )
    return replace(verdict, text=f"{verdict.text} {advice}")
