"""Predictions beside memory that other people measured on real GPUs.

    python benchmarks/evidence.py                 all rows
    python benchmarks/evidence.py --only VGG16    rows with this in their names

Each row of benchmarks/evidence/*.json is a step or a training that somebody measured, with its
source, licence and versions. It is rebuilt from its description (benchmarks/evidence_steps) and
predicted with this torch; no GPU is used and no weights are downloaded. `make evidence` first
installs the package versions that were measured.

Prints Markdown. If all rows ran, writes docs/EVIDENCE.md, images/evidence.png, the errors that
`memlab.predict` reports (memlab/configs/evidence.json) and benchmarks/results/<machine>.json.
Takes about eight minutes on two cores.
"""

import sys
from collections.abc import Sequence

from common import parser_with_results, progress, set_environment
from evidence_steps import page, verdicts
from evidence_steps.measurements import measurements
from evidence_steps.predictions import missing_packages, predictions


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_with_results(__doc__ or "")
    parser.add_argument("--only", default="", help="only rows with this in their names")
    options = parser.parse_args(arguments)
    chosen = [m for m in measurements() if options.only in m.name]
    if not chosen:
        return _refuse(f"no row has {options.only!r} in its name")
    tried = [] if options.only else verdicts.batches()
    packages = {m.packages for m in chosen} | ({verdicts.PACKAGES} if tried else set())
    if missing := missing_packages(packages):
        return _refuse(f"these rows need other versions of {', '.join(missing)}; run make evidence")
    set_environment()
    with progress() as bar:
        rows = list(bar.track(predictions(chosen), len(chosen), description="predicting"))
        judged = list(bar.track(verdicts.verdicts(tried), len(tried), description="judging"))
    print(page.markdown(rows, judged))
    if not options.only:
        page.write(rows, judged, options.results)
    return 0


def _refuse(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
