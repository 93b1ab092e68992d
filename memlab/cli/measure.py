"""`memlab measure`: one training step, plain and with each technique, side by side."""

import importlib.util
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import memlab
from memlab.cli import UsageError
from memlab.model import PRESETS
from memlab.trace import Trace
from memlab.train import TECHNIQUES, Setting, Technique, Training, build
from memlab.units import format_bytes

TIMED_PAIRS = 3
SUITABLE = {
    "cpu": Setting("25m", batch=4, seq_len=256),
    "mps": Setting("34m", batch=4, seq_len=512),
    "accelerator": Setting("124m", batch=8, seq_len=1024),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

console = Console(highlight=False)


@dataclass(frozen=True)
class Row:
    """What one technique came to; `time_ratio` and `gradient_difference` against the first row."""

    name: str
    trace: Trace
    time_ratio: float | None = None
    gradient_difference: float | None = None


def measure_techniques(
    *,
    model: str | None,
    batch: int | None,
    seq_len: int | None,
    dtype: str | None,
    names: list[str] | None,
    device: str | None,
    dry: bool,
    out: str,
) -> None:
    """Measure the plain step and each technique; print a table, write pictures and numbers."""
    setting = _setting(model, batch, seq_len, dtype, "cpu" if dry else _device(device))
    chosen = _chosen_techniques(names)
    console.print(f"[bold]{_headline(setting, dry)}[/]", soft_wrap=True)
    rows = _rows(setting, chosen, dry)
    console.print(_table(rows))
    console.print(f"\n[bold]plain[/]: {rows[0].trace}", markup=True)
    _write(rows, str(setting), Path(out))


def measure_script(script: str, *, device: str | None, dry: bool, out: str) -> None:
    """Measure the second step of a user's own training."""
    make = _load(script)
    with memlab.dry_run() if dry else nullcontext(), _progress() as progress:
        task = progress.add_task("building", total=3)
        step, model, optimizer = _parts(_run_users(make, script), script)
        progress.update(task, advance=1, description="first step")
        _run_users(step, script)
        progress.update(task, advance=1, description="measured step")
        trace = _run_users(
            lambda: memlab.measure(step, model=model, optimizer=optimizer, device=device), script
        )
        progress.update(task, advance=1)
    console.print(str(trace), markup=False)
    _write([Row(script, trace)], script, Path(out))


# ------------------------------------------------------------------ measuring


def _rows(setting: Setting, chosen: dict[str, Technique], dry: bool) -> list[Row]:
    rows: list[Row] = []
    plain_gradients: list[torch.Tensor] = []
    with _progress() as progress:
        task = progress.add_task("", total=len(chosen) * (1 if dry else 2))
        for name, technique in chosen.items():
            progress.update(task, description=f"{name}: bytes")
            with _one_sentence_when_memory_is_out(name, setting):
                trace, gradients = _metered(setting, technique, dry)
                row = Row(name, trace)
                progress.advance(task)
                if not dry:
                    plain_gradients = plain_gradients or gradients
                    progress.update(task, description=f"{name}: time")
                    row = replace(
                        row,
                        time_ratio=_time_ratio(setting, technique, chosen["plain"]) if rows else 1,
                        gradient_difference=_largest_difference(gradients, plain_gradients),
                    )
                    progress.advance(task)
            rows.append(row)
    return rows


def _metered(setting: Setting, technique: Technique, dry: bool) -> tuple[Trace, list[torch.Tensor]]:
    """The trace of the second step, and the gradients of the first, which is of equal weights."""
    with memlab.dry_run() if dry else nullcontext():
        training = build(setting, technique)
        training.step()
        gradients = [] if dry else list(_copied_gradients(training))
        return _measure(training), gradients


def _copied_gradients(training: Training) -> Iterator[torch.Tensor]:
    """Copies: to hold the gradients themselves would keep them alive in the measured step."""
    for parameter in training.model.parameters():
        yield parameter.grad.to("cpu", torch.float32, copy=True)


def _measure(training: Training) -> Trace:
    return memlab.measure(training.step, model=training.model, optimizer=training.optimizer)


def _time_ratio(setting: Setting, technique: Technique, plain: Technique) -> float:
    """The median of side-by-side ratios: technique, plain, technique, plain, …"""
    ours, theirs = build(setting, technique), build(setting, plain)
    ours.step(), theirs.step()
    pairs = [(_seconds(ours.step), _seconds(theirs.step)) for _ in range(TIMED_PAIRS)]
    return statistics.median(our / their for our, their in pairs)


def _seconds(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def _largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((our - their).abs().max().item() for our, their in pairs)


# ------------------------------------------------------------------ what the user gave


def _device(given: str | None) -> str:
    """The device asked for, or the accelerator that is there, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    present = ["cpu"] + ([accelerator.type] if accelerator else [])
    if given is None:
        return present[-1]
    if given not in present:
        raise UsageError(
            f"got --device {given}; this machine has {' and '.join(present)} "
            f"(memlab doctor says more), and --dry-run needs no device"
        )
    return given


def _setting(
    model: str | None, batch: int | None, seq_len: int | None, dtype: str | None, device: str
) -> Setting:
    setting = replace(SUITABLE.get(device, SUITABLE["accelerator"]), device=device)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"got --dtype {dtype}; choose one of {', '.join(DTYPES)}")
    if model is not None and model in PRESETS and seq_len is None:
        setting = replace(setting, seq_len=min(setting.seq_len, PRESETS[model].seq_len))
    given = {
        "model": model,
        "batch": batch,
        "seq_len": seq_len,
        "dtype": None if dtype is None else DTYPES[dtype],
    }
    return replace(setting, **{name: value for name, value in given.items() if value is not None})


def _chosen_techniques(names: list[str] | None) -> dict[str, Technique]:
    unknown = set(names or ()) - set(TECHNIQUES)
    if unknown:
        raise UsageError(
            f"got --technique {', '.join(sorted(unknown))}; choose from {', '.join(TECHNIQUES)}"
        )
    return {n: t for n, t in TECHNIQUES.items() if not names or n == "plain" or n in names}


def _load(script: str) -> Callable[[], Any]:
    """The function that `path.py:name` names."""
    path, _, name = script.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UsageError(
            f"got --script {script!r}; give a file and a function in it, such as train.py:build"
        )
    if not Path(path).is_file():
        raise UsageError(f"got --script {script!r}; there is no file {path!r} here")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    _run_users(lambda: spec.loader.exec_module(module), script)
    if not callable(getattr(module, name, None)):
        raise UsageError(f"got --script {script!r}; {path} has no function {name!r}")
    return getattr(module, name)


def _parts(built: Any, script: str) -> tuple[Any, Any, Any]:
    if not isinstance(built, tuple) or len(built) != 3 or not callable(built[0]):
        raise UsageError(
            f"{script} returned {type(built).__name__}; wanted (step, model, optimizer), where "
            f"step() is one training step, and model and optimizer may be None"
        )
    return built


def _run_users(function: Callable[[], Any], script: str) -> Any:
    """Run the user's code; what it raises becomes one line that names their own line."""
    try:
        return function()
    except UsageError:
        raise
    except Exception as error:
        path = Path(script.rpartition(":")[0]).resolve()
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
        where = f"{path.name}:{lines[-1]}" if lines else script
        raise UsageError(f"{where} raised {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------ what the user sees


def _headline(setting: Setting, dry: bool) -> str:
    parameters = PRESETS[setting.model].parameters
    how = "dry run, nothing is computed" if dry else _machine(setting.device)
    return f"{setting} ({parameters:,} parameters; {how})"


def _machine(device: str) -> str:
    if device == "cpu":
        return f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return f"{name}, torch {torch.__version__}"


def _table(rows: list[Row]) -> Table:
    columns = {
        "technique": [row.name for row in rows],
        "peak": [format_bytes(row.trace.peak_bytes) for row in rows],
        "saved": [_saved(row.trace, rows[0].trace) for row in rows],
        "reserved": [_or_blank(row.trace.reserved_bytes, format_bytes) for row in rows],
        "peak in": [row.trace.peak_phase for row in rows],
        "time": [_or_blank(row.time_ratio, "{:.2f} ×".format) for row in rows],
        "gradients off by": [_or_blank(row.gradient_difference, "{:.1e}".format) for row in rows],
    }
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    for title in shown:
        table.add_column(title, justify="left" if title == "technique" else "right", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    return table


def _saved(trace: Trace, first: Trace) -> str:
    return "" if trace is first else f"{1 - trace.peak_bytes / first.peak_bytes:+.1%}"


def _or_blank(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@contextmanager
def _one_sentence_when_memory_is_out(name: str, setting: Setting) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UsageError(
            f"{name} ran out of memory on {setting.device} with {setting}; try --batch "
            f"{max(1, setting.batch // 2)}, or --dry-run, which needs none"
        ) from error


def _write(rows: list[Row], title: str, folder: Path) -> None:
    """Pictures (where matplotlib is installed) and numbers, each written beside and renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write_numbers(rows, title, folder / "measure.json")]
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no pictures: pip install matplotlib draws them")
    else:
        from memlab import plot

        pictures = {"measure-timeline.png": plot.timeline(rows[0].trace, title=title)}
        if len(rows) > 1:
            traces = {row.name: row.trace for row in rows}
            pictures["measure.png"] = plot.breakdown(traces, title=title)
        for name, figure in pictures.items():
            plot.save(figure, folder / name)
            written.append(folder / name)
    console.print("written: " + ", ".join(str(path) for path in written), soft_wrap=True)


def _write_numbers(rows: list[Row], title: str, path: Path) -> Path:
    numbers = {
        "what": title,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [
            {
                "technique": row.name,
                "peak_bytes": row.trace.peak_bytes,
                "at_peak": row.trace.at_peak,
                "memory": asdict(row.trace.memory),
                "time_ratio": row.time_ratio,
                "gradient_difference": row.gradient_difference,
            }
            for row in rows
        ],
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(numbers, indent=1) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path
