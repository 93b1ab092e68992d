"""Run every check and measurement of memlab that needs a GPU.

    python benchmarks/gpu.py                      all sections
    python benchmarks/gpu.py --section predict    one section
    python benchmarks/gpu.py --quick              small models, to check that the script runs

    predict    sixty training steps, predicted on the CPU and recorded on the GPU
    allocator  recorded allocator histories under several settings, replayed by the simulation
    day 1 …    the figures that the course's days show without a GPU
    time       time of mixed precision, of checkpointing, and of clearing the cache after each step
    optim      8-bit optimizers against bitsandbytes' kernels (if installed)
    fused      tiled attention and chunked loss against torch's
    ema        two averages on the GPU, the host and the disk: memory, and time of an update

A section is a row of SECTIONS: a function from a Bench to a SectionReport.

Every step runs in its own process, several at a time, except for timings. Markdown goes to
standard output, progress to standard error. After every step the script writes the results to
benchmarks/results/<device>.json and the recorded histories to tests/recordings/<device>.jsonl.gz,
or both to the folder given as --out. An interrupted run keeps its results. Running a section again
replaces only that section.

With --from tests/recordings/<device>.jsonl.gz, `predict` and `allocator` compare with stored
recordings. This shows on any machine how a change of memlab affects its predictions.

Without a GPU the script rehearses: it derives the "recordings" from the predictions, so every check
agrees. A rehearsal writes nothing without --out.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from common import SectionReport, heading, parser, set_environment
from gpu_sections import (
    allocator_section,
    archive,
    day_sections,
    ema_section,
    peers_sections,
    predict_section,
)
from gpu_sections.bench import Bench
from gpu_sections.day_jobs import SIDE_BY_SIDE
from gpu_sections.jobs import Archive, Here, Job, Processes, answer, at_once, hidden_gpu, serve

REHEARSAL = (
    "so this is a rehearsal: the recordings come from the predictions, and the numbers only show "
    "that the script runs"
)


class GpuSection(NamedTuple):
    """A row of `SECTIONS`."""

    summary: str
    run: Callable[[Bench], SectionReport]


# In the order of execution. Sections that record histories come first.
SECTIONS: dict[str, GpuSection] = {
    "predict": GpuSection(
        "steps predicted on the CPU and recorded on the GPU", predict_section.run
    ),
    "allocator": GpuSection("replay of recorded histories", allocator_section.run),
    "day 1": GpuSection("figures of Day 1", day_sections.first_day),
    "day 2": GpuSection("figures of Day 2", day_sections.second_day),
    **{
        day: GpuSection(f"figures of {day.capitalize()}", day_sections.compared)
        for day in SIDE_BY_SIDE
    },
    "time": GpuSection(
        "time of mixed precision, checkpointing, and clearing the cache", day_sections.timed
    ),
    "optim": GpuSection(
        "8-bit optimizers against bitsandbytes' kernels", peers_sections.optimizers
    ),
    "fused": GpuSection("tiled attention and chunked loss against torch's", peers_sections.fused),
    "ema": GpuSection("two averages during training", ema_section.run),
}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--section",
        action="append",
        metavar="NAME",
        help="run this section only (may be given more than once)",
    )
    made.add_argument("--list", action="store_true", help="list the sections and exit")
    made.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for results and recordings"
    )
    made.add_argument(
        "--quick", action="store_true", help="small models, to check that it runs; use with --out"
    )
    made.add_argument(
        "--from",
        type=Path,
        metavar="ARCHIVE",
        dest="archive",
        help="compare predictions with stored recordings of a GPU; writes nothing",
    )
    made.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)  # for a subprocess
    return made.parse_args(words)


def complaint(names: Sequence[str]) -> str | None:
    """Return an error message for the first unknown section, or None."""
    unknown = [name for name in names if name not in SECTIONS]
    known = ", ".join(map(repr, SECTIONS))
    return f"there is no section {unknown[0]!r}; choose from {known}" if unknown else None


def run(bench: Bench, names: Sequence[str]) -> bool:
    """Run, print and store each section; return whether all of them succeeded."""
    is_whole = True
    if bench.keeps:
        archive.tidy(bench.archive_path)  # a killed run may have left half a line
    print(heading("On a GPU", bench.facts["device"]), flush=True)
    for name in names:
        bench.section = name
        bench.say(SECTIONS[name].summary)
        try:
            report = SECTIONS[name].run(bench)
        except Exception as error:  # continue with the other sections
            is_whole = False
            bench.say(f"failed: {type(error).__name__}: {error}")
            continue
        bench.keep(kept(report))
        print(f"\n## {name}\n\n{report}", flush=True)
    if bench.keeps:
        archive.tidy(bench.archive_path)
    return is_whole


def kept(report: SectionReport) -> dict:
    """Return the content for the results file; add the summary where there are rows."""
    return {"summary": report.sentence, **report.plain} if "rows" in report.plain else report.plain


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    if given.serve:
        warnings.simplefilter("ignore")  # some kinds of step trigger torch's warnings
        serve(*given.serve)
        return 0
    if given.list:
        print("\n".join(f"{name:11}{section.summary}" for name, section in SECTIONS.items()))
        return 0
    names = given.section or list(SECTIONS)
    if sentence := complaint(names):
        complain(sentence)
        return 2
    with hidden_gpu() as environment, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return measure(names, given, environment)
        except KeyboardInterrupt:
            print("stopped; finished measurements are written", file=sys.stderr)
            return 130


def measure(names: Sequence[str], given: argparse.Namespace, environment: dict[str, str]) -> int:
    """Run the sections on the GPU, or rehearse them; return 1 if a section failed, else 0.

    A rehearsal returns 0 too, because `make bench` runs every script on every machine.
    """
    if given.archive:
        return compare_with_archive(names, given.archive)
    with Processes(environment) as one:
        facts = one.submit(Job("facts")).result()
    rehearsal = "failure" in facts
    if rehearsal:
        print(f"{facts['failure']}, {REHEARSAL}", file=sys.stderr)
        facts = answer(Job("facts", rehearsal=True))
    keeps = given.out is not None or not (rehearsal or given.quick)
    with Here() if rehearsal else Processes(environment, at_once(facts["total_bytes"])) as server:
        bench = Bench(facts, server, given.quick, rehearsal, given.out, keeps)
        return 0 if run(bench, names) else 1


def compare_with_archive(names: Sequence[str], path: Path) -> int:
    """Run the sections on stored recordings."""
    recordings = archive.read(path)
    if not recordings:
        complain(f"{path} holds no recordings; give one of tests/recordings")
        return 2
    with Archive(recordings) as server:
        facts, small = server.latest["facts"], server.latest["small"]
        bench = Bench(facts, server, small, rehearsal=False, out=None, keeps=False)
        return 0 if run(bench, names) else 1


def complain(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
