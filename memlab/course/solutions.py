"""The lessons' solutions: the reference of each check, and wrong answers as edits of it.

    solution("12.2")            the answer that the solution hands to `exercise`
    given(12, "Wire")           what the lesson defines for its exercises
    mistakes("12.2", ("The mean is forgotten.", ("total.float() / self.ranks", "total.float()")))

An edit replaces text in the one cell of the solution that has it. What is edited is looked for
exactly as it stands there, so a solution that changes can make an edit fail, never do nothing.
"""

import textwrap
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

from memlab.course import days
from memlab.course.cells import CodeCell, answering, define, parsed, parsed_cells, run
from memlab.course.exercises import WrongAnswer
from memlab.course.functions import body_span, function_in

# What stands there and what replaces it; or a function of the source, None where it has no place.
Edit = tuple[str, str] | Callable[[str], str | None]


def solution(id_: str) -> Any:
    """The answer to the exercise "12.2" that its solution gives."""
    return _ran(days.day_of(id_))[id_][0]


def given(day: int, *names: str) -> Any:
    """What the day's solution defines under these names: one thing, or a tuple of several."""
    *_, (_, namespace) = _ran(day).values()
    found = tuple(namespace[name] for name in names)
    return found[0] if len(found) == 1 else found


class EditedAnswer(WrongAnswer):
    """A wrong answer that is the solution with edits. It is made when it is first needed: the
    notebook may be older than the edits while it is built."""

    def __init__(self, id_: str, remark: str, edits: Sequence[Edit]) -> None:
        self.__dict__.update(id=id_, remark=remark, edits=edits)  # the class it is of is frozen

    @cached_property
    def answer(self) -> Any:
        return edited(self.id, *self.edits)


def mistakes(id_: str, *rows: tuple[Any, ...]) -> tuple[WrongAnswer, ...]:
    """Named wrong answers, one per row: the remark on it, then the edits of the solution."""
    return tuple(EditedAnswer(id_, remark, edits) for remark, *edits in rows)


def edited(id_: str, *edits: Edit) -> Any:
    """The answer that the solution of an exercise gives once these edits are made in it."""
    day = days.day_of(id_)
    call, last = answering(_cells(day), id_)
    cells = _cells(day)[: last + 1]
    place, source = edited_source([cell.source for cell in cells], edits)
    namespace = dict(_ran(day)[id_][1])
    for cell in (parsed(source, f"<{id_}, edited: {hash(source)}>"), *cells[place + 1 :]):
        define(cell, namespace)
    return namespace[call.answer]


def edited_source(sources: Sequence[str], edits: Sequence[Edit]) -> tuple[int, str]:
    """The place and the text of the cell that the edits are made in: the last, if it has all that
    they replace, else the only one that has. LookupError if none has, or several."""
    found = [(n, text) for n, source in enumerate(sources) if (text := _with(edits, source))]
    if not found or (len(found) > 1 and found[-1][0] != len(sources) - 1):
        raise LookupError(f"{len(found)} cells have all that these edits replace: {edits}")
    return found[-1]


def _with(edits: Sequence[Edit], source: str) -> str | None:
    """The source edited; None where it lacks what an edit replaces."""
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
    """The edit that gives a function, or a method such as "Adam.step", another body."""

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


# ------------------------------------------------------------------ what is read, and run, once


@cache
def _cells(day: int) -> list[CodeCell]:
    return parsed_cells(days.notebook(day, "solutions"))


@cache
def _ran(day: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """For each exercise the solution's answer, and the names there are when it is handed over."""
    folder = days.notebook(day, "solutions").parent
    return {call.id: (answer, dict(names)) for call, answer, names in run(_cells(day), folder)}
