"""Every day's checks: the reference passes, and every named mistake is named.

The tests include a new day as soon as its module exists.
"""

import re
import tempfile

import pytest
import torch._dynamo  # noqa: F401 - its first import creates temporary files
from quick import quick, together

from memlab.course import days
from memlab.course.exercises import NOT_ATTEMPTED, OK, WRONG, Exercise, Verdict, Wrong, judge

EXERCISES = [exercise for number in days.numbers() for exercise in days.day(number).exercises]
WRONG_ANSWERS = [
    pytest.param(
        exercise,
        place,
        id=f"{exercise.id}-{place}",
        # To name a mistake, a check tries them all: make test does so for an exercise of each day.
        marks=[] if exercise.id.endswith(".1") and not place else [pytest.mark.slow],
    )
    for exercise in EXERCISES
    for place in range(len(exercise.wrong_answers))
]

every_exercise = together("exercise", EXERCISES)
each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
each_wrong_answer = pytest.mark.parametrize(("exercise", "place"), WRONG_ANSWERS)


def remarks_in(verdict: Verdict, exercise: Exercise) -> list[str]:
    return [wrong.remark for wrong in exercise.wrong_answers if wrong.remark in verdict.text]


# ------------------------------------------------------------------ answers


@pytest.fixture
def leaving_nothing(tmp_path, monkeypatch, capfd):
    """Fail if the check prints or leaves a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.few(2)
@each_exercise
def test_the_reference_passes(exercise, leaving_nothing):
    verdict = judge(exercise, exercise.reference)
    assert verdict.status == OK, verdict
    assert isinstance(verdict.text, str)
    assert verdict.text


FIRST_OF_EACH_DAY = [exercise for exercise in EXERCISES if exercise.id.endswith(".1")]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "exercise", quick(FIRST_OF_EACH_DAY, EXERCISES), ids=lambda exercise: exercise.id
)
def test_the_reference_passes_again_with_the_same_evidence(exercise):
    assert judge(exercise, exercise.reference) == judge(exercise, exercise.reference)


@every_exercise
def test_every_edit_of_the_solution_applies(exercise):
    assert all(callable(wrong.answer) for wrong in exercise.wrong_answers)


@every_exercise
def test_the_stub_is_not_attempted(exercise):
    def stub(*args, **kwargs):
        raise NotImplementedError(f"exercise {exercise.id}, about 6 lines")

    assert judge(exercise, stub).status == NOT_ATTEMPTED


@pytest.mark.few(1)
@each_wrong_answer
def test_a_named_wrong_answer_fails_with_its_own_remark_and_no_other(
    exercise, place, leaving_nothing
):
    """Only failures that the check itself finds get a remark."""
    wrong = exercise.wrong_answers[place]
    verdict = judge(exercise, wrong.answer)
    assert verdict.status == WRONG
    assert remarks_in(verdict, exercise) == [wrong.remark], verdict
    assert_a_sentence(verdict.text)
    assert_a_sentence(wrong.remark)


@pytest.mark.few(63)
@each_exercise
@together("given", [None, 0, -1, 1.5, "", (), {}])
def test_a_constant_answer_fails_in_one_sentence(exercise, given):
    def constant(*args, **kwargs):
        return given

    with pytest.raises(Wrong) as wrong:
        exercise.check(constant)
    assert_a_sentence(str(wrong.value))


def assert_a_sentence(text: str) -> None:
    assert text == text.strip()
    assert "\n" not in text
    assert text.endswith((".", "?"))


@every_exercise
def test_an_error_of_the_answer_is_reported_as_an_error(exercise):
    def failing(*args, **kwargs):
        raise ZeroDivisionError("of mine")

    wanted = 'ZeroDivisionError: of mine, at `raise ZeroDivisionError("of mine")`.'
    assert judge(exercise, failing).text == wanted


# ------------------------------------------------------------------ hints, remarks and minutes


@every_exercise
def test_the_three_hints_differ_and_none_is_empty(exercise):
    hints = [hint.strip() for hint in exercise.hints]
    assert all(hints)
    assert len(set(hints)) == 3


@together("number", days.numbers())
def test_no_hints_hold_the_whole_solution(number):
    """The last hint leaves a decision open: which term, which order, which dimension."""
    source, begin = days.notebook(number, "solutions").with_suffix(".py").read_text(), 0
    for exercise in days.day(number).exercises:
        end = source.index(f'exercise("{exercise.id}"')
        parts = re.findall(r"### BEGIN SOLUTION(.*?)### END", source[begin:end], re.DOTALL)
        lines = [bare(line) for part in parts for line in part.splitlines()[1:]]
        hints = bare(" ".join(exercise.hints))
        given = sum(len(line) for line in lines if line in hints)
        assert given <= 0.9 * sum(map(len, lines)), exercise.id
        begin = end


def bare(text: str) -> str:
    return re.sub(r"#.*|[\s;`.,:]", "", text)


@every_exercise
def test_at_least_two_wrong_answers_have_different_remarks(exercise):
    remarks = [wrong.remark for wrong in exercise.wrong_answers]
    assert len(set(remarks)) == len(remarks) >= 2


@every_exercise
def test_no_remark_is_part_of_another(exercise):
    remarks = [wrong.remark for wrong in exercise.wrong_answers]
    assert not any(a in b for a in remarks for b in remarks if a is not b)


@every_exercise
def test_an_exercise_has_a_title_and_takes_minutes(exercise):
    assert exercise.title.strip()
    assert 1 <= exercise.minutes <= 45


@together("number", days.numbers())
def test_a_days_exercises_are_three_to_six_and_numbered_in_order(number):
    ids = [exercise.id for exercise in days.day(number).exercises]
    assert ids == [f"{number}.{place}" for place in range(1, len(ids) + 1)]
    assert 3 <= len(ids) <= 6


@together("number", days.numbers())
def test_a_days_exercises_take_no_longer_than_the_day(number):
    assert sum(exercise.minutes for exercise in days.day(number).exercises) <= 90
