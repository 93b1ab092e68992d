"""Write the files of a measurement, results and pictures: all of them or none."""

import importlib.util
import json
import math
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from memlab.allocator import simulate
from memlab.cli.errors import UsageError
from memlab.cli.rows import Row
from memlab.cli.terminal import echo
from memlab.internals.files import write_beside
from memlab.planner import Measured, Plan
from memlab.trace import Event, Trace
from memlab.units import paragraph

Drawing = Callable[[Any], Any]  # takes the module memlab.plot, returns a figure


def write(
    rows: Sequence[Row],
    title: str,
    folder: Path,
    predicted: Sequence[Row] = (),
    stem: str = "measure",
) -> None:
    """Write the results and, if matplotlib is installed, the pictures."""
    drawings = _drawings([row for row in rows if row.trace is not None], predicted, title)
    _write_all(
        f"{stem}.json",
        lambda path: _write_numbers(rows, predicted, title, path),
        {f"{stem}{name}.png": draw for name, draw in drawings.items()},
        folder,
    )


def _write_all(
    numbers: str, write_numbers: Callable[[Path], None], drawings: dict[str, Drawing], folder: Path
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        echo("no pictures: matplotlib is not installed; run pip install matplotlib")
        drawings = {}
    names = [numbers, *drawings]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            beside = {name: files.enter_context(write_beside(folder / name)) for name in names}
            write_numbers(beside[numbers])
            for name, draw in drawings.items():
                _draw(draw, beside[name])
    except OSError as error:
        raise UsageError(f"writing to {folder} failed: {error}") from error
    echo(paragraph("written: " + ", ".join(str(folder / name) for name in names)))


def write_plan(plan: Plan, folder: Path) -> None:
    """Write a plan's results and, if matplotlib is installed, a picture."""
    listed = [*plan.options, *([plan.miss] if plan.miss else [])]
    title = f"{plan.model}, {plan.batch} × {plan.seq_len} tokens, in {plan.memory.name}"
    measured = {o.recipe.words: o.measured for o in listed if o.measured}
    write_breakdown(measured, title, plan.to_dict(), folder)


def write_breakdown(
    measured: dict[str, Measured], title: str, numbers: dict[str, Any], folder: Path
) -> None:
    """Write a plan's numbers, and a picture of the peaks with the limit `budget_bytes`."""
    traces = {name: _peak_trace(found) for name, found in measured.items()}
    drawings: dict[str, Drawing] = {}
    if traces:
        drawings["plan.png"] = lambda plot: plot.breakdown(
            traces, title=title, limit_bytes=numbers["budget_bytes"]
        )
    _write_all(
        "plan.json",
        lambda path: _write_json(path, {"what": title, **numbers}),
        drawings,
        folder,
    )


def _peak_trace(measured: Measured) -> Trace:
    """Return a trace of the peak alone, which is enough to draw it."""
    peak = enumerate(measured.at_peak.items())
    return Trace(
        tuple(
            Event(count, n, category, "", "", "before", "uint8", ())
            for n, (category, count) in peak
        )
    )


def _drawings(rows: Sequence[Row], predicted: Sequence[Row], title: str) -> dict[str, Drawing]:
    """Return the figures by the suffix of their file: the peaks, the plain step's timeline, and the
    allocator's blocks on CUDA."""
    plain = f"{rows[0].name}: {title}"
    drawings: dict[str, Drawing] = {
        "": lambda plot: plot.breakdown({r.name: r.trace for r in rows}, title=title),
        "-timeline": lambda plot: plot.timeline(rows[0].trace, title=plain),
    }
    on_cuda = (predicted or rows)[0].trace
    if on_cuda.dry and on_cuda.reserved_bytes is not None:
        what = re.sub(r", (cpu|cuda[:a-z]*)$", "", plain.removesuffix(", dry run"))
        cuda_title = f"{what}, predicted for CUDA"
        drawings["-blocks"] = lambda plot: plot.blocks(simulate(on_cuda), title=cuda_title)
    return drawings


def _draw(draw: Drawing, path: Path) -> None:
    from memlab import plot  # imported late: measuring does not need matplotlib

    plot.save(draw(plot), path)


def _write_numbers(rows: Sequence[Row], predicted: Sequence[Row], title: str, path: Path) -> None:
    numbers = {"rows": list(map(_numbers, rows)), "on_cuda": list(map(_numbers, predicted))}
    _write_json(path, {"what": title, **numbers})


def _write_json(path: Path, numbers: dict[str, Any]) -> None:
    """Write the numbers with the date, machine and versions."""
    where = {
        "date": date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    what = {"what": numbers.pop("what"), **where, **numbers}
    path.write_text(json.dumps(what, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _numbers(row: Row) -> dict[str, Any]:
    return {
        "technique": row.name,
        **({} if row.trace is None else _bytes_of(row.trace)),
        "seconds": row.seconds,
        "time_ratio": row.time_ratio,
        "time_ratios": row.time_ratios,
        "estimated_time_ratio": row.estimated_time_ratio,
        "gradient_difference": _json_number(row.gradient_difference),
        "largest_gradient": _json_number(row.largest_gradient),
        "failure": row.failure,
        "dry_for": row.dry_for,
    }


def _bytes_of(trace: Trace) -> dict[str, Any]:
    return {
        "device": trace.device,
        "dry": trace.dry,
        "peak_bytes": trace.peak_bytes,
        "peak_in": trace.peak_phase,
        "at_peak": trace.at_peak,
        "memory": asdict(trace.memory),
        "notes": trace.notes,
    }


def _json_number(number: float | None) -> float | str | None:
    """Return nan and infinity as text, because JSON lacks them."""
    return number if number is None or math.isfinite(number) else str(number)
