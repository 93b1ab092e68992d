"""Parse a day's source: its regions, and the two notebooks made from it, before they are executed.

A source, solutions/dayNN_name.py, is a script in jupytext's percent format. It gives

    solutions/dayNN_name.ipynb    executed, its outputs stored
    lessons/dayNN_name.ipynb      not executed, with stubs where a learner is to write

The learner's part is a region of a code cell. In the lesson, a commented stub below the region
replaces it, or a line that raises NotImplementedError with the exercise's id:

    def segments(n):
        ### BEGIN SOLUTION
        half = n // 2
        return half, n - half
        ### END SOLUTION
        ### BEGIN STUB
        # half = ...
        # return half, ...
        ### END STUB

    segments = exercise("5.2", segments)

The same source gives the same bytes: a cell's id is its position, and nothing about the machine,
the time or versions is stored.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jupytext
import nbformat

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

_MARKER = re.compile(r"\s*### ((?:BEGIN|END) (?:SOLUTION|STUB))(?:(?<=BEGIN SOLUTION) \S+)?\s*")
_LIKE_A_MARKER = re.compile(r"\s*#+\s*(?:BEGIN|END)\W*(?:SOLUTION|STUB)", re.IGNORECASE)

Notebook = dict[str, Any]


class SourceError(ValueError):
    """A source that cannot become a notebook; `line` is 1-based."""

    def __init__(self, message: str, line: int):
        super().__init__(message)
        self.line = line


# ------------------------------------------------------------------ regions of a cell


@dataclass(frozen=True)
class Region:
    """A region between markers, as indices of a cell's lines."""

    begin: int  # the line of ### BEGIN SOLUTION
    end: int  # the line of ### END SOLUTION
    after: int  # the first line below the region and its stub
    stub: tuple[str, ...] | None


def regions(source: str) -> list[Region]:
    """Return the regions of a cell in order; raise SourceError if markers don't pair up."""
    lines = source.split("\n")
    markers = _markers(lines)
    found = []
    while markers:
        begin, end = _pair(markers, "SOLUTION")
        after, stub = end + 1, None
        if markers and markers[0] == (after, "BEGIN STUB"):
            first, last = _pair(markers, "STUB")
            after, stub = last + 1, tuple(_uncommented(lines, first + 1, last))
        found.append(Region(begin, end, after, stub))
    return found


def solved(source: str) -> str:
    """Return a cell for the solution: without markers and stubs."""
    lines = source.split("\n")
    for region in reversed(regions(source)):
        lines[region.begin : region.after] = lines[region.begin + 1 : region.end]
    return "\n".join(lines)


def strip(source: str, id_of: Callable[[str], str | None]) -> str:
    """Return a cell for the lesson: each region replaced by its stub, or by a line that raises.

    `id_of` returns the exercise of a top-level function or class of the cell.
    """
    lines = source.split("\n")
    for region in reversed(regions(source)):
        stub = [_raising_line(source, region, id_of)] if region.stub is None else region.stub
        lines[region.begin : region.after] = stub
    return "\n".join(lines)


def exercise_id(name: str, sources: Sequence[str]) -> str | None:
    """Return the "5.2" of the first `name = exercise("5.2", name)` in these cells."""
    for source in sources:
        for statement in ast.parse(source).body:
            match statement:
                case ast.Assign(
                    targets=[ast.Name(target)],
                    value=ast.Call(
                        func=ast.Name("exercise") | ast.Attribute(attr="exercise"),
                        args=[ast.Constant(str(id_)), ast.Name(answer), *_],
                    ),
                ) if target == answer == name:
                    return id_
    return None


def _markers(lines: Sequence[str]) -> list[tuple[int, str]]:
    markers = []
    for index, line in enumerate(lines):
        if found := _MARKER.fullmatch(line):
            markers.append((index, found[1]))
        elif _LIKE_A_MARKER.match(line):
            raise SourceError(
                f"{line.strip()!r} is not a marker; write ### BEGIN SOLUTION, ### END SOLUTION, "
                f"### BEGIN STUB or ### END STUB",
                index + 1,
            )
    return markers


def _pair(markers: list[tuple[int, str]], kind: str) -> tuple[int, int]:
    """Remove the next two markers from the list, check their kind, and return their lines."""
    begin, marker = markers.pop(0)
    if marker == "BEGIN STUB" != f"BEGIN {kind}":
        raise SourceError("a stub block must directly follow a line ### END SOLUTION", begin + 1)
    if marker != f"BEGIN {kind}":
        raise SourceError(f"### {marker} without ### {marker.replace('END', 'BEGIN')}", begin + 1)
    if not markers or markers[0][1] != f"END {kind}":
        raise SourceError(f"### BEGIN {kind} without ### END {kind}", begin + 1)
    return begin, markers.pop(0)[0]


def _uncommented(lines: Sequence[str], first: int, last: int) -> Iterator[str]:
    for index in range(first, last):
        found = re.fullmatch(r"(\s*)(?:# ?(.*))?", lines[index])
        if found is None:
            raise SourceError("a line of a stub block must be a comment", index + 1)
        yield (found[1] + found[2]).rstrip() if found[2] else ""


def _raising_line(source: str, region: Region, id_of: Callable[[str], str | None]) -> str:
    code = _code_lines(source, region)
    if not code:
        raise SourceError("a region without code", region.begin + 1)
    name = _top_level_name(source, region)
    id_ = name and id_of(name)
    if not id_:
        raise SourceError(
            f"a region with neither an exercise nor a stub; add {name} = exercise(..., {name}) "
            f"below it, or a stub block"
            if name
            else "a region outside a function; put it into one, or add a stub block",
            region.begin + 1,
        )
    indentation = code[0][: len(code[0]) - len(code[0].lstrip())]
    size = "1 line" if len(code) == 1 else f"{len(code)} lines"
    return f'{indentation}raise NotImplementedError("exercise {id_}, about {size}")'


def _code_lines(source: str, region: Region) -> list[str]:
    inside = source.split("\n")[region.begin + 1 : region.end]
    return [line for line in inside if line.strip() and not line.lstrip().startswith("#")]


def _top_level_name(source: str, region: Region) -> str | None:
    """Return the name of the top-level function or class around the region; None if there is no
    function."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for top in ast.parse(source).body:
        around = [
            node
            for node in ast.walk(top)
            if isinstance(node, (*functions, ast.ClassDef))
            and node.lineno <= region.begin + 1 <= (node.end_lineno or 0)
        ]
        if any(isinstance(node, functions) for node in around):
            return around[0].name
    return None


# ------------------------------------------------------------------ notebooks before execution


@dataclass(frozen=True)
class Cell:
    """A cell of the source, with its markers; `line` is its first line, 1-based."""

    kind: str
    source: str
    metadata: dict[str, Any]
    line: int


def solution_notebook(text: str, file: str = "day00.py") -> Notebook:
    """Return the solution's notebook before execution; `file` names the source in errors."""
    cells = cells_of(text, file)
    return _notebook(cells, [_parsed(cell, solved, file) for cell in cells], file)


def lesson_notebook(text: str, file: str = "day00.py", repository: str = "") -> Notebook:
    """Return the lesson's notebook; `file` names the source in errors.

    With the address of the published repository, it has badges and a cell for Colab and Kaggle.
    """
    cells = cells_of(text, file)
    code = [cell.source if cell.kind == "code" else "" for cell in cells]

    def without_solution(place: int) -> str:
        later = code[place:]  # the cell's own exercise is in the cell or below
        form = partial(strip, id_of=lambda name: exercise_id(name, later))
        return _parsed(cells[place], form, file)

    lesson = _notebook(cells, [without_solution(place) for place in range(len(cells))], file)
    if repository:
        lesson["cells"][1:1] = _hosted_cells(repository, file)
    return lesson


def in_bytes(notebook: Notebook) -> bytes:
    """Serialize a notebook: sorted keys, texts as lists of lines, a final newline."""
    return (nbformat.writes(nbformat.from_dict(notebook)) + "\n").encode()


def cells_of(text: str, file: str) -> list[Cell]:
    """Return the cells of a source; raise SourceError if a code cell is not valid Python."""
    cells = []
    padded, at = f"\n{text}\n", 0  # where to look for the next code cell
    for cell in _read(text, file):
        source = cell.source.strip("\n")
        is_code = cell.cell_type == "code"
        if is_code:  # jupytext returns its text unchanged, but without its line number
            at = max(at, padded.find(f"\n{source}\n", at))
        line = padded.count("\n", 0, at + 1)
        if "incorrectly_encoded_metadata" in cell.metadata:
            raise _error(file, line, "near this line, a cell's options cannot be read")
        if is_code and not source.strip():
            raise _error(file, line, "near this line is a code cell without code")
        kept = {key: cell.metadata[key] for key in ("tags", "reason") if key in cell.metadata}
        cells.append(Cell(cell.cell_type, source, kept, line))
        _parsed(cells[-1], str, file)
        at += len(source) if is_code else 0
    return cells


def unexecuted() -> dict[str, Any]:
    """Return the fields of a code cell that has not run, as a new dict."""
    return {"execution_count": None, "outputs": []}


def day_of_file(file: str) -> int:
    """Return the day at the start of a file's name, or 0."""
    found = re.match(r"day(\d+)", Path(file).name)
    return int(found[1]) if found else 0


_BADGES = """\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/{github})
[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src={address})"""
# torch with its local label (2.13.0+cpu): a pip that may choose would replace Colab's.
_SET_UP = """\
# On Colab and Kaggle: install memlab and keep the installed torch. Elsewhere: nothing happens.
import importlib.util
import subprocess
import sys
from importlib.metadata import version

if importlib.util.find_spec("memlab") is None:
    packages = ["memlab[plot]@git+{repository}"]
    packages.append(f"torch=={{version('torch')}}")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)

from memlab.course import hosted

hosted.prepare({day})"""


def _hosted_cells(repository: str, file: str) -> list[dict[str, Any]]:
    """Return the badges and the cell that prepares a lesson on Colab and Kaggle."""
    day, lesson = day_of_file(file), f"blob/main/lessons/{Path(file).stem}.ipynb"
    owner = repository.removeprefix("https://github.com/")
    badges = _BADGES.format(github=f"github/{owner}/{lesson}", address=f"{repository}/{lesson}")
    code = _SET_UP.format(repository=repository, day=day)
    return [
        {"cell_type": "markdown", "id": f"day{day:02}-badges", "metadata": {}, "source": badges},
        {
            **{"cell_type": "code", "id": f"day{day:02}-hosted", "metadata": {}, "source": code},
            **unexecuted(),
        },
    ]


def _read(text: str, file: str) -> list[Any]:
    """Parse a source with jupytext; comments stay comments, even `# !ls`."""
    percent = {"extension": ".py", "format_name": "percent", "comment_magics": False}
    try:
        return jupytext.reads(text, fmt=percent).cells
    except Exception as error:  # an invalid option raises errors of many types
        raise _error(file, 1, f"jupytext cannot read this file: {error}".splitlines()[0]) from error


def _parsed(cell: Cell, form: Callable[[str], str], file: str) -> str:
    """Return the transformed source of a cell, which must be valid Python in a code cell."""
    if cell.kind != "code":
        return cell.source
    try:
        source = form(cell.source)
        ast.parse(source)
    except SourceError as error:
        raise _error(file, cell.line + error.line - 1, str(error)) from None
    except SyntaxError as error:
        # A line of the original cell has a line in the file; a transformed cell's line has none.
        line = cell.line + ((error.lineno or 1) - 1 if form is str else 0)
        what = "the cell" if form is str else "the cell, with its regions replaced,"
        raise _error(file, line, f"{what} is not valid Python: {error.msg}") from None
    return source


def _error(file: str, line: int, message: str) -> SourceError:
    return SourceError(f"{file}:{line}: {message}", line)


def _notebook(cells: Sequence[Cell], sources: Sequence[str], file: str) -> Notebook:
    notebook_cells = []
    for place, (cell, source) in enumerate(zip(cells, sources, strict=True), 1):
        entry = {
            "cell_type": cell.kind,
            "id": f"day{day_of_file(file):02}-{place:02}",
            "metadata": cell.metadata,
            "source": source,
        }
        notebook_cells.append(entry | (unexecuted() if cell.kind == "code" else {}))
    return {"cells": notebook_cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
