"""The meter on trial: is it exact, is a dry run the same, and what does either cost?

    exactness   every kind of step that the tests know, unwatched, then under memlab's meter and
                under torch's MemTracker. The truth is the CPU's allocator itself, as the profiler
                records it: what was alive when the step began, and every block since
    dry-run     the same kinds on fake tensors: equal to the real step, event by event? MemTracker
                beside it, under FakeTensorMode
    cost        a metered step against a plain one, and a 7B step without memory against the same
                on bare fake tensors and under MemTracker; each in a process of its own, in turn

MemTracker gets all that its documentation asks for: the model, the optimizer and every other
tensor that is alive, registered before it starts, and one call of the step. What it refuses
because the model is called more than once, it gets again with its statistics reset before each
call, as its error message advises.

A peak is the most bytes alive at one moment, parameters and all. A kernel's scratch, freed before
the operator returns, is no operator's result, so no observer of operators can see it: the peak
with it stands in a column of its own.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence

import torch
from common import Report, heading, parser_of_sections, reports, set_environment
from meter_sections.costs import cost, serve
from meter_sections.dry_runs import dry_runs
from meter_sections.exactness import exactness
from meter_sections.plans import FULL, QUICK, Plan, Size
from rich.progress import Progress

SECTIONS: dict[str, Callable[[Plan, Progress], Report]] = {
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
        serve(name, Size(preset, int(batch), int(seq_len), dtype))
        return 0
    warnings.simplefilter("ignore")  # some kinds do what torch warns of
    torch.set_num_threads(1)  # the threads of a kernel decide how much scratch it takes
    plan, results = (QUICK, None) if given.quick else (FULL, given.results)
    try:
        found = dict(reports("meter", SECTIONS, given.section or SECTIONS, plan, results))
    except KeyboardInterrupt:
        print("stopped; sections that were done are written", file=sys.stderr)
        return 130
    print(heading("The meter"), end="\n\n")
    print(" ".join(report.sentence for report in found.values()))
    for name, report in found.items():
        print(f"\n## {name}\n\n{report.markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
