"""Checking an answer: the verdict, named mistakes, and no side effects."""

import inspect
import linecache
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from memlab.course import exercises
from memlab.course.days import exercise_of
from memlab.course.exercises import (
    LONGEST_VALUE,
    NOT_ATTEMPTED,
    OK,
    WRONG,
    Exercise,
    Verdict,
    Wrong,
    WrongAnswer,
    distinct,
    equal,
    judge,
    require,
)

SQUARED = "A square is x times itself."
SAME = "Nothing was doubled."


def check_double(answer) -> str:
    equal("double(2)", answer(2), 4)
    equal("double(3)", answer(3), 6, "bytes")
    return "2 cases"


DOUBLE = Exercise(
    id="5.2",
    title="Double it",
    minutes=5,
    difficulty=1,
    hints=("a nudge", "a push", "a shove"),
    reference=lambda x: 2 * x,
    check=check_double,
    wrong_answers=(
        WrongAnswer(lambda x: x**2, SQUARED),  # right for 2
        WrongAnswer(lambda x: x, SAME),
    ),
)


# ------------------------------------------------------------------ the time limit

FOR_EVER = 10**9


@pytest.fixture
def limits(monkeypatch):
    """Set the limits of a check."""

    def make(cpu_seconds: float, idle_looks: int) -> None:
        monkeypatch.setattr(exercises, "CPU_SECONDS", cpu_seconds)
        monkeypatch.setattr(exercises, "IDLE_LOOKS", idle_looks)
        monkeypatch.setattr(exercises, "LOOK_SECONDS", 0.05)

    return make


def never_ends(x):
    while True:
        with suppress(Exception):  # which the time limit is not
            x += 1


def test_an_endless_answer_is_stopped_at_its_line(limits):
    limits(0.1, FOR_EVER)
    before = signal.getsignal(signal.SIGALRM)
    verdict = judge(DOUBLE, never_ends)
    assert verdict.status == WRONG
    line, reason = re.fullmatch(r"The check was stopped at `(.*)`: (.*)", verdict.text).groups()
    assert line in inspect.getsource(never_ends)
    assert reason == "it used 0.1 seconds of CPU time. Is there a loop that never ends?"
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_an_answer_that_waits_for_ever_is_stopped_at_its_line(limits):
    limits(FOR_EVER, 3)
    assert judge(DOUBLE, lambda x: threading.Event().wait()).text == (
        "The check was stopped at `assert judge(DOUBLE, lambda x: threading.Event().wait()).text "
        "== (`: it used no CPU for 0 seconds. Does it wait for something that never comes?"
    )


def test_time_that_an_answer_spends_without_the_cpu_does_not_count(limits):
    limits(0.1, FOR_EVER)

    def slow(x):
        time.sleep(0.2)
        return 2 * x

    assert judge(DOUBLE, slow).status == OK


def test_the_cpu_time_of_children_counts():
    before = exercises._cpu_seconds() - time.process_time()
    busy = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert exercises._cpu_seconds() - time.process_time() - before > 0.1


def test_the_grad_mode_is_restored_after_an_answer():
    def without_gradients(x):
        torch.set_grad_enabled(False)
        return 0

    assert judge(DOUBLE, without_gradients).status == WRONG
    assert torch.is_grad_enabled()


def test_the_time_limit_is_removed_after_an_answer():
    assert judge(DOUBLE, lambda x: 2 * x).status == OK
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_in_a_thread_there_is_no_time_limit():
    with ThreadPoolExecutor() as pool:
        assert pool.submit(judge, DOUBLE, lambda x: 2 * x).result().status == OK


def not_implemented(message: str):
    def answer(x):
        raise NotImplementedError(message)

    return answer


# ------------------------------------------------------------------ verdicts


def test_a_right_answer_is_ok_with_its_evidence():
    assert str(judge(DOUBLE, lambda x: x + x)) == "[ok] 5.2  2 cases"


def test_a_wrong_answer_shows_the_first_failing_case_and_the_hint_command():
    verdict = judge(DOUBLE, lambda x: x + 1)
    assert str(verdict) == (
        "[x] 5.2 double(2) gave 3, wanted 4. Going on with the reference. Hint: memlab hint 5.2"
    )


def test_a_stub_is_not_attempted():
    verdict = judge(DOUBLE, not_implemented("exercise 5.2, about 6 lines"))
    assert str(verdict) == "[ ] 5.2 not attempted: going on with the reference"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (lambda x: 2 * x, OK),
        (lambda x: x, WRONG),
        (not_implemented("exercise 5.2, about 1 line"), NOT_ATTEMPTED),
    ],
)
def test_a_verdict_has_its_exercise_and_status(answer, status):
    verdict = judge(DOUBLE, answer)
    assert (verdict.exercise, verdict.status) == (DOUBLE, status)


def test_the_evidence_comes_from_the_check():
    verdict = Verdict(DOUBLE, OK, "values equal (max difference 0) · peak 14.2 MiB")
    assert str(verdict) == "[ok] 5.2  values equal (max difference 0) · peak 14.2 MiB"


# ------------------------------------------------------------------ named mistakes


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda x: x * x, f"double(3) gave 9, wanted 6 bytes. {SQUARED}"),
        (lambda x: x + 0, f"double(2) gave 2, wanted 4. {SAME}"),
        (lambda x: 4, "double(3) gave 4, wanted 6 bytes."),  # fails in the same case as the square
        (lambda x: 7, "double(2) gave 7, wanted 4."),
    ],
)
def test_a_mistake_is_named_only_if_it_fails_in_the_same_way(answer, text):
    assert judge(DOUBLE, answer) == Verdict(DOUBLE, WRONG, text)


def test_an_error_is_not_a_named_mistake():
    def answer(x):
        raise ValueError("double(2) gave 2, wanted 4.")

    assert SAME not in judge(DOUBLE, answer).text


# ------------------------------------------------------------------ errors other than stubs


@pytest.mark.parametrize(
    "message",
    [
        "exercise 5.1, about 6 lines",
        "exercise 15.2, about 6 lines",
        "exercise 5.21, about 6 lines",
        "aten::_foo is not implemented for 'Half'",
        "",
    ],
)
def test_another_not_implemented_error_is_an_error_of_the_answer(message):
    verdict = judge(DOUBLE, not_implemented(message))
    assert verdict.status == WRONG
    wanted = f"NotImplementedError: {message}" if message else "NotImplementedError"
    assert verdict.text == f"{wanted}, at `raise NotImplementedError(message)`."


def test_torchs_not_implemented_error_is_an_error_of_the_answer():
    def answer(x):
        return torch.empty(2, device="meta").sum().item()

    verdict = judge(DOUBLE, answer)
    assert verdict.status == WRONG
    assert "at `return torch.empty(2, device=" in verdict.text


# ------------------------------------------------------------------ errors


def test_an_error_shows_the_learners_line():
    def answer(x):
        return x / 0

    wanted = "ZeroDivisionError: division by zero, at `return x / 0`, where x is 2."
    assert judge(DOUBLE, answer).text == wanted


def test_an_error_shows_the_short_values_of_its_line():
    def answer(x):
        names, weight, text, long = {}, torch.ones(2, 3), "names", "x" * 41
        return names[weight], text.names, long

    line = "return names[weight], text.names, long"
    weight = "a tensor of shape (2, 3), float32"
    assert judge(DOUBLE, answer).text == (
        f"KeyError: {weight}, at `{line}`, where weight is {weight} and text is 'names'."
    )


def test_an_error_in_a_notebooks_cell_shows_its_line():
    source = "def answer(x):\n    y = x\n    return y.shape  # of an int\n"
    filename = "ipykernel_1/2.py"  # not a file: IPython registers its cells in linecache
    namespace = {"__name__": "__main__"}
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        exec(compile(source, filename, "exec"), namespace)
        verdict = judge(DOUBLE, namespace["answer"])
    finally:
        del linecache.cache[filename]
    assert verdict.text == (
        "AttributeError: 'int' object has no attribute 'shape', at `return y.shape  # of an int`, "
        "where y is 2."
    )


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (lambda x: torch.nn.Linear(2, 2)(torch.ones(3)), "torch.nn.Linear(2, 2)(torch.ones(3))"),
        (lambda x: np.linalg.inv(np.ones(3)), "np.linalg.inv(np.ones(3))"),
        (lambda x: statistics.mean([]), "statistics.mean([])"),
    ],
)
def test_an_error_inside_a_library_shows_the_calling_line(answer, line):
    assert re.search(rf", at `.*{re.escape(line)}.*`, where x is 2\.$", judge(DOUBLE, answer).text)


def helper(x):
    return {}[x]


def test_the_line_is_the_learners_innermost():
    assert judge(DOUBLE, lambda x: helper(x)).text == (
        "KeyError: 2, at `return {}[x]`, where x is 2."
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("too large.\nmore\nand more", "ValueError: too large"),
        ("\n  shapes differ\n", "ValueError: shapes differ"),
        ("", "ValueError"),
    ],
)
def test_an_error_is_one_sentence(message, said):
    def answer(x):
        raise ValueError(message)

    assert judge(DOUBLE, answer).text == f"{said}, at `raise ValueError(message)`."


def test_an_error_outside_the_learners_code_has_no_line():
    assert judge(exercise_of("1.1"), 5).text == "TypeError: 'int' object is not callable."


def test_ctrl_c_ends_the_check():
    def answer(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(DOUBLE, answer)


# ------------------------------------------------------------------ random numbers


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draws() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()


def seed_and_draw(outcome):
    def answer(x):
        seed(5)
        draws()
        if isinstance(outcome, type):
            raise outcome
        return outcome * x

    return answer


@pytest.mark.parametrize("outcome", [2, 1, ValueError, KeyboardInterrupt])
def test_a_check_restores_the_random_states(outcome):
    seed(3)
    wanted = draws()
    seed(3)
    with suppress(KeyboardInterrupt):
        judge(DOUBLE, seed_and_draw(outcome))
    assert draws() == wanted


def test_a_named_mistake_restores_the_random_states():
    named = (WrongAnswer(seed_and_draw(1), SAME),)
    drawing = replace(DOUBLE, wrong_answers=named)
    seed(3)
    wanted = draws()
    seed(3)
    assert judge(drawing, lambda x: x).text.endswith(SAME)
    assert draws() == wanted


def test_a_check_initializes_no_gpu(monkeypatch):
    """Saving a GPU's random state would initialize it, which takes hundreds of MB."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", asked.append)
    assert judge(DOUBLE, DOUBLE.reference).status == OK
    assert asked == []


def test_a_gpu_in_use_keeps_its_random_state(monkeypatch):
    states = {0: "first", 1: "second"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({device: state})
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))

    def answer(x):
        states.update({0: "drawn", 1: "drawn"})
        return 2 * x

    assert judge(DOUBLE, answer).status == OK
    assert states == {0: "first", 1: "second"}


# ------------------------------------------------------------------ require and equal


def test_require_raises_its_message_unless_the_condition_holds():
    require(True, "never said")
    with pytest.raises(Wrong, match=r"^said$"):
        require(False, "said")


@pytest.mark.parametrize("value", [1, 1.5, "x", None, True, (1, 2.0), [1], {"a": (1, {"b": 2})}])
def test_equal_values_pass(value):
    equal("f(x)", value, value)


@pytest.mark.parametrize(
    ("got", "wanted", "text"),
    [
        (12_345, 1_000, "f(x) gave 12,345, wanted 1,000."),
        (1.0, 1, "f(x) gave 1.0, a float; wanted 1, an integer."),
        (True, 1, "f(x) gave True, wanted 1."),
        ("1", 1, "f(x) gave '1', wanted 1."),
        (torch.tensor(1), 1, "f(x) gave tensor(1), wanted 1."),
        (0, None, "f(x) gave 0, wanted None."),
        ([1, 2], (1, 2), "f(x) gave [1, 2], wanted (1, 2)."),
        ((1, 2.0), (1, 2), "f(x) gave (1, 2.0), wanted (1, 2)."),
        ((1,), (1, 2), "f(x) gave (1,), wanted (1, 2)."),
        ({"a": 1000}, {"a": 2}, "f(x) gave {a: 1,000}, wanted {a: 2}."),
        ({"a": 1.0}, {"a": 1}, "f(x) gave {a: 1.0}, wanted {a: 1}."),
        ({"a": 1, "b": 2}, {"a": 1}, "f(x) gave {a: 1, b: 2}, wanted {a: 1}."),
        ({"a": torch.ones(2)}, {"a": 1}, "f(x) gave {a: tensor([1., 1.])}, wanted {a: 1}."),
    ],
)
def test_unequal_values_are_shown_with_the_expected_ones(got, wanted, text):
    with pytest.raises(Wrong) as wrong:
        equal("f(x)", got, wanted)
    assert str(wrong.value) == text


LONG = list(range(500))


@pytest.mark.parametrize(
    ("got", "told"),
    [
        ([*LONG[:-1], 7], "whose item 499 is 7; wanted 499."),
        ([*LONG, 500], "of length 501; wanted 500."),
        (LONG[:-1], "of length 499; wanted 500."),
        ([*map(float, LONG)], "wanted [0, 1"),
    ],
)
def test_values_whose_texts_are_equal_are_told_apart(got, told):
    with pytest.raises(Wrong) as wrong:
        equal("f(x)", got, LONG)
    assert told in str(wrong.value)


@pytest.mark.parametrize(
    ("got", "wanted", "texts"),
    [
        (1.5, 2.5, ("1.5", "2.5")),
        (1.52321, 1.52331, ("1.5232", "1.5233")),
        (1.0, 1 + 2**-52, ("1", "1.0000000000000002")),
        (float("nan"), 0.0, ("nan", "0")),
        (1.0, 1.0, ("1", "1")),
        ([1.5, 1.52321], [1.5, 1.52331], ("[1.5, 1.5232]", "[1.5, 1.5233]")),
    ],
)
def test_unequal_numbers_are_shown_with_the_digits_that_differ(got, wanted, texts):
    assert distinct(got, wanted) == texts


def test_the_unit_follows_the_expected_value():
    with pytest.raises(Wrong, match=r"^f\(x\) gave 1, wanted 2 bytes\.$"):
        equal("f(x)", 1, 2, "bytes")


def test_none_suggests_a_missing_return():
    with pytest.raises(Wrong) as wrong:
        equal("f(x)", None, 2000, "bytes")
    assert str(wrong.value) == "f(x) gave nothing; wanted 2,000 bytes. Is there a return?"


def test_a_long_value_is_cut_to_one_line():
    with pytest.raises(Wrong) as wrong:
        equal("f(x)", torch.eye(9), 0)
    text = str(wrong.value)
    assert text.startswith("f(x) gave tensor([[1., 0., 0., 0., 0., 0., 0., 0., 0.], [0., 1., 0.")
    assert text.endswith(" …, wanted 0.")
    assert len(text) == len("f(x) gave  …, wanted 0.") + LONGEST_VALUE
    assert "\n" not in text


def test_an_answer_that_exits_python_is_wrong():
    def leaving(x):
        raise SystemExit("done")

    exercise = Exercise("7.1", "Leave", 1, 1, ("a", "b", "c"), None, lambda f: f(1), ())
    verdict = judge(exercise, leaving)
    assert (verdict.status, verdict.text.split(",")[0]) == (WRONG, "SystemExit: done")
