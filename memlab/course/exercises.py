"""What an exercise is, and how an answer to it is judged.

A check is a function that is handed the learner's answer. It returns the evidence to print, or
raises Wrong with the first case that fails. A named wrong answer is a mistake that people make. The
learner is told about it only if no other mistake explains what the check found: in every case of
the check their answer must fail, or pass, exactly as the named one does.
"""

import importlib
import linecache
import random
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, NoReturn

from memlab.course.ownwork import NotOwnWork, is_a_librarys, is_rebuilt, watched
from memlab.trace import Trace

HINTS = 3
DIFFICULTIES = range(1, 6)
LONGEST_VALUE = 200  # characters of what an answer gave; a verdict is one line
FEW_CHARACTERS = 40  # of a value that is told beside a line


class Wrong(Exception):  # noqa: N818 - it is the answer that is wrong, nothing has failed
    """What an answer got wrong: the case, what it gave, what was wanted.

    `evidence` is what tells this failure from others; without one, the message does.
    """

    def __init__(self, message: str, evidence: Any = None) -> None:
        super().__init__(message)
        self.evidence = message if evidence is None else evidence


@dataclass(frozen=True, eq=False)  # known by what it is: answers may be anything
class WrongAnswer:
    """A plausible answer that must not pass, and the sentence that names the mistake."""

    answer: Any
    remark: str


@dataclass(frozen=True, eq=False)
class Exercise:
    """`id` is "1.2": the second exercise of day 1. `reference` is what a lesson goes on with where
    the learner's answer is missing or wrong."""

    id: str
    title: str
    minutes: int
    difficulty: int  # 1 to 5
    hints: tuple[str, ...]  # from a nudge to nearly the answer
    reference: Any
    check: Callable[[Any], str]
    wrong_answers: tuple[WrongAnswer, ...]
    rebuilds: tuple[str, ...] = ()  # "torch.amp.GradScaler": what the answer must not call

    def __post_init__(self) -> None:
        assert len(self.hints) == HINTS, f"{self.id} has {len(self.hints)} hints"
        assert self.difficulty in DIFFICULTIES, f"{self.id} has difficulty {self.difficulty}"


@dataclass(frozen=True)
class Bill:
    """A day's line of the running bill: the same training step as every day, with all that was
    built until then."""

    label: str
    measure: Callable[[], Trace]


@dataclass(frozen=True)
class Day:
    """What a day has beside its notebook."""

    exercises: tuple[Exercise, ...]
    bill: Bill


# ------------------------------------------------------------------ judging an answer

OK, WRONG, NOT_ATTEMPTED = "ok", "wrong", "not attempted"
SECONDS = 60  # for a check, which takes less than one


@dataclass(frozen=True)
class Verdict:
    """`status` is OK, WRONG or NOT_ATTEMPTED; `text` the evidence, or what went wrong."""

    exercise: Exercise
    status: str
    text: str = ""

    def __str__(self) -> str:
        id_ = self.exercise.id
        if self.status == OK:
            return f"[ok] {id_}  {self.text}"
        if self.status == NOT_ATTEMPTED:
            return f"[ ] {id_} not attempted: going on with the reference"
        return f"[x] {id_} {self.text} Hint: memlab hint {id_}"


def judge(exercise: Exercise, answer: Any) -> Verdict:
    """Check an answer, and name the mistake if it is a known one.

    Random numbers, and torch's and numpy's states of them, are afterwards what they were before.
    """
    _import_what_torch_imports_late()
    with watched(exercise.check, exercise.rebuilds) as calls:
        verdict = _judged(exercise, answer)
    handed_over = None if answer is exercise.reference else is_rebuilt(answer, exercise.rebuilds)
    if not (calls or handed_over):
        return verdict
    named = handed_over or calls[0]
    what = "Your answer is" if handed_over else "Your answer calls"
    return Verdict(
        exercise,
        WRONG,
        f"{what} {named}, which this exercise rebuilds: write those lines yourself.",
    )


def _judged(exercise: Exercise, answer: Any) -> Verdict:
    try:
        evidence = _checked(exercise, answer)
    except NotOwnWork:
        return Verdict(exercise, WRONG)
    except NotImplementedError as error:
        if f"exercise {exercise.id}," in str(error):
            return Verdict(exercise, NOT_ATTEMPTED)
        return Verdict(exercise, WRONG, _raised(error))
    except Wrong as wrong:
        return Verdict(exercise, WRONG, f"{wrong}{_mistake(exercise, answer, wrong)}")
    except (Exception, SystemExit) as error:
        return Verdict(exercise, WRONG, _raised(error))
    except _TooLong as error:
        line = _learners_line(error)
        where = f"at `{line}`" if line else "somewhere"
        return Verdict(
            exercise,
            WRONG,
            f"ran for more than {SECONDS} seconds and was stopped {where}: is there a loop that "
            f"never ends?",
        )
    return Verdict(exercise, OK, evidence)


def _checked(exercise: Exercise, answer: Any) -> str:
    with _random_numbers_kept(), _stopped_after(SECONDS):
        return exercise.check(answer)


def _import_what_torch_imports_late() -> None:
    """The first checkpoint, flop counter or meter imports torch._dynamo, for seconds: that must not
    count against the time limit, be cut off by it halfway, or run under a check's hooks."""
    importlib.import_module("torch._dynamo")


# ------------------------------------------------------------------ naming the mistake


def _mistake(exercise: Exercise, answer: Any, found: Wrong) -> str:
    """The remark of the one named wrong answer that fails in the same cases in the same way.

    Small cases coincide: that the first failure is the same says little. If two named mistakes
    explain all failures, neither is told.
    """
    alike = [wrong for wrong in exercise.wrong_answers if _first(exercise, wrong) == found.evidence]
    if not alike:
        return ""
    failures = _failures(exercise, answer)
    explaining = [wrong for wrong in alike if _known_failures(exercise, wrong) == failures]
    return f" {explaining[0].remark}" if len(explaining) == 1 else ""


@cache
def _first(exercise: Exercise, wrong: WrongAnswer) -> Any:
    """The evidence of the first case in which a named wrong answer fails: always the same."""
    try:
        _checked(exercise, wrong.answer)
    except Wrong as known:
        return known.evidence
    return None


@cache
def _known_failures(exercise: Exercise, wrong: WrongAnswer) -> tuple[Any, ...]:
    return _failures(exercise, wrong.answer)


def _failures(exercise: Exercise, answer: Any) -> tuple[Any, ...]:
    """The evidence of every failure in a check that goes on after the first, and how it ended."""
    global _noted
    _noted = found = []
    try:
        with warnings.catch_warnings(action="ignore"):  # of what a right answer never reaches
            _checked(exercise, answer)
        end: Any = "finished"
    except Wrong as wrong:
        end = wrong.evidence
    except (Exception, SystemExit, _TooLong) as error:
        end = type(error).__name__
    finally:
        _noted = None
    return (*found, end)


# Where failures are noted while a check goes on after them; None while the first one ends it.
_noted: list[Any] | None = None


def _raised(error: BaseException) -> str:
    """The error, the learner's line it came from and the values there, in one sentence."""
    what = ": ".join(filter(None, [type(error).__name__, _first_line(error)])).rstrip(".")
    frame, line = _learners_line(error)
    if not frame:
        return f"{what}."
    values = "" if line.startswith("raise ") else _values_at(line, frame.f_locals)
    return f"{what}, at `{line}`{', where ' + values if values else ''}."


def _first_line(error: BaseException) -> str:
    if isinstance(error, KeyError) and error.args and _is_tensor(error.args[0]):
        return _value_said(error.args[0])  # a tensor's own text is its numbers
    return next(iter(str(error).strip().splitlines()), "")


def _learners_line(error: BaseException) -> tuple[FrameType | None, str]:
    """The innermost frame and line of a notebook, or of another file that is no library's."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not is_a_librarys(frame):
            return frame, linecache.getline(frame.f_code.co_filename, number).strip()
    return None, ""


def _values_at(line: str, values: dict[str, Any]) -> str:
    """The first three names of a line that stand for a number, a text or a tensor, and for what."""
    names = dict.fromkeys(re.findall(r"(?<![\w.\"'])[^\W\d]\w*", line.partition("#")[0]))
    said = [f"{name} is {_value_said(values[name])}" for name in names if name in values]
    return " and ".join([text for text in said if not text.endswith(" is ")][:3])


def _value_said(value: Any) -> str:
    """Nothing for a value that takes more than a few words."""
    if _is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    plain = value is None or isinstance(value, (bool, int, float, str))
    return text if plain and len(text := repr(value)) <= FEW_CHARACTERS else ""


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # a hint needs none
    return torch is not None and isinstance(value, torch.Tensor)


class _TooLong(BaseException):
    """No Exception: an answer that catches those is stopped, too."""


@contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    """Raise _TooLong in what runs longer, where that can be done: not on Windows, nor in a
    thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and hasattr(signal, "setitimer")):
        yield
        return

    def stop(*_: Any) -> NoReturn:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """What a check draws, and whether its answer left gradients off, changes nothing after it."""
    import numpy as np  # here, since a hint needs neither
    import torch

    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(_gpus_in_use()), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def _gpus_in_use() -> list[int]:
    """None where nothing has used one: to ask a GPU for its random state would start it."""
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


# ------------------------------------------------------------------ what checks are made of


def require(condition: bool, message: str, *, evidence: Any = None) -> None:
    """Raise Wrong with the message unless the condition holds.

    `evidence` is what a named mistake must share to be told; without one, the message. Give one
    where the message has digits that hang on how an answer is written: bytes, small differences.
    """
    if condition:
        return
    wrong = Wrong(message, evidence)
    if _noted is None:
        raise wrong
    _noted.append(wrong.evidence)


def equal(call: str, got: Any, wanted: Any, unit: str = "", *, also: str = "") -> None:
    """Require `got` to be `wanted`, types included; `call` is how a learner would type the case,
    `also` what else there is to say of the difference."""
    unit = f" {unit}" if unit else ""
    message = f"{call} gave {_text(got)}, wanted {_text(wanted)}{unit}.{also}"
    if got is None and wanted is not None:
        message = f"{call} gave nothing; wanted {_text(wanted)}{unit}. Is there a return?"
    elif isinstance(got, float) and isinstance(wanted, int) and got == wanted:
        message = f"{call} gave {got}, a float; wanted {_text(wanted)}{unit}: use // for /."
    require(_same(got, wanted), message)


def _same(got: Any, wanted: Any) -> bool:
    """Equal, and of one type: 1.0, True and a tensor of one element all equal 1 and are not it."""
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    return got == wanted


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"
