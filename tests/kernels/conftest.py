"""Run kernels in Triton's interpreter on a CPU, or on a GPU if there is one and no interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="memlab.kernels needs Triton")

PREFACE = """
import json, torch
from memlab.kernels.compiling import SHARED_BYTES, compiled_for

def report(made):
    print(json.dumps([
        {"name": m.name, "registers": m.registers, "spilled": m.spilled_bytes,
         "shared": m.shared_bytes, "capability": m.capability, "ptx": m.ptx} for m in made
    ]))
"""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def compiled() -> Callable[[str], list[dict[str, Any]]]:
    """Run a snippet that ends in `report(made)` with the compiler instead of the interpreter."""

    def run(snippet: str) -> list[dict[str, Any]]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-c", PREFACE + snippet],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
