"""The days of the course: each has a module in `checks` and a notebook with its number."""

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from memlab.course import checks
from memlab.course.exercises import Day, Exercise
from memlab.course.texts import Text, read

ROOT = Path(__file__).parents[2]  # the repository, in a clone
IS_CLONE = (ROOT / "lessons").is_dir()
PACKAGED = Path(__file__).parent / "files"  # a wheel's copies of the course's files


def numbers() -> list[int]:
    """Return the numbers of the days, in order."""
    names = (module.name for module in pkgutil.iter_modules(checks.__path__))
    return sorted(int(name.removeprefix("day")) for name in names if name.startswith("day"))


@cache
def day(number: int) -> Day:
    """Return the day's exercises and bill; raise ValueError if there is no such day."""
    require_day(number)
    return importlib.import_module(f"memlab.course.checks.day{number:02}").DAY


def exercise_of(id_: str) -> Exercise:
    """Return the exercise "1.2"; raise ValueError if there is none."""
    return _among(day(day_of(id_)).exercises, id_)


def texts(number: int) -> tuple[Text, ...]:
    """Return the texts of the day's exercises; raise ValueError if there is no such day.

    Importing the checks would import torch, and a hint should appear at once.
    """
    require_day(number)
    return read(Path(checks.__path__[0], f"day{number:02}.toml"), number)


def text_of(id_: str) -> Text:
    """Return the text of the exercise "1.2"; raise ValueError if there is none."""
    return _among(texts(day_of(id_)), id_)


def _among(exercises: Iterable[Any], id_: str) -> Any:
    by_id = {exercise.id: exercise for exercise in exercises}
    if id_ not in by_id:
        raise ValueError(f"got exercise {id_}; day {day_of(id_)} has {', '.join(by_id)}")
    return by_id[id_]


def require_day(number: int) -> None:
    """Raise ValueError if there is no such day."""
    if number not in numbers():
        raise ValueError(f"got day {number}; there {_days_in_words()}")


def day_of(id_: str) -> int:
    """Return the day of an exercise's or a guess's id: 1 for "1.2"; raise ValueError otherwise."""
    number, dot, place = id_.partition(".")
    if not (dot and number.isdecimal() and place.isdecimal()):
        raise ValueError(f"got {id_!r}; give the number of an exercise, such as 1.2")
    return int(number)


def folder(kind: str) -> Path:
    """Return the folder of lessons, solutions or benchmarks/results: the clone's or the wheel's."""
    return (ROOT if IS_CLONE else PACKAGED) / kind


def notebook(number: int, kind: str = "lessons") -> Path:
    """Return the path of a day's notebook in lessons/ or solutions/; raise ValueError if it does
    not exist."""
    found = sorted(folder(kind).glob(f"day{number:02}_*.ipynb"))
    if not found:
        raise ValueError(
            f"there is no notebook of day {number} in {kind}/; clone memlab's repository and run "
            f"`make`, or install memlab again"
        )
    return found[0]


def _days_in_words() -> str:
    known = [str(number) for number in numbers()]
    return f"is day {known[0]}" if len(known) == 1 else f"are days {', '.join(known)}"
