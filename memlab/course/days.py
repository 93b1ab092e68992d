"""The days that are there: each is a module of `checks` and a notebook of its number."""

import ast
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memlab.course import checks
from memlab.course.exercises import Day, Exercise

ROOT = Path(__file__).parents[2]  # of the repository: a lesson is a file of it


def numbers() -> list[int]:
    """The numbers of the days, in order."""
    names = (module.name for module in pkgutil.iter_modules(checks.__path__))
    return sorted(int(name.removeprefix("day")) for name in names if name.startswith("day"))


@cache
def day(number: int) -> Day:
    """What the day has beside its notebook; ValueError if there is no such day."""
    require_day(number)
    return importlib.import_module(f"memlab.course.checks.day{number:02}").DAY


def exercise_of(id_: str) -> Exercise:
    """The exercise "1.2"; ValueError if there is none."""
    return _among(day(day_of(id_)).exercises, id_)


class Text(NamedTuple):
    """What an exercise says, without what checks it."""

    id: str
    title: str
    minutes: int
    difficulty: int
    hints: tuple[str, ...]


def texts(number: int) -> tuple[Text, ...]:
    """What the day's exercises say; ValueError if there is no such day.

    They are read from the source of the day's checks, which import torch: so a hint is there at
    once.
    """
    require_day(number)
    source = Path(checks.__path__[0], f"day{number:02}.py").read_text(encoding="utf-8")
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    said = [
        {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg in _FIELDS}
        for call in calls
        if ast.unparse(call.func) == Exercise.__name__
    ]
    return tuple(sorted((Text(**each) for each in said), key=lambda text: text.id))


def text_of(id_: str) -> Text:
    """What the exercise "1.2" says; ValueError if there is none."""
    return _among(texts(day_of(id_)), id_)


_FIELDS = frozenset(Text._fields)


def _among(exercises: Iterable[Any], id_: str) -> Any:
    by_id = {exercise.id: exercise for exercise in exercises}
    if id_ not in by_id:
        raise ValueError(f"got exercise {id_}; day {day_of(id_)} has {', '.join(by_id)}")
    return by_id[id_]


def require_day(number: int) -> None:
    """ValueError if there is no such day."""
    if number not in numbers():
        raise ValueError(f"got day {number}; there {_days_in_words()}")


def day_of(id_: str) -> int:
    """The day of an exercise or a guess: 1 of "1.2"; ValueError for what is neither."""
    number, dot, place = id_.partition(".")
    if not (dot and number.isdecimal() and place.isdecimal()):
        raise ValueError(f"got {id_!r}; give a day and a number in it, such as 1.2")
    return int(number)


def notebook(number: int, kind: str = "lessons") -> Path:
    """The file of a day in lessons/ or solutions/; ValueError if it is not there."""
    found = sorted((ROOT / kind).glob(f"day{number:02}_*.ipynb"))
    if not found:
        raise ValueError(
            f"there is no notebook of day {number} in {kind}/; memlab's course is read in a clone "
            f"of its repository, after `make`"
        )
    return found[0]


def _days_in_words() -> str:
    known = [str(number) for number in numbers()]
    return f"is day {known[0]}" if len(known) == 1 else f"are days {', '.join(known)}"
