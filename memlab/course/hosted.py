"""Colab and Kaggle: a lesson runs there without a file that hints, checks and diffs could read.

`prepare(1)`, in a lesson's first cell, makes the learner's folder and saves the executed cells as
the learner's copy. Then `!memlab hint 1.1`, `!memlab check 1` and `!memlab diff 1.1` work as in a
clone. Elsewhere it does nothing.
"""

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from memlab.course import days, notebooks, workspace
from memlab.course.cells import definitions
from memlab.internals.files import write_beside

HOSTS = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")  # environment variables that they set


def is_hosted() -> bool:
    """Return True on Colab and on Kaggle."""
    return any(name in os.environ for name in HOSTS)


def prepare(number: int, shell: Any = None) -> None:
    """Make the learner's folder and save each cell that runs from now on; only on a host.

    `shell` is IPython's, by default the running one. Raises ValueError if there is no such day.
    """
    if not is_hosted():
        return
    if shell is None:
        from IPython import get_ipython

        shell = get_ipython()
    copy = workspace.start(number).path
    os.chdir(copy.parent)  # exercise and guess record their results here
    # A notebook there is no file in the kernel's folder, which `memlab diff` and `check` could
    # read.
    shell.events.register("post_run_cell", partial(_save, copy, days.notebook(number), shell))
    print(
        f"Ready. Type !memlab hint {number}.1 in a cell for a hint, !memlab check {number} to "
        f"check the day, !memlab diff {number}.1 --yes for the solution."
    )


def _save(copy: Path, lesson: Path, shell: Any, result: object = None) -> None:
    notebook = json.dumps(with_answers(lesson, shell.user_ns["In"]), indent=1, ensure_ascii=False)
    with write_beside(copy) as beside:
        beside.write_text(notebook + "\n", encoding="utf-8")


def with_answers(lesson: Path, executed: Iterable[str]) -> dict[str, Any]:
    """Return the lesson with its cells of functions and classes as they were last executed.

    An executed cell is recognized by the functions and classes that it defines.
    """
    latest_first = [(definitions(source), source) for source in executed][::-1]
    notebook = notebooks.read(lesson)
    for cell in notebook["cells"]:
        names = definitions("".join(cell["source"])) if cell["cell_type"] == "code" else set()
        if names:
            found = (source for defined, source in latest_first if names <= defined)
            cell["source"] = next(found, cell["source"])
    return notebook
