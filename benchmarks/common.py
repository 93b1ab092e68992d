"""What the benchmarks share: this machine in words, tables, ratios, and results on disk.

Every script prints Markdown on standard output and writes `results/<machine>.json`, one entry for
each of its sections, so that a README can quote either and a later run replaces one section only.
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
from memlab.internals.files import write_beside
from memlab.metering.cycles import no_cycle_collection

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
THREADS = "2"  # of a kernel that is timed, unless the user says otherwise: machines compare

# Threads that wait must not spin, in the processes that we start; and what the profiler and
# libraries of models write beside the point must not stand between the lines of ours.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "KINETO_LOG_LEVEL": "6",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


def set_environment() -> None:
    """To be called first: before the first profile, and before a library of models is imported.
    What the user has set stays."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


# ------------------------------------------------------------------ words


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """The CPU as a file name: `cpu-x86_64-2-cores`. No host name: results are published."""
    return f"cpu-{platform.machine() or 'unknown'}-{cores()}-cores"


def circumstances(device: str | None = None) -> dict[str, str]:
    """What a number holds for: on that device, or the CPU."""
    return {
        "device": device or f"CPU ({platform.machine()}, {cores()} cores)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memlab": memlab.__version__,
        "date": date.today().isoformat(),
    }


def heading(title: str, device: str | None = None) -> str:
    """A Markdown heading with device, versions and date in it."""
    words = circumstances(device)
    software = ", ".join(f"{name} {words[name]}" for name in ("torch", "python", "memlab"))
    return f"# {title}: {words['device']}, {software}, {words['date']}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def progress() -> Progress:
    """A bar on standard error, gone when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


# ------------------------------------------------------------------ side by side


class Spread(NamedTuple):
    """The median of several measurements, and the quartiles around it."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """The quartiles; of a single value, that value three times."""
    if len(values) == 1:
        return Spread(*values * 3)
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def side_by_side(
    runs: dict[str, Callable[[], float]], rounds: Iterable[int]
) -> dict[str, list[float]]:
    """The seconds that each run says it took, in each round.

    The runs take turns, every other round backwards: what else the machine does meanwhile, and
    whether it speeds up or slows down, hits all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in rounds:
        for name in list(runs) if number % 2 == 0 else reversed(runs):
            seconds[name].append(runs[name]())
    return seconds


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """A run that says how long it took."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def core_seconds(run: Callable[[], object]) -> float:
    """How long one core works on it, while no cycle of Python objects is searched for; what other
    processes do meanwhile does not count."""
    with no_cycle_collection():
        start = time.process_time()
        run()
        return time.process_time() - start


def ratios(of: Sequence[float], to: Sequence[float]) -> Spread:
    """How many times as long one run took as another, round by round."""
    return spread([a / b for a, b in zip(of, to, strict=True)])


# ------------------------------------------------------------------ processes of their own


class Runner:
    """A process that runs something once for each line it is sent, and answers with a number.

    Its first answer comes when it is ready.
    """

    def __init__(self, *arguments: str) -> None:
        self.peak_bytes = 0  # of its anonymous memory; 0 where nothing tells
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": THREADS, **os.environ},
            start_new_session=True,  # Ctrl-C is ours to handle
            text=True,
        )

    def run(self) -> float:
        """Let it run once."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> float:
        """Wait for the next answer, and look at its memory meanwhile: what is over within the 20 ms
        from look to look shows in what is left."""
        while not select.select([self._process.stdout], [], [], 0.02)[0]:
            self.peak_bytes = max(self.peak_bytes, self.bytes_now())
        self.peak_bytes = max(self.peak_bytes, self.bytes_now())
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args)} ended without an answer")
        return float(line)

    def bytes_now(self) -> int:
        """Its anonymous memory at this moment."""
        return anonymous_bytes(self._process.pid)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._process.kill()
        self._process.communicate()


def anonymous_bytes(process: int) -> int:
    """What a process has in memory that no file backs; 0 where the system doesn't tell.

    Code and data of libraries are pages of files, which a peak of resident memory counts too.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.M)
    return int(found[1]) * 2**10 if found else 0


# ------------------------------------------------------------------ what a script is asked


def parser(doc: str) -> argparse.ArgumentParser:
    """Shows a script's docstring as it is; the script adds its options."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser_with_results(doc: str) -> argparse.ArgumentParser:
    made = parser(doc)
    made.add_argument("--results", type=Path, default=RESULTS, help="where numbers are written")
    return made


def parser_of_sections(doc: str, sections: Iterable[str], quick: str) -> argparse.ArgumentParser:
    """For a script in sections, which runs all of them or some; `quick` says what is small then."""
    made = parser_with_results(doc)
    made.add_argument(
        "--section",
        action="append",
        choices=list(sections),
        help="run this section only (may be given more than once)",
    )
    made.add_argument(
        "--quick", action="store_true", help=f"{quick}, to see that it runs; writes nothing"
    )
    return made


@cache
def kinds_of_steps() -> ModuleType:
    """`tests/metering/kinds.py`: what the tests hold the meter against."""
    spec = importlib.util.spec_from_file_location("kinds", ROOT / "tests/metering/kinds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ results


class Report(NamedTuple):
    """What a section has to say."""

    sentence: str  # for the summary
    markdown: str
    plain: dict[str, Any]  # for the results

    def __str__(self) -> str:
        return f"{self.sentence}\n\n{self.markdown}"


def reports(
    benchmark: str,
    sections: Mapping[str, Callable[[Any, Progress], Report]],
    names: Iterable[str],
    plan: Any,
    results: Path | None,
) -> Iterator[tuple[str, Report]]:
    """What the sections of these names say of the plan, each written as soon as it is done; with no
    folder for results, nothing is."""
    with progress() as bar:
        for name in names:
            report = sections[name](plan, bar)
            if results is not None:
                save(results, benchmark, name, {"summary": report.sentence, **report.plain})
            yield name, report


def save(folder: Path, benchmark: str, section: str, content: Mapping[str, Any]) -> Path:
    """Put a section into the results of this machine; the other sections stay as they are."""
    return put(folder / f"{machine()}.json", benchmark, section, {**circumstances(), **content})


def put(path: Path, benchmark: str, section: str, entry: Mapping[str, Any]) -> Path:
    """Put a section into a file of results, in the place of what was there of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results.setdefault(benchmark, {})[section] = entry
    text = json.dumps(results, indent=1, ensure_ascii=False)
    with write_beside(path) as beside:
        beside.write_text(text + "\n", encoding="utf-8")
    return path
