"""Write the files of a command, results and pictures: all of them or none."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.allocator import simulate
from memlab.cli.documents import (
    explain_document,
    measure_document,
    plan_document,
    run_document,
)
from memlab.cli.errors import UsageError
from memlab.cli.terminal import note, printable, show_document
from memlab.explain import Explanation, summary
from memlab.explain.report_html import report
from memlab.internals.files import write_beside
from memlab.internals.interrupts import interrupts_ignored
from memlab.trace import Event, Trace
from memlab.units import paragraph

if TYPE_CHECKING:  # they import torch, which `memlab explain` does not
    from memlab.cli.plan_report import Result
    from memlab.cli.rows import Row
    from memlab.planner import Measured

Drawing = Callable[[Any], Any]  # takes the module memlab.plot, returns a figure
Writer = Callable[[Path], Any]


def write(rows: Sequence["Row"], title: str, folder: Path, predicted: Sequence["Row"] = ()) -> None:
    """Write a measurement's document and, if matplotlib is installed, the pictures."""
    document = measure_document(title, rows, predicted)
    _write_all("measure", document, _pictures(_drawings(rows, predicted, title)), folder)


def write_run(
    rows: Sequence["Row"],
    title: str,
    folder: Path,
    verdict: str,
    attempts: Iterable[tuple[str, str]] = (),
) -> None:
    """Write the document of a script that ran unmodified, with the pictures of a measurement. The
    rows after the first are of changes to it.

    attempts  of the script to change the machine: what each was, and to what
    """
    others: dict[str, Writer] = _pictures(_drawings(rows, (), title))
    if lines := [f"{kind:<8} {printable(what)}\n" for kind, what in dict.fromkeys(attempts)]:
        others["-refused.txt"] = lambda path: path.write_text("".join(lines), encoding="utf-8")
    _write_all("run", run_document(title, rows, verdict), others, folder)
    if not lines:  # an earlier run's
        (folder / "run-refused.txt").unlink(missing_ok=True)


def write_plan(found: "Result", folder: Path) -> None:
    """Write a plan's document, and a picture of the options' peaks with the limit, or the pictures
    of a script."""
    traces = {name: _peak_trace(o.measured) for name, o in found.options.items() if o.measured}
    drawings = _drawings(found.rows, (), found.what) if found.rows else {}
    if traces:
        drawings[""] = lambda plot: plot.breakdown(
            traces, title=found.what, limit_bytes=found.numbers["budget_bytes"]
        )
    pictures = _pictures(drawings) if drawings else {}
    _write_all("plan", plan_document(found.what, found.numbers), pictures, folder)


def write_explanation(found: Explanation, file: str, folder: Path) -> None:
    """Write an explanation's document and its report, a page of HTML."""
    page = report(found, file)
    document = explain_document(summary.headline(found), found)
    files = {".html": lambda path: path.write_text(page, encoding="utf-8")}
    _write_all("explain", document, files, folder)


def _write_all(
    stem: str, document: Mapping[str, Any], others: Mapping[str, Writer], folder: Path
) -> None:
    """Write the document, and other files by the end of their name; with `--json`, also print the
    document."""
    names = [f"{stem}.json", *(f"{stem}{end}" for end in others)]
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as renaming, ExitStack() as files:
            first, *paths = [files.enter_context(write_beside(folder / name)) for name in names]
            first.write_text(text, encoding="utf-8")
            for write_to, path in zip(others.values(), paths, strict=True):
                write_to(path)
            renaming.enter_context(interrupts_ignored())  # until all files have their names
    except OSError as error:
        raise UsageError(f"writing to {folder} failed: {error}") from error
    note(paragraph("written: " + ", ".join(str(folder / name) for name in names)))
    show_document(document)


def _peak_trace(measured: "Measured") -> Trace:
    """Return a trace of the peak alone, which is enough to draw it."""
    peak = enumerate(measured.at_peak.items())
    return Trace(
        tuple(
            Event(count, n, category, "", "", "before", "uint8", ())
            for n, (category, count) in peak
        )
    )


def _drawings(
    all_rows: Sequence["Row"], predicted: Sequence["Row"], title: str
) -> dict[str, Drawing]:
    """Return the figures by the suffix of their file: the peaks, the plain step's timeline, and the
    allocator's blocks on CUDA."""
    rows = [row for row in all_rows if row.trace is not None]
    plain = f"{rows[0].name}: {title}"
    drawings: dict[str, Drawing] = {
        "": lambda plot: plot.breakdown({r.name: r.trace for r in rows}, title=title),
        "-timeline": lambda plot: plot.timeline(rows[0].trace, title=plain),
    }
    on_cuda = (predicted or rows)[0].trace
    if on_cuda is not None and on_cuda.dry and on_cuda.reserved_bytes is not None:
        what = re.sub(r", (cpu|cuda[:a-z]*)$", "", plain.removesuffix(", dry run"))
        cuda_title = f"{what}, predicted for CUDA"
        drawings["-blocks"] = lambda plot: plot.blocks(simulate(on_cuda), title=cuda_title)
    return drawings


def _pictures(drawings: Mapping[str, Drawing]) -> dict[str, Writer]:
    """Return what writes the drawings; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        note("no pictures: matplotlib is not installed; run pip install matplotlib")
        return {}
    return {f"{end}.png": partial(_draw, draw) for end, draw in drawings.items()}


def fill_font_cache() -> None:
    """Let matplotlib list the fonts in its cache, which a confined process cannot write. Another
    process imports it, because the script may set variables that it reads when it is imported."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("MPLCONFIGDIR") or os.path.join(caches, "matplotlib"))
    if not any(folder.glob("fontlist-*.json")):
        code = "import matplotlib.font_manager"
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)


def _draw(draw: Drawing, path: Path) -> None:
    from memlab import plot  # imported late: measuring does not need matplotlib

    plot.save(draw(plot), path)
