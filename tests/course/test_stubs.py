"""A lesson with its stubs runs to its end, because each exercise continues with its reference.

A separate process runs the cells in order without Jupyter. `make lessons` runs them in Jupyter.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quick import quick

from memlab.course.days import ROOT

LESSONS = sorted((ROOT / "lessons").glob("day*.ipynb"))
RUN = """
import json, linecache, sys
namespace = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin), 1):
    name = f"<code cell {number}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name  # inspect reads it
    exec(compile(source, name, "exec"), namespace)
"""


def cells(lesson: Path) -> list[str]:
    """Return the lesson's code cells."""
    notebook = json.loads(lesson.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(sources: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Run the cells in order in one namespace."""
    return subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(sources),
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )


QUICK = [path for path in LESSONS if path.stem.startswith("day20")]  # among the quickest


@pytest.mark.slow
@pytest.mark.parametrize("lesson", quick(QUICK, LESSONS), ids=lambda lesson: lesson.stem)
def test_a_lesson_with_its_stubs_runs_to_its_end(lesson):
    sources = cells(lesson)
    ended = run(sources, lesson.parent)
    assert ended.returncode == 0, ended.stderr
    exercises = re.findall(r'= exercise\("([\d.]+)"', "\n".join(sources))
    not_attempted = [f"[ ] {name} not attempted: going on with the reference" for name in exercises]
    assert exercises
    assert [line for line in not_attempted if line not in ended.stdout] == []


def test_a_cell_that_fails_is_named(tmp_path):
    ended = run(["x = 1", "print(x)", "y = z"], tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "1\n")
    assert 'File "<code cell 3>", line 1' in ended.stderr
