"""What a notebook calls: `exercise` checks an answer, `guess` keeps a number, `reveal` compares.

In a learner's folder (one that `memlab start` made: it holds progress.json) each call is noted
there. Everywhere else, in the repository's own notebooks above all, nothing is written.
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
    """Check an answer, print the verdict, and give what the lesson goes on with: the answer if it
    is right, the reference if it is not.

    The reference itself is no answer: whoever runs a check's cell twice has it under their name.
    """
    asked = exercise_of(id_)
    if answer is asked.reference:
        print(
            f"[ ] {id_} this is the reference, with which the lesson went on; "
            f"run the cell with your own answer first"
        )
        return answer
    verdict = judge(asked, answer)
    say(str(verdict), indent="    ")
    _note(lambda p: progress.note_check(p, id_, verdict.status))
    return answer if verdict.status == OK else asked.reference


def guess(id_: str, **quantities: float) -> None:
    """Keep the reader's numbers until they are measured: `guess("1.1", peak_gib=2)`.

    A quantity's name ends in its unit: bytes, kib, mib, gib, gb, times or percent. A `...` in place
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
            raise ValueError(f"got {quantity}={number}; give a number that is not below 0")
    _guesses[id_] = {name: None if n is ... else float(n) for name, n in quantities.items()}
    kept = {name: {"guessed": n} for name, n in _guesses[id_].items() if n is not None}
    for name, noted in kept.items():
        what, _, unit = name.rpartition("_")
        print(f"noted: {what.replace('_', ' ')} {_text(noted['guessed'], unit)}")
    if kept:
        _note(lambda p: p.guesses.__setitem__(id_, kept))


def reveal(id_: str, measured: Trace | None = None, **quantities: float) -> None:
    """Print what was guessed beside what was measured, a line for each quantity.

    From a Trace come the peak, the bytes that are alive at the end, and those of a category at the
    peak: `guess("1.1", peak_gib=…)`, `live_mib`, `activations_mib`. Any other quantity is handed
    over under the name that it was guessed by, in bytes or as the number that it is.
    """
    day_of(id_)
    guessed = _guesses[id_] if id_ in _guesses else _earlier_guesses(id_)
    unasked = [name for name in quantities if not any(_alike(name, asked) for asked in guessed)]
    names = [*guessed, *unasked] or ["peak_gib"]
    found = {name: _in_unit(name, _measured(name, measured, quantities)) for name in names}
    for name, number in found.items():
        print(_line(name, guessed.get(name), number, alone=len(found) == 1))
    if any(number is not None for number in guessed.values()):
        _note(lambda p: _note_measured(p, id_, guessed, found))


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
    """In bytes, or as the plain number that it is."""
    for name, number in quantities.items():
        if _alike(name, quantity):
            return number
    what = quantity.rpartition("_")[0]
    if trace is not None and what == "peak":
        return trace.peak_bytes
    if trace is not None and what == "live":
        return trace.live_bytes
    if trace is not None and what in CATEGORIES:
        return trace.at_peak.get(what, 0)
    raise ValueError(f"got no measurement of {quantity}; give reveal(..., {quantity}=...)")


def _alike(one: str, other: str) -> bool:
    """Whether two names are of one quantity: optimizer_kib is optimizer_mib in another unit."""
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
    """The folder that the notebook runs in, if `memlab start` made it."""
    here = Path.cwd()
    return here if (here / progress.FILE).exists() else None


def _note(change: Callable[[progress.Progress], None]) -> None:
    """Note it there; a lesson goes on where that cannot be written."""
    if folder := _learners_folder():
        try:
            progress.update(folder, change)
        except OSError as error:
            print(f"(not noted in {progress.FILE}: {error.strerror or error})")


def _earlier_guesses(id_: str) -> dict[str, float | None]:
    """Those noted before the notebook was opened anew."""
    folder = _learners_folder()
    noted = progress.read(folder).guesses.get(id_, {}) if folder else {}
    return {quantity: numbers["guessed"] for quantity, numbers in noted.items()}


def _note_measured(
    noted: progress.Progress,
    id_: str,
    guessed: dict[str, float | None],
    measured: dict[str, float],
) -> None:
    for quantity, number in guessed.items():
        if number is not None:
            entry = {"guessed": number, "measured": measured[quantity]}
            noted.guesses.setdefault(id_, {})[quantity] = entry
