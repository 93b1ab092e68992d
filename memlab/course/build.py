"""Build the course's notebooks from their sources: `python -m memlab.course.build --help`.

memlab.course.source parses a source. This module executes its solution, each day in a fresh kernel,
and writes both notebooks or neither. `--check` executes and writes nothing; it names each notebook
that differs from its source.

A second build gives the same bytes. For that the kernel has one thread and fixed hashes, printed
text is joined into one stream, and errors are stored without their traceback.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from memlab.course.bill import store
from memlab.course.lint import lint
from memlab.course.references import with_references
from memlab.course.source import (
    Notebook,
    SourceError,
    cells_of,
    day_of_file,
    in_bytes,
    lesson_notebook,
    solution_notebook,
    unexecuted,
)
from memlab.course.source import __doc__ as SOURCE_DOCSTRING
from memlab.internals.files import write_beside

ROOT = Path(__file__).parents[2]  # the repository
CPU_SECONDS = 20  # limit per notebook
# Results must not depend on the number of cores or on string hashes.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0"}

_NAME = re.compile(r"day(\d+)_\w+")


class CellError(RuntimeError):
    """A cell raised an error. `place` is its index among the notebook's cells."""

    def __init__(self, message: str, place: int):
        super().__init__(message)
        self.place = place


# ------------------------------------------------------------------ execution


def execute(
    notebook: Notebook, folder: Path, on_cell: Callable[[], None] = lambda: None
) -> tuple[Notebook, float]:
    """Run the notebook in a fresh kernel; return it with outputs, and the kernel's CPU-seconds.

    Calls `on_cell` after each code cell. Raises CellError for a cell that fails, and another
    RuntimeError if the kernel does not start. The kernel always ends, even after Ctrl-C.
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
        extra_arguments=["--log-level=ERROR"],  # the kernel's own log, which goes to stderr
    )
    kernel: Any = client.create_kernel_manager()
    client.km = kernel
    try:
        await _start(client, folder)
        code = [place for place, cell in enumerate(executed.cells) if cell.cell_type == "code"]
        for place in code:
            await _execute_cell(client, place)
            _normalize(executed.cells[place])
            on_cell()
        return executed, await _cpu_seconds(client)
    finally:
        if kernel.has_kernel:  # False if its process could not be started
            await kernel.shutdown_kernel(now=True)
        if client.kc is not None:
            client.kc.stop_channels()


async def _start(client: NotebookClient, folder: Path) -> None:
    try:
        await client.async_start_new_kernel(cwd=str(folder), env=_environment())
    except NoSuchKernel as error:
        raise RuntimeError(
            f"there is no Jupyter kernel {error.name} to execute notebooks with: "
            f"pip install -e '.[lab]'"
        ) from None
    await client.async_start_new_kernel_client()


def _environment() -> dict[str, str]:
    """Return the kernel's environment, without MPLBACKEND so that IPython shows figures inline."""
    kept = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return kept | ENVIRONMENT


async def _execute_cell(client: NotebookClient, place: int) -> None:
    cell = client.nb.cells[place]
    try:
        await client.async_execute_cell(cell, place)
    except CellExecutionError as error:
        raise CellError(f"raised {_error_line(error.ename, error.evalue)}", place) from None
    except DeadKernelError:
        # nbclient mistakes a Ctrl-C, which cancels this task, for the end of the kernel.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from None
        raise CellError("ended the kernel", place) from None


async def _cpu_seconds(client: Any) -> float:
    """Return the kernel process's CPU time. The request is not a cell, so nothing is stored."""
    clock = {"seconds": "__import__('time').process_time()"}
    asked = client.kc.execute("", silent=True, store_history=False, user_expressions=clock)
    reply = await client.async_wait_for_reply(asked)
    return float(reply["content"]["user_expressions"]["seconds"]["data"]["text/plain"])


def _normalize(cell: Notebook) -> None:
    """Make a cell's outputs reproducible: join streams, and shorten errors to one line."""
    outputs: list[Notebook] = []
    for output in cell["outputs"]:
        if output["output_type"] == "error":  # a traceback contains paths
            output["traceback"] = [_error_line(output["ename"], output["evalue"])]
        is_stream = output["output_type"] == "stream"
        if is_stream and outputs and outputs[-1].get("name") == output["name"]:
            outputs[-1]["text"] += output["text"]
        else:
            outputs.append(output)
    cell["outputs"] = outputs


def _error_line(name: str, message: str) -> str:
    lines = message.splitlines()
    return f"{name}: {lines[0]}" if lines else name


# ------------------------------------------------------------------ files


def sources(root: Path = ROOT, days: Sequence[int] = ()) -> list[Path]:
    """Return the sources of these days, or of all; raise ValueError for a day without a source."""
    paths = {
        path: day_of_file(path.name)
        for path in sorted((root / "solutions").glob("*.py"))
        if _NAME.fullmatch(path.stem)
    }
    if not paths:
        raise ValueError(f"no sources: {root / 'solutions'} has no dayNN_name.py")
    if missing := sorted(set(days) - set(paths.values())):
        known = ", ".join(map(str, sorted(set(paths.values()))))
        raise ValueError(f"no source of day {missing[0]} in solutions/; there are days {known}")
    return [path for path, day in paths.items() if not days or day in days]


def notebooks(source: Path) -> tuple[Path, Path]:
    """Return the paths of a source's solution and lesson."""
    name = f"{source.stem}.ipynb"
    return source.with_name(name), source.parents[1] / "lessons" / name


def build_day(source: Path) -> tuple[Notebook, float]:
    """Write both notebooks of a source; return the executed one and its CPU-seconds.

    SourceError and CellError name the file and the line, and leave both files unchanged.
    """
    file, text = _short_name(source), _with_references(source)
    lesson, solution = _lesson(source, text), solution_notebook(text, file)
    cells = sum(cell["cell_type"] == "code" for cell in solution["cells"])
    try:
        with _bar(f"day {day_of_file(file)}", cells) as on_cell:
            executed, cpu_seconds = execute(solution, source.parent, on_cell)
    except CellError as error:
        cell = cells_of(text, file)[error.place]
        first = cell.source.strip().splitlines()[0]
        message = f"{file}:{cell.line}: the cell {first!r} {error}"
        raise CellError(message, error.place) from None
    _write(source, text, executed, lesson)
    return executed, cpu_seconds


def rewrite_text(source: Path) -> None:
    """Write both notebooks of a source with its prose, and keep the solution's stored outputs.

    Raises ValueError, and changes nothing, if a code cell differs from the stored one.
    """
    file, text = _short_name(source), _with_references(source)
    solution_path, _ = notebooks(source)
    solution, lesson = solution_notebook(text, file), _lesson(source, text)
    stored = json.loads(solution_path.read_bytes())["cells"] if solution_path.exists() else []
    stored = [cell for cell in stored if cell["cell_type"] == "code"]
    code = [cell for cell in solution["cells"] if cell["cell_type"] == "code"]
    if [cell["source"] for cell in code] != ["".join(cell["source"]) for cell in stored]:
        day = day_of_file(file)
        raise ValueError(
            f"{file}: code differs from the notebook; run python -m memlab.course.build {day}"
        )
    for cell, before in zip(code, stored, strict=True):
        cell |= {name: before[name] for name in unexecuted()}
    _write(source, text, solution, lesson)


def _write(source: Path, text: str, solution: Notebook, lesson: Notebook) -> None:
    """Write a source and both of its notebooks, or none of them."""
    solution_path, lesson_path = notebooks(source)
    lesson_path.parent.mkdir(exist_ok=True)
    with (
        write_beside(source) as source_beside,
        write_beside(solution_path) as solution_beside,
        write_beside(lesson_path) as lesson_beside,
    ):
        source_beside.write_text(text, encoding="utf-8")
        solution_beside.write_bytes(in_bytes(solution))
        lesson_beside.write_bytes(in_bytes(lesson))


def differences(root: Path = ROOT, days: Sequence[int] = ()) -> list[str]:
    """Return one sentence, with the remedy, for each notebook that differs from its source.

    Nothing is executed, so a solution's outputs are not compared.
    """
    found = []
    for source in sources(root, days):
        remedy = f"python -m memlab.course.build {day_of_file(source.name)}"
        file, text = _short_name(source), _with_references(source)
        if text != source.read_text(encoding="utf-8"):
            found.append(f"{file} differs from the code in memlab/reference: {remedy}")
        solution, lesson = notebooks(source)
        if complaint := _solution_complaint(solution, solution_notebook(text, file)):
            found.append(f"{_short_name(solution)} {complaint}: {remedy}")
        if complaint := _lesson_complaint(lesson, _lesson(source, text)):
            found.append(f"{_short_name(lesson)} {complaint}: {remedy}")
    known = {path.stem for path in sources(root)}
    for path in sorted([*root.glob("solutions/*.ipynb"), *root.glob("lessons/*.ipynb")]):
        asked = not days or day_of_file(path.name) in days
        if asked and path.stem not in known and not path.name.startswith("."):
            found.append(
                f"{_short_name(path)} has no source solutions/{path.stem}.py: write or delete it"
            )
    return found


def _lesson(source: Path, text: str) -> Notebook:
    """Return the lesson; in the repository it names the published address."""
    project = source.parents[1] / "pyproject.toml"
    urls = tomllib.loads(project.read_text("utf-8"))["project"]["urls"] if project.exists() else {}
    return lesson_notebook(text, _short_name(source), urls.get("Repository", ""))


def _with_references(source: Path) -> str:
    """Return the text of a source, with the code of memlab/reference that it names inserted."""
    try:
        return with_references(source.read_text(encoding="utf-8"), source.parents[1])
    except SourceError as error:
        raise SourceError(f"{_short_name(source)}:{error.line}: {error}", error.line) from None


def _lesson_complaint(path: Path, wanted: Notebook) -> str | None:
    """Return a complaint about a lesson, or None."""
    if not path.exists():
        return "is missing"
    return None if path.read_bytes() == in_bytes(wanted) else "differs from its source"


def _solution_complaint(path: Path, wanted: Notebook) -> str | None:
    """Return a complaint about a solution, ignoring its outputs, or None."""
    if not path.exists():
        return "is missing"
    try:
        notebook = json.loads(path.read_bytes())
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        counts = [cell["execution_count"] for cell in code]
        for cell in code:
            cell.update(unexecuted())
        same = in_bytes(notebook) == in_bytes(wanted)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is not a notebook"
    if not same:
        return "differs from its source"
    in_order = counts == list(range(1, len(code) + 1))
    return None if in_order else "has cells that were not executed in order"


def _short_name(path: Path) -> str:
    """Return a file's name for messages: folder/name, with forward slashes."""
    return f"{path.parent.name}/{path.name}"


# ------------------------------------------------------------------ the command


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Build or check; return 1 if something needs a build or an edit, 2 after an error."""
    asked = _parser().parse_args(arguments)
    try:
        if asked.bill:
            store()
            return 0
        if asked.text:
            return _rewrite_text(root, asked.days)
        return _check(root, asked.days) if asked.check else _build(root, asked.days)
    except (ValueError, RuntimeError) as error:  # RuntimeError: the kernel did not start
        return _complain(error, 2)
    except KeyboardInterrupt:
        return _complain("interrupted; the notebooks of this day are unchanged", 130)


def _build(root: Path, days: Sequence[int]) -> int:
    status = 0
    for source in sources(root, days):
        try:
            executed, cpu_seconds = build_day(source)
        except (SourceError, CellError) as error:
            status = _complain(error, 2)
            continue
        day, cells = day_of_file(source.name), executed["cells"]
        count = sum(cell["cell_type"] == "code" for cell in cells)
        print(f"day {day}: {count} cells, {cpu_seconds:.1f} CPU-seconds (limit {CPU_SECONDS})")
        if cpu_seconds > CPU_SECONDS:
            _complain(f"warning: day {day} takes over {CPU_SECONDS} CPU-seconds; make it smaller")
        status = max(status, _lint(source))
    return status


def _rewrite_text(root: Path, days: Sequence[int]) -> int:
    status = 0
    for source in sources(root, days):
        rewrite_text(source)
        status = max(status, _lint(source))
    return status


def _lint(source: Path) -> int:
    """Print the findings on both notebooks of a source; return 1 if there are any."""
    status = 0
    for path, is_solution in zip(notebooks(source), (True, False), strict=True):
        for finding in lint(json.loads(path.read_bytes()), executed=is_solution):
            status = _complain(f"{_short_name(path)}: {finding}", 1)
    return status


def _check(root: Path, days: Sequence[int]) -> int:
    found = differences(root, days)
    for difference in found:
        _complain(difference)
    return 1 if found else 0


def _complain(message: object, status: int = 0) -> int:
    """Print the message on standard error and return `status`."""
    print(message, file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    form = (SOURCE_DOCSTRING or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(
        prog="python -m memlab.course.build",
        description="Build the course's notebooks from their sources, solutions/dayNN_name.py.",
        epilog=form,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "days", nargs="*", type=int, metavar="DAY", help="number of a day, such as 5; default: all"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="execute and write nothing; name each notebook that differs from its source, and "
        "exit with status 1 if there is one",
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="execute nothing: take the prose of the source, and keep the stored outputs; refused "
        "if code has changed",
    )
    parser.add_argument(
        "--bill", action="store_true", help="measure and write each day's line of the running bill"
    )
    return parser


@contextmanager
def _bar(title: str, cells: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error if it is a terminal. Call the yielded function after
    each cell."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # otherwise redirected output would reach the terminal
        disable=not console.is_terminal,  # otherwise a file would get an empty line
    ) as bar:
        task = bar.add_task(title, total=cells)
        yield lambda: bar.advance(task)


if __name__ == "__main__":
    sys.exit(main())
