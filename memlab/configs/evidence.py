"""How far predictions were from memory that was measured on GPUs, by kind of step.

`python benchmarks/evidence.py` writes the figures (evidence.json) together with EVIDENCE.md, which
has every row.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "evidence.json"


@dataclass(frozen=True)
class ErrorRange:
    """The errors of some rows: predicted / measured − 1."""

    rows: int
    lowest: float
    highest: float

    def __str__(self) -> str:
        if self.lowest == self.highest == 0:
            return f"exact in all {self.rows} steps"
        return (
            f"up to {-self.lowest:.2%} too low and {self.highest:.2%} too high in {self.rows} steps"
        )


@cache
def _written() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def errors(kind: str) -> dict[str, ErrorRange]:
    """Return the errors of "allocated" and "reserved" memory for a kind of step."""
    return {figure: ErrorRange(**of) for figure, of in _written()["kinds"][kind].items() if of}


def confirmed_kernels() -> frozenset[str]:
    """Return the kernels of the rows whose prediction is within 1 % of the measurement."""
    return frozenset(_written()["kernels"])


def accuracy(kind: str) -> str:
    """Return one sentence about the measured steps of a kind."""
    if kind not in _written()["kinds"]:
        return f"no step of this kind ({kind}) has been measured on a GPU yet"
    figures = "; ".join(f"{figure} {of}" for figure, of in errors(kind).items())
    return f"compared with GPU measurements, {kind}: {figures}; see EVIDENCE.md"


def doubt(notes: Collection[str]) -> tuple[str, float] | None:
    """Return the kind of step that a prediction's notes name, and how many times its prediction
    such a step reserved at most; None if the margin covers it."""
    for kind in _written()["kinds"]:
        if accuracy(kind) in notes:
            lowest = errors(kind)["reserved"].lowest
            return (kind, 1 / (1 + lowest)) if -lowest > margin_share() else None
    return None


def margin_share() -> float:
    """Return the part of a card to leave free: the most that reserved memory of transformers was
    above its prediction, rounded up to a tenth of a percent."""
    return math.ceil(-errors("transformers")["reserved"].lowest * 1000) / 1000
