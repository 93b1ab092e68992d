"""Colab and Kaggle: executed cells become the copy that hints, checks and diffs read."""

import json
from types import SimpleNamespace

import pytest

from memlab.course import answers, days, hosted, notebooks, workspace
from memlab.course.solutions import solution

LESSON = days.notebook(1)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A machine without a clone, whose current folder is empty."""
    monkeypatch.setattr(days, "IS_CLONE", False)
    monkeypatch.setattr(days, "PACKAGED", days.ROOT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shell():
    """IPython's parts that `prepare` uses; `run` executes a cell's callbacks."""
    callbacks = []
    events = SimpleNamespace(register=lambda event, function: callbacks.append((event, function)))
    made = SimpleNamespace(events=events, user_ns={"In": [""]}, callbacks=callbacks)

    def run(source):
        made.user_ns["In"].append(source)
        for event, function in callbacks:
            assert event == "post_run_cell"
            function(SimpleNamespace())

    made.run = run
    return made


def cell_of_exercise(notebook, id_):
    return answers.cell_of(notebook, id_)


def test_elsewhere_nothing_happens(elsewhere, shell, monkeypatch):
    for name in hosted.HOSTS:
        monkeypatch.delenv(name, raising=False)
    hosted.prepare(1, shell)
    assert list(elsewhere.iterdir()) == shell.callbacks == []


@pytest.mark.parametrize("host", hosted.HOSTS)
def test_an_executed_answer_is_in_the_copy_that_diff_and_check_read(
    elsewhere, shell, monkeypatch, host
):
    monkeypatch.setenv(host, "1")
    hosted.prepare(1, shell)
    copy = elsewhere / "work" / LESSON.name
    assert workspace.folder() == copy.parent
    assert cell_of_exercise(copy, "1.1") == cell_of_exercise(LESSON, "1.1")
    first = cell_of_exercise(days.notebook(1, "solutions"), "1.1").replace("return", "return 2 *")
    shell.run(first)
    assert cell_of_exercise(copy, "1.1") == first
    last = cell_of_exercise(days.notebook(1, "solutions"), "1.1")
    shell.run(last)
    shell.run("print('another cell')")
    assert cell_of_exercise(copy, "1.1") == last
    answer = answers.answers(copy)["1.1"]
    assert answer.__code__.co_code == solution("1.1").__code__.co_code


def test_a_cell_with_an_error_is_kept_too(tmp_path):
    lesson = tmp_path / "day01_x.ipynb"
    cells = [{"cell_type": "code", "source": ["def half(n):\n", "    ..."]}]
    lesson.write_text(json.dumps({"cells": cells, "metadata": {}}))
    [cell] = hosted.with_answers(lesson, ["def half(n):\n    return n /"])["cells"]
    assert cell["source"] == "def half(n):\n    return n /"


def test_a_helper_beside_the_answer_is_kept(tmp_path):
    lesson = tmp_path / "day01_x.ipynb"
    cells = [{"cell_type": "code", "source": "def half(n):\n    ..."}]
    lesson.write_text(json.dumps({"cells": cells, "metadata": {}}))
    written = "def helper(n):\n    return n / 2\n\ndef half(n):\n    return helper(n)"
    [cell] = hosted.with_answers(lesson, [written, "def other():\n    pass"])["cells"]
    assert cell["source"] == written


def test_without_a_clone_the_folder_of_a_learner_is_below_the_current_one(elsewhere):
    assert workspace.folder() == elsewhere / "work"
    copy = workspace.start(1)
    assert copy.path == elsewhere / "work" / LESSON.name
    assert notebooks.heading(copy.path)
