"""The learner's commands: start, check, hint, diff, progress and reset.

All of them work offline, and all but JupyterLab itself work without Jupyter.
"""

import difflib
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from memlab.cli import terminal
from memlab.cli.errors import UsageError, shown
from memlab.course import answers, days, notebooks, workspace
from memlab.course import progress as noted
from memlab.course.exercises import DIFFICULTIES, HINTS, NOT_ATTEMPTED, OK, Exercise, Verdict
from memlab.course.progress import Progress, Record

DECLINED = 1  # the exit status where the answer to a question was no
PATIENCE_SECONDS = 10  # that JupyterLab has to end by itself after Ctrl-C
EVERY_LINE = 1000  # of a cell, as context in a diff
LONGEST_ID = 20  # characters of an exercise's number, which has 3 to 5
STYLES = {"+": "green", "-": "red", "@": "cyan"}


def start(number: int, *, opens: bool, to_jupyter: Sequence[str]) -> int:
    """Copy the lesson unless a copy is there, and open it until JupyterLab ends: its status."""
    if to_jupyter and not to_jupyter[0].startswith("-"):
        raise UsageError(
            f"got {shown(to_jupyter[0])} after the day; give one day, and options of JupyterLab "
            f"after --, such as memlab start {number} -- --no-browser"
        )
    with _in_one_sentence():
        copy = workspace.start(number)
    terminal.say(_what_start_did(copy, number))
    if not opens:
        return 0
    if importlib.util.find_spec("jupyterlab") is None:
        terminal.say(
            "JupyterLab is not installed here: pip install -e '.[lab]' or make lab brings it; any "
            "other program that runs notebooks will do, too"
        )
        return 0
    terminal.say("JupyterLab opens it; Ctrl-C here ends JupyterLab")
    return _run_jupyterlab(copy.path, to_jupyter)


def check(what: str) -> int:
    """Judge the exercises of a day, or one, and note the verdicts; 1 if one is not right."""
    with _in_one_sentence():
        number, wanted = _day_and_exercises(what)
        copy = _copy(number)
    with terminal.progress(stages=len(wanted)) as announce:
        verdicts = list(_said(_judging(number, wanted, copy, announce)))
    with _in_one_sentence():
        noted.update(
            copy.parent,
            lambda p: [noted.note_check(p, v.exercise.id, v.status) for v in verdicts],
        )
    right = sum(verdict.status == OK for verdict in verdicts)
    if len(verdicts) > 1:
        terminal.say(f"\n{right} of {len(verdicts)} right")
    return int(right < len(verdicts))


def hint(id_: str) -> int:
    """Show one more hint than the last time, and those before it."""
    with _in_one_sentence():
        exercise = days.text_of(_id(id_))
        counted = (workspace.folder() / noted.FILE).exists()
        shown = _one_more_hint(exercise) if counted else 1
    terminal.say(f"{exercise.id} {exercise.title}")
    for place, text in enumerate(exercise.hints[:shown], 1):
        terminal.say(_in_lines(f"hint {place} of {HINTS}: {text}"))
    if shown == HINTS:
        terminal.say(f"These are all; memlab diff {exercise.id} shows a solution")
    if not counted:
        terminal.say(
            f"memlab start {days.day_of(id_)} begins the day: the next hint comes after it"
        )
    return 0


def diff(id_: str, *, sure: bool) -> int:
    """Show what changes the learner's cell into the solution's."""
    with _in_one_sentence():
        exercise = days.text_of(_id(id_))
        number = days.day_of(exercise.id)
        copy, solution = _copy(number), days.notebook(number, "solutions")
        yours = answers.cell_of(copy, exercise.id).splitlines()
        theirs = answers.cell_of(solution, exercise.id).splitlines()
        record = noted.read(copy.parent).exercise(exercise.id)
    untried = record.status in ("", NOT_ATTEMPTED)
    if untried and not sure and not _agreed("Look at the solution without having tried?"):
        return DECLINED
    if yours == theirs:
        terminal.say(f"{exercise.id}: your cell is the solution's, line for line")
        return 0
    names = f"{_shown(copy)} (yours)", f"{_shown(solution)} (the solution)"
    for line in difflib.unified_diff(yours, theirs, *names, n=EVERY_LINE, lineterm=""):
        terminal.console.print(Text(line, style=STYLES.get(line[:1], "")), soft_wrap=True)
    return 0


def progress() -> int:
    """Show how every exercise stands, and the guesses beside what was measured."""
    folder = workspace.folder()
    with _in_one_sentence():
        done = noted.read(folder)
        exercises = {number: days.texts(number) for number in days.numbers()}
        _require_exercises(done.guesses, folder / noted.FILE)
        guesses = list(_guesses(done))
        terminal.console.print(_exercises_table(exercises, done), width=terminal.WIDTH)
    left = [e for es in exercises.values() for e in es if _record(done, e).status != OK]
    minutes = sum(e.minutes for e in left)
    terminal.say(
        f"\n{len(left)} exercises left, about {minutes} minutes"
        if left
        else "\nEvery exercise is solved"
    )
    if guesses:
        terminal.say("\nGuesses, and how far off they were:\n")
        terminal.console.print(_guesses_table(guesses), width=terminal.WIDTH)
        for number in sorted({days.day_of(guess.id) for guess in guesses}):
            _say_how_far_off(number, [g for g in guesses if days.day_of(g.id) == number])
    if not (done.exercises or done.guesses):
        first = min(exercises, default=1)
        terminal.say(f"Nothing is noted yet: memlab start {first} opens the lesson")
    return 0


def reset(number: int, *, sure: bool) -> int:
    """Move the learner's copy aside, make a fresh one, and forget the day's progress."""
    with _in_one_sentence():
        copy = workspace.copy_of(number)
        aside = workspace.next_backup(copy)
        moving = f"moves {_shown(copy)} to {_shown(aside)}, " if copy.exists() else ""
        plan = (
            f"memlab reset {number} {moving}makes a fresh copy of the lesson, and forgets what is "
            f"noted of day {number}: checks, hints and guesses"
        )
        if not sure:
            terminal.say(plan)
            if not _agreed("Go on?"):
                terminal.say("nothing was changed")
                return DECLINED
        backup = workspace.reset(number)
    if sure:  # nobody was to be asked: it is said when it is so
        terminal.say(plan)
    if backup is not None:
        terminal.say(f"your copy is now {_shown(backup)}")
    terminal.say(
        f"{_shown(copy)} is a fresh copy; where it is open in JupyterLab, choose File, Reload "
        f"Notebook from Disk"
    )
    return 0


# ------------------------------------------------------------------ what all of them need


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """What the course's files or the learner's folder don't allow, as a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
    except (OverflowError, RecursionError) as error:
        raise UsageError(
            f"a file in {_shown(workspace.folder())} cannot be read ({error}); nothing of yours "
            f"was lost: take out what is no notebook and no progress of memlab's, and try again"
        ) from error
    except OSError as error:
        place = error.filename or _shown(workspace.folder())
        raise UsageError(
            f"{place}: {error.strerror or error}; nothing of yours was lost: free some space or "
            f"make {_shown(workspace.folder())} a folder that you can write, and try again"
        ) from error


def _day_and_exercises(what: str) -> tuple[int, tuple[Exercise, ...]]:
    """All exercises of day "1", or the one called "1.2"; ValueError for what is neither."""
    if what.isdecimal() and len(what) <= LONGEST_ID:
        return int(what), days.day(int(what)).exercises
    if "." in what:
        exercise = days.exercise_of(_id(what))
        return days.day_of(exercise.id), (exercise,)
    raise ValueError(
        f"got {shown(what)}; give a day, such as 1, or one of its exercises, such as 1.2"
    )


def _id(given: str) -> str:
    """ValueError for what is too long to be an exercise's."""
    if len(given) > LONGEST_ID:
        raise ValueError(f"got {shown(given)}; give a day and a number in it, such as 1.2")
    return given


def _copy(number: int) -> Path:
    """The learner's copy, which is there."""
    copy = workspace.copy_of(number)
    if not copy.exists():
        raise UsageError(
            f"there is no {_shown(copy)} yet; memlab start {number} makes a copy of the lesson"
        )
    return copy


def _shown(path: Path) -> Path:
    """From here, where it lies below; what can be typed."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _in_lines(text: str) -> str:
    return "\n".join(terminal.paragraph(line) for line in text.splitlines())


def _agreed(question: str) -> bool:
    """Whether the answer is yes; where nobody can answer, it is no."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        terminal.say("\nnobody answered: --yes goes on without asking")
        return False


# ------------------------------------------------------------------ start


def _what_start_did(copy: workspace.Copy, number: int) -> str:
    again = f"memlab reset {number} puts yours aside and makes a fresh copy"
    return {
        workspace.NEW: f"{_shown(copy.path)} is a fresh copy of {_shown(copy.lesson)}",
        workspace.KEPT: f"{_shown(copy.path)} is as you left it",
        workspace.OUTDATED: (
            f"{_shown(copy.path)} is as you left it; the lesson has changed since it was copied "
            f"({again})"
        ),
        workspace.UNREADABLE: (
            f"{_shown(copy.path)} is as you left it, and cannot be read as a notebook ({again})"
        ),
    }[copy.state]


def _run_jupyterlab(notebook: Path, options: Sequence[str]) -> int:
    """Run JupyterLab in the notebook's folder until it ends.

    It may open what the lesson links to, so its own root is the repository's. It asks no question
    when Ctrl-C ends it: notebooks are saved as they are edited.
    """
    at = notebook.relative_to(days.ROOT).as_posix()
    where = [
        f"--ServerApp.root_dir={days.ROOT}",
        f"--LabApp.default_url=/lab/tree/{at}",
        # Not beside each file that is opened, among the library's own.
        f"--AsyncFileCheckpoints.checkpoint_dir={notebook.parent / '.ipynb_checkpoints'}",
    ]
    as_root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    # -P: a copy.py or random.py that a learner keeps beside a lesson is not what Jupyter imports.
    command = [sys.executable, "-P", "-m", "jupyterlab", *where, "-y", *as_root, *options]
    with subprocess.Popen(command, cwd=notebook.parent, env=_environment()) as process:
        return _status_at_the_end(process)


def _environment() -> dict[str, str]:
    """As here, with `memlab` where Jupyter's terminals find it, and threads that wait quietly."""
    beside_python = os.path.dirname(sys.executable)
    path = os.pathsep.join(filter(None, [beside_python, os.environ.get("PATH")]))
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PATH": path}


def _status_at_the_end(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C in a terminal reaches JupyterLab, too: it is waited for, for a while."""
    interrupted = False
    while True:
        try:
            status = process.wait(PATIENCE_SECONDS if interrupted else None)
            return 0 if interrupted else status
        except KeyboardInterrupt:
            interrupted = True
        except subprocess.TimeoutExpired:
            process.terminate()


# ------------------------------------------------------------------ checks and hints


def _judging(
    number: int, wanted: Sequence[Exercise], copy: Path, announce: Callable[[str], None]
) -> Iterator[Verdict]:
    with _in_one_sentence():  # reads the notebook at once, and judges when it is asked
        return answers.judged(
            copy,
            days.day(number).exercises,
            only=wanted,
            announce=lambda exercise: announce(f"{exercise.id} {exercise.title}"),
        )


def _said(verdicts: Iterator[Verdict]) -> Iterator[Verdict]:
    for verdict in verdicts:
        terminal.say(str(verdict).removesuffix(": going on with the reference"))
        yield verdict


def _one_more_hint(exercise: days.Text) -> int:
    """How many to show now, counted with the learner's progress."""

    def count(p: Progress) -> None:
        p.exercise(exercise.id).hints = min(HINTS, p.exercise(exercise.id).hints + 1)

    return noted.update(workspace.folder(), count).exercise(exercise.id).hints


# ------------------------------------------------------------------ progress


class _Guess(NamedTuple):
    """A number that was guessed, in its own unit; `measured` is None until it was revealed."""

    id: str
    quantity: str
    guessed: float
    measured: float | None

    @property
    def factor(self) -> float | None:
        """How many times too large or too small; None where no factor tells."""
        if self.measured is None or self.guessed <= 0 or self.measured <= 0:
            return None
        return max(self.guessed / self.measured, self.measured / self.guessed)


def _require_exercises(ids: Iterable[str], file: Path) -> None:
    """ValueError for guesses that are of no exercise: memlab writes none."""
    for id_ in ids:
        try:
            days.day_of(id_)
        except ValueError as error:
            raise ValueError(
                f"{_shown(file)} has guesses of {shown(id_)}, which is no exercise; take them out"
            ) from error


def _record(done: Progress, exercise: days.Text) -> Record:
    return done.exercises.get(exercise.id, Record())


def _exercises_table(exercises: dict[int, tuple[days.Text, ...]], done: Progress) -> Table:
    columns: dict[str, Callable[[days.Text], str]] = {
        "exercise": lambda e: e.title,
        "state": lambda e: _state(_record(done, e)),
        "min": lambda e: str(e.minutes),
        "level": lambda e: "●" * e.difficulty + "○" * (len(DIFFICULTIES) - e.difficulty),
        "checks": lambda e: str(_record(done, e).checks or ""),
        "hints": lambda e: str(_record(done, e).hints or ""),
    }
    table = _plain_table(["", *columns], left=("", "exercise", "state", "level"))
    for number, of_day in exercises.items():
        table.add_row("", Text(_title(number), "bold"))
        for exercise in of_day:
            cells = [exercise.id, *(text(exercise) for text in columns.values())]
            table.add_row(*(Text(cell) for cell in cells))
    return table


def _title(number: int) -> str:
    """What the lesson is called; only its number where it is not built yet."""
    try:
        return notebooks.heading(days.notebook(number)) or f"Day {number}"
    except ValueError:
        return f"Day {number}"


def _state(record: Record) -> str:
    if record.status == OK:
        return "ok"
    return "tried" if record.status not in ("", NOT_ATTEMPTED) else "–"


def _guesses(done: Progress) -> Iterator[_Guess]:
    for id_ in sorted(done.guesses, key=lambda id_: [int(part) for part in id_.split(".")]):
        for quantity, numbers in done.guesses[id_].items():
            yield _Guess(id_, quantity, numbers["guessed"], numbers.get("measured"))


def _guesses_table(guesses: Sequence[_Guess]) -> Table:
    table = _plain_table(["", "quantity", "guessed", "measured", "off by"], left=("", "quantity"))
    for guess in guesses:
        table.add_row(
            guess.id,
            guess.quantity,
            _number(guess.guessed),
            "–" if guess.measured is None else _number(guess.measured),
            _off_by(guess),
        )
    return table


def _off_by(guess: _Guess) -> str:
    if guess.measured is None or guess.factor is not None:
        return "" if guess.factor is None else f"{guess.factor:.2f} ×"
    return "1.00 ×" if guess.guessed == guess.measured else "∞"


def _say_how_far_off(number: int, guesses: Sequence[_Guess]) -> None:
    """The geometric mean: 2 × too much and 2 × too little are off by 2 ×."""
    factors = [guess.factor for guess in guesses if guess.factor is not None]
    if factors:
        mean = math.exp(sum(map(math.log, factors)) / len(factors))
        terminal.say(f"day {number}: off by {mean:.2f} × on average")


def _number(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.2f}"


def _plain_table(titles: Sequence[str], left: Sequence[str]) -> Table:
    """Its second column, which names things, takes several lines where there is no room."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, title in enumerate(titles):
        side = "left" if title in left else "right"
        table.add_column(title, justify=side, no_wrap=place != 1)
    return table
