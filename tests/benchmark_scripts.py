"""The benchmarks as modules: scripts that import each other by name, from a folder on no path."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = str(Path(__file__).parents[1] / "benchmarks")


def script(name: str) -> ModuleType:
    """The module of `benchmarks/<name>.py`; of a part of one, such as "evidence_steps.own"."""
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    return importlib.import_module(name)
