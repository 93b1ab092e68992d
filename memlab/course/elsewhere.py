"""GPU measurements stored in the repository, for readers without a GPU.

The environment variable MEMLAB_RESULTS selects another folder of results. `make solutions` uses a
folder with the results of a made-up GPU, to test that no other output depends on them.
"""

import json
import os
from pathlib import Path
from typing import Any

from memlab.course import days
from memlab.units import format_bytes

RESULTS = Path(os.environ.get("MEMLAB_RESULTS") or days.folder("benchmarks/results"))
_PROVENANCE = ("device", "torch", "python", "memlab", "date")


def stored_on_a_gpu(section: str, folder: Path = RESULTS) -> str:
    """Format each GPU's results for a section of benchmarks/gpu.py, with device, versions and date;
    or one sentence if there are none."""
    found = [_labelled(entry) for entry in _entries(section, folder)]
    what = section if section.startswith("day ") else f"“{section}” (benchmarks/gpu.py)"
    return "\n\n".join(found) or f"No GPU here, and no GPU's measurement of {what} is stored yet."


def time_on_a_gpu(technique: str, folder: Path = RESULTS) -> str:
    """Format each GPU's time of a technique's step relative to the plain one, for a verdict that
    needs a GPU."""
    entries = [entry for entry in _entries("time", folder) if technique in entry]
    found = [f"{entry[technique]:.2f} × on {entry['device']}" for entry in entries]
    return f"measured: {', '.join(found)}" if found else "not measured: no GPU"


def _entries(section: str, folder: Path) -> list[dict[str, Any]]:
    """Return the section's entry from each file of results that has it."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [results["gpu"][section] for results in files if section in results.get("gpu", {})]


def _labelled(entry: dict[str, Any]) -> str:
    software = ", ".join(f"{name} {entry[name]}" for name in _PROVENANCE[1:-1])
    label = f"Not your machine: measured on {entry['device']}, {software}, {entry['date']}"
    numbers = {name: value for name, value in entry.items() if name not in _PROVENANCE}
    return "\n".join([label, *(f"  {_line(name, value)}" for name, value in numbers.items())])


def _line(name: str, value: Any) -> str:
    return f"{name.removesuffix('_bytes').replace('_', ' ')}: {_text(name, value)}"


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
