"""The learner's commands: start, check, hint, diff, progress and reset.

All of them work offline. Only opening the notebook needs JupyterLab.
"""

import difflib
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from memlab.cli import terminal
from memlab.cli.errors import UsageError, quoted
from memlab.course import answers, days, notebooks, workspace
from memlab.course import progress as records
from memlab.course.exercises import NOT_ATTEMPTED, OK, Exercise, Verdict
from memlab.course.map import summary_of
from memlab.course.progress import ExerciseProgress, Progress
from memlab.course.texts import DIFFICULTIES, HINTS
from memlab.units import paragraph, plural

DECLINED = 1  # exit status after the user answered no
SHUTDOWN_SECONDS = 10  # JupyterLab gets this long to stop after Ctrl-C
WHOLE_CELL = 1000  # context lines in a diff
MAX_ID_LENGTH = 20  # an exercise's number has 3 to 5 characters
STYLES = {"+": "green", "-": "red", "@": "cyan"}


def start(number: int, *, opens: bool, to_jupyter: Sequence[str]) -> int:
    """Copy the lesson if there is no copy yet, open JupyterLab and return its exit status."""
    if to_jupyter and not to_jupyter[0].startswith("-"):
        raise UsageError(
            f"got {quoted(to_jupyter[0])} after the day; give one day, and options of JupyterLab "
            f"after --, such as memlab start {number} -- --no-browser"
        )
    with _as_usage_errors():
        copy = workspace.start(number)
    terminal.echo(_describe_start(copy, number))
    if not opens:
        return 0
    if importlib.util.find_spec("jupyterlab") is None:
        install = "make lab" if days.IS_CLONE else "pip install 'memlab[lab]'"
        terminal.echo(
            f"JupyterLab is not installed: run {install}; any other program that runs notebooks "
            f"works, too"
        )
        return 0
    terminal.echo("Opening JupyterLab; press Ctrl-C here to stop it")
    return _run_jupyterlab(copy.path, to_jupyter)


def check(what: str) -> int:
    """Check one exercise or all of a day and record the results; return 1 unless all are right."""
    with _as_usage_errors():
        number, wanted = _day_and_exercises(what)
        copy = _copy(number)
    with terminal.progress(stages=len(wanted)) as announce:
        verdicts = list(_printed(_judging(number, wanted, copy, announce)))

    def note(progress: records.Progress) -> None:
        for verdict in verdicts:
            records.note_check(progress, verdict.exercise.id, verdict.status)

    with _as_usage_errors():
        records.update(copy.parent, note)
    right = sum(verdict.status == OK for verdict in verdicts)
    if len(verdicts) > 1:
        terminal.echo(f"\n{right} of {len(verdicts)} right")
    return int(right < len(verdicts))


def hint(id_: str) -> int:
    """Show one more hint than last time, below the earlier ones."""
    with _as_usage_errors():
        exercise = days.text_of(_id(id_))
        counted = (workspace.folder() / records.FILE).exists()
        count = _next_hint_count(exercise) if counted else 1
    terminal.echo(f"{exercise.id} {exercise.title}")
    for place, text in enumerate(exercise.hints[:count], 1):
        terminal.echo(_wrapped(f"hint {place} of {HINTS}: {text}"))
    if count == HINTS:
        terminal.echo(f"That was the last hint; memlab diff {exercise.id} shows a solution")
    if not counted:
        terminal.echo(f"Run memlab start {days.day_of(id_)} first; the next hints come after it")
    return 0


def diff(id_: str, *, sure: bool) -> int:
    """Show how to turn the learner's cell into the solution's."""
    with _as_usage_errors():
        exercise = days.text_of(_id(id_))
        number = days.day_of(exercise.id)
        copy, solution = _copy(number), days.notebook(number, "solutions")
        yours = answers.cell_of(copy, exercise.id).splitlines()
        theirs = answers.cell_of(solution, exercise.id).splitlines()
        record = records.read(copy.parent).exercise(exercise.id)
    untried = record.status in ("", NOT_ATTEMPTED)
    if untried and not sure and not _confirmed("Show the solution before you have tried?"):
        return DECLINED
    if yours == theirs:
        terminal.echo(f"{exercise.id}: your cell matches the solution line for line")
        return 0
    names = f"{_relative(copy)} (yours)", f"{_relative(solution)} (the solution)"
    for line in difflib.unified_diff(yours, theirs, *names, n=WHOLE_CELL, lineterm=""):
        text = Text(terminal.printable(line), style=STYLES.get(line[:1], ""))
        terminal.console.print(text, soft_wrap=True)
    return 0


def progress() -> int:
    """Show the state of each exercise of the days begun, and each guess beside its measured value.

    A day that is not begun has one line, with the minutes of its exercises.
    """
    folder = workspace.folder()
    with _as_usage_errors():
        done = records.read(folder)
        exercises = {number: days.texts(number) for number in days.numbers()}
        _require_exercises(done.guesses, folder / records.FILE)
        guesses = list(_guesses(done))
        terminal.console.print(_exercises_table(exercises, done), width=terminal.WIDTH)
    left = [e for es in exercises.values() for e in es if _record(done, e).status != OK]
    minutes = sum(e.minutes for e in left)
    terminal.echo(
        f"\n{plural(len(left), 'exercise')} left, about {plural(minutes, 'minute')}"
        if left
        else "\nEvery exercise is solved"
    )
    _print_abilities(
        number
        for number, of_day in exercises.items()
        if all(_record(done, e).status == OK for e in of_day)
    )
    if guesses:
        terminal.echo("\nGuesses, and how far off they were:\n")
        terminal.console.print(_guesses_table(guesses), width=terminal.WIDTH)
        for number in sorted({days.day_of(guess.id) for guess in guesses}):
            _print_mean_error(number, [g for g in guesses if days.day_of(g.id) == number])
    if not (done.exercises or done.guesses):
        first = min(exercises, default=1)
        terminal.echo(f"No progress yet: run memlab start {first} to open the lesson")
    return 0


def reset(number: int, *, sure: bool) -> int:
    """Move the learner's copy aside, make a fresh one, and forget the day's progress."""
    with _as_usage_errors():
        copy = workspace.copy_of(number)
        aside = workspace.next_backup(copy)
        moving = f"moves {_relative(copy)} to {_relative(aside)}, " if copy.exists() else ""
        plan = (
            f"memlab reset {number} {moving}makes a fresh copy of the lesson, and clears the "
            f"checks, hints and guesses of day {number}"
        )
        if not sure:
            terminal.echo(plan)
            if not _confirmed("Continue?"):
                terminal.echo("nothing was changed")
                return DECLINED
        backup = workspace.reset(number)
    if sure:  # without a question, print the plan once it is done
        terminal.echo(plan)
    if backup is not None:
        terminal.echo(f"your copy is now {_relative(backup)}")
    terminal.echo(
        f"{_relative(copy)} is a fresh copy; if it is open in JupyterLab, choose File, Reload "
        f"Notebook from Disk"
    )
    return 0


# ------------------------------------------------------------------ shared helpers


@contextmanager
def _as_usage_errors() -> Iterator[None]:
    """Turn errors in the course's files or the learner's folder into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
    except (OverflowError, RecursionError) as error:
        raise UsageError(
            f"a file in {_relative(workspace.folder())} cannot be read ({error}); your work is "
            f"safe: remove all files except notebooks and memlab's progress, and try again"
        ) from error
    except OSError as error:
        place = error.filename or _relative(workspace.folder())
        raise UsageError(
            f"{place}: {error.strerror or error}; your work is safe: free some disk space or make "
            f"{_relative(workspace.folder())} a folder that you can write to, and try again"
        ) from error


def _day_and_exercises(what: str) -> tuple[int, tuple[Exercise, ...]]:
    """Return the exercises of day "1", or the exercise "1.2"; raise ValueError otherwise."""
    if what.isdecimal() and len(what) <= MAX_ID_LENGTH:
        return int(what), days.day(int(what)).exercises
    if "." in what:
        exercise = days.exercise_of(_id(what))
        return days.day_of(exercise.id), (exercise,)
    raise ValueError(
        f"got {quoted(what)}; give a day, such as 1, or one of its exercises, such as 1.2"
    )


def _id(given: str) -> str:
    """Raise ValueError if the text is too long for the number of an exercise."""
    if len(given) > MAX_ID_LENGTH:
        raise ValueError(f"got {quoted(given)}; give the number of an exercise, such as 1.2")
    return given


def _copy(number: int) -> Path:
    """Return the path of the learner's copy, which must exist."""
    copy = workspace.copy_of(number)
    if not copy.exists():
        raise UsageError(
            f"there is no {_relative(copy)} yet; run memlab start {number} to copy the lesson"
        )
    return copy


def _relative(path: Path) -> Path:
    """Return the path relative to the current folder if it lies below, so that it can be typed."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _wrapped(text: str) -> str:
    return "\n".join(paragraph(line) for line in text.splitlines())


def _confirmed(question: str) -> bool:
    """Return True if the answer is yes. Without a terminal, the answer is no."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        terminal.echo("\nno answer; pass --yes to continue without asking")
        return False


# ------------------------------------------------------------------ start


def _describe_start(copy: workspace.Copy, number: int) -> str:
    again = f"memlab reset {number} backs up your copy and makes a fresh one"
    return {
        workspace.NEW: f"{_relative(copy.path)} is a fresh copy of {_relative(copy.lesson)}",
        workspace.KEPT: f"{_relative(copy.path)} is unchanged",
        workspace.OUTDATED: (
            f"{_relative(copy.path)} is unchanged; the lesson has changed since you copied it "
            f"({again})"
        ),
        workspace.UNREADABLE: (
            f"{_relative(copy.path)} is unchanged, but it is not a readable notebook ({again})"
        ),
    }[copy.state]


def _run_jupyterlab(notebook: Path, options: Sequence[str]) -> int:
    """Run JupyterLab in the notebook's folder until it ends.

    JupyterLab's root is the folder above, the repository in a clone, so links in a lesson work. The
    `-y` option skips the question after Ctrl-C, because notebooks are saved while they are edited.
    """
    root = notebook.parents[1]
    where = [
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{notebook.relative_to(root).as_posix()}",
        # The default would put checkpoints beside every opened file, among the library's own files.
        f"--AsyncFileCheckpoints.checkpoint_dir={notebook.parent / '.ipynb_checkpoints'}",
    ]
    as_root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    # -P: Jupyter must not import a learner's own copy.py or random.py from the folder.
    command = [sys.executable, "-P", "-m", "jupyterlab", *where, "-y", *as_root, *options]
    with subprocess.Popen(command, cwd=notebook.parent, env=_environment()) as process:
        return _exit_status(process)


def _environment() -> dict[str, str]:
    """Return the environment with `memlab` on Jupyter's PATH and with passive OpenMP waiting."""
    beside_python = os.path.dirname(sys.executable)
    path = os.pathsep.join(filter(None, [beside_python, os.environ.get("PATH")]))
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PATH": path}


def _exit_status(process: subprocess.Popen[bytes]) -> int:
    """Wait for JupyterLab. It also receives Ctrl-C; terminate it if it doesn't stop soon."""
    interrupted = False
    while True:
        try:
            status = process.wait(SHUTDOWN_SECONDS if interrupted else None)
            return 0 if interrupted else status
        except KeyboardInterrupt:
            interrupted = True
        except subprocess.TimeoutExpired:
            process.terminate()


# ------------------------------------------------------------------ checks and hints


def _judging(
    number: int, wanted: Sequence[Exercise], copy: Path, announce: Callable[[str], None]
) -> Iterator[Verdict]:
    with _as_usage_errors():  # reads the notebook now; the checks run lazily
        return answers.judged(
            copy,
            days.day(number).exercises,
            only=wanted,
            announce=lambda exercise: announce(f"{exercise.id} {exercise.title}"),
        )


def _printed(verdicts: Iterator[Verdict]) -> Iterator[Verdict]:
    for verdict in verdicts:
        terminal.echo(str(verdict).removesuffix(": going on with the reference"))
        yield verdict


def _next_hint_count(exercise: days.Text) -> int:
    """Return the number of hints to show now, and record it."""

    def count(p: Progress) -> None:
        p.exercise(exercise.id).hints = min(HINTS, p.exercise(exercise.id).hints + 1)

    return records.update(workspace.folder(), count).exercise(exercise.id).hints


# ------------------------------------------------------------------ progress


class _Guess(NamedTuple):
    """One guessed value in its own unit; `measured` is None until it is revealed."""

    id: str
    quantity: str
    guessed: float
    measured: float | None

    @property
    def factor(self) -> float | None:
        """How many times too large or too small the guess is; None if it is undefined."""
        if self.measured is None or self.guessed <= 0 or self.measured <= 0:
            return None
        return max(self.guessed / self.measured, self.measured / self.guessed)


def _require_exercises(ids: Iterable[str], file: Path) -> None:
    """Raise ValueError for guesses that belong to no exercise, which memlab never writes."""
    for id_ in ids:
        try:
            days.day_of(id_)
        except ValueError as error:
            raise ValueError(
                f"{_relative(file)} has guesses for {quoted(id_)}, which is not an exercise; "
                f"remove them"
            ) from error


def _record(done: Progress, exercise: days.Text) -> ExerciseProgress:
    return done.exercises.get(exercise.id, ExerciseProgress())


def _exercises_table(exercises: dict[int, tuple[days.Text, ...]], done: Progress) -> Table:
    columns: dict[str, Callable[[days.Text], str]] = {
        "exercise": lambda e: e.title,
        "state": lambda e: _state(_record(done, e)),
        "min": lambda e: str(e.minutes),
        "level": lambda e: "●" * e.difficulty + "○" * (len(DIFFICULTIES) - e.difficulty),
        "checks": lambda e: str(_record(done, e).checks or ""),
        "hints": lambda e: str(_record(done, e).hints or ""),
    }
    table = _bare_table(["", *columns], left=("", "exercise", "state", "level"))
    for number, of_day in exercises.items():
        if all(_record(done, e) == ExerciseProgress() for e in of_day):  # not begun: one line
            minutes = sum(e.minutes for e in of_day)
            table.add_row("", _title(number), "–", str(minutes))
            continue
        table.add_row("", Text(_title(number), "bold"))
        for exercise in of_day:
            cells = [exercise.id, *(text(exercise) for text in columns.values())]
            table.add_row(*cells)
    return table


def _print_abilities(solved: Iterable[int]) -> None:
    """Print what the lessons of the solved days teach."""
    lines = []
    for number in solved:
        with suppress(ValueError):  # a missing lesson, or one that says nothing
            lines.append(_wrapped(f"day {number}: {summary_of(number).ability}"))
    if lines:
        terminal.echo("\n".join(["\nWhat you can do now:\n", *lines]))


def _title(number: int) -> str:
    """Return the lesson's heading, or its number if the notebook is not built yet."""
    try:
        return notebooks.heading(days.notebook(number)) or f"Day {number}"
    except ValueError:
        return f"Day {number}"


def _state(record: ExerciseProgress) -> str:
    if record.status == OK:
        return "ok"
    return "tried" if record.status not in ("", NOT_ATTEMPTED) else "–"


def _guesses(done: Progress) -> Iterator[_Guess]:
    for id_ in sorted(done.guesses, key=lambda id_: [int(part) for part in id_.split(".")]):
        for quantity, numbers in done.guesses[id_].items():
            yield _Guess(id_, quantity, numbers["guessed"], numbers.get("measured"))


def _guesses_table(guesses: Sequence[_Guess]) -> Table:
    table = _bare_table(["", "quantity", "guessed", "measured", "off by"], left=("", "quantity"))
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


def _print_mean_error(number: int, guesses: Sequence[_Guess]) -> None:
    """Print the geometric mean: 2× too much and 2× too little are both off by 2×."""
    factors = [guess.factor for guess in guesses if guess.factor is not None]
    if factors:
        mean = math.exp(sum(map(math.log, factors)) / len(factors))
        terminal.echo(f"day {number}: off by {mean:.2f} × on average")


def _number(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.2f}"


def _bare_table(titles: Sequence[str], left: Sequence[str]) -> Table:
    """Create a table whose second column, the name, wraps if there is no room."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, title in enumerate(titles):
        side: Literal["left", "right"] = "left" if title in left else "right"
        table.add_column(title, justify=side, no_wrap=place != 1)
    return table
