"""The functions that a notebook calls: `exercise` checks an answer, `guess` records a number, and
`reveal` compares it with the measurement.

In a learner's folder, which `memlab start` makes and which contains progress.json, each call is
recorded there. Elsewhere, as in the repository's own notebooks, nothing is written.
"""

from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import TypeVar

from memlab.course import progress
from memlab.course.days import day, day_of, exercise_of
from memlab.course.exercises import OK, judge
from memlab.course.page import say
from memlab.trace import CATEGORIES, Trace
from memlab.units import BINARY_UNITS, DECIMAL_UNITS

Answer = TypeVar("Answer")

# The last word of a quantity's name is its unit.
_BYTES = {unit.lower(): factor for unit, factor in {**DECIMAL_UNITS, **BINARY_UNITS}.items()}
_BYTES["bytes"] = 1
_SIGNS = {"times": " ×", "percent": " %"}
_NAMES = {unit.lower(): unit for unit in (*DECIMAL_UNITS, *BINARY_UNITS)}
_NAMES["bytes"] = "bytes"

_guesses: dict[str, dict[str, float | None]] = {}


def exercise(id_: str, answer: Answer) -> Answer:
    """Check an answer, print the verdict, and return the answer if it is right, else the reference.

    The reference itself does not count as an answer. Otherwise running a check's cell twice would
    pass the exercise.
    """
    known = exercise_of(id_)
    if answer is known.reference:
        print(
            f"[ ] {id_} this is the reference, which replaced your answer; run the cell with your "
            f"own answer first"
        )
        return answer
    verdict = judge(known, answer, day(day_of(id_)).exercises)
    say(str(verdict), indent="    ")
    _record(lambda p: progress.note_check(p, id_, verdict.status))
    return answer if verdict.status == OK else known.reference


def guess(id_: str, **quantities: float) -> None:
    """Record the reader's guesses until they are measured: `guess("1.1", peak_gib=2)`.

    A quantity's name ends in its unit: bytes, kib, mib, gib, gb, times or percent. A `...` instead
    of a number is no guess.
    """
    day(day_of(id_))
    if not quantities:
        raise ValueError(f"got no number; give one, such as guess({id_!r}, peak_gib=1.5)")
    for quantity, number in quantities.items():
        _unit_of(quantity)
        if number is not ... and not isinstance(number, Real):
            raise TypeError(
                f"got {quantity}={number!r}; give a number, such as {quantity}=1.5, or leave ..."
            )
        if number is not ... and number < 0:
            raise ValueError(f"got {quantity}={number}; give a number of at least 0")
    _guesses[id_] = {name: None if n is ... else float(n) for name, n in quantities.items()}
    kept = {name: {"guessed": n} for name, n in _guesses[id_].items() if n is not None}
    for name, guessed in kept.items():
        what, _, unit = name.rpartition("_")
        print(f"noted: {what.replace('_', ' ')} {_text(guessed['guessed'], unit)}")
    if kept:
        _record(lambda p: p.guesses.__setitem__(id_, kept))


def reveal(id_: str, measured: Trace | None = None, **quantities: float) -> None:
    """Print each guess beside its measurement, one line per quantity.

    A Trace supplies the peak, the live bytes at the end, and a category's bytes at the peak:
    `guess("1.1", peak_gib=…)`, `live_mib`, `activations_mib`. Pass any other quantity under the
    name that it was guessed by, in bytes or as a plain number.
    """
    day_of(id_)
    guessed = _guesses[id_] if id_ in _guesses else _earlier_guesses(id_)
    unguessed = [
        name for name in quantities if not any(_same_quantity(name, asked) for asked in guessed)
    ]
    names = [*guessed, *unguessed] or ["peak_gib"]
    found = {name: _in_unit(name, _measured(name, measured, quantities)) for name in names}
    for name, number in found.items():
        print(_line(name, guessed.get(name), number, alone=len(found) == 1))
    if any(number is not None for number in guessed.values()):
        _record(lambda p: _record_measured(p, id_, guessed, found))


# ------------------------------------------------------------------ quantities and their units


def _unit_of(quantity: str) -> str:
    unit = quantity.rpartition("_")[2]
    if unit not in _BYTES and unit not in _SIGNS:
        raise ValueError(
            f"got {quantity}; its name must end in a unit, such as peak_gib: "
            f"{', '.join([*_BYTES, *_SIGNS])}"
        )
    return unit


def _measured(quantity: str, trace: Trace | None, quantities: dict[str, float]) -> float:
    """Return the measurement in bytes, or as a plain number."""
    for name, number in quantities.items():
        if _same_quantity(name, quantity):
            return number
    what = quantity.rpartition("_")[0]
    if trace is not None and what == "peak":
        return trace.peak_bytes
    if trace is not None and what == "live":
        return trace.live_bytes
    if trace is not None and what in CATEGORIES:
        return trace.at_peak.get(what, 0)
    raise ValueError(f"got no measurement of {quantity}; give reveal(..., {quantity}=...)")


def _same_quantity(one: str, other: str) -> bool:
    """Return True if two names differ at most in their unit, as optimizer_kib and optimizer_mib."""
    in_bytes = _unit_of(one) in _BYTES and _unit_of(other) in _BYTES
    return one == other or (in_bytes and one.rpartition("_")[0] == other.rpartition("_")[0])


def _in_unit(quantity: str, measured: float) -> float:
    return measured / _BYTES.get(_unit_of(quantity), 1)


def _line(quantity: str, guessed: float | None, measured: float, alone: bool) -> str:
    what, _, unit = quantity.rpartition("_")
    name = "" if alone or not what else f"{what.replace('_', ' ')}: "
    if guessed is None:
        return f"{name}no guess · measured {_text(measured, unit)}"
    gap = _text(measured - guessed, unit, sign="+")
    return f"{name}guessed {_text(guessed, unit)} · measured {_text(measured, unit)} · gap {gap}"


def _text(number: float, unit: str, sign: str = "") -> str:
    digits = "z,.0f" if unit == "bytes" else "z,.2f"  # z: what rounds to -0.00 is 0.00
    return f"{number:{sign}{digits}}{_SIGNS.get(unit) or ' ' + _NAMES[unit]}"


# ------------------------------------------------------------------ the learner's folder


def _learners_folder() -> Path | None:
    """Return the folder that the notebook runs in if `memlab start` made it."""
    here = Path.cwd()
    return here if (here / progress.FILE).exists() else None


def _record(change: Callable[[progress.Progress], None]) -> None:
    """Record a change there. If the file cannot be written, the lesson continues."""
    if folder := _learners_folder():
        try:
            progress.update(folder, change)
        except OSError as error:
            print(f"(not recorded in {progress.FILE}: {error.strerror or error})")


def _earlier_guesses(id_: str) -> dict[str, float | None]:
    """Return the guesses recorded before the notebook was reopened."""
    folder = _learners_folder()
    guesses = progress.read(folder).guesses.get(id_, {}) if folder else {}
    return {quantity: numbers["guessed"] for quantity, numbers in guesses.items()}


def _record_measured(
    recorded: progress.Progress,
    id_: str,
    guessed: dict[str, float | None],
    measured: dict[str, float],
) -> None:
    for quantity, number in guessed.items():
        if number is not None:
            entry = {"guessed": number, "measured": measured[quantity]}
            recorded.guesses.setdefault(id_, {})[quantity] = entry
