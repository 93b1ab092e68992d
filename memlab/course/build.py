"""The notebooks of the course from their sources: `python -m memlab.course.build --help`.

A source, solutions/dayNN_name.py, is a script in jupytext's percent format. Of it are made

    solutions/dayNN_name.ipynb    executed, its outputs stored
    lessons/dayNN_name.ipynb      not executed, with stubs where a learner is to write

What a learner is to write is a region of a code cell; what a lesson has in its place follows as a
comment, or is a line that raises NotImplementedError, with the id of the exercise:

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

The same source gives the same bytes: ids are a cell's place, and nothing of the machine, of the
hour or of a version is stored.
"""

import argparse
import ast
import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from memlab.course.lint import lint
from memlab.files import write_beside

ROOT = Path(__file__).parents[2]  # of the repository
CPU_SECONDS = 20  # that a notebook may take
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Results must depend neither on the number of cores nor on the hashes of strings.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0"}

_NAME = re.compile(r"day(\d+)_\w+")
_MARKER = re.compile(r"\s*### ((?:BEGIN|END) (?:SOLUTION|STUB))\s*")
_LIKE_A_MARKER = re.compile(r"\s*#+\s*(?:BEGIN|END)\W*(?:SOLUTION|STUB)", re.IGNORECASE)

Notebook = dict[str, Any]


class SourceError(ValueError):
    """A source that cannot become a notebook; `line` counts from 1, in what was read."""

    def __init__(self, message: str, line: int):
        super().__init__(message)
        self.line = line


class CellError(RuntimeError):
    """A cell that raised, in one line; `place` is its index among the notebook's cells."""

    def __init__(self, message: str, place: int):
        super().__init__(message)
        self.place = place


# ------------------------------------------------------------------ regions of a cell


@dataclass(frozen=True)
class Region:
    """What stands between the markers, by the indices of a cell's lines."""

    begin: int  # the line of ### BEGIN SOLUTION
    end: int  # the line of ### END SOLUTION
    after: int  # the first line below all that belongs to the region, its stub too
    stub: tuple[str, ...] | None


def regions(source: str) -> list[Region]:
    """The regions of a cell in their order; SourceError where markers don't pair up."""
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
    """A cell as the solution has it: without markers and stubs."""
    lines = source.split("\n")
    for region in reversed(regions(source)):
        lines[region.begin : region.after] = lines[region.begin + 1 : region.end]
    return "\n".join(lines)


def strip(source: str, id_of: Callable[[str], str | None]) -> str:
    """A cell as the lesson has it: each region replaced by its stub, or by a line that raises.

    `id_of` knows the exercise of a function or class that stands at the cell's top level.
    """
    lines = source.split("\n")
    for region in reversed(regions(source)):
        stub = [_raising_line(source, region, id_of)] if region.stub is None else region.stub
        lines[region.begin : region.after] = stub
    return "\n".join(lines)


def exercise_id(name: str, sources: Sequence[str]) -> str | None:
    """The "5.2" of the first `name = exercise("5.2", name)` in these cells."""
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
                f"{line.strip()!r} is no marker; write ### BEGIN SOLUTION, ### END SOLUTION, "
                f"### BEGIN STUB or ### END STUB",
                index + 1,
            )
    return markers


def _pair(markers: list[tuple[int, str]], kind: str) -> tuple[int, int]:
    """The lines of the next two markers, taken off the list: they begin and end a `kind`."""
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
    """Of the function or class around the region; None if no function is around it."""
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


# ------------------------------------------------------------------ notebooks, not yet executed


@dataclass(frozen=True)
class Cell:
    """A cell as the source has it, markers and all; `line` is that of its first, from 1."""

    kind: str
    source: str
    metadata: dict[str, Any]
    line: int


def solution_notebook(text: str, file: str = "day00.py") -> Notebook:
    """What a source gives before it is executed; `file` names it in errors and its day in ids."""
    cells = _cells(text, file)
    return _notebook(cells, [_parsed(cell, solved, file) for cell in cells], file)


def lesson_notebook(text: str, file: str = "day00.py") -> Notebook:
    """What a source gives a learner; `file` names it in errors and its day in ids."""
    cells = _cells(text, file)
    code = [cell.source if cell.kind == "code" else "" for cell in cells]

    def without_solution(place: int) -> str:
        later = code[place:]  # the cell's own exercise stands in it or below
        form = partial(strip, id_of=lambda name: exercise_id(name, later))
        return _parsed(cells[place], form, file)

    return _notebook(cells, [without_solution(place) for place in range(len(cells))], file)


def in_bytes(notebook: Notebook) -> bytes:
    """A notebook as its file holds it: keys sorted, texts as lists of lines, a final newline."""
    return (nbformat.writes(nbformat.from_dict(notebook)) + "\n").encode()


def _cells(text: str, file: str) -> list[Cell]:
    """The cells of a source, every code cell of which is Python."""
    cells = []
    padded, at = f"\n{text}\n", 0  # where the next code cell is looked for
    for cell in _read(text, file):
        source = cell.source.strip("\n")
        is_code = cell.cell_type == "code"
        if is_code:  # it comes as it stands in the text, but without its line
            at = max(at, padded.find(f"\n{source}\n", at))
        line = padded.count("\n", 0, at + 1)
        if "incorrectly_encoded_metadata" in cell.metadata:
            raise _error(file, line, "near here are options of a cell that cannot be read")
        if is_code and not source.strip():
            raise _error(file, line, "near here is a code cell without code")
        kept = {key: cell.metadata[key] for key in ("tags", "reason") if key in cell.metadata}
        cells.append(Cell(cell.cell_type, source, kept, line))
        _parsed(cells[-1], str, file)
        at += len(source) if is_code else 0
    return cells


def _read(text: str, file: str) -> list[Any]:
    """What jupytext makes of a source; comments stay comments, also `# !ls`."""
    percent = {"extension": ".py", "format_name": "percent", "comment_magics": False}
    try:
        return jupytext.reads(text, fmt=percent).cells
    except Exception as error:  # an option of the wrong kind ends in errors of many kinds
        raise _error(file, 1, f"jupytext cannot read this file: {error}".splitlines()[0]) from error


def _parsed(cell: Cell, form: Callable[[str], str], file: str) -> str:
    """The source of a cell in a form of it, which must be Python if the cell is code."""
    if cell.kind != "code":
        return cell.source
    try:
        source = form(cell.source)
        ast.parse(source)
    except SourceError as error:
        raise _error(file, cell.line + error.line - 1, str(error)) from None
    except SyntaxError as error:
        # What stands in the cell as it was read has a line of the file; what replaces it has none.
        line = cell.line + ((error.lineno or 1) - 1 if form is str else 0)
        what = "the cell" if form is str else "the cell, with its regions replaced,"
        raise _error(file, line, f"{what} is no Python: {error.msg}") from None
    return source


def _error(file: str, line: int, message: str) -> SourceError:
    return SourceError(f"{file}:{line}: {message}", line)


def _notebook(cells: Sequence[Cell], sources: Sequence[str], file: str) -> Notebook:
    notebook_cells = []
    for place, (cell, source) in enumerate(zip(cells, sources, strict=True), 1):
        entry = {
            "cell_type": cell.kind,
            "id": f"day{_day(file):02}-{place:02}",
            "metadata": cell.metadata,
            "source": source,
        }
        notebook_cells.append(entry | (_unexecuted() if cell.kind == "code" else {}))
    return {"cells": notebook_cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def _unexecuted() -> dict[str, Any]:
    return {"execution_count": None, "outputs": []}


def _day(file: str) -> int:
    found = re.match(r"day(\d+)", Path(file).name)
    return int(found[1]) if found else 0


# ------------------------------------------------------------------ execution


def execute(
    notebook: Notebook, folder: Path, on_cell: Callable[[], None] = lambda: None
) -> tuple[Notebook, float]:
    """The notebook with its outputs, run in one fresh kernel, and the CPU-seconds of that kernel.

    Calls `on_cell` after each code cell. CellError says which cell raised; the kernel is gone in
    every case, Ctrl-C included.
    """
    return asyncio.run(_execute(notebook, folder, on_cell))


async def _execute(
    notebook: Notebook, folder: Path, on_cell: Callable[[], None]
) -> tuple[Notebook, float]:
    executed = nbformat.from_dict(notebook)
    client = NotebookClient(
        executed,
        kernel_name="python3",
        record_timing=False,
        timeout=None,
        extra_arguments=["--log-level=ERROR"],  # of the kernel's own log, which goes to our stderr
    )
    kernel = client.km = client.create_kernel_manager()
    try:
        await client.async_start_new_kernel(cwd=str(folder), env=_environment())
        await client.async_start_new_kernel_client()
        code = [place for place, cell in enumerate(executed.cells) if cell.cell_type == "code"]
        for place in code:
            await _execute_cell(client, place)
            _settle(executed.cells[place])
            on_cell()
        return executed, await _cpu_seconds(client)
    finally:
        if kernel.has_kernel:  # none if not even its process could be started
            await kernel.shutdown_kernel(now=True)
        if client.kc is not None:
            client.kc.stop_channels()


def _environment() -> dict[str, str]:
    """Of the kernel: without MPLBACKEND, so that IPython shows figures below their cells."""
    kept = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return kept | ENVIRONMENT


async def _execute_cell(client: NotebookClient, place: int) -> None:
    cell = client.nb.cells[place]
    try:
        await client.async_execute_cell(cell, place)
    except CellExecutionError as error:
        raise CellError(f"raised {_in_one_line(error.ename, error.evalue)}", place) from None
    except DeadKernelError:
        # nbclient takes a Ctrl-C, which cancels this task, for the end of the kernel.
        if asyncio.current_task().cancelling():
            raise asyncio.CancelledError from None
        raise CellError("ended the kernel", place) from None


async def _cpu_seconds(client: NotebookClient) -> float:
    """Of the kernel's process, from its own clock; not a cell, and so nothing of it is stored."""
    clock = {"seconds": "__import__('time').process_time()"}
    asked = client.kc.execute("", silent=True, store_history=False, user_expressions=clock)
    reply = await client.async_wait_for_reply(asked)
    return float(reply["content"]["user_expressions"]["seconds"]["data"]["text/plain"])


def _settle(cell: Notebook) -> None:
    """Make the outputs of a cell what every run gives: streams in one piece, errors in one line."""
    outputs: list[Notebook] = []
    for output in cell["outputs"]:
        if output["output_type"] == "error":  # a traceback has paths in it
            output["traceback"] = [_in_one_line(output["ename"], output["evalue"])]
        is_stream = output["output_type"] == "stream"
        if is_stream and outputs and outputs[-1].get("name") == output["name"]:
            outputs[-1]["text"] += output["text"]
        else:
            outputs.append(output)
    cell["outputs"] = outputs


def _in_one_line(name: str, message: str) -> str:
    lines = message.splitlines()
    return f"{name}: {lines[0]}" if lines else name


# ------------------------------------------------------------------ files


def sources(root: Path = ROOT, days: Sequence[int] = ()) -> list[Path]:
    """The sources of these days, or of all; ValueError for a day that is not there."""
    paths = {
        path: _day(path.name)
        for path in sorted((root / "solutions").glob("*.py"))
        if _NAME.fullmatch(path.stem)
    }
    if not paths:
        raise ValueError(f"no sources: {root / 'solutions'} has no dayNN_name.py")
    if missing := sorted(set(days) - set(paths.values())):
        there = ", ".join(map(str, sorted(set(paths.values()))))
        raise ValueError(f"no source of day {missing[0]} in solutions/; there are days {there}")
    return [path for path, day in paths.items() if not days or day in days]


def notebooks(source: Path) -> tuple[Path, Path]:
    """The files that are made of a source: its solution and its lesson."""
    name = f"{source.stem}.ipynb"
    return source.with_name(name), source.parents[1] / "lessons" / name


def build_day(source: Path) -> tuple[Notebook, float]:
    """Write both notebooks of a source; the executed one, and the CPU-seconds that it took.

    SourceError and CellError name the file and the line, and leave both files as they were.
    """
    file, text = _file(source), source.read_text(encoding="utf-8")
    lesson, solution = lesson_notebook(text, file), solution_notebook(text, file)
    cells = sum(cell["cell_type"] == "code" for cell in solution["cells"])
    try:
        with _bar(f"day {_day(file)}", cells) as on_cell:
            executed, cpu_seconds = execute(solution, source.parent, on_cell)
    except CellError as error:
        cell = _cells(text, file)[error.place]
        first = cell.source.strip().splitlines()[0]
        message = f"{file}:{cell.line}: the cell {first!r} {error}"
        raise CellError(message, error.place) from None
    solution_path, lesson_path = notebooks(source)
    lesson_path.parent.mkdir(exist_ok=True)
    with write_beside(solution_path) as solution_beside, write_beside(lesson_path) as lesson_beside:
        solution_beside.write_bytes(in_bytes(executed))
        lesson_beside.write_bytes(in_bytes(lesson))
    return executed, cpu_seconds


def differences(root: Path = ROOT, days: Sequence[int] = ()) -> list[str]:
    """One sentence for each notebook that is not what its source gives, with the remedy.

    Nothing is executed: of a solution, the outputs are taken as they are.
    """
    found = []
    for source in sources(root, days):
        remedy = f"python -m memlab.course.build {_day(source.name)}"
        file, text = _file(source), source.read_text(encoding="utf-8")
        solution, lesson = notebooks(source)
        if complaint := _of_solution(solution, solution_notebook(text, file)):
            found.append(f"{_file(solution)} {complaint}: {remedy}")
        if complaint := _of_lesson(lesson, lesson_notebook(text, file)):
            found.append(f"{_file(lesson)} {complaint}: {remedy}")
    known = {path.stem for path in sources(root)}
    for path in sorted([*root.glob("solutions/*.ipynb"), *root.glob("lessons/*.ipynb")]):
        asked = not days or _day(path.name) in days
        if asked and path.stem not in known and not path.name.startswith("."):
            found.append(
                f"{_file(path)} has no source solutions/{path.stem}.py: write one, or delete it"
            )
    return found


def _of_lesson(path: Path, wanted: Notebook) -> str | None:
    """What is wrong with a lesson; None if nothing is."""
    if not path.exists():
        return "is missing"
    return None if path.read_bytes() == in_bytes(wanted) else "differs from its source"


def _of_solution(path: Path, wanted: Notebook) -> str | None:
    """What is wrong with a solution, its outputs apart; None if nothing is."""
    if not path.exists():
        return "is missing"
    try:
        notebook = json.loads(path.read_bytes())
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        counts = [cell["execution_count"] for cell in code]
        for cell in code:
            cell.update(_unexecuted())
        same = in_bytes(notebook) == in_bytes(wanted)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is no notebook"
    if not same:
        return "differs from its source"
    in_order = counts == list(range(1, len(code) + 1))
    return None if in_order else "has cells that were not executed, or not in order"


def _file(path: Path) -> str:
    """How messages name a file: from the repository's root, with forward slashes."""
    return f"{path.parent.name}/{path.name}"


# ------------------------------------------------------------------ the command


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Build or check; the exit status: 1 for what needs another build or edit, 2 for no result."""
    asked = _parser().parse_args(arguments)
    try:
        return _check(root, asked.days) if asked.check else _build(root, asked.days)
    except (ValueError, RuntimeError) as error:  # a RuntimeError is a kernel that does not start
        return _complain(error, 2)
    except KeyboardInterrupt:
        return _complain("interrupted; the notebooks of this day are as they were", 130)


def _build(root: Path, days: Sequence[int]) -> int:
    status = 0
    for source in sources(root, days):
        try:
            executed, cpu_seconds = build_day(source)
        except (SourceError, CellError) as error:
            status = _complain(error, 2)
            continue
        day, cells = _day(source.name), executed["cells"]
        count = sum(cell["cell_type"] == "code" for cell in cells)
        print(f"day {day}: {count} cells, {cpu_seconds:.1f} CPU-seconds (limit {CPU_SECONDS})")
        if cpu_seconds > CPU_SECONDS:
            _complain(f"warning: day {day} takes over {CPU_SECONDS} CPU-seconds; make it smaller")
        solution, lesson = notebooks(source)
        for path, is_solution in ((solution, True), (lesson, False)):
            for finding in lint(json.loads(path.read_bytes()), executed=is_solution):
                status = max(status, _complain(f"{_file(path)}: {finding}", 1))
    return status


def _check(root: Path, days: Sequence[int]) -> int:
    found = differences(root, days)
    for difference in found:
        _complain(difference)
    return 1 if found else 0


def _complain(message: object, status: int = 0) -> int:
    """Print it on standard error; gives back the exit status that it is a reason for."""
    print(message, file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    form = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(
        prog="python -m memlab.course.build",
        description="Make the notebooks of the course from their sources, solutions/dayNN_name.py.",
        epilog=form,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "days", nargs="*", type=int, metavar="DAY", help="a day's number, such as 5; none: all days"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="execute and write nothing: name each notebook that is not what its source gives, "
        "with exit status 1 if there is one",
    )
    return parser


@contextmanager
def _bar(title: str, cells: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, on a terminal only; call what it gives after each cell."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else what goes to a file would go to the terminal
        disable=not console.is_terminal,  # else a file would get an empty line
    ) as bar:
        task = bar.add_task(title, total=cells)
        yield lambda: bar.advance(task)


if __name__ == "__main__":
    sys.exit(main())
