"""An answer that keeps tensors from one call to the next is refused, wherever it keeps them."""

from functools import cache, partial
from unittest.mock import patch

import pytest
import torch

from memlab.course import exercises
from memlab.course.cells import Unusable
from memlab.course.days import exercise_of
from memlab.course.exercises import OK, WRONG, Exercise, judge, require
from memlab.course.kept import kept

SIZE = 1024  # elements of an argument


def check_doubled(answer) -> str:
    for n in range(4):
        x = torch.full((SIZE,), float(n))
        require(torch.equal(answer(x), 2 * x), "wrong")
    return "ok"


DOUBLE = Exercise("7.2", "Double", 5, 1, ("a", "b", "c"), None, check_doubled, ())

in_a_list, in_a_dict = [], {"found": ([],)}


def in_globals(x):
    in_a_list.append(x.clone())
    in_a_dict["found"][0].append((2 * x).numpy())
    return 2 * x


def in_a_default(x, in_default=[]):  # noqa: B006 - the mistake
    in_default.append(x)
    return 2 * x


def in_an_attribute(x):
    in_an_attribute.held = (*getattr(in_an_attribute, "held", ()), x)
    return 2 * x


@cache
def doubled(x):
    return 2 * x


def by_id(x):
    return doubled(x).clone()


class Layer:
    seen = []  # noqa: RUF012 - the mistake

    def __call__(self, x):
        self.seen.append(x)
        return 2 * x


def in_a_class(x):
    return Layer()(x)


def in_an_object(x, layer=Layer()):  # noqa: B008 - the mistake
    return layer(x)


def closure():
    first, rest = [], []

    def inner(x):
        (rest if first else first).append(x)
        return 2 * x

    return inner


@pytest.mark.parametrize(
    ("answer", "where"),
    [
        (in_globals, "(in_a_dict, in_a_list)"),
        (in_a_default, ""),
        (in_an_attribute, "(held)"),
        (by_id, "(doubled)"),
        (in_a_class, ""),
        (in_an_object, ""),
        (closure(), ""),
        (partial(closure()), ""),
    ],
)
def test_tensors_kept_between_calls_are_refused_with_their_place(answer, where):
    verdict = judge(DOUBLE, answer)
    assert verdict.status == WRONG, verdict
    total = 8 * 4 * SIZE if answer is in_globals else 4 * 4 * SIZE
    assert verdict.text.startswith(f"after the check's last call, {total:,} bytes of tensors")
    assert where in verdict.text


def test_tensors_from_before_the_check_do_not_count():
    earlier = [torch.ones(100 * SIZE)]
    assert judge(DOUBLE, lambda x: earlier and 2 * x).status == OK


def test_a_table_computed_once_may_be_kept():
    @cache
    def table():
        return torch.full((2 * SIZE,), 2.0)

    assert judge(DOUBLE, lambda x: table()[0] * x).status == OK


def test_views_of_one_storage_count_once():
    views = []
    assert judge(
        DOUBLE, lambda x: views.append((x, x[1:], x.view(2, -1))) or 2 * x
    ).text.startswith(f"after the check's last call, {4 * 4 * SIZE:,} bytes")


@pytest.mark.parametrize(
    "answer",
    [None, 3, max, Unusable(ValueError("of mine")), torch.nn.ReLU],
    ids=lambda answer: type(answer).__name__,
)
def test_answers_that_are_no_functions_keep_nothing(answer):
    assert kept(answer) == {}


def keeping(answer, found):
    def keep(*given):
        for each in given:
            if isinstance(each, torch.Tensor):
                found.append(each.detach().clone())
            elif isinstance(each, (tuple, list)):
                keep(*each)

    def kept_too(*given, **named):
        got = answer(*given, **named)
        keep(*given, *named.values(), got)
        return got

    return kept_too


UNMEASURED = ("7.1", "7.2", "7.3", "7.4", "9.2", "9.4", "10.3", "17.2", "17.3", "19.1", "19.2")


@pytest.mark.few(2)
@pytest.mark.parametrize("id_", [*UNMEASURED, "8.5", "13.4", "21.2", "21.3"])
def test_a_copy_of_everything_in_a_list_is_refused(id_):
    exercise = exercise_of(id_)
    with patch.object(exercises, "_mistake", return_value=""):  # which takes longer than the check
        verdict = judge(exercise, keeping(exercise.reference, []))
    assert verdict.status == WRONG, verdict
