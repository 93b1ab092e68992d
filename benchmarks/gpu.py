"""Every check and measurement of memlab that needs a GPU, in one command.

    python benchmarks/gpu.py                      all sections
    python benchmarks/gpu.py --section predict    one of them
    python benchmarks/gpu.py --quick              small models, to see that it runs

    predict    sixty training steps, predicted on the CPU and recorded on the GPU
    allocator  the allocator's histories under its settings, replayed decision by decision
    meter      a metered step against the allocator's own figures, for three dozen kinds of step
    day 1 …    what the days show to a reader who has no GPU
    time       what precision and checkpointing cost, alone on the card
    optim      8-bit optimizers beside bitsandbytes' kernels, where those are installed
    fused      attention by tiles and the loss by chunks, beside torch's
    kernels    memlab's Triton kernels beside production's, and beside the card's limits
    offload    what offloading to the host and to the disk saves, and what of it is waited for
    ema        two averages on the GPU, on the host and on the disk: bytes, and an update's time
    planner    two dozen recipes, predicted and taken; 7 billion weights trained under 24 GB
    verdict    "fits" and "out of memory", tried a little above and below the predicted edge

A section is a row of SECTIONS: a function that is given a Bench and returns a Report.

Every step runs in a process of its own, several at a time: bytes are measured, not times. Markdown
goes to standard output, a line for each step to standard error. After every step, the numbers so
far are in benchmarks/results/<device>.json and the recorded histories in
tests/recordings/<device>.jsonl.gz, where tests find them; with --out, both are in that folder, to
be put there later. What is killed is not lost, and one section run again replaces itself only.

With --from tests/recordings/<device>.jsonl.gz, `predict` and `allocator` ask the archive in the
GPU's place: what a change of memlab does to its predictions is seen on any machine.

Without a GPU it rehearses: everything is predicted, what would be recorded is made from the
prediction itself, every check agrees with itself, and nothing is written unless --out says where.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

# A rehearsal runs memlab's kernels in Triton's interpreter, which is chosen before Triton is
# imported; many a module of torch does that.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from common import Report, heading, parser, set_environment
from gpu_sections import (
    allocator_section,
    archive,
    day_sections,
    ema_section,
    meter_section,
    offload_section,
    peers_sections,
    planner_section,
    predict_section,
    verdict_section,
)
from gpu_sections.bench import Bench
from gpu_sections.day_jobs import SIDE_BY_SIDE
from gpu_sections.jobs import Archive, Here, Job, Processes, answer, at_once, hidden_gpu, serve

REHEARSAL = (
    "so this is a rehearsal: what a GPU would record is made from the prediction itself, and the "
    "numbers say that the script runs, and nothing else"
)


class Section(NamedTuple):
    """A row of the table of sections."""

    summary: str
    run: Callable[[Bench], Report]


# In the order in which they run: those that record histories, to be asked again later, first.
SECTIONS: dict[str, Section] = {
    "predict": Section("predicted on the CPU, recorded on the GPU", predict_section.run),
    "allocator": Section("recorded histories, replayed", allocator_section.run),
    "meter": Section("the metered step against the allocator's figures", meter_section.run),
    "day 1": Section("what Day 1 shows without a GPU", day_sections.first_day),
    "day 2": Section("what Day 2 shows without a GPU", day_sections.second_day),
    **{
        day: Section(f"what {day.capitalize()} shows without a GPU", day_sections.compared)
        for day in SIDE_BY_SIDE
    },
    "time": Section("what precision and checkpointing cost in time", day_sections.timed),
    "optim": Section("8-bit optimizers beside bitsandbytes' kernels", peers_sections.optimizers),
    "fused": Section("attention and the loss by parts, beside torch's", peers_sections.fused),
    "kernels": Section("Triton kernels, beside production's", peers_sections.kernels),
    "offload": Section("state, weights and activations elsewhere", offload_section.run),
    "ema": Section("two averages beside a training", ema_section.run),
    "planner": Section("what recipes take, and a large model under a cap", planner_section.run),
    "verdict": Section("fits or not, around the predicted edge", verdict_section.run),
}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--section",
        action="append",
        metavar="NAME",
        help="run this section only (may be given more than once)",
    )
    made.add_argument("--list", action="store_true", help="name the sections and end")
    made.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where results and recordings are written"
    )
    made.add_argument(
        "--quick", action="store_true", help="small models, to see that it runs; use with --out"
    )
    made.add_argument(
        "--from",
        type=Path,
        metavar="ARCHIVE",
        dest="archive",
        help="hold predictions against histories that a GPU recorded before; writes nothing",
    )
    made.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)  # for a process of ours
    return made.parse_args(words)


def complaint(names: Sequence[str]) -> str | None:
    """One sentence about the first name that no section has."""
    unknown = [name for name in names if name not in SECTIONS]
    known = ", ".join(map(repr, SECTIONS))
    return f"there is no section {unknown[0]!r}; choose from {known}" if unknown else None


def run(bench: Bench, names: Sequence[str]) -> bool:
    """Each section, printed and kept as soon as it is done; whether none broke off."""
    is_whole = True
    if bench.keeps:
        archive.tidy(bench.archive_path)  # a run that was killed may have left half a line
    print(heading("On a GPU", bench.facts["device"]), flush=True)
    for name in names:
        bench.section = name
        bench.say(SECTIONS[name].summary)
        try:
            report = SECTIONS[name].run(bench)
        except Exception as error:  # the other sections are worth having
            is_whole = False
            bench.say(f"broke off: {type(error).__name__}: {error}")
            continue
        bench.keep(kept(report))
        print(f"\n## {name}\n\n{report}", flush=True)
    if bench.keeps:
        archive.tidy(bench.archive_path)
    return is_whole


def kept(report: Report) -> dict:
    """What goes into the results: flat numbers as they are, rows with the summary before them."""
    return {"summary": report.sentence, **report.plain} if "rows" in report.plain else report.plain


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    if given.serve:
        warnings.simplefilter("ignore")  # some kinds of step do what torch warns of
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
            print("stopped; what was measured until now is written", file=sys.stderr)
            return 130


def measure(names: Sequence[str], given: argparse.Namespace, environment: dict[str, str]) -> int:
    """Run the sections on the GPU, or rehearse them: 0 as well, for `make bench` runs every script
    on every machine and a machine without a GPU is nobody's mistake. 1 if a section broke off."""
    if given.archive:
        return hold_against(names, given.archive)
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


def hold_against(names: Sequence[str], path: Path) -> int:
    """Run the sections on what a GPU recorded before."""
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
