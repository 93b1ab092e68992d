"""The lessons' solutions: the reference answers of the checks, and wrong answers as edits of them.

    solution("12.2")            the answer that the solution passes to `exercise`
    given(12, "Communicator")           a name that the lesson defines for its exercises
    mistakes("12.2", ("The mean is forgotten.", ("total.float() / self.ranks", "total.float()")))

An edit replaces text in the one cell of the solution that contains it. The text must match exactly,
so after a change of the solution an edit can fail but never silently does nothing.
"""

import textwrap
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

from memlab.course import days
from memlab.course.cells import CodeCell, answering, define, parsed, parsed_cells, run
from memlab.course.exercises import WrongAnswer
from memlab.course.functions import body_span, function_in

# (old text, new text), or a function of the source that returns None if it does not apply
Edit = tuple[str, str] | Callable[[str], str | None]


def solution(id_: str) -> Any:
    """Return the solution's answer to the exercise "12.2"."""
    return _ran(days.day_of(id_))[id_][0]


def given(day: int, *names: str) -> Any:
    """Return the value of a name that the day's solution defines, or a tuple for several names."""
    *_, (_, namespace) = _ran(day).values()
    found = tuple(namespace[name] for name in names)
    return found[0] if len(found) == 1 else found


class EditedAnswer(WrongAnswer):
    """A wrong answer made by editing the solution. It is created when first used, because during a
    build the notebook may be older than the edits."""

    def __init__(self, id_: str, remark: str, edits: Sequence[Edit]) -> None:
        self.__dict__.update(id=id_, remark=remark, edits=edits)  # the dataclass is frozen

    @cached_property
    def answer(self) -> Any:
        return edited(self.id, *self.edits)


def mistakes(id_: str, *rows: tuple[Any, ...]) -> tuple[WrongAnswer, ...]:
    """Return named wrong answers, one per row: the remark, then the edits of the solution."""
    return tuple(EditedAnswer(id_, remark, edits) for remark, *edits in rows)


def edited(id_: str, *edits: Edit) -> Any:
    """Return the answer that an exercise's solution gives after these edits."""
    day = days.day_of(id_)
    call, last = answering(_cells(day), id_)
    cells = _cells(day)[: last + 1]
    place, source = edited_source([cell.source for cell in cells], edits)
    namespace = dict(_ran(day)[id_][1])
    for cell in (parsed(source, f"<{id_}, edited: {hash(source)}>"), *cells[place + 1 :]):
        define(cell, namespace)
    return namespace[call.answer]


def edited_source(sources: Sequence[str], edits: Sequence[Edit]) -> tuple[int, str]:
    """Return the index and the edited text of the cell: the last one if it contains all replaced
    texts, else the only one that does. Raises LookupError if there is none, or several."""
    found = [(n, text) for n, source in enumerate(sources) if (text := _with(edits, source))]
    if not found or (len(found) > 1 and found[-1][0] != len(sources) - 1):
        raise LookupError(
            f"{len(found)} cells contain all the text that these edits replace: {edits}"
        )
    return found[-1]


def _with(edits: Sequence[Edit], source: str) -> str | None:
    """Return the edited source; None if it lacks a replaced text."""
    for edit in edits:
        if callable(edit):
            edited_text = edit(source)
        else:
            edited_text = source.replace(*edit) if edit[0] in source else None
        if edited_text is None:
            return None
        source = edited_text
    return source


def body(function: str, text: str) -> Edit:
    """Return an edit that replaces the body of a function or a method such as "Adam.step"."""

    def replaced(source: str) -> str | None:
        found = function_in(source, function)
        if found is None:
            return None
        begin, end = body_span(found)
        lines = source.split("\n")
        indentation = " " * found.body[0].col_offset
        new = textwrap.indent(textwrap.dedent(text).strip("\n"), indentation)
        return "\n".join([*lines[:begin], new, *lines[end:]])

    return replaced


# ------------------------------------------------------------------ cached parsing and running


@cache
def _cells(day: int) -> list[CodeCell]:
    return parsed_cells(days.notebook(day, "solutions"))


@cache
def _ran(day: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return each exercise's answer in the solution, and the namespace at its `exercise` call."""
    folder = days.notebook(day, "solutions").parent
    return {call.id: (answer, dict(names)) for call, answer, names in run(_cells(day), folder)}
