"""Comparisons with other packages' kernels: 8-bit optimizers, attention, loss."""

from typing import Any

from common import SectionReport, table

from memlab.units import format_bytes

from .bench import Bench
from .fused_jobs import PROBLEMS, TORCH
from .optim_jobs import PAIRS

Found = dict[str, dict[str, Any]]  # answers by name


def optimizers(bench: Bench) -> SectionReport:
    """Compare 8-bit optimizers with bitsandbytes' CUDA kernels."""
    found = bench.in_turn("optim", PAIRS)
    times = _listed(found, "time / bitsandbytes")
    return _report(f"Time of memlab's step / bitsandbytes: {times}.", found)


def fused(bench: Bench) -> SectionReport:
    """Compare tiled attention and chunked loss with torch's and with unfused versions."""
    found = bench.in_turn("fused", PROBLEMS)
    times = _listed(found, f"time / {TORCH}")
    return _report(f"Time of memlab / torch: {times}.", found)


def _listed(found: Found, fact: str) -> str:
    return ", ".join(f"{name} {a[fact]:.2f} ×" for name, a in found.items() if fact in a)


def _report(sentence: str, found: Found) -> SectionReport:
    names = dict.fromkeys(fact for answer in found.values() for fact in answer)
    lines = [(fact, *(text(answer.get(fact), fact) for answer in found.values())) for fact in names]
    plain = {
        f"{name}, {fact}": value for name, answer in found.items() for fact, value in answer.items()
    }
    return SectionReport(sentence, table(("", *found), lines), plain)


def text(value: Any, fact: str) -> str:
    if value is None:
        return ""
    if fact.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
