"""`memlab run --real` under torchrun: when a rank dies, one sentence says why."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GPIPE = Path(__file__).parents[2] / "benchmarks" / "parallel" / "gpipe.py"
pytestmark = pytest.mark.distributed


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dies", "sentences"),
    [
        ("pass", []),
        (
            "raise ValueError('no data left')",
            ["rank 1 of 2: train.py:18 raised ValueError: no data left"],
        ),
        (
            "__import__('os').kill(__import__('os').getpid(), 9)",
            [  # whether it fails in a collective first, or torchrun ends it
                "rank 0 of 2: (train.py:21 waited for another rank, which has ended without a "
                "message|interrupted, or another rank has ended without a message)"
            ],
        ),
    ],
)
def test_a_rank_that_dies_ends_all_with_one_sentence(tmp_path, dies, sentences):
    script, loop = tmp_path / "train.py", "for n in range(3):"
    text = GPIPE.read_text("utf-8").replace("for _ in range(3):", loop)
    body = f"{loop}\n    if n == 1 and rank == 1:\n        {dies}"
    script.write_text(text.replace(loop, body))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    found = subprocess.run(
        [*torchrun, "-m", "memlab", "run", "--real", "train.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (found.returncode != 0) == bool(sentences)
    printed = [line.partition("memlab: ")[2] for line in found.stderr.splitlines()]
    said = [line for line in printed if line.startswith("rank ")]
    assert len(said) == len(sentences)
    assert all(re.match(start, line) for line, start in zip(said, sentences, strict=True))
