"""Finding days, exercises and notebooks, and errors for missing ones."""

from types import SimpleNamespace

import pytest

from memlab.course import days
from memlab.course.exercises import Day


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """Replace the course's checks by empty modules with the given names."""
    monkeypatch.setattr(days, "checks", SimpleNamespace(__path__=[str(tmp_path)]))

    def make(*names: str) -> None:
        for name in names:
            (tmp_path / f"{name}.py").touch()

    return make


def test_numbers_come_from_the_modules_in_order(checks):
    checks("day11", "day02", "day01", "shapes", "__init__")
    assert days.numbers() == [1, 2, 11]


def test_every_number_has_a_day():
    numbers = days.numbers()
    assert numbers == list(range(1, numbers[-1] + 1))
    assert all(isinstance(days.day(number), Day) for number in days.numbers())


@pytest.mark.parametrize(
    ("there", "words"),
    [(["day01"], "there is day 1"), (["day01", "day02"], "there are days 1, 2")],
)
def test_an_unknown_day_is_an_error_that_lists_the_days(checks, there, words):
    checks(*there)
    with pytest.raises(ValueError, match=f"^got day 99; {words}$"):
        days.day(99)


def test_an_exercise_is_found_by_its_id():
    assert days.exercise_of("1.2") is days.day(1).exercises[1]


@pytest.mark.parametrize("id_", ["1.0", "1.99", "1.02", "01.2"])
def test_an_unknown_exercise_is_an_error_that_lists_the_exercises(id_):
    with pytest.raises(ValueError, match=rf"^got exercise {id_}; day 1 has 1\.1, 1\.2, 1\.3"):
        days.exercise_of(id_)


def test_an_exercise_of_an_unknown_day_is_an_error_that_lists_the_days():
    with pytest.raises(ValueError, match=r"^got day 99; there "):
        days.exercise_of("99.1")


@pytest.mark.parametrize(("id_", "number"), [("1.2", 1), ("12.3", 12), ("1.23", 1), ("99.1", 99)])
def test_an_id_begins_with_its_day(id_, number):
    assert days.day_of(id_) == number


@pytest.mark.parametrize(
    "id_", ["", "1", "1.", ".1", "1.a", "a.1", "1.2.3", "-1.2", "1. 2", "1,2", "1.²"]
)
def test_an_invalid_id_is_an_error_with_an_example(id_):
    with pytest.raises(
        ValueError, match=r"; give the number of an exercise, such as 1\.2$"
    ) as error:
        days.day_of(id_)
    assert str(error.value).startswith(f"got {id_!r}; ")


# ------------------------------------------------------------------ notebooks


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(days, "ROOT", tmp_path)
    for kind in ("lessons", "solutions"):
        (tmp_path / kind).mkdir()
        for name in ("day01_here.ipynb", "day01_here.py", "day11_there.ipynb"):
            (tmp_path / kind / name).touch()
    return tmp_path


def test_a_days_notebook_is_found_by_its_number(root):
    assert days.notebook(1) == root / "lessons" / "day01_here.ipynb"
    assert days.notebook(11, "solutions") == root / "solutions" / "day11_there.ipynb"


def test_a_missing_notebook_is_an_error_with_the_remedy(root):
    with pytest.raises(ValueError, match=r"^there is no notebook of day 2 in lessons/; .* `make`"):
        days.notebook(2)


@pytest.mark.parametrize("number", days.numbers())
def test_an_exercises_text_is_read_without_importing_its_check(number):
    said = [
        (each.id, each.title, each.minutes, each.difficulty, each.hints)
        for each in days.day(number).exercises
    ]
    assert [text[:5] for text in days.texts(number)] == said
