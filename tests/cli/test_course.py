"""The learner's commands, on a course of one small day."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console

from memlab.cli import app, course, terminal
from memlab.course import days, progress
from memlab.course.exercises import Exercise, equal

NAME = "day07_test.ipynb"
COMMANDS = ("start", "check", "hint", "diff", "progress", "reset")
STUB = 'def double(x):\n    raise NotImplementedError("exercise 7.1, about 1 line")'
RIGHT = "def double(x):\n    return 2 * x"
WRONG = "def double(x):\n    return x * x"
CALL = 'double = exercise("7.1", double)'
SECOND = ("def half(x):\n    return x / 2", 'half = exercise("7.2", half)')
SPENT = "That was the last hint; memlab diff 7.1 shows a solution"


def check_double(answer) -> str:
    equal("double(3)", answer(3), 6)
    return "one case"


def check_half(answer) -> str:
    equal("half(3)", answer(3), 1.5)
    return "one case"


def exercise(id_: str, title: str, minutes: int, difficulty: int, check) -> Exercise:
    hints = ("a nudge", "a [push]", "a shove\n    in two lines")
    return Exercise(id_, title, minutes, difficulty, hints, lambda x: 2 * x, check, ())


DAY = SimpleNamespace(
    exercises=(
        exercise("7.1", "Double [it]", 5, 1, check_double),
        exercise("7.2", "Half of it", 20, 3, check_half),
    )
)


def one_day(number: int) -> SimpleNamespace:
    if number != 7:
        raise ValueError(f"got day {number}; there is day 7")
    return DAY


def write_notebook(path: Path, *sources: str) -> None:
    cells = [{"cell_type": "markdown", "source": "# Day 7: doubling [pairs]"}]
    cells += [{"cell_type": "code", "source": source} for source in sources]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": {}}), encoding="utf-8")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    """A repository with one day, without Jupyter."""
    monkeypatch.setattr(days, "ROOT", tmp_path)
    monkeypatch.setattr(days, "numbers", lambda: [7])
    monkeypatch.setattr(days, "day", one_day)
    monkeypatch.setattr(days, "texts", lambda number: one_day(number).exercises)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write_notebook(tmp_path / "lessons" / NAME, STUB, CALL, *SECOND)
    write_notebook(tmp_path / "solutions" / NAME, RIGHT, CALL, *SECOND)
    return tmp_path


@pytest.fixture
def copy(root, memlab_command):
    """Write the learner's copy."""
    memlab_command("start", 7)

    def write(*sources: str) -> Path:
        write_notebook(root / "work" / NAME, *sources)
        return root / "work" / NAME

    return write


@pytest.fixture
def answering(monkeypatch):
    """Set the user's input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.fixture
def record(root):
    """Return the record of an exercise."""
    return lambda id_="7.1": progress.read(root / "work").exercise(id_)


# ------------------------------------------------------------------ help and errors


def test_help_lists_the_courses_commands_last_in_their_own_panel(memlab_command):
    text = memlab_command("--help").out
    text = text[text.index("Commands") :]
    places = [text.index(f" {name} ") for name in ("measure  ", "doctor  ")]
    places.append(text.index("The course"))
    places += [text.index(f" {name}  ") for name in COMMANDS]
    assert places == sorted(places)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_examples_that_parse(memlab_command, command):
    outcome = memlab_command(command, "--help")
    assert (outcome.status, outcome.err) == (0, "")
    lines = [line.split() for line in outcome.out.splitlines()]
    examples = [words[2:] for words in lines if words[:2] == ["memlab", command]]
    assert bool(examples) == (command != "progress")
    for arguments in examples:
        typer.main.get_command(app).commands[command].make_context(command, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start", 8], "got day 8; there is day 7"),
        (["reset", 8, "--yes"], "got day 8; there is day 7"),
        (["check", 8], "got day 8; there is day 7"),
        (["check", "8.1"], "got day 8; there is day 7"),
        (["check", "7.3"], "got exercise 7.3; day 7 has 7.1, 7.2"),
        (["check", "seven"], "got seven; give a day, such as 1, or one of its exercises"),
        (["check", "7.x"], "got '7.x'; give the number of an exercise"),
        (["hint", "7.3"], "got exercise 7.3; day 7 has 7.1, 7.2"),
        (["hint", "7"], "got '7'; give the number of an exercise"),
        (["diff", "7.3"], "got exercise 7.3; day 7 has 7.1, 7.2"),
        (["start", "seven"], "got the day seven; expected an integer, such as 1; see memlab"),
        (["start", 7, 8], "got 8 after the day; give one day, and options of JupyterLab after --"),
        (["check", 7], f"there is no work/{NAME} yet; run memlab start 7 to copy the lesson"),
        (["check", "7.1"], "run memlab start 7 to copy"),
        (["diff", "7.1"], "run memlab start 7 to copy"),
    ],
)
def test_bad_input_is_one_line_and_creates_nothing(usage_error, root, arguments, message):
    assert message in usage_error(*arguments)
    assert not (root / "work").exists()


@pytest.mark.parametrize("command", [["check", 7], ["check", "7.1"], ["diff", "7.1", "--yes"]])
def test_an_unreadable_copy_is_one_line_and_kept(usage_error, copy, command):
    path = copy()
    path.write_text("<<<<<<< mine")
    assert "cannot be read as a notebook" in usage_error(*command)
    assert path.read_text() == "<<<<<<< mine"


def test_a_missing_lesson_is_one_line(usage_error, root):
    (root / "lessons" / NAME).unlink()
    assert "there is no notebook of day 7 in lessons/" in usage_error("start", 7)


@pytest.mark.parametrize("command", ["start", "reset"])
def test_a_read_only_folder_is_one_line(memlab_command, root, command):
    (root / "work").write_text("a file")
    outcome = memlab_command(command, 7, *(["--yes"] if command == "reset" else []))
    [line] = outcome.err.splitlines()
    assert outcome.status == 2
    assert line.startswith(f"memlab: {root / 'work'}: File exists; your work is safe")
    assert "make work a folder that you can write to" in line


@pytest.mark.parametrize("command", [["check", 7], ["hint", "7.1"]])
def test_a_full_disk_is_one_line(memlab_command, copy, monkeypatch, command):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    copy(RIGHT, CALL, *SECOND)
    monkeypatch.setattr(progress, "update", fail)
    outcome = memlab_command(*command)
    [line] = outcome.err.splitlines()
    assert outcome.status == 2
    assert line.startswith("memlab: work: No space left on device; your work is safe")


# ------------------------------------------------------------------ start


def test_start_names_the_copy_and_explains_how_to_install_jupyterlab(memlab_command, root):
    outcome = memlab_command("start", 7)
    assert (outcome.status, outcome.err) == (0, "")
    first, second = outcome.out.splitlines()
    assert first == f"work/{NAME} is a fresh copy of lessons/{NAME}"
    assert "JupyterLab is not installed: run make lab; any other program" in second
    assert (root / "work" / NAME).exists()


def test_a_second_start_keeps_the_copy(memlab_command, copy):
    path = copy(RIGHT)
    before = path.read_bytes()
    assert f"work/{NAME} is unchanged\n" in memlab_command("start", 7).out
    assert path.read_bytes() == before


def test_start_reports_a_changed_lesson(memlab_command, root):
    memlab_command("start", 7)
    write_notebook(root / "lessons" / NAME, STUB, CALL, *SECOND, "more = 1")
    out = memlab_command("start", 7).out
    assert "the lesson has changed since you copied it (memlab reset 7 backs up your copy" in out


def test_start_reports_an_unreadable_copy(memlab_command, copy):
    copy().write_text("")
    out = memlab_command("start", 7).out
    assert "is not a readable notebook (memlab reset 7 backs up your copy" in out


def test_a_copy_outside_the_current_folder_is_shown_with_its_full_path(
    memlab_in, root, tmp_path_factory
):
    outcome = memlab_in(tmp_path_factory.mktemp("elsewhere"), "start", 7)
    assert outcome.out.startswith(f"{root / 'work' / NAME} is a fresh copy")


@pytest.fixture
def jupyterlab(tmp_path, monkeypatch):
    """A fake JupyterLab that records how it was called. Return a function that reads the record."""
    package = tmp_path / "packages" / "jupyterlab"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, os, random, sys\n"
        "told = [sys.argv[1:], os.getcwd(), dict(os.environ), random.__file__]\n"
        f"json.dump(told, open({str(tmp_path / 'told.json')!r}, 'w'))\n"
        "sys.exit(3 if '--fail' in sys.argv else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return lambda: json.loads((tmp_path / "told.json").read_text())


def test_start_opens_the_copy_in_jupyterlab(memlab_command, jupyterlab, root, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    outcome = memlab_command("start", 7)
    assert (outcome.status, outcome.err) == (0, "")
    assert "press Ctrl-C here to stop it" in outcome.out
    arguments, folder, environment, _ = jupyterlab()
    assert f"--ServerApp.root_dir={root}" in arguments  # so that links in a lesson work
    assert f"--LabApp.default_url=/lab/tree/work/{NAME}" in arguments
    assert ("--allow-root" in arguments) == (os.geteuid() == 0)
    assert folder == str(root / "work")
    assert environment["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    assert environment["PATH"].endswith(os.pathsep + os.environ["PATH"])
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(("user", "options"), [(0, ["--allow-root"]), (1000, [])])
def test_jupyterlab_gets_allow_root_only_for_root(
    memlab_command, jupyterlab, monkeypatch, user, options
):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    memlab_command("start", 7)
    assert jupyterlab()[0][3:] == ["-y", *options]


def test_options_after_two_dashes_reach_jupyterlab(memlab_command, jupyterlab):
    memlab_command("start", 7, "--", "--no-browser", "--port", "8890")
    assert jupyterlab()[0][-3:] == ["--no-browser", "--port", "8890"]


def test_an_existing_wait_policy_is_kept(memlab_command, jupyterlab, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    memlab_command("start", 7)
    assert jupyterlab()[2]["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_learners_file_named_like_a_module_does_not_break_jupyterlab(
    memlab_command, jupyterlab, root
):
    memlab_command("start", 7, "--no-open")
    (root / "work" / "random.py").write_text("raise ValueError('not Python\\'s')")
    assert memlab_command("start", 7).status == 0
    assert jupyterlab()[3] != str(root / "work" / "random.py")


def test_start_returns_jupyterlabs_status(memlab_command, jupyterlab):
    assert memlab_command("start", 7, "--", "--fail").status == 3


def test_no_open_only_makes_the_copy(memlab_command, jupyterlab, root):
    outcome = memlab_command("start", 7, "--no-open")
    assert outcome.out == f"work/{NAME} is a fresh copy of lessons/{NAME}\n"
    with pytest.raises(FileNotFoundError):
        jupyterlab()


class Server:
    """A fake process; `events` lists the results of its waits."""

    def __init__(self, *events: int | type[BaseException]):
        self.events, self.log = list(events), []

    def wait(self, timeout: float | None) -> int:
        self.log.append(timeout)
        event = self.events.pop(0)
        if event is subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired("jupyterlab", timeout)
        if isinstance(event, int):
            return event
        raise event

    def terminate(self) -> None:
        self.log.append("terminate")


@pytest.mark.parametrize(
    ("events", "status", "log"),
    [
        ([0], 0, [None]),
        ([3], 3, [None]),
        ([KeyboardInterrupt, 0], 0, [None, 10]),
        ([KeyboardInterrupt, -signal.SIGINT], 0, [None, 10]),
        ([KeyboardInterrupt, KeyboardInterrupt, 0], 0, [None, 10, 10]),
        ([KeyboardInterrupt, subprocess.TimeoutExpired, 0], 0, [None, 10, "terminate", 10]),
    ],
)
def test_ctrl_c_waits_for_jupyterlab_and_terminates_it_if_it_hangs(events, status, log):
    server = Server(*events)
    assert course._exit_status(server) == status
    assert server.log == log


# ------------------------------------------------------------------ check


def test_check_checks_every_exercise_and_records_the_results(memlab_command, copy, record):
    copy(WRONG, CALL, *SECOND)
    outcome = memlab_command("check", 7)
    assert (outcome.status, outcome.err) == (1, "")
    assert outcome.out.splitlines() == [
        "[x] 7.1 double(3) gave 9, wanted 6. Going on with the reference. Hint: memlab hint 7.1",
        "[ok] 7.2  one case",
        "",
        "1 of 2 right",
    ]
    assert record("7.1") == progress.ExerciseProgress("wrong", checks=1)
    assert record("7.2") == progress.ExerciseProgress("ok", checks=1)


def test_check_succeeds_if_all_is_right(memlab_command, copy):
    copy(RIGHT, CALL, *SECOND)
    outcome = memlab_command("check", 7)
    assert outcome.status == 0
    assert outcome.out.endswith("2 of 2 right\n")


def test_an_unchanged_lesson_is_not_attempted(memlab_command, record):
    memlab_command("start", 7)
    outcome = memlab_command("check", "7.1")
    assert outcome.status == 1
    assert outcome.out == "[ ] 7.1 not attempted\n"
    assert record() == progress.ExerciseProgress("not attempted", checks=0)


def test_checking_one_exercise_leaves_the_others(memlab_command, copy, record):
    copy(WRONG, CALL, *SECOND)
    outcome = memlab_command("check", "7.2")
    assert (outcome.status, outcome.out) == (0, "[ok] 7.2  one case\n")
    assert (record("7.1").checks, record("7.2").checks) == (0, 1)


def test_checks_are_counted_and_a_solved_exercise_stays_solved(memlab_command, copy, record):
    copy(RIGHT, CALL)
    memlab_command("check", "7.1")
    copy(WRONG, CALL)
    memlab_command("check", "7.1")
    assert record() == progress.ExerciseProgress("ok", checks=2)


def test_an_interrupted_check_records_nothing(memlab_command, copy, root):
    copy(*SECOND, "def double(x):\n    raise KeyboardInterrupt", CALL)
    before = (root / "work" / progress.FILE).read_bytes()
    outcome = memlab_command("check", 7)
    assert (outcome.status, outcome.err) == (130, "memlab: interrupted; nothing was written\n")
    assert (root / "work" / progress.FILE).read_bytes() == before


def test_check_backs_up_unreadable_progress(memlab_command, copy, root, record):
    copy(RIGHT, CALL, *SECOND)
    (root / "work" / progress.FILE).write_text("half of it")
    outcome = memlab_command("check", 7)
    assert outcome.status == 0
    assert (root / "work" / "progress.unreadable-1.json").read_text() == "half of it"
    assert record().checks == 1


def test_check_does_not_change_the_copy(memlab_command, copy):
    path = copy(WRONG, CALL, *SECOND)
    before = path.read_bytes()
    memlab_command("check", 7)
    assert path.read_bytes() == before


# ------------------------------------------------------------------ hint


def test_each_hint_is_shown_below_the_earlier_ones(memlab_command, copy, record):
    copy(WRONG, CALL)
    said = [memlab_command("hint", "7.1").out.splitlines() for _ in range(4)]
    first, second = "hint 1 of 3: a nudge", "hint 2 of 3: a [push]"
    third = ["hint 3 of 3: a shove", "    in two lines"]
    assert said[0] == ["7.1 Double [it]", first]
    assert said[1] == ["7.1 Double [it]", first, second]
    assert said[2] == ["7.1 Double [it]", first, second, *third, SPENT]
    assert said[3] == said[2]
    assert record() == progress.ExerciseProgress(hints=3)


def test_hints_are_counted_per_exercise(memlab_command, copy, record):
    memlab_command("hint", "7.1")
    memlab_command("hint", "7.2")
    assert (record("7.1").hints, record("7.2").hints) == (1, 1)


def test_before_start_only_the_first_hint_is_shown_and_nothing_is_recorded(memlab_command, root):
    for _ in range(2):
        assert memlab_command("hint", "7.1").out.splitlines() == [
            "7.1 Double [it]",
            "hint 1 of 3: a nudge",
            "Run memlab start 7 first; the next hints come after it",
        ]
    assert not (root / "work").exists()


# ------------------------------------------------------------------ diff

DIFF = f"""--- work/{NAME} (yours)
+++ solutions/{NAME} (the solution)
@@ -1,2 +1,2 @@
 def double(x):
-    return x * x
+    return 2 * x
"""


def test_diff_compares_the_cell_with_the_solutions(memlab_command, copy):
    copy("# mine", WRONG, CALL)
    memlab_command("check", "7.1")
    outcome = memlab_command("diff", "7.1")
    assert (outcome.status, outcome.out, outcome.err) == (0, DIFF, "")


def test_diff_shows_a_long_cell_in_full_without_line_breaks(memlab_command, copy, root):
    same = [f"    # [bold]{i}{'x' * 300}" for i in range(20)]
    copy("\n".join([WRONG, *same]), CALL)
    write_notebook(root / "solutions" / NAME, "\n".join([RIGHT, *same]), CALL)
    lines = memlab_command("diff", "7.1", "--yes").out.splitlines()
    assert lines[6:] == [f" {line}" for line in same]


def test_diff_reports_equal_cells(memlab_command, copy):
    copy(RIGHT, CALL)
    assert memlab_command("diff", "7.1", "--yes").out == (
        "7.1: your cell matches the solution line for line\n"
    )


def test_diff_is_coloured_in_a_terminal(memlab_command, copy, monkeypatch):
    copy(WRONG, CALL)
    colours = Console(force_terminal=True, color_system="standard", width=200)
    monkeypatch.setattr(terminal, "console", colours)
    out = memlab_command("diff", "7.1", "--yes").out
    assert "\x1b[31m-    return x * x\x1b[0m" in out
    assert "\x1b[32m+    return 2 * x\x1b[0m" in out
    assert "\n def double(x):\n" in out


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("answer", "shows"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_diff_asks_before_the_first_attempt(
    memlab_command, copy, answering, checked, answer, shows
):
    copy(STUB, CALL)
    if checked:
        memlab_command("check", "7.1")
    answering(answer)
    outcome = memlab_command("diff", "7.1")
    assert outcome.out.startswith("Show the solution before you have tried? [y/N] ")
    assert ("return 2 * x" in outcome.out) is shows
    assert outcome.status == (0 if shows else 1)


def test_without_an_answer_the_answer_is_no(memlab_command, copy, answering):
    copy(STUB, CALL)
    answering("")
    outcome = memlab_command("diff", "7.1")
    assert (outcome.status, outcome.err) == (1, "")
    assert outcome.out.endswith("\nno answer; pass --yes to continue without asking\n")


# ------------------------------------------------------------------ progress


def test_empty_progress_explains_how_to_start(memlab_command):
    outcome = memlab_command("progress")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith("run memlab start 7 to open the lesson\n")
    assert "2 exercises left, about 25 minutes" in outcome.out


def test_progress_shows_the_state_of_every_exercise(memlab_command, copy):
    copy(WRONG, CALL, *SECOND)
    memlab_command("check", 7)
    memlab_command("check", "7.1")
    memlab_command("hint", "7.1")
    lines = [line.split() for line in memlab_command("progress").out.splitlines()]
    assert lines == [
        ["exercise", "state", "min", "level", "checks", "hints"],
        ["Day", "7:", "doubling", "[pairs]"],
        ["7.1", "Double", "[it]", "tried", "5", "●○○○○", "2", "1"],
        ["7.2", "Half", "of", "it", "ok", "20", "●●●○○", "1"],
        [],
        ["1", "exercise", "left,", "about", "5", "minutes"],
    ]


def test_a_day_that_is_not_begun_has_one_line_of_progress(memlab_command):
    lines = [line.split() for line in memlab_command("progress").out.splitlines()]
    assert lines[:2] == [
        ["exercise", "state", "min", "level", "checks", "hints"],
        ["Day", "7:", "doubling", "[pairs]", "–", "25"],
    ]


def test_progress_says_what_you_can_do_after_the_days_that_are_solved(memlab_command, copy, root):
    lesson = json.loads((root / "lessons" / NAME).read_text(encoding="utf-8"))
    text = "# Day 7: doubling\n\n**Why?**\n\nAfter today you can double. About 25 minutes."
    lesson["cells"][0]["source"] = text
    (root / "lessons" / NAME).write_text(json.dumps(lesson), encoding="utf-8")
    copy(WRONG, CALL, *SECOND)
    memlab_command("check", 7)
    assert "What you can do now" not in memlab_command("progress").out
    copy(RIGHT, CALL, *SECOND)
    memlab_command("check", 7)
    out = memlab_command("progress").out
    assert "Every exercise is solved\n\nWhat you can do now:\n\nday 7: you can double\n" in out


def test_an_exercise_without_an_answer_is_not_tried(memlab_command):
    memlab_command("start", 7)
    memlab_command("check", 7)
    lines = [line.split() for line in memlab_command("progress").out.splitlines()]
    assert lines[2] == ["7.1", "Double", "[it]", "–", "5", "●○○○○"]


def test_a_day_without_a_lesson_has_no_title(memlab_command, root):
    (root / "lessons" / NAME).unlink()
    outcome = memlab_command("progress")
    assert outcome.status == 0
    assert outcome.out.splitlines()[1].split() == ["Day", "7", "–", "25"]


GUESSES = {
    "7.10": {"peak_gib": {"guessed": 2.0, "measured": 1.0}},
    "7.9": {
        "peak_mib": {"guessed": 1000.0, "measured": 8000.0},
        "live_bytes": {"guessed": 1234567.0},
        "share_percent": {"guessed": 0.0, "measured": 12.345},
    },
    "8.1": {"peak_gib": {"guessed": 3.0, "measured": 2.0}},
}


def test_progress_shows_guesses_beside_measurements(memlab_command, root):
    (root / "work").mkdir()
    progress.update(root / "work", lambda p: p.guesses.update(GUESSES))
    lines = memlab_command("progress").out.splitlines()
    assert [
        line.split() for line in lines[lines.index("Guesses, and how far off they were:") :]
    ] == [
        ["Guesses,", "and", "how", "far", "off", "they", "were:"],
        [],
        ["quantity", "guessed", "measured", "off", "by"],
        ["7.9", "peak_mib", "1,000", "8,000", "8.00", "×"],
        ["7.9", "live_bytes", "1,234,567", "–"],
        ["7.9", "share_percent", "0", "12.35", "∞"],
        ["7.10", "peak_gib", "2", "1", "2.00", "×"],
        ["8.1", "peak_gib", "3", "2", "1.50", "×"],
        ["day", "7:", "off", "by", "4.00", "×", "on", "average"],
        ["day", "8:", "off", "by", "1.50", "×", "on", "average"],
    ]


def test_unreadable_progress_is_backed_up(memlab_command, copy, root):
    (root / "work" / progress.FILE).write_text("half of it")
    assert memlab_command("progress").status == 0
    assert (root / "work" / "progress.unreadable-1.json").read_text() == "half of it"


# ------------------------------------------------------------------ reset


def test_reset_announces_its_changes_and_makes_them(memlab_command, copy, answering, root, record):
    path = copy(WRONG, CALL)
    mine = path.read_bytes()
    memlab_command("check", "7.1")
    answering("y\n")
    outcome = memlab_command("reset", 7)
    assert outcome.status == 0
    first, _, third = outcome.out.splitlines()
    backup = "work/backups/day07_test.1.ipynb"
    assert first == (
        f"memlab reset 7 moves work/{NAME} to {backup}, makes a fresh copy of the lesson, and "
        f"clears the checks, hints and guesses of day 7"
    )
    assert f"your copy is now {backup}" in outcome.out
    assert third.startswith(f"work/{NAME} is a fresh copy; if it is open in JupyterLab")
    assert (root / backup).read_bytes() == mine
    assert json.loads(path.read_text())["cells"][1]["source"] == STUB
    assert record() == progress.ExerciseProgress()


@pytest.mark.parametrize("answer", ["n\n", "\n", "what?\n", ""])
def test_reset_changes_nothing_unless_the_answer_is_yes(
    memlab_command, copy, answering, root, answer
):
    path = copy(WRONG, CALL)
    memlab_command("check", "7.1")
    before = {p: p.read_bytes() for p in (path, root / "work" / progress.FILE)}
    answering(answer)
    outcome = memlab_command("reset", 7)
    assert outcome.status == 1
    assert outcome.out.endswith("nothing was changed\n")
    assert {p: p.read_bytes() for p in before} == before
    assert not (root / "work" / "backups").exists()


def test_reset_with_yes_does_not_ask(memlab_command, copy, root):
    copy(WRONG, CALL)
    outcome = memlab_command("reset", 7, "--yes")
    assert outcome.status == 0
    assert "[y/N]" not in outcome.out
    assert (root / "work" / "backups" / "day07_test.1.ipynb").exists()


def test_reset_without_a_copy_moves_nothing(memlab_command, root):
    outcome = memlab_command("reset", 7, "--yes")
    assert outcome.out.startswith("memlab reset 7 makes a fresh copy of the lesson")
    assert (root / "work" / NAME).exists()
