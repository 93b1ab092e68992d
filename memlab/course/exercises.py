"""Exercises, and how their answers are checked.

A check is a function of the learner's answer. It returns the evidence to print, or raises Wrong
with the first case that fails. A named wrong answer is a mistake that people make. Its remark is
shown only if no other mistake explains the failures: the learner's answer must fail, and pass, in
exactly the same cases as the named one.
"""

import importlib
import linecache
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

from memlab.course.ownwork import NotOwnWork, is_a_librarys, is_rebuilt, watched
from memlab.trace import Trace

LONGEST_VALUE = 200  # characters of a value in a message; a verdict is one line
FEW_CHARACTERS = 40  # characters of a value shown beside a line


class Wrong(Exception):  # noqa: N818 - the answer is wrong; nothing failed
    """A failure of an answer: the case, the result and the expected result.

    `evidence` distinguishes this failure from others; the default is the message.
    """

    def __init__(self, message: str, evidence: Any = None) -> None:
        super().__init__(message)
        self.evidence = message if evidence is None else evidence


@dataclass(frozen=True, eq=False)  # compared by identity: answers may be anything
class WrongAnswer:
    """A plausible wrong answer that must not pass, and a sentence that names the mistake."""

    answer: Any
    remark: str


@dataclass(frozen=True, eq=False)
class Exercise:
    """`id` is "1.2" for the second exercise of day 1. A lesson continues with `reference` if the
    learner's answer is missing or wrong."""

    id: str
    title: str
    minutes: int
    difficulty: int  # 1 to 5
    hints: tuple[str, ...]  # from a nudge to almost the answer
    reference: Any
    check: Callable[[Any], str]
    wrong_answers: tuple[WrongAnswer, ...]
    rebuilds: tuple[str, ...] = ()  # functions that the answer must not call, as in ownwork.py


@dataclass(frozen=True)
class Bill:
    """A day's line of the running bill: the same training step with all techniques built so far."""

    label: str
    measure: Callable[[], Trace]


@dataclass(frozen=True)
class Day:
    """A day's exercises and bill."""

    exercises: tuple[Exercise, ...]
    bill: Bill


# ------------------------------------------------------------------ checking an answer

OK, WRONG, NOT_ATTEMPTED = "ok", "wrong", "not attempted"
CPU_SECONDS = 60  # of a check, which normally takes less than one
IDLE_LOOKS = 60  # a check is also stopped after this many looks in a row that find it idle
LOOK_SECONDS = 1.0  # between two looks
IDLE_SHARE = 0.01  # of a core: below this, a check sleeps or waits
KEPT_BYTES = 2**13  # between calls: enough for codebooks that are computed once


@dataclass(frozen=True)
class Verdict:
    """`status` is OK, WRONG or NOT_ATTEMPTED; `text` is the evidence or the failure."""

    exercise: Exercise
    status: str
    text: str = ""

    def __str__(self) -> str:
        id_ = self.exercise.id
        if self.status == OK:
            return f"[ok] {id_}  {self.text}"
        if self.status == NOT_ATTEMPTED:
            return f"[ ] {id_} not attempted: going on with the reference"
        return f"[x] {id_} {self.text} Going on with the reference. Hint: memlab hint {id_}"


def judge(exercise: Exercise, answer: Any, others: Iterable[Exercise] = ()) -> Verdict:
    """Check an answer, and name the mistake if it is a known one.

    The lesson continues with the reference of an exercise among the `others` that was skipped, so
    the answer may call it. The random states of Python, torch and numpy are restored afterwards.
    """
    _import_dynamo()
    handed_out = [other.reference for other in others if other.id != exercise.id]
    with watched(exercise.check, exercise.rebuilds, handed_out) as calls:
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
        _, line = _learners_line(error)
        where = f" at `{line}`" if line else ""
        return Verdict(exercise, WRONG, f"The check was stopped{where}: {error}")
    return Verdict(exercise, OK, evidence)


def _checked(exercise: Exercise, answer: Any) -> str:
    from memlab.course.kept import kept  # imported late: hints don't need torch

    with _random_states_kept(), _incoming_gradients_kept(), _limited_time():
        before = kept(answer)
        evidence = exercise.check(answer)
        _require_little_kept([new for key, new in kept(answer).items() if key not in before])
        return evidence


def _require_little_kept(new: list[tuple[Any, int, str]]) -> None:
    total = sum(size for _, size, _ in new)
    where = ", ".join(sorted({name for _, _, name in new if name}))
    require(
        total <= KEPT_BYTES,
        f"after the check's last call, {total:,} bytes of tensors are still alive"
        f"{f' ({where})' if where else ''}; wanted nothing kept from one call to the next.",
        evidence="tensors kept between calls",
    )


def _import_dynamo() -> None:
    """Import torch._dynamo, which the first checkpoint, flop counter or meter would import. That
    takes seconds, and must not count against the time limit or run under a check's hooks."""
    # While it is imported, an OpOverload has no `_schema`, and a profile hook that calls `repr` on
    # it fails (test_the_first_answer_in_a_process_is_checked_like_any_other).
    importlib.import_module("torch._dynamo")


# ------------------------------------------------------------------ naming the mistake


def _mistake(exercise: Exercise, answer: Any, found: Wrong) -> str:
    """Return the remark of the one named wrong answer that fails in the same cases.

    An equal first failure is weak evidence, because small cases coincide. If two named mistakes
    explain all failures, return neither.
    """
    similar = [w for w in exercise.wrong_answers if _first(exercise, w) == found.evidence]
    if not similar:
        return ""
    failures = _failures(exercise, answer)
    explaining = [wrong for wrong in similar if _known_failures(exercise, wrong) == failures]
    return f" {explaining[0].remark}" if len(explaining) == 1 else ""


@cache
def _first(exercise: Exercise, wrong: WrongAnswer) -> Any:
    """Return the evidence of a named wrong answer's first failure. The result is cached."""
    try:
        _checked(exercise, wrong.answer)
    except Wrong as known:
        return known.evidence
    return None


@cache
def _known_failures(exercise: Exercise, wrong: WrongAnswer) -> tuple[Any, ...]:
    return _failures(exercise, wrong.answer)


def _failures(exercise: Exercise, answer: Any) -> tuple[Any, ...]:
    """Return the evidence of every failure in a check that continues after them, and its end."""
    global _collected
    found: list[Any] = []
    _collected = found
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # from cases that a right answer never reaches
            _checked(exercise, answer)
        end: Any = "finished"
    except Wrong as wrong:
        end = wrong.evidence
    except (Exception, SystemExit, _TooLong) as error:
        end = type(error).__name__
    finally:
        _collected = None
    return (*found, end)


# Collects failures while a check continues after them; None while the first failure ends it.
_collected: list[Any] | None = None


def _raised(error: BaseException) -> str:
    """Describe the error, the learner's line and the values there, in one sentence."""
    what = ": ".join(filter(None, [type(error).__name__, first_line(error)]))
    frame, line = _learners_line(error)
    if not frame:
        return f"{what}."
    values = "" if line.startswith("raise ") else _values_at(line, frame.f_locals)
    return f"{what}, at `{line}`{', where ' + values if values else ''}."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its full stop."""
    if isinstance(error, KeyError) and error.args and _is_tensor(error.args[0]):
        return _describe_value(error.args[0])  # a tensor's own text is all its elements
    return next(iter(str(error).strip().splitlines()), "").rstrip(".")


def _learners_line(error: BaseException) -> tuple[FrameType | None, str]:
    """Return the innermost frame and line that belong to no library."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not is_a_librarys(frame):
            return frame, linecache.getline(frame.f_code.co_filename, number).strip()
    return None, ""


def _values_at(line: str, values: dict[str, Any]) -> str:
    """Describe the first three names in a line that hold a number, a text or a tensor."""
    names = dict.fromkeys(re.findall(r"(?<![\w.\"'])[^\W\d]\w*", line.partition("#")[0]))
    texts = [f"{name} is {_describe_value(values[name])}" for name in names if name in values]
    return " and ".join([text for text in texts if not text.endswith(" is ")][:3])


def _describe_value(value: Any) -> str:
    """Describe a value, or return "" if that takes more than a few words."""
    if _is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    plain = value is None or isinstance(value, (bool, int, float, str))
    return text if plain and len(text := repr(value)) <= FEW_CHARACTERS else ""


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # hints don't import torch
    return torch is not None and isinstance(value, torch.Tensor)


class _TooLong(BaseException):
    """Not an Exception, so that an answer that catches every Exception is stopped, too."""


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raise _TooLong after CPU_SECONDS, however long a busy machine takes for them, or if the check
    is idle in IDLE_LOOKS looks. This is not possible on Windows or in a thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and hasattr(signal, "setitimer")):
        yield
        return

    begin = last = _cpu_seconds()
    idle_looks = 0

    def look(*_: Any) -> None:
        nonlocal last, idle_looks
        before, last = last, _cpu_seconds()
        idle_looks = 0 if last - before > IDLE_SHARE * LOOK_SECONDS else idle_looks + 1
        if last - begin > CPU_SECONDS:
            reason = f"it used {CPU_SECONDS} seconds of CPU time. Is there a loop that never ends?"
        elif idle_looks >= IDLE_LOOKS:
            reason = (
                f"it used no CPU for {IDLE_LOOKS * LOOK_SECONDS:.0f} seconds. Does it wait for "
                f"something that never comes?"
            )
        else:
            return
        # The next look comes later: the check must have time to stop its threads.
        signal.setitimer(signal.ITIMER_REAL, 20 * LOOK_SECONDS, LOOK_SECONDS)
        raise _TooLong(reason)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _cpu_seconds() -> float:
    """Return the CPU time of this process, of all its threads, and of its children that ended."""
    import resource  # POSIX only

    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def _incoming_gradients_kept() -> Iterator[None]:
    """Require each autograd Function to leave the gradients that its backward receives unchanged.
    Other operators may receive the same tensors."""
    from torch import Tensor  # imported late: hints don't need it
    from torch.autograd.function import BackwardCFunction

    backward = BackwardCFunction.apply

    def apply(node: BackwardCFunction, *received: Any) -> Any:
        gradients = [each for each in received if isinstance(each, Tensor)]
        versions = [gradient._version for gradient in gradients]
        sent = backward(node, *received)
        require(
            versions == [gradient._version for gradient in gradients],
            "backward changes the gradient that it receives; wanted it as it was: other operators "
            "may receive the same tensor.",
        )
        return sent

    BackwardCFunction.apply = apply
    try:
        yield
    finally:
        BackwardCFunction.apply = backward


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the random states and the grad mode afterwards."""
    import numpy as np  # imported late: hints don't need it
    import torch

    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(_gpus_in_use()), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def _gpus_in_use() -> list[int]:
    """Return the GPUs in use. Reading the random state of another GPU would initialize it."""
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


# ------------------------------------------------------------------ building blocks of checks


def require(condition: bool, message: str, *, evidence: Any = None) -> None:
    """Raise Wrong with the message unless the condition holds.

    A named mistake's remark is shown only if its `evidence` is equal; the default is the message.
    Pass evidence if the message has digits that depend on the implementation, such as bytes or
    small differences.
    """
    if condition:
        return
    wrong = Wrong(message, evidence)
    if _collected is None:
        raise wrong
    _collected.append(wrong.evidence)


def equal(call: str, got: Any, wanted: Any, unit: str = "", *, also: str = "") -> None:
    """Require `got` to equal `wanted`, types included. `call` is the case as a learner would type
    it, and `also` is added to the message."""
    if _same(got, wanted):
        return
    unit = f" {unit}" if unit else ""
    mine, right = _text(got), _text(wanted)
    message = f"{call} gave {mine}, wanted {right}{unit}.{also}"
    if got is None and wanted is not None:
        message = f"{call} gave nothing; wanted {right}{unit}. Is there a return?"
    elif isinstance(got, float) and isinstance(wanted, int) and got == wanted:
        message = f"{call} gave {got}, a float; wanted {right}{unit}, an integer."
    elif mine == right:
        message = f"{call} gave {mine}, {_first_difference(got, wanted)}."
    require(False, message)


def _same(got: Any, wanted: Any) -> bool:
    """Compare values and types: 1.0, True and a one-element tensor equal 1 but are not the same."""
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(_same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    return got == wanted


def _first_difference(got: Any, wanted: Any) -> str:
    """Say where two values differ whose texts are equal, because both are cut."""
    if isinstance(wanted, (list, tuple)) and type(got) is type(wanted):
        if len(got) != len(wanted):
            return f"of length {len(got):,}; wanted {len(wanted):,}"
        pairs = enumerate(zip(got, wanted, strict=True))
        place = next(place for place, pair in pairs if not _same(*pair))
        mine, right = _text(got[place]), _text(wanted[place])
        return f"whose item {place:,} is {mine}; wanted {right}"
    return f"of type {type(got).__name__}; wanted {type(wanted).__name__}"


Numbers = float | Sequence[float]


def distinct(got: Numbers, wanted: Numbers, digits: int = 4) -> tuple[str, str]:
    """Format two unequal numbers, or lists of them, with as many digits as it takes to tell them
    apart."""
    texts = ((_in_digits(got, n), _in_digits(wanted, n)) for n in range(digits, 18))
    equal_texts = _in_digits(got, digits), _in_digits(wanted, digits)
    return next((pair for pair in texts if pair[0] != pair[1]), equal_texts)


def _in_digits(value: Numbers, digits: int) -> str:
    if isinstance(value, Sequence):
        return f"[{', '.join(_in_digits(each, digits) for each in value)}]"
    return f"{value:.{digits}g}"


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"
