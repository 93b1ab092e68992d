"""Write the report of an out-of-memory error that the site shows: `example_report.py FILE`.

A small GPT with eager attention trains on a simulated card with too little memory. The script and
the recorder come from the tests (tests/explain).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "explain")]

import torch  # noqa: E402
from cuda_recorder import peak_bytes, record  # noqa: E402
from failing_scripts import GPT, train  # noqa: E402

from memlab.explain import explain_source  # noqa: E402
from memlab.explain.reading import of_data  # noqa: E402
from memlab.explain.report_html import report  # noqa: E402

SHARE = 0.8  # of the memory that the script reserves at most


def long_sequence() -> None:
    train(GPT(layers=6, width=128, vocab=2048, eager=True), B=2, T=512, vocab=2048)


def main(target: Path) -> None:
    torch.manual_seed(0)
    snapshot, _ = record(long_sequence, capacity=int(SHARE * peak_bytes(long_sequence)))
    shorten_paths(snapshot)
    target.write_text(report(explain_source(of_data(snapshot)), "snapshot.pickle"), "utf-8")


def shorten_paths(data: object) -> None:
    """Make every frame's file relative: to the repository, or to the folder of packages."""
    if isinstance(data, dict):
        if "filename" in data:
            name = data["filename"].replace(f"{ROOT}/", "")
            data["filename"] = name.rpartition("site-packages/")[2]
        for value in data.values():
            shorten_paths(value)
    elif isinstance(data, list):
        for value in data:
            shorten_paths(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
