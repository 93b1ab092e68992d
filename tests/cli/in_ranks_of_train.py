"""Code that the tests of `memlab train --zero` run in real ranks, in one launch."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch

from memlab.cli import main
from memlab.train import Setting, build_rank, combined, measured_rank
from memlab.zero import processes

PEAKS = (  # techniques, dtype
    ("plain", "float32"),
    ("accumulation+checkpointing+master-weights", "bfloat16"),
)


def everything(commands: list[list[str]]) -> dict[str, Any]:
    """Run the commands and meter the peaks, with the other ranks."""
    return {
        "commands": [run(words) for words in commands],
        "peaks": peaks(),
    }


def run(words: list[str]) -> tuple[int, str, str]:
    """Run `memlab` and return its status, output and error output."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["memlab", *words]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as exit_:
            status = exit_.code or 0
    return status, out.getvalue(), err.getvalue()


def setting_of(dtype: str) -> Setting:
    return Setting("tiny", batch=2, seq_len=16, dtype=getattr(torch, dtype))


def peaks() -> dict[Any, dict[str, int]]:
    """Return each stage's peak by category in the second step of a real rank."""
    found = {}
    with processes.joined("gloo", timeout=60):
        for names, dtype in PEAKS:
            for stage in (1, 2, 3):
                training = build_rank(setting_of(dtype), combined(names), stage)
                training.step()
                found[names, stage] = measured_rank(training).at_peak
    return found
