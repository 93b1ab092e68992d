"""Measure, dry-run and predict sixty trainings taken from their packages' documentation.

    pip install -e .[trainings]     # with builds of torchvision that match your torch
    python benchmarks/trainings/run.py [--only gcn --only lora] [--list]

The models are tiny with random weights, and nothing is downloaded. Each training runs in its own
process. The script takes four peaks of its second step (or of a whole `train()`, `fit()` or
`learn()` if the package owns the loop):

    recorded    torch's profiler record of the CPU allocator, model and optimizer included
    measured    memlab, plus the kernels' scratch from the record. Scratch is left out if the
                recorded and the measured step differ (random choices, threads of a backend)
    dry run     compared with the measured step without scratch
    predicted   for CUDA. Only checks that the prediction runs: there is no GPU to compare with

If a dry run refuses a size that depends on values, it is repeated with `assume="most"`, and the row
is marked as an upper bound. Prints Markdown and writes `benchmarks/results/<machine>.json` if every
training ran.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import heading, parser_with_results, progress, save, set_environment, table

import memlab
from memlab.metering.profiler_recording import record, with_workspace
from memlab.units import format_bytes

HERE = Path(__file__).parent
MODULES = ("plain_torch", "language_models", "images", "others")
LIMIT_S = 300  # time limit of one training with all four runs
TOLERANCE = 0.0005  # for the summary
_ANSWER = "answer: "
Training = Callable[[], tuple[Callable[[], Any], torch.nn.Module | None, Any]]


class TrainingRow(NamedTuple):
    """Peaks in bytes, or error messages."""

    module: str
    name: str
    recorded: int | str = ""
    measured: int | str = ""
    traced: int | str = ""  # measured without scratch
    dry: int | str = ""
    predicted: int | str = ""
    assumed: bool = False
    seconds: float = 0.0

    def difference(self, column: str) -> float | None:
        """Return the relative error: measured to recorded, dry run to measured."""
        peak = getattr(self, column)
        truth = self.traced if column == "dry" else self.recorded
        if isinstance(peak, str) or isinstance(truth, str) or not truth:
            return None
        return peak / truth - 1


# ------------------------------------------------------------------ one training


def built(training: Training) -> tuple[Callable[[], Any], torch.nn.Module | None, Any]:
    random.seed(0)
    torch.manual_seed(0)
    return training()


def peaks_of(training: Training) -> dict[str, Any]:
    """Return the four peaks, or error messages in their place."""
    found: dict[str, Any] = {}
    recording = None
    with contextlib.suppress(Exception):  # imports may create constants
        built(training)
    with _errors_in(found, "recorded"):
        recording = recorded(training)
        found["recorded"] = recording.bytes_at_start + recording.peak_bytes
    gc.collect()
    with _errors_in(found, "measured"):
        trace = measured(training)
        found["measured"] = found["traced"] = trace.peak_bytes
        with contextlib.suppress(ValueError):  # the steps differ
            if recording is not None:
                found["measured"] = with_workspace(trace, recording).peak_bytes
    gc.collect()
    for column, run in (("dry", dry), ("predicted", predicted)):
        with _errors_in(found, column):
            found[column], assumed = with_assumption_if_needed(run, training)
            found["assumed"] = found.get("assumed", False) or assumed
        gc.collect()
    return found


@contextlib.contextmanager
def _errors_in(found: dict[str, Any], column: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        found[column] = f"{type(error).__name__}: {first}"[:300]


def recorded(training: Training) -> Any:
    parts = []

    def first_step() -> None:
        parts.extend(built(training))
        parts[0]()

    return record(lambda: parts[0](), warm_up=first_step)


def measured(training: Training) -> memlab.Trace:
    step, model, optimizer = built(training)
    step()
    return memlab.measure(step, model=model, optimizer=_plain(optimizer))


def dry(training: Training, assume: str | None) -> int:
    with memlab.dry_run(assume=assume):
        return measured(training).peak_bytes


def predicted(training: Training, assume: str | None) -> int:
    def build() -> tuple[Callable[[], Any], torch.nn.Module | None, Any]:
        step, model, optimizer = built(training)
        return step, model, _plain(optimizer)

    return memlab.predict(build, assume=assume).peak_bytes


def _plain(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def with_assumption_if_needed(
    run: Callable[[Training, str | None], int], training: Training
) -> tuple[int, bool]:
    try:
        return run(training, None), False
    except ValueError as error:
        if "--assume" not in str(error):
            raise
    return run(training, "most"), True


# ------------------------------------------------------------------ all of them


def trainings(module: str) -> list[str]:
    """Return the names of a module's trainings without importing it."""
    lines = (HERE / "cases" / f"{module}.py").read_text(encoding="utf-8").splitlines()
    names = [line[4:].partition("(")[0] for line in lines if line.startswith("def ")]
    return [name for name in names if not name.startswith("_")]


def in_subprocess(module: str, name: str) -> TrainingRow:
    """Run a training in its own process and return its row."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--run", f"{module}:{name}"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
        if answers:
            found = json.loads(answers[-1].removeprefix(_ANSWER))
        else:
            found = {"recorded": (done.stderr.strip().splitlines() or ["ended"])[-1][:300]}
    except subprocess.TimeoutExpired:
        found = {"recorded": f"took more than {LIMIT_S} s"}
    return TrainingRow(module, name, **found, seconds=round(time.monotonic() - start, 1))


def main() -> int:
    set_environment()
    options = arguments()
    if options.run:
        return run_one(options.run)
    chosen = [
        (module, name)
        for module in MODULES
        for name in trainings(module)
        if options.only is None or any(part in name for part in options.only)
    ]
    if options.list:
        print("\n".join(f"{module}: {name}" for module, name in chosen))
        return 0
    rows = []
    with progress() as bar:
        for module, name in bar.track(chosen, description="trainings"):
            rows.append(in_subprocess(module, name))
    print(report(rows))
    if options.only is None:
        save(options.results, "trainings", "trainings", {"rows": [row._asdict() for row in rows]})
    return 0


def run_one(given: str) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # from the packages
    module, _, name = given.partition(":")
    sys.path.insert(0, str(HERE / "cases"))
    found = peaks_of(getattr(importlib.import_module(module), name))
    print(_ANSWER + json.dumps(found), flush=True)
    os._exit(0)  # do not wait for process groups and workers


def arguments() -> argparse.Namespace:
    parser = parser_with_results(__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="trainings whose name contains this"
    )
    parser.add_argument("--list", action="store_true", help="list the trainings and exit")
    parser.add_argument("--run", metavar="MODULE:NAME", help=argparse.SUPPRESS)
    return parser.parse_args()


# ------------------------------------------------------------------ the report


def report(rows: list[TrainingRow]) -> str:
    header = ("training", "recorded", "measured", "dry run", "predicted for CUDA")
    title = heading("Trainings, against the allocator's own record")
    return f"{title}\n\n{summary(rows)}\n\n{table(header, map(cells, rows))}"


def summary(rows: list[TrainingRow]) -> str:
    sentences = []
    for column, words in (("measured", "measured"), ("dry", "run dry")):
        differences = [row.difference(column) for row in rows if not row.assumed]
        known = [abs(difference) for difference in differences if difference is not None]
        within = sum(difference <= TOLERANCE for difference in known)
        exact = sum(difference == 0 for difference in known)
        sentences.append(
            f"{words}: {exact} of {len(known)} to the byte, {within} within {TOLERANCE:.2%}"
        )
    predicted = sum(isinstance(row.predicted, int) for row in rows)
    assumed = sum(row.assumed for row in rows)
    return "; ".join(
        [*sentences, f"{predicted} of {len(rows)} can be predicted, {assumed} with an assumption"]
    )


def cells(row: TrainingRow) -> tuple[str, ...]:
    mark = " (upper bound)" if row.assumed else ""
    return (
        f"{row.name}{mark}",
        row.recorded if isinstance(row.recorded, str) else format_bytes(row.recorded),
        _beside(row, "measured"),
        _beside(row, "dry"),
        row.predicted if isinstance(row.predicted, str) else format_bytes(row.predicted),
    )


def _beside(row: TrainingRow, column: str) -> str:
    difference = row.difference(column)
    if difference is None:
        return str(getattr(row, column))
    return "exact" if difference == 0 else f"{difference:+.2%}"


if __name__ == "__main__":
    sys.exit(main())
