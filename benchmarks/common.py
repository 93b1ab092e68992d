"""Shared by the benchmarks: machine description, tables, time ratios and results on disk.

Every script prints Markdown on standard output and writes `results/<machine>.json`, with one entry
for each section. A later run replaces the sections that it ran and keeps the others.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import memlab
from memlab.internals.cycles import no_cycle_collection
from memlab.internals.files import write_beside

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
THREADS = "2"  # for timed kernels, unless the user sets another count: makes machines comparable

# Waiting threads must not spin in the processes that we start. The other settings silence the
# profiler and the model libraries, which would print between our lines.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "KINETO_LOG_LEVEL": "6",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


def set_environment() -> None:
    """Set environment variables that the user has not set.

    Call this before the first profile and before importing a model library.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


# ------------------------------------------------------------------ machine and tables


def cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """Return a file name for this CPU, such as `cpu-x86_64-2-cores`, without the host name."""
    return f"cpu-{platform.machine() or 'unknown'}-{cores()}-cores"


def circumstances(device: str | None = None) -> dict[str, str]:
    """Return device (default: this CPU), versions and date, to store with a result."""
    return {
        "device": device or f"CPU ({platform.machine()}, {cores()} cores)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memlab": memlab.__version__,
        "date": date.today().isoformat(),
    }


def heading(title: str, device: str | None = None) -> str:
    """Return a Markdown heading with device, versions and date."""
    words = circumstances(device)
    software = ", ".join(f"{name} {words[name]}" for name in ("torch", "python", "memlab"))
    return f"# {title}: {words['device']}, {software}, {words['date']}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with the first column aligned left and the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def progress() -> Progress:
    """Return a transient progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


# ------------------------------------------------------------------ timing


class Spread(NamedTuple):
    """Median and quartiles of several measurements."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """Return the quartiles; a single value is repeated three times."""
    if len(values) == 1:
        return Spread(*values * 3)
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def side_by_side(
    runs: dict[str, Callable[[], float]], rounds: Iterable[int]
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round.

    The runs take turns, in reverse order every other round, so that other load on the machine and
    changes of its clock speed affect all runs alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in rounds:
        for name in list(runs) if number % 2 == 0 else reversed(runs):
            seconds[name].append(runs[name]())
    return seconds


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Wrap `run` in a function that returns its wall-clock seconds."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def core_seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of `run`, with Python's cycle collector switched off."""
    with no_cycle_collection():
        start = time.process_time()
        run()
        return time.process_time() - start


def compared(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, Spread]:
    """Return the time ratio of the first run to each other run, after one warm-up of each."""
    for run in runs.values():
        run()
    first, *others = runs
    seconds = side_by_side(runs, range(rounds))
    return {name: ratios(seconds[first], seconds[name]) for name in others}


def ratios(of: Sequence[float], to: Sequence[float]) -> Spread:
    """Return the spread of the time ratios of two runs, round by round."""
    return spread([a / b for a, b in zip(of, to, strict=True)])


# ------------------------------------------------------------------ subprocesses


class Runner:
    """A subprocess that runs a task once for each input line and answers with a number.

    It sends its first answer when it is ready.
    """

    def __init__(self, *arguments: str) -> None:
        self.peak_bytes = 0  # of anonymous memory; stays 0 if the system does not report it
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": THREADS, **os.environ},
            start_new_session=True,  # only the parent handles Ctrl-C
            text=True,
        )

    def run(self) -> float:
        """Run the task once and return its answer."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> float:
        """Wait for the next answer and sample the memory every 20 ms.

        A peak between two samples is missed.
        """
        while not select.select([self._process.stdout], [], [], 0.02)[0]:
            self.peak_bytes = max(self.peak_bytes, self.bytes_now())
        self.peak_bytes = max(self.peak_bytes, self.bytes_now())
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args)} ended without an answer")
        return float(line)

    def bytes_now(self) -> int:
        """Return the current anonymous memory of the subprocess."""
        return anonymous_bytes(self._process.pid)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._process.kill()
        self._process.communicate()


def anonymous_bytes(process: int) -> int:
    """Return the resident memory of a process without file pages; 0 if the system lacks /proc.

    File pages hold the code and data of libraries. The peak resident set size includes them.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.M)
    return int(found[1]) * 2**10 if found else 0


# ------------------------------------------------------------------ arguments


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser whose help shows the script's docstring unchanged."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser_with_results(doc: str, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with --results, and with --rounds if it gets their default."""
    made = parser(doc)
    made.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="rounds of each timing")
    return made


def parser_of_sections(doc: str, sections: Iterable[str], quick: str) -> argparse.ArgumentParser:
    """Return a parser with --section and --quick; `quick` describes the small setting."""
    made = parser_with_results(doc)
    made.add_argument(
        "--section",
        action="append",
        choices=list(sections),
        help="run this section only (may be given more than once)",
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help=f"{quick}, to check that the script runs; writes nothing",
    )
    return made


@cache
def kinds_of_steps() -> ModuleType:
    """Import `tests/metering/kinds.py`, the kinds of training step that the tests measure."""
    spec = importlib.util.spec_from_file_location("kinds", ROOT / "tests/metering/kinds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ results


class SectionReport(NamedTuple):
    """The output of a section."""

    sentence: str  # summary
    markdown: str
    plain: dict[str, Any]  # content of the results file

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{self.markdown}"


def reports(
    benchmark: str,
    sections: Mapping[str, Callable[[Any, Progress], SectionReport]],
    names: Iterable[str],
    plan: Any,
    results: Path | None,
) -> Iterator[tuple[str, SectionReport]]:
    """Run the named sections and yield their reports.

    Each report is written to the folder `results` as soon as it is ready; None writes nothing.
    """
    with progress() as bar:
        for name in names:
            report = sections[name](plan, bar)
            if results is not None:
                save(results, benchmark, name, {"summary": report.sentence, **report.plain})
            yield name, report


def print_reports(
    title: str,
    benchmark: str,
    sections: Mapping[str, Callable[[Any, Progress], SectionReport]],
    given: argparse.Namespace,
    full: Any,
    quick: Any,
) -> None:
    """Run the sections that `parser_of_sections` parsed, and print their reports as Markdown."""
    print(heading(title))
    plan, results = (quick, None) if given.quick else (full, given.results)
    for name, report in reports(benchmark, sections, given.section or sections, plan, results):
        print(f"\n## {name}\n\n{report}")


def save(folder: Path, benchmark: str, section: str, content: Mapping[str, Any]) -> Path:
    """Write a section to the results of this machine and keep the other sections."""
    return put(folder / f"{machine()}.json", benchmark, section, {**circumstances(), **content})


def put(path: Path, benchmark: str, section: str, entry: Mapping[str, Any]) -> Path:
    """Replace a section in a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results.setdefault(benchmark, {})[section] = entry
    text = json.dumps(results, indent=1, ensure_ascii=False)
    with write_beside(path) as beside:
        beside.write_text(text + "\n", encoding="utf-8")
    return path
