"""The lessons' solutions: the answers to compare with, and other answers as changes of them.

    solution("12.2")            the answer that the solution passes to `exercise`
    given(12, "Communicator")   a name that the lesson defines for its exercises
    checked("12.2", check)      the exercise of the day's texts, with its check

An edit replaces text in the one cell of the solution that contains it. The text must match exactly,
so after a change of the solution an edit can fail but never silently does nothing.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

from memlab.course import days
from memlab.course.cells import CodeCell, answering, define, parsed, parsed_cells, run
from memlab.course.exercises import Exercise, WrongAnswer
from memlab.course.texts import Change


def solution(id_: str) -> Any:
    """Return the solution's answer to the exercise "12.2"."""
    return _ran(days.day_of(id_))[id_][0]


def given(day: int, *names: str) -> Any:
    """Return the value of a name that the day's solution defines, or a tuple for several names."""
    *_, (_, namespace) = _ran(day).values()
    found = tuple(namespace[name] for name in names)
    return found[0] if len(found) == 1 else found


def checked(
    id_: str, check: Callable[[Any], str], reference: Any = None, *, rebuilds: Sequence[str] = ()
) -> Exercise:
    """Return an exercise with its texts. The default reference is the solution."""
    id_, title, minutes, difficulty, hints, mistakes = days.text_of(id_)
    reference = solution(id_) if reference is None else reference
    wrong_answers = tuple(ChangedSolution(id_, *mistake) for mistake in mistakes)
    return Exercise(
        *(id_, title, minutes, difficulty, hints),
        *(reference, check, wrong_answers, tuple(rebuilds)),
    )


class ChangedSolution(WrongAnswer):
    """A wrong answer made by changing the solution. It is created when first used, because during a
    build the notebook may be older than the changes."""

    id: str
    change: Change

    def __init__(self, id_: str, remark: str, change: Change) -> None:
        self.__dict__.update(id=id_, remark=remark, change=change)  # the dataclass is frozen

    @cached_property
    def answer(self) -> Any:
        return changed(self.id, self.change)


def changed(id_: str, change: Change) -> Any:
    """Return the answer that an exercise's solution gives after this change."""
    day = days.day_of(id_)
    found = answering(_cells(day), id_)
    assert found is not None  # the notebook's lint requires one
    call, last = found
    cells = _cells(day)[: last + 1]
    if change.code:
        place, source = last, f"{cells[last].source}\n\n{change.code}"
    else:
        place, source = edited_source([cell.source for cell in cells], change.edits)
    namespace = dict(_ran(day)[id_][1])
    for cell in (parsed(source, f"<{id_}, edited: {hash(source)}>"), *cells[place + 1 :]):
        define(cell, namespace)
    return namespace[call.answer]


def edited_source(sources: Sequence[str], edits: Sequence[tuple[str, str]]) -> tuple[int, str]:
    """Return the index and the edited text of the cell: the last one if it contains all replaced
    texts, else the only one that does. Raises LookupError if there is none, or several."""
    found = [(n, text) for n, source in enumerate(sources) if (text := _with(edits, source))]
    if not found or (len(found) > 1 and found[-1][0] != len(sources) - 1):
        raise LookupError(
            f"{len(found)} cells contain all the text that these edits replace: {edits}"
        )
    return found[-1]


def _with(edits: Sequence[tuple[str, str]], source: str) -> str | None:
    """Return the edited source; None if it lacks a replaced text."""
    for old, new in edits:
        if old not in source:
            return None
        source = source.replace(old, new)
    return source


# ------------------------------------------------------------------ cached parsing and running


@cache
def _cells(day: int) -> list[CodeCell]:
    return parsed_cells(days.notebook(day, "solutions"))


@cache
def _ran(day: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return each exercise's answer in the solution, and the namespace at its `exercise` call."""
    folder = days.notebook(day, "solutions").parent
    return {call.id: (answer, dict(names)) for call, answer, names in run(_cells(day), folder)}
