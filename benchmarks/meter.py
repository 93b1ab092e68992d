"""The meter: exactness, dry runs and overhead, compared with torch's MemTracker.

    exactness   every kind of step in the tests: alone, under memlab's meter and under MemTracker.
                The reference is the profiler's record of the CPU allocator
    dry-run     the same kinds on fake tensors, compared with the real step event by event;
                MemTracker runs under FakeTensorMode
    cost        a measured step against a plain one, and a 7B dry run against bare fake tensors and
                MemTracker; each in its own process, in turn

MemTracker is used as its documentation says: the model, the optimizer and every other live tensor
are registered before it starts, and the step runs once. If it refuses a step that calls the model
more than once, the step runs again with a reset of its statistics before each call, as its error
message advises.

A peak includes parameters. A kernel's scratch memory is freed before the operator returns, so a
dispatch mode cannot observe it; the peak with scratch has its own column.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence

import torch
from common import SectionReport, heading, parser_of_sections, reports, set_environment
from meter_sections.costs import cost, serve
from meter_sections.dry_runs import dry_runs
from meter_sections.exactness import exactness
from meter_sections.plans import FULL, QUICK, MeterPlan, ModelSize
from rich.progress import Progress

SECTIONS: dict[str, Callable[[MeterPlan, Progress], SectionReport]] = {
    "exactness": exactness,
    "dry-run": dry_runs,
    "cost": cost,
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of_sections(__doc__, SECTIONS, quick="a few kinds and a tiny model")
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)  # for a Runner
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    if given.serve:
        name, preset, batch, seq_len, dtype = given.serve
        serve(name, ModelSize(preset, int(batch), int(seq_len), dtype))
        return 0
    warnings.simplefilter("ignore")  # some kinds trigger torch's warnings
    torch.set_num_threads(1)  # a kernel's scratch depends on its threads
    plan, results = (QUICK, None) if given.quick else (FULL, given.results)
    try:
        found = dict(reports("meter", SECTIONS, given.section or SECTIONS, plan, results))
    except KeyboardInterrupt:
        print("stopped; finished sections are written", file=sys.stderr)
        return 130
    print(heading("The meter"), end="\n\n")
    print(" ".join(report.sentence for report in found.values()))
    for name, report in found.items():
        print(f"\n## {name}\n\n{report.markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
