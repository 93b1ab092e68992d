"""The files of a measurement: numbers and pictures, all of them or none."""

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
from memlab.cli.terminal import paragraph, say
from memlab.internals.files import write_beside
from memlab.planner import Measured, Plan
from memlab.trace import Event, Trace

Drawing = Callable[[Any], Any]  # memlab.plot to a figure


def write(
    rows: Sequence[Row],
    title: str,
    folder: Path,
    predicted: Sequence[Row] = (),
    stem: str = "measure",
) -> None:
    """Write numbers and, where matplotlib is installed, pictures: all of them or none."""
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
        say("no pictures: pip install matplotlib draws them")
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
    say(paragraph("written: " + ", ".join(str(folder / name) for name in names)))


def write_plan(plan: Plan, folder: Path) -> None:
    """Write what a plan found: numbers and, where matplotlib is installed, a picture."""
    shown = [*plan.options, *([plan.miss] if plan.miss else [])]
    traces = {o.recipe.words: _at_its_peak(o.measured) for o in shown if o.measured}
    title = f"{plan.model}, {plan.batch} × {plan.seq_len} tokens, in {plan.memory.name}"
    drawings: dict[str, Drawing] = {}
    if traces:
        drawings["plan.png"] = lambda plot: plot.breakdown(
            traces, title=title, limit_bytes=plan.budget_bytes
        )
    _write_all(
        "plan.json",
        lambda path: _write_json(path, {"what": title, **plan.to_dict()}),
        drawings,
        folder,
    )


def _at_its_peak(measured: Measured) -> Trace:
    """A trace of the peak alone: a picture of it needs no more."""
    peak = enumerate(measured.at_peak.items())
    return Trace(
        tuple(
            Event(count, n, category, "", "", "before", "uint8", ())
            for n, (category, count) in peak
        )
    )


def _drawings(rows: Sequence[Row], predicted: Sequence[Row], title: str) -> dict[str, Drawing]:
    """What to draw, by the end of a file's name: the peaks, the plain step, and what CUDA reserves
    for it."""
    plain = f"{rows[0].name}: {title}"
    drawings: dict[str, Drawing] = {
        "": lambda plot: plot.breakdown({r.name: r.trace for r in rows}, title=title),
        "-timeline": lambda plot: plot.timeline(rows[0].trace, title=plain),
    }
    on_cuda = (predicted or rows)[0].trace
    if on_cuda.dry and on_cuda.reserved_bytes is not None:
        what = re.sub(r", (cpu|cuda[:a-z]*)$", "", plain.removesuffix(", dry run"))
        title_there = f"{what}, predicted for CUDA"
        drawings["-blocks"] = lambda plot: plot.blocks(simulate(on_cuda), title=title_there)
    return drawings


def _draw(draw: Drawing, path: Path) -> None:
    from memlab import plot  # only here: measuring needs no matplotlib

    plot.save(draw(plot), path)


def _write_numbers(rows: Sequence[Row], predicted: Sequence[Row], title: str, path: Path) -> None:
    numbers = {"rows": list(map(_numbers, rows)), "on_cuda": list(map(_numbers, predicted))}
    _write_json(path, {"what": title, **numbers})


def _write_json(path: Path, numbers: dict[str, Any]) -> None:
    """The numbers, and where they were found."""
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
        "gradient_difference": _or_its_name(row.gradient_difference),
        "largest_gradient": _or_its_name(row.largest_gradient),
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


def _or_its_name(number: float | None) -> float | str | None:
    """JSON has no nan and no infinity."""
    return number if number is None or math.isfinite(number) else str(number)
