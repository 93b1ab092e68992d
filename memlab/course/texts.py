"""The texts of a day's exercises, from checks/dayNN.toml: titles, hints and named wrong answers.

    [[exercise]]
    id = "11.4"
    title = "How many rows in a chunk"
    minutes = 10
    difficulty = 2
    hints = '''
    Three paragraphs, from a nudge to almost the answer. Their lines are joined.

    …
    '''

    [[exercise.wrong]]
    remark = "A chunk has at most all rows."
    edit = '''
    - return -(-rows // chunks)
    + return most
    '''

A wrong answer has an `edit` or `code`. In an `edit`, the text of the lines that begin with "-" is
replaced, wherever it stands in the solution's cell, by the text of the lines that begin with "+";
a lone "+" removes it. Several such pairs apply in order. `code` runs after the solution's cell: it
defines the answer again, or a function that the answer calls.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

HINTS = 3
DIFFICULTIES = range(1, 6)


class Change(NamedTuple):
    """A change of a solution: pairs of old and new text, or code that runs after it."""

    edits: tuple[tuple[str, str], ...] = ()
    code: str = ""


class Mistake(NamedTuple):
    """A named wrong answer."""

    remark: str
    change: Change


class Text(NamedTuple):
    """An exercise without its check."""

    id: str
    title: str
    minutes: int
    difficulty: int
    hints: tuple[str, ...]  # from a nudge to almost the answer
    mistakes: tuple[Mistake, ...]


@cache
def read(path: Path, number: int) -> tuple[Text, ...]:
    """Return the texts of the day with this number; raise ValueError if a table is malformed."""
    return tuple(
        _text(f"{path.name}, exercise {number}.{place}", table, f"{number}.{place}")
        for place, table in enumerate(tables(path, "exercise")["exercise"], 1)
    )


_TYPES = {"id": str, "title": str, "minutes": int, "difficulty": int, "hints": str, "wrong": list}


def _text(where: str, table: Any, id_: str) -> Text:
    fields = checked_fields(where, table, _TYPES)
    hints = tuple(map(joined, re.split(r"\n\s*\n", fields["hints"].strip())))
    _require_one_of(where, "id", fields["id"], [id_])
    _require_one_of(where, "difficulty", fields["difficulty"], DIFFICULTIES)
    _require_one_of(where, "number of hints", len(hints), [HINTS])
    mistakes = tuple(
        _mistake(f"{where}, wrong answer {place}", row)
        for place, row in enumerate(fields["wrong"], 1)
    )
    return Text(id_, fields["title"], fields["minutes"], fields["difficulty"], hints, mistakes)


def _require_one_of(where: str, name: str, got: Any, expected: Sequence[Any]) -> None:
    if got not in expected:
        raise ValueError(f"{where}: got {name} {got}; expected {', '.join(map(str, expected))}")


def _mistake(where: str, table: Any) -> Mistake:
    fields, change = change_of(where, table, {"remark": str})
    return Mistake(joined(fields["remark"]), change)


def joined(text: str) -> str:
    """Return a text's lines as one."""
    return " ".join(text.split())


# ------------------------------------------------------------------ tables and their fields


def tables(path: Path, *names: str) -> dict[str, list[Any]]:
    """Return the file's arrays of tables; raise ValueError if it has others than these."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return checked_fields(
        path.name, {name: [] for name in names} | found, dict.fromkeys(names, list)
    )


def checked_fields(where: str, table: Any, types: Mapping[str, type]) -> dict[str, Any]:
    """Return the table; raise ValueError if it has other fields than these, or other types."""
    if not isinstance(table, dict) or table.keys() != types.keys():
        got = ", ".join(table) if isinstance(table, dict) else repr(table)
        raise ValueError(f"{where}: got {got or 'nothing'}; expected {', '.join(types)}")
    for name, value in table.items():
        if type(value) is not types[name]:
            kind = {str: "a text", int: "an integer", list: "tables"}[types[name]]
            raise ValueError(f"{where}: got {name} = {value!r}; expected {kind}")
    return table


def change_of(where: str, table: Any, types: Mapping[str, type]) -> tuple[dict[str, Any], Change]:
    """Return a table that has an `edit` or `code` besides these fields, and its change."""
    if "code" in table:
        fields = checked_fields(where, table, {**types, "code": str})
        return fields, Change(code=fields["code"])
    fields = checked_fields(where, table, {**types, "edit": str})
    return fields, Change(_edits(where, fields["edit"]))


def _edits(where: str, text: str) -> tuple[tuple[str, str], ...]:
    lines = text.strip("\n").split("\n")
    parts = [
        (sign, "\n".join(line[2:] for line in part))
        for sign, part in groupby(lines, key=lambda line: line[:2].rstrip())
    ]
    if [sign for sign, _ in parts] != ["-", "+"] * (len(parts) // 2):
        raise ValueError(
            f'{where}: got edit = {text!r}; expected lines that begin with "- ", each followed by '
            f'lines that begin with "+ "'
        )
    return tuple(zip([old for _, old in parts[::2]], [new for _, new in parts[1::2]], strict=True))
