"""Answers made by editing the lesson's solution.

A table of edits is the shortest way to write wrong answers, and right answers of another form:

    REFUSED = [("9.2", "sizes are forgotten", ("blocks.abs().amax(1)", "blocks.amax(1)"))]
"""

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from memlab.course import exercises
from memlab.course.answers import cell_of, judged
from memlab.course.days import exercise_of
from memlab.course.exercises import Verdict

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"

Edit = tuple[str, str]  # (text in the solution, replacement)

answer_cell = cache(cell_of)  # parses the whole solution


def each(table):
    """Parametrize a test's `edit` with rows of (exercise, description, *edits)."""
    rows = [pytest.param((row[0], row[2:]), id=f"{row[0]} {row[1]}") for row in table]
    return pytest.mark.parametrize("edit", rows)


def verdict_on(edit: tuple[str, tuple[Edit, ...]], folder: Path, *, named: bool = False) -> Verdict:
    """Check a notebook with these edits as `memlab check` does. By default skip the search for the
    named mistake, which takes longer than the check."""
    id_, changes = edit
    number = int(id_.split(".")[0])
    (source,) = SOLUTIONS.glob(f"day{number:02d}_*.ipynb")
    notebook = json.loads(source.read_text(encoding="utf-8"))
    cell = _cell_to_edit(notebook, answer_cell(source, id_), changes)
    cell["source"] = _edited("".join(cell["source"]), changes)
    path = folder / source.name
    path.write_text(json.dumps(notebook), encoding="utf-8")
    nameless = nullcontext() if named else patch.object(exercises, "_mistake", return_value="")
    with nameless:
        return next(judged(path, [exercise_of(id_)]))


def _cell_to_edit(notebook: dict, answer: str, changes: tuple[Edit, ...]) -> dict:
    """Return the cell with all the replaced texts, preferably the one that defines the answer."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = [cell for cell in cells if _edited("".join(cell["source"]), changes) is not None]
    own = [cell for cell in found if "".join(cell["source"]) == answer]
    (cell,) = own or found  # fails if the edits fit several cells or none
    return cell


def _edited(source: str, changes: tuple[Edit, ...]) -> str | None:
    """Return the edited source; None if an edit's text is missing."""
    source += "\n"
    for before, after in changes:
        if before not in source:
            return None
        source = source.replace(before, after)
    return source
