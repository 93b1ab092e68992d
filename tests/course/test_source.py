"""One source gives a solution and a lesson, before execution."""

import importlib.util
import subprocess
from importlib.metadata import version

import pytest

from memlab.course.source import SourceError, in_bytes, lesson_notebook, solution_notebook

SOURCE = '''\
# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Some Python 3.99
#     name: some-python
# ---

# %% [markdown]
# # Day 5: halves

# %%
import os


# %%
def halves(n):
    """Two whole numbers that add up to n."""
    ### BEGIN SOLUTION
    smaller = n // 2

    # what is left
    return smaller, n - smaller
    ### END SOLUTION


# %%
halves = exercise("5.1", halves)
halves(7)


# %%
def larger(n):
    ### BEGIN SOLUTION
    return max(halves(n))
    ### END SOLUTION
    ### BEGIN STUB
    # pair = halves(n)
    # if n:
    #     return pair[0]  # is it the larger?
    #
    # raise NotImplementedError
    ### END STUB
'''


def code(notebook):
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


# ------------------------------------------------------------------ regions


def test_a_lesson_raises_with_the_exercise_and_its_number_of_lines():
    assert code(lesson_notebook(SOURCE))[1] == (
        'def halves(n):\n    """Two whole numbers that add up to n."""\n'
        '    raise NotImplementedError("exercise 5.1, about 2 lines")'
    )


def test_one_line_is_singular():
    text = "# %%\ndef f():\n  ### BEGIN SOLUTION\n  return 1\n  ### END SOLUTION\n"
    text += 'f = exercise("5.3", f)\n'
    [cell] = code(lesson_notebook(text))
    assert cell.split("\n")[1] == '  raise NotImplementedError("exercise 5.3, about 1 line")'


def test_a_stub_block_is_uncommented_in_the_lesson():
    assert code(lesson_notebook(SOURCE))[3] == (
        "def larger(n):\n    pair = halves(n)\n    if n:\n"
        "        return pair[0]  # is it the larger?\n\n    raise NotImplementedError"
    )


def test_a_solution_has_neither_markers_nor_stubs():
    assert code(solution_notebook(SOURCE))[1:4:2] == [
        'def halves(n):\n    """Two whole numbers that add up to n."""\n    smaller = n // 2\n\n'
        "    # what is left\n    return smaller, n - smaller",
        "def larger(n):\n    return max(halves(n))",
    ]


def test_no_line_of_a_solution_is_in_the_lesson():
    lesson = in_bytes(lesson_notebook(SOURCE)).decode()
    hidden = ("smaller = n // 2", "what is left", "return smaller, n - smaller", "max(halves(n))")
    assert [line for line in hidden if line in SOURCE] == list(hidden)
    assert [line for line in hidden if line in lesson] == []


METHODS = """\
# %%
class Store:
    def put(self, x):
        ### BEGIN SOLUTION
        self.x = x
        ### END SOLUTION

    def get(self):
        def read():
            ### BEGIN SOLUTION
            found = self.x
            return found
            ### END SOLUTION

        return read()

# %%
other = exercise("5.7", other)
Store = course.exercise("5.8", Store)

# %%
Store = exercise("5.9", Store)
"""


def test_a_region_in_a_method_belongs_to_the_nearest_exercise_of_its_class():
    assert code(lesson_notebook(METHODS))[0].split("\n") == [
        "class Store:",
        "    def put(self, x):",
        '        raise NotImplementedError("exercise 5.8, about 1 line")',
        "",
        "    def get(self):",
        "        def read():",
        '            raise NotImplementedError("exercise 5.8, about 2 lines")',
        "",
        "        return read()",
    ]


def test_an_exercise_above_a_region_does_not_count():
    text = '# %%\nf = exercise("5.1", f)\n\n# %%\n' + IN_FUNCTION
    with pytest.raises(SourceError, match="neither an exercise nor a stub; add f = exercise"):
        lesson_notebook(text)


IN_FUNCTION = "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n"


@pytest.mark.parametrize(
    ("cell", "line", "message"),
    [
        (IN_FUNCTION, 5, "a region with neither an exercise nor a stub; add f = exercise(..., f)"),
        (IN_FUNCTION + 'g = exercise("5.1", f)\n', 5, "a region with neither"),
        (IN_FUNCTION + 'f = exercise("5.1", g)\n', 5, "a region with neither"),
        (IN_FUNCTION.replace("return 1", "# 1"), 7, "the cell is not valid Python"),
        (IN_FUNCTION.replace("return 1", "# 1") + "    x = 1\n", 5, "a region without code"),
        ("f = 1\n### BEGIN SOLUTION\nf = 2\n### END SOLUTION\n", 5, "a region outside a function"),
        (
            "class A:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION\n",
            5,
            "outside a func",
        ),
        ("### BEGIN SOLUTION\nx = 1\n", 4, "### BEGIN SOLUTION without ### END SOLUTION"),
        ("x = 1\n### END SOLUTION\n", 5, "### END SOLUTION without ### BEGIN SOLUTION"),
        ("x = 1\n### END STUB\n", 5, "### END STUB without ### BEGIN STUB"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n", 4, "### BEGIN SOLUTION without"),
        ("### BEGIN STUB\n# x = 2\n### END STUB\n", 4, "a stub block must directly follow"),
        (IN_FUNCTION + "\n    ### BEGIN STUB\n    ### END STUB\n", 9, "a stub block must directly"),
        (
            IN_FUNCTION + "    ### BEGIN STUB\n    # pass\n",
            8,
            "### BEGIN STUB without ### END STUB",
        ),
        (IN_FUNCTION + "    ### BEGIN STUB\n    pass\n    ### END STUB\n", 9, "must be a comment"),
        (
            IN_FUNCTION + "    ### BEGIN STUB\n    # if:\n    ### END STUB\n",
            4,
            "is not valid Python",
        ),
        (IN_FUNCTION.replace("### BEGIN", "# BEGIN"), 5, "'# BEGIN SOLUTION' is not a marker"),
        (
            IN_FUNCTION.replace("### END SOL", "### end sol"),
            7,
            "'### end solUTION' is not a marker",
        ),
        ("x = 1\ny = (\n", 5, "the cell is not valid Python"),
        ("%time x = 1\n", 4, "the cell is not valid Python"),
    ],
)
def test_an_invalid_region_is_refused_with_its_file_and_line(cell, line, message):
    text = f"# %%\nx = 0\n# %%\n{cell}"
    with pytest.raises(SourceError) as refused:
        lesson_notebook(text, "solutions/day05_x.py")
    assert str(refused.value).startswith(f"solutions/day05_x.py:{line}: ")
    assert message in str(refused.value)
    assert refused.value.line == line


@pytest.mark.parametrize(
    ("options", "line", "message"),
    [
        ('tags=["a"] reason=a "time"', 4, "a cell's options cannot be read"),
        ('tags=["a"], reason="b"', 1, "jupytext cannot read this file"),
        ('tags="a"', 1, "jupytext cannot read this file"),
    ],
)
def test_options_that_jupytext_drops_are_refused(options, line, message):
    with pytest.raises(SourceError, match=f"day05.py:{line}: .*{message}"):
        solution_notebook(f"# %%\nx = 0\n# %% {options}\nx = 0\n", "day05.py")


def test_a_cell_without_code_is_refused():
    with pytest.raises(SourceError, match="a code cell without code"):
        solution_notebook("# %%\nx = 0\n\n# %%\n\n# %%\ny = 0\n")


# ------------------------------------------------------------------ notebooks


def test_cell_ids_are_positions_and_equal_in_both_notebooks():
    ids = [f"day05-{place:02}" for place in range(1, 6)]
    for make in (solution_notebook, lesson_notebook):
        assert [cell["id"] for cell in make(SOURCE, "solutions/day05_x.py")["cells"]] == ids


def test_the_metadata_has_no_version_and_no_jupytext_fields():
    for make in (solution_notebook, lesson_notebook):
        assert make(SOURCE)["metadata"] == {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }


def test_tags_and_their_reason_are_kept_and_no_other_metadata():
    text = '# %% a title tags=["nbval-skip"] reason="it\'s long" other=1\nx = 1\n'
    text += '# %% [markdown]\n"""\nprose\n"""\n'
    assert [cell["metadata"] for cell in lesson_notebook(text)["cells"]] == [
        {"tags": ["nbval-skip"], "reason": "it's long"},
        {},
    ]


def test_a_comment_stays_a_comment():
    assert code(lesson_notebook("# %%\n# !ls\n# %time x\nx = 1\n")) == ["# !ls\n# %time x\nx = 1"]


def test_the_layout_of_a_file_is_fixed():
    assert in_bytes(lesson_notebook("# %%\nx = 'ü'\n", "day05_x.py")).decode() == LAYOUT


LAYOUT = """\
{
 "cells": [
  {
   "cell_type": "code",
   "execution_count": null,
   "id": "day05-01",
   "metadata": {},
   "outputs": [],
   "source": [
    "x = 'ü'"
   ]
  }
 ],
 "metadata": {
  "kernelspec": {
   "display_name": "Python 3",
   "language": "python",
   "name": "python3"
  },
  "language_info": {
   "name": "python"
  }
 },
 "nbformat": 4,
 "nbformat_minor": 5
}
"""


# ------------------------------------------------------------------ Colab and Kaggle


ADDRESS = "https://github.com/owner/name"


def test_a_lesson_of_a_published_course_has_badges_and_a_cell_that_sets_up():
    plain = lesson_notebook(SOURCE, "lessons/day05_halves.py")
    hosted = lesson_notebook(SOURCE, "lessons/day05_halves.py", ADDRESS)
    badges, set_up = hosted["cells"][1:3]
    assert hosted["cells"][:1] + hosted["cells"][3:] == plain["cells"]
    path = "blob/main/lessons/day05_halves.ipynb"
    assert f"(https://colab.research.google.com/github/owner/name/{path})" in badges["source"]
    assert f"welcome?src={ADDRESS}/{path})" in badges["source"]
    assert "hosted.prepare(5)" in set_up["source"]


def test_the_cell_installs_memlab_beside_the_installed_torch(monkeypatch):
    """Only where memlab is missing."""
    lesson = lesson_notebook(SOURCE, "day05_halves.py", ADDRESS)
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    source = lesson["cells"][2]["source"]
    exec(source, {})
    assert commands == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(source, {})
    [[_, *command]] = commands
    packages = [f"memlab[plot]@git+{ADDRESS}", f"torch=={version('torch')}"]
    assert command == ["-m", "pip", "install", "--quiet", *packages]
