"""Answers that are the lesson's own solution with a few words replaced.

A table of such edits is the shortest way to write down what learners get wrong, or right in another
way:

    REFUSED = [("9.2", "sizes are forgotten", ("blocks.abs().amax(1)", "blocks.amax(1)"))]
"""

import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from memlab.course import exercises
from memlab.course.answers import cell_of, judged
from memlab.course.days import day, exercise_of
from memlab.course.exercises import Verdict

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"

Edit = tuple[str, str]  # what stands in the solution, what takes its place


def each(table):
    """The parameter `edit` of a test, from rows of an exercise, what is done to its solution, and
    the edits."""
    rows = [pytest.param((row[0], row[2:]), id=f"{row[0]} {row[1]}") for row in table]
    return pytest.mark.parametrize("edit", rows)


def verdict_on(edit: tuple[str, tuple[Edit, ...]], folder: Path, *, named: bool = False) -> Verdict:
    """As `memlab check` judges a notebook with these edits in it; unless asked for, the mistake is
    not looked for among the named ones, which takes longer than the check."""
    id_, changes = edit
    number = int(id_.split(".")[0])
    (source,) = SOLUTIONS.glob(f"day{number:02d}_*.ipynb")
    notebook = json.loads(source.read_text(encoding="utf-8"))
    cell = _cell_to_edit(notebook, cell_of(source, id_), changes)
    cell["source"] = _edited("".join(cell["source"]), changes)
    path = folder / source.name
    path.write_text(json.dumps(notebook), encoding="utf-8")
    nameless = nullcontext() if named else patch.object(exercises, "_mistake", return_value="")
    with nameless:
        return next(judged(path, day(number).exercises, [exercise_of(id_)]))


def _cell_to_edit(notebook: dict, answer: str, changes: tuple[Edit, ...]) -> dict:
    """The one cell that has it all, or the one that defines the answer."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = [cell for cell in cells if _edited("".join(cell["source"]), changes) is not None]
    own = [cell for cell in found if "".join(cell["source"]) == answer]
    (cell,) = own or found  # an edit of several cells, or of none, is a mistake in the table
    return cell


def _edited(source: str, changes: tuple[Edit, ...]) -> str | None:
    """None where one of the edits finds nothing."""
    source += "\n"
    for before, after in changes:
        if before not in source:
            return None
        source = source.replace(before, after)
    return source
